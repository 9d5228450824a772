"""The rows of an item table, shared among the tasks of an array that apply a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]


@dataclass(frozen=True)
class RowShare:
    """The rows of one task among several that apply a model side by side."""

    first: int
    stop: int
    task: int
    tasks: int
    run: str  # notes of earlier runs do not count

    def of(self, rows_N: Integers) -> Integers:
        """Return those of some rows that are this task's."""
        return rows_N[(rows_N >= self.first) & (rows_N < self.stop)]


def cut_rows(done_N: Integers, rows: int, step: int, tasks: int) -> list[tuple[int, int]]:
    """Return ranges of rows with about as much left to do in each; `step` rows of an item stay together."""
    is_left = np.ones(rows, bool)
    is_left[done_N] = False
    left_I = np.add.reduceat(is_left.astype(np.int64), np.arange(0, rows, step))  # of each item
    tasks = max(1, min(tasks, int((left_I > 0).sum())))
    ends = np.searchsorted(np.cumsum(left_I), np.arange(1, tasks) * left_I.sum() / tasks) + 1
    edges = np.unique([0, *(ends * step).tolist(), rows])
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
