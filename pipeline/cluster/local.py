"""Runs tasks as child processes of this one, with the same behaviour as under Slurm.

Memory is limited by sampling the whole process tree, not by a cgroup: this needs no rights and no set-up, and misses
peaks shorter than a sample. Limits hold only while a caller steps.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cluster.fork_server import CAN_FORK, ForkServer, is_readable
from pipeline.cluster.job_spec import TaskState, TaskStatus, mebibytes
from pipeline.cluster.machine import THREADS, Machine, count_oom_kills
from pipeline.cluster.placing import Node, PlacingExecutor
from pipeline.cluster.processes import MARK, Guard, ProcessTable, cpu_s, send, used_bytes
from pipeline.device.kinds import VISIBLE
from pipeline.waiting import signals_held

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipeline.cluster.job_spec import Job, JobId

LOOK_EVERY_S = 0.05  # how often limits are checked
POLL_EVERY_S = 0.01  # how often to poll for exits without pidfd
GRACE_S = 10.0
MEASURING_SHARE = 0.1  # most of a core spent on measuring one task
KILLED = 128 + signal.SIGKILL  # exit code of shells for a killed program


class LocalTask:
    """A task on this machine, during and after its run.

    Its first process leads its own session, so that a Ctrl-C in the terminal does not reach it.
    """

    def __init__(self, job: Job, mark: str, gpus: tuple[str, ...]) -> None:
        """Take a job of which it is the only task."""
        self.job, self.mark, self.gpus, self.peak_bytes = job, mark, gpus, 0
        (self.number,) = job.tasks
        self.logs = job.log_paths("", self.number)
        self.status = TaskStatus("", self.number, TaskState.RUNNING, *self.logs, started=time.time())

    def start(self, grace_s: float, server: ForkServer | None) -> None:
        """Start it, forked from the server if there is one, or raise OSError."""
        self._grace_s, self._oom_kills = grace_s, count_oom_kills()
        env, command = task_environment(self.job, self.gpus, self.mark), self.job.command(self.number)
        self.pid, self.exit_fd, self._reap = _start(self.job, self.logs, command, env, server)
        time_s = self.job.request.time_s
        self._timeout_at = None if time_s is None else time.monotonic() + time_s
        self._measure_at = self._kill_at = 0.0
        self._verdict: tuple[TaskState, str] | None = None  # if this executor ended the task
        self._terminated = self._exited = False

    def stop(self, state: TaskState, reason: str) -> None:
        """End the running task, after its grace period; the first reason counts."""
        if self._verdict is None:
            self._verdict = (state, reason)
            self._kill_at = time.monotonic() + self._grace_s

    def kill(self) -> None:
        """End the grace period now."""
        self._kill_at = 0.0

    def has_exited(self) -> bool:
        """Tell whether the first process has just exited; its pid stays reserved until the whole tree is gone."""
        if self._exited:
            return False
        try:
            if self.exit_fd is not None:
                self._exited = is_readable(self.exit_fd)
            else:
                self._exited = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # another part of this process reaped it
            self._exited = True
        return self._exited

    def hold_to_limits(self, pids: list[int]) -> bool:
        """Check the task's processes and end those over a limit; return whether the whole tree is gone."""
        now = time.monotonic()
        if self._exited:  # as under Slurm, nothing outlives the first process
            return not send(signal.SIGKILL, pids)
        self._measure(pids, now)
        if self._timeout_at is not None and now >= self._timeout_at:
            self.stop(TaskState.TIMEOUT, f"ran longer than its limit of {self.job.request.time_s} s")
        if self._verdict is not None:
            self._end(pids, now)
        return False

    def _measure(self, pids: list[int], now: float) -> None:
        """Measure the memory of the process tree; end the task if it exceeds its limit."""
        if not pids or now < self._measure_at:
            return
        used, limit = used_bytes(pids), self.job.request.mem_bytes
        cost_s = time.monotonic() - now
        self._measure_at = now + (cost_s / MEASURING_SHARE if len(pids) > 1 else 0.0)
        self.peak_bytes = max(used, self.peak_bytes)
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

    def reap(self) -> TaskStatus:
        """Take the exit status of the first process, and return how the task ended."""
        spent_s, code = cpu_s(self.pid), self._reap()
        return replace(
            self.ended(*(self._verdict or self._judge(code))),
            exit_code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            peak_rss_bytes=self.peak_bytes or None,
            cpu_s=spent_s,
        )

    def ended(self, state: TaskState, reason: str) -> TaskStatus:
        """Return its status for this end."""
        return replace(self.status, state=state, reason=reason, ended=time.time())

    def _judge(self, code: int | None) -> tuple[TaskState, str]:
        """Judge the end of a task that this executor did not end itself; a negative code is a signal."""
        if code is None:
            return TaskState.UNKNOWN, "its exit status is unknown"
        if code == 0:
            return TaskState.COMPLETED, ""
        if code in (-signal.SIGKILL, KILLED):
            kills = count_oom_kills() - self._oom_kills
            if kills > 0:
                return TaskState.OUT_OF_MEMORY, f"killed by the kernel: out of memory (oom_kill rose by {kills})"
            return TaskState.FAILED, "killed by signal 9 (outside this pipeline; the kernel's OOM killer?)"
        if code < 0:
            return TaskState.FAILED, f"killed by signal {-code} ({signal.strsignal(-code)})"
        return TaskState.FAILED, f"exit code {code}"


