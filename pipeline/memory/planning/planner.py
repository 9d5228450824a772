"""The planner: the first remedies, in one fixed order, with which the whole data set fits.

A pure function of what an oracle says about the model. Micro-batches are as large as fit. The remedies are tried in the
order of counting: none, checkpointing, precision, both, offload, …, sharding; of checkpointing, as few blocks as fit.
Only precision may go first: where an estimate says that another one than the preferred is faster. Items that fit under
no remedy are named in an error, left out or cropped.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import ConfigError, PipelineError, PlanInfeasible
from pipeline.memory.footprint import (
    CannotRun,
    Margin,
    MemoryChoice,
    Provenance,
    Unmeasurable,
    least_sure,
    margin_of,
    parts_at_peak,
)
from pipeline.memory.planning.budget_search import BudgetSearch, ChoiceMemory, DataBounds, FoundBudget
from pipeline.memory.planning.memory_plan import (
    Bucket,
    CardSpec,
    Cuts,
    Figure,
    MemoryPlan,
    Offer,
    Oversize,
    OversizeItem,
    PlannedOffer,
    RemedyTrial,
    RemedyVerdict,
    Reserved,
    weakest,
)
from pipeline.memory.planning.step_estimates import epoch_s, micro_s, sample_steps, update_s, work_s
from pipeline.memory.planning.step_estimates import reserve as reserve_by_simulation
from pipeline.protocol import ITEMS
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeline.memory.footprint import Oracle
    from pipeline.memory.planning.memory_plan import DataSizes, Micros, PlanRequest
    from pipeline.memory.planning.step_estimates import Reserve

WORTH = 1.05  # another precision must be faster than the preferred one by this factor
SLACK = 1.10  # times the fastest epoch: fewer micro-batches are worth it, since kernels of few items are less efficient
_TURNS = 4  # corrections of the budget for memory that the allocator holds beyond live tensors
_FRAGMENTED = 1.02  # the first guess of reserved over live bytes
SHOWN = 3  # items that do not fit are named in an error
_LOWER = 0.95  # of the limit, each time that the others did not fit together with what the allocator adds
_OVERSIZE_TURNS, _HALVINGS = 3, 7


def plan_memory(
    oracle: Oracle,
    data: DataSizes,
    request: PlanRequest,
    cards: Sequence[CardSpec],
    *,
    reserve: Reserve = reserve_by_simulation,
    others: Sequence[CardSpec] = (),
) -> MemoryPlan:
    """Return the plan for all cards a job may land on; error texts suggest one of `others` where only they would do."""
    request.check(data)
    with _old_objects_left_alone():
        case = PlanCase(oracle, data, request, cards, reserve)
        plan = case.plan()
        if plan is not None:
            return plan
        _refuse(case)
        return _without_oversize(case, others)


@contextmanager
def _old_objects_left_alone() -> Iterator[None]:
    """Freeze existing objects: traces make much garbage, and each collection would visit all objects."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def choices(request: PlanRequest) -> list[MemoryChoice]:
    """Return the choices that a request allows, in the order in which they are tried."""
    shards = (1, request.ranks) if request.shards is None and request.ranks > 1 else (request.shards or 1,)
    blocks = dict.fromkeys((0, request.blocks)) if request.checkpointing is None else (request.checkpointing,)
    offloads = (False, True) if request.offload is None else (request.offload,)
    options = product(shards, offloads, request.precisions, blocks)
    return [
        MemoryChoice(precision, checkpointing=checkpointing, offload=offload, shards=parts)
        for parts, offload, precision, checkpointing in options
    ]


def remedies(choice: MemoryChoice, request: PlanRequest) -> tuple[str, ...]:
    """Return the remedies of a choice in addition to smaller micro-batches, in words."""
    some = f" {choice.checkpointing} of {request.blocks} blocks" if choice.checkpointing < request.blocks else ""
    texts = (
        (choice.checkpointing > 0, f"checkpointing{some}"),
        (choice.precision != request.precisions[0], f"precision {choice.precision}"),
        (choice.offload, "offload"),
        (choice.shards > 1, f"sharding over {choice.shards} ranks"),
    )
    return tuple(text for is_so, text in texts if is_so)


