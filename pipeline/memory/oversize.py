"""Items that fit under no choice: which they are, what they would take, and how far they would have to be cropped.

Shapes: N items, S sizes of an item.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import PlanInfeasible
from pipeline.memory.allocator import format_bytes
from pipeline.memory.footprint import Origin
from pipeline.memory.plan import Figure, OversizeItem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.memory.budget import Search
    from pipeline.memory.margins import Margin
    from pipeline.memory.request import Card

    Integers = NDArray[np.int64]

SHOWN = 3  # so many are named in an error
_HALVINGS = 7
_ASKED = 3  # of the largest the oracle is asked; the others are predicted


@dataclass(frozen=True, eq=False)
class Outsized:
    """The items that are too large, the largest first."""

    items: tuple[OversizeItem, ...]
    keep_N: NDArray[np.bool_]

    def refuse(self, count: int, limit: int) -> PlanInfeasible:
        """Return the error that names them."""
        texts = [f"{one.id} ({_sizes(one.sizes)}) takes {format_bytes(one.total.value)}" for one in self.items[:SHOWN]]
        more = "; …" if len(self.items) > SHOWN else ""
        return PlanInfeasible(
            f"{len(self.items):,} of {count:,} items fit under no remedy: {'; '.join(texts)}{more}; "
            f"a card lets torch have {format_bytes(limit)}",
            remedy=f"{self.items[0].remedy}, or set train.oversize to skip or crop",
        )


def outsized(search: Search, limit: int, margin: Margin, budget: int, others: Sequence[Card]) -> Outsized:
    """Return the items whose live peak alone is above a limit.

    Items are put in the order of their predicted peaks, and the oracle is asked where in it the limit is passed.
    """
    sizes_NS = search.ground.sizes_NS
    by_sum_N = np.argsort(sizes_NS.sum(axis=1), kind="stable")
    for place in (0.5, 0.9, 0.99):
        search.live(search.ground.alone(int(by_sum_N[int(place * (len(sizes_NS) - 1))])))
    model = search.model()
    predicted_N = model.predict(np.concatenate((np.ones((len(sizes_NS), 1), np.int64), sizes_NS), axis=1))
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
    over_N = np.zeros(len(order_N), np.bool_)
    over_N[order_N[:low]] = True
    for item in [item for item, took in asked.items() if took > limit]:
        over_N |= (sizes_NS >= sizes_NS[item]).all(axis=1)
    order = [item for item in order_N.tolist() if over_N[item]]
    items = tuple(
        _named(search, item, asked, float(predicted_N[item]) if place >= _ASKED else None, margin, budget, others)
        for place, item in enumerate(order)
    )
    return Outsized(items, ~over_N)


def _named(
    search: Search,
    item: int,
    asked: Mapping[int, int],
    predicted: float | None,
    margin: Margin,
    budget: int,
    others: Sequence[Card],
) -> OversizeItem:
    sure = predicted is None or item in asked
    live = search.live(search.ground.alone(item)) if sure else float(predicted or 0.0)
    total = int(live * margin.factor)
    names = search.ground.data.names
    sizes = dict(zip(names, search.ground.sizes_NS[item].tolist(), strict=True))
    origin = margin.origin if sure else Origin.ASSUMED
    called = search.ground.data.called(item)
    return OversizeItem(item, called, sizes, Figure(total, origin), budget, _remedy(total, others))


def _remedy(total: int, others: Sequence[Card]) -> str:
    """Say which card would take an item."""
    enough = sorted((card for card in others if card.budget_bytes >= total), key=lambda card: card.budget_bytes)
    if enough:
        return f"use a card such as {enough[0].name}, which lets torch have {format_bytes(enough[0].budget_bytes)}"
    return f"use a card that lets torch have {format_bytes(total)}"


def crop_limits(search: Search, limit: int) -> dict[str, int]:
    """Return for each size the largest that an item may have, so that one with all of them still fits alone."""
    most_S = search.ground.sizes_NS.max(axis=0)
    below, above = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (below + above) / 2
        row = (1, *np.maximum((most_S * middle).astype(np.int64), 1).tolist())
        below, above = (middle, above) if search.live(row) <= limit else (below, middle)
    return dict(zip(search.ground.data.names, np.maximum((most_S * below).astype(np.int64), 1).tolist(), strict=True))


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{value:,} {name}" for name, value in sizes.items())
