"""The configuration: every knob that means something, its type, its default and one line about it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from pipeline.config.quantities import (
    AutoCount,
    AutoCountOrNone,
    AutoFlag,
    AutoMemory,
    Duration,
    Memory,
    NodeFolder,
    Option,
    Size,
    SizeOrNone,
)

KeyPath: TypeAlias = tuple[str, ...]
Name: TypeAlias = Annotated[str, StringConstraints(min_length=1)]
Label: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

CONFLICT = "conflict"  # the type of the errors about keys that do not go together
OF_STRUCTURES = (
    "structures_dir", "pattern", "splits", "state", "receptor_chains", "ligand_chains", "partners", "labels",
)  # fmt: skip
TAKEN = ("receptor", "ligand", "complex", "whole", "cross", "label", "ptr")  # by the parts of a batch
# A stage is called as a method of pydantic's models is, which is deprecated and which nobody calls.
warnings.filterwarnings("ignore", 'Field name "validate" in "Cluster"', UserWarning)
STRUCTURE_PATTERNS = tuple(
    f"**/*.{kind}{packed}" for kind in ("pdb", "ent", "cif", "mmcif", "bcif") for packed in ("", ".gz")
)


class Section(BaseModel):
    """A frozen part of the configuration; unknown keys are errors, and nothing is converted silently."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Data(Section):
    """Which items to use, and how the files say what belongs together."""

    source: Literal["manifest", "pairs", "sabdab", "pinder", "glob", "fasta", "reader"] = Field(
        default="manifest", description="How the data set is laid out; reader: as a class of your own reads it."
    )
    path: Path = Field(description="The file (manifest, sabdab, pinder, fasta) or folder (pairs, glob) to read.")
    reader: Name | None = Field(
        default=None,
        pattern=r"^[\w.]+:\w+$",
        description="What reads items that are no structures, as package.module:Name.",
    )
    options: dict[Name, Option] = Field(
        default={}, description="What the reader's class is called with, by name, besides path."
    )
    structures_dir: Path | None = Field(
        default=None, description="Folder of the structure files that a table names; null: beside the table."
    )
    pattern: tuple[Name, ...] = Field(
        default=STRUCTURE_PATTERNS, min_length=1, description="Which files below path are taken; for glob."
    )
    splits: Path | None = Field(default=None, description="CSV with the columns path and split; for pairs.")
    state: Literal["bound", "unbound"] = Field(
        default="bound",
        description="Which structures are the input; unbound (pairs, pinder) ones take labels from the bound ones.",
    )
    receptor_chains: tuple[Name, ...] = Field(
        default=(), description="Chains of the receptor in every file; empty: as the source says."
    )
    ligand_chains: tuple[Name, ...] = Field(
        default=(), description="Chains of the ligand in every file; empty: as the source says."
    )
    labels: tuple[Label, ...] = Field(
        default=(),
        description="Columns of numbers that tasks find as item.values[name]; for manifest, sabdab and pinder.",
    )
    partners: Literal["auto", "none"] = Field(
        default="auto",
        description="Files whose chains nobody names; auto: two polymer chains are the partners; none: a file is one.",
    )
    on_leak: Literal["error", "warn", "ignore"] = Field(
        default="error", description="What to do when an id, a sequence or a cluster is in two splits."
    )
    limit: int | None = Field(
        default=None, ge=1, description="Take only the first so many items, for a trial; null: all."
    )
    max_rejected_fraction: float = Field(
        default=0.05, ge=0, le=1, description="Stop when more than this fraction of the items cannot be used."
    )

    @model_validator(mode="after")
    def _partners_share_no_chain(self) -> Data:
        if shared := sorted(set(self.receptor_chains) & set(self.ligand_chains)):
            raise _conflict("ligand_chains", f"{', '.join(shared)} is also in receptor_chains: a chain has one side")
        return self

    @model_validator(mode="after")
    def _labels_have_names_of_their_own(self) -> Data:
        if taken := sorted(set(self.labels) & set(TAKEN)):
            raise _conflict("labels", f"{taken[0]} is the name of a part of a batch: call the column otherwise")
        if len(set(self.labels)) < len(self.labels):
            raise _conflict("labels", "names a column twice")
        return self

    @model_validator(mode="after")
    def _a_reader_is_named(self) -> Data:
        if self.source == "reader" and self.reader is None:
            raise _conflict("source", "reader needs the name of a class: data.reader: package.module:Name")
        if self.source != "reader" and (self.reader is not None or self.options):
            key = "options" if self.reader is None else "reader"
            raise _conflict(key, f"is for data.source: reader, and the source is {self.source}")
        if "path" in self.options:
            raise _conflict("options", "path is data.path, which a reader is given anyway")
        for key in OF_STRUCTURES if self.source == "reader" else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                raise _conflict(key, "is for structures: what a reader takes, such as splits, is in data.options")
        return self