@dataclass(frozen=True, eq=False)
class PlanCase:
    """One data set, and the oracle, request and cards to plan it for."""

    oracle: Oracle
    data: DataSizes
    request: PlanRequest
    cards: Sequence[CardSpec]
    reserve: Reserve
    memories: dict[MemoryChoice, ChoiceMemory] = field(default_factory=dict)
    trials: list[RemedyTrial] = field(init=False, default_factory=list)  # of choices that do not fit

    @cached_property
    def card(self) -> CardSpec:
        return weakest(self.cards)

    @property
    def limit(self) -> int:
        """Return the bytes that torch may reserve on the smallest card."""
        return self.card.budget_bytes

    @cached_property
    def bounds(self) -> DataBounds:
        return DataBounds(self.data, self.request)

    def memory(self, choice: MemoryChoice) -> ChoiceMemory:
        return self.memories.setdefault(choice, ChoiceMemory(self.oracle, choice, (ITEMS, *self.data.names)))

    def margin(self, choice: MemoryChoice) -> Margin:
        """Return the margin for the oracle's answers about a choice so far."""
        request = self.request
        ratios = request.ratios if request.measured in (None, choice) else ()
        return margin_of(self.memory(choice).origin, ratios, caching=self.card.caching, compiled=request.compiled)

    def plan(self) -> MemoryPlan | None:
        """Try the choices in order, up to the first that fits; None if none does."""
        for choice in choices(replace(self.request, precisions=self._precisions())):
            tried = self._tried(choice)
            if isinstance(tried, MemoryPlan):
                return self._with_fewest_blocks(tried)
            self.trials.append(tried)
        return None

    def _with_fewest_blocks(self, plan: MemoryPlan) -> MemoryPlan:
        """Return the plan that checkpoints as few blocks as fit, if that is no slower, in place of one for all.

        What a block keeps is about the same for each, so that a line says where to begin; only what fits is chosen.
        """
        none, fits = 0, plan.choice.checkpointing  # numbers of blocks that do not fit, and that fit
        if self.request.checkpointing is not None or plan.live.origin is Provenance.EXTRAPOLATED:  # that takes minutes
            return plan
        none_bytes, all_bytes = (
            self.memory(replace(plan.choice, checkpointing=blocks)).peak_bytes(self.bounds.largest)
            for blocks in (none, fits)
        )
        over_bytes = none_bytes - self._usable(plan.choice, _FRAGMENTED)
        tried, step, best = ceil(fits * over_bytes / max(none_bytes - all_bytes, 1)), 1, plan
        while fits - none > 1:
            tried = min(max(tried, none + 1), fits - 1)
            found = self._tried(replace(plan.choice, checkpointing=tried))
            if isinstance(found, MemoryPlan):
                best, fits, tried = found, tried, tried - step
            else:
                none, tried = tried, tried + step
            step *= 2
        return best if best.epoch_s.value <= plan.epoch_s.value else plan

    def _trial(self, choice: MemoryChoice, verdict: RemedyVerdict, why: str, total: float = 0) -> RemedyTrial:
        """Return the result of a choice for a report; where it does not fit, with the total of the largest item."""
        remedy = " + ".join(("smaller micro-batches", *remedies(choice, self.request)))
        figure = Figure(ceil(total), self.margin(choice).origin) if total else None
        return RemedyTrial(remedy, choice, verdict, why, figure)

    def _precisions(self) -> tuple[str, ...]:
        """Return the allowed precisions, the fastest first if that is worth it for a rank's share of average items."""
        request, first, rates = self.request, self.request.precisions[0], self.card.flops_per_s
        fastest = max((precision for precision in request.precisions if precision in rates), key=rates.get, default="")  # type: ignore[arg-type]
        if first not in rates or rates[fastest] <= WORTH * rates[first]:
            return request.precisions
        memory = self.memory(choices(replace(request, precisions=(fastest,)))[0])
        try:
            memory.micro(self.bounds.largest)  # before others: a model may fill tables for its largest item
            micro = memory.micro(self.bounds.mean(self.bounds.share))
        except (CannotRun, Unmeasurable):
            return request.precisions
        if work_s(micro, first, self.card) < WORTH * work_s(micro, fastest, self.card):
            return request.precisions
        return (fastest, *(precision for precision in request.precisions if precision != fastest))

    def _tried(self, choice: MemoryChoice) -> RemedyTrial | MemoryPlan:
        """Return the plan with a choice, or why it does not fit."""
        if unsupported := self._unsupported(choice):
            return unsupported
        memory, too_large = self.memory(choice), partial(self._trial, choice, RemedyVerdict.TOO_LARGE)
        try:
            standing = memory.standing
        except CannotRun as error:
            return self._trial(choice, RemedyVerdict.FAILS, error.what)
        except (Unmeasurable, PipelineError) as error:
            if choice.shards == 1:
                raise
            return self._trial(choice, RemedyVerdict.FAILS, str(error).partition("\n")[0])  # it cannot be sharded
        if standing.bytes * self.margin(choice).factor > self.limit:
            size = format_bytes(standing.bytes)
            return too_large(f"parameters, gradients and optimizer state take {size}, whatever the batch")
        largest = self.bounds.largest
        if not BudgetSearch(memory, self.bounds).fits_uncut(self._usable(choice, _FRAGMENTED)):
            alone = memory.peak_bytes(largest)
            total = alone * self.margin(choice).factor
            if total > self.limit:
                return too_large(f"the largest item alone takes {format_bytes(alone)}", total)
        plan = self._budgeted(memory)
        if plan is not None:
            return plan
        total = memory.peak_bytes(largest) * self.margin(choice).factor
        return too_large("no allowed micro-batch fits together with the allocator's reserve", total)

    def _unsupported(self, choice: MemoryChoice) -> RemedyTrial | None:
        lacking = [card.name for card in self.cards if choice.precision not in card.flops_per_s]
        why = f"{', '.join(lacking)} does not support {choice.precision}"
        return self._trial(choice, RemedyVerdict.UNSUPPORTED, why) if lacking else None

    def _usable(self, choice: MemoryChoice, fragmented: float) -> int:
        """Return the live bytes that fit below the limit, with the margin and what the allocator holds beyond them."""
        return int(self.limit / self.margin(choice).factor / (fragmented if self.card.caching else 1.0))

    def _budgeted(self, memory: ChoiceMemory) -> MemoryPlan | None:
        """Return the plan with the largest budget, lowered until what the allocator reserves fits too."""
        choice, fragmented = memory.choice, _FRAGMENTED
        bounds = self._padded(memory, self._usable(choice, fragmented))
        for _ in range(_TURNS):
            found = BudgetSearch(memory, bounds).find(self._usable(choice, fragmented))
            if found is None:
                break
            reserved = Reserved(found.live, origin=Provenance.TRACED)
            if self.card.caching:
                micros = [memory.micro(group.corner) for group in found.groups]
                reserved = self.reserve(memory.standing, sample_steps(found, micros, self.request.seed))
            if reserved.bytes * self.margin(choice).factor > self.limit:
                fragmented = max(reserved.bytes / found.live, fragmented) * 1.002
            elif memory.confirm(found.worst):  # the interpolated answer was wrong: search again
                return self._plan(memory, bounds, found, reserved)
        return None

    def _padded(self, memory: ChoiceMemory, limit: int) -> DataBounds:
        """Return the data as it is cut best: into the fewest micro-batches whose padding costs little time."""
        if not self.data.looser:
            return self.bounds
        model = BudgetSearch(memory, self.bounds).screened_model(limit)
        budget = max(int(limit - model.base), 1)
        cost_N = model.cost(self.data.sizes, budget)
        ways = {self.data.padding: self.data.cut, **self.data.looser}
        found: list[tuple[float, int, float | None]] = []
        for padding, cut in ways.items():
            micros = cut(self.data, cost_N, budget, self.request.ranks)
            found.append((self._times(memory, self.bounds, micros)[1], len(micros.step_M), padding))
        fastest_s = min(time_s for time_s, *_ in found)
        *_, padding = min((way for way in found if way[0] <= SLACK * fastest_s), key=lambda way: way[1])
        return DataBounds(replace(self.data, cut=ways[padding], padding=padding), self.request)

    def _times(self, memory: ChoiceMemory, bounds: DataBounds, micros: Micros) -> tuple[float, float]:
        """Return step and epoch times, from a fit to the micro-batches that the oracle was asked about."""
        standing, choice = memory.standing, memory.choice
        times = [micro_s(micro, standing, choice, self.card) for micro in memory.micros.values()]
        launch_s = self.card.launch_s * min(micro.kernels for micro in memory.micros.values())
        time_M = bounds.terms.predict(bounds.terms.fit(list(memory.micros), times, launch_s), micros.sizes_MS)
        return epoch_s(micros, time_M, update_s(standing, choice, self.card, self.request.ranks))

    def _plan(self, memory: ChoiceMemory, bounds: DataBounds, found: FoundBudget, reserved: Reserved) -> MemoryPlan:
        request, choice, margin = self.request, memory.choice, self.margin(memory.choice)
        peak_bytes = partial(memory.peak_bytes, accumulate=found.micros.accumulate)
        micros = {group.corner: memory.micro(group.corner) for group in found.groups}
        origin = least_sure((memory.standing.origin, *(micro.origin for micro in micros.values())))
        held = least_sure((origin, reserved.origin))
        total = Figure(ceil(reserved.bytes * margin.factor), least_sure((held, margin.origin)))
        step_s, whole_s = (Figure(seconds, Provenance.ASSUMED) for seconds in self._times(memory, bounds, found.micros))
        chosen = self._trial(choice, RemedyVerdict.CHOSEN, found.limit.value)
        chosen = replace(chosen, total=Figure(total.value, margin.origin), epoch_s=whole_s)
        tried = {trial.choice for trial in (*self.trials, chosen)}
        unneeded = partial(self._trial, verdict=RemedyVerdict.NOT_NEEDED, why="an earlier remedy fits")
        others = [self._unsupported(other) or unneeded(other) for other in choices(request) if other not in tried]
        return MemoryPlan(
            request=request,
            cards=tuple(card.name for card in self.cards),
            limit_bytes=self.limit,
            choice=choice,
            remedies=remedies(choice, request),
            cost_model=found.model,
            budget_bytes=found.budget,
            padding=bounds.data.padding,
            cuts=Cuts.of(found.micros, found.limit),
            live=Figure(peak_bytes(found.worst), origin),
            reserved=Figure(reserved.bytes, held),
            total=total,
            margin=margin,
            probability=Figure(margin.probability, margin.trust),
            allocator=reserved,
            parts=parts_at_peak(memory.standing, micros[found.worst], accumulate=found.micros.accumulate),
            buckets=tuple(
                Bucket(memory.sizes(row), Figure(peak_bytes(row), micro.origin)) for row, micro in micros.items()
            ),
            step_s=step_s,
            epoch_s=whole_s,
            host_bytes=max(micro.host_bytes for micro in micros.values()),
            trials=(*self.trials, chosen, *others),
            notes=(margin.why, *memory.notes, *self.card.notes),
        )


