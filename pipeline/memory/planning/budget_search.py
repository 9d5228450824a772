"""The largest budget of a micro-batch under which the worst of them fit, found with few questions to the oracle.

Shapes: N items, M micro-batches, S sizes (`items` first), P points that were asked about.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pipeline.memory.planning.memory_plan import MicroBatchLimit
from pipeline.memory.planning.size_groups import (
    MOST_BUCKETS,
    NEAR,
    CostModel,
    SizeGroup,
    Terms,
    extremes,
    fit,
    grouped,
    rounded_up,
)
from pipeline.protocol import ITEMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.memory.footprint import Integers, MemoryChoice
    from pipeline.memory.planning.memory_plan import DataSizes, Micros, PlanRequest
    from pipeline.memory.planning.oracle_cache import OracleCache


ENOUGH = 0.92  # of the limit in use: a larger budget is not looked for
LEAST = 0.83  # of it: below, a plan for every order of an epoch gives way to one for the order that was cut
_ENOUGH_FOR_ONE = 0.90  # then less is looked for: what other orders need lies above
_WORTH_LESS_SURE = 1.05  # times as much in use is worth a plan for one order
_ROUNDS, _FEWER_ROUNDS = 8, 5
_CLOSE = 1.015  # budgets so near each other are the same
_SCREENED = 5  # that are asked about for a first model
_SECANTS = 2  # rounds, before the interval is halved
_SHRINK = 0.97
_QUESTIONS, _LEAST_BUCKETS = 30, 6  # with ever fewer buckets a plan is looser, and made in time
_SHRINKS = 6


@dataclass(frozen=True, eq=False)
class FoundBudget:
    """A budget, the micro-batches cut under it, and the memory of the worst of them."""

    model: CostModel
    cost_N: Integers
    budget: int
    micros: Micros
    rows_MS: Integers  # of the micro-batches that were cut
    possible_MS: Integers  # the most one-sided ones of other orders
    live: int  # of the worst that was asked about
    worst: tuple[int, ...]
    worst_cut: int  # the live peak of the worst that was cut
    every_order: bool
    filled: MicroBatchLimit = MicroBatchLimit.FULL
    groups: tuple[SizeGroup, ...] = ()

    @property
    def accumulate(self) -> bool:
        return bool(self.micros.per_share().max() > 1)


class DataBounds:
    """What a data set's sizes tell before the oracle is asked."""

    def __init__(self, data: DataSizes, request: PlanRequest) -> None:
        self.data, self.request = data, request
        self.terms = Terms((ITEMS, *data.names), data.padded)
        self.sizes_NS = data.sizes_NS
        self.whole = data.cut(data.sizes, np.ones(data.items, np.int64), request.batch, request.ranks)
        self.share = int(self.whole.items_M.max(initial=1))  # items that a rank has in a step at most
        first = 1 if data.padded else self.share
        most = np.partition(self.sizes_NS, -first, axis=0)[-first:].sum(axis=0)
        self.most_S = np.concatenate(([self.share], most))  # that a micro-batch can have, in any order of the data

    def mean(self, items: int) -> tuple[int, ...]:
        """Return the sizes of a micro-batch of so many average items."""
        mean_S = np.ceil(self.sizes_NS.mean(axis=0) * (1 if self.data.padded else items)).astype(np.int64)
        return self.rounded(np.concatenate(([items], mean_S)))

    def largest(self) -> int:
        """Return the item whose sizes, each by the largest of its kind, sum to the most."""
        return int(np.argmax((self.sizes_NS / np.maximum(self.sizes_NS.max(axis=0), 1)).sum(axis=1)))

    def alone(self, item: int) -> tuple[int, ...]:
        return (1, *self.sizes_NS[item].tolist())

    def rounded(self, row_S: Integers) -> tuple[int, ...]:
        """Return slightly larger, rounded sizes to ask the oracle about, so that fewer questions are needed."""
        return tuple(rounded_up(row_S, self.most_S).tolist())


