"""The section train: what is trained, evaluated and predicted, and what the planner may decide about it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from pipeline.config.schema_parts import (
    AutoCount,
    AutoFlag,
    AutoNames,
    Duration,
    Interval,
    ItemLimit,
    Name,
    Option,
    Section,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.config.schema_parts import Conflict

ROUNDING = 1e-9


class CurriculumSection(Section):
    """A phase of training with a selection of items by size, or with other task options."""

    epochs: int = Field(ge=1, description="Number of epochs. After the last phase, training continues with all items.")
    largest: dict[Name, int] = Field(default={}, description="Maximum sizes of the items of this phase, by name.")
    smallest: dict[Name, int] = Field(default={}, description="Minimum sizes of the items of this phase, by name.")
    options: dict[Name, Option] = Field(
        default={},
        description="Task options that replace those in train.options. They must not change the model or sizes.",
    )

    def conflicts(self) -> Iterator[Conflict]:
        if not (self.largest or self.smallest or self.options):
            yield "epochs", "phase changes nothing: add largest, smallest or options"

    @model_serializer(mode="wrap")
    def _only_what_is_said(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in plain(self).items() if value}


class ScheduleSection(Section):
    """Learning-rate schedule, by optimizer steps."""

    kind: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="constant, or decay over all epochs to `least` (linear or cosine)."
    )
    warmup: int = Field(default=0, ge=0, description="Warm-up steps, in which the rate grows from 0.")
    least: float = Field(default=0.0, ge=0, le=1, description="Final learning rate, as a share of learning_rate.")


class ValidationSection(Section):
    """Validation during training."""

    split: Name | None = Field(default="val", description="Split to validate on. null or empty split: none.")
    every: Interval = Field(
        default=1, description="Interval: epochs such as 2, a part of an epoch such as 0.25, or '500 steps'."
    )
    limit: ItemLimit = Field(
        default=None,
        description="Maximum number of items, always the same ones: 1000, or a part such as 0.25. null: all.",
    )
    monitor: Name = Field(default="loss", description="Metric that selects the best checkpoints, such as loss.")
    better: Literal["auto", "lower", "higher"] = Field(
        default="auto", description="Better values of the monitored metric. auto: lower for loss, higher for others."
    )
    patience: int | None = Field(
        default=None, ge=1, description="Stop after this many validations without improvement. null: never."
    )

    @property
    def lower_is_better(self) -> bool:
        if self.better != "auto":
            return self.better == "lower"
        return self.monitor == "loss" or self.monitor.startswith("loss.")

    def is_due_within(self, step: int, steps: int, done: int) -> bool:
        """Tell whether it is due within an epoch, after `step` of its `steps` and `done` steps in all."""
        if isinstance(self.every, str):
            return done % int(self.every.split()[0]) == 0
        if self.every >= 1:
            return False
        parts, parts_before = (int((number / steps) / self.every + ROUNDING) for number in (step, step - 1))
        return parts > parts_before

    def is_due_after(self, epoch: int, done: int) -> bool:
        """Tell whether it is due at the end of an epoch, counted from 1, after `done` steps in all."""
        if isinstance(self.every, str):
            return done % int(self.every.split()[0]) == 0
        return self.every < 1 or epoch % self.every == 0


class CheckpointsSection(Section):
    """When to write checkpoints, and which to keep."""

    every: int | None = Field(default=None, ge=1, description="Steps between checkpoints. null: by time only.")
    minutes: float = Field(default=10, gt=0, description="Maximum minutes between checkpoints. Each epoch writes one.")
    last: int = Field(default=2, ge=2, description="Number of newest checkpoints to keep. Damaged ones are skipped.")
    best: int = Field(default=1, ge=0, description="Number of best checkpoints to keep.")
    asynchronous: AutoFlag = Field(
        default="auto", description="Continue training while a checkpoint is written. auto: if memory allows."
    )


CHECKPOINT = "best or last of this training. Or an existing model's name, folder or checkpoint: no training."


class EvaluateSection(Section):
    """Which model to evaluate, and on which items."""

    split: Name | None = Field(default="test", description="Split to evaluate. null: all items.")
    checkpoint: Name = Field(default="best", description=CHECKPOINT)
    options: dict[Name, Option] = Field(
        default={},
        description="Task options for evaluation that replace those in train.options. The model stays the same.",
    )


class PredictSection(Section):
    """Which model predicts, and where to write predictions."""

    split: Name | None = Field(default=None, description="Split to predict. null: all items.")
    checkpoint: Name = Field(default="best", description=CHECKPOINT)
    folder: Path = Field(default=Path("predictions"), description="Folder of predictions, with one folder per set.")
    for_training: bool = Field(
        default=False,
        description="Train on these predictions: the model of another task writes them to the folder first.",
    )
    parquet: bool = Field(default=False, description="Also write predictions.parquet next to the CSV file.")
    options: dict[Name, Option] = Field(
        default={},
        description="Task options for prediction that replace those in train.options. The model stays the same.",
    )


class SweepSection(Section):
    """Many trainings in one run. Each point (a choice of settings) is its own model."""

    points: tuple[dict[Name, Option], ...] = Field(
        default=(), description="Settings of each training, over the others. `pipeline submit --sweep` writes them."
    )
    prune: Literal["none", "median"] = Field(
        default="none",
        description="median: stop points that are worse than the median of the others at the same epoch.",
    )
    grace: int = Field(default=3, ge=1, description="Epochs before a point can be pruned.")
    parallel: int = Field(default=16, ge=1, description="Maximum number of points that train at once on a cluster.")


class TrainSection(Section):
    """What to train, and what the planner may choose."""

    task: Name | None = Field(
        default=None, pattern=r"^[\w.]+:\w+$", description="Class with the model and its loss, as package.module:Name."
    )
    options: dict[Name, Option] = Field(default={}, description="Arguments of the task's class, by name.")
    command: Name | None = Field(
        default=None, description="Your own script instead of a task. {micro_batch} and others are filled in."
    )
    preset: Literal["standard", "careful", "extreme"] | None = Field(
        default=None, description="Base settings from configs/presets. Your own settings override them."
    )
    models: Path = Field(default=Path("models"), description="Folder of trained models, with one folder per model.")
    pretrained: Path | None = Field(default=None, description="Initial weights: a file or a checkpoint.")
    pretrained_partial: bool = Field(
        default=False, description="Skip initial weights that are missing or differ in size."
    )
    pretrained_as: Name | None = Field(
        default=None,
        description="Published form of the initial weights, such as dreams. null: detected by their names.",
    )
    pretrained_map: dict[Name, Name] = Field(
        default={},
        description="Map from names in the file to names in the model (tensors or modules). *: a layer number.",
    )
    pretrained_entry: Name | None = Field(
        default=None, description="Entry of the checkpoint to read, such as ema_state_dict. null: the usual one."
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=10**18,  # torch takes 64 bits
        description="Random seed of new parameters, the order of items, and all other random numbers.",
    )
    split: Name | None = Field(default="train", description="Split to train on. null: all items.")
    embeddings: AutoNames = Field(
        default="auto",
        description="Encoders whose embeddings are concatenated: main, or names in embed.also. auto: main.",
    )
    effective_batch: int = Field(default=8, ge=1, le=9_999_999, description="Items per optimizer step, over all GPUs.")
    micro_batch: AutoCount = Field(default="auto", description="Maximum items per micro-batch on a GPU. auto: by cost.")
    batching: Literal["concatenated", "padded"] = Field(
        default="concatenated",
        description="How to combine items into a batch: concatenate them, or pad them to the largest.",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="fp32", description="Precision of training. auto: the planner may choose half precision."
    )
    checkpointing: AutoFlag = Field(
        default="auto",
        description="Recompute repeated blocks in the backward pass (activation checkpointing). auto: if needed.",
    )
    offload: AutoFlag = Field(default="auto", description="Keep activations in host memory. auto: if needed.")
    sharding: AutoFlag = Field(
        default="auto", description="Shard parameters and optimizer state over the GPUs (FSDP2)."
    )
    optimizer: Literal["adamw", "adam", "sgd"] = Field(default="adamw", description="Optimizer.")
    way: Literal["auto", "foreach", "fused", "loop"] = Field(
        default="auto", description="Implementation of the optimizer. auto: foreach on GPUs, else loop."
    )
    learning_rate: float = Field(default=1e-4, gt=0, description="Learning rate.")
    weight_decay: float = Field(default=0.01, ge=0, description="Weight decay.")
    clip: float | None = Field(default=1.0, gt=0, description="Maximum norm of all gradients (clipping). null: none.")
    ema: float | None = Field(
        default=None, gt=0, lt=1, description="Decay of the moving average of weights. null: none."
    )
    frozen: tuple[Name, ...] = Field(default=(), description="Freeze parameters with these name prefixes.")
    schedule: ScheduleSection = ScheduleSection()
    compile: bool = Field(default=False, description="Use torch.compile.")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = Field(
        default="default", description="`torch.compile` mode."
    )
    allocator: Literal["auto", "default", "expandable"] = Field(
        default="auto", description="How torch's allocator reserves GPU memory."
    )
    oversize: Literal["error", "crop", "skip"] = Field(
        default="error", description="Items that no plan can hold. error: submit nothing."
    )
    epochs: int = Field(default=10, ge=1, description="Total number of epochs.")
    curriculum: tuple[CurriculumSection, ...] = Field(
        default=(), description="Phases that come first, with smaller items or other options."
    )
    validation: ValidationSection = ValidationSection()
    checkpoints: CheckpointsSection = CheckpointsSection()
    nan: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="If a loss or gradient is not finite: stop, skip the step, or roll back to a checkpoint.",
    )
    too_large: Literal["cpu", "skip", "error"] = Field(
        default="cpu",
        description="If an item alone runs out of GPU memory: run it on the CPU, skip it, or stop with an error.",
    )
    hang: Duration = Field(default=1800, description="Treat a process as hung after this long without progress.")
    slots: int = Field(default=4, ge=2, description="Number of batches that the loader keeps in memory.")
    threads: int = Field(default=2, ge=1, description="Number of threads (or processes) that read batches.")
    readers: Literal["auto", "threads", "processes"] = Field(
        default="auto",
        description="Read and collate with threads or processes. auto: threads, then processes if they fall behind.",
    )
    pin: AutoFlag = Field(default="auto", description="Pin the memory of batches. auto: for GPUs.")
    empty_cache_every: int | None = Field(
        default=None, ge=1, description="Empty the allocator's cache after this many micro-batches. null: never."
    )
    memory_fraction: float | None = Field(
        default=None, gt=0, le=1, description="Share of GPU memory to use. null: all."
    )
    collect_every: int | None = Field(
        default=None, ge=1, description="Collect Python garbage only after this many steps. null: Python decides."
    )
    synchronise: bool = Field(default=False, description="Wait for the GPU after each micro-batch, for measurements.")
    log_every: int = Field(default=10, ge=1, description="Steps between logged metrics.")
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        default=(), description="Trackers that also receive the metrics. Without a login, type `wandb sync` later."
    )
    evaluate: EvaluateSection = EvaluateSection()
    predict: PredictSection = PredictSection()
    sweep: SweepSection = SweepSection()

    @property
    def stages(self) -> dict[str, CurriculumSection]:
        """The stages of the curriculum by their names, but for the last, which has all items."""
        return {f"stage {number}": stage for number, stage in enumerate(self.curriculum, 1)}

    def conflicts(self) -> Iterator[Conflict]:
        if self.micro_batch != "auto" and self.micro_batch > self.effective_batch:
            batch = self.effective_batch
            problem = (
                f"{self.micro_batch} exceeds effective_batch ({batch}): lower micro_batch or raise effective_batch"
            )
            yield "micro_batch", problem
        if self.task is not None and self.command is not None:
            yield "command", "cannot be combined with train.task: keep one of the two"
        if self.curriculum and sum(stage.epochs for stage in self.curriculum) >= self.epochs:
            yield "curriculum", f"uses all {self.epochs} epochs (train.epochs): leave some for all items, or use []"
