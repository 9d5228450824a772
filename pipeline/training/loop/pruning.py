"""Median stopping: a training of a sweep ends early where it is worse than the median of the others at the same epoch.

The rule sees validated figures by epoch alone. What it decides is a file in the model's folder, so it holds through any
death, and a plain training of the same model, which does not ask, goes on from there.
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

FEWEST = 3  # others that a median is of


def falls_behind(
    own: Mapping[int, float], others: Sequence[Mapping[int, float]], *, grace: int, lower: bool
) -> float | None:
    """Return the median of the others' best figures up to the newest epoch where that of `own` is worse; else None.

    Figures are by epoch, counted from 1. Others count that were validated at that very epoch; nobody is judged within
    the first `grace` epochs, nor by fewer than three others. What is not finite is the worst there is.
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
    """Return the best figure up to an epoch."""
    worst = math.inf if lower else -math.inf
    known = [figure if math.isfinite(figure) else worst for at, figure in figures.items() if at <= epoch]
    return min(known) if lower else max(known)


def figures_by_epoch(folder: ModelFolder, monitor: str) -> dict[int, float]:
    """Return the figures of a training's validations by their epochs; what was not finite is NaN."""
    figures = {}
    for epoch in read_epochs(folder.path):
        if monitor in epoch.validation:
            value = epoch.validation[monitor]
            figures[epoch.epoch] = math.nan if value is None else value
    return figures


@dataclass(frozen=True)
class Pruned:
    """Where and why a training was ended by its sweep."""

    epoch: int  # the last that it was trained
    why: str

    @classmethod
    def read(cls, folder: ModelFolder, epochs: int) -> Pruned | None:
        """Return what was decided; None where nothing was, or the training has gone on beyond it since."""
        data = read_json(folder.pruned)
        if not isinstance(data, dict) or not isinstance(data.get("epoch"), int) or data["epoch"] < epochs:
            return None
        return cls(data["epoch"], str(data.get("why", "")))


@dataclass(frozen=True)
class MedianStop:
    """The rule for one training, among the others of its sweep."""

    folder: ModelFolder
    others: Sequence[ModelFolder]
    monitor: str
    lower: bool
    grace: int

    def stands(self, epochs: int) -> bool:
        """Tell whether a training that has come so far was ended before."""
        return Pruned.read(self.folder, epochs) is not None

    def decide(self) -> str:
        """Return why the training ends after its newest epoch, and write that down; empty where it goes on."""
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