class Structures(Section):
    """How a structure file becomes residues, wherever it leaves a choice."""

    altlocs: Literal["highest", "first"] = Field(
        default="highest",
        description="Which of several alternative locations stays: the highest occupancy, or the first.",
    )
    model: int = Field(default=1, ge=1, description="Which model of a file with several, counted from 1.")
    chain_names: Literal["author", "label"] = Field(
        default="author", description="Chain names of mmCIF: those of the authors (as in PDB files), or the labels."
    )
    assembly: Name | None = Field(
        default=None, description='Name of the biological assembly, such as "1"; null: the asymmetric unit.'
    )
    sequence: Literal["observed", "seqres"] = Field(
        default="observed", description="Sequence of a chain: the residues with coordinates, or all of SEQRES."
    )
    require: Literal["ca", "backbone"] = Field(
        default="backbone", description="Atoms a residue must have to be used: CA, or N, CA and C."
    )
    incomplete: Literal["drop", "reject"] = Field(
        default="drop", description="A residue without those atoms: drop it, or reject the complex."
    )
    modified: Literal["parent", "unknown", "reject"] = Field(
        default="parent", description="Modified residues: their parent (MSE is MET), X, or reject the complex."
    )
    ligands: Literal["drop", "keep"] = Field(
        default="drop", description="Small molecules and ions of the chosen chains; keep: for atom graphs."
    )
    max_residues: int = Field(default=10_000, ge=1, description="A complex with more residues is rejected.")
    max_file_bytes: Size = Field(
        default=64 << 20, description="A file larger than this, after decompression, is rejected."
    )


class EmbedBatch(Section):
    """How sequences are put together for the encoder; changes speed and memory, never a result."""

    policy: Literal["divisor", "tokens"] = Field(
        default="divisor", description="divisor: equal small batches of at most cap; tokens: filled up to the budget."
    )
    cap: AutoCount = Field(default=4, description="Most sequences of a batch, for divisor; auto: by free memory.")
    budget: AutoCount = Field(
        default="auto", description="Most tokens of a batch (residues + 2 of each sequence); auto: by free memory."
    )


class LongSequences(Section):
    """What becomes of sequences longer than the model saw in training; ESM-2 itself has no limit."""

    policy: Literal["full", "windows", "truncate", "error"] = Field(
        default="full", description="full: as one; windows: overlapping; truncate: the beginning; error: rejected."
    )
    length: int = Field(default=1022, ge=64, description="Residues of a window, and where the other policies begin.")
    overlap: int = Field(default=256, ge=0, description="Residues that neighbouring windows share.")

    @model_validator(mode="after")
    def _windows_advance(self) -> LongSequences:
        if 2 * self.overlap > self.length:
            raise _conflict("overlap", "is more than half of length: windows would hardly advance")
        return self


class Embed(Section):
    """How sequences become embeddings."""

    weights: Path = Field(
        default=Path("weights/esm2_t33_650M_UR50D.pt"),
        description="ESM-2 checkpoint: a fair-esm .pt file, or a Hugging Face folder or .safetensors file.",
    )
    layer: AutoCount = Field(default="auto", description="Layer whose output is kept; auto: the last.")
    context: Literal["chain", "partner"] = Field(
        default="chain", description="What is encoded as one: each chain, or the joined chains of a partner."
    )
    precision: Literal["auto", "fp32", "fp16", "bf16"] = Field(
        default="auto", description="What is computed in; auto: fp16 on a GPU, fp32 on a CPU."
    )
    storage: Literal["auto", "fp32", "fp16", "bf16"] = Field(
        default="auto", description="What embeddings are kept in; auto: as they were computed."
    )
    half_fallback: Literal["fp32", "none"] = Field(
        default="fp32", description="Where half precision is not good enough: compute that in fp32, or reject it."
    )
    on_oom: Literal["windows", "cpu"] = Field(
        default="windows", description="A single sequence that does not fit: in windows, or on the CPU."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="What it is computed on; auto: the GPU if cluster.embed.gpus is not 0."
    )
    batch: EmbedBatch = EmbedBatch()
    long: LongSequences = LongSequences()


