"""What users bring on a real cluster: the scripts of docs/how-to/own_script.md, and a reader and a task of their own.

The scripts run as the page has them, out of a card's memory, then of the host's, and are right after all; what makes
the card and the host small is put before their first line. So is a loop of two tasks that srun starts on two nodes.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.docs.blocks import Page
from tests.real.test_strangers_scripts import checked_out, first_step
from tests.stages.reader_project import CODE, SPLITS, write_spectrum
from tests.testkit.cluster import Cluster
from tests.testkit.command import Command
from tests.testkit.project import settle
from tests.testkit.slurm_runs import PIPELINE, Run, make_project
from tests.training.own_loops.test_ranks_of_others import SCRIPT, undisturbed

pytestmark = pytest.mark.slurm

PAGE = Page(Path(__file__).resolve().parents[3] / "docs/how-to/own_script.md")
NAMES = {"a plain loop with flags": ("train.py", 600), "Lightning": ("fit.py", 1600)}  # and the memory asked for
SMALL = """\
import os
import torch

forward = torch.nn.Linear.forward


def limited(self, batch):
    if len(batch) > 4:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 24 GiB")
    if not os.path.exists("ate"):
        open("ate", "w").close()
        print(len(b"x" * ({asked} << 20)))
    return forward(self, batch)


torch.nn.Linear.forward = limited
"""


OF_A_READER: dict[str, Any] = {
    "data__source": "reader",
    "data__reader": "spectra:Spectra",
    "data__options": {"scale": 1.0},
    "train__task": "spectra:Sum",
    "train__effective_batch": 2,
    "train__micro_batch": 1,
    "train__epochs": 2,
    "train__log_every": 1,
}


@pytest.fixture(scope="module")
def begun(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Submit both; they run at once."""
    cluster.settle()
    place = tmp_path_factory.mktemp("own")
    return {kind: _submitted(place / name[:-3], name, asked) for kind, (name, asked) in NAMES.items()}


def _submitted(folder: Path, name: str, asked_mib: int) -> Run:
    command = f"{shlex.quote(sys.executable)} {name} --batch_size {{micro_batch}} --accumulate {{accumulation}}"
    project = make_project(
        folder,
        items=0,
        train__command=f"{command} --out {{output}}",
        train__effective_batch=16,
        cluster__train__mem=f"{asked_mib}MiB",
    )
    (folder / name).write_text(SMALL.replace("{asked}", str(asked_mib)) + PAGE.files()[name])
    return project.submits("train", "--only")


def weights(path: Path) -> torch.Tensor:
    return torch.cat([one.flatten() for one in torch.load(path).values()])


@pytest.mark.nightly
@pytest.mark.parametrize("kind", NAMES)
def test_a_script_ends_right_though_its_card_and_its_host_were_too_small(
    kind: str, begun: dict[str, Run], tmp_path: Path
) -> None:
    run = begun[kind]
    run.ends()
    causes = [one["cause"] for one in run.stage("train")["failures"]]
    assert causes == ["gpu_oom", "gpu_oom", "host_oom"], "16 and 8 items did not fit; 4 did, but then the host did not"
    (made,) = (run.project.folder / "models").glob("script-*/weights.pt")
    (tmp_path / "own.py").write_text(PAGE.files()[NAMES[kind][0]])
    whole = [sys.executable, "own.py", "--batch_size", "16", "--accumulate", "1", "--out", "."]
    subprocess.run(whole, cwd=tmp_path, check=True, capture_output=True)
    torch.testing.assert_close(weights(made), weights(tmp_path / "weights.pt"), rtol=1e-12, atol=1e-12)


