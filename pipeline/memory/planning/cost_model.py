"""Cost models fitted to answers about micro-batches, and micro-batches in few groups.

A group is bounded by its corner, the largest value of each size in it. Memory never falls when a size grows: if the
corner fits, so does every micro-batch of the group.

Shapes: N items, M micro-batches, S sizes (the number of items first), P points that were asked about, U distinct rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations_with_replacement
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from scipy.optimize import nnls

from pipeline.memory.planning.memory_plan import ITEM, CostModel, product_of
from pipeline.protocol import ITEMS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pipeline.memory.footprint import Floats, Integers

Predict: TypeAlias = Callable[["Integers"], "Floats"]

_DIGITS = 7  # of a size, in binary, are kept: it is at most 1/64 larger
MOST_GROUPS = 16
NEAR = 0.10  # of the limit: a corner so near its group is not worth another question


@dataclass(frozen=True)
class Terms:
    """The terms of a model: an item, each size, and products of two sizes where items are padded."""

    names: tuple[str, ...]  # of the sizes of a micro-batch, `items` first
    padded: bool

    @property
    def texts(self) -> tuple[str, ...]:
        pairs = combinations_with_replacement(self.names[1:], 2) if self.padded else ()
        return (ITEM, *self.names[1:], *map("*".join, pairs))

    def of(self, rows_MS: Integers) -> Floats:
        """Return the terms of micro-batches: of padded ones, the items times those of the largest item."""
        columns = dict(zip(self.names, rows_MS.T, strict=True))
        if self.padded:
            return np.stack([columns[ITEMS] * product_of(term, columns) for term in self.texts], axis=1)
        return rows_MS.astype(np.float64)

    def fit(self, rows_PS: Sequence[Sequence[int]], values: Sequence[float]) -> CostModel:
        """Fit non-negative weights by least squares of relative errors, so that small points count as much as large."""
        target_P = np.array(values, np.float64)
        unit = max(float(target_P.max(initial=0.0)), 1e-30)
        target_P = target_P / unit
        matrix_PT = np.column_stack((np.ones(len(target_P)), self.of(np.array(rows_PS, np.int64))))
        scale_T = np.maximum(matrix_PT.max(axis=0), 1.0)
        row_P = 1.0 / np.maximum(target_P, 0.01)  # values near 0 must not dominate
        weights_T, _ = nnls(matrix_PT / scale_T * row_P[:, None], target_P * row_P)
        base, *weights = (weights_T / scale_T * unit).tolist()
        return CostModel({text: weight for text, weight in zip(self.texts, weights, strict=True) if weight > 0}, base)

    def predict(self, model: CostModel, rows_MS: Integers) -> Floats:
        """Return the bytes of micro-batches."""
        weights_T = np.array([model.weights.get(text, 0.0) for text in self.texts])
        return np.asarray(model.base + self.of(rows_MS) @ weights_T)


def rounded_up(rows_MS: Integers, most_S: Integers) -> Integers:
    """Round sizes up to few leading binary digits, but not beyond the largest possible ones.

    An answer holds for all sizes below it; impossible sizes are never asked about, because a model may refuse them.
    """
    bits = np.floor(np.log2(np.maximum(rows_MS, 1))).astype(np.int64) + 1
    step = np.left_shift(1, np.maximum(bits - _DIGITS, 0))
    up = -(-rows_MS // step) * step
    return np.asarray(np.maximum(np.minimum(up, most_S), rows_MS))


@dataclass(frozen=True, eq=False)
class SizeGroup:
    """Micro-batches (by their rows in a table) and the corner that bounds their sizes."""

    corner: tuple[int, ...]
    places: Integers


def grouped(
    rows_MS: Integers, predict: Predict, most_S: Integers, limit: float, most: int = MOST_GROUPS
) -> list[SizeGroup]:
    """Return at most so many groups, that of the costliest corner first.

    The group whose corner is predicted furthest above the limit is split again and again, because only corners are
    asked about; where all are below, the one whose corner is furthest above its members.
    """
    distinct_US, which_M = np.unique(rows_MS, axis=0, return_inverse=True)

    def corner(group: Integers) -> Integers:
        return rounded_up(distinct_US[group].max(axis=0), most_S)

    def gap(group: Integers) -> tuple[float, float]:
        """Return how far a group's corner is above the limit, and above its cheapest member."""
        if len(group) < 2:
            return 0.0, 0.0
        at_corner = float(predict(corner(group)[None])[0])
        return max(at_corner - limit, 0.0), max(at_corner - float(predict(distinct_US[group]).min()), 0.0)

    groups = [np.arange(len(distinct_US))]
    gaps = [gap(groups[0])]
    while len(groups) < most and max(gaps) > (0.0, NEAR * limit):
        worst = gaps.index(max(gaps))
        gaps.pop(worst)
        halves = _halves(distinct_US, groups.pop(worst), predict)
        groups += halves
        gaps += map(gap, halves)
    of_U = np.zeros(len(distinct_US), np.int64)
    for number, group in enumerate(groups):
        of_U[group] = number
    of_M = of_U[which_M.ravel()]
    corners = np.array([corner(group) for group in groups])
    order = np.argsort(-predict(corners), kind="stable").tolist()
    return [SizeGroup(tuple(corners[number].tolist()), np.flatnonzero(of_M == number)) for number in order]


