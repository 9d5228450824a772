"""A script of the user's as the stage train: what is typed, what runs, what a failure leads to."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from pipeline.cluster.local import LocalExecutor
from pipeline.cluster.machine import Machine
from pipeline.config.load import read_config
from pipeline.errors import ConfigError, PlanInfeasible
from pipeline.journal.run_folder import RunFolder, runs_in
from pipeline.memory.history.task_history import Measured
from pipeline.project.project import Project, profiles_of
from pipeline.runs.workflow import script_stage
from pipeline.runs.workflow.jobs import first_job, recipe_name, spec_of
from pipeline.runs.workflow.script_stage import outline
from pipeline.script.command import End, culprit
from tests.testkit.command import Command

SCRIPTS = Path(__file__).parents[2] / "script" / "scripts"
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


def newest(folder: Path) -> RunFolder:
    return runs_in(folder / "runs")[-1]


def told(pipeline: Command) -> dict[str, Any]:
    """Return what `pipeline status --json` says of the stage."""
    stages: list[dict[str, Any]] = json.loads(pipeline("status", "--json").out)["stages"]
    return stages[-1] if stages else {"figures": {}, "state": "running"}


def project_of(folder: Path) -> Project:
    return Project.open(read_config(folder / "pipeline.yaml").config, remember=False, beside=folder)


class TestARun:
    @pytest.mark.nightly
    def test_of_a_plain_loop_needs_nothing_of_ours_and_leaves_its_weights(
        self, pipeline: Command, tmp_path: Path
    ) -> None:
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
    def test_runs_again_whenever_it_is_asked_for(self, pipeline: Command, tmp_path: Path) -> None:
        configure(tmp_path, write(tmp_path, "open('ran', 'a').write('x')"))
        assert [pipeline(*SUBMIT).code for _ in range(2)] == [0, 0]
        assert (tmp_path / "ran").read_text() == "xx"

    @pytest.mark.nightly
    def test_out_of_a_gpu_s_memory_goes_on_with_smaller_micro_batches_and_the_same_step(
        self, pipeline: Command, tmp_path: Path
    ) -> None:
        shutil.copy(SCRIPTS / "small_card.py", tmp_path)
        configure(tmp_path, f"{PYTHON} -S small_card.py {BATCH}", {"effective_batch": 8})
        done = pipeline(*SUBMIT)
        assert done.code == 0, done.err
        train = told(pipeline)
        assert [(one["cause"], one["ask"]["shrink"]) for one in train["failures"]] == [("gpu_oom", 0), ("gpu_oom", 1)]
        assert (train["census"]["attempts"], train["census"]["micro_batch"]) == (3, 2)
        assert "trained with 4 times 2" in pipeline("logs", "--task", "0").out
        assert "CUDA out of memory. Tried to allocate" in done.out
        assert "again with batches of half the size" in done.out

    @pytest.mark.nightly
    def test_that_can_make_nothing_smaller_ends_and_says_what_to_write(self, pipeline: Command, tmp_path: Path) -> None:
        shutil.copy(SCRIPTS / "small_card.py", tmp_path)
        configure(tmp_path, f"{PYTHON} -S small_card.py --batch_size 8")
        done = pipeline(*SUBMIT)
        assert done.code == 7
        assert "names no {micro_batch}" in done.err
        assert len(told(pipeline)["failures"]) == 2

    @pytest.mark.nightly
    @needs_proc
    def test_out_of_host_memory_goes_on_with_more(self, pipeline: Command, tmp_path: Path) -> None:
        eats = "import sys, signal\nheld = b'x' * (400 << 20)\nif sys.argv[1] == '1': signal.pause()\nprint('held')\n"
        configure(tmp_path, write(tmp_path, eats) + " {attempt}", mem="300MiB")
        done = pipeline(*SUBMIT)
        assert done.code == 0, done.err
        (failure,) = told(pipeline)["failures"]
        assert (failure["cause"], failure["ask"]["mem_bytes"]) == ("host_oom", 300 << 20)
        assert "host_oom with 300 MiB" in done.out
        assert "then: again with" in done.out

    def test_that_fails_for_another_reason_ends_at_once_with_its_last_lines(
        self, pipeline: Command, tmp_path: Path
    ) -> None:
        fails = "print('reading the data', flush=True)\nloss = None\nprint(1 / 0)\n"
        configure(tmp_path, write(tmp_path, fails))
        done = pipeline(*SUBMIT)
        assert done.code == 7
        assert "the script ended with exit code 1; it last said: ZeroDivisionError" in done.err
        assert "| reading the data" in done.err
        assert "print(1 / 0)" in done.err
        assert "\n    then: not tried again\n    log: " in done.err, (
            "a line of its own: a reason may end with a command"
        )
        assert "docs/troubleshooting.md#failed" in done.err
        assert "next: pipeline submit --stage train --only --set cluster.executor=local" in done.err
        (failure,) = told(pipeline)["failures"]
        assert (failure["cause"], failure["then"]) == ("failed", "not tried again")

    @pytest.mark.nightly
    def test_that_saves_and_asks_to_go_on_is_started_again_without_any_figures(
        self, pipeline: Command, tmp_path: Path
    ) -> None:
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

    def test_that_asks_to_go_on_and_comes_no_further_is_not_begun_for_ever(
        self, pipeline: Command, tmp_path: Path
    ) -> None:
        configure(tmp_path, write(tmp_path, "import sys\nopen('ran', 'a').write('x')\nsys.exit(75)"))
        done = pipeline(*SUBMIT)
        assert done.code == 7
        assert "saved nothing in {output} and reported no step" in done.err
        assert (tmp_path / "ran").read_text() == "xxx", "supervisor.tries"

    def test_whose_figures_are_called_as_ours_breaks_no_status(self, pipeline: Command, tmp_path: Path) -> None:
        says = """print('pipeline: {"forward_s": 1, "task": 7, "host_peak_bytes": 1, "done": 9}')"""
        configure(tmp_path, write(tmp_path, says))
        assert pipeline(*SUBMIT).code == 0
        assert pipeline("status").code == 0
        assert pipeline("report").code == 0
        train = told(pipeline)
        assert train["census"]["figures"] == {"forward_s": 1, "task": 7, "host_peak_bytes": 1, "done": 9}
        assert train["figures"]["train-000000"]["task"] == 0

    @pytest.mark.nightly
    def test_is_told_how_far_it_is_while_it_runs(self, pipeline: Command, tmp_path: Path) -> None:
        waits = (
            "import os, time\nfor step in (1, 2):\n    print('pipeline: {\"step\": %d}' % step, flush=True)\n"
            "    while step == 2 and not os.path.exists('seen'): time.sleep(0.01)\n    time.sleep(0.6)\n"
        )
        configure(tmp_path, write(tmp_path, waits))
        assert pipeline(*SUBMIT[:-1]).code == 0
        try:
            deadline = time.monotonic() + 30
            while told(pipeline)["figures"].get("train-000000", {}).get("script.step") != 2:
                assert time.monotonic() < deadline, newest(tmp_path).supervisor_log.read_text()
                time.sleep(0.05)
        finally:
            (tmp_path / "seen").touch()
        while told(pipeline)["state"] == "running":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert told(pipeline)["state"] == "done"


class TestSeveralProcesses:
    WHO = (
        "import os, time\nfrom pathlib import Path\nenv = os.environ\n"
        "rank = env.get('RANK', 'alone')\nPath(f'rank-{rank}').write_text(' '.join([env.get('WORLD_SIZE', '-'), "
        "env.get('LOCAL_RANK', '-'), env['CUDA_VISIBLE_DEVICES'], env.get('MASTER_PORT', '-')]))\n"
    )

    @pytest.mark.nightly
    def test_each_see_all_gpus_and_are_told_their_place_as_by_torchrun(self, pipeline: Command, tmp_path: Path) -> None:
        configure(tmp_path, write(tmp_path, self.WHO), gpus=2, slots={"gpus": 2})
        done = pipeline(*SUBMIT)
        assert done.code == 0, done.err
        first, second = ((tmp_path / f"rank-{rank}").read_text().split() for rank in (0, 1))
        assert (first[:3], second[:3]) == (["2", "0", "0,1"], ["2", "1", "0,1"])
        assert first[3] == second[3] != "0"

    def test_are_one_where_the_command_starts_them_itself(self, pipeline: Command, tmp_path: Path) -> None:
        started = write(tmp_path, self.WHO + "import sys; Path('asked').write_text(sys.argv[1])")
        configure(tmp_path, f"{started} {{processes}}", gpus=2, cpus=2, slots={"gpus": 2})
        done = pipeline(*SUBMIT)
        assert done.code == 0, done.err
        assert sorted(path.name for path in tmp_path.glob("rank-*")) == ["rank-alone"]
        assert (tmp_path / "rank-alone").read_text() == "- - 0,1 -"
        assert (tmp_path / "asked").read_text() == "2"
        config = read_config(tmp_path / "pipeline.yaml").config
        (job,) = told(pipeline)["jobs"]
        spec = spec_of(None, config, scripted_job(job))
        assert (spec.cpus, spec.gpus, spec.ranks) == (4, 2, 0)

    @pytest.mark.nightly
    def test_fail_for_the_sake_of_the_one_whose_memory_ended(self, pipeline: Command, tmp_path: Path) -> None:
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
        assert "CUDA out of memory" in failure["reason"]

    @pytest.mark.nightly
    def test_of_which_one_always_asks_to_go_on_are_not_begun_for_ever(self, pipeline: Command, tmp_path: Path) -> None:
        asks = "import os, sys\nopen('ran', 'a').write(os.environ['RANK'])\nsys.exit(75 * int(os.environ['RANK']))"
        configure(tmp_path, write(tmp_path, asks), {"effective_batch": 4}, ranks=2)
        done = pipeline(*SUBMIT)
        assert done.code == 7, done.err
        assert sorted((tmp_path / "ran").read_text()) == [*"000111"], "supervisor.tries"

    def test_are_done_when_all_are(self, pipeline: Command, tmp_path: Path) -> None:
        fails = "import os, sys, time\nif os.environ['RANK'] == '1':\n    time.sleep(0.5)\n    sys.exit('too late')\n"
        configure(tmp_path, write(tmp_path, fails), ranks=2)
        done = pipeline(*SUBMIT)
        assert done.code == 7, done.out
        assert "too late" in done.err

    def test_blame_the_one_that_failed_first_unless_another_s_memory_ended(self) -> None:
        lost, memory, fine = (
            End(1, False, "lost", "", 1.0),
            End(1, False, "oom", "gpu_oom", 2.0),
            End(0, False, "", "", 0),
        )
        ended = End(143, True, "told to end", "", 0.5)
        assert culprit({0: lost, 1: memory, 2: fine}) == 1
        assert culprit({0: lost, 1: End(1, False, "also", "", 0.9)}) == 1
        assert culprit({0: ended, 1: lost}) == 1
        assert culprit({0: ended, 1: fine, 2: End(75, True, "", "", 0.1)}) is None


def scripted_job(data: dict[str, Any]) -> Any:
    from pipeline.journal.run_status import StageJob

    return StageJob.from_json(data)


class TestBeforeARun:
    @pytest.mark.parametrize(
        ("command", "said"),
        [
            ("python own.py {batchsize}", "{batchsize}, which is not known"),
            ("python own.py && rm x", "which only a shell understands"),
        ],
    )
    def test_a_command_that_cannot_be_meant_is_refused(
        self, pipeline: Command, tmp_path: Path, command: str, said: str
    ) -> None:
        configure(tmp_path, command)
        for more in ((), ("--dry-run",)):
            done = pipeline(*SUBMIT, *more)
            assert done.code == 2, done.out
            assert said in done.err
            assert "train.command" in done.err
        assert not (tmp_path / "runs").exists()

    def test_a_batch_that_its_processes_cannot_share_is_refused(self, pipeline: Command, tmp_path: Path) -> None:
        configure(tmp_path, f"python own.py {BATCH}", {"effective_batch": 7}, ranks=2)
        done = pipeline(*SUBMIT)
        assert (done.code, "7 items cannot be shared equally by 2 processes" in done.err) == (2, True), done.err
        configure(tmp_path, "python own.py", {"effective_batch": 7}, ranks=2)
        script_stage.ScriptStage().inspect(project_of(tmp_path))  # which is not told of batches

    def test_its_words_are_those_of_the_first_process(self, tmp_path: Path) -> None:
        configure(tmp_path, "python own.py {rank}/{ranks} {micro_batch} {accumulation} {seed}", {"seed": 3}, ranks=2)
        assert script_stage.first_words(project_of(tmp_path))[2:] == ["0/2", "4", "1", "3"]

    def test_its_output_is_the_same_for_every_attempt_and_another_for_another_command(self, tmp_path: Path) -> None:
        found = []
        for command, epochs in (("a {micro_batch}", 1), ("a {micro_batch}", 2), ("b {micro_batch}", 1)):
            configure(tmp_path, command, {"epochs": epochs})
            found.append(script_stage.output_of(read_config(tmp_path / "pipeline.yaml").config))
        assert found[0] == found[1] != found[2]
        assert found[0].parent == tmp_path / "models"

    def test_is_outlined_with_every_rung_of_the_ladder(self, tmp_path: Path) -> None:
        configure(tmp_path, f"python own.py {BATCH}", {"effective_batch": 12})
        found = outline(project_of(tmp_path), 8 * GIB, script_stage.STATED, 64 * GIB)
        assert (found.micro_batch, found.accumulation, found.smaller) == (12, 1, (6, 3, 1))
        lines = "\n".join(found.lines())
        for said in (
            "run whenever asked",
            "python own.py --batch_size 12 --accumulate 1",
            "8,192 MiB",
            "6, then 3, then 1",
        ):
            assert said in lines
        assert json.loads(json.dumps(found.to_json()))["words"][0] == "python"

    @pytest.mark.parametrize(
        ("command", "said"),
        [("x", "names no {micro_batch}"), ("x {micro_batch}", "not {accumulation}")],
    )
    def test_is_outlined_with_why_there_is_no_ladder(self, tmp_path: Path, command: str, said: str) -> None:
        configure(tmp_path, command)
        found = outline(project_of(tmp_path), GIB, "as configured")
        assert found.smaller == ()
        assert said in "\n".join(found.lines())


class TestMemory:
    def first(self, folder: Path, limit_bytes: int | None = None) -> tuple[int, str]:
        project, row = project_of(folder), script_stage.ScriptStage()
        job = first_job(project, row, LocalExecutor(Machine(1, (), limit_bytes or 1 << 50))).job
        return job.ask.mem_bytes, job.why

    def test_is_stated_for_each_process_and_never_more_than_a_node_has(self, tmp_path: Path) -> None:
        configure(tmp_path, "python own.py", ranks=2)
        assert self.first(tmp_path) == (16 * GIB, script_stage.STATED)
        assert self.first(tmp_path, 3 * GIB) == (3 * GIB, script_stage.STATED)

    def test_is_what_was_pinned(self, tmp_path: Path) -> None:
        configure(tmp_path, "python own.py", mem="1GiB")
        assert self.first(tmp_path) == (GIB, "as configured")

    def test_is_what_earlier_runs_of_the_same_command_took(self, tmp_path: Path) -> None:
        configure(tmp_path, "python own.py")
        project, row = project_of(tmp_path), script_stage.ScriptStage()
        self.remember(project, recipe_name(project, row), 2 * GIB)
        most, why = self.first(tmp_path)
        assert 2 * GIB < most < 3 * GIB, why
        configure(tmp_path, "python other.py")
        assert self.first(tmp_path)[0] == 8 * GIB, "of another command nothing is known"

    def remember(self, project: Project, recipe: str, peak_bytes: int) -> None:
        past = [
            Measured(
                stage="train", recipe=recipe, cluster="local", attempt=1, task=0, items=1, size=0, cpus=1,
                asked_bytes=8 * GIB, peak_bytes=peak_bytes, gpu_peak_bytes=None, killed=False, elapsed_s=600.0,
                cpu_s=600.0, node="n", at=1000.0 + number,
            )
            for number in range(6)
        ]  # fmt: skip
        for number, one in enumerate(past):
            assert profiles_of(project.config).record(f"r{number}", "w", [one])


def test_a_refusal_of_the_ladder_names_the_next_step(tmp_path: Path) -> None:
    configure(tmp_path, f"x {BATCH}", {"effective_batch": 2})
    config = read_config(tmp_path / "pipeline.yaml").config
    assert [script_stage.batches_of(config, shrink) for shrink in (0, 1)] == [(2, 1), (1, 2)]
    with pytest.raises(PlanInfeasible, match="a single item"):
        script_stage.batches_of(config, 2)
    configure(tmp_path, "x {accumulation", {"effective_batch": 2})
    with pytest.raises(ConfigError):
        script_stage.ScriptStage().inspect(project_of(tmp_path))


class TestWhatPeopleSee:
    def test_dry_run_and_plan_show_the_words_and_the_ladder(self, pipeline: Command, tmp_path: Path) -> None:
        configure(tmp_path, f"python own.py {BATCH}", {"effective_batch": 8})
        for typed in ((*SUBMIT, "--dry-run"), ("plan", "--stage", "train")):
            done = pipeline(*typed)
            assert done.code == 0, done.err
            assert "runs: python own.py --batch_size 8 --accumulate 1" in done.out
            assert "if a GPU's memory ends: micro-batches of 4, then 2, then 1" in done.out
            assert "run whenever asked" in done.out
        (document,) = json.loads(pipeline("plan", "--stage", "train", "--json").out)
        assert document["smaller"] == [4, 2, 1]
        refused = pipeline("plan", "--stage", "train", "--gpu", "a100-80gb")
        assert (refused.code, "cannot be traced" in refused.err) == (2, True)

    def test_config_check_and_plan_refuse_what_submit_would(self, pipeline: Command, tmp_path: Path) -> None:
        configure(tmp_path, "python own.py {batchsize}")
        for typed in (("config", "check"), ("plan", "--stage", "train"), SUBMIT):
            done = pipeline(*typed)
            assert (done.code, "{batchsize}, which is not known" in done.err) == (2, True), done.err
        assert "{batchsize}, which is not known" in pipeline("doctor").out

    def test_status_says_that_it_is_a_script_and_what_it_told(self, pipeline: Command, tmp_path: Path) -> None:
        configure(tmp_path, write(tmp_path, """print('pipeline: {"step": 3, "loss": 0.25}')"""))
        done = pipeline(*SUBMIT)
        assert "a script, which runs whenever it is asked for:" in done.out
        assert "the script says: step 3, loss 0.25" in pipeline("status").out
        assert 'pipeline: {"step": 3' in pipeline("logs", "--stage", "train", "--all").out
