"""The largest budget of a micro-batch under which the worst of them fit, found with few questions to the oracle.

Each round fits a cost model to all answers so far, cuts an epoch under a budget of it, and asks about the corners of
groups of micro-batches, the costliest first. What does not fit lowers the budget; what leaves room raises it. A corner
has the largest value of each size in its group: memory never falls when a size grows, so if the corner fits, all fit.

Shapes: N items, M micro-batches, S sizes (`items` first), P points that were asked about, U distinct rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations_with_replacement
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from scipy.optimize import nnls

from pipeline.memory.footprint import StepTapes, least_sure, live_peak_bytes
from pipeline.memory.planning.memory_plan import ITEM, CostModel, MicroBatchLimit, product_of
from pipeline.protocol import ITEMS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from pipeline.memory.footprint import (
        Floats,
        Integers,
        MemoryChoice,
        MicroFootprint,
        Oracle,
        Provenance,
        Sizes,
        StandingFootprint,
    )
    from pipeline.memory.planning.memory_plan import DataSizes, Micros, PlanRequest

    Row: TypeAlias = tuple[int, ...]
    Predict: TypeAlias = Callable[[Integers], Floats]

ENOUGH = 0.92  # of the limit in use: a larger budget is not tried
_ROUNDS = 8
_REFITS = 2  # after this many rounds without a fit, budgets shrink faster than the cost model learns
_CLOSE = 1.015  # budgets so near each other are the same
_FEWEST = 3  # answers, to which a cost model is fitted
_SCREENED = 5  # questions for a first model
_QUESTIONS, _LEAST_GROUPS = 24, 6  # fewer and fewer groups make the plan looser, but fast
_MOST_GROUPS = 16
_NEAR = 0.10  # of the limit: a corner this near its group needs no further split
_DIGITS = 7  # of a size, in binary, are kept: it is at most 1/64 larger


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

    def fit(self, rows: Sequence[Row], values: Sequence[float], of_nothing: float) -> CostModel:
        """Fit non-negative weights by least squares of relative errors, so that small points count as much as large.

        With few points, `of_nothing`, the value of a micro-batch without items, gives the constant part.
        """
        if len(rows) < _FEWEST:
            rows, values = [*rows, (0,) * len(self.names)], [*values, of_nothing]
        target_P = np.array(values, np.float64)
        unit = max(float(target_P.max(initial=0.0)), 1e-30)
        target_P = target_P / unit
        matrix_PT = np.column_stack((np.ones(len(target_P)), self.of(np.array(rows, np.int64))))
        scale_T = np.maximum(matrix_PT.max(axis=0), 1.0)
        row_P = 1.0 / np.maximum(target_P, 0.01)  # values near 0 must not dominate
        weights_T, _ = nnls(matrix_PT / scale_T * row_P[:, None], target_P * row_P)
        base, *weights = (weights_T / scale_T * unit).tolist()
        return CostModel({text: weight for text, weight in zip(self.texts, weights, strict=True) if weight > 0}, base)

    def predict(self, model: CostModel, rows_MS: Integers) -> Floats:
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


class SizeGroup(NamedTuple):
    """Micro-batches (by their rows in a table) and the corner that bounds their sizes."""

    corner: Row
    places: Integers


def grouped(rows_MS: Integers, predict: Predict, most_S: Integers, limit: float, most: int) -> list[SizeGroup]:
    """Return at most `most` groups, that of the costliest corner first.

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
    while len(groups) < most and max(gaps) > (0.0, _NEAR * limit):
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

    def corner_costs(upper_U: NDArray[np.bool_]) -> list[float]:
        costs = predict(np.stack((rows[upper_U].max(axis=0), rows[~upper_U].max(axis=0))))
        return sorted(costs.tolist(), reverse=True)

    low_S, high_S = rows.min(axis=0), rows.max(axis=0)
    middles = np.sqrt(np.maximum(low_S, 1) * high_S).astype(np.int64), np.median(rows, axis=0), (low_S + high_S) // 2
    splits = [rows[:, size] > middle_S[size] for middle_S in middles for size in range(rows.shape[1])]
    upper_U = min((split for split in splits if 0 < split.sum() < len(rows)), key=corner_costs)
    return group[upper_U], group[~upper_U]


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


