"""The executor on a real cluster: what the contract, which every executor keeps, does not ask."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cluster import slurm as module
from pipeline.cluster import slurm_commands
from pipeline.cluster.job_spec import TaskState
from pipeline.cluster.slurm import SlurmExecutor
from pipeline.config.schema_cluster import SlurmSection
from pipeline.errors import SubmissionRefused
from tests.cluster.programs import MIB, WAITS, finish, job_of, python, step_until
from tests.testkit.cluster import Cluster
from tests.testkit.cluster.config import MAX_ARRAY_SIZE, TINY_MAX_SUBMIT

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("cluster")]

ROOT = Path(__file__).parents[2]
TELLS_ON_SIGNALS = """
import os, pathlib, signal, sys, time
def told(number, frame):
    print("told", number, flush=True)
    sys.exit(75)
for number in (signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, told)
again = os.environ.get("SLURM_RESTART_COUNT")
print("began", again, flush=True)
while not again:
    time.sleep(0.05)
"""


@pytest.fixture
def executor(cluster: Cluster) -> Iterator[SlurmExecutor]:
    with opened() as executor:
        yield executor


class opened:  # noqa: N801 - reads as a function
    """An executor that looks often, and whose jobs end with the test."""

    def __init__(self, **site: object) -> None:
        self.executor = SlurmExecutor(SlurmSection(**site), poll_s=0.1, patience_s=3)  # type: ignore[arg-type]

    def __enter__(self) -> SlurmExecutor:
        return self.executor

    def __exit__(self, *exception: object) -> None:
        self.executor.cancel(tuple(self.executor._jobs))


@pytest.fixture
def commands_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Return a function that puts a command before the one of its name; `$REAL` in its text is that one."""
    folder = tmp_path / "first"
    folder.mkdir()

    def put(name: str, body: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/bash\nREAL={shutil.which(name)}\nFOLDER={folder}\n{body}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return folder

    return put


def jobs_named(name: str) -> list[str]:
    """Return all jobs that the cluster has had under a name."""
    words = ["squeue", "--noheader", "--states=all", f"--name={name}", "--format=%F"]
    return sorted(set(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()))


def unique(name: str) -> str:
    return f"{name}-{time.time_ns()}"


class TestWhatIsSubmitted:
    def test_the_clusters_script_is_the_rendered_one_and_is_kept_beside_the_logs(
        self, executor: SlurmExecutor, tmp_path: Path
    ) -> None:
        spec = python(tmp_path / "logs", "pass", "it's Å\n", tasks=3, tag=unique("script"), time_s=600)
        rendered = executor.script_for(spec)
        job = executor.submit(spec)
        assert slurm_commands.run_command(["scontrol", "write", "batch_script", job, "-"]) == rendered
        assert (tmp_path / "logs" / f"{job}.sbatch").read_text() == rendered
        finish(executor, job)
        names = {path.name for path in (tmp_path / "logs").iterdir()}
        assert names == {f"{job}.sbatch", *(f"{job}_{task}.{end}" for task in range(3) for end in ("out", "err"))}

    def test_variables_of_sbatch_do_not_beat_the_script(
        self, executor: SlurmExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in {"SBATCH_TIMELIMIT": "99-0", "SBATCH_JOB_NAME": "x", "SQUEUE_FORMAT": "%j"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SBATCH_PARTITION", "nowhere")
        (task,) = finish(executor, executor.submit(python(tmp_path, "pass", time_s=60, partition="main")))
        assert task.state is TaskState.COMPLETED

    @pytest.mark.nightly
    def test_job_that_is_submitted_from_inside_a_job_gets_what_it_asks_for(
        self, executor: SlurmExecutor, tmp_path: Path
    ) -> None:
        body = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.slurm.test_executor import opened
from tests.cluster.programs import finish, python
from pathlib import Path
prints = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ['SLURM_CPUS_PER_TASK'])"
with opened(memory="mem-per-cpu") as executor:
    spec = python(Path({str(tmp_path)!r}) / "inner", prints, cpus=2, mem_bytes=100 << 20)
    (task,) = finish(executor, executor.submit(spec))
    print(task.state.value, Path(task.stdout).read_text().strip())
"""
        argv = (sys.executable, "-c", body)
        spec = job_of("test", argv, range(1), str(tmp_path), cpus=1, gpus=1, mem_bytes=400 * MIB)
        (task,) = finish(executor, executor.submit(spec))
        assert Path(task.stdout).read_text() == "COMPLETED None 2\n", Path(task.stderr).read_text()


class TestNumbers:
    def test_tasks_above_the_largest_array_have_an_offset(self, executor: SlurmExecutor, tmp_path: Path) -> None:
        spec = replace(python(tmp_path, "import sys; print(sys.argv[1])"), tasks=[100, 101, 104], tag=unique("far"))
        job = executor.submit(spec)
        tasks = finish(executor, job)
        assert [(task.task, Path(task.stdout).read_text()) for task in tasks] == [
            (100, "100\n"),
            (101, "101\n"),
            (104, "104\n"),
        ]
        with opened(max_array_size=4_000_001) as another:  # for which the script is asked, not this cluster
            another.adopt(job, spec)
            told = [(task.task, task.state, task.stdout) for task in finish(another, job)]
            assert told == [(task.task, TaskState.COMPLETED, task.stdout) for task in tasks]

    def test_numbers_too_far_apart_for_one_array_are_refused(self, executor: SlurmExecutor, tmp_path: Path) -> None:
        spec = replace(python(tmp_path, "pass"), tasks=[100, 100 + MAX_ARRAY_SIZE])
        with pytest.raises(SubmissionRefused):
            executor.submit(spec)

    def test_limits_are_what_the_cluster_says_unless_the_site_does(self, executor: SlurmExecutor) -> None:
        limits = executor.limits_of()
        assert (limits.mem_bytes, limits.time_s, limits.highest_task) == (6000 * MIB, 86_400, MAX_ARRAY_SIZE - 1)
        assert limits.queued_tasks is None
        assert SlurmExecutor(SlurmSection(qos="tiny", account="lab")).limits_of().queued_tasks == TINY_MAX_SUBMIT
        assert SlurmExecutor(SlurmSection(partition="short")).limits_of().time_s == 120
        said = SlurmExecutor(
            SlurmSection(max_array_size=9, max_submit=7, largest_mem=1 << 30, longest_time="1h")
        ).limits_of()
        assert (said.mem_bytes, said.time_s, said.job_tasks, said.queued_tasks) == (1 << 30, 3600, 9, 7)


class TestLostAnswers:
    def test_submission_whose_answer_was_lost_is_not_made_again(
        self, executor: SlurmExecutor, tmp_path: Path, commands_first: Callable[[str, str], Path], quick: None
    ) -> None:
        said = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
        commands_first("sbatch", f'"$REAL" "$@" >/dev/null; echo >>$FOLDER/tries; echo "{said}" >&2; exit 1')
        spec = python(tmp_path, "pass", tag=unique("lost"))
        job = executor.submit(spec)
        assert jobs_named(spec.tag) == [job]
        assert (tmp_path / "first" / "tries").read_text() == "\n"
        assert finish(executor, job)[0].state is TaskState.COMPLETED

    def test_submission_that_the_cluster_was_too_busy_for_is_made_again(
        self, executor: SlurmExecutor, tmp_path: Path, commands_first: Callable[[str, str], Path], quick: None
    ) -> None:
        busy = 'echo "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying" >&2; exit 1'
        commands_first("sbatch", f'[ -e $FOLDER/tried ] || {{ touch $FOLDER/tried; {busy}; }}; exec "$REAL" "$@"')
        spec = python(tmp_path, "pass", tag=unique("busy"))
        assert jobs_named(spec.tag) == [] or pytest.fail("it was there before")
        assert [executor.submit(spec)] == jobs_named(spec.tag)

    def test_trouble_that_does_not_pass_is_told_in_the_end(
        self, executor: SlurmExecutor, tmp_path: Path, commands_first: Callable[[str, str], Path], quick: None
    ) -> None:
        commands_first("sbatch", 'echo "sbatch: error: Unable to contact slurm controller" >&2; exit 1')
        with pytest.raises(SubmissionRefused, match="Unable to contact slurm controller") as refused:
            executor.submit(python(tmp_path, "pass"))
        assert "sinfo" in refused.value.remedy

    def test_tag_that_another_executor_submitted_is_found(self, executor: SlurmExecutor, tmp_path: Path) -> None:
        spec = python(tmp_path, "pass", tag=unique("again"))
        job = executor.submit(spec)
        with opened() as another:
            assert another.submit(spec) == job
        finish(executor, job)
        with opened() as third:
            assert third.submit(spec) == job

    @pytest.fixture
    def quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Try again at once."""
        monkeypatch.setattr(module, "TRIES_S", (0.1, 0.1))


class TestEnds:
    def test_cancelled_task_does_not_come_back(self, executor: SlurmExecutor, tmp_path: Path) -> None:
        job = executor.submit(python(tmp_path, TELLS_ON_SIGNALS))
        log = Path(executor.status([job])[0].stdout)
        step_until(executor, lambda: log.exists() and "began" in log.read_text())
        executor.cancel([job])
        (task,) = finish(executor, job)
        assert (task.state, task.restarts) == (TaskState.CANCELLED, 0)
        assert log.read_text() == f"began None\ntold {int(signal.SIGTERM)}\n"
        assert executor.queued([job]) == set()

    @pytest.mark.nightly
    @pytest.mark.parametrize("sacct", ["exit 1", "echo garbage", "kill -9 $$"])
    def test_without_accounting_the_queue_is_believed(
        self, executor: SlurmExecutor, tmp_path: Path, commands_first: Callable[[str, str], Path], sacct: str
    ) -> None:
        commands_first("sacct", sacct)
        spec = python(tmp_path, "import sys; sys.exit(sys.argv[1] == '1')", tasks=2)
        tasks = finish(executor, executor.submit(spec))
        assert [(task.state, task.exit_code) for task in tasks] == [(TaskState.COMPLETED, 0), (TaskState.FAILED, None)]

    def test_job_that_nobody_has_heard_of_is_unknown_and_not_done(
        self, executor: SlurmExecutor, tmp_path: Path
    ) -> None:
        executor.adopt("999999", python(tmp_path, "pass"))
        step_until(executor, lambda: executor.status(["999999"])[0].state is TaskState.UNKNOWN)

    def test_queue_that_does_not_answer_changes_nothing(
        self, executor: SlurmExecutor, tmp_path: Path, commands_first: Callable[[str, str], Path]
    ) -> None:
        job = executor.submit(python(tmp_path, WAITS))
        step_until(executor, lambda: executor.status([job])[0].state is TaskState.RUNNING)
        commands_first("squeue", 'echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1')
        assert executor.step(0.5) == []
        assert "Unable to contact" in executor.trouble
        assert executor.queued([job]) == {job}

    def test_waiting_task_says_what_for(self, executor: SlurmExecutor, tmp_path: Path) -> None:
        first = executor.submit(python(tmp_path, WAITS))
        second = executor.submit(python(tmp_path, "pass", after_any=(first,)))
        step_until(executor, lambda: bool(executor.status([second])[0].waits_for))

    def test_a_waiting_job_is_told_to_begin_after_other_jobs_and_off_some_nodes(
        self, executor: SlurmExecutor, tmp_path: Path, cluster: Cluster
    ) -> None:
        first, waiting = (executor.submit(python(tmp_path, WAITS, begin_s=begin_s)) for begin_s in (0, 600))
        later = python(tmp_path, "pass", after_any=(first, "999999"), exclude=(cluster.nodes[0],))
        executor.reschedule(waiting, later)
        shown = cluster.run("squeue", "--noheader", f"--jobs={waiting}", "--format=%E %x").stdout
        assert shown.split() == [f"afterany:{first}_*(unfulfilled)", cluster.nodes[0]]
        executor.cancel([first])
        step_until(executor, lambda: executor.status([waiting])[0].state is TaskState.RUNNING)
        assert executor.status([waiting])[0].node in cluster.nodes[1:]
        executor.reschedule(waiting, later)  # it has begun: nothing changes
        executor.cancel([waiting])
        finish(executor, waiting)
        executor.reschedule(waiting, later)

    def test_of_two_that_submit_the_same_tag_at_once_one_job_stays(
        self, executor: SlurmExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spec, named, rival = python(tmp_path, WAITS, tag=f"twice-{tmp_path.name}"), slurm_commands.named, list[str]()

        def looks(name: str) -> set[str]:
            """Let another process submit after this one has looked, and before it submits."""
            found = named(name)
            if not rival:
                rival.append("")
                rival[0] = SlurmExecutor(SlurmSection()).submit(spec)
            return found

        monkeypatch.setattr(slurm_commands, "named", looks)
        assert executor.submit(spec) == rival[0]
        step_until(executor, lambda: len(executor.queued(named(spec.tag))) == 1)
        assert executor.queued(named(spec.tag)) == {rival[0]}

    def test_a_dependency_that_the_queue_has_forgotten_is_met(self, executor: SlurmExecutor, tmp_path: Path) -> None:
        after = executor.submit(python(tmp_path, "pass", after_any=("999999",)))
        assert finish(executor, after)[0].state is TaskState.COMPLETED


class TestRefusals:
    @pytest.mark.nightly
    def test_what_the_cluster_refuses_names_the_setting_to_change(self, tmp_path: Path) -> None:
        sites: list[tuple[dict[str, object], str]] = [
            ({"partition": "nope"}, "main, preempt, short, urgent"),
            ({"account": "nope"}, "cluster.slurm.account"),
            ({"qos": "nope"}, "cluster.slurm.qos"),
            ({"reservation": "nope"}, "cluster.slurm.reservation"),
            ({"constraint": "nope"}, "cluster.slurm.constraint"),
            ({"account": "lab", "qos": "tiny"}, "cluster.slurm.max_submit"),
            ({"options": ("--no-such",)}, "pipeline submit test"),
        ]
        for site, remedy in sites:
            with opened(**site) as executor, pytest.raises(SubmissionRefused) as refused:
                executor.submit(python(tmp_path, "pass", tasks=TINY_MAX_SUBMIT + 1))
            assert remedy in refused.value.remedy, site

    def test_too_much_time_is_refused_with_the_limit(self, executor: SlurmExecutor, tmp_path: Path) -> None:
        with pytest.raises(SubmissionRefused) as refused:
            executor.starts(python(tmp_path, "pass", time_s=2 * 86_400))
        assert "cluster.test.time" in refused.value.remedy

    def test_test_says_when_a_job_would_start(self, executor: SlurmExecutor, tmp_path: Path) -> None:
        before = time.time()
        start = executor.starts(python(tmp_path, "pass", time_s=60))
        assert start is not None
        assert before - 2 < start < before + 86_400
        assert not tmp_path.joinpath("1.sbatch").exists()

    def test_machine_without_slurm_is_told_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(SubmissionRefused, match="sbatch") as refused:
            SlurmExecutor(SlurmSection()).submit(python(tmp_path, "pass"))
        assert "--executor local" in refused.value.remedy

    def test_folder_of_logs_that_cannot_be_made_is_told(self, executor: SlurmExecutor, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(SubmissionRefused):
            executor.submit(python(tmp_path / "file", "pass"))
