"""Tables for people who decide: batch configurations on cards of several sizes, and GPU-hours side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError
from pipeline.memory.footprint import (
    Category,
    MemoryChoice,
    MemoryPart,
    Provenance,
    least_sure,
    margin_of,
    parts_at_peak,
)
from pipeline.memory.planning.memory_plan import Figure
from pipeline.memory.planning.oracle_cache import OracleCache
from pipeline.memory.planning.planner import plan_memory
from pipeline.memory.planning.step_estimates import live_only
from pipeline.memory.planning.step_estimates import reserve as reserve_by_simulation
from pipeline.protocol import ITEMS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.memory.footprint import MicroFootprint, Oracle, StandingFootprint
    from pipeline.memory.planning.memory_plan import CardSpec, DataSizes, MemoryPlan, PlanRequest
    from pipeline.memory.planning.step_estimates import Reserve


_PLAYED = 3  # steps: the first makes the optimizer's state, the later ones show what that breaks up
_DISTINCT = 2  # micro-batches of a step: the first makes the gradients, all others are alike


@dataclass(frozen=True, slots=True)
class Configuration:
    """A micro-batch size and an accumulation count, their memory, and the cards on which they fit."""

    items: int
    accumulation: int
    live: Figure
    reserved: Figure
    total: Figure
    parts: tuple[MemoryPart, ...]
    fits: Mapping[str, bool]  # by card


def compare_configurations(
    oracle: Oracle,
    configurations: Sequence[tuple[int, int]],
    cards: Sequence[CardSpec],
    item: Mapping[str, int],
    *,
    padded: bool = True,
    choice: MemoryChoice | None = None,
    request: PlanRequest | None = None,
    reserve: Reserve = reserve_by_simulation,
) -> list[Configuration]:
    """Return the memory of each (items, accumulation) pair; a `request` brings the ratios of past runs."""
    choice, questions = choice or MemoryChoice(), OracleCache(oracle, (ITEMS, *item))
    caching, ratios = any(card.caching for card in cards), request.ratios if request is not None else ()
    rows = []
    for items, accumulation in configurations:
        sizes = (items, *(size if padded else items * size for size in item.values()))
        standing, micro = questions.standing(choice), questions.micro(choice, sizes)
        live = questions.peak_bytes(choice, sizes, accumulate=accumulation > 1)
        reserved = reserve(standing, [[micro] * min(accumulation, _DISTINCT)] * _PLAYED) if caching else live_only(live)
        origin = least_sure((standing.origin, micro.origin))
        margin = margin_of(origin, ratios, caching=caching, compiled=request is not None and request.compiled)
        total = ceil(reserved.bytes * margin.factor)
        row = Configuration(
            items,
            accumulation,
            Figure(live, origin),
            Figure(reserved.bytes, least_sure((origin, reserved.origin))),
            Figure(total, least_sure((origin, reserved.origin, margin.origin))),
            _parts(standing, micro, live, accumulate=accumulation > 1),
            {card.name: total <= card.budget_bytes for card in cards},
        )
        rows.append(row)
    return rows


def _parts(
    standing: StandingFootprint, micro: MicroFootprint, live: int, *, accumulate: bool
) -> tuple[MemoryPart, ...]:
    """Return the parts that sum to a live peak; with a single micro-batch, not all gradients exist at the peak."""
    parts = parts_at_peak(standing, micro, accumulate=accumulate)
    more = live - sum(part.bytes for part in parts)
    if more > 0:
        return (*parts, MemoryPart(Category.TEMPORARIES, "of a run's first update", more))
    gradients = next((part for part in parts if part.category is Category.GRADIENTS and part.bytes > -more), None)
    return tuple(replace(part, bytes=part.bytes + more) if part is gradients else part for part in parts)


@dataclass(frozen=True, slots=True)
class Offer:
    """A number of GPUs that could be requested."""

    name: str
    ranks: int
    cards: tuple[CardSpec, ...]


@dataclass(frozen=True, slots=True)
class PlannedOffer:
    """An offer with its plan, or with the reason why there is none."""

    offer: Offer
    plan: MemoryPlan | None
    why: str = ""

    @property
    def gpu_hours(self) -> Figure | None:
        return self.plan.gpu_hours if self.plan else None

    @property
    def hours(self) -> Figure | None:
        """Return the wall-clock hours of a run."""
        if self.plan is None:
            return None
        return Figure(self.plan.gpu_hours.value / self.offer.ranks, Provenance.ASSUMED)


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
        try:
            wanted = replace(request, ranks=offer.ranks, shards=shards)
            planned.append(PlannedOffer(offer, plan_memory(oracle, data, wanted, offer.cards, reserve=reserve)))
        except PipelineError as error:
            planned.append(PlannedOffer(offer, None, error.what))
    return sorted(planned, key=lambda offer: offer.plan.gpu_hours.value if offer.plan else float("inf"))
