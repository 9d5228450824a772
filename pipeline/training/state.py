"""The state of a training between two steps: the data of its checkpoints, besides tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.codec import plain
from pipeline.errors import DataError
from pipeline.training.loss_terms import added, sums_by_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.config.schema_train import ValidationSection
    from pipeline.training.step.exact_step import StepReport


TRAINING = "training"  # key of a state in the data of a checkpoint


@dataclass(slots=True, kw_only=True)
class EpochCounts:
    """The counts of an epoch over all ranks, for its state and for the log of metrics."""

    epoch: int = 0
    steps: int = 0
    items: int = 0
    micro_batches: int = 0
    ooms: int = 0
    rejected: int = 0
    cropped: int = 0
    skipped_items: int = 0  # that did not fit, even with all remedies
    left_out_steps: int = 0  # that were not finite
    remedied: dict[str, int] = field(default_factory=dict)  # items by the memory remedy that they needed
    wall_s: float = 0.0  # of its steps
    seconds: dict[str, float] = field(default_factory=dict)  # of the first rank, by activity, also between steps


@dataclass(slots=True, kw_only=True)
class EpochTotals(EpochCounts):
    """The totals of an epoch so far."""

    fewest: int = 0  # items of a step
    most: int = 0
    terms: dict[str, tuple[float, float]] = field(default_factory=dict)  # sums and weights

    def add(self, report: StepReport, took_s: float) -> None:
        items = report.of_all(sum, "items")
        self.fewest = min(self.fewest, items) if self.steps else items
        self.most = max(self.most, items)
        self.steps += 1
        self.items += items
        for name in ("micro_batches", "ooms", "rejected", "cropped", "skipped_items"):
            setattr(self, name, getattr(self, name) + report.of_all(sum, name))
        self.remedied = sums_by_name([self.remedied, *(rank.remedied for rank in report.ranks)])
        self.wall_s += took_s
        self.terms = added(self.terms, report.totals)


@dataclass(slots=True)
class TrainingState:
    """The progress of a training, and what it must remember over a restart."""

    epoch: int = 0
    done: int = 0  # steps since the training began
    next: int = 0  # step of the epoch
    order: Mapping[str, Any] = field(default_factory=dict)  # of items, as the sampler describes it
    monitor: str = "loss"
    best: float | None = None  # value of that metric
    stale: int = 0  # validations without a better one
    validated: int = 0  # the step after which the model was last validated
    totals: EpochTotals = field(default_factory=EpochTotals)
    poisoned: set[int] = field(default_factory=set)  # steps that a rollback leaves out
    damaged: set[str] = field(default_factory=set)  # items left out since their records were damaged
    killed: set[str] = field(default_factory=set)  # items left out since the process died on them

    def to_json(self) -> dict[str, Any]:
        return {**plain(self), **{name: sorted(getattr(self, name)) for name in ("poisoned", "damaged", "killed")}}

    def follow(self, monitor: str) -> None:
        """Watch a metric; values of another one are forgotten."""
        if monitor != self.monitor:
            self.monitor, self.best, self.stale = monitor, None, 0

    def is_over(self, epochs: int, validation: ValidationSection) -> bool:
        """Tell whether the training is complete: by its epochs, or because it stopped improving."""
        return self.epoch >= epochs or self.is_stale(validation)

    def is_stale(self, validation: ValidationSection) -> bool:
        """Tell whether validations have stopped improving for as long as the settings allow."""
        is_same = self.monitor == validation.monitor
        return validation.patience is not None and is_same and self.stale >= validation.patience

    def count(self, report: StepReport, took_s: float) -> None:
        self.done += 1
        self.next += 1
        self.totals.add(report, took_s)

    def leave_out_step(self) -> None:
        """Count a step that changed nothing."""
        self.done += 1
        self.next += 1
        self.totals.left_out_steps += 1

    def end_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self.epoch += 1
        self.next = 0
        self.totals = EpochTotals(epoch=self.epoch)

    def judge(self, metrics: Mapping[str, float], validation: ValidationSection) -> float | None:
        """Return the monitored metric of a validation; count validations since the best one."""
        if not metrics:
            return None
        value = metrics.get(validation.monitor)
        if value is None:
            problem = f"the validation has no metric {validation.monitor!r}; available: {', '.join(metrics)}"
            remedy = "set train.validation.monitor to one of these"
            raise DataError(problem, where="train.validation.monitor", remedy=remedy)
        self.stale += 1
        if not math.isfinite(value):
            return None
        if self.best is None or (value < self.best if validation.lower_is_better else value > self.best):
            self.best, self.stale = value, 0
        return value

    def refuse_nothing_learned(self) -> None:
        """Raise after an epoch in which every loss had weight 0: only the weight decay moved the model."""
        weights = [weight for _, weight in self.totals.terms.values()]
        if weights and not any(weights):
            problem = f"nothing was learned in an epoch of {self.totals.items:,} items: every loss term has weight 0"
            remedy = "check that the items have labels, targets or peptides"
            raise DataError(problem, where="train.task", remedy=remedy)
