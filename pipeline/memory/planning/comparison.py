"""Tables for people who decide: batch configurations on cards of several sizes, and GPU-hours side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import PipelineError
from pipeline.memory.footprint import Category, Choice, Origin, Part, compiled, least_sure, margin_of, parts_at_peak
from pipeline.memory.planning.memory_plan import Figure
from pipeline.memory.planning.planner import Questions, plan
from pipeline.memory.planning.reserved_memory import live_only
from pipeline.memory.planning.reserved_memory import reserve as reserve_by_simulation
from pipeline.protocol import ITEMS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.memory.footprint import Margin, Micro, Oracle, Standing
    from pipeline.memory.planning.memory_plan import Plan
    from pipeline.memory.planning.request import Card, Cards, Data, Micros, Request
    from pipeline.memory.planning.reserved_memory import Reserve

    Floats = NDArray[np.float64]

_PLAYED = 3  # steps: the first makes the optimizer's state, the later ones show what that breaks up


@dataclass(frozen=True, slots=True)
class Configuration:
    """Micro-batches of so many items, accumulated so many times, and on which cards that fits."""

    items: int
    accumulation: int
    live: Figure
    reserved: Figure
    total: Figure
    parts: tuple[Part, ...]
    fits: Mapping[str, bool]  # by card

    @property
    def effective(self) -> int:
        """Return the items of a rank's step."""
        return self.items * self.accumulation


def table(
    oracle: Oracle,
    configurations: Sequence[tuple[int, int]],
    cards: Sequence[Card],
    item: Mapping[str, int],
    *,
    padded: bool = True,
    choice: Choice | None = None,
    ratios: Sequence[float] = (),
    is_compiled: bool = False,
    reserve: Reserve = reserve_by_simulation,
) -> list[Configuration]:
    """Return what each configuration of items of one size takes."""
    choice = choice or Choice()
    questions = Questions(oracle, (ITEMS, *item))

    def margin(origin: Origin) -> Margin:
        plain = margin_of(origin, ratios, caching=any(card.caching for card in cards))
        return compiled(plain) if is_compiled else plain

    return [_row(questions, choice, one, cards, item, padded, margin, reserve) for one in configurations]


def _row(
    questions: Questions,
    choice: Choice,
    configuration: tuple[int, int],
    cards: Sequence[Card],
    item: Mapping[str, int],
    padded: bool,  # noqa: FBT001 - of the table
    margin_for: Callable[[Origin], Margin],
    reserve: Reserve,
) -> Configuration:
    items, accumulation = configuration
    sizes = (items, *(size if padded else items * size for size in item.values()))
    standing, micro = questions.standing(choice), questions.micro(choice, sizes)
    live = questions.peak_bytes(choice, sizes, accumulate=accumulation > 1)
    caching = any(card.caching for card in cards)
    held = reserve(standing, [[micro] * min(accumulation, _PLAYED)] * _PLAYED) if caching else live_only(live)
    origin = least_sure((standing.origin, micro.origin))
    margin = margin_for(origin)
    total = ceil(held.bytes * margin.factor)
    return Configuration(
        items,
        accumulation,
        Figure(live, origin),
        Figure(held.bytes, least_sure((origin, held.origin))),
        Figure(total, least_sure((origin, held.origin, margin.origin))),
        _parts(standing, micro, live, accumulate=accumulation > 1),
        {card.name: total <= card.budget_bytes for card in cards},
    )


def _parts(standing: Standing, micro: Micro, live: int, *, accumulate: bool) -> tuple[Part, ...]:
    """Return what a live peak is made of; in a step's only micro-batch not all gradients are there at the peak."""
    parts = parts_at_peak(standing, micro, accumulate=accumulate)
    more = live - sum(part.bytes for part in parts)
    if more > 0:
        return (*parts, Part(Category.TEMPORARIES, "of a run's first update", more))
    gradients = next((part for part in parts if part.category is Category.GRADIENTS and part.bytes > -more), None)
    return tuple(replace(part, bytes=part.bytes + more) if part is gradients else part for part in parts)


@dataclass(frozen=True, slots=True)
class Offer:
    """Some GPUs that could be asked for."""

    name: str
    ranks: int
    cards: tuple[Card, ...]


@dataclass(frozen=True, slots=True)
class Alternative:
    """An offer and its plan, or why there is none."""

    offer: Offer
    plan: Plan | None
    why: str = ""

    @property
    def gpu_hours(self) -> Figure | None:
        """Return what it costs."""
        return self.plan.gpu_hours if self.plan else None

    @property
    def hours(self) -> Figure | None:
        """Return how long it runs once it has started."""
        if self.plan is None:
            return None
        return Figure(self.plan.gpu_hours.value / self.offer.ranks, Origin.ASSUMED)