class AtomGraph(Section):
    """What atom graphs have besides; where graph.nodes is atom."""

    radius: float | None = Field(
        default=5.0, gt=0, le=20, description="Å within which atoms that no bond joins get an edge; null: none."
    )
    hops: int = Field(
        default=3, ge=1, le=3, description="Edges along bonds; 1: bonds, 2: and angles (1-3), 3: and dihedrals (1-4)."
    )
    hydrogens: bool = Field(default=False, description="Whether hydrogen atoms are nodes.")


class Graph(Section):
    """How structures become graphs."""

    nodes: Literal["residue", "atom"] = Field(
        default="residue",
        description="residue: a node at each CA of proteins; atom: at each atom, RNA's and ligands' too.",
    )
    neighbours: int = Field(
        default=20, ge=0, le=1000, description="Edges from each residue's nearest ones in its partner; 0: none."
    )
    radius: float | None = Field(
        default=None, gt=0, le=50, description="Å between CA atoms within which residues get an edge; null: none."
    )
    cross_neighbours: int = Field(
        default=0, ge=0, le=1000, description="Edges from each residue's nearest ones in the other partner; 0: none."
    )
    cross_radius: float | None = Field(
        default=None, gt=0, le=50, description="Å within which nodes of the two partners get an edge; null: none."
    )
    contacts: float | None = Field(
        default=5.0,
        gt=0,
        le=100,
        description="Å between heavy atoms of a native contact; null: no labels.",
    )
    cache: bool = Field(default=True, description="Keep graphs on disk; false: built anew whenever they are read.")
    atom: AtomGraph = AtomGraph()

    @model_validator(mode="after")
    def _some_edges(self) -> Graph:
        if self.nodes == "residue" and self.neighbours == 0 and self.radius is None:
            raise _conflict("neighbours", "is 0 and radius is null: residues would have no edges")
        return self


class CurriculumStage(Section):
    """Epochs that are trained on the smaller items alone."""

    epochs: int = Field(ge=1, description="How many epochs; the rest, with all items, comes after the last stage.")
    largest: dict[Name, int] = Field(min_length=1, description="Sizes of the items that take part, at most, by name.")


class Schedule(Section):
    """How the learning rate changes, by optimizer steps."""

    kind: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="constant; or falling to `least` of it over all epochs, linear or cosine."
    )
    warmup: int = Field(default=0, ge=0, description="Steps over which the rate grows from 0.")
    least: float = Field(default=0.0, ge=0, le=1, description="Share of the learning rate at the end.")


class Validation(Section):
    """How a model is looked at while it is trained."""

    split: Name | None = Field(default="val", description="Which split; null, or one that has no items: none.")
    every: int = Field(default=1, ge=1, description="Epochs between validations.")
    limit: int | None = Field(default=None, ge=1, description="Items at most, always the same; null: all.")
    monitor: Name = Field(default="loss", description="The figure by which checkpoints are the best: loss or a metric.")
    better: Literal["auto", "lower", "higher"] = Field(
        default="auto", description="Which values are better; auto: lower for loss, higher for metrics."
    )
    patience: int | None = Field(
        default=None, ge=1, description="End after so many validations without a better one; null: never."
    )

    @property
    def lower_is_better(self) -> bool:
        """Say which values of the watched figure are better."""
        if self.better != "auto":
            return self.better == "lower"
        return self.monitor == "loss" or self.monitor.startswith("loss.")


