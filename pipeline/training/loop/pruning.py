"""Median stopping: a training of a sweep ends early if it is worse than the median of the others at the same epoch.

The rule uses only validated metrics by epoch. Its decision is a file in the model's folder, so it survives any restart.
A plain training of the same model ignores it and continues from there.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from pipeline.files import read_json, write_whole
from pipeline.training.loop.metrics_log import read_epochs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.training.prepared import ModelFolder

FEWEST = 3  # others, for a median


def falls_behind(
    own: Mapping[int, float], others: Sequence[Mapping[int, float]], *, grace: int, lower: bool
) -> float | None:
    """Return the median of the others' best values up to the newest epoch if the best of `own` is worse; else None.

    Values are by epoch, counted from 1. Only others that were validated at that very epoch count. The rule does not
    apply within the first `grace` epochs, nor with fewer than three others. A value that is not finite is the worst.
    """
    epoch = max(own, default=0)
    if epoch < grace:
        return None
    reached = [_best(figures, epoch, lower=lower) for figures in others if epoch in figures]
    if len(reached) < FEWEST:
        return None
    middle, mine = median(reached), _best(own, epoch, lower=lower)
    return middle if (mine > middle if lower else mine < middle) else None


def _best(figures: Mapping[int, float], epoch: int, *, lower: bool) -> float:
    worst = math.inf if lower else -math.inf
    known = [figure if math.isfinite(figure) else worst for at, figure in figures.items() if at <= epoch]
    return min(known) if lower else max(known)


def figures_by_epoch(folder: ModelFolder, monitor: str) -> dict[int, float]:
    """Return the values of a metric by epoch; NaN for those that were not finite."""
    epochs = [epoch for epoch in read_epochs(folder.path) if monitor in epoch.validation]
    values = {epoch.epoch: epoch.validation[monitor] for epoch in epochs}
    return {epoch: math.nan if value is None else value for epoch, value in values.items()}


@dataclass(frozen=True)
class Pruned:
    """Where and why a sweep ended a training."""

    epoch: int  # the last one
    why: str

    @classmethod
    def read(cls, folder: ModelFolder, epochs: int) -> Pruned | None:
        """Return the decision; None if there is none, or the training has continued beyond it."""
        data = read_json(folder.pruned)
        if not isinstance(data, dict) or not isinstance(data.get("epoch"), int) or data["epoch"] < epochs:
            return None
        return cls(data["epoch"], str(data.get("why", "")))


@dataclass(frozen=True)
class MedianStop:
    """The rule for one training among the others of its sweep."""

    folder: ModelFolder
    others: Sequence[ModelFolder]
    monitor: str
    lower: bool
    grace: int

    def decide(self, epochs: int) -> str:
        """Return why the training ends after so many epochs, and record it; empty if it continues."""
        if (pruned := Pruned.read(self.folder, epochs)) is not None:
            return pruned.why
        own = figures_by_epoch(self.folder, self.monitor)
        others = [figures_by_epoch(other, self.monitor) for other in self.others]
        middle = falls_behind(own, others, grace=self.grace, lower=self.lower)
        if middle is None:
            return ""
        epoch = max(own)
        best = _best(own, epoch, lower=self.lower)
        why = f"{self.monitor} {best:.4g} is worse than the median of the others at epoch {epoch}, {middle:.4g}"
        write_whole(self.folder.pruned, json.dumps({"epoch": epoch, "why": why}))
        return why
