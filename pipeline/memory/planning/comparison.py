"""Tables for people who decide: batch configurations on cards of several sizes, and GPU-hours side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError
from pipeline.memory.footprint import MemoryChoice, Provenance, least_sure, margin_of
from pipeline.memory.planning.budget_search import ChoiceMemory
from pipeline.memory.planning.memory_plan import Figure
from pipeline.memory.planning.planner import plan_memory
from pipeline.memory.planning.step_estimates import live_only
from pipeline.memory.planning.step_estimates import reserve as reserve_by_simulation
from pipeline.protocol import ITEMS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.memory.footprint import Oracle
    from pipeline.memory.planning.memory_plan import CardSpec, DataSizes, MemoryPlan, PlanRequest
    from pipeline.memory.planning.step_estimates import Reserve

_SIMULATED = 3  # steps: the first makes the optimizer's state, the later ones show how that fragments memory
_DISTINCT = 2  # micro-batches of a step: the first makes the gradients, all others are alike


@dataclass(frozen=True, slots=True)
class Configuration:
    """A micro-batch size and an accumulation count, their memory, and the cards on which they fit."""

    items: int
    accumulation: int
    live: Figure
    reserved: Figure
    total: Figure
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
    """Return the memory of each (items, micro-batches) pair; a `request` brings the ratios of past runs."""
    choice = choice or MemoryChoice()
    memory = ChoiceMemory(oracle, choice, (ITEMS, *item))
    caching, ratios = any(card.caching for card in cards), request.ratios if request is not None else ()
    rows = []
    for items, accumulation in configurations:
        micro = memory.micro(row := (items, *(size if padded else items * size for size in item.values())))
        live = memory.peak_bytes(row, accumulate=accumulation > 1)
        steps = [[micro] * min(accumulation, _DISTINCT)] * _SIMULATED
        reserved = reserve(memory.standing, steps) if caching else live_only(live)
        origin = least_sure((memory.standing.origin, micro.origin))
        margin = margin_of(origin, ratios, caching=caching, compiled=request is not None and request.compiled)
        total, held = ceil(reserved.bytes * margin.factor), least_sure((origin, reserved.origin))
        rows.append(
            Configuration(
                items,
                accumulation,
                Figure(live, origin),
                Figure(reserved.bytes, held),
                Figure(total, least_sure((held, margin.origin))),
                {card.name: total <= card.budget_bytes for card in cards},
            )
        )
    return rows


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
