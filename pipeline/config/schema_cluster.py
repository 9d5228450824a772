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
    """What the local executor may use of this machine."""

    cpus: AutoCount = Field(
        default="auto", description="CPU cores for all tasks together; auto: those this process may use."
    )
    mem: AutoMemory = Field(
        default="auto", description="Memory for all tasks together; auto: what the machine has free."
    )
    gpus: AutoCountOrNone = Field(
        default="auto", description="GPUs for all tasks together; auto: those that are visible."
    )


class Resources(Section):
    """What one task asks for."""

    cpus: int = Field(default=1, ge=1, description="CPU cores of a task.")
    gpus: int = Field(default=0, ge=0, description="GPUs of a task.")
    mem: AutoMemory = Field(default="auto", description="Memory of a task; auto: planned.")
    mem_per_gpu: Memory | None = Field(
        default=None, description="Memory of a task for each of its GPUs, in place of mem."
    )
    time: Duration = Field(default=3600, description="Time limit of a task.")
    partition: Line | None = Field(default=None, description="Partition of this stage; null: cluster.slurm.partition.")
    constraint: Line | None = Field(
        default=None, description="Nodes of this stage by their features; null: cluster.slurm.constraint."
    )

    @property
    def cpus_on_node(self) -> int:
        return self.cpus

    def conflicts(self) -> Iterator[Conflict]:
        if self.mem_per_gpu is not None and self.mem != "auto":
            yield "mem_per_gpu", "excludes mem: keep one of the two"
        if self.mem_per_gpu is not None and self.gpus == 0:
            yield "mem_per_gpu", "means nothing where gpus is 0: use mem"


class StageResources(Resources):
    """What one task of a stage asks for, and how the stage is cut into tasks."""

    items_per_task: AutoCount = Field(
        default="auto", description="Items a task works through; auto: by the number of items."
    )
    minutes_per_task: int = Field(
        default=10, ge=1, description="About how long a task should take, where items_per_task is auto."
    )
    parallel: int = Field(default=64, ge=1, description="Tasks of a stage that run at once on a cluster, at most.")

    @property
    def nodes(self) -> int:
        return 1  # a task is on one

    @property
    def ranks_per_node(self) -> int:
        return 1


class CheckResources(StageResources):
    """What one task of validating the cache asks for; its items are cache files."""

    parallel: int = Field(default=16, ge=1, description="Tasks that read the disk at once on a cluster, at most.")


class TrainResources(Resources):
    """What training asks for: one process, a rank, for each GPU; mem is that of a node, cpus those of a rank."""

    nodes: int = Field(default=1, ge=1, description="Nodes; cluster.train.gpus is the GPUs of each.")
    ranks: AutoCount = Field(
        default="auto", description="Processes on each node; auto: one for each GPU, and one where there is none."
    )

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
            yield "ranks", f"is {self.ranks} where gpus is {self.gpus}: a process has one GPU of its own"


class PredictResources(TrainResources):
    """What predicting asks for: as training, and in how many tasks of an array the rows are cut."""

    tasks: int = Field(
        default=1, ge=1, description="Tasks that share the rows, each started, repaired and resumed by itself."
    )

    @property
    def parallel(self) -> int:
        return self.tasks


class CardSection(Section):
    """A kind of GPU that a cluster has."""

    gres: Line | None = Field(default=None, description="Its type in a request, as in gpu:a100:1; null: none is named.")
    feature: Line | None = Field(default=None, description="The feature of its nodes, where that tells them apart.")
    partition: Line | None = Field(default=None, description="Where it is; null: cluster.slurm.partition.")
    mem: Memory = Field(description="Memory of one.")


Bind: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[/$][^:,]*(:/[^:,]*(:(ro|rw))?)?$")]
Variable: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class ContainerSection(Section):
    """The image that workers run in; supervisors, and what people type, stay outside."""

    image: Line | None = Field(
        default=None,
        description="File or folder of the image, or a name that the runtime knows; null: workers run in no container.",
    )
    runtime: Literal["apptainer", "pyxis", "podman"] = Field(default="apptainer", description="What starts it.")
    binds: tuple[Bind, ...] = Field(
        default=(),
        description="Folders that it sees besides those that the configuration names: FOLDER, FOLDER:INSIDE[:ro].",
    )
    env: dict[Variable, str] = Field(default={}, description="Environment variables inside, by name.")
    options: tuple[Line, ...] = Field(default=(), description="Further options of the runtime, such as --rocm.")
    digest: Line | None = Field(
        default=None, description="Digest that the image must have; null: what it has when a run is submitted."
    )


