"""How long steps take, by a formula: work over rates, plus what starting each kernel costs.

It tells plans apart; a probe on the card says how long a step really takes.

Shapes: M micro-batches, S sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.memory.footprint import Category

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pipeline.memory.footprint import Choice, Micro, Standing
    from pipeline.memory.request import Cards, Micros

    Floats = NDArray[np.float64]

EFFICIENCY = 0.4  # of the best rate: what well-tuned training reaches (40-60% MFU: PaLM, arXiv:2204.02311, table 3)
BANDWIDTH = 0.7  # of the memory's
LAUNCH_S = 7e-6  # between two kernels of eager torch
_TOUCHED = 2  # times an allocated byte is moved at least: written and read
_UPDATE_TOUCHED = 7  # of an optimizer with two moments: reads four tensors, writes three
_REDUCED = 2.0  # times the gradients pass the wire in an all-reduce
_GATHERED = 3.0  # times the parameters pass it for a micro-batch: gathered twice, gradients scattered once


@dataclass(frozen=True, slots=True)
class Pace:
    """Where the time of a micro-batch goes."""

    compute_s: float
    memory_s: float
    launch_s: float
    transfer_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Return all of it; nothing is taken to overlap."""
        return self.compute_s + self.memory_s + self.launch_s + self.transfer_s

    def times(self, count: float) -> Pace:
        """Return the time of so many."""
        parts = (self.compute_s, self.memory_s, self.launch_s, self.transfer_s)
        return Pace(*(count * part for part in parts))


def pace_of(micro: Micro, standing: Standing, choice: Choice, cards: Cards) -> Pace:
    """Return the time of a micro-batch on the slowest of the cards."""
    moved = micro.moved_bytes or _TOUCHED * float(np.maximum(micro.again.bytes_E, 0).sum())
    transfer = 2 * micro.host_bytes / cards.slowest("link_bytes_per_s") + transfer_again_s(standing, choice, cards)
    return Pace(
        micro.flops / (cards.flops_per_s(choice.precision) * EFFICIENCY),
        moved / (cards.slowest("bytes_per_s") * BANDWIDTH),
        micro.kernels * LAUNCH_S,
        transfer,
    )


def transfer_again_s(standing: Standing, choice: Choice, cards: Cards) -> float:
    """Return what one more micro-batch costs in transfers, whatever is in it: a spread model is gathered for each."""
    if choice.shards == 1:
        return 0.0
    whole = choice.shards * sum(part.bytes for part in standing.parts if part.category is Category.PARAMETERS)
    return _GATHERED * whole / cards.slowest("peer_bytes_per_s")


def update_s(standing: Standing, choice: Choice, cards: Cards, ranks: int) -> float:
    """Return the time of a step beside its micro-batches: the optimizer, and adding up the ranks' gradients."""
    trained = 4.0 * standing.trained
    update = _UPDATE_TOUCHED * trained / choice.shards / (cards.slowest("bytes_per_s") * BANDWIDTH)
    reduce = _REDUCED * trained / cards.slowest("peer_bytes_per_s") if ranks > choice.shards else 0.0
    return update + reduce


def epoch_s(micros: Micros, time_M: Floats, step_s: float) -> tuple[float, float]:
    """Return the mean time of a step and that of an epoch: in each step all wait for the slowest rank."""
    steps, step_M = np.unique(micros.step_M, return_inverse=True)
    ranks = int(micros.rank_M.max(initial=0)) + 1
    busy = np.bincount(step_M.ravel() * ranks + micros.rank_M, time_M, len(steps) * ranks).reshape(-1, ranks)
    total = float(busy.max(axis=1).sum()) + step_s * len(steps)
    return total / len(steps), total / micros.epochs
