"""The interface of executors. A job is an array of equal, numbered tasks.

Each task has its own processes, logs and limits. The task numbers of a job need not start at 0.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from pipeline.command_line import Command
from pipeline.errors import SubmissionRefused

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from pipeline.config.schema_cluster import CardSection, StageResources, TrainResources

JobId: TypeAlias = str

SUPERVISE, PROBE = "supervise", "probe"  # names of jobs that are not stages
TASK = "{task}"  # an argument that is exactly this becomes the number of the task


class TaskState(StrEnum):
    """A task's state, in Slurm's words; words that are not listed here are UNKNOWN."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    REQUEUED = "REQUEUED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    REQUEUE_FED = "REQUEUE_FED"
    SPECIAL_EXIT = "SPECIAL_EXIT"  # requeued and held because of its exit code, by a setting of the site
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    RUNNING = "RUNNING"
    RESIZING = "RESIZING"
    SIGNALING = "SIGNALING"
    STAGE_OUT = "STAGE_OUT"
    STOPPED = "STOPPED"
    SUSPENDED = "SUSPENDED"
    COMPLETING = "COMPLETING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    TIMEOUT = "TIMEOUT"
    DEADLINE = "DEADLINE"
    CANCELLED = "CANCELLED"
    PREEMPTED = "PREEMPTED"
    NODE_FAIL = "NODE_FAIL"
    BOOT_FAIL = "BOOT_FAIL"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    RECONFIG_FAIL = "RECONFIG_FAIL"
    REVOKED = "REVOKED"
    UNKNOWN = "UNKNOWN"

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to the task by itself; UNKNOWN does not count."""
        return self in _ENDED

    @property
    def ok(self) -> bool:
        """Whether the task ended well, as far as an executor can know."""
        return self is TaskState.COMPLETED


_ENDED = frozenset(map(TaskState, (
    "COMPLETED", "FAILED", "OUT_OF_MEMORY", "TIMEOUT", "DEADLINE", "CANCELLED", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL",
    "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED",
)))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """The resources of one task: `cpus` for each of its processes, `gpus` and `mem_bytes` on each of its nodes.

    A task is one process on one node; with `ranks`, that many processes on each of its nodes. Slurm starts them
    with srun; on one machine the first process starts the others.
    """

    cpus: int = 1
    gpus: int = 0
    nodes: int = 1
    ranks: int = 0  # processes on each node that work together; 0: a task is one process
    mem_bytes: int | None = None  # None: neither counted nor limited
    time_s: int | None = None  # None: unlimited
    partition: str = ""  # empty: the site's default; so are the next two
    qos: str = ""
    constraint: str = ""
    card: str = ""  # the type of GPU, as the site names it

    @classmethod
    def of(cls, resources: StageResources | TrainResources) -> Request:
        """Return what the configuration asks for, without memory, which may be planned."""
        return cls(
            cpus=resources.cpus,
            gpus=resources.gpus,
            nodes=resources.nodes,
            ranks=resources.ranks_per_node if resources.nodes * resources.ranks_per_node > 1 else 0,
            time_s=int(resources.time),
            partition=resources.partition or "",
            constraint=resources.constraint or "",
        )

    def on_card(self, card: CardSection) -> Request:
        """Return the same on GPUs of one kind."""
        constraint = "&".join(filter(None, [self.constraint, card.feature]))
        return replace(self, card=card.gres or "", partition=card.partition or self.partition, constraint=constraint)

    @property
    def cpus_on_node(self) -> int:
        return self.cpus * max(1, self.ranks)

    @property
    def processes(self) -> int:
        """How many processes srun starts for one task."""
        return self.nodes * max(1, self.ranks)


LEAST = Request()


@dataclass(frozen=True, slots=True)
class Job:
    """An array of equal tasks: their command, what each of them asks for, and what the job waits for."""

    name: str
    argv: tuple[str, ...]
    tasks: Sequence[int]  # ascending numbers
    log_dir: str
    request: Request = LEAST
    after_any: tuple[JobId, ...] = ()  # start after all tasks of these jobs have ended; on a cluster
    env: Mapping[str, str] = field(default_factory=dict)  # added to the inherited environment
    max_parallel: int | None = None
    begin_s: int = 0  # minimum delay of its start
    tag: str = ""  # unique among all jobs: it identifies a submission whose answer was lost
    exclude: tuple[str, ...] = ()  # failed nodes
    fork_server: tuple[str, ...] = ()  # command of the fork server for the tasks of this run, on one machine
    sees: tuple[str, ...] = ()  # folders that a task needs in a container; empty: no container
    fork_words: int = 0  # number of last arguments that a fork gets; 0: not forked
    log_stem: str = ""  # prefix of the log paths of its single task; empty: by its id

    @property
    def section(self) -> str:
        """The section of `cluster` with its settings."""
        return {SUPERVISE: "supervisor", PROBE: "train"}.get(self.name, self.name)

    @property
    def again(self) -> Command:
        """The command that submits it; supervisors and probes are not stages of their own."""
        if self.name == PROBE:
            return Command.of("plan train --probe")
        return Command.submit("all" if self.name == SUPERVISE else self.name)

    def asking(self, **changes: Any) -> Job:
        """Return the same job with another request."""
        return replace(self, request=replace(self.request, **changes))

    def refused(self, what: str, *settings: tuple[str, str], then: str = "") -> SubmissionRefused:
        """Return the error about this job; keys are below `cluster`, with {} for its section."""
        changes = [(f"cluster.{key.format(self.section)}", value) for key, value in settings]
        return SubmissionRefused(what, where=f"job {self.name}", remedy=self.again.with_settings(*changes, then=then))

    def command(self, task: int) -> list[str]:
        """Return the command line of one task."""
        return [str(task) if argument == TASK else argument for argument in self.argv]

    def log_paths(self, job: JobId, task: int) -> tuple[str, str]:
        """Return the paths of the task's stdout and stderr."""
        stem = self.log_stem or os.path.join(self.log_dir, f"{job}_{task}")  # noqa: PTH118 - 10,000 tasks at once
        return f"{stem}.out", f"{stem}.err"