class Checkpoints(Section):
    """When training is saved, and what is kept."""

    every: int | None = Field(default=None, ge=1, description="Steps between checkpoints; null: by time alone.")
    minutes: float = Field(default=10, gt=0, description="Minutes between checkpoints at most; one ends every epoch.")
    last: int = Field(default=2, ge=2, description="How many of the newest are kept; a damaged one is skipped.")
    best: int = Field(default=1, ge=0, description="How many of the best are kept.")
    asynchronous: AutoFlag = Field(
        default="auto", description="Whether training goes on while a copy is written; auto: where memory allows."
    )


class Evaluate(Section):
    """Which model is looked at, and on what."""

    split: Name | None = Field(default="test", description="Which split; null: every item.")
    checkpoint: Name = Field(default="best", description="best, last, or the folder of a checkpoint.")


class Predict(Section):
    """Which model predicts, and where the predictions go."""

    split: Name | None = Field(default=None, description="Which split; null: every item.")
    checkpoint: Name = Field(default="best", description="best, last, or the folder of a checkpoint.")
    folder: Path = Field(default=Path("predictions"), description="Folder of predictions, a folder for each set.")


class Train(Section):
    """What is trained, and what the planner may decide about it."""

    task: Name | None = Field(
        default=None, pattern=r"^[\w.]+:\w+$", description="The model and its loss, as package.module:Name."
    )
    options: dict[Name, Option] = Field(default={}, description="What the task's class is called with, by name.")
    command: Name | None = Field(
        default=None, description="A script of your own in place of a task; {micro_batch} and others are filled in."
    )
    preset: Literal["standard", "careful", "extreme"] | None = Field(
        default=None, description="Settings to begin with, from configs/presets; what is written here beats them."
    )
    models: Path = Field(default=Path("models"), description="Folder of what is trained, a folder each.")
    pretrained: Path | None = Field(default=None, description="Weights to begin with: a file, or a checkpoint.")
    pretrained_partial: bool = Field(
        default=False, description="Whether weights that are missing or of other sizes may be left out."
    )
    seed: int = Field(default=0, ge=0, description="Of fresh parameters, the order of items, and all random numbers.")
    split: Name | None = Field(default="train", description="Which split is trained on; null: every item.")
    effective_batch: int = Field(default=8, ge=1, description="Items in an optimizer step, over all GPUs.")
    micro_batch: AutoCount = Field(default="auto", description="Most items of a GPU at once; auto: planned, by cost.")
    batching: Literal["concatenated", "padded"] = Field(
        default="concatenated", description="How items make a batch: one after the other, or padded to the largest."
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="fp32", description="What is computed in; auto: the planner may choose half precision."
    )
    checkpointing: AutoFlag = Field(
        default="auto", description="Whether repeated blocks are computed again in backward; auto: where it is needed."
    )
    offload: AutoFlag = Field(
        default="auto", description="Whether activations wait in the host's memory; auto: where it is needed."
    )
    sharding: AutoFlag = Field(
        default="auto", description="Whether parameters and optimizer state are spread over the GPUs (FSDP2)."
    )
    optimizer: Literal["adamw", "adam", "sgd"] = Field(default="adamw", description="The optimizer.")
    way: Literal["auto", "foreach", "fused", "loop"] = Field(
        default="auto", description="How the optimizer works through the parameters; auto: foreach on GPUs, else loop."
    )
    learning_rate: float = Field(default=1e-4, gt=0, description="Its learning rate.")
    weight_decay: float = Field(default=0.01, ge=0, description="Its weight decay.")
    clip: float | None = Field(default=1.0, gt=0, description="The norm of all gradients at most; null: any.")
    ema: float | None = Field(default=None, gt=0, lt=1, description="Decay of moving averages; null: none are kept.")
    frozen: tuple[Name, ...] = Field(default=(), description="Parameters whose names begin so are not trained.")
    schedule: Schedule = Schedule()
    compile: bool = Field(default=False, description="Whether torch.compile is used.")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = Field(
        default="default", description="How hard it tries."
    )
    allocator: Literal["auto", "default", "expandable"] = Field(
        default="auto", description="How torch's allocator takes memory from the card."
    )
    oversize: Literal["error", "crop", "skip"] = Field(
        default="error", description="Items that no plan can hold; error: nothing is submitted."
    )
    epochs: int = Field(default=10, ge=1, description="Epochs in all.")
    curriculum: tuple[CurriculumStage, ...] = Field(default=(), description="Epochs with the smaller items first.")
    validation: Validation = Validation()
    checkpoints: Checkpoints = Checkpoints()
    nan: Literal["stop", "skip", "rollback"] = Field(
        default="stop", description="A loss or a gradient that is not finite: end, leave the step out, or go back."
    )
    too_large: Literal["cpu", "skip", "error"] = Field(
        default="cpu", description="An item that ends a GPU's memory even alone, with every remedy: where it goes."
    )
    hang: Duration = Field(default=1800, description="Without progress for so long, a process counts as hung.")
    slots: int = Field(default=4, ge=2, description="Batches that the loader holds in memory.")
    threads: int = Field(default=2, ge=1, description="Threads that read batches.")
    pin: AutoFlag = Field(default="auto", description="Whether batches are in pinned memory; auto: for GPUs.")
    empty_cache_every: int | None = Field(
        default=None, ge=1, description="Empty the allocator's cache every so many micro-batches; null: never."
    )
    memory_fraction: float | None = Field(
        default=None, gt=0, le=1, description="Share of a card's memory that may be used; null: all of it."
    )
    collect_every: int | None = Field(
        default=None, ge=1, description="Let Python collect garbage every so many steps only; null: when it wants to."
    )
    synchronise: bool = Field(default=False, description="Wait for the card after every micro-batch: for measuring.")
    log_every: int = Field(default=10, ge=1, description="Steps between lines of figures.")
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        default=(), description="Who gets the figures besides the files."
    )
    evaluate: Evaluate = Evaluate()
    predict: Predict = Predict()

    @model_validator(mode="after")
    def _a_micro_batch_is_part_of_a_step(self) -> Train:
        if self.micro_batch != "auto" and self.micro_batch > self.effective_batch:
            what = f"{self.micro_batch} is more than effective_batch, {self.effective_batch}: lower it, or raise that"
            raise _conflict("micro_batch", what)
        if self.task is not None and self.command is not None:
            raise _conflict("command", "is a script in place of a task: keep one of the two")
        if self.curriculum and sum(stage.epochs for stage in self.curriculum) >= self.epochs:
            raise _conflict("curriculum", f"leaves none of the {self.epochs} epochs (train.epochs) for all items")
        return self


