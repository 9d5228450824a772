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
    """Epochs that are trained on some of the items alone, by their sizes, or with other options of the task."""

    epochs: int = Field(ge=1, description="How many epochs; the rest, with all items, comes after the last stage.")
    largest: dict[Name, int] = Field(default={}, description="Sizes of the items that take part, at most, by name.")
    smallest: dict[Name, int] = Field(default={}, description="Sizes of the items that take part, at least, by name.")
    options: dict[Name, Option] = Field(
        default={}, description="Of the task, in place of train.options: what it computes, not its model or sizes."
    )

    def conflicts(self) -> Iterator[Conflict]:
        if not (self.largest or self.smallest or self.options):
            yield "epochs", "says nothing that differs: add largest, smallest or options"

    @model_serializer(mode="wrap")
    def _only_what_is_said(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in plain(self).items() if value}


class ScheduleSection(Section):
    """How the learning rate changes, by optimizer steps."""

    kind: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="constant; or falling to `least` of it over all epochs, linear or cosine."
    )
    warmup: int = Field(default=0, ge=0, description="Steps over which the rate grows from 0.")
    least: float = Field(default=0.0, ge=0, le=1, description="Share of the learning rate at the end.")


class ValidationSection(Section):
    """How a model is looked at while it is trained."""

    split: Name | None = Field(default="val", description="Which split; null, or one that has no items: none.")
    every: Interval = Field(
        default=1, description="How often: epochs such as 2, a part of one such as 0.25, or '500 steps'."
    )
    limit: ItemLimit = Field(
        default=None, description="Items at most, always the same: a number, a part such as 0.25, or null for all."
    )
    monitor: Name = Field(default="loss", description="The figure by which checkpoints are the best: loss or a metric.")
    better: Literal["auto", "lower", "higher"] = Field(
        default="auto", description="Which values are better; auto: lower for loss, higher for metrics."
    )
    patience: int | None = Field(
        default=None, ge=1, description="End after so many validations without a better one; null: never."
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
    """When training is saved, and what is kept."""

    every: int | None = Field(default=None, ge=1, description="Steps between checkpoints; null: by time alone.")
    minutes: float = Field(default=10, gt=0, description="Minutes between checkpoints at most; one ends every epoch.")
    last: int = Field(default=2, ge=2, description="How many of the newest are kept; a damaged one is skipped.")
    best: int = Field(default=1, ge=0, description="How many of the best are kept.")
    asynchronous: AutoFlag = Field(
        default="auto", description="Whether training goes on while a copy is written; auto: where memory allows."
    )


CHECKPOINT = "best or last of what is trained here; or a model's name or folder, or a checkpoint: nothing is trained."


class EvaluateSection(Section):
    """Which model is looked at, and on what."""

    split: Name | None = Field(default="test", description="Which split; null: every item.")
    checkpoint: Name = Field(default="best", description=CHECKPOINT)
    options: dict[Name, Option] = Field(
        default={}, description="Options of the task where it is evaluated, over train.options; the model is the same."
    )


class PredictSection(Section):
    """Which model predicts, and where the predictions go."""

    split: Name | None = Field(default=None, description="Which split; null: every item.")
    checkpoint: Name = Field(default="best", description=CHECKPOINT)
    folder: Path = Field(default=Path("predictions"), description="Folder of predictions, a folder for each set.")
    for_training: bool = Field(
        default=False,
        description="Whether they are what is trained on: a model of another task makes them first, into the folder.",
    )
    parquet: bool = Field(default=False, description="Whether predictions.parquet is written beside the CSV.")
    options: dict[Name, Option] = Field(
        default={}, description="Options of the task where it predicts, over train.options; the model is the same."
    )


class SweepSection(Section):
    """Many trainings in one run: each point of settings is a model of its own."""

    points: tuple[dict[Name, Option], ...] = Field(
        default=(), description="Settings over the others, a training each; pipeline submit --sweep writes them."
    )
    prune: Literal["none", "median"] = Field(
        default="none", description="End points that are worse than the median of the others at the same epoch."
    )
    grace: int = Field(default=3, ge=1, description="Epochs that every point is trained before it may be pruned.")
    parallel: int = Field(default=16, ge=1, description="Points that are trained at once on a cluster, at most.")


class TrainSection(Section):
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
    pretrained_as: Name | None = Field(
        default=None, description="The published form of those weights, such as dreams; null: told by their names."
    )
    pretrained_map: dict[Name, Name] = Field(
        default={}, description="Names in the file: names in the model; of tensors or modules, * for a layer's number."
    )
    pretrained_entry: Name | None = Field(
        default=None, description="Which entry of a checkpoint is read, such as ema_state_dict; null: the usual one."
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=10**18,  # torch takes 64 bits
        description="Of fresh parameters, the order of items, and all random numbers.",
    )
    split: Name | None = Field(default="train", description="Which split is trained on; null: every item.")
    embeddings: AutoNames = Field(
        default="auto",
        description="Whose embeddings items carry, side by side: main, or a name in embed.also; auto: main's alone.",
    )
    effective_batch: int = Field(
        default=8, ge=1, le=9_999_999, description="Items in an optimizer step, over all GPUs."
    )
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
    schedule: ScheduleSection = ScheduleSection()
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
    curriculum: tuple[CurriculumSection, ...] = Field(
        default=(), description="Epochs with the smaller items, or other options, first."
    )
    validation: ValidationSection = ValidationSection()
    checkpoints: CheckpointsSection = CheckpointsSection()
    nan: Literal["stop", "skip", "rollback"] = Field(
        default="stop", description="A loss or a gradient that is not finite: end, leave the step out, or go back."
    )
    too_large: Literal["cpu", "skip", "error"] = Field(
        default="cpu", description="An item that ends a GPU's memory even alone, with every remedy: where it goes."
    )
    hang: Duration = Field(default=1800, description="Without progress for so long, a process counts as hung.")
    slots: int = Field(default=4, ge=2, description="Batches that the loader holds in memory.")
    threads: int = Field(default=2, ge=1, description="Threads that read batches, or as many processes.")
    readers: Literal["auto", "threads", "processes"] = Field(
        default="auto",
        description="Who reads and collates; auto: threads, and once they have fallen behind in an epoch, processes.",
    )
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
            problem = f"{self.micro_batch} is more than effective_batch, {batch}: lower it, or raise that"
            yield "micro_batch", problem
        if self.task is not None and self.command is not None:
            yield "command", "is a script in place of a task: keep one of the two"
        if self.curriculum and sum(stage.epochs for stage in self.curriculum) >= self.epochs:
            yield "curriculum", f"leaves none of the {self.epochs} epochs (train.epochs) for all items"
