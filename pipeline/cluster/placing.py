"""Executors that place tasks on nodes themselves: this machine alone, or the nodes of an allocation.

A task starts when its node or nodes have enough free cores, GPUs and memory; it runs as one piece on each. Earlier jobs
start first, but a job that does not fit does not block later ones. There are no threads: everything happens inside
`step`, so limits hold only while a caller steps.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pipeline.cluster.job_spec import LEAST, Limits, TaskState, TaskStatus
from pipeline.cluster.machine import Machine, Slots
from pipeline.cluster.refusals import CPUS_ON_NODE, GPUS_ON_NODE, MEM_ON_NODE, refuse_beyond
from pipeline.cluster.verdict import GO_ON, PEER_LOST
from pipeline.errors import SubmissionRefused
from pipeline.records import NODE
from pipeline.waiting import signals_held

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pipeline.cluster.job_spec import Job, JobId, Request

ORPHANED = "its process is gone"
ALONE_S = 30.0  # wait for the other pieces of a failed task: they notice by themselves
NOTHING = Machine(0, (), 0)


class Node(ABC):
    """A node, its resources for tasks, and the free ones."""

    def __init__(self, name: str, machine: Machine | None = None) -> None:
        self.name = name  # empty: this machine
        self.lend(machine)

    def lend(self, machine: Machine | None) -> None:
        """Set the node's resources; None: unusable."""
        self.machine, self.slots = machine, Slots(machine or NOTHING)

    @abstractmethod
    def start(self, piece: int, job: Job, gpus: tuple[str, ...]) -> None:
        """Start a piece, a job with a single task; `_note` gets its states."""

    @abstractmethod
    def stop(self, piece: int) -> None:
        """Request the end of a piece, after its grace period."""


@dataclass(eq=False, slots=True)
class PlacedTask:
    """A task, its state, its running pieces and its ended ones."""

    job_id: JobId
    job: Job
    status: TaskStatus
    pieces: set[int] = field(default_factory=set)
    ended: list[TaskStatus] = field(default_factory=list)
    alone_until: float | None = None


@dataclass(eq=False, slots=True)
class _PlacedJob:
    """A submitted job and its tasks."""

    job: Job
    tasks: list[PlacedTask]
    pending: deque[PlacedTask] = field(default_factory=deque)

    @property
    def has_room(self) -> bool:
        """Whether another of its tasks may run at once."""
        most = self.job.max_parallel
        return most is None or sum(bool(task.pieces) for task in self.tasks) < most


