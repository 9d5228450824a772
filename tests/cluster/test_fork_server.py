"""Tasks that are forked: processes of their own all the same, and what becomes of them without their server."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline.cluster.fork_server import CAN_FORK
from pipeline.cluster.job_spec import TaskState
from pipeline.cluster.local import LocalExecutor
from pipeline.config.schema import Config
from pipeline.journal.attempts import Ask
from pipeline.journal.run_folder import RunFolder
from pipeline.journal.run_status import StageJob
from pipeline.stages.jobs import job_of
from tests.cluster.conftest import FORKS, ForkingExecutor, open_forking
from tests.cluster.programs import AWAIT, MIB, WAITS, await_true, finish, is_running, python, step_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.cluster.job_spec import Job

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="this system tells nobody how another's child ended")

TELLS = """
import os, random, sys
mark = [entry for entry in open("/proc/self/environ").read().split("\\0") if entry.startswith("PIPELINE_LOCAL_TASK=")]
print(os.getsid(0) == os.getpid(), mark == ["PIPELINE_LOCAL_TASK=" + os.environ["PIPELINE_LOCAL_TASK"]])
print(os.environ["PIPELINE_LOCAL_TASK"], random.random(), os.getppid())
"""


@pytest.fixture
def forking() -> Iterator[LocalExecutor]:
    with open_forking() as opened:
        yield opened


def server_pid(executor: LocalExecutor) -> int:
    assert executor.runner.server is not None
    return executor.runner.server._process.pid


def after(path: Path, spec: Job) -> Job:
    """Return a job whose server is ready only when there is a file at that path."""
    slow = f"import sys, tests.cluster.programs as programs; exec(programs.AWAIT); await_file({str(path)!r})"
    return replace(spec, fork_server=(*FORKS[:2], f"{slow}; {FORKS[2]}"), fork_words=2)


def test_forks_are_sessions_with_a_mark_random_numbers_and_logs_of_their_own(
    forking: LocalExecutor, tmp_path: Path
) -> None:
    tasks = finish(forking, forking.submit(python(tmp_path, TELLS, tasks=2)))
    told = [Path(task.stdout).read_text().splitlines() for task in tasks]
    assert [lines[0] for lines in told] == ["True True"] * 2
    (mark, number, parent), (other_mark, other_number, other_parent) = (lines[1].split() for lines in told)
    assert mark != other_mark
    assert number != other_number
    assert parent == other_parent == str(server_pid(forking))


def test_memory_is_that_of_each_fork_and_not_of_those_before_it(forking: LocalExecutor, tmp_path: Path) -> None:
    bodies = (f"import time; eaten = b'x' * {size}; sum(range(2_000_000)); time.sleep(0.3)" for size in (200 * MIB, 1))
    large, small = (finish(forking, forking.submit(python(tmp_path, body)))[0] for body in bodies)
    assert (large.peak_rss_bytes or 0) > 200 * MIB > (small.peak_rss_bytes or 0) > 0
    assert 0 < (small.cpu_s or 0) < 30


def test_job_waits_for_its_server_and_can_be_cancelled_meanwhile(tmp_path: Path) -> None:
    with LocalExecutor(grace_s=0.3) as executor:
        job = executor.submit(after(tmp_path / "never", python(tmp_path, "pass")))
        assert executor.step(0.05) == []
        assert executor.status([job])[0].state is TaskState.PENDING
        executor.cancel([job])
        assert executor.status([job])[0].state is TaskState.CANCELLED


def test_server_that_dies_while_it_imports_is_done_without(tmp_path: Path) -> None:
    with LocalExecutor(grace_s=0.3) as executor:
        job = executor.submit(after(tmp_path / "never", python(tmp_path, TELLS)))
        os.kill(server_pid(executor), signal.SIGKILL)
        (task,) = finish(executor, job)
        assert task.state is TaskState.COMPLETED
        assert Path(task.stdout).read_text().split()[-1] == str(os.getpid())


def test_task_whose_server_dies_is_lost_and_the_next_gets_a_process_that_was_not_forked(
    forking: LocalExecutor, tmp_path: Path
) -> None:
    path = tmp_path / "go"
    lost = forking.submit(python(tmp_path, f"{AWAIT}\nimport sys; await_file(sys.argv[1])", str(path)))
    step_until(forking, lambda: forking.status([lost])[0].state is TaskState.RUNNING)
    os.kill(server_pid(forking), signal.SIGKILL)
    await_true(lambda: not is_running(server_pid(forking)))
    path.touch()
    step_until(forking, lambda: forking.status([lost])[0].state is TaskState.UNKNOWN)
    (task,) = finish(forking, forking.submit(python(tmp_path, TELLS)))
    assert Path(task.stdout).read_text().split()[-1] == str(os.getpid())


def test_task_of_another_environment_is_not_forked(forking: LocalExecutor, tmp_path: Path) -> None:
    jobs = [forking.submit(python(tmp_path, TELLS, cpus=cpus)) for cpus in (1, 2)]
    parents = [Path(task.stdout).read_text().split()[-1] for task in finish(forking, *jobs)]
    assert parents == [str(server_pid(forking)), str(os.getpid())]


def test_closing_ends_forks_and_server(tmp_path: Path) -> None:
    with ForkingExecutor(grace_s=0.3) as executor:
        job = executor.submit(python(tmp_path, WAITS))
        step_until(executor, lambda: executor.status([job])[0].state is TaskState.RUNNING)
        pids = [server_pid(executor), *(task.pid for task in executor.runner.running.values())]
        assert all(map(is_running, pids))
    assert not any(map(is_running, pids))


def test_what_is_forked(tmp_path: Path) -> None:
    def spec(stage: str, executor: str, attempt: int, cluster: dict[str, dict[str, int]]) -> Job:
        section = {"executor": executor, **cluster}
        config = Config.model_validate({"data": {"source": "manifest", "path": Path("data.csv")}, "cluster": section})
        gpus = cluster.get(stage, {}).get("gpus", 0)
        job = StageJob(tag="", stage=stage, tasks="0", attempt=attempt, ask=Ask(MIB, 60), cpus=1, gpus=gpus)
        return job_of(folder, config, job)

    folder = RunFolder(tmp_path)
    folder.stages.write_text('["scan", "embed", "graph", "train"]')
    for *asked, is_forked in [
        ("embed", "local", 1, {}, True),
        ("train", "local", 1, {}, True),
        ("scan", "local", 1, {}, False),
        ("embed", "local", 2, {}, False),
        ("embed", "slurm", 1, {}, False),
        ("train", "local", 1, {"train": {"ranks": 2}}, False),
        ("embed", "local", 1, {"embed": {"gpus": 1}}, False),
    ]:
        assert bool(spec(*asked).fork_words) == is_forked, asked
    scan = ("scan", "local", 1, {})  # while it runs, the server of later stages imports
    assert spec(*scan).fork_server[0] == sys.executable
    folder.stages.write_text('["scan"]')
    assert spec(*scan).fork_server == ()