class BudgetSearch:
    """Searches for the largest budget under one choice of settings."""

    def __init__(self, questions: OracleCache, ground: DataBounds, choice: MemoryChoice) -> None:
        self.ground = ground
        self._questions, self._choice = questions, choice
        self._data, self._request = ground.data, ground.request
        self._sizes_NS, self._share = ground.sizes_NS, ground.share
        self._fewest_of: tuple[CostModel, int] | None = None

    def live(self, row: Sequence[int], *, accumulate: bool = True) -> int:
        """Return the live peak of a step of such micro-batches, several accumulated or one alone."""
        return self._questions.peak_bytes(self._choice, tuple(row), accumulate=accumulate)

    def model(self) -> CostModel:
        rows = self._questions.rows(self._choice)
        return fit(self.ground.terms, rows, [float(self.live(row)) for row in rows])

    def find(self, limit: int, before: FoundBudget | None = None, *, sure: bool = False) -> FoundBudget | None:
        """Return the largest budget under which all fits below a live peak, or None.

        `before` is the result for another limit, to start from; `sure`: only what holds in every order of an epoch.
        """
        if self._request.micro_batch is not None:
            return self._pinned(limit)
        if before is None:
            whole = self._all_at_once(limit)
            if whole is not None:
                return whole
            self._screen(limit)
        loose = None
        if before is None or before.every_order:
            least = 0.0 if sure else LEAST * limit
            found = self._settled(self._largest(limit, before, every_order=True), limit, least)
            if sure or (found is not None and found.groups):
                return found
            loose = found
        tighter = self._settled(self._largest(limit, before or loose, every_order=False), limit)
        if loose is None or (tighter is not None and tighter.worst_cut > loose.worst_cut * _WORTH_LESS_SURE):
            return tighter
        return self._settled(loose, limit) or tighter

    def _all_at_once(self, limit: int) -> FoundBudget | None:
        """Return the plan that cuts nothing, if the largest micro-batch that could ever be still fits."""
        accumulate = bool(self.ground.whole.per_share().max() > 1)
        middling, largest = self.ground.mean(self._share), self.ground.rounded(self.ground.most_S)
        if any(self.live(row, accumulate=accumulate) > limit for row in (middling, largest)):
            return None
        self.live(self.ground.mean(1))
        model = self.model()
        cost_N = model.cost(self._sizes_NS)
        most = int(cost_N.max()) * self._share if self._data.padded else int(-np.sort(-cost_N)[: self._share].sum())
        verified = self._verified(self._try(model, cost_N, most, every_order=True), limit)
        return verified if verified.live <= limit else None

    def _screen(self, limit: int) -> None:
        """Ask about a few micro-batches near the limit, each dominated by another size, to fit a first model."""
        whole, single = self.live(self.ground.mean(self._share)), self.live(self.ground.mean(1))
        if self._data.padded:
            model = self.model()
        else:
            slope = max(whole - single, 1) / max(self._share - 1, 1)
            mean_S = np.maximum(np.array(self.ground.mean(1)), 1).astype(np.float64)
            model = CostModel(self.ground.terms, slope / len(mean_S) / mean_S, max(single - slope, 0.0))
        budget = max(int(limit - model.base), 1)
        cost_N = np.minimum(model.cost(self._sizes_NS), budget)
        rows_MS = extremes(self._sizes_NS, cost_N, budget, self._share, padded=self._data.padded)
        few = np.unique(np.linspace(0, len(rows_MS) - 1, _SCREENED).astype(np.int64))
        for row in np.unique(rounded_up(rows_MS[few], self.ground.most_S), axis=0).tolist():
            self.live(row)

    def _try(self, model: CostModel, cost_N: Integers, budget: int, *, every_order: bool) -> FoundBudget:
        """Cut under a budget and ask about the micro-batches that look worst."""
        cost_N = np.minimum(cost_N, budget)
        micros = self._data.cut(self._data.sizes, cost_N, budget, self._request.ranks)
        rows_MS = micros.ordered(self.ground.terms.names)
        possible_MS = extremes(self._sizes_NS, cost_N, budget, self._share, padded=self._data.padded)
        accumulate = bool(micros.per_share().max() > 1)
        live, worst = self._worst(model, rows_MS, accumulate=accumulate)
        cut_live = live
        if every_order:
            live, worst = max((live, worst), self._worst(model, possible_MS, accumulate=accumulate))
        return FoundBudget(model, cost_N, budget, micros, rows_MS, possible_MS, live, worst, cut_live, every_order)

    def _worst(self, model: CostModel, rows_MS: Integers, *, accumulate: bool) -> tuple[int, tuple[int, ...]]:
        """Ask about the micro-batch that is predicted to take most."""
        distinct_MS = np.unique(rounded_up(rows_MS, self.ground.most_S), axis=0)
        row = tuple(distinct_MS[int(np.argmax(model.predict(distinct_MS)))].tolist())
        return self.live(row, accumulate=accumulate), row

    def _settled(self, found: FoundBudget, limit: int, least: float = 0.0) -> FoundBudget | None:
        """Verify all micro-batches, lowering the budget until they fit; None if they never do.

        If the cut micro-batches take less than `least`, nothing more is asked, and the result has no groups.
        """
        for _ in range(_SHRINKS):
            if found.worst_cut < least and self._filled(found) is MicroBatchLimit.FULL:
                return found
            verified = self._verified(found, limit)
            if verified.live <= limit:
                return verified
            if found.budget == 1:
                return None
            base = found.model.base
            less = min((limit - base) / (verified.live - base), _SHRINK) if limit > base else 0.0
            budget = max(int(found.budget * less), 1)
            found = self._try(found.model, found.cost_N, budget, every_order=found.every_order)
        verified = self._verified(self._try(found.model, found.cost_N, 1, every_order=found.every_order), limit)
        return verified if verified.live <= limit else None

    def _largest(self, limit: int, before: FoundBudget | None, *, every_order: bool) -> FoundBudget:
        """Return the largest budget that fits, by narrowing an interval of budgets."""
        model = before.model if before else self.model()
        cost_N, enough = model.cost(self._sizes_NS), ENOUGH if every_order else _ENOUGH_FOR_ONE
        budget, above = max(int(limit - model.base), 1), 0.0
        if before is not None and before.budget > 1:
            budget = max(int(before.budget * max(limit - model.base, 1.0) / max(before.live - model.base, 1.0)), 1)
        best: FoundBudget | None = None
        for turn in range(_ROUNDS if every_order else _FEWER_ROUNDS):
            found = self._try(model, cost_N, budget, every_order=every_order)
            if found.live <= limit:
                best = found
                if found.live >= enough * limit or self._uncut(found):
                    break
            else:
                above = float(budget)
            if turn < 2 and above and best is None:  # what was learned weighs the sizes better
                model = self.model()
                cost_N, above = model.cost(self._sizes_NS), 0.0
            bounds = (float(best.budget) if best else 0.0, above or (0.0 if best else float(budget)))
            budget = _next(budget, found.live, limit, model.base, bounds, turn)
            if best is not None and (budget <= best.budget * _CLOSE or (above and above <= best.budget * _CLOSE)):
                break
        if best is None:
            return self._try(model, cost_N, 1, every_order=every_order)
        is_full = above > 0 or best.live >= enough * limit
        return replace(best, filled=MicroBatchLimit.FULL if is_full else MicroBatchLimit.EVEN)

    def _uncut(self, found: FoundBudget) -> bool:
        """Tell whether no larger budget would make fewer micro-batches."""
        return len(found.micros.step_M) <= self._fewest(found.model)

    def _fewest(self, model: CostModel) -> int:
        """Return the fewest micro-batches that an epoch can be cut into, whatever the budget."""
        if not self._data.padded:
            return len(self.ground.whole.step_M)
        if self._fewest_of is None or self._fewest_of[0] is not model:
            cost_N = model.cost(self._sizes_NS)
            cut = self._data.cut(self._data.sizes, cost_N, int(cost_N.max()) * self._share, self._request.ranks)
            self._fewest_of = model, len(cut.step_M)
        return self._fewest_of[1]

    def _verified(self, found: FoundBudget, limit: int) -> FoundBudget:
        """Ask about one upper bound for each group of micro-batches, up to the first that is above the limit."""
        rows_MS = np.concatenate((found.rows_MS, found.possible_MS)) if found.every_order else found.rows_MS
        model = self.model()
        groups: list[SizeGroup] = []
        live, worst = 0, found.worst
        most = min(max(_QUESTIONS - self._questions.asked, _LEAST_BUCKETS), MOST_BUCKETS)
        for candidate in grouped(rows_MS, model.predict, self.ground.most_S, limit, most):
            group = self._answered(candidate, model, limit)
            groups.append(group)
            live, worst = max((live, worst), (self.live(group.corner, accumulate=found.accumulate), group.corner))
            if live > limit:
                break
        return replace(found, live=live, worst=worst, groups=tuple(groups), filled=self._filled(found))

    def _answered(self, group: SizeGroup, model: CostModel, limit: int) -> SizeGroup:
        """Return the group with a corner that was asked about before and is hardly larger, if there is one."""
        asked = np.array(self._questions.rows(self._choice))
        over = asked[(asked >= np.array(group.corner)).all(axis=1)]
        if len(over) == 0:
            return group
        nearest = tuple(over[int(np.argmin(model.predict(over)))].tolist())
        gap = float(np.diff(model.predict(np.array([group.corner, nearest])))[0])
        is_near = gap <= NEAR * limit and self.live(nearest) <= limit
        return SizeGroup(nearest, group.places) if is_near else group

    def _filled(self, found: FoundBudget) -> MicroBatchLimit:
        if self._request.micro_batch is not None:
            return MicroBatchLimit.PINNED
        if len(found.micros.step_M) <= len(self.ground.whole.step_M):
            return MicroBatchLimit.WHOLE_SHARE
        return MicroBatchLimit.PADDING if self._uncut(found) else found.filled

    def _pinned(self, limit: int) -> FoundBudget | None:
        """Return micro-batches of the number of items that the settings fix, if they fit."""
        wanted = min(self._request.micro_batch or 1, self._share)
        self.live(self.ground.mean(wanted))
        self.live(self.ground.mean(1))
        model, ones_N = self.model(), np.ones(self._data.items, np.int64)
        for every_order in (True, False):
            found = self._verified(self._try(model, ones_N, wanted, every_order=every_order), limit)
            if found.live <= limit:
                return found
        return None


def _next(budget: float, live: int, limit: int, base: float, bounds: tuple[float, float], turn: int) -> int:
    """Return the budget to try next; `bounds` are one that fits and one that does not, 0 where unknown.

    Live memory above its base is assumed to grow in proportion to the budget; steps widen where it does not.
    """
    below, above = bounds
    if below and above and turn > _SECANTS:
        return max(int(np.sqrt(below * above)), 1)
    wanted = budget * max(limit * (0.5 + 0.5 * ENOUGH) - base, 1.0) / max(live - base, 1.0)
    step = 1.0 + 0.1 * (turn + 1)
    if below and above:
        wanted = min(max(wanted, below + 0.1 * (above - below)), above - 0.1 * (above - below))
    elif below:
        wanted = max(wanted, below * step)
    else:
        wanted = min(wanted, above / step)
    return max(int(min(max(wanted, budget / 8), budget * 8)), 1)