class ChoiceMemory:
    """The memory of one choice of settings; each question is asked once."""

    def __init__(self, oracle: Oracle, choice: MemoryChoice, names: tuple[str, ...]) -> None:
        self.choice, self.names = choice, names
        self.micros: dict[Row, MicroFootprint] = {}
        self._oracle = oracle
        self._peaks: dict[tuple[Row, bool], int] = {}

    @cached_property
    def standing(self) -> StandingFootprint:
        return self._oracle.standing(self.choice)

    def micro(self, row: Row) -> MicroFootprint:
        """Return the memory of a micro-batch of exactly these sizes."""
        if row not in self.micros:
            self.micros[row] = self._oracle.micro(self.choice, self.sizes(row))
        return self.micros[row]

    def peak_bytes(self, row: Row, *, accumulate: bool = True) -> int:
        """Return the live peak of a step of one such micro-batch, or of several; a run's first step is included."""
        if (row, accumulate) not in self._peaks:
            standing, micro = self.standing, self.micro(row)
            first = StepTapes.of(standing, [micro, micro] if accumulate else [micro], first=True)
            later_bytes = live_peak_bytes(standing, micro, accumulate=accumulate)
            self._peaks[row, accumulate] = max(first.peak_bytes(standing.setup.left_bytes), later_bytes)
        return self._peaks[row, accumulate]

    def confirm(self, row: Row) -> bool:
        """Tell whether an answer was right if it was computed from others; if not, forget all of them."""
        ask = getattr(self._oracle, "confirmed", None)
        if ask is None:
            return True
        micro = ask(self.choice, self.sizes(row))
        is_right = self.micros[row].is_like(micro)
        self._peaks = {asked: peak for asked, peak in self._peaks.items() if is_right and asked[0] != row}
        self.micros = {**(self.micros if is_right else {}), row: micro}
        return is_right

    def sizes(self, row: Row) -> Sizes:
        return dict(zip(self.names, row, strict=True))

    @property
    def origin(self) -> Provenance:
        return least_sure((self.standing.origin, *(micro.origin for micro in self.micros.values())))

    @property
    def notes(self) -> tuple[str, ...]:
        notes = (note for micro in self.micros.values() for note in micro.notes)
        return tuple(dict.fromkeys((*self.standing.notes, *notes)))


class DataBounds:
    """What the sizes of a data set show before the oracle is asked."""

    def __init__(self, data: DataSizes, request: PlanRequest) -> None:
        self.data, self.request = data, request
        self.terms = Terms((ITEMS, *data.names), data.padded)
        self.sizes_NS = data.sizes_NS
        self.whole = data.cut(data, np.ones(data.items, np.int64), request.batch, request.ranks)
        self.share = int(self.whole.items_M.max(initial=1))  # items that a rank has in a step at most
        first = 1 if data.padded else self.share
        most = np.partition(self.sizes_NS, -first, axis=0)[-first:].sum(axis=0)
        self.most_S = np.concatenate(([self.share], most))  # of a micro-batch in any order of the data

    def mean(self, items: int) -> Row:
        """Return the sizes of a micro-batch of average items."""
        mean_S = np.ceil(self.sizes_NS.mean(axis=0) * (1 if self.data.padded else items)).astype(np.int64)
        return self.rounded(np.concatenate(([items], mean_S)))

    def rounded(self, row_S: Integers) -> Row:
        return tuple(rounded_up(row_S, self.most_S).tolist())

    def alone(self, item: int) -> Row:
        return (1, *self.sizes_NS[item].tolist())

    @property
    def largest(self) -> Row:
        """Return the item whose sizes, each relative to the largest of its kind, sum to the most."""
        return self.alone(int(np.argmax((self.sizes_NS / np.maximum(self.sizes_NS.max(axis=0), 1)).sum(axis=1))))

    def cut(self, model: CostModel, budget: int) -> Micros:
        return self.data.cut(self.data, model.cost(self.data.sizes, budget), budget, self.request.ranks)

    def uncut_budget(self, model: CostModel) -> int:
        """Return a budget that cuts no share of a step, but for padding."""
        cost_N = model.cost(self.data.sizes)
        if self.data.padded:
            return int(cost_N.max()) * self.share
        return int(np.partition(cost_N, -self.share)[-self.share :].sum())

    def extremes(self, model: CostModel, budget: int) -> Integers:
        cost_N = model.cost(self.data.sizes, budget)
        return extremes(self.sizes_NS, cost_N, budget, self.share, padded=self.data.padded)

    def largest_group(self, micros: Micros) -> SizeGroup:
        return SizeGroup(self.rounded(self.most_S), np.arange(len(micros.step_M)))