def _refuse(case: PlanCase) -> None:
    """Raise where leaving out items would not help: no precision works, the state is too large, or a pinned batch."""
    able = [trial for trial in case.trials if trial.verdict is RemedyVerdict.TOO_LARGE]
    limit = f"{case.card.name} lets torch have {format_bytes(case.limit)}"
    if not able:
        why = "; ".join(dict.fromkeys(trial.why for trial in case.trials))
        if any(trial.verdict is RemedyVerdict.FAILS for trial in case.trials):
            raise PlanInfeasible(f"the model fails under every allowed setting: {why}")
        remedy = "allow fp32, or exclude the GPUs that lack it"
        raise ConfigError(f"no allowed precision works on every GPU: {why}", remedy=remedy)
    if not any(trial.total for trial in able):
        least = min(case.memory(trial.choice).standing.bytes for trial in able)
        raise PlanInfeasible(
            f"the model alone, before any batch, takes at least {format_bytes(least)}; {limit}",
            remedy="allow sharding over several GPUs, use a larger GPU, or train fewer parameters",
        )
    pinned = case.request.micro_batch
    if pinned is not None and any(trial.total and trial.total.value <= case.limit for trial in able):
        items = pinned // 2
        while items and replace(case, request=replace(case.request, micro_batch=items)).plan() is None:
            items //= 2
        fits = f"{items} fit: set it to that, or " if items else ""
        raise ConfigError(
            f"micro-batches of {pinned} items do not fit under any allowed remedy; {limit}",
            remedy=f"{fits}let the planner choose",
        )


