"""Items that fit under no remedy: named in an error, left out, or cropped."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import PlanInfeasible
from pipeline.memory.footprint import Provenance
from pipeline.memory.planning.memory_plan import Figure, Oversize, OversizeItem
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from pipeline.memory.footprint import Margin
    from pipeline.memory.planning.budget_search import BudgetSearch
    from pipeline.memory.planning.memory_plan import CardSpec, DataSizes, MemoryPlan

SHOWN = 3  # so many are named in an error
_TURNS = 3  # times more items are given up because the others did not fit together with what the allocator adds
_LOWER = 0.95  # of the limit, each time
_HALVINGS = 7
_ASKED = 3  # of the largest the oracle is asked; the others are predicted


def without_oversize(
    search: BudgetSearch,
    margin: Margin,
    budget: int,
    others: Sequence[CardSpec],
    planned: Callable[[DataSizes], MemoryPlan | None],
) -> MemoryPlan:
    """Plan without the items that do not fit, or with cropped ones; raise an error that names them if wanted."""
    data, wanted = search.bounds.data, search.bounds.request.oversize
    live, first = int(budget / margin.factor), tuple[OversizeItem, ...]()
    for _ in range(_TURNS):
        items, keep_N = oversize_items(search, live, margin, budget, others)
        first = first or items
        if items and wanted is Oversize.ERROR:
            break
        if items and (keep_N.any() or wanted is Oversize.CROP):
            crop = crop_limits(search, live) if wanted is Oversize.CROP else {}
            plan = planned(data.cropped(crop) if crop else data.only(keep_N))
            if plan is not None:
                return replace(plan, oversize=items, crop=crop)
        live = int(live * _LOWER)
    if first:
        raise too_large(first, data.items, budget)
    raise PlanInfeasible(
        "nothing fits under the allowed settings: no allowed micro-batch fits together with the allocator's reserve",
        remedy="allow checkpointing, bf16, offload or sharding, or use a larger GPU",
    )


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


def oversize_items(
    search: BudgetSearch, limit: int, margin: Margin, budget: int, others: Sequence[CardSpec]
) -> tuple[tuple[OversizeItem, ...], NDArray[np.bool_]]:
    """Return the items whose live peak alone is above a limit, the largest first, and a mask of the other items.

    Items are ordered by predicted peak; bisection with the oracle finds where the limit is passed.
    """
    bounds, memory = search.bounds, search.memory
    sizes_NS = bounds.sizes_NS
    by_sum_N = np.argsort(sizes_NS.sum(axis=1), kind="stable")
    for place in (0.5, 0.9, 0.99):
        memory.peak_bytes(bounds.alone(int(by_sum_N[int(place * (len(sizes_NS) - 1))])))
    alone_NS = np.column_stack((np.ones(len(sizes_NS), np.int64), sizes_NS))
    predicted_N = bounds.terms.predict(search.model(), alone_NS)
    order_N = np.argsort(-predicted_N, kind="stable")
    asked: dict[int, int] = {}

    def is_over(place: int) -> bool:
        item = int(order_N[place])
        asked[item] = memory.peak_bytes(bounds.alone(item))
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
        memory.peak_bytes(bounds.alone(item)) if sure else predicted_N[item]
        for item, sure in zip(over, is_sure, strict=True)
    ]
    # A larger item is said to take no less than a smaller one, even where a kernel takes less of it.
    live_O = np.maximum.accumulate([min(refuted.values(), default=0), *reversed(live)])[:0:-1]
    of_all = max(margin.factor, budget / limit)  # an allocator may hold more than is live
    items = []
    for item, sure, live_bytes in zip(over, is_sure, live_O, strict=True):
        total = Figure(ceil(live_bytes * of_all), margin.origin if sure else Provenance.ASSUMED)
        sizes = dict(zip(bounds.data.names, sizes_NS[item].tolist(), strict=True))
        name, remedy = bounds.data.called(item), _larger_card(int(total.value), budget, others)
        items.append(OversizeItem(item, name, sizes, total, budget, remedy))
    return tuple(items), ~over_N


def _larger_card(total: int, limit: int, others: Sequence[CardSpec]) -> str:
    enough = [card for card in others if card.budget_bytes >= total]
    if not enough:
        return f"use a GPU that lets torch have {format_bytes(total, above=limit)}"
    card = min(enough, key=lambda card: card.budget_bytes)
    return f"use a GPU such as {card.name}, which lets torch have {format_bytes(card.budget_bytes)}"


def crop_limits(search: BudgetSearch, limit: int) -> dict[str, int]:
    """Return a limit for each size such that an item at all limits fits alone."""
    most_S = search.bounds.sizes_NS.max(axis=0)
    below, above = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (below + above) / 2
        row = (1, *np.maximum((most_S * middle).astype(np.int64), 1).tolist())
        below, above = (middle, above) if search.memory.peak_bytes(row) <= limit else (below, middle)
    return dict(zip(search.bounds.data.names, np.maximum((most_S * below).astype(np.int64), 1).tolist(), strict=True))
