"""The section train: what to train, evaluate and predict, and what the planner may decide."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from pipeline.config.schema_parts import (
    AutoCount,
    AutoFlag,
    AutoFlagOrCount,
    AutoNames,
    Duration,
    Interval,
    ItemLimit,
    Name,
    Option,
    Range,
    Section,
    setting,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.config.schema_parts import Conflict

ROUNDING = 1e-9


class CurriculumSection(Section):
    """A phase of training with a selection of items by size, or with other task options."""

    epochs: int = setting(..., "Number of epochs. After the last phase, training continues with all items.", ge=1)
    largest: dict[Name, int] = setting({}, "Maximum sizes of the items of this phase, by name.")
    smallest: dict[Name, int] = setting({}, "Minimum sizes of the items of this phase, by name.")
    options: dict[Name, Option] = setting(
        {}, "Task options that replace those in train.options. They must not change the model or sizes."
    )

    def conflicts(self) -> Iterator[Conflict]:
        if not (self.largest or self.smallest or self.options):
            yield "epochs", "phase changes nothing: add largest, smallest or options"

    @model_serializer(mode="wrap")
    def _only_what_is_said(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in plain(self).items() if value}


class SamplingSection(Section):
    """Which items an epoch of training draws. Without settings: every item once."""

    table: Path | None = setting(
        None, "Table with a column id and the columns named below, such as that of `data split`."
    )
    weight: Name | None = setting(None, "Column of weights. Weight 2: drawn twice as often.")
    cluster: Name | None = setting(None, "Column of clusters. Each epoch draws per_cluster items of each.")
    per_cluster: int = setting(1, "Number of items that an epoch draws of each cluster.", ge=1)
    source: Name | None = setting(None, "Column of sources, such as the data set an item is from.")
    shares: dict[Name, Annotated[float, Field(ge=0)]] = setting(
        {}, "Share of each source in an epoch, such as {pdb: 0.7, predicted: 0.3}."
    )
    items_per_epoch: int | None = setting(
        None, "Items in an epoch. null: as many as there are, or per_cluster of each cluster.", ge=1
    )

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for name in (self.weight, self.cluster, self.source) if name)

    @property
    def is_used(self) -> bool:
        return bool(self.columns) or self.items_per_epoch is not None

    @property
    def table_path(self) -> Path:
        assert self.table is not None
        return self.table

    def conflicts(self) -> Iterator[Conflict]:
        if self.columns and self.table is None:
            yield "table", f"needed for {', '.join(self.columns)}: name a table with a column id and these columns"
        if self.table is not None and not self.columns:
            yield "table", "changes nothing: name its columns in weight, cluster or source"
        if bool(self.source) != bool(self.shares):
            yield "shares", "and source belong together: set both or none"
        if self.shares and not any(self.shares.values()):
            yield "shares", "are all 0"
        if self.per_cluster > 1 and not self.cluster:
            yield "per_cluster", "changes nothing without cluster"


class ScheduleSection(Section):
    """Learning-rate schedule, by optimizer steps."""

    kind: Literal["constant", "linear", "cosine", "inverse_sqrt"] = setting(
        "constant",
        "constant, decay over all epochs to `least` (linear or cosine), or inverse_sqrt after the warm-up (Noam).",
    )
    warmup: int = setting(0, "Warm-up steps, in which the rate grows from 0.", ge=0)
    least: float = setting(0.0, "Final learning rate, as a share of learning_rate.", ge=0, le=1)


class ValidationSection(Section):
    """Validation during training."""

    split: Name | None = setting("val", "Split to validate on. null or empty split: none.")
    every: Interval = setting(1, "Interval: epochs such as 2, a part of an epoch such as 0.25, or '500 steps'.")
    limit: ItemLimit = setting(
        None, "Maximum number of items, always the same ones: 1000, or a part such as 0.25. null: all."
    )
    monitor: Name = setting("loss", "Metric that selects the best checkpoints, such as loss.")
    better: Literal["auto", "lower", "higher"] = setting(
        "auto", "Better values of the monitored metric. auto: lower for loss, higher for others."
    )
    patience: int | None = setting(None, "Stop after this many validations without improvement. null: never.", ge=1)

    @property
    def lower_is_better(self) -> bool:
        if self.better != "auto":
            return self.better == "lower"
        return self.monitor == "loss" or self.monitor.startswith("loss.")

    def is_due_within(self, step: int, steps: int, done: int) -> bool:
        """Tell whether a validation is due within an epoch, after `step` of its `steps` and `done` steps in total."""
        if isinstance(self.every, str):
            return done % int(self.every.split()[0]) == 0
        if self.every >= 1:
            return False
        parts, parts_before = (int((number / steps) / self.every + ROUNDING) for number in (step, step - 1))
        return parts > parts_before

    def is_due_after(self, epoch: int, done: int) -> bool:
        """Tell whether a validation is due at the end of an epoch (from 1), after `done` steps in total."""
        if isinstance(self.every, str):
            return done % int(self.every.split()[0]) == 0
        return self.every < 1 or epoch % self.every == 0


class CheckpointsSection(Section):
    """When to write checkpoints, and which to keep."""

    every: int | None = setting(None, "Steps between checkpoints. null: by time only.", ge=1)
    minutes: float = setting(10, "Maximum minutes between checkpoints. Each epoch writes one.", gt=0)
    last: int = setting(2, "Number of newest checkpoints to keep. Damaged ones are skipped.", ge=2)
    best: int = setting(1, "Number of best checkpoints to keep.", ge=0)
    asynchronous: AutoFlag = setting("auto", "Continue training while a checkpoint is written. auto: if memory allows.")


CHECKPOINT = "best or last of this training. Or an existing model's name, folder or checkpoint: no training."


class EvaluateSection(Section):
    """Which model to evaluate, and on which items."""

    split: Name | None = setting("test", "Split to evaluate. null: all items.")
    checkpoint: Name = setting("best", CHECKPOINT)
    options: dict[Name, Option] = setting(
        {}, "Task options for evaluation that replace those in train.options. The model stays the same."
    )


class PredictSection(Section):
    """Which model predicts, and where to write predictions."""

    split: Name | None = setting(None, "Split to predict. null: all items.")
    checkpoint: Name = setting("best", CHECKPOINT)
    folder: Path = setting(Path("predictions"), "Folder of predictions, with one folder per set.")
    for_training: bool = setting(
        False, "Train on these predictions: the model of another task writes them to the folder first."
    )
    parquet: bool = setting(False, "Also write predictions.parquet next to the CSV file.")
    options: dict[Name, Option] = setting(
        {}, "Task options for prediction that replace those in train.options. The model stays the same."
    )


class SweepSection(Section):
    """Many trainings in one run. Each point (a choice of settings) is its own model."""

    points: tuple[dict[Name, Option], ...] = setting(
        (), "Settings of each training, over the others. `pipeline submit --sweep` writes them."
    )
    search: Literal["none", "optuna"] = setting(
        "none", "optuna: choose each point by the results of earlier ones. Needs the extra `search`."
    )
    space: dict[Name, Range] = setting(
        {}, "What a search chooses from, by setting: a range such as {low: 1e-5, high: 1e-2, log: true}, or a list."
    )
    trials: int = setting(20, "Number of points of a search.", ge=1)
    at_once: int = setting(4, "Points that a search trains at once. More at once learn from fewer results.", ge=1)
    prune: Literal["none", "median"] = setting(
        "none", "median: stop points that are worse than the median of the others at the same epoch."
    )
    grace: int = setting(3, "Epochs before a point can be pruned.", ge=1)
    parallel: int = setting(16, "Maximum number of points that train at once on a cluster.", ge=1)
    per_gpu: AutoCount = setting(
        1, "Points that share a GPU at once, each in its part of the memory. auto: as many as their plans let fit."
    )

    @property
    def share(self) -> int:
        """The number of equal parts of a GPU; a plan gets one part. With `auto`, plans use the whole GPU."""
        return 1 if self.per_gpu == "auto" else self.per_gpu

    @property
    def is_search(self) -> bool:
        return self.search != "none"

    @property
    def is_used(self) -> bool:
        return self.is_search or bool(self.points)

    def conflicts(self) -> Iterator[Conflict]:
        if self.is_search and self.points:
            yield "points", "and search exclude each other: set search: none to train given points"
        if self.is_search and self.per_gpu != 1:
            yield "per_gpu", "is for given points: each trial of a search has a GPU of its own"
        if self.is_search and not self.space:
            yield (
                "space",
                "is empty: name settings, such as {train.learning_rate: {low: 1e-5, high: 1e-2, log: true}}",
            )


class TrainSection(Section):
    """What to train, and what the planner may choose."""

    task: Name | None = setting(
        None, "Class with the model and its loss, as package.module:Name.", pattern=r"^[\w.]+:\w+$"
    )
    options: dict[Name, Option] = setting({}, "Arguments of the task's class, by name.")
    command: Name | None = setting(None, "Your own script instead of a task. {micro_batch} and others are filled in.")
    preset: Literal["standard", "careful", "extreme"] | None = setting(
        None, "Base settings from configs/presets. Your own settings override them."
    )
    models: Path = setting(Path("models"), "Folder of trained models, with one folder per model.")
    pretrained: Path | None = setting(None, "Initial weights: a file or a checkpoint.")
    pretrained_partial: bool = setting(False, "Skip initial weights that are missing or differ in size.")
    pretrained_as: Name | None = setting(
        None, "Published form of the initial weights, such as dreams. null: detected by their names."
    )
    pretrained_map: dict[Name, Name] = setting(
        {}, "Map from names in the file to names in the model (tensors or modules). *: a layer number."
    )
    pretrained_entry: Name | None = setting(
        None, "Entry of the checkpoint to read, such as ema_state_dict. null: the usual one."
    )
    seed: int = setting(
        0, "Random seed of new parameters, the order of items, and all other random numbers.", ge=0, le=10**18
    )
    split: Name | None = setting("train", "Split to train on. null: all items.")
    embeddings: AutoNames = setting(
        "auto", "Encoders whose embeddings are concatenated: main, or names in embed.also. auto: main."
    )
    effective_batch: int = setting(8, "Items per optimizer step, over all GPUs.", ge=1, le=9_999_999)
    micro_batch: AutoCount = setting("auto", "Maximum items per micro-batch on a GPU. auto: by cost.")
    batching: Literal["concatenated", "padded"] = setting(
        "concatenated", "How to combine items into a batch: concatenate them, or pad them to the largest."
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = setting(
        "fp32", "Precision of training. auto: the planner may choose half precision."
    )
    checkpointing: AutoFlagOrCount = setting(
        "auto",
        "Recompute repeated blocks in the backward pass (activation checkpointing): all, or so many. auto: if needed.",
    )
    offload: AutoFlag = setting("auto", "Keep activations in host memory. auto: if needed.")
    sharding: AutoFlag = setting("auto", "Shard parameters and optimizer state over the GPUs (FSDP2).")
    optimizer: Literal["adamw", "adam", "sgd"] = setting("adamw", "Optimizer.")
    way: Literal["auto", "foreach", "fused", "loop"] = setting(
        "auto", "Implementation of the optimizer. auto: foreach on GPUs, else loop."
    )
    learning_rate: float = setting(1e-4, "Learning rate.", gt=0)
    weight_decay: float = setting(0.01, "Weight decay.", ge=0)
    clip: float | None = setting(1.0, "Maximum norm of all gradients (clipping). null: none.", gt=0)
    ema: float | None = setting(None, "Decay of the moving average of weights. null: none.", gt=0, lt=1)
    frozen: tuple[Name, ...] = setting((), "Freeze parameters with these name prefixes.")
    schedule: ScheduleSection = ScheduleSection()
    compile: bool = setting(False, "Use torch.compile.")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = setting("default", "`torch.compile` mode.")
    allocator: Literal["auto", "default", "expandable"] = setting("auto", "How torch's allocator reserves GPU memory.")
    oversize: Literal["error", "crop", "skip"] = setting("error", "Items that no plan can hold. error: submit nothing.")
    sampling: SamplingSection = SamplingSection()
    epochs: int = setting(10, "Total number of epochs.", ge=1)
    curriculum: tuple[CurriculumSection, ...] = setting(
        (), "Phases that come first, with smaller items or other options."
    )
    validation: ValidationSection = ValidationSection()
    checkpoints: CheckpointsSection = CheckpointsSection()
    nan: Literal["stop", "skip", "rollback"] = setting(
        "stop", "If a loss or gradient is not finite: stop, skip the step, or roll back to a checkpoint."
    )
    too_large: Literal["cpu", "skip", "error"] = setting(
        "cpu", "If an item alone runs out of GPU memory: run it on the CPU, skip it, or stop with an error."
    )
    hang: Duration = setting(1800, "Treat a process as hung after this long without progress.")
    slots: int = setting(4, "Number of batches that the loader keeps in memory.", ge=2)
    threads: int = setting(2, "Number of threads (or processes) that read batches.", ge=1)
    readers: Literal["auto", "threads", "processes"] = setting(
        "auto", "Read and collate with threads or processes. auto: threads, then processes if they fall behind."
    )
    pin: AutoFlag = setting("auto", "Pin the memory of batches. auto: for GPUs.")
    empty_cache_every: int | None = setting(
        None, "Empty the allocator's cache after this many micro-batches. null: never.", ge=1
    )
    memory_fraction: float | None = setting(None, "Share of GPU memory to use. null: all.", gt=0, le=1)
    collect_every: int | None = setting(
        None, "Collect Python garbage only after this many steps. null: Python decides.", ge=1
    )
    synchronise: bool = setting(False, "Wait for the GPU after each micro-batch, for measurements.")
    log_every: int = setting(10, "Steps between logged metrics.", ge=1)
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = setting(
        (), "Trackers that also receive the metrics. Without a login, type `wandb sync` later."
    )
    evaluate: EvaluateSection = EvaluateSection()
    predict: PredictSection = PredictSection()
    sweep: SweepSection = SweepSection()

    @property
    def stages(self) -> dict[str, CurriculumSection]:
        """The phases of the curriculum by name, without the last, which has all items."""
        return {f"stage {number}": stage for number, stage in enumerate(self.curriculum, 1)}

    def conflicts(self) -> Iterator[Conflict]:
        if self.micro_batch != "auto" and self.micro_batch > self.effective_batch:
            batch = self.effective_batch
            problem = (
                f"{self.micro_batch} exceeds effective_batch ({batch}): lower micro_batch or raise effective_batch"
            )
            yield "micro_batch", problem
        if self.command is not None and self.sampling.is_used:
            yield "sampling", "is for train.task: a script of train.command draws its own items"
        if self.task is not None and self.command is not None:
            yield "command", "cannot be combined with train.task: keep one of the two"
        if self.curriculum and sum(stage.epochs for stage in self.curriculum) >= self.epochs:
            yield "curriculum", f"uses all {self.epochs} epochs (train.epochs): leave some for all items, or use []"
