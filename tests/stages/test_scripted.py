"""A script of the user's as the stage train: what is typed, what runs, what a failure leads to."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from pipeline.cluster.local import LocalExecutor
from pipeline.cluster.machine import Machine
from pipeline.config.load import read_config
from pipeline.journal.run_folder import runs_in
from pipeline.project.project import Project
from pipeline.stages import script as script_stage
from pipeline.stages.jobs import first_job
from pipeline.stages.script import outline
from tests.testkit.command import Command
from tests.testkit.project import until

SCRIPTS = Path(__file__).parents[1] / "script" / "scripts"
PYTHON = shlex.quote(sys.executable)
SUBMIT = ("submit", "--stage", "train", "--only", "--executor", "local", "--follow")
BATCH = "--batch_size {micro_batch} --accumulate {accumulation}"
GIB = 1 << 30
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def configure(folder: Path, command: str, train: dict[str, Any] | None = None, **resources: Any) -> None:
    """Write a configuration that runs a command; there is no data."""
    (folder / "data").mkdir(exist_ok=True)
    cluster = {"slots": {"cpus": 4, "mem": "4GiB", **resources.pop("slots", {})}, "train": resources}
    given = {"data": {"source": "glob", "path": "data"}, "train": {"command": command, **(train or {})}}
    (folder / "pipeline.yaml").write_text(json.dumps({**given, "cluster": cluster}))


def write(folder: Path, text: str, name: str = "own.py") -> str:
    """Write a script and return the command that runs it: relative to the folder of the configuration."""
    (folder / name).write_text(text)
    return f"{PYTHON} -S {name}"


def told(pipeline: Command) -> dict[str, Any]:
    """Return what `pipeline status --json` says of the stage."""
    stages: list[dict[str, Any]] = json.loads(pipeline("status", "--json").out)["stages"]
    return stages[-1] if stages else {"figures": {}, "state": "running"}


def project_of(folder: Path) -> Project:
    return Project.open(read_config(folder / "pipeline.yaml").config, remember=False, beside=folder)


class TestARun:
    @pytest.mark.nightly
    def test_of_a_plain_loop_needs_nothing_of_ours_and_leaves_its_weights(self, pipeline, tmp_path):
        shutil.copy(SCRIPTS / "plain.py", tmp_path)
        configure(tmp_path, f"{PYTHON} plain.py {BATCH} --seed {{seed}} --out {{output}}", {"effective_batch": 16})
        done = pipeline(*SUBMIT)
        assert done.code == 0, done.err
        (weights,) = (tmp_path / "models").glob("script-*/weights.safetensors")
        assert load_file(weights)["weight"].shape == (1, 4)
        train = told(pipeline)
        assert (train["state"], train["items_done"], train["failures"]) == ("done", 1, [])
        assert train["census"]["steps"] == train["census"]["figures"]["step"] == 5
        assert train["census"]["figures"]["loss"] > 0
        assert train["figures"]["train-000000"]["host_peak_bytes"] > 100 << 20, "torch is in it"
        assert 'pipeline: {"step": 5' in pipeline("logs", "--task", "0").out
        assert not (tmp_path / "cache").exists()

    @pytest.mark.nightly
    def test_runs_again_whenever_it_is_asked_for(self, pipeline, tmp_path):
        configure(tmp_path, write(tmp_path, "open('ran', 'a').write('x')"))
        assert [pipeline(*SUBMIT).code for _ in range(2)] == [0, 0]
        assert (tmp_path / "ran").read_text() == "xx"

    @pytest.mark.nightly
    @pytest.mark.parametrize(("more", "cause"), [("", "gpu_oom"), (" --host", "host_oom")])
    def test_out_of_memory_goes_on_with_smaller_micro_batches_and_the_same_step(self, pipeline, tmp_path, more, cause):
        shutil.copy(SCRIPTS / "small_card.py", tmp_path)
        configure(tmp_path, f"{PYTHON} -S small_card.py {BATCH}{more}", {"effective_batch": 8})
        done = pipeline(*SUBMIT)
        assert done.code == 0, done.err
        train = told(pipeline)
        assert [(one["cause"], one["ask"]["shrink"]) for one in train["failures"]] == [(cause, 0), (cause, 1)]
        assert (train["census"]["attempts"], train["census"]["micro_batch"]) == (3, 2)
        assert "trained with 4 times 2" in pipeline("logs", "--task", "0").out

    @pytest.mark.nightly
    @needs_proc
    def test_out_of_host_memory_goes_on_with_more(self, pipeline, tmp_path):
        eats = "import sys, signal\nheld = b'x' * (400 << 20)\nif sys.argv[1] == '1': signal.pause()\nprint('held')\n"
        configure(tmp_path, write(tmp_path, eats) + " {attempt}", mem="300MiB")
        done = pipeline(*SUBMIT)
        assert done.code == 0, done.err
        (failure,) = told(pipeline)["failures"]
        assert (failure["cause"], failure["ask"]["mem_bytes"]) == ("host_oom", 300 << 20)

    def test_that_fails_for_another_reason_ends_at_once_with_its_last_lines(self, pipeline, tmp_path):
        fails = "print('reading the data', flush=True)\nloss = None\nprint(1 / 0)\n"
        configure(tmp_path, write(tmp_path, fails))
        done = pipeline(*SUBMIT)
        assert done.code == 7
        assert "ZeroDivisionError" in done.err
        assert "reading the data" in done.err
        (failure,) = told(pipeline)["failures"]
        assert failure["cause"] == "failed"

    @pytest.mark.nightly
    def test_that_saves_and_asks_to_go_on_is_started_again_without_any_figures(self, pipeline, tmp_path):
        saves = (
            "import sys, pathlib\nat = pathlib.Path(sys.argv[1], 'at')\n"
            "step = int(at.read_text()) if at.exists() else 0\nat.write_text(str(step + 1))\n"
            "sys.exit(0 if step == 4 else 75)\n"
        )
        configure(tmp_path, write(tmp_path, saves) + " {output}")
        done = pipeline(*SUBMIT)
        assert done.code == 0, done.err
        failures = told(pipeline)["failures"]
        assert [one["cause"] for one in failures] == ["interrupted"] * 4, "more than supervisor.tries"
        assert [one["done"] for one in failures] == [1, 2, 3, 4]
        assert len({one["ask"]["time_s"] for one in failures}) == 1, "it came further, and needs no more time"

    def test_that_asks_to_go_on_and_comes_no_further_is_not_begun_for_ever(self, pipeline, tmp_path):
        configure(tmp_path, write(tmp_path, "import sys\nopen('ran', 'a').write('x')\nsys.exit(75)"))
        done = pipeline(*SUBMIT)
        assert done.code == 7
        assert (tmp_path / "ran").read_text() == "xxx", "supervisor.tries"

    @pytest.mark.nightly
    def test_is_told_how_far_it_is_while_it_runs(self, pipeline, tmp_path):
        waits = (
            "import os, time\nfor step in (1, 2):\n    print('pipeline: {\"step\": %d}' % step, flush=True)\n"
            "    while step == 2 and not os.path.exists('seen'): time.sleep(0.01)\n    time.sleep(0.6)\n"
        )
        configure(tmp_path, write(tmp_path, waits))
        assert pipeline(*SUBMIT[:-1]).code == 0
        try:
            until(
                "its second step",
                lambda: told(pipeline)["figures"].get("train-000000", {}).get("script.step") == 2,
                story=lambda: runs_in(tmp_path / "runs")[-1].supervisor_log.read_text(),
            )
        finally:
            (tmp_path / "seen").touch()
        until("its end", lambda: told(pipeline)["state"] != "running")
        assert told(pipeline)["state"] == "done"


class TestSeveralProcesses:
    WHO = (
        "import os, time\nfrom pathlib import Path\nenv = os.environ\n"
        "rank = env.get('RANK', 'alone')\nPath(f'rank-{rank}').write_text(' '.join([env.get('WORLD_SIZE', '-'), "
        "env.get('LOCAL_RANK', '-'), env['CUDA_VISIBLE_DEVICES'], env.get('MASTER_PORT', '-')]))\n"
    )

    STEPS = (
        "import os, signal, sys, time\nfrom pathlib import Path\n"
        "out, deaths, first = Path(sys.argv[1]), int(sys.argv[2]), os.environ['RANK'] == '0'\n"
        "at, died = out / 'at', Path('died')\n"
        "step = int(at.read_text()) if at.exists() else 0\n"
        "while step < 4:\n    step += 1\n    until = time.monotonic() + 60\n"
        "    if step == 3 and not first and (len(died.read_text()) if died.exists() else 0) < deaths:\n"
        "        died.open('a').write('x')\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    here, other = (out / f'{rank}-{step}-{os.environ[\"MASTER_PORT\"]}' for rank in (first, not first))\n"
        "    here.touch()\n"
        "    while not other.exists() and time.monotonic() < until: time.sleep(0.01)\n"
        "    if first:\n        Path('made').open('a').write(f'{step} ')\n        at.write_text(str(step))\n"
        "    print('pipeline: {\"step\": %d}' % step, flush=True)\n"
    )

    @pytest.mark.nightly
    def test_each_see_all_gpus_and_are_told_their_place_as_by_torchrun(self, pipeline, tmp_path):
        configure(tmp_path, write(tmp_path, self.WHO), gpus=2, slots={"gpus": 2})
        done = pipeline(*SUBMIT)
        assert done.code == 0, done.err
        first, second = ((tmp_path / f"rank-{rank}").read_text().split() for rank in (0, 1))
        assert (first[:3], second[:3]) == (["2", "0", "0,1"], ["2", "1", "0,1"])
        assert first[3] == second[3] != "0"

    @pytest.mark.nightly
    def test_fail_for_the_sake_of_the_one_whose_memory_ended(self, pipeline, tmp_path):
        fails = (
            "import os, sys, time\nif int(sys.argv[1]) == 1: sys.exit()\n"
            "if os.environ['RANK'] == '0': raise ConnectionError('lost the connection to rank 1')\n"
            "time.sleep(0.5)\nsys.exit('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB')\n"
        )
        command = write(tmp_path, fails) + " {micro_batch} {accumulation}"
        configure(tmp_path, command, {"effective_batch": 4}, ranks=2)
        done = pipeline(*SUBMIT)
        assert done.code == 0, done.err
        (failure,) = told(pipeline)["failures"]
        assert failure["cause"] == "gpu_oom"

    def test_are_done_when_all_are(self, pipeline, tmp_path):
        fails = "import os, sys, time\nif os.environ['RANK'] == '1':\n    time.sleep(0.5)\n    sys.exit('too late')\n"
        configure(tmp_path, write(tmp_path, fails), ranks=2)
        done = pipeline(*SUBMIT)
        assert done.code == 7, done.out
        assert "too late" in done.err

    @pytest.mark.parametrize(("deaths", "causes"), [(1, []), (2, ["crashed"])])
    def test_start_again_in_their_job_where_one_dies_but_not_twice_at_the_same_step(
        self, pipeline, tmp_path, deaths, causes
    ):
        configure(tmp_path, write(tmp_path, self.STEPS) + f" {{output}} {deaths}", ranks=2)
        done = pipeline(*SUBMIT)
        assert done.code == 0, done.err
        train = told(pipeline)
        assert [one["cause"] for one in train["failures"]] == causes
        (restart,) = train["restarts"]
        assert (restart["cause"], restart["number"], len(train["jobs"])) == ("crashed", 1, 1 + len(causes))
        assert (tmp_path / "made").read_text().split() == ["1", "2", "3", "4"], "none was made twice"
        assert "continued in the same job" in pipeline("status").out


class TestBeforeARun:
    @pytest.mark.parametrize("command", ["python own.py {batchsize}", "python own.py && rm x"])
    def test_a_command_that_cannot_be_meant_is_refused(self, pipeline, tmp_path, command):
        configure(tmp_path, command)
        for words in (SUBMIT, (*SUBMIT, "--dry-run"), ("config", "check"), ("plan", "--stage", "train")):
            done = pipeline(*words)
            assert (done.code, "train.command" in done.err) == (2, True), done.err
        assert not (tmp_path / "runs").exists()

    def test_a_batch_that_its_processes_cannot_share_is_refused(self, pipeline, tmp_path):
        configure(tmp_path, f"python own.py {BATCH}", {"effective_batch": 7}, ranks=2)
        assert pipeline(*SUBMIT).code == 2
        configure(tmp_path, "python own.py", {"effective_batch": 7}, ranks=2)
        script_stage.ScriptStage().inspect(project_of(tmp_path))  # which is not told of batches

    def test_its_output_is_the_same_for_every_attempt_and_another_for_another_command(self, tmp_path):
        found = []
        for command, epochs in (("a {micro_batch}", 1), ("a {micro_batch}", 2), ("b {micro_batch}", 1)):
            configure(tmp_path, command, {"epochs": epochs})
            found.append(script_stage.output_of(read_config(tmp_path / "pipeline.yaml").config))
        assert found[0] == found[1] != found[2]
        assert found[0].parent == tmp_path / "models"

    def test_is_outlined_with_every_rung_of_the_ladder(self, tmp_path):
        configure(tmp_path, f"python own.py {BATCH}", {"effective_batch": 12})
        found = outline(project_of(tmp_path), 8 * GIB, script_stage.STATED, 64 * GIB)
        assert (found["micro_batch"], found["accumulation"], found["smaller"]) == (12, 1, (6, 3, 1))
        assert json.loads(json.dumps(found))["words"][0] == "python"


class TestMemory:
    def first(self, folder: Path, limit_bytes: int | None = None) -> tuple[int, str]:
        project, row = project_of(folder), script_stage.ScriptStage()
        job = first_job(project, row, LocalExecutor(Machine(1, (), limit_bytes or 1 << 50)))
        return job.ask.mem_bytes, job.why

    def test_is_stated_for_each_process_and_never_more_than_a_node_has(self, tmp_path):
        configure(tmp_path, "python own.py", ranks=2)
        assert self.first(tmp_path) == (16 * GIB, script_stage.STATED)
        assert self.first(tmp_path, 3 * GIB) == (3 * GIB, script_stage.STATED)

    def test_is_what_was_pinned(self, tmp_path):
        configure(tmp_path, "python own.py", mem="1GiB")
        assert self.first(tmp_path) == (GIB, "as configured")
