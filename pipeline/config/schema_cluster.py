"""The section cluster: where tasks run, their resources, and the properties of the cluster."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import StringConstraints

from pipeline.config.schema_parts import (
    AutoCount,
    AutoCountOrNone,
    AutoMemory,
    Budget,
    Duration,
    Line,
    Memory,
    Name,
    Section,
    setting,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.config.schema_parts import Conflict

# The field `validate` hides a deprecated method of pydantic models, which nothing calls.
warnings.filterwarnings("ignore", 'Field name "validate" in "ClusterSection"', UserWarning)


class SlotsSection(Section):
    """Resources of this machine, or of each node of an allocation, that tasks may use."""

    cpus: AutoCount = setting("auto", "CPU cores for all tasks together. auto: the cores that this process may use.")
    mem: AutoMemory = setting("auto", "Memory for all tasks together. auto: the free memory of the machine.")
    gpus: AutoCountOrNone = setting("auto", "GPUs for all tasks together. auto: all visible GPUs.")


class Resources(Section):
    """Resources that one task requests."""

    cpus: int = setting(1, "CPU cores per task.", ge=1)
    gpus: int = setting(0, "GPUs per task.", ge=0)
    mem: AutoMemory = setting("auto", "Memory per task. auto: planned.")
    mem_per_gpu: Memory | None = setting(None, "Memory per GPU of a task, instead of mem.")
    time: Duration = setting(3600, "Time limit of a task.")
    partition: Line | None = setting(None, "Partition of this stage. null: cluster.slurm.partition.")
    constraint: Line | None = setting(None, "Node features that this stage needs. null: cluster.slurm.constraint.")

    def conflicts(self) -> Iterator[Conflict]:
        if self.mem_per_gpu is not None and self.mem != "auto":
            yield "mem_per_gpu", "cannot be combined with mem: keep one of the two"
        if self.mem_per_gpu is not None and self.gpus == 0:
            yield "mem_per_gpu", "needs GPUs, but gpus is 0: use mem"


class StageResources(Resources):
    """Resources that one task of a stage requests, and how the stage is cut into tasks."""

    items_per_task: AutoCount = setting("auto", "Items per task. auto: by the number of items.")
    minutes_per_task: int = setting(10, "Target minutes per task, for items_per_task: auto.", ge=1)
    parallel: int = setting(64, "Maximum number of tasks of a stage that run at once on a cluster.", ge=1)

    @property
    def nodes(self) -> int:
        return 1  # nodes of a task

    @property
    def ranks_per_node(self) -> int:
        return 1


class CheckResources(StageResources):
    """Resources that one task of validate requests. Its items are cache files."""

    parallel: int = setting(16, "Maximum number of tasks that read the disk at once on a cluster.", ge=1)


class TrainResources(Resources):
    """Resources that training requests, with one process (rank) per GPU. mem is per node, cpus per rank."""

    nodes: int = setting(1, "Number of nodes. cluster.train.gpus is per node.", ge=1)
    ranks: AutoCount = setting("auto", "Processes per node. auto: one per GPU, or one without GPUs.")
    unfit_node: Literal["leave", "warn"] = setting(
        "leave", "If a node fails the checks before the first step. leave: use another node. warn: train there."
    )

    @property
    def parallel(self) -> int:
        return 1  # its processes form one task

    @property
    def ranks_per_node(self) -> int:
        return max(1, self.gpus) if self.ranks == "auto" else self.ranks

    @property
    def cpus_on_node(self) -> int:
        return self.cpus * self.ranks_per_node

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.gpus and self.ranks not in ("auto", self.gpus):
            yield "ranks", f"is {self.ranks}, but gpus is {self.gpus}: each process needs one GPU of its own"


class PredictResources(TrainResources):
    """Resources that predict requests: as for training, and the number of tasks."""

    tasks: int = setting(1, "Number of tasks that share the rows. Each starts, retries and resumes on its own.", ge=1)

    @property
    def parallel(self) -> int:
        return self.tasks


class CardSection(Section):
    """A kind of GPU of the cluster."""

    gres: Line | None = setting(None, "GPU type in a request, as in gpu:a100:1. null: no type.")
    feature: Line | None = setting(None, "Node feature that identifies this kind of GPU.")
    partition: Line | None = setting(None, "Partition of these GPUs. null: cluster.slurm.partition.")
    mem: Memory = setting(..., "Memory of one GPU.")


Bind: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[/$][^:,]*(:/[^:,]*(:(ro|rw))?)?$")]
Variable: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class ContainerSection(Section):
    """Container image for tasks. Supervisors and your own commands run outside."""

    image: Line | None = setting(None, "Image: a file, a folder, or a name that the runtime knows. null: no container.")
    runtime: Literal["apptainer", "pyxis", "podman"] = setting("apptainer", "Container runtime.")
    binds: tuple[Bind, ...] = setting(
        (), "Folders to mount in addition to the configured ones: FOLDER or FOLDER:INSIDE[:ro]."
    )
    env: dict[Variable, str] = setting({}, "Environment variables in the container, by name.")
    options: tuple[Line, ...] = setting((), "Additional options of the runtime, such as --rocm.")
    digest: Line | None = setting(None, "Required digest of the image. null: its digest at submission.")


class SlurmSection(Section):
    """Properties of the cluster. A profile in configs/sites/ holds these keys; this section overrides it."""

    name: Line = setting("slurm", "Name under which measurements of this cluster are stored.")
    partition: Line | None = setting(None, "Partition of jobs. null: the cluster's default.")
    partitions: tuple[Line, ...] = setting(
        (), "Partitions to choose from, instead of partition: the cheapest (or first) that fits a task."
    )
    prices: dict[Line, float] = setting({}, "Price of an hour by partition. Others cost 1.")
    account: Line | None = setting(None, "Account to charge.")
    qos: Line | None = setting(None, "Quality of service of jobs.")
    constraint: Line | None = setting(None, "Required node features, in the syntax of sbatch.")
    reservation: Line | None = setting(None, "Reservation for jobs.")
    gpus: Literal["gres", "gpus-per-node"] = setting("gres", "Option with which jobs request GPUs.")
    memory: Literal["mem", "mem-per-cpu", "none"] = setting(
        "mem", "Option with which jobs request memory. none: the cluster does not limit memory."
    )
    options: tuple[Line, ...] = setting((), "Additional options of sbatch, such as --exclusive=user.")
    setup: tuple[str, ...] = setting((), "Shell lines that each job runs first: modules, conda, environment.")
    scratch: Line | None = setting(None, "Folder for temporary files on the node, such as $TMPDIR.")
    container: ContainerSection = ContainerSection()
    max_array_size: AutoCount = setting("auto", "MaxArraySize of the cluster. auto: from scontrol.")
    max_submit: AutoCount = setting("auto", "Maximum number of your tasks in the queue. auto: from sacctmgr.")
    largest_mem: AutoMemory = setting("auto", "Memory of the largest node. auto: from sinfo.")
    longest_time: Duration | None = setting(None, "Longest time limit of a job. null: from sinfo.")
    cards: tuple[CardSection, ...] = setting((), "Kinds of GPU to choose from. Empty: any GPU.")
    grace: Duration = setting(90, "Time before the limit at which a task is asked to save its state and end.")
    poll: Duration = setting(15, "Interval at which a permanent supervisor checks its jobs.")

    def conflicts(self) -> Iterator[Conflict]:
        if odd := [name for name, price in self.prices.items() if not 0 <= price < float("inf")]:
            yield "prices", f"has {self.prices[odd[0]]:g} for {odd[0]}: use a number of at least 0"


class AllocationSection(Section):
    """Nodes that a scheduler has given to you. pipeline starts tasks on them (executor: allocation)."""

    hosts: Path | None = setting(
        None, "File with a host a line, such as `node1 slots=16 gpus=4`. null: as Slurm, PBS or LSF list them."
    )
    start: tuple[Line, ...] = setting(
        (), "Command before a program on a node, with {host}. Empty: srun, pbs_tmrsh or pbsdsh, blaunch, or ssh."
    )
    time: Duration | None = setting(None, "Time left when a command starts. null: from Slurm, PBS or LSF.")
    grace: Duration = setting(90, "Time before that end at which trainings save their state and the run stops.")

    def conflicts(self) -> Iterator[Conflict]:
        if self.start and not any("{host}" in word for word in self.start):
            yield "start", "names no {host}: use for example [ssh, -o, BatchMode=yes, '{host}']"


class SupervisorSection(Section):
    """The small process that checks tasks, retries failures and starts the next stage."""

    where: Literal["job", "login"] = setting(
        "job", "job: small jobs on the cluster; login: a process on the submitting machine."
    )
    partition: Line | None = setting(None, "Partition of the supervisor. null: cluster.slurm.partition.")
    qos: Line | None = setting(None, "Quality of service of the supervisor. null: cluster.slurm.qos.")
    mem: Memory = setting(1 << 30, "Memory of the supervisor job.")
    time: Duration = setting(3600, "Time limit of the supervisor job.")
    watch: Duration = setting(
        300, "With where: login, interval of checks whether waiting jobs can ever start. 0: never."
    )
    tries: int = setting(3, "Attempts without progress at a task before the stage fails.", ge=1)


class NotifySection(Section):
    """Whom to notify when a stage ends."""

    command: tuple[Name, ...] = setting(
        (), "Command to run. It receives the run, the stage, its state and a message as arguments."
    )
    mail: Line | None = setting(None, "Mail address to notify. Needs sendmail on the node.", pattern=r"^[^\s-]\S*$")


class ClusterSection(Section):
    """Where tasks run and which resources they request."""

    executor: Literal["local", "slurm", "allocation"] = setting(
        "local", "Where tasks run. local: this machine; slurm: a cluster; allocation: the nodes of the current job."
    )
    site: Line | None = setting(None, "Profile of the cluster: a file, or a name in configs/sites. null: none.")
    runs: Path = setting(Path("runs"), "Folder of runs: logs, events, frozen configurations.")
    private: bool = setting(True, "Make run folders readable only by their owner.")
    budget: Budget | None = setting(
        None, "Hours that all runs in `runs` may use together, such as 500 gpu-hours. null: no limit."
    )
    slots: SlotsSection = SlotsSection()
    slurm: SlurmSection = SlurmSection()
    allocation: AllocationSection = AllocationSection()
    supervisor: SupervisorSection = SupervisorSection()
    notify: NotifySection = NotifySection()
    scan: StageResources = StageResources()
    embed: StageResources = StageResources()
    graph: StageResources = StageResources()
    train: TrainResources = TrainResources()
    evaluate: TrainResources = TrainResources()
    predict: PredictResources = PredictResources()
    validate: CheckResources = CheckResources()  # type: ignore[assignment]  # pydantic has such a method

    def resources(self, stage: str) -> StageResources | TrainResources:
        """Return the resources of a task of a stage."""
        resources: StageResources | TrainResources = getattr(self, stage)
        return resources