def _halves(rows_US: Integers, group: Integers, predict: Predict) -> tuple[Integers, Integers]:
    """Split a group where the costlier of both corners is the least."""
    rows = rows_US[group]
    best: tuple[float, NDArray[np.bool_]] | None = None
    for values in rows.T:
        low, high = max(int(values.min()), 1), int(values.max())
        for threshold in {int(np.sqrt(low * high)), int(np.median(values)), int((low + high) / 2)}:
            upper = values > threshold
            if not upper.any() or upper.all():
                continue
            costs = predict(np.stack((rows[upper].max(axis=0), rows[~upper].max(axis=0))))
            score = float(costs.max() + 1e-3 * costs.min())
            if best is None or score < best[0]:
                best = (score, upper)
    assert best is not None, "distinct rows differ in some size"
    return group[best[1]], group[~best[1]]


def extremes(sizes_NS: Integers, cost_N: Integers, budget: int, share: int, *, padded: bool) -> Integers:
    """Return the most extreme micro-batches that a budget allows in any order of an epoch.

    Memory is a maximum of sums of products of sizes: where it grows at least as fast as they do, the worst mixture of
    items is an unmixed one.
    """
    if padded:
        return _padded_extremes(sizes_NS, cost_N, budget, share)
    keys = chain(sizes_NS.T, (size_N / cost_N for size_N in sizes_NS.T), (1.0 / cost_N, cost_N))
    orders = (np.argsort(-key_N, kind="stable") for key_N in keys)  # one at a time: each is as long as the data set
    rows = [_filled(sizes_NS, cost_N, order_N, budget, share) for order_N in orders]
    return np.unique(np.array([row for row in rows if row[0] > 0], np.int64).reshape(-1, 1 + sizes_NS.shape[1]), axis=0)


def _filled(sizes_NS: Integers, cost_N: Integers, order_N: Integers, budget: int, share: int) -> list[int]:
    """Return the sizes of the first items that fit together, and of the part of the next one that fills the budget.

    With a part of an item no mixture of whole ones can have more of what the items are ordered by.
    """
    sums = np.cumsum(cost_N[order_N[:share]])
    taken = int(np.searchsorted(sums, budget, side="right"))
    row = sizes_NS[order_N[:taken]].sum(axis=0)
    if taken == len(sums):
        return [taken, *row.tolist()]
    budget_left = budget - (int(sums[taken - 1]) if taken else 0)
    part = np.ceil(sizes_NS[order_N[taken]] * (budget_left / int(cost_N[order_N[taken]]))).astype(np.int64)
    return [taken + (budget_left > 0), *(row + part).tolist()]


def _padded_extremes(sizes_NS: Integers, cost_N: Integers, budget: int, share: int) -> Integers:
    """Return, for each possible cost of the largest item, the most items that fit, each with the largest such sizes."""
    order_N = np.argsort(cost_N, kind="stable")
    sorted_N = cost_N[order_N]
    largest_NS = np.maximum.accumulate(sizes_NS[order_N], axis=0)
    last_T = np.flatnonzero(np.append(sorted_N[1:] != sorted_N[:-1], [True]))
    last_T = last_T[sorted_N[last_T] <= budget]
    items_T = np.minimum(np.minimum(budget // sorted_N[last_T], share), last_T + 1)
    return np.unique(np.concatenate((items_T[:, None], largest_NS[last_T]), axis=1), axis=0)
