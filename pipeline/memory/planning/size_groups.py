"""Micro-batches in few groups, each bounded by its corner: the largest value of every size in it.

Memory never falls when a size grows: if the corner fits, so does every micro-batch of the group.

Shapes: M micro-batches, S sizes, U distinct ones, T thresholds, N items.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, combinations_with_replacement
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import nnls

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from pipeline.memory.footprint import Floats, Integers

    Predict = Callable[[Integers], Floats]
    from collections.abc import Sequence

MOST_BUCKETS = 16
NEAR = 0.10  # of the limit: a corner so near its group is no reason for one more question


@dataclass(frozen=True, eq=False)
class SizeGroup:
    """Micro-batches (by their rows in a table) and the corner that bounds their sizes."""

    corner: tuple[int, ...]
    places: Integers


def grouped(
    rows_MS: Integers, predict: Predict, most_S: Integers, limit: float, most: int = MOST_BUCKETS
) -> list[SizeGroup]:
    """Return at most so many groups, that of the costliest corner first.

    The group whose corner is predicted furthest above the limit is split again and again, because only corners are
    asked about; where all are below, the one whose corner is furthest above its members.
    """
    distinct_US, which_M = np.unique(rows_MS, axis=0, return_inverse=True)
    groups = [np.arange(len(distinct_US))]
    gaps = [_gap(distinct_US, predict, most_S, limit)]
    while len(groups) < most and max(gaps) > (0.0, NEAR * limit):
        worst = max(range(len(gaps)), key=gaps.__getitem__)
        gaps.pop(worst)
        for half in _halves(distinct_US, groups.pop(worst), predict):
            groups.append(half)
            gaps.append(_gap(distinct_US[half], predict, most_S, limit))
    of_U = np.zeros(len(distinct_US), np.int64)
    for number, group in enumerate(groups):
        of_U[group] = number
    of_M = of_U[which_M.ravel()]
    corners = np.array([_corner(distinct_US[group], most_S) for group in groups])
    order = np.argsort(-predict(corners), kind="stable").tolist()
    return [SizeGroup(tuple(corners[number].tolist()), np.flatnonzero(of_M == number)) for number in order]


def _corner(rows_MS: Integers, most_S: Integers) -> Integers:
    return rounded_up(rows_MS.max(axis=0), most_S)


def _gap(rows_MS: Integers, predict: Predict, most_S: Integers, limit: float) -> tuple[float, float]:
    """Return how far a group's corner is above the limit, and above its cheapest member."""
    if len(rows_MS) < 2:
        return 0.0, 0.0
    corner = float(predict(_corner(rows_MS, most_S)[None])[0])
    return max(corner - limit, 0.0), max(corner - float(predict(rows_MS).min()), 0.0)


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
            corners = np.stack((rows[upper].max(axis=0), rows[~upper].max(axis=0)))
            costs = predict(corners)
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
    rows = [_filled(sizes_NS, cost_N, order, budget, share) for order in orders]
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


MOST_COST = 1 << 52  # costs are added in float64 by the sampler
AT_ONCE = 1 << 16  # items whose terms are in memory together: some hundred bytes each


@dataclass(frozen=True)
class Terms:
    """The terms of a cost model: the number of items, each size, and products of two sizes where items are padded."""

    names: tuple[str, ...]  # `items` first
    padded: bool

    @property
    def factors(self) -> tuple[tuple[int, ...], ...]:
        """Return the sizes in each term, as positions in `names`."""
        sizes = range(1, len(self.names))
        pairs = tuple(combinations_with_replacement(sizes, 2)) if self.padded else ()
        return ((), *((place,) for place in sizes), *pairs)

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the names of the terms for a single item, such as `nodes*edges`."""
        return tuple("*".join(self.names[place] for place in places) or "item" for places in self.factors)

    def of_micros(self, rows_MS: Integers) -> Floats:
        rows = rows_MS.astype(np.float64)
        items = rows[:, 0] if self.padded else np.ones(len(rows))
        first = rows[:, 0]
        columns = [items * rows[:, list(places)].prod(axis=1) if places else first for places in self.factors]
        return np.stack(columns, axis=1)


@dataclass(frozen=True, eq=False)
class CostModel:
    """Predicts the memory of micro-batches: `base`, and a weight for each term."""

    terms: Terms
    weights_T: Floats
    base: float

    def predict(self, rows_MS: Integers) -> Floats:
        return np.asarray(self.base + self.terms.of_micros(rows_MS) @ self.weights_T)

    def cost(self, sizes_NS: Integers) -> Integers:
        """Return each item's cost as a whole number, at least 1, without the base."""
        parts = np.split(sizes_NS, range(AT_ONCE, len(sizes_NS), AT_ONCE))
        cost_N: Integers = np.concatenate(
            [np.ceil(self.terms.of_micros(alone(part_KS)) @ self.weights_T) for part_KS in parts]
        )
        return np.clip(cost_N, 1, MOST_COST).astype(np.int64)

    def named(self) -> dict[str, float]:
        """Return the weights above 0 by the names of their terms."""
        pairs = zip(self.terms.texts, self.weights_T.tolist(), strict=True)
        return {text: weight for text, weight in pairs if weight > 0}


def alone(sizes_NS: Integers) -> Integers:
    """Return the micro-batches of one item each."""
    return np.concatenate((np.ones((len(sizes_NS), 1), np.int64), sizes_NS), axis=1)


def fit(terms: Terms, rows_PS: Sequence[Sequence[int]], values: Sequence[float]) -> CostModel:
    """Fit non-negative weights by least squares of relative errors, so that small points count as much as large."""
    target_P = np.array(values, np.float64)
    unit = max(float(target_P.max(initial=0.0)), 1e-30)
    target_P = target_P / unit
    micros_PT = terms.of_micros(np.array(rows_PS, np.int64))
    matrix_PT = np.concatenate((np.ones((len(micros_PT), 1)), micros_PT), axis=1)
    scale_T = np.maximum(matrix_PT.max(axis=0), 1.0)
    row_P = 1.0 / np.maximum(target_P, 0.01)  # nothing near 0 may rule the fit
    weights_T, _ = nnls(matrix_PT / scale_T * row_P[:, None], target_P * row_P)
    weights_T = weights_T / scale_T * unit
    return CostModel(terms, weights_T[1:], float(weights_T[0]))


_DIGITS = 7  # of a size, in binary, are kept: it is at most 1/64 larger


def rounded_up(rows_MS: Integers, most_S: Integers) -> Integers:
    """Round sizes up to few leading binary digits, but not beyond the largest possible ones.

    An answer holds for all sizes below it; impossible sizes are never asked about, because a model may refuse them.
    """
    bits = np.floor(np.log2(np.maximum(rows_MS, 1))).astype(np.int64) + 1
    step = np.left_shift(1, np.maximum(bits - _DIGITS, 0))
    up = -(-rows_MS // step) * step
    return np.asarray(np.maximum(np.minimum(up, most_S), rows_MS))
