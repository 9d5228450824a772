"""Runs jobs as child processes of this one, with the meaning they have under Slurm.

A task starts when its cores, GPUs and memory are free; jobs that were submitted earlier go first, but one that does not
fit does not hold up those that do. Memory is limited by sampling the whole process tree, not by a cgroup: that needs
no rights and no set-up, and misses what lasts less than a sample. There are no threads: everything happens inside
`step`, so limits hold only while somebody steps.
"""

from __future__ import annotations

import os
import secrets
import selectors
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cluster.fork_server import CAN_FORK, ForkServer
from pipeline.cluster.job_spec import Limits, TaskState, TaskStatus, refuse_impossible, refuse_larger
from pipeline.cluster.machine import Child, Ending, Machine, Slots, task_environment
from pipeline.cluster.processes import HAS_PROC, MARK, Guard, ProcessTable
from pipeline.errors import SubmissionRefused
from pipeline.waiting import signals_held

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pipeline.cluster.job_spec import JobId, JobSpec

LOOK_EVERY_S = 0.05  # limits are checked so often
POLL_EVERY_S = 0.01  # exits are looked for so often, where the kernel does not tell of them
GRACE_S = 10.0
ORPHANED = "its process is gone"
NO_PROC = "no /proc here: memory limits are not enforced, and a daemon started by a task outlives it"


@dataclass(slots=True, eq=False)
class _LocalJob:
    """A submitted job and the state of its tasks."""

    id: JobId
    spec: JobSpec
    tasks: list[_LocalTask] = field(default_factory=list)
    pending: deque[_LocalTask] = field(default_factory=deque)
    running: int = 0


@dataclass(slots=True, eq=False)
class _LocalTask:
    """The state of one task."""

    job: _LocalJob
    number: int
    state: TaskState = TaskState.PENDING
    started: float | None = None
    ended: float | None = None
    ending: Ending | None = None
    child: Child | None = None  # kept when it has ended, for what was measured

    def status(self) -> TaskStatus:
        stdout, stderr = self.job.spec.log_paths(self.job.id, self.number)
        ending = self.ending or Ending(self.state)
        return TaskStatus(
            job=self.job.id,
            task=self.number,
            state=self.state,
            stdout=stdout,
            stderr=stderr,
            exit_code=ending.exit_code,
            signal=ending.signal,
            peak_rss_bytes=self.child.peak_bytes if self.child else None,
            cpu_s=self.child.cpu_s if self.child else None,
            started=self.started,
            ended=self.ended,
            reason=ending.reason,
        )


