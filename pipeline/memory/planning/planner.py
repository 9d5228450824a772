"""The planner: the first remedies, in one fixed order, with which the whole data set fits.

A pure function of what an oracle says about the model. Micro-batches are as large as fit. The remedies are tried in the
order of counting: none, checkpointing, precision, both, offload, …, sharding. Only precision may go first: where an
estimate says that another one than the preferred is faster.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
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
    CardSpecs,
    Cuts,
    Figure,
    MemoryPlan,
    RemedyTrial,
    RemedyVerdict,
    Reserved,
)
from pipeline.memory.planning.oversize import without_oversize
from pipeline.memory.planning.step_estimates import epoch_s, live_only, micro_s, sample_steps, update_s, work_s
from pipeline.memory.planning.step_estimates import reserve as reserve_by_simulation
from pipeline.protocol import ITEMS
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeline.memory.footprint import Oracle
    from pipeline.memory.planning.memory_plan import CardSpec, DataSizes, Micros, PlanRequest
    from pipeline.memory.planning.step_estimates import Reserve

WORTH = 1.05  # another precision must be so many times as fast as the preferred one
SLACK = 1.10  # times the fastest epoch: fewer micro-batches are worth it, since kernels of few items are less efficient
_TURNS = 4  # times the budget is corrected for what the allocator holds beyond what is live
_FRAGMENTED = 1.02  # what is expected of it at first


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
        case = PlanCase(oracle, data, request, CardSpecs.of(cards), reserve)
        outcomes = case.outcomes()
        if outcomes[-1].found is not None:
            return case.plan(outcomes)
        _refuse(case, outcomes)
        frugal = min((outcome for outcome in outcomes if outcome.alone), key=lambda outcome: outcome.total)

        def planned(kept: DataSizes) -> MemoryPlan | None:
            tried = (other := replace(case, data=kept)).outcomes()
            return other.plan(tried) if tried[-1].found is not None else None

        bounds, memory = case.bounds, case.memory(frugal.choice)
        return without_oversize(BudgetSearch(memory, bounds), frugal.margin, case.limit, others, planned)


@contextmanager
def _old_objects_left_alone() -> Iterator[None]:
    """Freeze existing objects: traces make so much garbage that the collector would often go through all of them."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _either(wanted: bool | None) -> tuple[bool, ...]:  # noqa: FBT001 - a setting of three values
    return (False, True) if wanted is None else (wanted,)


def choices(request: PlanRequest) -> list[MemoryChoice]:
    """Return the choices that a request allows, in the order in which they are tried."""
    shards = (1, request.ranks) if request.shards is None and request.ranks > 1 else (request.shards or 1,)
    options = product(shards, _either(request.offload), request.precisions, _either(request.checkpointing))
    return [
        MemoryChoice(precision, checkpointing=checkpointing, offload=offload, shards=parts)
        for parts, offload, precision, checkpointing in options
    ]