class TaskRunner(Node):
    """Runs tasks on this machine while it is open; if its process is killed, a guard process ends them."""

    def __init__(self, machine: Machine, grace_s: float, prefix: str, note: Callable[[int, TaskStatus], None]) -> None:
        """Call `note` with each state of a piece; `grace_s` is the time from SIGTERM to SIGKILL."""
        super().__init__("", machine)
        self._grace_s, self._note = grace_s, note
        self._prefix = prefix  # of the marks of its processes
        self._table = ProcessTable(self._prefix)
        self._guard: Guard | None = None
        self.server: ForkServer | None = None
        self.events = selectors.DefaultSelector()
        self._look_at = 0.0
        self.running: dict[int, LocalTask] = {}  # by piece

    def serve(self, job: Job) -> None:
        """Start the fork server for the tasks of this and later jobs."""
        if not (job.fork_server and CAN_FORK) or self.server is not None:
            return
        self._guard = self._guard or Guard(self._prefix, self._grace_s)
        env = task_environment(job, (), "")
        del env[MARK]
        with suppress(OSError):  # tasks start as ordinary processes
            self.server = ForkServer(job.fork_server, env, f"{self._prefix}forks")
            self.events.register(self.server, selectors.EVENT_READ)

    @property
    def awaits_server(self) -> bool:
        """Whether the server is still importing."""
        return self.server is not None and not self.server.is_ready

    def start(self, piece: int, job: Job, gpus: tuple[str, ...]) -> None:
        """Start the task of a job; one that cannot be started counts as failed."""
        self._guard = self._guard or Guard(self._prefix, self._grace_s)
        task = LocalTask(job, f"{self._prefix}{piece}", gpus)
        try:
            task.start(self._grace_s, self.server if job.fork_words and not self.awaits_server else None)
        except OSError as error:
            self._note(piece, task.ended(TaskState.FAILED, f"could not be started: {error}"))
            return
        self.running[piece] = task
        if task.exit_fd is not None:
            self.events.register(task.exit_fd, selectors.EVENT_READ)
        self._note(piece, task.status)

    def stop(self, piece: int) -> None:
        """Request the end of a task, after its grace period."""
        if piece in self.running:  # else it is ending already
            self.running[piece].stop(TaskState.CANCELLED, "cancelled")
        self._look_at = 0.0

    def watch(self) -> None:
        """Check the running tasks when one has exited or the next check is due."""
        exited = [task for task in self.running.values() if task.has_exited()]
        for task in exited:
            if task.exit_fd is not None:
                self.events.unregister(task.exit_fd)
                os.close(task.exit_fd)
        now = time.monotonic()
        if exited or now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            self._table.refresh({task.pid: task.mark for task in self.running.values()})
            for piece, task in list(self.running.items()):
                if task.hold_to_limits(self._table.of(task.mark)):
                    del self.running[piece]
                    self._note(piece, task.reap())
        self._hear_server()

    def wait(self, timeout_s: float) -> None:
        """Wait until a task's first process exits, a signal arrives, or the next check is due."""
        notified = all(task.exit_fd is not None for task in self.running.values())
        often_s = LOOK_EVERY_S if notified else POLL_EVERY_S
        self.events.select(min(timeout_s, often_s) if self.running else timeout_s)

    def close(self, begin: Callable[[], object] = lambda: None) -> None:
        """End every task after its grace; an exception meanwhile (a second Ctrl-C), or in `begin`, ends the grace."""
        try:
            begin()
            self._end_all()
        finally:
            for task in self.running.values():
                task.kill()
            self._end_all()
            self._dismiss_server()
            self.events.close()
            if self._guard is not None:
                self._guard.dismiss()
                self._guard = None

    def _end_all(self) -> None:
        for piece in self.running:
            self.stop(piece)
        while self.running:
            with signals_held():
                self.watch()
            self.wait(LOOK_EVERY_S)

    def _hear_server(self) -> None:
        """Read the server's messages while it starts; drop it if it is gone."""
        if self.server is None or self.server.is_ready:
            return
        try:
            if self.server.listen():
                self.events.unregister(self.server)
        except OSError:
            self.events.unregister(self.server)
            self._dismiss_server()

    def _dismiss_server(self) -> None:
        """End the server when no forks are left."""
        if self.server is not None:
            self.server.close()
            self.server = None


