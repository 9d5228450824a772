"""One started task: its processes, the limits it is held to, and how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cluster.job_spec import TaskState
from pipeline.cluster.machine import count_oom_kills
from pipeline.cluster.processes import HAS_PROC, MARK, send, used_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.cluster.job_spec import JobId, JobSpec

MEASURING_SHARE = 0.1  # at most this part of a core goes into measuring one task
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
KILLED = 128 + signal.SIGKILL  # how a shell reports a program that was killed


@dataclass(frozen=True, slots=True)
class Ending:
    """How a task ended."""

    state: TaskState
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None


class Child:
    """A running task: its first process leads a session of its own, so a Ctrl-C in the terminal does not reach it."""

    def __init__(self, spec: JobSpec, job: JobId, task: int, gpus: tuple[str, ...], grace_s: float) -> None:
        """Start the task, or raise OSError."""
        self.mark = f"{job}_{task}"
        self.gpus = gpus
        self.peak_bytes: int | None = None
        self._spec, self._grace_s = spec, grace_s
        self._oom_kills = count_oom_kills()
        self._process = _start(spec, job, task, environment(spec, gpus, self.mark))
        self.pid = self._process.pid
        self.exit_fd = _open_exit_fd(self.pid)
        self._timeout_at = None if spec.time_s is None else time.monotonic() + spec.time_s
        self._measure_at = 0.0
        self._verdict: tuple[TaskState, str] | None = None  # ours, when it is we who end the task
        self._told = False
        self._kill_at = 0.0
        self._exited = False

    def stop(self, state: TaskState, reason: str) -> None:
        """Decide that the task ends now, after its grace; the first decision stands."""
        if self._verdict is None:
            self._verdict = (state, reason)
            self._kill_at = time.monotonic() + self._grace_s

    def kill(self) -> None:
        """Take away what is left of the grace."""
        self._kill_at = 0.0

    def has_exited(self) -> bool:
        """Tell whether the first process has exited just now; its number stays taken until the whole tree is gone."""
        if self._exited:
            return False
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # somebody else in this process took its status
            self._exited = True
        else:
            self._exited = found is not None
        return self._exited

    def hold_to_limits(self, pids: list[int]) -> bool:
        """Look at the task's living processes, end what must end; tell whether all of it is over."""
        now = time.monotonic()
        if self._exited:  # as under Slurm, nothing outlives the first process; without /proc it can only be told once
            return not send(signal.SIGKILL, pids) or not HAS_PROC
        self._measure(pids, now)
        if self._timeout_at is not None and now >= self._timeout_at:
            self.stop(TaskState.TIMEOUT, f"ran longer than its limit of {self._spec.time_s} s")
        if self._verdict is not None:
            self._end(pids, now)
        return False

    def _measure(self, pids: list[int], now: float) -> None:
        """Measure the memory of the tree, and decide that the task ends if it is over its limit."""
        if not pids or now < self._measure_at:
            return
        used, limit = used_bytes(pids), self._spec.mem_bytes
        cost_s = time.monotonic() - now
        self._measure_at = now + (cost_s / MEASURING_SHARE if len(pids) > 1 else 0.0)
        self.peak_bytes = max(used, self.peak_bytes or 0) or None
        if limit is not None and used > limit:
            self.stop(TaskState.OUT_OF_MEMORY, f"used {mebibytes(used)} of the {mebibytes(limit)} it asked for")
            self.kill()

    def _end(self, pids: list[int], now: float) -> None:
        """Send SIGTERM once, and SIGKILL from the end of the grace on."""
        if now >= self._kill_at:
            send(signal.SIGKILL, pids)
        elif not self._told:
            send(signal.SIGTERM, pids)
        self._told = True

    def ending(self) -> Ending:
        """Collect the first process, and judge how the task ended."""
        code = self._collect()
        if code is None:
            return Ending(*(self._verdict or (TaskState.UNKNOWN, "its exit status was lost")))
        exit_code, killed_by = (code, None) if code >= 0 else (None, -code)
        state, reason = self._verdict or self._judge(exit_code, killed_by)
        return Ending(state, reason, exit_code, killed_by)

    def _collect(self) -> int | None:
        """Return the exit code, negative for the signal that killed it, or None where the status is lost."""
        self._process.returncode = 0  # so that Popen does not look for it, too
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            return None

    def _judge(self, exit_code: int | None, killed_by: int | None) -> tuple[TaskState, str]:
        """Judge an end that was not of our doing."""
        if exit_code == 0:
            return TaskState.COMPLETED, ""
        if killed_by == signal.SIGKILL or exit_code == KILLED:
            kills = count_oom_kills() - self._oom_kills
            if kills > 0:
                return TaskState.OUT_OF_MEMORY, f"killed by the kernel: out of memory (oom_kill rose by {kills})"
            return TaskState.FAILED, "killed by signal 9 (outside this pipeline; the kernel's OOM killer?)"
        if killed_by is not None:
            return TaskState.FAILED, f"killed by signal {killed_by} ({signal.strsignal(killed_by)})"
        return TaskState.FAILED, f"exit code {exit_code}"


def environment(spec: JobSpec, gpus: tuple[str, ...], mark: str) -> dict[str, str]:
    """Return the environment of a task: ours, threads and GPUs by what it was lent, what the job adds, and its mark."""
    threads = dict.fromkeys(THREADS, str(spec.cpus))
    return {**os.environ, **threads, **spec.env, "CUDA_VISIBLE_DEVICES": ",".join(gpus), MARK: mark}


def mebibytes(count: int) -> str:
    """Write a number of bytes as the configuration takes it."""
    return f"{count >> 20}MiB"


def _start(spec: JobSpec, job: JobId, task: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the first process of a task, its output appended to the task's logs."""
    out, err = spec.log_paths(job, task)
    with Path(out).open("ab") as stdout, Path(err).open("ab") as stderr:
        return subprocess.Popen(
            spec.command(task),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=env,
            start_new_session=True,
        )


def _open_exit_fd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when a process exits, where the system has such a thing."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
