"""The planner: how to train so that the whole data set fits, in the least time among what fits.

A pure function of what an oracle says about the model. Remedies are tried in one order: smaller micro-batches,
checkpointing, precision, offload, sharding. A later one is taken where it is needed, or faster by more than WORTH.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import ConfigError, PlanInfeasible
from pipeline.memory.footprint import Provenance, least_sure, parts_at_peak
from pipeline.memory.planning.budget_search import BudgetSearch
from pipeline.memory.planning.memory_plan import Bucket, CardSpecs, Figure, MemoryPlan, Oversize, RemedyVerdict
from pipeline.memory.planning.oracle_cache import OracleCache
from pipeline.memory.planning.remedies import (
    WORTH,
    ChoiceOutcome,
    ChoiceSearch,
    choices,
    crop_limits,
    outsized,
    remedies,
    too_large,
)
from pipeline.memory.planning.step_estimates import reserve as reserve_by_simulation
from pipeline.protocol import ITEMS
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeline.memory.footprint import Oracle
    from pipeline.memory.planning.budget_search import FoundBudget
    from pipeline.memory.planning.memory_plan import CardSpec, DataSizes, OversizeItem, PlanRequest
    from pipeline.memory.planning.step_estimates import Reserve


_TURNS = 3  # times more items are given up because those that were kept did not fit together with the allocator's own
_LOWER = 0.95  # of the limit, each time
_UNTRIED = (RemedyVerdict.UNSUPPORTED, RemedyVerdict.FAILS, RemedyVerdict.NOT_NEEDED)


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
        questions = OracleCache(oracle, (ITEMS, *data.names))
        search = ChoiceSearch(questions, data, request, CardSpecs.of(cards), reserve)
        best, outcomes = _best(search)
        if best is not None:
            return _plan(search, best, outcomes)
        _refuse(search, outcomes)
        return _without_oversize(search, outcomes, others)


@contextmanager
def _old_objects_left_alone() -> Iterator[None]:
    """Freeze existing objects: traces make so much garbage that the collector would often go through all of them."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _best(search: ChoiceSearch) -> tuple[ChoiceOutcome | None, list[ChoiceOutcome]]:
    """Search the choice that is estimated to be the fastest; where it does not fit after all, the next one."""
    outcomes = _estimates(search)
    while open_ := [outcome for outcome in outcomes if outcome.verdict is RemedyVerdict.SLOWER]:
        fastest = reduce(lambda best, other: other if other.epoch_s * WORTH < best.epoch_s else best, open_)
        searched = search.search(fastest)
        outcomes[outcomes.index(fastest)] = searched
        if searched.found is not None:
            return searched, outcomes
    return None, outcomes


def _estimates(search: ChoiceSearch) -> list[ChoiceOutcome]:
    """Estimate the choices in order, leaving out those that could not be faster than one that may fit."""
    best: ChoiceOutcome | None = None
    outcomes: list[ChoiceOutcome] = []
    for choice in choices(search.request):
        if best is not None and search.cards.supports(choice.precision):
            least_s = search.least_s(best, choice)
            if least_s * WORTH >= best.epoch_s:
                why = f"not faster: {least_s:.3g} s an epoch at least, {best.epoch_s:.3g} s without"
                outcomes.append(ChoiceOutcome(choice, RemedyVerdict.NOT_NEEDED, why))
                continue
        outcome = search.estimate(choice)
        outcomes.append(outcome)
        if outcome.verdict is RemedyVerdict.SLOWER and (best is None or outcome.epoch_s * WORTH < best.epoch_s):
            best = outcome
    return outcomes


