"""What every executor does, whatever runs the tasks."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.cluster.job_spec import TaskState
from pipeline.cluster.slurm import SlurmExecutor
from pipeline.errors import ConfigError, SubmissionRefused
from tests.cluster.conftest import EXECUTORS
from tests.cluster.programs import AWAIT, EATS, IGNORES_TERM, MIB, WAITS, finish, job_of, python, step_until

if TYPE_CHECKING:
    from pipeline.cluster.job_spec import Executor, Job
    from pipeline.cluster.local import LocalExecutor

PRINTS_ARGUMENTS = "import json, sys; print(json.dumps(sys.argv[1:]))"
CAN_BE_TOLD = re.compile(r"[^\n\\\udc80-\udcff]*")  # what the header of a batch script can hold
HOSTILE = (
    "  two words  ",
    """it's "so" `called`""",
    "first\nsecond\r\n",
    "$HOME ${PATH} $(id) %A_%a",
    "* ? [a-z] ~ {1..3} !",
    "\\n \\\\ \\",
    "; exit 1 # & | > /dev/null <",
    "Å → 蛋白质 🧬",
    "\udcff\udcfe",  # bytes that are no text
    "",
    "--help",
    "run {task} of {tasks}",
)
IMPOSSIBLE: tuple[dict[str, Any], ...] = (
    {"nodes": 1_000, "ranks": 1},
    {"ranks": 100_000},
    {"cpus": 100_000},
    {"gpus": 1_000},
    {"mem_bytes": 2 << 40},
)


