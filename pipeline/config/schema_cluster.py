"""The section cluster: where tasks run, what they may use, and what the cluster is like."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field, StringConstraints

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
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.config.schema_parts import Conflict

# The stage `validate` has the name of a deprecated method of pydantic's models, which nobody calls.
warnings.filterwarnings("ignore", 'Field name "validate" in "ClusterSection"', UserWarning)


class SlotsSection(Section):
    """Resources of this machine that the local executor may use."""

    cpus: AutoCount = Field(
        default="auto", description="CPU cores for all tasks together. auto: the cores that this process may use."
    )
    mem: AutoMemory = Field(
        default="auto", description="Memory for all tasks together. auto: the free memory of the machine."
    )
    gpus: AutoCountOrNone = Field(default="auto", description="GPUs for all tasks together. auto: all visible GPUs.")


class Resources(Section):
    """Resources that one task requests."""

    cpus: int = Field(default=1, ge=1, description="CPU cores per task.")
    gpus: int = Field(default=0, ge=0, description="GPUs per task.")
    mem: AutoMemory = Field(default="auto", description="Memory per task. auto: planned.")
    mem_per_gpu: Memory | None = Field(default=None, description="Memory per GPU of a task, instead of mem.")
    time: Duration = Field(default=3600, description="Time limit of a task.")
    partition: Line | None = Field(default=None, description="Partition of this stage. null: cluster.slurm.partition.")
    constraint: Line | None = Field(
        default=None, description="Node features that this stage needs. null: cluster.slurm.constraint."
    )

    @property
    def cpus_on_node(self) -> int:
        return self.cpus

    def conflicts(self) -> Iterator[Conflict]:
        if self.mem_per_gpu is not None and self.mem != "auto":
            yield "mem_per_gpu", "cannot be combined with mem: keep one of the two"
        if self.mem_per_gpu is not None and self.gpus == 0:
            yield "mem_per_gpu", "needs GPUs, but gpus is 0: use mem"


class StageResources(Resources):
    """Resources that one task of a stage requests, and how the stage is cut into tasks."""

    items_per_task: AutoCount = Field(default="auto", description="Items per task. auto: by the number of items.")
    minutes_per_task: int = Field(default=10, ge=1, description="Target minutes per task, for items_per_task: auto.")
    parallel: int = Field(
        default=64, ge=1, description="Maximum number of tasks of a stage that run at once on a cluster."
    )

    @property
    def nodes(self) -> int:
        return 1  # a task is on one

    @property
    def ranks_per_node(self) -> int:
        return 1


class CheckResources(StageResources):
    """Resources that one task of validate requests. Its items are cache files."""

    parallel: int = Field(
        default=16, ge=1, description="Maximum number of tasks that read the disk at once on a cluster."
    )


class TrainResources(Resources):
    """Resources that training requests, with one process (rank) per GPU. mem is per node, cpus per rank."""

    nodes: int = Field(default=1, ge=1, description="Number of nodes. cluster.train.gpus is per node.")
    ranks: AutoCount = Field(default="auto", description="Processes per node. auto: one per GPU, or one without GPUs.")

    @property
    def parallel(self) -> int:
        return 1  # all processes are one task

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

    tasks: int = Field(
        default=1, ge=1, description="Number of tasks that share the rows. Each starts, retries and resumes on its own."
    )

    @property
    def parallel(self) -> int:
        return self.tasks


class CardSection(Section):
    """A kind of GPU of the cluster."""

    gres: Line | None = Field(default=None, description="GPU type in a request, as in gpu:a100:1. null: no type.")
    feature: Line | None = Field(default=None, description="Node feature that identifies this kind of GPU.")
    partition: Line | None = Field(default=None, description="Partition of these GPUs. null: cluster.slurm.partition.")
    mem: Memory = Field(description="Memory of one GPU.")


Bind: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[/$][^:,]*(:/[^:,]*(:(ro|rw))?)?$")]
Variable: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class ContainerSection(Section):
    """Container image for tasks. Supervisors and your own commands run outside."""

    image: Line | None = Field(
        default=None,
        description="Image: a file, a folder, or a name that the runtime knows. null: no container.",
    )
    runtime: Literal["apptainer", "pyxis", "podman"] = Field(default="apptainer", description="Container runtime.")
    binds: tuple[Bind, ...] = Field(
        default=(),
        description="Folders to mount in addition to the configured ones: FOLDER or FOLDER:INSIDE[:ro].",
    )
    env: dict[Variable, str] = Field(default={}, description="Environment variables in the container, by name.")
    options: tuple[Line, ...] = Field(default=(), description="Additional options of the runtime, such as --rocm.")
    digest: Line | None = Field(
        default=None, description="Required digest of the image. null: its digest at submission."
    )


class SlurmSection(Section):
    """Properties of the cluster. A profile in configs/sites/ holds these keys; this section overrides it."""

    name: Line = Field(default="slurm", description="Name under which measurements of this cluster are stored.")
    partition: Line | None = Field(default=None, description="Partition of jobs. null: the cluster's default.")
    partitions: tuple[Line, ...] = Field(
        default=(),
        description="Partitions to choose from, instead of partition: the cheapest (or first) that fits a task.",
    )
    prices: dict[Line, float] = Field(default={}, description="Price of an hour by partition. Others cost 1.")
    account: Line | None = Field(default=None, description="Account to charge.")
    qos: Line | None = Field(default=None, description="Quality of service of jobs.")
    constraint: Line | None = Field(default=None, description="Required node features, in the syntax of sbatch.")
    reservation: Line | None = Field(default=None, description="Reservation for jobs.")
    gpus: Literal["gres", "gpus-per-node"] = Field(default="gres", description="Option with which jobs request GPUs.")
    memory: Literal["mem", "mem-per-cpu", "none"] = Field(
        default="mem", description="Option with which jobs request memory. none: the cluster does not limit memory."
    )
    options: tuple[Line, ...] = Field(default=(), description="Additional options of sbatch, such as --exclusive=user.")
    setup: tuple[str, ...] = Field(
        default=(), description="Shell lines that each job runs first: modules, conda, environment."
    )
    scratch: Line | None = Field(default=None, description="Folder for temporary files on the node, such as $TMPDIR.")
    container: ContainerSection = ContainerSection()
    max_array_size: AutoCount = Field(default="auto", description="MaxArraySize of the cluster. auto: from scontrol.")
    max_submit: AutoCount = Field(
        default="auto", description="Maximum number of your tasks in the queue. auto: from sacctmgr."
    )
    largest_mem: AutoMemory = Field(default="auto", description="Memory of the largest node. auto: from sinfo.")
    longest_time: Duration | None = Field(default=None, description="Longest time limit of a job. null: from sinfo.")
    cards: tuple[CardSection, ...] = Field(default=(), description="Kinds of GPU to choose from. Empty: any GPU.")
    grace: Duration = Field(
        default=90, description="Time before the limit at which a task is asked to save its state and end."
    )
    poll: Duration = Field(default=15, description="Interval at which a permanent supervisor checks its jobs.")

    def conflicts(self) -> Iterator[Conflict]:
        if odd := [name for name, price in self.prices.items() if not 0 <= price < float("inf")]:
            yield "prices", f"has {self.prices[odd[0]]:g} for {odd[0]}: use a number of at least 0"


class SupervisorSection(Section):
    """The small process that checks tasks, retries failures and starts the next stage."""

    where: Literal["job", "login"] = Field(
        default="job", description="job: small jobs on the cluster; login: a process on the submitting machine."
    )
    partition: Line | None = Field(
        default=None, description="Partition of the supervisor. null: cluster.slurm.partition."
    )
    qos: Line | None = Field(default=None, description="Quality of service of the supervisor. null: cluster.slurm.qos.")
    mem: Memory = Field(default=1 << 30, description="Memory of the supervisor job.")
    time: Duration = Field(default=3600, description="Time limit of the supervisor job.")
    watch: Duration = Field(
        default=300,
        description="With where: login, interval of checks whether waiting jobs can ever start. 0: never.",
    )
    tries: int = Field(default=3, ge=1, description="Attempts without progress at a task before the stage fails.")


class NotifySection(Section):
    """Whom to notify when a stage ends."""

    command: tuple[Name, ...] = Field(
        default=(), description="Command to run. It receives the run, the stage, its state and a message as arguments."
    )
    mail: Line | None = Field(
        default=None,
        pattern=r"^[^\s-]\S*$",  # or sendmail would take it for an option
        description="Mail address to notify. Needs sendmail on the node.",
    )


class ClusterSection(Section):
    """Where tasks run and which resources they request."""

    executor: Literal["local", "slurm"] = Field(
        default="local", description="Where tasks run. local: this machine; slurm: a cluster."
    )
    site: Line | None = Field(
        default=None, description="Profile of the cluster: a file, or a name in configs/sites. null: none."
    )
    runs: Path = Field(default=Path("runs"), description="Folder of runs: logs, events, frozen configurations.")
    private: bool = Field(default=True, description="Make run folders readable only by their owner.")
    budget: Budget | None = Field(
        default=None,
        description="Hours that all runs in `runs` may use together, such as 500 gpu-hours. null: no limit.",
    )
    slots: SlotsSection = SlotsSection()
    slurm: SlurmSection = SlurmSection()
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
        """Return the resources that a task of a stage asks for."""
        resources: StageResources | TrainResources = getattr(self, stage)
        return resources