def _plan(
    search: ChoiceSearch, best: ChoiceOutcome, tried: Sequence[ChoiceOutcome], **replacements: object
) -> MemoryPlan:
    """Return the plan of a choice that fits; `replacements` override its fields."""
    found, reserved, request, choice = best.found, best.reserved, search.request, best.choice
    assert found is not None
    assert reserved is not None
    standing = search.questions.standing(choice)
    origin = least_sure((standing.origin, *(micro.origin for micro in best.micros)))
    per_share = found.micros.per_share()
    hours = best.epoch_s * request.epochs * request.ranks / 3600
    of_order = 1.0 if found.every_order else found.micros.epochs / (found.micros.epochs + 1)
    plan = MemoryPlan(
        choice=choice,
        remedies=remedies(choice, request),
        cards=tuple(card.name for card in search.cards.cards),
        limit_bytes=search.limit,
        ranks=request.ranks,
        batch=request.batch,
        padded=search.data.padded,
        budget={"cost": found.budget},
        cost_weights={"item": 1.0} if request.micro_batch is not None else found.model.named(),
        base=Figure(found.model.base, Provenance.ASSUMED),
        micro_batch=request.micro_batch,
        items_median=float(np.median(found.micros.items_M)),
        items_most=int(found.micros.items_M.max()),
        accumulation_most=int(per_share.max()),
        accumulation_mean=float(per_share.mean()),
        micros=len(found.rows_MS),
        live=Figure(found.live, origin),
        reserved=Figure(reserved.bytes, least_sure((origin, reserved.origin))),
        total=Figure(best.total, least_sure((origin, reserved.origin, best.margin.origin))),
        used=reserved.bytes / search.limit,
        filled=found.filled,
        every_order=found.every_order,
        parts=parts_at_peak(standing, search.questions.micro(choice, found.worst), accumulate=found.accumulate),
        margin=best.margin,
        probability=Figure(best.margin.probability * of_order, best.margin.trust),
        allocator=reserved,
        step_s=Figure(best.step_s, Provenance.ASSUMED),
        epoch_s=Figure(best.epoch_s, Provenance.ASSUMED),
        gpu_hours=Figure(hours, Provenance.ASSUMED),
        host_bytes=max(micro.host_bytes for micro in best.micros),
        trials=tuple(outcome.trial(request) for outcome in tried),
        oversize=(),
        crop={},
        buckets=_buckets(search, best, found),
        questions=search.questions.asked,
        notes=_notes(search, best, found),
        padding=best.padding,
    )
    return replace(plan, **replacements)  # type: ignore[arg-type]


def _buckets(search: ChoiceSearch, best: ChoiceOutcome, found: FoundBudget) -> tuple[Bucket, ...]:
    cut = len(found.rows_MS)
    return tuple(
        Bucket(
            dict(zip(search.questions.names, group.corner, strict=True)),
            Figure(search.questions.peak_bytes(best.choice, group.corner, accumulate=found.accumulate), micro.origin),
            int((group.places < cut).sum()),
        )
        for group, micro in zip(found.groups, best.micros, strict=True)
    )


def _notes(search: ChoiceSearch, best: ChoiceOutcome, found: FoundBudget) -> tuple[str, ...]:
    """Return the notes that say how far to trust the numbers."""
    epochs = found.micros.epochs + 1
    order = (
        "it holds for the simulated order of items: the next epoch has a larger micro-batch "
        f"with a chance of 1/{epochs}"
    )
    cards = (note for card in search.cards.cards for note in card.notes)
    return (best.margin.why, *([] if found.every_order else [order]), *search.questions.notes(best.choice), *cards)