class TestExecutor:
    """Inherits nothing and mocks nothing: every task is a real process."""

    def test_task_that_ends_well_is_completed(self, executor: Executor, tmp_path: Path) -> None:
        before = time.time()
        (task,) = finish(executor, executor.submit(python(tmp_path, "pass")))
        assert (task.task, task.state, task.exit_code, task.signal) == (0, TaskState.COMPLETED, 0, None)
        assert task.state.ok
        assert task.started is not None
        assert task.ended is not None
        assert before - 1 <= task.started <= task.ended <= time.time() + 1

    def test_exit_codes_and_signals_are_told_apart(self, executor: Executor, tmp_path: Path) -> None:
        kills = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)"
        jobs = [executor.submit(python(tmp_path, body)) for body in ("raise SystemExit(3)", kills)]
        code, killed = finish(executor, *jobs)
        assert (code.state, code.exit_code, code.signal) == (TaskState.FAILED, 3, None)
        assert (killed.state, killed.exit_code, killed.signal) == (TaskState.FAILED, None, signal.SIGUSR1)

    def test_program_that_is_not_there_is_a_failed_task(self, executor: Executor, tmp_path: Path) -> None:
        spec = job_of("test", ("/no/such/program",), tasks=range(2), log_dir=str(tmp_path))
        tasks = finish(executor, executor.submit(spec))
        assert [(task.state, bool(task.reason)) for task in tasks] == [(TaskState.FAILED, True)] * 2

    def test_every_task_has_its_number_and_its_logs(self, executor: Executor, tmp_path: Path) -> None:
        body = "import sys; print('out', sys.argv[1]); print('err', sys.argv[1], file=sys.stderr)"
        logs = tmp_path / "not made" / "yet"
        tasks = finish(executor, executor.submit(python(logs, body, tasks=5)))
        assert [task.task for task in tasks] == [0, 1, 2, 3, 4]
        assert [Path(task.stdout).read_text() for task in tasks] == [f"out {number}\n" for number in range(5)]
        assert [Path(task.stderr).read_text() for task in tasks] == [f"err {number}\n" for number in range(5)]

    def test_arguments_arrive_as_they_are(self, executor: Executor, tmp_path: Path) -> None:
        (task,) = finish(executor, executor.submit(python(tmp_path, PRINTS_ARGUMENTS, *HOSTILE)))
        assert json.loads(Path(task.stdout).read_text()) == [*HOSTILE, "0"], Path(task.stderr).read_text()

    def test_logs_go_to_a_folder_of_any_name_or_the_job_is_refused(self, executor: Executor, tmp_path: Path) -> None:
        jobs = {}
        for number, name in enumerate(HOSTILE):
            spec = python(tmp_path / str(number) / name.replace("/", "∕"), "print('here')")
            if isinstance(executor, SlurmExecutor) and not CAN_BE_TOLD.fullmatch(name):
                with pytest.raises((SubmissionRefused, ConfigError)):
                    executor.submit(spec)
            else:
                jobs[name] = executor.submit(spec)
        assert len(jobs) >= 9
        tasks = finish(executor, *jobs.values())
        logs = {name: Path(task.stdout).read_text() for name, task in zip(jobs, tasks, strict=True)}
        assert set(logs.values()) == {"here\n"}, logs

    def test_environment_is_added_to_and_stdin_is_empty(self, executor: Executor, tmp_path: Path) -> None:
        body = "import os, sys; print(os.environ['ADDED'], 'PATH' in os.environ, repr(sys.stdin.read()))"
        (task,) = finish(executor, executor.submit(python(tmp_path, body, env={"ADDED": "a b"})))
        assert Path(task.stdout).read_text() == "a b True ''\n"

    def test_no_more_tasks_than_allowed_run_at_once(self, executor: Executor, tmp_path: Path) -> None:
        tasks = finish(executor, executor.submit(in_pairs(tmp_path, tasks=6, max_parallel=2)))
        assert [task.state for task in tasks] == [TaskState.COMPLETED] * 6
        assert most_at_once(tmp_path, 6) == 2

    def test_memory_limit_kills_a_task_for_its_children_too_and_says_so(
        self, executor: Executor, tmp_path: Path
    ) -> None:
        child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {EATS!r}])"
        bodies = (EATS, child, "eaten = b'x' * (10 << 20)")
        over, parent, under = finish(
            executor, *(executor.submit(python(tmp_path, body, mem_bytes=60 * MIB)) for body in bodies)
        )
        assert over.state is parent.state is TaskState.OUT_OF_MEMORY
        assert under.state is TaskState.COMPLETED
        assert "60MiB" in over.reason
        assert over.peak_rss_bytes is not None or isinstance(executor, SlurmExecutor)  # which looks once a second

    def test_a_task_over_its_time_ends_even_if_it_ignores_sigterm(self, local: LocalExecutor, tmp_path: Path) -> None:
        (task,) = finish(local, local.submit(python(tmp_path, IGNORES_TERM, time_s=1)))
        assert (task.state, task.signal) == (TaskState.TIMEOUT, signal.SIGKILL)

    def test_cancelled_job_ends_with_all_its_tasks(self, executor: Executor, tmp_path: Path) -> None:
        job = executor.submit(python(tmp_path, WAITS, tasks=3, max_parallel=1))
        step_until(executor, lambda: executor.status([job])[0].state is TaskState.RUNNING)
        executor.cancel([job])
        tasks = finish(executor, job)
        assert [task.state for task in tasks] == [TaskState.CANCELLED] * 3
        assert [task.started is None for task in tasks] == [False, True, True]

    def test_tasks_that_are_cancelled_alone_end_whether_they_have_begun_or_not_and_the_others_go_on(
        self, executor: Executor, tmp_path: Path
    ) -> None:
        job = executor.submit(python(tmp_path, WAITS, tasks=4, max_parallel=2))
        step_until(executor, lambda: sum(task.state is TaskState.RUNNING for task in executor.status([job])) == 2)
        executor.cancel([job, "nobody.1"], [1, 3, 9])
        step_until(executor, lambda: [task.state.ended for task in executor.status([job])] == [False, True] * 2)
        step_until(executor, lambda: executor.status([job])[2].state is TaskState.RUNNING)
        assert [task.state for task in executor.status([job])] == [TaskState.RUNNING, TaskState.CANCELLED] * 2
        executor.cancel([job])
        assert {task.state for task in finish(executor, job)} == {TaskState.CANCELLED}

    def test_cancelling_changes_nothing_that_has_ended_or_was_never_there(
        self, executor: Executor, tmp_path: Path
    ) -> None:
        job = executor.submit(python(tmp_path, "pass"))
        ended = finish(executor, job)
        executor.cancel([job, "nobody.1"])
        assert finish(executor, job) == ended
        assert executor.status(["nobody.1"]) == []

    def test_step_tells_every_change_once(self, executor: Executor, tmp_path: Path) -> None:
        job = executor.submit(python(tmp_path, "pass", tasks=3))
        seen: list[tuple[int, TaskState]] = []
        while any(not task.state.ended for task in executor.status([job])):
            seen += [(task.task, task.state) for task in executor.step(10)]
        assert len(seen) == len(set(seen))
        assert {task for task, state in seen if state.ok} == {0, 1, 2}
        assert executor.step(0) == []

    def test_ids_are_never_used_again(self, executor: Executor, tmp_path: Path, request: pytest.FixtureRequest) -> None:
        with EXECUTORS[request.node.callspec.params["executor"]]() as other:
            ids = [each.submit(python(tmp_path, "pass")) for each in (executor, executor, other, other)]
        assert len(set(ids)) == 4

    def test_impossible_job_is_refused_with_a_command_that_helps(self, executor: Executor, tmp_path: Path) -> None:
        for asked in IMPOSSIBLE:
            possible = {"name": "scan", "argv": ("true",), "tasks": range(1), "log_dir": str(tmp_path)}
            with pytest.raises(SubmissionRefused) as refused:
                executor.submit(job_of(**{**possible, **asked}))
            assert "scan" in str(refused.value), asked
            assert refused.value.remedy.startswith("pipeline submit scan"), asked


def in_pairs(folder: Path, tasks: int, **more: object) -> Job:
    """Return a job whose tasks end only when their neighbour runs, too, and write down from when to when they ran."""
    body = f"""{AWAIT}
import sys
started, folder, number = time.monotonic_ns(), pathlib.Path(sys.argv[1]), int(sys.argv[2])
(folder / f"{{number}}.started").touch()
await_file(folder / f"{{number ^ 1}}.started")
(folder / f"{{number}}.interval").write_text(f"{{started}} {{time.monotonic_ns()}}")
"""
    return python(folder, body, str(folder), tasks=tasks, **more)


def most_at_once(folder: Path, tasks: int) -> int:
    intervals = [tuple(map(int, (folder / f"{number}.interval").read_text().split())) for number in range(tasks)]
    return max(sum(start <= moment <= end for start, end in intervals) for moment, _ in intervals)