class Cache(Section):
    """Where results are kept."""

    root: Path = Field(default=Path("cache"), description="Folder of the cache; share it between runs.")
    under: tuple[Path, ...] = Field(
        default=(), description="Caches of others that are looked through after it, in this order, and only read."
    )
    stage: NodeFolder = Field(
        default=None,
        description="Folder on a node's own disk to which training first copies what it reads; null: it does not.",
    )
    shard_bytes: Size = Field(
        default=256 << 20, description="Size at which a cache file is closed and the next one begins."
    )
    verify_bytes: SizeOrNone = Field(
        default=8 << 30,
        description="Cached embeddings and graphs are read and verified up to so many bytes before they count as done.",
    )
    check: Literal["quick", "full", "semantic"] = Field(
        default="full",
        description="How deep `submit --stage validate` looks: at structure, at every byte, or at what records say.",
    )
    sample: float = Field(
        default=0.0, ge=0, le=1, description="Share of the records that it makes anew, where check is semantic."
    )
    visibility_s: float = Field(
        default=10.0,
        ge=0,
        le=3600,
        description="How long to wait for files that another node has just written to appear.",
    )


class Slots(Section):
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
    partition: Name | None = Field(default=None, description="Partition of this stage; null: cluster.slurm.partition.")
    constraint: Name | None = Field(
        default=None, description="Nodes of this stage by their features; null: cluster.slurm.constraint."
    )

    @model_validator(mode="after")
    def _one_way_to_ask_for_memory(self) -> Resources:
        if self.mem_per_gpu is not None and self.mem != "auto":
            raise _conflict("mem_per_gpu", "excludes mem: keep one of the two")
        if self.mem_per_gpu is not None and self.gpus == 0:
            raise _conflict("mem_per_gpu", "means nothing where gpus is 0: use mem")
        return self


