"""The remedies in their order, and trials of them; smaller micro-batches are part of every trial."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import PlanInfeasible
from pipeline.memory.footprint import CannotRun, Margin, MemoryChoice, Provenance, least_sure, margin_of
from pipeline.memory.planning.budget_search import BudgetSearch, DataBounds, FoundBudget
from pipeline.memory.planning.memory_plan import Figure, OversizeItem, RemedyTrial, RemedyVerdict, Reserved
from pipeline.memory.planning.size_groups import alone, fit
from pipeline.memory.planning.step_estimates import (
    MicroTime,
    epoch_s,
    gathered_s,
    live_only,
    micro_time,
    parameter_bytes,
    sample_steps,
    transfer_again_s,
    update_s,
)
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pipeline.memory.footprint import MicroFootprint
    from pipeline.memory.planning.memory_plan import CardSpec, CardSpecs, DataSizes, Micros, PlanRequest
    from pipeline.memory.planning.oracle_cache import OracleCache
    from pipeline.memory.planning.step_estimates import Reserve


WORTH = 1.05  # a later remedy must be so many times as fast


def choices(request: PlanRequest) -> list[MemoryChoice]:
    """Return the choices that a request allows, those with only the earlier remedies first.

    The order is that of counting, the first remedy changing fastest: none, checkpointing, precision, both, offload, …
    """
    shards = (1, request.ranks) if request.shards is None and request.ranks > 1 else (request.shards or 1,)
    options = product(shards, _either(request.offload), request.precisions, _either(request.checkpointing))
    return [
        MemoryChoice(precision, checkpointing=checkpointing, offload=offload, shards=parts)
        for parts, offload, precision, checkpointing in options
    ]


def _either(wanted: bool | None) -> tuple[bool, ...]:  # noqa: FBT001 - a setting of three values
    return (False, True) if wanted is None else (wanted,)


def remedies(choice: MemoryChoice, request: PlanRequest) -> tuple[str, ...]:
    """Return the remedies of a choice beside smaller micro-batches, in words."""
    texts = (
        (choice.checkpointing, "checkpointing"),
        (choice.precision != request.precisions[0], f"precision {choice.precision}"),
        (choice.offload, "offload"),
        (choice.shards > 1, f"sharding over {choice.shards} ranks"),
    )
    return tuple(text for is_so, text in texts if is_so)


_TURNS = 4  # times the budget is corrected for what the allocator holds beyond what is live
_FRAGMENTED = 1.02  # what is expected of it at first


@dataclass(frozen=True, eq=False)
class ChoiceOutcome:
    """The result of trying a choice; `found` is None where it does not fit or was not searched."""

    choice: MemoryChoice
    verdict: RemedyVerdict
    why: str
    margin: Margin = field(default_factory=lambda: margin_of(Provenance.TRACED))
    alone: int = 0  # the live peak of the item that takes most alone; 0: nobody asked
    found: FoundBudget | None = None
    reserved: Reserved | None = None
    micros: tuple[MicroFootprint, ...] = ()  # of the buckets
    pace: MicroTime | None = None  # of an epoch of middling shares: an estimate
    cuts: int = 1  # of such a share
    step_s: float = 0.0
    epoch_s: float = 0.0
    padding: float | None = None  # that micro-batches were cut with

    @property
    def total(self) -> int:
        """Return the bytes, margin included, that must be below the limit."""
        bytes_held = self.reserved.bytes if self.reserved else self.alone
        return int(np.ceil(bytes_held * self.margin.factor))

    def trial(self, request: PlanRequest) -> RemedyTrial:
        """Return the result for a report; where it does not fit, the total is that of the largest item alone."""
        looked = self.reserved is not None or self.verdict is RemedyVerdict.TOO_LARGE
        total = Figure(self.total, self.margin.origin) if looked and self.total else None
        time = Figure(self.epoch_s, Provenance.ASSUMED) if self.epoch_s else None
        remedy = " + ".join(("smaller micro-batches", *remedies(self.choice, request)))
        return RemedyTrial(remedy, self.choice, self.verdict, self.why, total, time)


@dataclass(frozen=True, eq=False)
class ChoiceSearch:
    """Tries choices on one data set."""

    questions: OracleCache
    data: DataSizes
    request: PlanRequest
    cards: CardSpecs
    reserve: Reserve

    @property
    def limit(self) -> int:
        """Return the bytes that torch may reserve on the smallest card."""
        return self.cards.smallest.budget_bytes

    def margin(self, choice: MemoryChoice) -> Margin:
        """Return the margin for the oracle's answers about a choice so far."""
        standing = self.questions.standing(choice)
        origins = {standing.origin, *self.questions.origins(choice)}
        request = self.request
        ratios = request.ratios if request.measured in (None, choice) else ()
        return margin_of(least_sure(origins), ratios, caching=self.cards.caching, compiled=request.compiled)

    @cached_property
    def ground(self) -> DataBounds:
        return DataBounds(self.data, self.request)

    def estimate(self, choice: MemoryChoice) -> ChoiceOutcome:
        """Return an estimate from two questions: the largest item alone, and a rank's share of average items."""
        if not self.cards.supports(choice.precision):
            lacking = [card.name for card in self.cards.cards if choice.precision not in card.flops_per_s]
            why = f"{', '.join(lacking)} does not support {choice.precision}"
            return ChoiceOutcome(choice, RemedyVerdict.UNSUPPORTED, why)
        try:
            standing = self.questions.standing(choice)
        except CannotRun as error:
            return ChoiceOutcome(choice, RemedyVerdict.FAILS, error.what)
        margin = self.margin(choice)
        if standing.bytes * margin.factor > self.limit:
            why = f"parameters, gradients and optimizer state take {format_bytes(standing.bytes)}, whatever the batch"
            return ChoiceOutcome(choice, RemedyVerdict.TOO_LARGE, why, margin)
        item = self.ground.largest()
        alone = self.questions.peak_bytes(choice, self.ground.alone(item), accumulate=True)
        margin = self.margin(choice)
        if alone * margin.factor > self.limit:
            why = f"{self.data.called(item)} alone takes {format_bytes(alone)}"
            return ChoiceOutcome(choice, RemedyVerdict.TOO_LARGE, why, margin, alone)
        pace, cuts = self._share_pace(choice, self.limit / margin.factor)
        steps = self.ground.whole.steps
        update = update_s(standing, choice, self.cards, self.request.ranks)
        why = f"about {cuts} micro-batches for a rank's share of a step"
        time_s = steps * (pace.total_s + update)
        return ChoiceOutcome(
            choice, RemedyVerdict.SLOWER, why, margin, alone, pace=pace.times(steps), epoch_s=time_s, cuts=cuts
        )

    def _share_pace(self, choice: MemoryChoice, limit: float) -> tuple[MicroTime, int]:
        """Return the time of a rank's share of average items, and the number of its micro-batches."""
        row = self.ground.mean(self.ground.share)
        standing, micro = self.questions.standing(choice), self.questions.micro(choice, row)
        base = standing.bytes + max(micro.first.left_bytes, 0)
        peak = self.questions.peak_bytes(choice, row, accumulate=True)
        cuts = ceil((peak - base) / max(limit - base, 1.0))
        if self.request.micro_batch is not None:
            cuts = ceil(self.ground.share / self.request.micro_batch)
        cuts = min(max(cuts, 1), self.ground.share)
        whole = micro_time(micro, standing, choice, self.cards)
        again = transfer_again_s(standing, choice, self.cards) * (cuts - 1)
        return MicroTime(whole.compute_s, whole.memory_s, whole.launch_s * cuts, whole.transfer_s + again), cuts

    def search(self, estimate: ChoiceOutcome) -> ChoiceOutcome:
        """Return the result with the best budget, padded more where fewer micro-batches are worth it."""
        tight = self.budgeted(estimate)
        if tight.found is None or (padding := self._faster_padding(tight)) is None:
            return tight
        looser = replace(self, data=self.data.padded_to(padding))
        loose = looser.budgeted(estimate, sure=tight.found.every_order)
        return loose if loose.found is not None and loose.epoch_s < tight.epoch_s else tight

    def _faster_padding(self, tight: ChoiceOutcome) -> float | None:
        """Return the padding with the fastest epoch in the memory that there seems to be; None: none is faster."""
        found, reserved = tight.found, tight.reserved
        assert found is not None
        assert reserved is not None
        live = self.limit / tight.margin.factor * found.live / reserved.bytes
        budget = max(found.budget, int(live - found.model.base))
        cost_N = np.minimum(found.model.cost(self.ground.sizes_NS), budget)
        best, best_s = None, tight.epoch_s
        for padding, cut in self.data.looser.items():
            micros = cut(self.data.sizes, cost_N, budget, self.request.ranks)
            time_s = self._times(tight.choice, micros)[1]
            if time_s < best_s:
                best, best_s = padding, time_s
        return best

    def budgeted(self, estimate: ChoiceOutcome, *, sure: bool = False) -> ChoiceOutcome:
        """Return the result with the best budget, lowered until what the allocator reserves fits too."""
        choice, alone = estimate.choice, estimate.alone
        margin, fragmented = self.margin(choice), _FRAGMENTED if self.cards.caching else 1.0
        search = BudgetSearch(self.questions, self.ground, choice)
        found: FoundBudget | None = None
        for _ in range(_TURNS):
            found = search.find(int(self.limit / margin.factor / fragmented), found, sure=sure)
            if found is None:
                break
            margin = self.margin(choice)
            micros = tuple(self.questions.micro(choice, group.corner) for group in found.groups)
            reserved = live_only(found.live)
            if self.cards.caching:
                reserved = self.reserve(self.questions.standing(choice), sample_steps(found, micros, self.request.seed))
            outcome = ChoiceOutcome(
                choice, RemedyVerdict.CHOSEN, found.filled.value, margin, alone, found, reserved, micros
            )
            if outcome.total <= self.limit:
                if not self.questions.confirmed(choice, found.worst):
                    continue  # what was computed was wrong: all is asked
                live = search.live(found.worst, accumulate=found.accumulate)
                return self._timed(replace(outcome, found=replace(found, live=live)))
            fragmented = max(reserved.bytes / found.live, fragmented) * 1.002
        why = "no allowed micro-batch fits together with the allocator's reserve"
        return ChoiceOutcome(choice, RemedyVerdict.TOO_LARGE, why, margin, alone)

    def _timed(self, outcome: ChoiceOutcome) -> ChoiceOutcome:
        """Add step and epoch times, and the padding that they are of."""
        assert outcome.found is not None
        step, epoch = self._times(outcome.choice, outcome.found.micros)
        return replace(outcome, step_s=step, epoch_s=epoch, padding=self.data.padding)

    def _times(self, choice: MemoryChoice, micros: Micros) -> tuple[float, float]:
        """Return step and epoch times, from a fit to the micro-batches that the oracle was asked about."""
        standing, rows = self.questions.standing(choice), self.questions.rows(choice)
        times = [micro_time(self.questions.micro(choice, row), standing, choice, self.cards).total_s for row in rows]
        time_M = fit(self.ground.terms, rows, times).predict(micros.ordered(self.ground.terms.names))
        return epoch_s(micros, time_M, update_s(standing, choice, self.cards, self.request.ranks))

    def least_s(self, best: ChoiceOutcome, choice: MemoryChoice) -> float:
        """Return a lower bound on a choice's epoch time, from another's estimate; the oracle is not asked."""
        assert best.pace is not None
        rates = self.cards.flops_per_s(best.choice.precision) / self.cards.flops_per_s(choice.precision)
        half = 0.5 if best.choice.precision == "fp32" and choice.precision != "fp32" else 1.0
        once = 0.7 if best.choice.checkpointing and not choice.checkpointing else 1.0  # forward is a third of all
        pace = best.pace
        standing = self.questions.standing(best.choice)
        beside = update_s(standing, choice, self.cards, self.request.ranks)
        if choice.shards > 1:  # its ranks gather all parameters, of whoever has them, at least once a step
            beside += gathered_s(best.choice.shards * parameter_bytes(standing), choice, self.cards)
        return self.ground.whole.steps * beside + once * (
            pace.compute_s * rates + pace.memory_s * half + pace.launch_s / best.cuts
        )