def remedies(choice: MemoryChoice, request: PlanRequest) -> tuple[str, ...]:
    """Return the remedies of a choice in addition to smaller micro-batches, in words."""
    texts = (
        (choice.checkpointing, "checkpointing"),
        (choice.precision != request.precisions[0], f"precision {choice.precision}"),
        (choice.offload, "offload"),
        (choice.shards > 1, f"sharding over {choice.shards} ranks"),
    )
    return tuple(text for is_so, text in texts if is_so)


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of trying a choice; `found` is None where it does not fit."""

    choice: MemoryChoice
    verdict: RemedyVerdict
    why: str
    margin: Margin = field(default_factory=lambda: margin_of(Provenance.TRACED))
    alone: int = 0  # the live peak of the item that takes most alone; 0: it was not asked
    found: FoundBudget | None = None
    reserved: Reserved | None = None
    padding: float | None = None
    step_s: float = 0.0
    epoch_s: float = 0.0

    @property
    def total(self) -> int:
        """Return the bytes, margin included, that must be below the limit."""
        return ceil((self.reserved.bytes if self.reserved else self.alone) * self.margin.factor)

    def trial(self, request: PlanRequest) -> RemedyTrial:
        """Return the result for a report; where it does not fit, the total is that of the largest item alone."""
        total = Figure(self.total, self.margin.origin) if self.total else None
        time = Figure(self.epoch_s, Provenance.ASSUMED) if self.epoch_s else None
        remedy = " + ".join(("smaller micro-batches", *remedies(self.choice, request)))
        return RemedyTrial(remedy, self.choice, self.verdict, self.why, total, time)


@dataclass(frozen=True, eq=False)
class PlanCase:
    """One data set, and the oracle, request and cards to plan it for."""

    oracle: Oracle
    data: DataSizes
    request: PlanRequest
    cards: CardSpecs
    reserve: Reserve
    memories: dict[MemoryChoice, ChoiceMemory] = field(default_factory=dict)

    @property
    def limit(self) -> int:
        """Return the bytes that torch may reserve on the smallest card."""
        return self.cards.smallest.budget_bytes

    @cached_property
    def bounds(self) -> DataBounds:
        return DataBounds(self.data, self.request)

    def memory(self, choice: MemoryChoice) -> ChoiceMemory:
        return self.memories.setdefault(choice, ChoiceMemory(self.oracle, choice, (ITEMS, *self.data.names)))

    def margin(self, choice: MemoryChoice) -> Margin:
        """Return the margin for the oracle's answers about a choice so far."""
        request = self.request
        ratios = request.ratios if request.measured in (None, choice) else ()
        return margin_of(self.memory(choice).origin, ratios, caching=self.cards.caching, compiled=request.compiled)

    def outcomes(self) -> list[Outcome]:
        """Try the choices in order, up to the first that fits: it is the last."""
        outcomes: list[Outcome] = []
        for choice in choices(replace(self.request, precisions=self._precisions())):
            outcomes.append(self.tried(choice))
            if outcomes[-1].found is not None:
                break
        return outcomes

    def _precisions(self) -> tuple[str, ...]:
        """Return the allowed precisions, the fastest first if that is worth it for a rank's share of average items."""
        request, first = self.request, self.request.precisions[0]
        able = [precision for precision in request.precisions if self.cards.supports(precision)]
        if len(able) < 2 or not self.cards.supports(first):
            return request.precisions
        rates = {precision: self.cards.flops_per_s(precision) for precision in able}
        fastest = max(able, key=rates.__getitem__)
        if rates[fastest] <= WORTH * rates[first]:
            return request.precisions
        memory = self.memory(choices(replace(request, precisions=(fastest,)))[0])
        try:
            memory.micro(self.bounds.largest)  # before others: a model may fill tables for its largest item
            micro = memory.micro(self.bounds.mean(self.bounds.share))
        except (CannotRun, Unmeasurable):
            return request.precisions
        if work_s(micro, rates[first], self.cards) < WORTH * work_s(micro, rates[fastest], self.cards):
            return request.precisions
        return (fastest, *(precision for precision in request.precisions if precision != fastest))

    def tried(self, choice: MemoryChoice) -> Outcome:
        """Return the outcome of a choice: its largest budget, or why it does not fit."""
        if unsupported := self.unsupported(choice):
            return unsupported
        memory = self.memory(choice)
        try:
            standing = memory.standing
        except CannotRun as error:
            return Outcome(choice, RemedyVerdict.FAILS, error.what)
        except (Unmeasurable, PipelineError) as error:
            if choice.shards == 1:
                raise
            return Outcome(choice, RemedyVerdict.FAILS, str(error).partition("\n")[0])  # some models cannot be sharded
        margin = self.margin(choice)
        if standing.bytes * margin.factor > self.limit:
            why = f"parameters, gradients and optimizer state take {format_bytes(standing.bytes)}, whatever the batch"
            return Outcome(choice, RemedyVerdict.TOO_LARGE, why, margin)
        if BudgetSearch(memory, self.bounds).fits_uncut(self._usable(margin, _FRAGMENTED)):
            return self._budgeted(memory)
        alone = memory.peak_bytes(self.bounds.largest)
        margin = self.margin(choice)
        if alone * margin.factor > self.limit:
            why = f"the largest item alone takes {format_bytes(alone)}"
            return Outcome(choice, RemedyVerdict.TOO_LARGE, why, margin, alone)
        return self._budgeted(memory)

    def _usable(self, margin: Margin, fragmented: float) -> int:
        """Return the live bytes that fit below the limit, with the margin and what the allocator holds beyond them."""
        return int(self.limit / margin.factor / (fragmented if self.cards.caching else 1.0))

    def unsupported(self, choice: MemoryChoice) -> Outcome | None:
        lacking = [card.name for card in self.cards.cards if choice.precision not in card.flops_per_s]
        why = f"{', '.join(lacking)} does not support {choice.precision}"
        return Outcome(choice, RemedyVerdict.UNSUPPORTED, why) if lacking else None

    def _budgeted(self, memory: ChoiceMemory) -> Outcome:
        """Return the outcome with the best budget, lowered until what the allocator reserves fits too."""
        choice, fragmented = memory.choice, _FRAGMENTED
        margin = self.margin(choice)
        bounds, padding = self._padded(memory, self._usable(margin, fragmented))
        for _ in range(_TURNS):
            found = BudgetSearch(memory, bounds).find(self._usable(margin, fragmented))
            if found is None:
                break
            margin, reserved = self.margin(choice), live_only(found.live)
            if self.cards.caching:
                micros = [memory.micro(group.corner) for group in found.groups]
                reserved = self.reserve(memory.standing, sample_steps(found, micros, self.request.seed))
            if reserved.bytes * margin.factor > self.limit:
                fragmented = max(reserved.bytes / found.live, fragmented) * 1.002
            elif memory.confirm(found.worst):  # else what was computed was wrong: all is asked again
                found = replace(found, live=memory.peak_bytes(found.worst, accumulate=found.accumulate))
                times = self._times(memory, bounds, found.micros)
                why, chosen = found.limit.value, RemedyVerdict.CHOSEN
                return Outcome(choice, chosen, why, margin, 0, found, reserved, padding, *times)
        why = "no allowed micro-batch fits together with the allocator's reserve"
        return Outcome(choice, RemedyVerdict.TOO_LARGE, why, margin, memory.peak_bytes(self.bounds.largest))

    def _padded(self, memory: ChoiceMemory, limit: int) -> tuple[DataBounds, float | None]:
        """Return the data as it is cut best: into the fewest micro-batches whose padding costs little time."""
        if not self.data.looser:
            return self.bounds, self.data.padding
        model = BudgetSearch(memory, self.bounds).screened_model(limit)
        budget = max(int(limit - model.base), 1)
        cost_N = model.cost(self.data.sizes, budget)
        found: list[tuple[float, int, float]] = []
        for padding, cut in {self.data.padding or 1.0: self.data.cut, **self.data.looser}.items():
            micros = cut(self.data.sizes, cost_N, budget, self.request.ranks)
            found.append((self._times(memory, self.bounds, micros)[1], len(micros.step_M), padding))
        fastest_s = min(found)[0]
        _, padding = min((count, padding) for time_s, count, padding in found if time_s <= SLACK * fastest_s)
        if padding not in self.data.looser:
            return self.bounds, self.data.padding
        return DataBounds(self.data.padded_to(padding), self.request), padding

    def _times(self, memory: ChoiceMemory, bounds: DataBounds, micros: Micros) -> tuple[float, float]:
        """Return step and epoch times, from a fit to the micro-batches that the oracle was asked about."""
        standing, choice = memory.standing, memory.choice
        times = [micro_s(micro, standing, choice, self.cards) for micro in memory.micros.values()]
        launch_s = self.cards.slowest("launch_s", max) * min(micro.kernels for micro in memory.micros.values())
        model = bounds.fit(list(memory.micros), times, launch_s)
        time_M = bounds.terms.predict(model, micros.sizes_MS)
        return epoch_s(micros, time_M, update_s(standing, choice, self.cards, self.request.ranks))

    def plan(self, tried: Sequence[Outcome]) -> MemoryPlan:
        """Return the plan of the last choice that was tried, which fits."""
        request, outcome = self.request, tried[-1]
        found, reserved, choice, margin = outcome.found, outcome.reserved, outcome.choice, outcome.margin
        assert found is not None
        assert reserved is not None
        memory = self.memory(choice)
        micros = {group.corner: memory.micro(group.corner) for group in found.groups}
        per_share = found.micros.per_share()
        simulated = 1.0 if found.every_order else found.micros.epochs / (found.micros.epochs + 1)
        origin = least_sure((memory.standing.origin, *(micro.origin for micro in micros.values())))
        held = least_sure((origin, reserved.origin))
        untried = [one for one in choices(request) if one not in {outcome.choice for outcome in tried}]
        unneeded = [
            self.unsupported(one) or Outcome(one, RemedyVerdict.NOT_NEEDED, "an earlier remedy fits") for one in untried
        ]
        return MemoryPlan(
            request=request,
            cards=tuple(card.name for card in self.cards.cards),
            limit_bytes=self.limit,
            choice=choice,
            remedies=remedies(choice, request),
            cost_model=found.model,
            budget_bytes=found.budget,
            padding=outcome.padding,
            cuts=Cuts(
                items_median=float(np.median(found.micros.items_M)),
                items_most=int(found.micros.items_M.max()),
                steps_mean=float(per_share.mean()),
                steps_most=int(per_share.max()),
                limit=found.limit,
                every_order=found.every_order,
            ),
            live=Figure(found.live, origin),
            reserved=Figure(reserved.bytes, held),
            total=Figure(outcome.total, least_sure((held, margin.origin))),
            margin=margin,
            probability=Figure(margin.probability * simulated, margin.trust),
            allocator=reserved,
            parts=parts_at_peak(memory.standing, micros[found.worst], accumulate=found.accumulate),
            buckets=tuple(
                Bucket(
                    dict(zip(memory.names, row, strict=True)),
                    Figure(memory.peak_bytes(row, accumulate=found.accumulate), micro.origin),
                )
                for row, micro in micros.items()
            ),
            step_s=Figure(outcome.step_s, Provenance.ASSUMED),
            epoch_s=Figure(outcome.epoch_s, Provenance.ASSUMED),
            host_bytes=max(micro.host_bytes for micro in micros.values()),
            trials=tuple(outcome.trial(request) for outcome in (*tried, *unneeded)),
            notes=self._notes(memory, outcome, found),
        )

    def _notes(self, memory: ChoiceMemory, outcome: Outcome, found: FoundBudget) -> tuple[str, ...]:
        """Return the notes that say how far to trust the numbers."""
        order = (
            "it holds for the simulated order of items: the next epoch has a larger micro-batch "
            f"with a chance of 1/{found.micros.epochs + 1}"
        )
        cards = (note for card in self.cards.cards for note in card.notes)
        return (outcome.margin.why, *([] if found.every_order else [order]), *memory.notes, *cards)