def alternatives(
    oracle: Oracle,
    data: Data,
    request: Request,
    offers: Sequence[Offer],
    *,
    reserve: Reserve = reserve_by_simulation,
) -> list[Alternative]:
    """Return offers with their plans, the cheapest in GPU-hours first, those without one last."""
    made = [_alternative(oracle, data, request, offer, reserve) for offer in offers]
    return sorted(made, key=lambda one: one.plan.gpu_hours.value if one.plan else float("inf"))


def _alternative(oracle: Oracle, data: Data, request: Request, offer: Offer, reserve: Reserve) -> Alternative:
    shards = request.shards if request.shards in (None, 1) else offer.ranks
    try:
        wanted = replace(request, ranks=offer.ranks, shards=shards)
        return Alternative(offer, plan(oracle, data, wanted, offer.cards, reserve=reserve))
    except PipelineError as error:
        return Alternative(offer, None, error.what)


EFFICIENCY = 0.4  # of the best rate: what well-tuned training reaches (40-60% MFU: PaLM, arXiv:2204.02311, table 3)
BANDWIDTH = 0.7  # of the memory's
LAUNCH_S = 7e-6  # between two kernels of eager torch
_TOUCHED = 2  # times an allocated byte is moved at least: written and read
_UPDATE_TOUCHED = 7  # of an optimizer with two moments: reads four tensors, writes three
_REDUCED = 2.0  # times the gradients pass the wire in an all-reduce
_GATHERED = 3.0  # times the parameters pass it for a micro-batch: gathered twice, gradients scattered once


@dataclass(frozen=True, slots=True)
class Pace:
    """Where the time of a micro-batch goes."""

    compute_s: float
    memory_s: float
    launch_s: float
    transfer_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Return all of it; nothing is taken to overlap."""
        return self.compute_s + self.memory_s + self.launch_s + self.transfer_s

    def times(self, count: float) -> Pace:
        """Return the time of so many."""
        parts = (self.compute_s, self.memory_s, self.launch_s, self.transfer_s)
        return Pace(*(count * part for part in parts))


def pace_of(micro: Micro, standing: Standing, choice: Choice, cards: Cards) -> Pace:
    """Return the time of a micro-batch on the slowest of the cards."""
    moved = micro.moved_bytes or _TOUCHED * float(np.maximum(micro.again.bytes_E, 0).sum())
    transfer = 2 * micro.host_bytes / cards.slowest("link_bytes_per_s") + transfer_again_s(standing, choice, cards)
    return Pace(
        micro.flops / (cards.flops_per_s(choice.precision) * EFFICIENCY),
        moved / (cards.slowest("bytes_per_s") * BANDWIDTH),
        micro.kernels * LAUNCH_S,
        transfer,
    )


def transfer_again_s(standing: Standing, choice: Choice, cards: Cards) -> float:
    """Return what one more micro-batch costs in transfers, whatever is in it: a spread model is gathered for each."""
    if choice.shards == 1:
        return 0.0
    whole = choice.shards * sum(part.bytes for part in standing.parts if part.category is Category.PARAMETERS)
    return _GATHERED * whole / cards.slowest("peer_bytes_per_s")


def update_s(standing: Standing, choice: Choice, cards: Cards, ranks: int) -> float:
    """Return the time of a step beside its micro-batches: the optimizer, and adding up the ranks' gradients."""
    trained = 4.0 * standing.trained
    update = _UPDATE_TOUCHED * trained / choice.shards / (cards.slowest("bytes_per_s") * BANDWIDTH)
    reduce = _REDUCED * trained / cards.slowest("peer_bytes_per_s") if ranks > choice.shards else 0.0
    return update + reduce


def epoch_s(micros: Micros, time_M: Floats, step_s: float) -> tuple[float, float]:
    """Return the mean time of a step and that of an epoch: in each step all wait for the slowest rank."""
    steps, step_M = np.unique(micros.step_M, return_inverse=True)
    ranks = int(micros.rank_M.max(initial=0)) + 1
    busy = np.bincount(step_M.ravel() * ranks + micros.rank_M, time_M, len(steps) * ranks).reshape(-1, ranks)
    total = float(busy.max(axis=1).sum()) + step_s * len(steps)
    return total / len(steps), total / micros.epochs