def _refuse(search: ChoiceSearch, outcomes: Sequence[ChoiceOutcome]) -> None:
    """Raise where leaving out items would not help: no precision works, the state is too large, or a pinned batch."""
    able = [outcome for outcome in outcomes if outcome.verdict not in _UNTRIED]
    limit = f"{', '.join(card.name for card in search.cards.cards)} lets torch have {format_bytes(search.limit)}"
    if not able:
        why = "; ".join(dict.fromkeys(outcome.why for outcome in outcomes))
        if any(outcome.verdict is RemedyVerdict.FAILS for outcome in outcomes):
            raise PlanInfeasible(f"the model fails under every allowed setting: {why}")
        remedy = "allow fp32, or exclude the GPUs that lack it"
        raise ConfigError(f"no allowed precision works on every GPU: {why}", remedy=remedy)
    if not any(outcome.alone for outcome in able):
        least = min(search.questions.standing(outcome.choice).bytes for outcome in able)
        raise PlanInfeasible(
            f"the model alone, before any batch, takes at least {format_bytes(least)}; {limit}",
            remedy="allow sharding over several GPUs, use a larger GPU, or train fewer parameters",
        )
    fits_alone = any(0 < outcome.alone * outcome.margin.factor <= search.limit for outcome in able)
    if search.request.micro_batch is not None and fits_alone:
        raise _pinned_too_large(search, limit)


def _pinned_too_large(search: ChoiceSearch, limit: str) -> ConfigError:
    """Return the error that says how many items would fit."""
    assert search.request.micro_batch is not None
    items = search.request.micro_batch // 2
    while items and _best(replace(search, request=replace(search.request, micro_batch=items)))[0] is None:
        items //= 2
    fits = f"{items} fit: set it to that, or " if items else ""
    return ConfigError(
        f"micro-batches of {search.request.micro_batch} items do not fit under any allowed remedy; {limit}",
        remedy=f"{fits}let the planner choose",
    )


def _without_oversize(
    search: ChoiceSearch, outcomes: Sequence[ChoiceOutcome], others: Sequence[CardSpec]
) -> MemoryPlan:
    """Raise an error that names the items that fit under no choice, or plan without them where that is allowed."""
    able = [outcome for outcome in outcomes if outcome.alone]
    frugal = min(able, key=lambda outcome: outcome.total)
    budget_search = BudgetSearch(search.questions, search.ground, frugal.choice)
    live = int(search.limit / frugal.margin.factor)
    first: tuple[OversizeItem, ...] | None = None
    for _ in range(_TURNS):
        items, keep_N = outsized(budget_search, live, frugal.margin, search.limit, others)
        first = items if first is None else first
        if items and search.request.oversize is Oversize.ERROR:
            raise too_large(items, search.data.items, search.limit)
        if items and (keep_N.any() or search.request.oversize is Oversize.CROP):
            crop = crop_limits(budget_search, live) if search.request.oversize is Oversize.CROP else {}
            kept = search.data.cropped(crop) if crop else search.data.only(keep_N)
            best, kept_outcomes = _best(replace(search, data=kept))
            if best is not None:
                return _plan(replace(search, data=kept), best, kept_outcomes, oversize=items, crop=crop)
        live = int(live * _LOWER)
    if first:  # later turns were below the limit
        raise too_large(first, search.data.items, search.limit)
    raise PlanInfeasible(
        f"nothing fits under the allowed settings: {'; '.join(dict.fromkeys(outcome.why for outcome in able))}",
        remedy="allow checkpointing, bf16, offload or sharding, or use a larger GPU",
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
    *,
    reserve: Reserve = reserve_by_simulation,
    others: Sequence[CardSpec] = (),
) -> dict[str, MemoryPlan]:
    """Return a plan for each stage; all share precision and sharding, which a run cannot change between stages."""
    if not stages:
        raise ConfigError("a curriculum without stages", remedy="name at least one stage")

    def planned_for(wanted: PlanRequest) -> dict[str, MemoryPlan]:
        return {
            stage.name: plan_memory(
                stage.oracle or oracle,
                stage.data,
                replace(wanted, epochs=stage.epochs),
                cards,
                reserve=reserve,
                others=others,
            )
            for stage in stages
        }

    plans = planned_for(request)
    if len({(plan.choice.precision, plan.choice.shards) for plan in plans.values()}) == 1:
        return plans
    order = choices(request)
    needy = max((plan.choice for plan in plans.values()), key=order.index)
    return planned_for(replace(request, precisions=(needy.precision,), shards=needy.shards))