class LocalExecutor:
    """Runs jobs on this machine while it is open; if its process is killed, a guard process ends the tasks."""

    outlives: bool = False
    cluster: str = ""

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
        self._running: list[tuple[_LocalTask, Child]] = []
        self._changed: dict[_LocalTask, None] = {}  # since the last step; a set that keeps the order

    def limits_of(self, _partition: str = "", _cpus: int = 1, _gpus: int = 0) -> Limits:
        return Limits(mem_bytes=self.machine.mem_bytes)

    def room(self) -> int | None:
        return None

    @property
    def imported_bytes(self) -> int:
        """The memory of a process that has imported what its tasks are forked with; 0 where nobody knows."""
        return self._server.imported_bytes if self._server else 0

    @property
    def caveats(self) -> tuple[str, ...]:
        return () if HAS_PROC else (NO_PROC,)

    def check(self, spec: JobSpec) -> None:
        refuse_impossible(spec)
        refuse_too_large(spec, self.machine)

    def starts(self, spec: JobSpec) -> float | None:
        return time.time() if self._slots.fit(spec) else None

    def submit(self, spec: JobSpec) -> JobId:
        self.check(spec)
        if tagged := [job.id for job in self._jobs.values() if spec.tag and job.spec.tag == spec.tag]:
            return tagged[0]
        make_log_dir(spec)
        self._guard = self._guard or Guard(self._prefix, self._grace_s)
        self._serve(spec)
        job = _LocalJob(f"{self._prefix}{len(self._jobs) + 1}", spec)
        job.tasks += [_LocalTask(job, number) for number in spec.tasks]
        job.pending += job.tasks
        self._jobs[job.id] = job
        self._waiting.append(job)
        return job.id

    def adopt(self, job: JobId, spec: JobSpec) -> None:
        if job in self._jobs:
            return
        adopted = self._jobs[job] = _LocalJob(job, spec)
        adopted.tasks += [_LocalTask(adopted, number) for number in spec.tasks]
        for task in adopted.tasks:
            self._end(task, Ending(TaskState.NODE_FAIL, ORPHANED))

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
                self._end(task, Ending(TaskState.CANCELLED, "cancelled"))
        for task, child in self._running:
            if task.job.id in named and (tasks is None or task.number in tasks):
                child.stop(TaskState.CANCELLED, "cancelled")
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
        exited = [child for _, child in self._running if child.has_exited()]
        for child in exited:
            if child.exit_fd is not None:
                self._exits.unregister(child.exit_fd)
                os.close(child.exit_fd)
        now = time.monotonic()
        if not exited and now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        self._table.refresh({child.pid: child.mark for _, child in self._running})
        over = [pair for pair in self._running if pair[1].hold_to_limits(self._table.of(pair[1].mark))]
        for task, child in over:
            self._running.remove((task, child))
            self._slots.give_back(task.job.spec, child.gpus)
            task.job.running -= 1
            self._end(task, child.ending())

    def _start_waiting(self) -> None:
        """Start the tasks for which there is room."""
        for job in self._waiting:
            most = job.spec.max_parallel or len(job.spec.tasks)
            ready = not (job.spec.fork_words and self._awaits_server)
            while ready and job.pending and job.running < most and self._slots.fit(job.spec):
                self._start(job, job.pending.popleft())
        self._waiting = [job for job in self._waiting if job.pending]

    def _serve(self, spec: JobSpec) -> None:
        """Start the server that tasks of a job, or of later ones, are forked from."""
        if not (spec.fork_server and CAN_FORK and HAS_PROC) or self._server is not None:
            return
        env = task_environment(spec, (), "")
        del env[MARK]
        with suppress(OSError):  # tasks get processes that were not forked
            self._server = ForkServer(spec.fork_server, env, f"{self._prefix}forks")
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

    def _start(self, job: _LocalJob, task: _LocalTask) -> None:
        """Start one task; one that cannot be started counts as failed."""
        gpus = self._slots.take(job.spec)
        task.started = time.time()
        try:
            server = self._server if job.spec.fork_words else None
            child = task.child = Child(job.spec, job.id, task.number, gpus, self._grace_s, server)
        except OSError as error:
            self._slots.give_back(job.spec, gpus)
            self._end(task, Ending(TaskState.FAILED, f"could not be started: {error}"))
            return
        if child.exit_fd is not None:
            self._exits.register(child.exit_fd, selectors.EVENT_READ)
        self._running.append((task, child))
        job.running += 1
        task.state = TaskState.RUNNING
        self._changed[task] = None

    def _end(self, task: _LocalTask, ending: Ending) -> None:
        """Record how a task ended."""
        task.state, task.ending, task.ended = ending.state, ending, time.time()
        self._changed[task] = None

    def _await_exit(self, timeout_s: float) -> None:
        """Wait until a task's first process exits, a signal arrives, or the next check is due."""
        notified = all(child.exit_fd is not None for _, child in self._running)
        self._exits.select(min(timeout_s, LOOK_EVERY_S if notified else POLL_EVERY_S))

    def _kill_rest(self) -> None:
        """Kill all running tasks, without grace."""
        for _, child in self._running:
            child.kill()
        while self._running:
            self._look_at = 0.0
            self._advance()
            self._await_exit(LOOK_EVERY_S)


def refuse_too_large(spec: JobSpec, machine: Machine) -> None:
    """Refuse a job whose tasks this machine could never hold."""
    if spec.nodes > 1:
        what = f"asks for {spec.nodes} nodes; the local executor has one, this machine"
        remedy = spec.again.with_settings((f"cluster.{spec.section}.nodes", "1"), then=", or --executor slurm")
        raise SubmissionRefused(what, where=f"job {spec.name}", remedy=remedy)
    most = machine.cpus, len(machine.gpus), machine.mem_bytes
    holder = "the local executor has {} for all tasks together"
    refuse_larger(spec, most, holder)


def make_log_dir(spec: JobSpec) -> None:
    """Make the folder of a job's logs."""
    try:
        Path(spec.log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot create the log folder: {error.strerror}"
        remedy = spec.again.with_settings(("cluster.runs", "FOLDER"), then="   (a writable folder)")
        raise SubmissionRefused(what, where=spec.log_dir, remedy=remedy) from error
