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
from pipeline.cluster.job_spec import LEAST, Limits, TaskState
from pipeline.cluster.local_task import LocalTask, task_environment
from pipeline.cluster.machine import Machine, Slots
from pipeline.cluster.processes import HAS_PROC, MARK, Guard, ProcessTable
from pipeline.cluster.refusals import CPUS_ON_NODE, GPUS_ON_NODE, MEM_ON_NODE, refuse_beyond, refuse_impossible
from pipeline.errors import SubmissionRefused
from pipeline.waiting import signals_held

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pipeline.cluster.job_spec import Job, JobId, Request, TaskStatus

LOOK_EVERY_S = 0.05  # limits are checked so often
POLL_EVERY_S = 0.01  # exits are looked for so often, where the kernel does not tell of them
GRACE_S = 10.0
ORPHANED = "its process is gone"
NO_PROC = "no /proc here: memory limits are not enforced, and a daemon started by a task outlives it"


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
        """The memory of a process that has imported what its tasks are forked with; 0 where nobody knows."""
        return self._server.imported_bytes if self._server else 0

    @property
    def caveats(self) -> tuple[str, ...]:
        return () if HAS_PROC else (NO_PROC,)

    def check(self, job: Job) -> None:
        refuse_impossible(job)
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
        if not (job.fork_server and CAN_FORK and HAS_PROC) or self._server is not None:
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