class StageResources(Resources):
    """What one task of a stage asks for, and how the stage is cut into tasks."""

    items_per_task: AutoCount = Field(
        default="auto", description="Items a task works through; auto: by the number of items."
    )
    minutes_per_task: int = Field(
        default=10, ge=1, description="About how long a task should take, where items_per_task is auto."
    )
    parallel: int = Field(default=64, ge=1, description="Tasks of a stage that run at once on a cluster, at most.")


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
        """Return how many tasks run at once: all of its processes are one task."""
        return 1

    @property
    def ranks_per_node(self) -> int:
        """Return how many processes a node has."""
        return max(1, self.gpus) if self.ranks == "auto" else self.ranks

    @property
    def world(self) -> int:
        """Return how many processes there are."""
        return self.nodes * self.ranks_per_node

    @model_validator(mode="after")
    def _a_gpu_for_each_rank(self) -> TrainResources:
        if self.gpus and self.ranks not in ("auto", self.gpus):
            raise _conflict("ranks", f"is {self.ranks} where gpus is {self.gpus}: a process has one GPU of its own")
        return self


class Card(Section):
    """A kind of GPU that a cluster has."""

    gres: Name | None = Field(default=None, description="Its type in a request, as in gpu:a100:1; null: none is named.")
    feature: Name | None = Field(default=None, description="The feature of its nodes, where that tells them apart.")
    partition: Name | None = Field(default=None, description="Where it is; null: cluster.slurm.partition.")
    mem: Memory = Field(description="Memory of one.")


class Slurm(Section):
    """What a cluster is like; a profile in configs/sites/ holds these keys, and this section overrides it."""

    name: Name = Field(default="slurm", description="What measurements of this cluster are remembered under.")
    partition: Name | None = Field(default=None, description="Partition of jobs; null: the cluster's default.")
    account: Name | None = Field(default=None, description="Account that jobs are charged to.")
    qos: Name | None = Field(default=None, description="Quality of service of jobs.")
    constraint: Name | None = Field(default=None, description="Features that nodes must have, as sbatch takes them.")
    reservation: Name | None = Field(default=None, description="Reservation that jobs run in.")
    gpus: Literal["gres", "gpus-per-node"] = Field(default="gres", description="How jobs ask for GPUs here.")
    memory: Literal["mem", "mem-per-cpu", "none"] = Field(
        default="mem", description="How jobs ask for memory here; none: it is not limited."
    )
    options: tuple[Name, ...] = Field(default=(), description="Further options of sbatch, such as --exclusive=user.")
    setup: tuple[str, ...] = Field(
        default=(), description="Shell lines that every job runs first: modules, conda, environment."
    )
    scratch: Name | None = Field(default=None, description="Folder on the node for temporary files, such as $TMPDIR.")
    max_array_size: AutoCount = Field(default="auto", description="MaxArraySize; auto: as scontrol says.")
    max_submit: AutoCount = Field(
        default="auto", description="Tasks of yours that may be in the queue at once; auto: as sacctmgr says."
    )
    largest_mem: AutoMemory = Field(default="auto", description="Memory of the largest node; auto: as sinfo says.")
    longest_time: Duration | None = Field(
        default=None, description="The longest a job may ask for; null: as sinfo says."
    )
    cards: tuple[Card, ...] = Field(default=(), description="Kinds of GPU, for choosing one; none: whatever comes.")
    grace: Duration = Field(default=90, description="How long before its time limit a task is told to finish in order.")
    poll: Duration = Field(default=15, description="How often a supervisor that stays looks at its jobs.")


class Supervisor(Section):
    """What judges and repairs a run between its jobs."""

    where: Literal["job", "login"] = Field(
        default="job", description="job: small jobs of the cluster; login: a process on the machine that submits."
    )
    partition: Name | None = Field(default=None, description="Its partition; null: cluster.slurm.partition.")
    qos: Name | None = Field(default=None, description="Its quality of service; null: cluster.slurm.qos.")
    mem: Memory = Field(default=1 << 30, description="Memory of its job.")
    time: Duration = Field(default=3600, description="Time limit of its job.")
    tries: int = Field(default=3, ge=1, description="Attempts at a task that make no progress, before the stage fails.")