def _without_oversize(case: PlanCase, others: Sequence[CardSpec]) -> MemoryPlan:
    """Plan without the items that do not fit, or with cropped ones; raise an error that names them if wanted."""
    _, number = min((trial.total.value, number) for number, trial in enumerate(case.trials) if trial.total)
    memory, data, wanted = case.memory(case.trials[number].choice), case.data, case.request.oversize
    live, first = int(case.limit / case.margin(memory.choice).factor), tuple[OversizeItem, ...]()
    for _ in range(_OVERSIZE_TURNS):
        items = _oversize_items(case, memory, live, others)
        first = first or items
        if wanted is Oversize.ERROR:
            break
        crop = _crop_limits(case.bounds, memory, live) if items and wanted is Oversize.CROP else {}
        keep_N = ~np.isin(np.arange(data.items), [item.item for item in items])
        if items and (crop or keep_N.any()):
            plan = replace(case, data=data.cropped(crop) if crop else data.only(keep_N)).plan()
            if plan is not None:
                return replace(plan, oversize=items, crop=crop)
        live = int(live * _LOWER)
    if first:
        named = {item.id: item for item in first}  # an item that an epoch draws several times has several rows
        raise _too_large([*named.values()], data.distinct, case.limit)
    raise PlanInfeasible(
        "nothing fits under the allowed settings: no allowed micro-batch fits together with the allocator's reserve",
        remedy="allow checkpointing, bf16, offload or sharding, or use a larger GPU",
    )


