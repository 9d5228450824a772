"""One task of this machine: its first process, the limits that it is held to, and how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cluster.fork_server import is_readable
from pipeline.cluster.job_spec import TaskState, TaskStatus, mebibytes
from pipeline.cluster.machine import THREADS, count_oom_kills
from pipeline.cluster.processes import HAS_PROC, MARK, cpu_s, send, used_bytes
from pipeline.device.kinds import VISIBLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipeline.cluster.fork_server import ForkServer
    from pipeline.cluster.job_spec import Job, JobId

MEASURING_SHARE = 0.1  # at most this part of a core goes into measuring one task
KILLED = 128 + signal.SIGKILL  # how a shell reports a program that was killed


class LocalTask:
    """A task on this machine, before, while and after it runs.

    Its first process leads a session of its own, so a Ctrl-C in the terminal does not reach it.
    """

    def __init__(self, job_id: JobId, job: Job, number: int) -> None:
        self.job_id, self.job, self.number = job_id, job, number
        self.mark = f"{job_id}_{number}"
        self.state, self.reason = TaskState.PENDING, ""
        self.started: float | None = None
        self.ended: float | None = None
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.peak_bytes: int | None = None
        self.cpu_s: float | None = None  # once it has ended
        self.gpus: tuple[str, ...] = ()

    def status(self) -> TaskStatus:
        """Return what an executor reports of it."""
        return TaskStatus(
            self.job_id,
            self.number,
            self.state,
            *self.job.log_paths(self.job_id, self.number),
            exit_code=self.exit_code,
            signal=self.signal,
            peak_rss_bytes=self.peak_bytes,
            cpu_s=self.cpu_s,
            started=self.started,
            ended=self.ended,
            reason=self.reason,
        )

    def start(self, gpus: tuple[str, ...], grace_s: float, server: ForkServer | None) -> None:
        """Start it, forked from a server where there is one, or raise OSError."""
        self.gpus, self._grace_s, self.started = gpus, grace_s, time.time()
        self._oom_kills = count_oom_kills()
        env = task_environment(self.job, gpus, self.mark)
        logs, command = self.job.log_paths(self.job_id, self.number), self.job.command(self.number)
        self.pid, self.exit_fd, self._reap = _start(self.job, logs, command, env, server)
        self.state = TaskState.RUNNING
        time_s = self.job.request.time_s
        self._timeout_at = None if time_s is None else time.monotonic() + time_s
        self._measure_at = self._kill_at = 0.0
        self._verdict: tuple[TaskState, str] | None = None  # if this executor ended the task
        self._terminated = self._exited = False

    def stop(self, state: TaskState, reason: str) -> None:
        """End the running task, after its grace period; the first reason given stands."""
        if self._verdict is None:
            self._verdict = (state, reason)
            self._kill_at = time.monotonic() + self._grace_s

    def kill(self) -> None:
        """End what is left of the grace period."""
        self._kill_at = 0.0

    def has_exited(self) -> bool:
        """Tell whether the first process has exited just now; its pid stays reserved until the whole tree is gone."""
        if self._exited:
            return False
        try:
            if self.exit_fd is not None:
                self._exited = is_readable(self.exit_fd)
            else:
                self._exited = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # another part of this process took its status
            self._exited = True
        return self._exited

    def hold_to_limits(self, pids: list[int]) -> bool:
        """Check the task's living processes and end those that must end; tell whether the whole tree is gone."""
        now = time.monotonic()
        if self._exited:  # as under Slurm, nothing outlives the first process; without /proc it can only be told once
            return not send(signal.SIGKILL, pids) or not HAS_PROC
        self._measure(pids, now)
        if self._timeout_at is not None and now >= self._timeout_at:
            self.stop(TaskState.TIMEOUT, f"ran longer than its limit of {self.job.request.time_s} s")
        if self._verdict is not None:
            self._end(pids, now)
        return False

    def _measure(self, pids: list[int], now: float) -> None:
        """Measure the memory of the process tree, and end the task if it is over its limit."""
        if not pids or now < self._measure_at:
            return
        used, limit = used_bytes(pids), self.job.request.mem_bytes
        cost_s = time.monotonic() - now
        self._measure_at = now + (cost_s / MEASURING_SHARE if len(pids) > 1 else 0.0)
        self.peak_bytes = max(used, self.peak_bytes or 0) or None
        if limit is not None and used > limit:
            self.stop(TaskState.OUT_OF_MEMORY, f"used {mebibytes(used)} of {mebibytes(limit)} requested")
            self.kill()

    def _end(self, pids: list[int], now: float) -> None:
        """Send SIGTERM once, and SIGKILL after the grace period."""
        if now >= self._kill_at:
            send(signal.SIGKILL, pids)
        elif not self._terminated:
            send(signal.SIGTERM, pids)
        self._terminated = True

    def reap(self) -> None:
        """Take the exit status of the first process, and judge how the task ended."""
        self.cpu_s = cpu_s(self.pid)
        code = self._reap()
        if code is not None:
            self.exit_code, self.signal = (code, None) if code >= 0 else (None, -code)
            self.end(*(self._verdict or self._judge()))
        else:
            self.end(*(self._verdict or (TaskState.UNKNOWN, "its exit status is unknown")))

    def end(self, state: TaskState, reason: str) -> None:
        """Record how the task ended."""
        self.state, self.reason, self.ended = state, reason, time.time()

    def _judge(self) -> tuple[TaskState, str]:
        """Judge the end of a task that this executor did not end itself."""
        if self.exit_code == 0:
            return TaskState.COMPLETED, ""
        if self.signal == signal.SIGKILL or self.exit_code == KILLED:
            kills = count_oom_kills() - self._oom_kills
            if kills > 0:
                return TaskState.OUT_OF_MEMORY, f"killed by the kernel: out of memory (oom_kill rose by {kills})"
            return TaskState.FAILED, "killed by signal 9 (outside this pipeline; the kernel's OOM killer?)"
        if self.signal is not None:
            return TaskState.FAILED, f"killed by signal {self.signal} ({signal.strsignal(self.signal)})"
        return TaskState.FAILED, f"exit code {self.exit_code}"


