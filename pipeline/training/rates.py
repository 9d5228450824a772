"""How the learning rate changes: a function of the step, so that a training that is taken up needs no memory of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from pipeline.config.schema_train import Schedule


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """Return the share of the learning rate at a step, counted from 0, of so many in all."""
    if step < schedule.warmup:
        return (step + 1) / (schedule.warmup + 1)
    if schedule.kind == "constant":
        return 1.0
    done = min(1.0, (step - schedule.warmup) / max(1, steps - 1 - schedule.warmup))
    falling = 1 - done if schedule.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
    return schedule.least + (1 - schedule.least) * falling


def set_rate(optimizer: Optimizer, share: float) -> float:
    """Give every group its share of the rate that it began with; return that of the first."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = group["initial_lr"] * share
    return float(optimizer.param_groups[0]["lr"])