SLOW = """\
import os, sys, time

if sys.orig_argv[1:2] == ["train.py"] and os.environ["PIPELINE_ATTEMPT"] == "1":
    from torch.optim import AdamW

    step = AdamW.step
    AdamW.step = lambda *given: (time.sleep(2), step(*given))
"""


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("healthy")
def test_a_script_that_ignores_the_warning_resumes_from_its_own_checkpoint_with_more_time(tmp_path: Path) -> None:
    folder = checked_out(tmp_path / "nanoGPT")
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow/sitecustomize.py").write_text(SLOW)
    command = yaml.safe_load(PAGE.files()["resume.yaml"])["train"]["command"]
    project = make_project(
        folder,
        items=0,
        train__command=f"{command} config/tiny.py --max_iters=60",
        train__effective_batch=8,
        cluster__train__time="1m",
        cluster__train__mem="900MiB",
        cluster__slurm__setup=[f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={tmp_path / 'slow'}"],
    )
    run = project.submits("train", "--only")
    run.ends()
    (failure,) = run.stage("train")["failures"]
    assert (failure["cause"], failure["ask"]["time_s"]) == ("timeout", 60)
    assert 10 <= first_step(project, 2) < 60
    assert list((folder / "models").glob("script-*/ckpt.pt"))


def two_tasks(folder: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a script as two tasks on two nodes, as one types it."""
    (folder / "script.py").write_text(script)
    start = ["srun", "--nodes=2", "--ntasks=2", "--mem=600M", "--time=5", sys.executable, "script.py"]
    root = str(Path(__file__).resolve().parents[3])
    return subprocess.run(
        [*start, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.nightly
def test_two_tasks_of_srun_make_the_steps_of_one_process_through_an_oom(healthy: Cluster, tmp_path: Path) -> None:
    done = two_tasks(tmp_path, SCRIPT, "plain", str(tmp_path), "2")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == pytest.approx(undisturbed(), abs=1e-10)
    assert not list(tmp_path.glob("ranks-*")), "where they met is gone"


HOPELESS = """\
import torch

from pipeline.api import Governed

model = torch.nn.Linear(2, 1)
governed = Governed(model, torch.optim.SGD(model.parameters(), 0.1))


def loss_of(items):
    if governed.ranks.rank == 1:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return model(torch.stack(items)).sum(), len(items)


governed.step(list(torch.randn(4, 2)), loss_of)
"""


@pytest.mark.nightly
def test_what_one_task_of_srun_cannot_survive_ends_both_with_the_reason(healthy: Cluster, tmp_path: Path) -> None:
    done = two_tasks(tmp_path, HOPELESS)
    assert done.returncode != 0
    assert "item 0 of the step does not fit alone: CUDA out of memory" in done.stderr
    assert "rank 1 of 2" in done.stderr


EATER = """\
import os, sys, time
from pathlib import Path

size, rank = int(sys.argv[1]), int(os.environ["SLURM_PROCID"])
taken = b"x" * ((size if rank else 1) << 23)  # of one rank alone it grows
Path(sys.argv[2], f"{size}-{rank}").touch()
while not Path(sys.argv[2], f"{size}-{1 - rank}").exists():  # as a collective waits
    time.sleep(0.1)
"""


def test_the_batch_of_a_script_that_srun_starts_is_what_its_smallest_task_holds(
    healthy: Cluster, pipeline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("eat.py").write_text(EATER)
    start = ["srun", "--nodes=2", "--ntasks=2", "--mem=200M", "--time=5", "--kill-on-bad-exit", sys.executable]
    done = pipeline("tune", "--max", "64", "--json", "--", *start, "eat.py", "{micro_batch}", str(tmp_path))
    assert done.code == 0, done.err
    assert "64  " in done.err, "the kernel ended a task of the first try"
    assert 16 <= json.loads(done.out)["micro_batch"] < 25, "8 MiB an item, and Python's own"
    assert not list(tmp_path.glob("64-1"))


UNLIKE = """\
import os, sys

import torch

size, rank = int(sys.argv[1]), int(os.environ["SLURM_PROCID"])
with open(f"tried-{rank}", "a") as file:
    print(size, os.environ["SLURMD_NODENAME"], file=file)
meeting = f"file://{os.getcwd()}/meeting-{os.environ['SLURM_JOB_ID']}"
torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
model = torch.nn.Linear(4, 1)
for step in range(1, 4):
    if size > (48, 20)[rank]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 24 GiB")
    model(torch.ones(size, 4)).sum().backward()
    torch.distributed.all_reduce(model.weight.grad)
    if rank == 0:
        print('pipeline: {"step": %d}' % step, flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("healthy")
def test_tuning_over_two_nodes_of_srun_finds_what_the_smaller_rank_holds(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNLIKE)
    start = ["srun", "--nodes=2", "--ntasks=2", "--mem=600M", "--time=5", "--kill-on-bad-exit=1", sys.executable]
    tune = [PIPELINE, "tune", "--max", "64", "--divides", "64", "--json", "--", *start, "script.py", "{micro_batch}"]
    done = subprocess.run(tune, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["micro_batch"] == 16
    assert "32  [rank1]: torch.OutOfMemoryError: CUDA out of memory" in done.stderr, "which rank 1 alone has said"
    tried = [[line.split() for line in (tmp_path / f"tried-{rank}").read_text().splitlines()] for rank in (0, 1)]
    assert [[size for size, _ in of_rank] for of_rank in tried] == [["64", "32", "16"]] * 2
    assert all(first[1] != second[1] for first, second in zip(*tried, strict=True)), "they are on different nodes"
    remembered = subprocess.run(tune, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(remembered.stdout) == {**json.loads(done.stdout), "remembered": True}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("healthy")
def test_what_a_reader_of_the_users_own_gives_is_scanned_and_trained_on(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", 0, **OF_A_READER)
    (project.folder / "spectra.py").write_text(CODE)
    for number, split in enumerate(SPLITS):
        write_spectrum(project.folder, number, split)
    write_spectrum(project.folder, len(SPLITS), "train")
    settle(project.folder / "data")
    run = project.submits("train")
    run.ends()
    scan, train = run.stage("scan"), run.stage("train")
    assert (scan["failures"], train["failures"]) == ([], [])
    assert scan["census"]["splits"] == {"train": 7, "test": 2}
    steps = 2 * 4  # epochs, each of 7 items by 2
    assert (train["items_done"], train["census"]["steps"]) == (steps, steps)
    (model,) = (project.folder / "models").iterdir()
    figures = [json.loads(line) for line in (model / "figures.jsonl").read_text().splitlines()]
    assert figures[-1]["step"] == steps
    again = project.types("submit", "--stage", "train", "--executor", "slurm", "--dry-run", "--json")
    assert again.code == 0, again.err
    counts = [stage["counts"] for stage in json.loads(again.out)["stages"]]
    assert [(count["cached"], count["missing"]) for count in counts] == [(1, 0), (steps, 0)]