class Notify(Section):
    """Who is told when a stage has ended."""

    command: tuple[Name, ...] = Field(
        default=(), description="Command to run, with the run, the stage, its state and a message as further words."
    )
    mail: Name | None = Field(
        default=None,
        pattern=r"^[^\s-]\S*$",  # or sendmail would take it for an option
        description="Address that gets a mail, where the node has sendmail.",
    )


class Cluster(Section):
    """Where tasks run, and what they may use."""

    executor: Literal["local", "slurm"] = Field(
        default="local", description="What runs the tasks; local: this machine; slurm: a cluster."
    )
    site: Name | None = Field(
        default=None, description="Profile of the cluster: a file, or a name in configs/sites; null: none."
    )
    runs: Path = Field(
        default=Path("runs"), description="Folder of the run folders: logs, events, frozen configurations."
    )
    private: bool = Field(default=True, description="Whether run folders are readable by their owner alone.")
    slots: Slots = Slots()
    slurm: Slurm = Slurm()
    supervisor: Supervisor = Supervisor()
    notify: Notify = Notify()
    scan: StageResources = StageResources()
    embed: StageResources = StageResources()
    graph: StageResources = StageResources()
    train: TrainResources = TrainResources()
    evaluate: TrainResources = TrainResources()
    predict: TrainResources = TrainResources()
    validate: CheckResources = CheckResources()  # type: ignore[assignment]  # pydantic has such a method


class Config(Section):
    """Everything that a run is told."""

    data: Data
    structures: Structures = Structures()
    embed: Embed = Embed()
    graph: Graph = Graph()
    train: Train = Train()
    cache: Cache = Cache()
    cluster: Cluster = Cluster()

    @model_validator(mode="after")
    def _a_gpu_to_compute_on(self) -> Config:
        if self.embed.device == "cuda" and self.cluster.embed.gpus == 0:
            raise _conflict("embed", "device is cuda, but cluster.embed.gpus is 0: ask for a GPU, or leave device auto")
        return self

    @model_validator(mode="after")
    def _partners_that_meet(self) -> Config:
        if self.data.state == "unbound" and (self.graph.cross_neighbours or self.graph.cross_radius is not None):
            what = "cross edges join partners that stand together, but data.state is unbound: leave them out"
            raise _conflict("graph", what)
        if self.data.partners == "none" and (self.graph.cross_neighbours or self.graph.cross_radius is not None):
            raise _conflict("graph", "cross edges join two partners, but data.partners is none: leave them out")
        return self

    @model_validator(mode="after")
    def _ligands_are_atoms(self) -> Config:
        if self.structures.ligands == "keep" and self.graph.nodes != "atom":
            raise _conflict("structures", "ligands is keep, but only graphs with graph.nodes: atom hold them")
        return self


def _conflict(key: str, what: str) -> PydanticCustomError:
    return PydanticCustomError(CONFLICT, "{what}", {"what": what, "key": key})


def _walk(section: type[BaseModel], above: KeyPath = ()) -> dict[KeyPath, FieldInfo]:
    fields: dict[KeyPath, FieldInfo] = {}
    for name, info in section.model_fields.items():
        key = (*above, name)
        fields[key] = info
        if is_section(info):
            fields |= _walk(info.annotation, key)  # type: ignore[arg-type]
    return fields


def is_section(info: FieldInfo) -> bool:
    """Tell a section from a key that holds a value."""
    return isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)


FIELDS: dict[KeyPath, FieldInfo] = _walk(Config)
SECTIONS: dict[KeyPath, FieldInfo] = {key: info for key, info in FIELDS.items() if is_section(info)}
LEAVES: dict[KeyPath, FieldInfo] = {key: info for key, info in FIELDS.items() if not is_section(info)}
PATHS = frozenset(key for key, info in LEAVES.items() if info.annotation in (Path, Path | None))
PATH_LISTS = frozenset(key for key, info in LEAVES.items() if info.annotation == tuple[Path, ...])


def value_at(config: Config, key: KeyPath) -> Any:
    """Return the value of a key."""
    value: Any = config
    for name in key:
        value = getattr(value, name)
    return value