def log_beside(path: str, further: int) -> str:
    """Return the log path of the task that is `further` numbers later in the same job."""
    job, _, name = path.rpartition("_")
    index, dot, end = name.partition(".")
    return f"{job}_{int(index) + further}{dot}{end}"


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """The status of one task; None: unknown (yet)."""

    job: JobId
    task: int
    state: TaskState
    stdout: str
    stderr: str
    exit_code: int | None = None
    signal: int | None = None  # the signal that ended the process, if any
    peak_rss_bytes: int | None = None  # sampled: a lower bound
    started: float | None = None
    ended: float | None = None
    reason: str = ""
    node: str = ""
    cpu_s: float | None = None
    waits_for: str = ""  # why it has not started
    restarts: int = 0  # how often the scheduler requeued it
    earlier_s: float = 0.0  # run time before the last requeue
    gpu_busy: float | None = None  # share of the time in which its GPUs ran a kernel
    gpu_bytes: int | None = None  # used memory of one GPU


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an executor; None: unknown."""

    mem_bytes: int | None = None  # the largest node
    time_s: int | None = None  # longest time limit of a task
    job_tasks: int | None = None  # tasks of one job
    highest_task: int | None = None  # the highest number a task of a job can have, counted from the job's first
    queued_tasks: int | None = None  # tasks in the queue at once
    nodes: int | None = None  # number of nodes
    running_tasks: int | None = field(default=None, repr=False)  # tasks that may run at once
    preempts: bool = field(default=False, repr=False)  # whether jobs may be preempted
    lacks: str = field(default="", repr=False)  # why such tasks fit no node

    def to_json(self) -> dict[str, Any]:
        """Return the JSON for the ledger, without unknown limits."""
        return {name: value for name, value in asdict(self).items() if value}


class Executor(Protocol):
    """Runs jobs; a caller that waits for them calls `step` in a loop."""

    @property
    def outlives(self) -> bool:
        """Whether jobs survive the end of this process."""

    @property
    def cluster(self) -> str:
        """The name of the cluster; empty without one, or if it does not answer."""

    @property
    def ends_at(self) -> float | None:
        """When it must end, with its jobs; None: unknown or never."""

    def limits_of(self, request: Request = LEAST) -> Limits:
        """Return the limits for tasks with this request, in its partition or the default one."""

    def room(self) -> int | None:
        """Return how many more tasks the queue takes now; None without a known limit."""

    def check(self, job: Job) -> None:
        """Raise SubmissionRefused for a job that could never run here; queues nothing."""

    def starts(self, job: Job) -> float | None:
        """Return when a job submitted now would start; None if unknown."""

    def submit(self, job: Job) -> JobId:
        """Queue a job, or raise SubmissionRefused; its id is never reused by any executor.

        A tag that is in the queue already (the answer to an earlier try was lost) is not queued twice.
        """

    def reschedule(self, job_id: JobId, job: Job) -> None:
        """Change a pending job: the jobs it waits for, its delay, and its excluded nodes."""

    def adopt(self, job_id: JobId, job: Job) -> None:
        """Follow a job of an earlier executor; if jobs cannot outlive their executor, its tasks have failed."""

    def recognize(self, names: Mapping[JobId, str]) -> None:
        """Learn the unique names of jobs of earlier executors.

        A job is identified by number and name, because a controller that lost its state reuses numbers.
        """

    def queued(self, jobs: Iterable[JobId]) -> set[JobId]:
        """Return which of these jobs have not ended; all of them if the queue does not answer."""

    def status(self, jobs: Iterable[JobId]) -> list[TaskStatus]:
        """Return the state of every task of the jobs as of the last step; nothing for unknown jobs."""

    def step(self, timeout_s: float) -> list[TaskStatus]:
        """Wait until a task changes state, at most this long; return the tasks changed since the last step.

        Return early if nothing can change any more.
        """

    def cancel(self, jobs: Iterable[JobId], tasks: Collection[int] | None = None) -> None:
        """Request the end of the unfinished tasks of these jobs, or of some; later steps report it.

        Only jobs that this executor submitted, adopted or recognized are cancelled.
        """

    def close(self) -> None:
        """Release the executor; its jobs end now unless it `outlives`."""

    def __enter__(self) -> Executor: ...

    def __exit__(self, *exception: object) -> None: ...


def mebibytes(count: int) -> str:
    """Format a number of bytes as the configuration takes it."""
    return f"{count >> 20}MiB"


def format_ranges(ascending: Sequence[int]) -> str:
    """Write ascending numbers as `0-4,7,9-11`."""
    parts: list[list[int]] = []
    for number in ascending:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def parse_ranges(text: str) -> list[int]:
    """Return the numbers that `format_ranges` wrote."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