def task_environment(job: Job, gpus: tuple[str, ...], mark: str) -> dict[str, str]:
    """Return a task's environment: ours, thread counts and GPUs by what it was lent, the job's own, and its mark."""
    threads = dict.fromkeys(THREADS, str(job.request.cpus))
    return {**os.environ, **threads, **job.env, VISIBLE: ",".join(gpus), MARK: mark}


def _start(
    job: Job, logs: tuple[str, str], command: list[str], env: Mapping[str, str], server: ForkServer | None
) -> tuple[int, int | None, Callable[[], int | None]]:
    """Start the first process of a task, forked from a server if there is one, its output appended to the task's logs.

    Return its pid, a descriptor that becomes readable when it exits, and how to take its exit code: negative if a
    signal killed it, None if the code is lost.
    """
    out, err = logs
    with Path(out).open("ab") as stdout, Path(err).open("ab") as stderr:
        if server is not None and server.suits(job.fork_server, env):
            with contextlib.suppress(OSError):  # it is gone: the task gets a process that was not forked
                pid, exit_fd = server.fork(command[-job.fork_words :], env, (stdout.fileno(), stderr.fileno()))
                return pid, exit_fd, partial(server.reap, pid)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=env, start_new_session=True
        )
    return process.pid, _open_exit_fd(process.pid), partial(_reap, process)


def _open_exit_fd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when a process exits (Linux's pidfd), or None."""
    with contextlib.suppress(OSError, AttributeError):
        return os.pidfd_open(pid)
    return None


def _reap(process: subprocess.Popen[bytes]) -> int | None:
    process.returncode = 0  # so that Popen does not look for it, too
    try:
        return os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
    except ChildProcessError:
        return None