def _refuse(case: PlanCase, outcomes: Sequence[Outcome]) -> None:
    """Raise where leaving out items would not help: no precision works, the state is too large, or a pinned batch."""
    untried = (RemedyVerdict.UNSUPPORTED, RemedyVerdict.FAILS)
    able = [outcome for outcome in outcomes if outcome.verdict not in untried]
    limit = f"{', '.join(card.name for card in case.cards.cards)} lets torch have {format_bytes(case.limit)}"
    if not able:
        why = "; ".join(dict.fromkeys(outcome.why for outcome in outcomes))
        if any(outcome.verdict is RemedyVerdict.FAILS for outcome in outcomes):
            raise PlanInfeasible(f"the model fails under every allowed setting: {why}")
        remedy = "allow fp32, or exclude the GPUs that lack it"
        raise ConfigError(f"no allowed precision works on every GPU: {why}", remedy=remedy)
    if not any(outcome.alone for outcome in able):
        least = min(case.memory(outcome.choice).standing.bytes for outcome in able)
        raise PlanInfeasible(
            f"the model alone, before any batch, takes at least {format_bytes(least)}; {limit}",
            remedy="allow sharding over several GPUs, use a larger GPU, or train fewer parameters",
        )
    pinned = case.request.micro_batch
    if pinned is not None and any(0 < outcome.alone * outcome.margin.factor <= case.limit for outcome in able):
        items = pinned // 2
        while items and replace(case, request=replace(case.request, micro_batch=items)).outcomes()[-1].found is None:
            items //= 2
        fits = f"{items} fit: set it to that, or " if items else ""
        raise ConfigError(
            f"micro-batches of {pinned} items do not fit under any allowed remedy; {limit}",
            remedy=f"{fits}let the planner choose",
        )


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
    """Return a plan for each stage; all share precision and sharding, which a run cannot change between stages.

    `given` is passed to `plan_memory`.
    """
    if not stages:
        raise ConfigError("a curriculum without stages", remedy="name at least one stage")

    def planned(wanted: PlanRequest) -> dict[str, MemoryPlan]:
        return {
            stage.name: plan_memory(
                stage.oracle or oracle, stage.data, replace(wanted, epochs=stage.epochs), cards, **given
            )
            for stage in stages
        }

    plans = planned(request)
    if len({(plan.choice.precision, plan.choice.shards) for plan in plans.values()}) == 1:
        return plans
    order = choices(request)
    needy = max((plan.choice for plan in plans.values()), key=order.index)
    return planned(replace(request, precisions=(needy.precision,), shards=needy.shards))