@dataclass(frozen=True, eq=False)
class FoundBudget:
    """A budget, the micro-batches cut under it, and the memory of the worst of them."""

    model: CostModel
    budget: int
    micros: Micros
    groups: tuple[SizeGroup, ...]  # of the micro-batches that were cut, then of the most one-sided of other orders
    live: int  # the peak of the worst corner
    worst: Row
    limit: MicroBatchLimit = MicroBatchLimit.FULL


class BudgetSearch:
    """Searches for the largest budget under one choice of settings."""

    def __init__(self, memory: ChoiceMemory, bounds: DataBounds) -> None:
        self.memory, self.bounds = memory, bounds

    def find(self, limit: int) -> FoundBudget | None:
        """Return the largest budget under which all fits below a live peak, or None."""
        if self.bounds.request.micro_batch is not None:
            return self._pinned(limit)
        if not self.fits_uncut(limit):
            return self._largest(limit)
        model = self.model()
        return self._tried(model, self.bounds.uncut_budget(model), limit, whole=True)

    def model(self) -> CostModel:
        rows = list(self.memory.micros)
        peaks = [self.memory.peak_bytes(row) for row in rows]
        return self.bounds.terms.fit(rows, peaks, self.memory.standing.bytes)

    def fits_uncut(self, limit: int) -> bool:
        """Tell whether the largest possible micro-batch fits; it is asked only if one of average items does."""
        bounds, accumulate = self.bounds, self.bounds.whole.accumulate
        rows = (bounds.mean(bounds.share), bounds.rounded(bounds.most_S))
        is_free = bounds.request.micro_batch is None
        return is_free and all(self.memory.peak_bytes(row, accumulate=accumulate) <= limit for row in rows)

    def screened_model(self, limit: int) -> CostModel:
        """Ask about a few micro-batches near the limit, each dominated by another size, and return a first model."""
        bounds, memory = self.bounds, self.memory
        if len(memory.micros) > _SCREENED or self.fits_uncut(limit):
            return self.model()
        model, base = self.model(), memory.standing.bytes
        if not bounds.data.padded:  # one answer cannot separate the sizes: each gets the same part
            average = bounds.mean(bounds.share)
            part = max(memory.peak_bytes(average) - base, 1) / len(average)
            terms = zip(bounds.terms.texts, average, strict=True)
            model = CostModel({term: part / max(size, 1) for term, size in terms}, base)
        rows_MS = bounds.extremes(model, max(int(limit - model.base), 1))
        for place in np.unique(np.linspace(0, len(rows_MS) - 1, _SCREENED).astype(np.int64)):
            memory.peak_bytes(bounds.rounded(rows_MS[place]))
        return self.model()

    def _largest(self, limit: int) -> FoundBudget | None:
        """Return the largest budget that fits, by narrowing an interval of budgets relative to the predicted one."""
        self.screened_model(limit)
        best: FoundBudget | None = None
        share, low, high = 1.0, 0.0, float("inf")
        for turn in range(_ROUNDS):
            model, asked = self.model(), len(self.memory.micros)
            base = min(model.base, 0.99 * limit)
            found = self._tried(model, max(int(share * (limit - base)), 1), limit)
            wanted = ((1 + ENOUGH) / 2 * limit - base) / max(found.live - base, 1.0)
            if found.live <= limit:
                best = found if best is None or found.live >= best.live else best
                low = max(low, share)
                if found.live >= ENOUGH * limit or found.limit is not MicroBatchLimit.FULL:
                    break
                share *= min(max(wanted, 1.0 + 0.1 * (turn + 1)), 8.0)
            elif best is not None or turn >= _REFITS or len(self.memory.micros) == asked:  # the model learns no more
                high = min(high, share)
                share *= min(max(wanted, 1 / 8), 1 / (1.0 + 0.03 * (turn + 1)))
            if low and high < float("inf"):
                share = share if low * _CLOSE < share < high / _CLOSE else float(np.sqrt(low * high))
                if high <= low * _CLOSE:
                    break
        alone = best or self._tried(CostModel({ITEM: 1.0}, self.model().base), 1, limit)
        return alone if alone.live <= limit else None

    def _pinned(self, limit: int) -> FoundBudget | None:
        """Return micro-batches of the number of items that the settings fix, if they fit."""
        bounds = self.bounds
        wanted = min(bounds.request.micro_batch or 1, bounds.share)
        self.memory.peak_bytes(bounds.mean(wanted))
        found = self._tried(CostModel({ITEM: 1.0}, self.model().base), wanted, limit)
        return replace(found, limit=MicroBatchLimit.PINNED) if found.live <= limit else None

    def _tried(self, model: CostModel, budget: int, limit: int, *, whole: bool = False) -> FoundBudget:
        """Cut under a budget; ask about the corners of groups of micro-batches, up to the first above the limit.

        `whole`: the largest possible micro-batch fits, so that it answers for all.
        """
        bounds, memory = self.bounds, self.memory
        micros = bounds.cut(model, budget)
        groups: list[SizeGroup] = []
        live, worst = 0, bounds.mean(1)
        for group in [bounds.largest_group(micros)] if whole else self._groups(model, budget, micros, limit):
            groups.append(group)
            live, worst = max(
                (live, worst), (memory.peak_bytes(group.corner, accumulate=micros.accumulate), group.corner)
            )
            if live > limit:
                break
        found = FoundBudget(model, budget, micros, tuple(groups), live, worst)
        if len(micros.step_M) <= len(bounds.whole.step_M):
            return replace(found, limit=MicroBatchLimit.WHOLE_SHARE)
        # A budget above all costs would cut nothing but padding.
        fewest = len(bounds.cut(model, bounds.uncut_budget(model)).step_M) if bounds.data.padded else 0
        return replace(found, limit=MicroBatchLimit.PADDING) if len(micros.step_M) <= fewest else found

    def _groups(self, model: CostModel, budget: int, micros: Micros, limit: int) -> Iterator[SizeGroup]:
        """Yield groups of micro-batches, the costliest first.

        The most one-sided micro-batches of other orders are among them: a plan holds in every epoch.
        """
        bounds = self.bounds
        fitted = self.model()  # which knows the answers to all questions; the cost model may be that of a pinned size

        def predict(rows_MS: Integers) -> Floats:
            return bounds.terms.predict(fitted, rows_MS)

        rows_MS = np.concatenate((micros.sizes_MS, bounds.extremes(model, budget)))
        most = min(max(_QUESTIONS - len(self.memory.micros), _LEAST_GROUPS), _MOST_GROUPS)
        for group in grouped(rows_MS, predict, bounds.most_S, limit, most):
            yield SizeGroup(self._answered(group.corner, predict, limit), group.places)

    def _answered(self, corner: Row, predict: Predict, limit: int) -> Row:
        """Return a corner that was asked about before and is hardly larger, if there is one, in place of this one."""
        asked = np.array(list(self.memory.micros))
        over = asked[(asked >= np.array(corner)).all(axis=1)]
        if len(over) == 0:
            return corner
        nearest = tuple(over[int(np.argmin(predict(over)))].tolist())
        gap = float(np.diff(predict(np.array([corner, nearest])))[0])
        return nearest if gap <= _NEAR * limit and self.memory.peak_bytes(nearest) <= limit else corner