class LocalExecutor(PlacingExecutor):
    """Runs jobs on this machine."""

    holder = "the local executor has {} for all tasks together"

    def __init__(self, machine: Machine | None = None, *, grace_s: float = GRACE_S) -> None:
        """Use `machine`. Default: this one."""
        super().__init__()
        self.machine = machine or Machine.detect()
        self.runner = TaskRunner(self.machine, grace_s, self._prefix, self._note)
        self._nodes = [self.runner]

    @property
    def imported_bytes(self) -> int:
        """The memory of a process that has imported the modules of its tasks; 0 if unknown."""
        return self.runner.server.imported_bytes if self.runner.server else 0

    def submit(self, job: Job) -> JobId:
        job_id = super().submit(job)
        self.runner.serve(job)
        return job_id

    def close(self) -> None:
        self.runner.close(begin=lambda: self.cancel(self._jobs))

    @property
    def _is_busy(self) -> bool:
        return bool(self._pieces) or (self.runner.awaits_server and bool(self._waiting))

    def _is_ready(self, job: Job) -> bool:
        return not (job.fork_words and self.runner.awaits_server)

    def _await(self, timeout_s: float) -> None:
        self.runner.wait(timeout_s)

    def _watch(self) -> None:
        self.runner.watch()


def task_environment(job: Job, gpus: tuple[str, ...], mark: str) -> dict[str, str]:
    """Return a task's environment: ours, thread counts and GPUs by its slot, the job's, and its mark."""
    threads = dict.fromkeys(THREADS, str(job.request.cpus))
    return {**os.environ, **threads, **job.env, VISIBLE: ",".join(gpus), MARK: mark}


def _start(
    job: Job, logs: tuple[str, str], command: list[str], env: Mapping[str, str], server: ForkServer | None
) -> tuple[int, int | None, Callable[[], int | None]]:
    """Start the first process of a task, forked from the server if there is one; append its output to the logs.

    Return its pid, a descriptor that becomes readable when it exits, and a function that returns its exit code:
    negative for a signal, None if lost.
    """
    out, err = logs
    with Path(out).open("ab") as stdout, Path(err).open("ab") as stderr:
        if server is not None and server.suits(job.fork_server, env):
            with suppress(OSError):  # the server is gone: start an ordinary process
                pid, exit_fd = server.fork(command[-job.fork_words :], env, (stdout.fileno(), stderr.fileno()))
                return pid, exit_fd, partial(server.reap, pid)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=env, start_new_session=True
        )
    return process.pid, _open_exit_fd(process.pid), partial(_reap, process)


def _open_exit_fd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when a process exits (Linux's pidfd), or None."""
    with suppress(OSError, AttributeError):
        return os.pidfd_open(pid)
    return None


def _reap(process: subprocess.Popen[bytes]) -> int | None:
    process.returncode = 0  # so that Popen does not wait for it
    try:
        return os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
    except ChildProcessError:
        return None
