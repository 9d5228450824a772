"""How the items of a step are dealt to ranks, and a rank's share cut into micro-batches: pure arithmetic on sizes.

Sizes are float64: whole numbers up to 2^53 add and multiply exactly, so every rank comes to the same answer.

Shapes: E items in a step, K in a rank's share, D sizes that are padded, B budgets, R ranks.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.training.order import arrange

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

BLOCK = 128  # a share is cut in blocks of so many items: the best cuts of K items take K² steps
EVEN = 1.001  # ranks whose costs are so close to their mean are left as they are
MOST_SWAPPED = 512  # so many items are even enough when dealt, and too many to try every swap


@dataclass(frozen=True)
class Limits:
    """What a micro-batch may hold."""

    budgets_B: tuple[float, ...] = ()
    most: int | None = None
    padding: float | None = None  # None: nothing is padded


@dataclass(frozen=True)
class Share:
    """The sizes of a rank's items in a step: those that are padded, and for each budget the factors it limits."""

    padded_DK: Floats
    factors_B: tuple[Floats, ...]  # each [factors, K]

    def take(self, places: Integers) -> Share:
        """Return the sizes of some of the items."""
        return Share(self.padded_DK[:, places], tuple(factors[:, places] for factors in self.factors_B))


def deal(costs_E: Floats, ranks: int) -> list[Integers]:
    """Return the places that each rank gets, of about equal cost; with fewer items than ranks some get none."""
    owner_E = np.zeros(len(costs_E), np.int64)
    loads = [(0.0, 0, rank) for rank in range(ranks)]
    for place in np.argsort(-costs_E, kind="stable").tolist():
        load, count, rank = loads[0]
        owner_E[place] = rank
        heapq.heapreplace(loads, (load + float(costs_E[place]), count + 1, rank))
    if 1 < ranks < len(costs_E) <= MOST_SWAPPED:
        _improve(owner_E, costs_E, ranks)
    return [np.flatnonzero(owner_E == rank) for rank in range(ranks)]


def _improve(owner_E: Integers, costs_E: Floats, ranks: int) -> None:
    """Swap an item of the costliest rank with another rank's, or give it away, while that lowers the higher of both."""
    loads_R = np.bincount(owner_E, costs_E, ranks)
    enough = float(loads_R.mean()) * EVEN
    for _ in range(4 * ranks):
        heavy = int(np.argmax(loads_R))
        if loads_R[heavy] <= enough:
            return
        mine, others = np.flatnonzero(owner_E == heavy), np.flatnonzero(owner_E != heavy)
        partner = np.concatenate((owner_E[others], np.delete(np.arange(ranks), heavy)))
        back = np.concatenate((costs_E[others], np.zeros(ranks - 1)))
        change = costs_E[mine][:, None] - back
        higher = np.maximum(loads_R[heavy] - change, loads_R[partner] + change)
        give, take = np.unravel_index(int(np.argmin(higher)), higher.shape)
        if higher[give, take] >= loads_R[heavy]:
            return
        owner_E[mine[give]] = partner[take]
        if take < len(others):
            owner_E[others[take]] = heavy
        loads_R[heavy] -= change[give, take]
        loads_R[partner[take]] += change[give, take]


def cut(share: Share, limits: Limits) -> list[Integers]:
    """Return a share's places in as few micro-batches as the limits allow, of about equal cost, the costliest first.

    The costliest comes first because an allocator can serve the smaller ones from what it left.
    """
    count = share.padded_DK.shape[1]
    if limits.padding is None:
        parts = _cut_sums(share, limits)
    else:
        order_K = arrange(list(share.padded_DK), np.arange(count + 1))
        blocks = np.split(order_K, range(BLOCK, count, BLOCK))
        parts = [part for block in blocks for part in _cut_padded(block, share.take(block), limits)]
    costs = [share.padded_DK[:, part].max(axis=1).prod() * len(part) for part in parts]
    return [parts[place] for place in np.argsort(-np.array(costs), kind="stable")]


def _cut_sums(share: Share, limits: Limits) -> list[Integers]:
    """Deal the items to more and more micro-batches until all fit: what is concatenated costs its sum."""
    count = share.padded_DK.shape[1]
    budgets_B = np.array(limits.budgets_B)
    sizes_BK = np.array([factors_FK.prod(axis=0) for factors_FK in share.factors_B]).reshape(-1, count)
    costs_K = np.max(sizes_BK / budgets_B[:, None], axis=0, initial=1.0 / (limits.most or count))
    least = np.ceil(sizes_BK.sum(axis=1) / budgets_B).max(initial=np.ceil(count / (limits.most or count)))
    for number in range(int(least), count + 1):
        parts = [part for part in deal(costs_K, number) if len(part)]
        most = max(len(part) for part in parts)
        if most <= (limits.most or count) and all((sizes_BK[:, part].sum(axis=1) <= budgets_B).all() for part in parts):
            return parts
    raise ValueError("an item exceeds the budget of a micro-batch alone")


def _cut_padded(places_K: Integers, share: Share, limits: Limits) -> list[Integers]:
    """Cut an arranged share where that makes fewest micro-batches, and among those the most even."""
    costs_KK = _costs(share, limits)
    best: list[tuple[float, int]] = [(0.0, 0)]
    sums = np.zeros(len(places_K) + 1)
    for stop in range(1, len(places_K) + 1):
        through = sums[:stop] + costs_KK[:stop, stop - 1]
        start = int(np.argmin(through))
        sums[stop] = through[start]
        best.append((float(through[start]), start))
    stop, parts = len(places_K), []
    while stop > 0:
        start = best[stop][1]
        parts.append(places_K[start:stop])
        stop = start
    return parts


def _costs(share: Share, limits: Limits) -> Floats:
    """Return the cost of every micro-batch from one place to another [K, K]: 1 and a little more the larger it is."""
    count = share.padded_DK.shape[1]
    upper_KK = np.triu(np.ones((count, count), bool))
    many_KK = np.arange(count) - np.arange(count)[:, None] + 1
    padded_KK = many_KK * _largest(share.padded_DK, upper_KK)
    real_K = np.concatenate(([0.0], np.cumsum(share.padded_DK.prod(axis=0))))
    allowed_KK = padded_KK <= (limits.padding or np.inf) * (real_K[1:] - real_K[:-1, None])
    np.fill_diagonal(allowed_KK, val=True)
    for factors_FK, budget in zip(share.factors_B, limits.budgets_B, strict=True):
        allowed_KK &= many_KK * _largest(factors_FK, upper_KK) <= budget
    if limits.most is not None:
        allowed_KK &= many_KK <= limits.most
    largest = max(float(padded_KK.max()), 1.0)
    return np.where(upper_KK & allowed_KK, 1.0 + (padded_KK / (2 * count * largest)) ** 2, np.inf)


def _largest(sizes_FK: Floats, upper_KK: NDArray[np.bool_]) -> Floats:
    """Return the product of the largest sizes from one place to another [K, K]."""
    tables_FKK = np.where(upper_KK, sizes_FK[:, None, :], 0.0)
    return np.asarray(np.maximum.accumulate(tables_FKK, axis=2).prod(axis=0))
