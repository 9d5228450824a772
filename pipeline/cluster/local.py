"""Runs jobs as child processes of this one, with the meaning they have under Slurm.

A task starts when its cores, GPUs and memory are free; jobs that were submitted earlier go first, but one that does not
fit does not hold up those that do. Memory is limited by sampling the whole process tree, not by a cgroup: that needs
no rights and no set-up, and misses what lasts less than a sample. There are no threads: everything happens inside
`step`, so limits hold only while a caller steps.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import subprocess
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cluster.fork_server import CAN_FORK, ForkServer, is_readable
from pipeline.cluster.job_spec import LEAST, Limits, TaskState, TaskStatus, mebibytes
from pipeline.cluster.machine import THREADS, Machine, Slots, count_oom_kills
from pipeline.cluster.processes import MARK, Guard, ProcessTable, cpu_s, send, used_bytes
from pipeline.cluster.refusals import CPUS_ON_NODE, GPUS_ON_NODE, MEM_ON_NODE, refuse_beyond
from pipeline.device.kinds import VISIBLE
from pipeline.errors import SubmissionRefused
from pipeline.waiting import signals_held

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from pipeline.cluster.job_spec import Job, JobId, Request

LOOK_EVERY_S = 0.05  # limits are checked so often
POLL_EVERY_S = 0.01  # exits are looked for so often, where the kernel does not tell of them
GRACE_S = 10.0
ORPHANED = "its process is gone"
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
        """End the grace period now."""
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
        if self._exited:  # as under Slurm, nothing outlives the first process
            return not send(signal.SIGKILL, pids)
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


@dataclass(slots=True, eq=False)
class _LocalJob:
    """A submitted job and the state of its tasks."""

    id: JobId
    job: Job
    tasks: list[LocalTask]
    pending: deque[LocalTask] = field(default_factory=deque)
    running: int = 0


class LocalExecutor:
    """Runs jobs on this machine while it is open; if its process is killed, a guard process ends the tasks."""

    outlives: bool = False
    cluster: str = ""
    ends_at: float | None = None

    def __init__(self, machine: Machine | None = None, *, grace_s: float = GRACE_S) -> None:
        """Use `machine`, by default this one; `grace_s` lies between SIGTERM and SIGKILL."""
        self.machine = machine or Machine.detect()
        self._slots = Slots(self.machine)
        self._grace_s = grace_s
        self._prefix = f"{secrets.token_hex(4)}."  # makes job ids unique, and so the marks of their processes
        self._table = ProcessTable(self._prefix)
        self._guard: Guard | None = None
        self._server: ForkServer | None = None
        self._exits = selectors.DefaultSelector()
        self._look_at = 0.0
        self._jobs: dict[JobId, _LocalJob] = {}
        self._waiting: list[_LocalJob] = []  # those with pending tasks, in the order of submission
        self._running: list[LocalTask] = []
        self._changed: dict[LocalTask, None] = {}  # since the last step; a set that keeps the order

    def limits_of(self, request: Request = LEAST) -> Limits:  # noqa: ARG002
        return Limits(mem_bytes=self.machine.mem_bytes)

    def room(self) -> int | None:
        return None

    @property
    def imported_bytes(self) -> int:
        """The memory of a process that has imported the modules of its tasks; 0 if unknown."""
        return self._server.imported_bytes if self._server else 0

    def check(self, job: Job) -> None:
        refuse_too_large(job, self.machine)

    def starts(self, job: Job) -> float | None:
        return time.time() if self._slots.fit(job.request) else None

    def submit(self, job: Job) -> JobId:
        self.check(job)
        if tagged := [known.id for known in self._jobs.values() if job.tag and known.job.tag == job.tag]:
            return tagged[0]
        make_log_dir(job)
        self._guard = self._guard or Guard(self._prefix, self._grace_s)
        self._serve(job)
        submitted = self._known(f"{self._prefix}{len(self._jobs) + 1}", job)
        submitted.pending += submitted.tasks
        self._waiting.append(submitted)
        return submitted.id

    def adopt(self, job_id: JobId, job: Job) -> None:
        if job_id not in self._jobs:
            for task in self._known(job_id, job).tasks:
                self._end(task, TaskState.NODE_FAIL, ORPHANED)

    def _known(self, job_id: JobId, job: Job) -> _LocalJob:
        known = self._jobs[job_id] = _LocalJob(job_id, job, [LocalTask(job_id, job, number) for number in job.tasks])
        return known

    def reschedule(self, job_id: JobId, job: Job) -> None:
        """Do nothing: no job of this machine waits for others."""

    def recognize(self, names: Mapping[JobId, str]) -> None:
        """Do nothing: no other program gives numbers to jobs of this machine."""

    def queued(self, jobs: Iterable[JobId]) -> set[JobId]:
        return {task.job for task in self.status(jobs) if not task.state.ended}

    def status(self, jobs: Iterable[JobId]) -> list[TaskStatus]:
        known = (self._jobs[job] for job in jobs if job in self._jobs)
        return [task.status() for job in known for task in job.tasks]

    def step(self, timeout_s: float) -> list[TaskStatus]:
        until = time.monotonic() + timeout_s
        self._advance()
        while not self._changed and (self._running or self._awaits_server) and (left_s := until - time.monotonic()) > 0:
            self._await_exit(left_s)
            self._advance()
        changed, self._changed = self._changed, {}
        return [task.status() for task in changed]

    def cancel(self, jobs: Iterable[JobId], tasks: Collection[int] | None = None) -> None:
        named = {job for job in jobs if job in self._jobs}
        for job in (self._jobs[name] for name in named):
            for task in [task for task in job.pending if tasks is None or task.number in tasks]:
                job.pending.remove(task)
                self._end(task, TaskState.CANCELLED, "cancelled")
        for task in self._running:
            if task.job_id in named and (tasks is None or task.number in tasks):
                task.stop(TaskState.CANCELLED, "cancelled")
        self._look_at = 0.0
        self._advance()

    def close(self) -> None:
        """End every task, after its grace; an exception on the way (a second Ctrl-C) takes the grace away."""
        try:
            self.cancel(self._jobs)
            while self._running:
                self.step(self._grace_s)
        finally:
            self._kill_rest()
            self._dismiss_server()
            self._exits.close()
            if self._guard is not None:
                self._guard.dismiss()
                self._guard = None

    def __enter__(self) -> LocalExecutor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _advance(self) -> None:
        """Update the tasks, hold them to their limits, and start what can start."""
        with signals_held():
            self._watch()
            self._hear_server()
            self._start_waiting()

    def _watch(self) -> None:
        """Check the running tasks when one has exited or the next check is due."""
        exited = [task for task in self._running if task.has_exited()]
        for task in exited:
            if task.exit_fd is not None:
                self._exits.unregister(task.exit_fd)
                os.close(task.exit_fd)
        now = time.monotonic()
        if not exited and now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        self._table.refresh({task.pid: task.mark for task in self._running})
        for task in [task for task in self._running if task.hold_to_limits(self._table.of(task.mark))]:
            self._running.remove(task)
            self._slots.give_back(task.job.request, task.gpus)
            self._jobs[task.job_id].running -= 1
            task.reap()
            self._changed[task] = None

    def _start_waiting(self) -> None:
        """Start the tasks for which there is room."""
        for waiting in self._waiting:
            job = waiting.job
            most = job.max_parallel or len(job.tasks)
            ready = not (job.fork_words and self._awaits_server)
            while ready and waiting.pending and waiting.running < most and self._slots.fit(job.request):
                self._start(waiting.pending.popleft())
        self._waiting = [waiting for waiting in self._waiting if waiting.pending]

    def _serve(self, job: Job) -> None:
        """Start the server that tasks of a job, or of later ones, are forked from."""
        if not (job.fork_server and CAN_FORK) or self._server is not None:
            return
        env = task_environment(job, (), "")
        del env[MARK]
        with suppress(OSError):  # tasks get processes that were not forked
            self._server = ForkServer(job.fork_server, env, f"{self._prefix}forks")
            self._exits.register(self._server, selectors.EVENT_READ)

    @property
    def _awaits_server(self) -> bool:
        """Whether the server is still importing, for a job that is waiting."""
        return self._server is not None and not self._server.is_ready and bool(self._waiting)

    def _hear_server(self) -> None:
        """Take in what the server says while it starts; without it, where it is gone."""
        if self._server is None or self._server.is_ready:
            return
        try:
            if self._server.listen():
                self._exits.unregister(self._server)
        except OSError:
            self._exits.unregister(self._server)
            self._dismiss_server()

    def _dismiss_server(self) -> None:
        """End the server; none of its forks is left."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _start(self, task: LocalTask) -> None:
        """Start one task; one that cannot be started counts as failed."""
        gpus = self._slots.take(task.job.request)
        try:
            task.start(gpus, self._grace_s, self._server if task.job.fork_words else None)
        except OSError as error:
            self._slots.give_back(task.job.request, gpus)
            self._end(task, TaskState.FAILED, f"could not be started: {error}")
            return
        if task.exit_fd is not None:
            self._exits.register(task.exit_fd, selectors.EVENT_READ)
        self._running.append(task)
        self._jobs[task.job_id].running += 1
        self._changed[task] = None

    def _end(self, task: LocalTask, state: TaskState, reason: str) -> None:
        """Record the end of a task that does not run."""
        task.end(state, reason)
        self._changed[task] = None

    def _await_exit(self, timeout_s: float) -> None:
        """Wait until a task's first process exits, a signal arrives, or the next check is due."""
        notified = all(task.exit_fd is not None for task in self._running)
        self._exits.select(min(timeout_s, LOOK_EVERY_S if notified else POLL_EVERY_S))

    def _kill_rest(self) -> None:
        """Kill all running tasks, without grace."""
        for task in self._running:
            task.kill()
        while self._running:
            self._look_at = 0.0
            self._advance()
            self._await_exit(LOOK_EVERY_S)


def refuse_too_large(job: Job, machine: Machine) -> None:
    """Refuse a job whose tasks this machine could never hold."""
    if job.request.nodes > 1:
        what = f"asks for {job.request.nodes} nodes; the local executor has one, this machine"
        raise job.refused(what, ("{}.nodes", "1"), then=", or --executor slurm")
    most = {CPUS_ON_NODE: machine.cpus, GPUS_ON_NODE: len(machine.gpus), MEM_ON_NODE: machine.mem_bytes}
    holder = "the local executor has {} for all tasks together"
    refuse_beyond(job, ((kind, there, holder) for kind, there in most.items()))


def make_log_dir(job: Job) -> None:
    """Make the folder of a job's logs."""
    try:
        Path(job.log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot create the log folder: {error.strerror}"
        refused = job.refused(what, ("runs", "FOLDER"), then="   (a writable folder)")
        raise SubmissionRefused(what, where=job.log_dir, remedy=refused.next) from error


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
            with suppress(OSError):  # it is gone: the task gets a process that was not forked
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
    process.returncode = 0  # so that Popen does not look for it, too
    try:
        return os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
    except ChildProcessError:
        return None