class PlacingExecutor(ABC):
    """Runs jobs on its nodes while it is open."""

    outlives: bool = False
    cluster: str = ""
    holder: str  # message for a request above the largest node, with {}

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self._prefix = f"{secrets.token_hex(4)}."  # makes job ids and process marks unique
        self._nodes = [*nodes]
        self._jobs: dict[JobId, _PlacedJob] = {}
        self._waiting: list[_PlacedJob] = []  # those with pending tasks, in the order of submission
        self._pieces: dict[int, tuple[PlacedTask, Node, tuple[str, ...]]] = {}
        self._count = 0  # number of pieces so far
        self._changed: dict[PlacedTask, None] = {}  # changed since the last step; an ordered set

    @property
    def ends_at(self) -> float | None:
        return None

    @property
    def machines(self) -> list[Machine]:
        """The resources of the usable nodes."""
        return [node.machine for node in self._nodes if node.machine]

    def limits_of(self, request: Request = LEAST) -> Limits:
        at_once = sum(machine.at_once(request) for machine in self.machines) // request.nodes
        most = max(machine.mem_bytes for machine in self.machines)
        return Limits(most, nodes=len(self.machines), running_tasks=max(1, at_once))

    def room(self) -> int | None:
        return None

    def check(self, job: Job) -> None:
        machines = self.machines
        if job.request.nodes > len(machines):
            what = (
                f"asks for {job.request.nodes} nodes, but there {'are' if len(machines) > 1 else 'is'} {len(machines)}"
            )
            raise job.refused(what, ("{}.nodes", str(len(machines))), then=", or --executor slurm")
        most = {
            CPUS_ON_NODE: max(machine.cpus for machine in machines),
            GPUS_ON_NODE: max(len(machine.gpus) for machine in machines),
            MEM_ON_NODE: max(machine.mem_bytes for machine in machines),
        }
        refuse_beyond(job, ((kind, there, self.holder) for kind, there in most.items()))

    def starts(self, job: Job) -> float | None:
        return time.time() if self._free_nodes(job) else None

    def submit(self, job: Job) -> JobId:
        self.check(job)
        if job.tag and (tagged := [job_id for job_id, known in self._jobs.items() if known.job.tag == job.tag]):
            return tagged[0]
        make_log_dir(job)
        job_id = f"{self._prefix}{len(self._jobs) + 1}"
        submitted = self._known(job_id, job)
        submitted.pending += submitted.tasks
        self._waiting.append(submitted)
        return job_id

    def adopt(self, job_id: JobId, job: Job) -> None:
        if job_id not in self._jobs:
            for task in self._known(job_id, job).tasks:
                self._end(task, TaskState.NODE_FAIL, ORPHANED)

    def _known(self, job_id: JobId, job: Job) -> _PlacedJob:
        states = (TaskStatus(job_id, number, TaskState.PENDING, *job.log_paths(job_id, number)) for number in job.tasks)
        known = self._jobs[job_id] = _PlacedJob(job, [PlacedTask(job_id, job, state) for state in states])
        return known

    def reschedule(self, job_id: JobId, job: Job) -> None:  # noqa: B027
        """Do nothing: no job here waits for others."""

    def recognize(self, names: Mapping[JobId, str]) -> None:  # noqa: B027
        """Do nothing: job ids here are unique."""

    def queued(self, jobs: Iterable[JobId]) -> set[JobId]:
        return {task.job for task in self.status(jobs) if not task.state.ended}

    def status(self, jobs: Iterable[JobId]) -> list[TaskStatus]:
        return [task.status for job in jobs if job in self._jobs for task in self._jobs[job].tasks]

    def step(self, timeout_s: float) -> list[TaskStatus]:
        until = time.monotonic() + timeout_s
        self._advance(0)
        while not self._changed and self._is_busy and (left_s := until - time.monotonic()) > 0:
            self._advance(left_s)
        changed, self._changed = self._changed, {}
        return [task.status for task in changed]

    def cancel(self, jobs: Iterable[JobId], tasks: Collection[int] | None = None) -> None:
        for known in [self._jobs[job] for job in {*jobs} & self._jobs.keys()]:
            for task in [task for task in known.tasks if tasks is None or task.status.task in tasks]:
                self._stop(task)
                if task in known.pending:
                    known.pending.remove(task)
                    self._end(task, TaskState.CANCELLED, "cancelled")
        self._advance(0)

    @abstractmethod
    def close(self) -> None:
        """End every task after its grace; an exception meanwhile (a second Ctrl-C) ends the grace."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _is_busy(self) -> bool:
        """Whether anything can change by itself."""
        return bool(self._pieces)

    @abstractmethod
    def _await(self, timeout_s: float) -> None:
        """Wait until something happens on a node, at most this long."""

    @abstractmethod
    def _watch(self) -> None:
        """Note what has happened on the nodes."""

    def _advance(self, timeout_s: float) -> None:
        """Wait for changes unless there are some, then start tasks."""
        if timeout_s > 0 and not self._changed:
            self._await(timeout_s)
        with signals_held():
            self._watch()
            for task in {task for task, _, _ in self._pieces.values() if task.alone_until}:
                if time.monotonic() > (task.alone_until or 0.0):
                    self._stop(task)
            self._start_waiting()

    def _start_waiting(self) -> None:
        """Start the tasks for which there is room."""
        for waiting in self._waiting:
            job = waiting.job
            while waiting.pending and self._is_ready(job) and waiting.has_room and (nodes := self._free_nodes(job)):
                self._start(waiting.pending.popleft(), nodes)
        self._waiting = [waiting for waiting in self._waiting if waiting.pending]

    def _is_ready(self, job: Job) -> bool:  # noqa: ARG002 - overridden
        """Tell whether tasks of a job could start now if there is room."""
        return True

    def _free_nodes(self, job: Job) -> list[Node]:
        """Return the nodes that a task would start on now, the least busy first; empty without room."""
        wanted = [node for node in self._nodes if node.slots.fit(job.request) and node.name not in job.exclude]
        if len(wanted) > 1:
            busy = [node.name for _, node, _ in self._pieces.values()]
            wanted.sort(key=lambda node: busy.count(node.name))
        return wanted[: job.request.nodes] if len(wanted) >= job.request.nodes else []

    def _start(self, task: PlacedTask, nodes: list[Node]) -> None:
        """Start a task, a piece on each of some nodes."""
        job, request, number = task.job, task.job.request, task.status.task
        stem = task.status.stdout.removesuffix(".out")
        pieces = range(self._count + 1, self._count + 1 + len(nodes))
        self._count += len(nodes)
        for piece, node in zip(pieces, nodes, strict=True):
            self._pieces[piece] = task, node, node.slots.take(request)
        task.pieces.update(pieces)
        for index, (piece, node) in enumerate(zip(pieces, nodes, strict=True)):
            place = {NODE: f"{index}/{len(nodes)} {task.job_id}_{number}"} if len(nodes) > 1 else {}
            own = replace(
                job,
                tasks=(number,),
                request=replace(request, nodes=1),
                env={**job.env, **place},
                log_stem=f"{stem}-{index}" if index else stem,
            )
            if piece in self._pieces:  # unless its node was lost meanwhile
                node.start(piece, own, self._pieces[piece][2])

    def _stop(self, task: PlacedTask) -> None:
        """Request the end of the pieces of a task that have not ended."""
        for piece in [*task.pieces]:
            if piece in self._pieces:
                self._pieces[piece][1].stop(piece)

    def _note(self, piece: int, status: TaskStatus) -> None:
        """Note the state of a piece; the task has ended when all of its pieces have."""
        if piece not in self._pieces:
            return
        task, node, gpus = self._pieces[piece]
        status = replace(status, job=task.job_id, node=node.name)
        if status.state is TaskState.RUNNING:
            if task.status.state is TaskState.PENDING:
                task.status = replace(status, stdout=task.status.stdout, stderr=task.status.stderr)
                self._changed[task] = None
            return
        del self._pieces[piece]
        task.pieces.remove(piece)
        node.slots.give_back(task.job.request, gpus)
        task.ended.append(status)
        if not task.pieces:
            task.status = _whole(task.ended, task.status)
            self._changed[task] = None
        elif status.state is not TaskState.COMPLETED and status.exit_code != GO_ON:
            task.alone_until = task.alone_until or time.monotonic() + ALONE_S

    def _end(self, task: PlacedTask, state: TaskState, reason: str) -> None:
        """Record the end of a task that does not run."""
        task.status = replace(task.status, state=state, reason=reason, ended=time.time())
        self._changed[task] = None


def _whole(ended: list[TaskStatus], task: TaskStatus) -> TaskStatus:
    """Return the status of a task by its pieces: the first that failed by itself, else the first."""
    failed = sorted((piece for piece in ended if not piece.state.ok), key=lambda piece: piece.exit_code == PEER_LOST)
    first = next((piece for piece in ended if piece.stdout == task.stdout), ended[0])
    return replace(
        failed[0] if failed else first,
        started=task.started or ended[0].started,
        peak_rss_bytes=max((piece.peak_rss_bytes or 0 for piece in ended), default=0) or None,
        cpu_s=sum(piece.cpu_s or 0.0 for piece in ended) if any(piece.cpu_s is not None for piece in ended) else None,
    )


def make_log_dir(job: Job) -> None:
    """Make the folder of a job's logs."""
    try:
        Path(job.log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot create the log folder: {error.strerror}"
        refused = job.refused(what, ("runs", "FOLDER"), then="   (a writable folder)")
        raise SubmissionRefused(what, where=job.log_dir, remedy=refused.next) from error
