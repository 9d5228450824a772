"""Training by ranks on two nodes of a real cluster: whatever dies or runs out, the trained model has the same bits.

All runs go by the same recipe in a project of their own; those that need no hand are begun together.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.training.ranks.rank_monitor import BEAT_S
from tests.slurm.test_by_hand import ROOT
from tests.testkit.cluster import Cluster
from tests.testkit.slurm_runs import SOON_S, Project, Run, at_night, make_project, until
from tests.testkit.trained import weights

pytestmark = [pytest.mark.slurm, pytest.mark.fault, pytest.mark.timeout(900)]

NODES, STEPS, EPOCHS = 2, 60, 20
EATEN_BYTES = 1100 << 20
ACT, PLACE = "TEST_ACT", "TEST_PLACE"
TASK = f'''\
"""The reference task, which eats memory at a step, or whose first start is slow or is held, if it is told to."""

import os
import sys
import time

from pipeline.tasks.interface import Interface

ACT, PLACE = os.environ.get("{ACT}", ""), os.environ.get("{PLACE}", "")
IS_RANK = any("pipeline.engine.worker" in word for word in sys.orig_argv)  # else it plans
IS_SECOND = bool(os.environ.get("SLURM_RESTART_COUNT")) or "2" == dict(zip(sys.argv, sys.argv[1:])).get("--attempt")
IS_FIRST = IS_RANK and not IS_SECOND
IS_AGAIN = os.environ.get("SLURM_STEP_ID", "0") != "0"
calls = 0


def hold():
    """Tell that this rank is here, and stay until it is killed or let go."""
    with open(f"{{PLACE}}/rank-{{os.environ['SLURM_PROCID']}}", "w") as file:
        file.write(str(os.getpid()))
    while not os.path.exists(f"{{PLACE}}/go"):
        time.sleep(0.02)


class Held(Interface):
    def loss(self, model, batch):
        global calls
        calls += model.training
        if IS_FIRST and ACT == "slow":
            time.sleep(1.5)
        elif IS_RANK and ACT == "eats" and calls == 20:
            os.urandom({EATEN_BYTES})
        elif IS_FIRST and not IS_AGAIN and ACT.isdecimal() and calls == int(ACT):
            hold()
        elif IS_FIRST and ACT == "dies" and calls == (3 if IS_AGAIN else 20) and os.environ["SLURM_PROCID"] == "1":
            os.kill(os.getpid(), 9)  # the second time before a step that is new
        return super().loss(model, batch)
'''
SETTINGS: dict[str, Any] = {
    "embed__weights": "esm2_small.pt",
    "train__task": "held:Held",
    "train__options": {"embedding_dim": 32, "width": 16, "layers": 2, "pair_width": 8, "dropout": 0.2},
    "train__effective_batch": 4,
    "train__epochs": EPOCHS,
    "train__ema": 0.9,
    "train__schedule": {"kind": "linear", "warmup": 5},
    "train__checkpoints": {"every": 7},
    "train__log_every": 1,
    "cluster__train__nodes": NODES,
    "cluster__train__ranks": 1,
}


@pytest.fixture(scope="module")
def project(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Return a project of which all is done that comes before training."""
    cluster.settle()
    project = make_project(tmp_path_factory.mktemp("training") / "project", 12, **SETTINGS)
    (project.folder / "held.py").write_text(TASK)
    shape = ("--layers", "2", "--dim", "32", "--heads", "2", "--out", "esm2_small.pt")
    assert project.types("weights", "synth", *shape).code == 0
    project.submits("graph").ends()
    assert project.types("submit", "--stage", "train", "--executor", "slurm", "--dry-run").code == 0  # the plan is kept
    return project


def trains(project: Project, name: str, act: str = "", **settings: str) -> Run:
    """Submit a training in a copy of a project; in a setting's name, __ stands for the dot."""
    copy = Project(project.folder.with_name(name))
    shutil.copytree(project.folder, copy.folder)
    place = copy.folder / "place"
    place.mkdir()
    given = {"cluster__slurm__setup": json.dumps([f"export {ACT}={act} {PLACE}={place}"]), **settings}
    return copy.submits("train", *(f"--set={key.replace('__', '.')}={value}" for key, value in given.items()))


def lets_go(run: Run) -> None:
    """Let its ranks go on."""
    (run.project.folder / "place" / "go").touch()


def held(run: Run) -> list[int]:
    """Wait until every rank is held, and return their processes."""
    places = [run.project.folder / "place" / f"rank-{rank}" for rank in range(NODES)]
    until("all ranks to be held", lambda: all(one.exists() and one.read_text() for one in places), SOON_S, run.story)
    return [int(one.read_text()) for one in places]


