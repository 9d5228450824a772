"""Small programs that tasks run, and how a test waits for them."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cluster.job_spec import TASK, Job, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeline.cluster.job_spec import Executor, JobId, TaskStatus

DEADLINE_S = 60.0
ASKED = {field.name for field in fields(Request)}
MIB = 1 << 20
EATS = "import signal; eaten = b'x' * (200 << 20); signal.pause()"
WAITS = "import signal; signal.pause()"
IGNORES_TERM = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAITS}"
AWAIT = """
import pathlib, time
def await_file(path):
    deadline = time.monotonic() + 60
    while not pathlib.Path(path).exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.005)
"""


def as_daemon(body: str) -> str:
    """Return a program that runs `body` in a grandchild which has left the session and lost its parent."""
    return f"""
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {body}
    os._exit(0)
os.wait()
"""


def python(log_dir: Path, body: str, *arguments: str, tasks: int = 1, **more: object) -> Job:
    """Return a job whose tasks run a Python program with the task's number as their last argument."""
    argv = (sys.executable, "-S", "-c", body, *arguments, TASK)
    return job_of("test", argv, range(tasks), str(log_dir), **more)


def job_of(name: str, argv: tuple[str, ...], tasks: Sequence[int], log_dir: str, **more: Any) -> Job:
    """Return a job; what its tasks ask for stands among its own fields."""
    request = Request(**{name: more.pop(name) for name in ASKED & more.keys()})
    return Job(name, argv, tasks, log_dir, request, **more)


def finish(executor: Executor, *jobs: JobId) -> list[TaskStatus]:
    step_until(executor, lambda: all(task.state.ended for task in executor.status(jobs)))
    return executor.status(jobs)


def step_until(executor: Executor, true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, "this takes too long"
        executor.step(0.02)


def await_true(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, "this takes too long"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """Tell whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_there(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")  # noqa: PTH110 - a race-free single question


def written_pid(path: Path) -> int:
    """Return the process number that a program has written; 0 until it has."""
    try:
        return int(path.read_text() or 0)
    except FileNotFoundError:
        return 0