SHOWN = 3  # so many are named in an error
_HALVINGS = 7
_ASKED = 3  # of the largest the oracle is asked; the others are predicted


def too_large(items: Sequence[OversizeItem], count: int, limit: int) -> PlanInfeasible:
    """Return the error that names the items that fit under no remedy; `count` is the number of all items."""
    texts = []
    for item in items[:SHOWN]:
        sizes = ", ".join(f"{value:,} {name}" for name, value in item.sizes.items())
        texts.append(f"{item.id} ({sizes}) takes {format_bytes(item.total.value, above=limit)}")
    more = "; …" if len(items) > SHOWN else ""
    return PlanInfeasible(
        f"{len(items):,} of {count:,} items do not fit under any remedy: {'; '.join(texts)}{more}; "
        f"the GPU lets torch have {format_bytes(limit)}",
        remedy=f"{items[0].remedy}, or --set train.oversize=skip (or crop)",
    )


def outsized(
    search: BudgetSearch, limit: int, margin: Margin, budget: int, others: Sequence[CardSpec]
) -> tuple[tuple[OversizeItem, ...], NDArray[np.bool_]]:
    """Return the items whose live peak alone is above a limit, the largest first, and a mask of the other items.

    Items are ordered by predicted peak; bisection with the oracle finds where the limit is passed.
    """
    sizes_NS = search.ground.sizes_NS
    by_sum_N = np.argsort(sizes_NS.sum(axis=1), kind="stable")
    for place in (0.5, 0.9, 0.99):
        search.live(search.ground.alone(int(by_sum_N[int(place * (len(sizes_NS) - 1))])))
    model = search.model()
    predicted_N = model.predict(alone(sizes_NS))
    order_N = np.argsort(-predicted_N, kind="stable")
    asked: dict[int, int] = {}

    def is_over(place: int) -> bool:
        item = int(order_N[place])
        asked[item] = search.live(search.ground.alone(item))
        return asked[item] > limit

    low, high = 0, len(order_N)  # the first `low` are over, from `high` on none is
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if is_over(middle) else (low, middle)
    refuted = {item: took for item, took in asked.items() if took > limit}
    over_N = np.zeros(len(order_N), np.bool_)
    over_N[order_N[:low]] = True
    for item in refuted:
        over_N |= (sizes_NS >= sizes_NS[item]).all(axis=1)
    over = order_N[over_N[order_N]].tolist()
    is_sure = [place < _ASKED or item in asked for place, item in enumerate(over)]
    live = [
        search.live(search.ground.alone(item)) if sure else predicted_N[item]
        for item, sure in zip(over, is_sure, strict=True)
    ]
    # A larger item is said to take no less than a smaller one, also where a kernel takes less of it.
    live_O = np.maximum.accumulate([min(refuted.values(), default=0), *reversed(live)])[:0:-1]
    of_all = max(margin.factor, budget / limit)  # an allocator may hold more than is live
    items = []
    for item, sure, live_bytes in zip(over, is_sure, live_O, strict=True):
        total = Figure(ceil(live_bytes * of_all), margin.origin if sure else Provenance.ASSUMED)
        sizes = dict(zip(search.ground.data.names, sizes_NS[item].tolist(), strict=True))
        called = search.ground.data.called(item)
        items.append(OversizeItem(item, called, sizes, total, budget, _remedy(int(total.value), budget, others)))
    return tuple(items), ~over_N


def _remedy(total: int, limit: int, others: Sequence[CardSpec]) -> str:
    """Name a card that would fit an item."""
    enough = min(
        (card for card in others if card.budget_bytes >= total), key=lambda card: card.budget_bytes, default=None
    )
    if enough is None:
        return f"use a GPU that lets torch have {format_bytes(total, above=limit)}"
    return f"use a GPU such as {enough.name}, which lets torch have {format_bytes(enough.budget_bytes)}"


def crop_limits(search: BudgetSearch, limit: int) -> dict[str, int]:
    """Return a limit for each size such that an item at all limits fits alone."""
    most_S = search.ground.sizes_NS.max(axis=0)
    below, above = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (below + above) / 2
        row = (1, *np.maximum((most_S * middle).astype(np.int64), 1).tolist())
        below, above = (middle, above) if search.live(row) <= limit else (below, middle)
    return dict(zip(search.ground.data.names, np.maximum((most_S * below).astype(np.int64), 1).tolist(), strict=True))
