"""The largest budget of a micro-batch under which the worst of them fit, found with few questions to the oracle.

Each round fits a cost model to all answers so far, cuts an epoch under a budget of it, and asks about the corners of
the micro-batches, the costliest first. What does not fit lowers the budget; what leaves room raises it.

Shapes: N items, M micro-batches, S sizes (`items` first).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from pipeline.memory.footprint import Computes, StepTapes, least_sure, live_peak_bytes
from pipeline.memory.planning.cost_model import (
    MOST_GROUPS,
    NEAR,
    SizeGroup,
    Terms,
    extremes,
    grouped,
    rounded_up,
)
from pipeline.memory.planning.memory_plan import ITEM, CostModel, MicroBatchLimit
from pipeline.protocol import ITEMS

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    from pipeline.memory.planning.cost_model import Predict
    from pipeline.memory.planning.memory_plan import DataSizes, Micros, PlanRequest

    Row = tuple[int, ...]

ENOUGH = 0.92  # of the limit in use: a larger budget is not tried
LEAST = 0.83  # of the limit: a plan for every order that uses less gives way to one for the simulated order
_WORTH_LESS_SURE = 1.05  # times as much must be in use then
_ROUNDS = 8
_REFITS = 2  # rounds without an answer that fits, after which budgets shrink faster than the model learns
_CLOSE = 1.015  # budgets so near each other are the same
FEWEST = 3  # answers, to which a cost model is fitted
_SCREENED = 5  # questions for a first model
_QUESTIONS, _LEAST_GROUPS = 24, 6  # with ever fewer groups a plan is looser, and made in time


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
            self.micros[row] = self._oracle.micro(self.choice, self._sizes(row))
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
        if not isinstance(self._oracle, Computes):
            return True
        micro = self._oracle.confirmed(self.choice, self._sizes(row))
        is_right = self.micros[row].is_like(micro)
        self._peaks = {asked: peak for asked, peak in self._peaks.items() if is_right and asked[0] != row}
        self.micros = {**(self.micros if is_right else {}), row: micro}
        return is_right

    def _sizes(self, row: Row) -> Sizes:
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
        self.whole = data.cut(data.sizes, np.ones(data.items, np.int64), request.batch, request.ranks)
        self.share = int(self.whole.items_M.max(initial=1))  # items that a rank has in a step at most
        first = 1 if data.padded else self.share
        most = np.partition(self.sizes_NS, -first, axis=0)[-first:].sum(axis=0)
        self.most_S = np.concatenate(([self.share], most))  # of a micro-batch in any order of the data

    def fit(self, rows: Sequence[Row], values: Sequence[float], of_nothing: float) -> CostModel:
        """Fit values of micro-batches; of few, the value of one without items says what is the same for all."""
        if len(rows) < FEWEST:
            rows, values = [*rows, (0,) * len(self.terms.names)], [*values, of_nothing]
        return self.terms.fit(rows, values)

    def mean(self, items: int) -> Row:
        """Return the sizes of a micro-batch of so many average items."""
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


@dataclass(frozen=True, eq=False)
class FoundBudget:
    """A budget, the micro-batches cut under it, and the memory of the worst of them."""

    model: CostModel
    budget: int
    micros: Micros
    groups: tuple[SizeGroup, ...]  # of the micro-batches that were cut, then of the most one-sided of other orders
    live: int  # the peak of the worst corner
    worst: Row
    cut_live: int  # the peak of the worst that was cut
    every_order: bool
    limit: MicroBatchLimit = MicroBatchLimit.FULL

    @property
    def accumulate(self) -> bool:
        return bool(self.micros.per_share().max() > 1)


class BudgetSearch:
    """Searches for the largest budget under one choice of settings."""

    def __init__(self, memory: ChoiceMemory, bounds: DataBounds) -> None:
        self.memory, self.bounds = memory, bounds
        self._is_screened = False

    def find(self, limit: int) -> FoundBudget | None:
        """Return the largest budget under which all fits below a live peak, or None."""
        if self.bounds.request.micro_batch is not None:
            return self._pinned(limit)
        found = self._all_at_once(limit) or self._largest(limit, every_order=True)
        if found is not None and (found.limit is not MicroBatchLimit.FULL or found.cut_live >= LEAST * limit):
            return found
        one_order = self._largest(limit, every_order=False)
        if found is None or (one_order is not None and one_order.cut_live > _WORTH_LESS_SURE * found.cut_live):
            return one_order
        return found

    def model(self) -> CostModel:
        rows = list(self.memory.micros)
        return self.bounds.fit(rows, [self.memory.peak_bytes(row) for row in rows], self.memory.standing.bytes)

    def fits_uncut(self, limit: int) -> bool:
        """Tell whether the largest possible micro-batch fits; it is asked only if one of average items does."""
        if self.bounds.request.micro_batch is not None:
            return False
        accumulate = bool(self.bounds.whole.per_share().max() > 1)
        rows = (self.bounds.mean(self.bounds.share), self.bounds.rounded(self.bounds.most_S))
        return all(self.memory.peak_bytes(row, accumulate=accumulate) <= limit for row in rows)

    def screened_model(self, limit: int) -> CostModel:
        """Ask about a few micro-batches near the limit, each dominated by another size, and return a first model."""
        bounds, memory = self.bounds, self.memory
        if self._is_screened or self.fits_uncut(limit):
            return self.model()
        self._is_screened = True
        single = memory.peak_bytes(bounds.mean(1))
        model = self.model()
        if not bounds.data.padded:  # two points cannot separate the sizes: each gets the same part
            whole = memory.peak_bytes(bounds.mean(bounds.share))
            slope = max(whole - single, 1) / max(bounds.share - 1, 1)
            mean = {name: max(size, 1) for name, size in zip(bounds.terms.texts, bounds.mean(1), strict=True)}
            weights = {name: slope / len(mean) / size for name, size in mean.items()}
            model = CostModel(weights, max(single - slope, 0.0))
        budget = max(int(limit - model.base), 1)
        cost_N = model.cost(bounds.data.sizes, budget)
        rows_MS = extremes(bounds.sizes_NS, cost_N, budget, bounds.share, padded=bounds.data.padded)
        chosen = np.unique(np.linspace(0, len(rows_MS) - 1, _SCREENED).astype(np.int64))
        for row in rows_MS[chosen]:
            memory.peak_bytes(bounds.rounded(row))
        return self.model()

    def _all_at_once(self, limit: int) -> FoundBudget | None:
        """Return the plan that cuts nothing, if the largest possible micro-batch fits."""
        bounds, data = self.bounds, self.bounds.data
        if not self.fits_uncut(limit):
            return None
        model = self.screened_model(limit)
        cost_N = model.cost(data.sizes)
        most = int(cost_N.max()) * bounds.share if data.padded else int(-np.sort(-cost_N)[: bounds.share].sum())
        found = self._tried(model, cost_N, most, limit, every_order=True, most=1)
        return found if found.live <= limit else None

    def _largest(self, limit: int, *, every_order: bool) -> FoundBudget | None:
        """Return the largest budget that fits, by narrowing an interval of budgets relative to what is predicted."""
        self.screened_model(limit)
        best: FoundBudget | None = None
        share, low, high = 1.0, 0.0, float("inf")
        for turn in range(_ROUNDS):
            model, asked = self.model(), len(self.memory.micros)
            base = min(model.base, 0.99 * limit)
            budget = max(int(share * (limit - base)), 1)
            cost_N = model.cost(self.bounds.data.sizes, budget)
            found = self._tried(model, cost_N, budget, limit, every_order=every_order)
            wanted = ((1 + ENOUGH) / 2 * limit - base) / max(found.live - base, 1.0)
            if found.live <= limit:
                best = found if best is None or found.cut_live >= best.cut_live else best
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
        if best is None:  # each item alone
            ones_N = np.ones(self.bounds.data.items, np.int64)
            best = self._tried(self.model(), ones_N, 1, limit, every_order=every_order)
            return best if best.live <= limit else None
        is_full = high < float("inf") or best.live >= ENOUGH * limit
        is_cut = best.limit is MicroBatchLimit.FULL
        return replace(best, limit=MicroBatchLimit.EVEN) if is_cut and not is_full else best

    def _pinned(self, limit: int) -> FoundBudget | None:
        """Return micro-batches of the number of items that the settings fix, if they fit."""
        bounds = self.bounds
        wanted = min(bounds.request.micro_batch or 1, bounds.share)
        for items in (wanted, 1):
            self.memory.peak_bytes(bounds.mean(items))
        model, ones_N = CostModel({ITEM: 1.0}, self.model().base), np.ones(bounds.data.items, np.int64)
        for every_order in (True, False):
            found = self._tried(model, ones_N, wanted, limit, every_order=every_order)
            if found.live <= limit:
                return replace(found, limit=MicroBatchLimit.PINNED)
        return None

    def _tried(
        self,
        model: CostModel,
        cost_N: Integers,
        budget: int,
        limit: int,
        *,
        every_order: bool,
        most: int = MOST_GROUPS,
    ) -> FoundBudget:
        """Cut under a budget; ask about the corners of the micro-batches, up to the first that is above the limit."""
        bounds, data = self.bounds, self.bounds.data
        micros = data.cut(data.sizes, cost_N, budget, bounds.request.ranks)
        rows_MS = micros.sizes_MS
        if every_order:
            others_MS = extremes(bounds.sizes_NS, cost_N, budget, bounds.share, padded=data.padded)
            rows_MS = np.concatenate((rows_MS, others_MS))
        accumulate = bool(micros.per_share().max() > 1)
        fitted = self.model()  # which knows the answers to all questions; the cost model may be that of a pinned size

        def predict(rows_MS: Integers) -> Floats:
            return bounds.terms.predict(fitted, rows_MS)

        groups: list[SizeGroup] = []
        live, worst = 0, bounds.mean(1)
        most = min(max(_QUESTIONS - len(self.memory.micros), _LEAST_GROUPS), most)
        for candidate in grouped(rows_MS, predict, bounds.most_S, limit, most):
            group = self._answered(candidate, predict, limit)
            groups.append(group)
            live, worst = max(
                (live, worst), (self.memory.peak_bytes(group.corner, accumulate=accumulate), group.corner)
            )
            if live > limit:
                break
        cut_live = 0
        if live <= limit:
            cut_worst = micros.sizes_MS[int(np.argmax(predict(micros.sizes_MS)))]
            cut_live = self.memory.peak_bytes(bounds.rounded(cut_worst), accumulate=accumulate)
        found = FoundBudget(model, budget, micros, tuple(groups), live, worst, cut_live, every_order)
        if len(micros.step_M) <= len(bounds.whole.step_M):
            return replace(found, limit=MicroBatchLimit.WHOLE_SHARE)
        return replace(found, limit=MicroBatchLimit.PADDING) if self._is_uncut(found) else found

    def _answered(self, group: SizeGroup, predict: Predict, limit: int) -> SizeGroup:
        """Return the group with a corner that was asked about before and is hardly larger, if there is one."""
        asked = np.array(list(self.memory.micros))
        over = asked[(asked >= np.array(group.corner)).all(axis=1)]
        if len(over) == 0:
            return group
        nearest = tuple(over[int(np.argmin(predict(over)))].tolist())
        gap = float(np.diff(predict(np.array([group.corner, nearest])))[0])
        is_near = gap <= NEAR * limit and self.memory.peak_bytes(nearest) <= limit
        return SizeGroup(nearest, group.places) if is_near else group

    def _is_uncut(self, found: FoundBudget) -> bool:
        """Tell whether no larger budget would make fewer micro-batches."""
        data, whole = self.bounds.data, self.bounds.whole
        if data.padded and len(found.micros.step_M) > len(whole.step_M):
            cost_N = found.model.cost(data.sizes)
            whole = data.cut(data.sizes, cost_N, int(cost_N.max()) * self.bounds.share, self.bounds.request.ranks)
        return len(found.micros.step_M) <= len(whole.step_M)