class SlurmSection(Section):
    """What a cluster is like; a profile in configs/sites/ holds these keys, and this section overrides it."""

    name: Line = Field(default="slurm", description="What measurements of this cluster are remembered under.")
    partition: Line | None = Field(default=None, description="Partition of jobs; null: the cluster's default.")
    partitions: tuple[Line, ...] = Field(
        default=(), description="Where tasks may go, in place of partition: to the cheapest, or first, that holds them."
    )
    prices: dict[Line, float] = Field(
        default={}, description="What an hour costs in a partition, beside 1 in those that are not named."
    )
    account: Line | None = Field(default=None, description="Account that jobs are charged to.")
    qos: Line | None = Field(default=None, description="Quality of service of jobs.")
    constraint: Line | None = Field(default=None, description="Features that nodes must have, as sbatch takes them.")
    reservation: Line | None = Field(default=None, description="Reservation that jobs run in.")
    gpus: Literal["gres", "gpus-per-node"] = Field(default="gres", description="How jobs ask for GPUs here.")
    memory: Literal["mem", "mem-per-cpu", "none"] = Field(
        default="mem", description="How jobs ask for memory here; none: it is not limited."
    )
    options: tuple[Line, ...] = Field(default=(), description="Further options of sbatch, such as --exclusive=user.")
    setup: tuple[str, ...] = Field(
        default=(), description="Shell lines that every job runs first: modules, conda, environment."
    )
    scratch: Line | None = Field(default=None, description="Folder on the node for temporary files, such as $TMPDIR.")
    container: ContainerSection = ContainerSection()
    max_array_size: AutoCount = Field(default="auto", description="MaxArraySize; auto: as scontrol says.")
    max_submit: AutoCount = Field(
        default="auto", description="Tasks of yours that may be in the queue at once; auto: as sacctmgr says."
    )
    largest_mem: AutoMemory = Field(default="auto", description="Memory of the largest node; auto: as sinfo says.")
    longest_time: Duration | None = Field(
        default=None, description="The longest a job may ask for; null: as sinfo says."
    )
    cards: tuple[CardSection, ...] = Field(
        default=(), description="Kinds of GPU, for choosing one; none: whatever comes."
    )
    grace: Duration = Field(default=90, description="How long before its time limit a task is told to finish in order.")
    poll: Duration = Field(default=15, description="How often a supervisor that stays looks at its jobs.")

    def conflicts(self) -> Iterator[Conflict]:
        if odd := [name for name, price in self.prices.items() if not 0 <= price < float("inf")]:
            yield "prices", f"has {self.prices[odd[0]]:g} for {odd[0]}: a price is a number from 0"


class SupervisorSection(Section):
    """What judges and repairs a run between its jobs."""

    where: Literal["job", "login"] = Field(
        default="job", description="job: small jobs of the cluster; login: a process on the machine that submits."
    )
    partition: Line | None = Field(default=None, description="Its partition; null: cluster.slurm.partition.")
    qos: Line | None = Field(default=None, description="Its quality of service; null: cluster.slurm.qos.")
    mem: Memory = Field(default=1 << 30, description="Memory of its job.")
    time: Duration = Field(default=3600, description="Time limit of its job.")
    watch: Duration = Field(
        default=300,
        description="How often a small job looks, while others wait, whether they ever will start; 0: never.",
    )
    tries: int = Field(default=3, ge=1, description="Attempts at a task that make no progress, before the stage fails.")


class NotifySection(Section):
    """Who is told when a stage has ended."""

    command: tuple[Name, ...] = Field(
        default=(), description="Command to run, with the run, the stage, its state and a message as further words."
    )
    mail: Line | None = Field(
        default=None,
        pattern=r"^[^\s-]\S*$",  # or sendmail would take it for an option
        description="Address that gets a mail, where the node has sendmail.",
    )


class ClusterSection(Section):
    """Where tasks run, and what they may use."""

    executor: Literal["local", "slurm"] = Field(
        default="local", description="What runs the tasks; local: this machine; slurm: a cluster."
    )
    site: Line | None = Field(
        default=None, description="Profile of the cluster: a file, or a name in configs/sites; null: none."
    )
    runs: Path = Field(
        default=Path("runs"), description="Folder of the run folders: logs, events, frozen configurations."
    )
    private: bool = Field(default=True, description="Whether run folders are readable by their owner alone.")
    budget: Budget | None = Field(
        default=None, description="Hours that all runs in `runs` may take together: 500 gpu-hours; null: no limit."
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