def _too_large(items: Sequence[OversizeItem], count: int, limit: int) -> PlanInfeasible:
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


def _oversize_items(
    case: PlanCase, memory: ChoiceMemory, limit: int, others: Sequence[CardSpec]
) -> tuple[OversizeItem, ...]:
    """Return the items whose live peak alone is above a limit, the largest first.

    Items are ordered by predicted peak; bisection with the oracle finds where the limit is passed.
    """
    bounds, margin, sizes_NS = case.bounds, case.margin(memory.choice), case.bounds.sizes_NS
    by_sum_N = np.argsort(sizes_NS.sum(axis=1), kind="stable")
    for place in (0.5, 0.9, 0.99):
        memory.peak_bytes(bounds.alone(int(by_sum_N[int(place * (len(sizes_NS) - 1))])))
    predicted_N = bounds.terms.predict(BudgetSearch(memory, bounds).model(), np.insert(sizes_NS, 0, 1, axis=1))
    order = np.argsort(-predicted_N, kind="stable").tolist()
    asked = {order[0]: memory.peak_bytes(bounds.alone(order[0]))}
    low, high = 0, len(order)  # the first `low` are over, from `high` on none is
    while low < high:
        middle = (low + high) // 2
        asked[order[middle]] = memory.peak_bytes(bounds.alone(order[middle]))
        low, high = (middle + 1, high) if asked[order[middle]] > limit else (low, middle)
    items: list[OversizeItem] = []
    live = 0.0
    for item in reversed(order[:low]):  # only the smallest was asked; larger ones take at least as much
        live = max(live, asked.get(item, predicted_N[item]))
        total_bytes = ceil(live * max(margin.factor, case.limit / limit))  # an allocator may hold more than is live
        total = Figure(total_bytes, margin.origin if item in asked else Provenance.ASSUMED)
        sizes = dict(zip(bounds.data.names, sizes_NS[item].tolist(), strict=True))
        remedy = f"use a GPU that lets torch have {format_bytes(total_bytes, above=case.limit)}"
        for card in sorted(others, key=lambda card: -card.budget_bytes):  # the smallest that is enough
            if card.budget_bytes >= total_bytes:
                remedy = f"use a GPU such as {card.name}, which lets torch have {format_bytes(card.budget_bytes)}"
        items.append(OversizeItem(item, bounds.data.called(item), sizes, total, case.limit, remedy))
    return tuple(reversed(items))