def model(run: Run) -> Path:
    """Return the folder of a trained model."""
    (folder,) = (run.project.folder / "models").iterdir()
    return folder


def steps_of(run: Run) -> list[int]:
    """Return the steps of which figures are kept."""
    lines = (model(run) / "figures.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.fixture(scope="module")
def begun(project: Project, request: pytest.FixtureRequest) -> dict[str, Run]:
    """Begin at once what needs no hand: in peace, with a time limit that comes first, with too little memory."""
    runs = {"peace": trains(project, "peace")}
    if at_night(request):
        runs["limit"] = trains(project, "limit", "slow", cluster__train__time="1m")
        runs["memory"] = trains(project, "memory", "eats", cluster__train__mem="1GiB")
    return runs


@pytest.fixture(scope="module")
def peace(begun: dict[str, Run]) -> dict[str, bytes]:
    """Return what comes out where nothing goes wrong."""
    begun["peace"].ends()
    return weights(model(begun["peace"]), STEPS)


def failures(run: Run) -> list[str]:
    """Return of what attempts failed."""
    return [one["cause"] for one in run.stage("train")["failures"]]


@pytest.mark.nightly
def test_ranks_on_two_nodes_train_a_model(begun: dict[str, Run], peace: dict[str, bytes]) -> None:
    run = begun["peace"]
    assert failures(run) == []
    stage = run.stage("train")
    assert (stage["items"], stage["items_done"], stage["census"]["steps"]) == (STEPS, STEPS, STEPS)
    assert steps_of(run) == [*range(1, STEPS + 1)]
    assert {name.partition(".")[0] for name in peace} == {"model", "optimizer", "ema"}
    logs = "".join(path.read_text() for path in run.folder.logs.glob("*.err"))
    assert "0: epoch 20" in logs
    assert run.reported()["stages"][-1]["items_done"] == STEPS


@pytest.fixture(scope="module")
def killed(peace: dict[str, bytes], project: Project) -> Run:
    """Return a run of which the second rank was killed in the middle of a step."""
    run = trains(project, "killed", "20")
    _, second = held(run)
    os.kill(second, signal.SIGKILL)
    lets_go(run)
    run.ends()
    return run


def went_on_in_its_job(run: Run) -> dict[str, Any]:
    """Return why the ranks of a training started again, once, in the only job that was submitted."""
    stage = run.stage("train")
    assert (failures(run), len(stage["jobs"]), stage["items_done"]) == ([], 1, STEPS)
    assert steps_of(run) == [*range(1, STEPS + 1)]
    (restart,) = stage["restarts"]
    return dict(restart)


def until_next_step(run: Run, after: float) -> float:
    """Return how many seconds after a moment the next step was made."""
    events = [json.loads(line) for line in (run.folder.events / "train-000000-0.jsonl").read_text().splitlines()]
    return min(event["at"] for event in events if event["kind"] == "progress" and event["at"] > after + 1) - after


def test_a_rank_that_is_killed_costs_a_restart_in_the_same_job_and_changes_no_bit(
    killed: Run, peace: dict[str, bytes]
) -> None:
    restart = went_on_in_its_job(killed)
    assert (restart["cause"], 14 <= restart["done"] < 20) == ("crashed", True)
    assert re.search(r"rank 1 on \S*n\d: .*SIGKILL", restart["reason"]), restart["reason"]
    assert weights(model(killed), STEPS) == peace
    assert "rank 1 on" in killed.project.types("status", killed.name).said
    print(f"restarted in its job: next step after {until_next_step(killed, restart['ended_at']):.1f} s")  # noqa: T201 - a figure of the docs


@pytest.mark.nightly
def test_a_rank_that_is_stopped_costs_a_restart_in_the_same_job(project: Project, peace: dict[str, bytes]) -> None:
    run = trains(project, "stopped", "20", train__hang="15s")
    _, second = held(run)
    time.sleep(3 * BEAT_S)  # the other has heard that it no longer saves, which may take far longer than 15 s
    os.kill(second, signal.SIGSTOP)
    lets_go(run)
    run.ends()
    assert went_on_in_its_job(run)["cause"] == "crashed"
    assert weights(model(run), STEPS) == peace


@pytest.mark.nightly
def test_a_rank_that_dies_again_before_a_new_step_gets_a_new_job(project: Project, peace: dict[str, bytes]) -> None:
    run = trains(project, "dies", "dies")
    run.ends()
    stage = run.stage("train")
    (restart,), (failure,) = stage["restarts"], stage["failures"]
    assert (failure["done"] < restart["done"], len(stage["jobs"])) == (True, 2)
    is_left_out = bool(stage["left_out"])  # an item that was in work both times
    assert is_left_out is not (weights(model(run), STEPS) == peace)
    print(f"restarted in its job: next step after {until_next_step(run, restart['ended_at']):.1f} s")  # noqa: T201 - a figure of the docs
    print(f"in a new job: next step after {until_next_step(run, failure['ended_at']):.1f} s")  # noqa: T201 - a figure of the docs


@pytest.mark.nightly
def test_the_rank_that_died_has_its_lines_in_the_log(killed: Run) -> None:
    assert "task 1: Killed" in killed.project.types("logs", killed.name).said


@pytest.mark.nightly
def test_the_log_of_one_rank_has_its_lines_alone(killed: Run) -> None:
    first, second = (killed.project.types("logs", killed.name, "--rank", str(rank)).out for rank in range(NODES))
    assert "epoch" in first
    assert "died without an error message" in first
    assert "epoch" not in second


@pytest.mark.nightly
def test_a_preempted_training_goes_on(peace: dict[str, bytes], project: Project, cluster: Cluster) -> None:
    run = trains(project, "preempted", "slow", cluster__train__partition="preempt")
    figures = run.project.folder / "models"
    until("a step", lambda: any(path.stat().st_size for path in figures.glob("*/figures.jsonl")), 120, run.story)
    (job,) = run.jobs(cluster, "train")
    first = cluster.run("scontrol", "show", "hostnames", job["node"]).stdout.split()[0]
    urgent = ["--partition=urgent", "--exclusive", f"--nodelist={first}", "--output=/dev/null", "--wrap=true"]
    assert cluster.run("sbatch", *urgent).returncode == 0
    run.ends()
    assert failures(run) in ([], ["interrupted"])  # Slurm requeues what it ends itself, the supervisor what was quicker
    assert weights(model(run), STEPS) == peace
    assert restarts(run) == 1


def restarts(run: Run) -> int:
    """Return how often the first rank was started, but for the first time."""
    return (run.folder.events / "train-000000-0.jsonl").read_text().count('"kind":"task_started"') - 1


@pytest.mark.nightly
def test_a_training_at_its_time_limit_saves_itself_and_goes_on(begun: dict[str, Run], peace: dict[str, bytes]) -> None:
    run = begun["limit"]
    run.ends()
    assert failures(run) == []
    assert restarts(run) >= 1  # how much of its minute is left once it has started is for the machine to say
    told = (run.folder.events / "train-000000-0.jsonl").read_text()
    assert '"exit_code":75' in told
    assert "interrupted with work left: requeued" in run.story()
    assert weights(model(run), STEPS) == peace


@pytest.mark.nightly
def test_a_training_above_its_memory_limit_gets_more(begun: dict[str, Run], peace: dict[str, bytes]) -> None:
    run = begun["memory"]
    run.ends()
    assert failures(run) == ["host_oom"]
    asked = [job["ask"]["mem_bytes"] >> 20 for job in run.stage("train")["jobs"]]
    assert asked == [1024, 2048]
    assert weights(model(run), STEPS) == peace


@pytest.mark.nightly
def test_an_unfit_node_is_left_before_the_first_step(peace: dict[str, bytes], project: Project, tmp_path: Path) -> None:
    """The first node on which a task starts has a full disk."""
    full, unfit = tmp_path / "full", tmp_path / "unfit"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", full], check=True)
    starts = f'[ -e {unfit} ] || echo "$SLURMD_NODENAME" > {unfit}'
    is_unfit = f'[ "$(cat {unfit})" = "$SLURMD_NODENAME" ] && export TMPDIR={full}'
    is_task = '[ "${SLURM_JOB_NAME##*-supervise-*}" ]'
    try:
        setup = json.dumps([f"if {is_task}; then {starts}; {is_unfit} || true; fi"])
        run = trains(
            project, "unfit", cluster__train__nodes="1", cluster__train__ranks="2", cluster__slurm__setup=setup
        )
        run.ends()
    finally:
        subprocess.run(["umount", full], check=True)
    (failure,) = run.stage("train")["failures"]
    assert (failure["cause"], failure["node"]) == ("node", unfit.read_text().strip())
    assert weights(model(run), STEPS) == peace


@pytest.mark.nightly
def test_the_script_trains_when_it_is_submitted_by_hand(
    project: Project, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIPELINE_CONFIG", raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    log = project.folder / "by-hand.out"
    words = ["sbatch", "--wait", f"--output={log}", "--gres=none", "--mem=4G", "--cpus-per-task=2"]
    done = subprocess.run(
        [*words, str(ROOT / "sbatch" / "train.sbatch")], cwd=project.folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + log.read_text()
    assert re.search(rf"^✓ train +{STEPS} steps", log.read_text(), flags=re.MULTILINE)