def _crop_limits(bounds: DataBounds, memory: ChoiceMemory, limit: int) -> dict[str, int]:
    """Return a limit for each size such that an item at all limits fits alone."""
    most_S, below, above = bounds.sizes_NS.max(axis=0), 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (below + above) / 2
        row = (1, *np.maximum((most_S * middle).astype(np.int64), 1).tolist())
        below, above = (middle, above) if memory.peak_bytes(row) <= limit else (below, middle)
    return dict(zip(bounds.data.names, np.maximum((most_S * below).astype(np.int64), 1).tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class CurriculumStage:
    """A stage of a curriculum: its items, and for how many epochs."""

    name: str
    data: DataSizes
    epochs: int = 1
    oracle: Oracle | None = None  # where another step is made of them than in the last stage


def plan_stages(
    oracle: Oracle,
    stages: Sequence[CurriculumStage],
    request: PlanRequest,
    cards: Sequence[CardSpec],
    **given: Any,
) -> dict[str, MemoryPlan]:
    """Return a plan for each stage; all share the choice of settings, which a run cannot change between stages.

    `given` is passed to `plan_memory`.
    """

    def planned(wanted: PlanRequest) -> dict[str, MemoryPlan]:
        plans = {}
        for stage in stages:
            for_stage = replace(wanted, epochs=stage.epochs)
            plans[stage.name] = plan_memory(stage.oracle or oracle, stage.data, for_stage, cards, **given)
        return plans

    plans = planned(request)
    chosen = {plan.choice for plan in plans.values()}
    if len(chosen) == 1:
        return plans
    return planned(
        replace(
            request,
            precisions=(max((choice.precision for choice in chosen), key=request.precisions.index),),
            checkpointing=max(choice.checkpointing for choice in chosen),
            offload=any(choice.offload for choice in chosen),
            shards=max(choice.shards for choice in chosen),
        )
    )


def compare_offers(
    oracle: Oracle,
    data: DataSizes,
    request: PlanRequest,
    offers: Sequence[Offer],
    *,
    reserve: Reserve = reserve_by_simulation,
) -> list[PlannedOffer]:
    """Return offers with their plans, the cheapest in GPU-hours first, those without one last."""
    planned = []
    for offer in offers:
        shards = request.shards if request.shards in (None, 1) else offer.ranks
        wanted = replace(request, ranks=offer.ranks, shards=shards)
        try:
            planned.append(PlannedOffer(offer, plan_memory(oracle, data, wanted, offer.cards, reserve=reserve)))
        except PipelineError as error:
            planned.append(PlannedOffer(offer, None, error.what))
    return sorted(planned, key=lambda offer: offer.gpu_hours.value if offer.gpu_hours else float("inf"))
