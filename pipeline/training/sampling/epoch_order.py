"""The order of an epoch: which items make each step, whatever the ranks and their memory.

An epoch is drawn from (seed, epoch) and the sizes alone. All items are shuffled and taken in windows; a window is
arranged by size and cut into bricks, and each of its steps is made of bricks drawn from all over it.

Shapes: N items, W in a window, E in a step, S steps in a window, B bricks in a window, D sizes items are arranged by.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Floats = NDArray[np.float64]

ORDER_VERSION = 1  # raise it whenever the same seed gives another order
WINDOW = 4096
BRICK = 8  # dealt evenly to 1, 2, 4 or 8 ranks; steps of 24 then vary in size as random ones of 3 do
SHUFFLE = 0  # the random stream that shuffles all items; the streams of windows follow


@dataclass(frozen=True)
class SamplerSettings:
    """How steps are drawn (batch … drop_last), and how ranks and micro-batches share them (the rest)."""

    batch: int  # items in a step, over all ranks
    seed: int = 0
    by: tuple[str, ...] = ("nodes",)  # the sizes that are padded: items alike in them share micro-batches
    window: int = WINDOW  # items that are arranged together: more of them are more alike, fewer mix better
    brick: int = BRICK  # items alike that enter a step together: more make fewer micro-batches, fewer mix better
    shuffle: bool = True  # without: windows in the order of the data, largest items of each first
    drop_last: bool = False
    cost: str | None = None  # the size that ranks share evenly; default: the product of `by`
    budget: Mapping[str, int] = field(default_factory=dict)  # of a micro-batch: its items times their largest size
    micro_batch: int | None = None  # items in a micro-batch at most
    padding: float | None = 1.03  # padded/real of a micro-batch at most; None: concatenated, budgets are of sums
    padded: tuple[str, ...] = ()  # the sizes that `padding` is about; default: `by`

    def __post_init__(self) -> None:
        counts = {"batch": self.batch, "window": self.window, "brick": self.brick, "micro_batch": self.micro_batch}
        counts |= {f"budget of {name}": most for name, most in self.budget.items()}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ValueError(f"the sampler's {name} is {value}; must be at least 1")
        if self.seed < 0:
            raise ValueError(f"the sampler's seed is {self.seed}; must be at least 0")
        if self.padding is not None and not self.padding >= 1:
            raise ValueError(f"the sampler's padding is {self.padding}; must be at least 1 (padded/real), or None")
        if not self.by:
            raise ValueError("the sampler needs a size to pack by")


class EpochOrder:
    """The steps of every epoch; each epoch's shuffle and each window's arrangement is computed on first use."""

    def __init__(self, sizes_DN: Sequence[Integers], settings: SamplerSettings) -> None:
        self._sizes_DN = tuple(sizes_DN)
        self._items = len(sizes_DN[0])
        batch = self._batch = settings.batch
        self._brick, self._seed, self._shuffle = settings.brick, settings.seed, settings.shuffle
        full = self._items // batch
        self.steps = full + (not settings.drop_last and self._items % batch > 0)
        windows = -(-full * batch // max(settings.window, batch))
        self._starts = np.arange(windows + 1) * full // max(windows, 1)  # in steps: windows of about equal length
        self._epoch: tuple[int, NDArray[np.signedinteger]] | None = None
        self._window: tuple[tuple[int, int], Integers] | None = None

    def items(self, epoch: int, step: int) -> Integers:
        """Return the items of one step."""
        if step >= self._starts[-1]:  # the last, short step
            return np.array(self._shuffled(epoch)[self._starts[-1] * self._batch :], np.int64)
        window = int(np.searchsorted(self._starts, step, side="right")) - 1
        return np.array(self._arranged(epoch, window)[step - self._starts[window]])

    def _shuffled(self, epoch: int) -> NDArray[np.signedinteger]:
        """Return all items in the epoch's random order; the last epoch asked for is cached."""
        kept = self._epoch  # read once: another thread may replace it
        if kept is None or kept[0] != epoch:
            drawn_N = shuffled(self._items, self._seed, epoch) if self._shuffle else np.arange(self._items)
            narrow = np.int32 if self._items <= np.iinfo(np.int32).max else np.int64
            self._epoch = kept = (epoch, drawn_N.astype(narrow))
        return kept[1]

    def _arranged(self, epoch: int, window: int) -> Integers:
        """Return the items of a window's steps [S, E]; the last window asked for is cached."""
        kept = self._window
        if kept is None or kept[0] != (epoch, window):
            first, last = self._starts[window : window + 2].tolist()
            items_W = self._shuffled(epoch)[first * self._batch : last * self._batch].astype(np.int64)
            self._window = kept = ((epoch, window), items_W[self._places(epoch, window, items_W)])
        return kept[1]

    def _places(self, epoch: int, window: int, items_W: Integers) -> Integers:
        """Return the indices into a window that make its steps [S, E].

        Bricks differ by at most one in size, so that a step is always a whole number of them, each from its own series.
        """
        steps = len(items_W) // self._batch
        lengths = near_equal(self._batch, -(-self._batch // self._brick))
        bricks = len(lengths)
        starts_B = np.concatenate(([0], np.cumsum(np.tile(lengths, steps))))
        places_W = arrange([sizes_N[items_W] for sizes_N in self._sizes_DN], starts_B)
        which = np.tile(np.arange(steps), (bricks, 1))
        if self._shuffle:
            keys = random_bits(steps * bricks, self._seed, epoch, SHUFFLE + 1 + window)
            which = np.argsort(keys.reshape(bricks, steps), axis=1, kind="stable")
        firsts = starts_B[which * bricks + np.arange(bricks)[:, None]]
        columns = [firsts[brick][:, None] + np.arange(length) for brick, length in enumerate(lengths.tolist())]
        return np.asarray(places_W[np.hstack(columns)])


def near_equal(total: int, parts: int) -> Integers:
    """Return the lengths of `parts` parts of a total, which differ by at most one."""
    return np.asarray(np.diff(np.arange(parts + 1) * total // parts))


def random_bits(count: int, seed: int, epoch: int, stream: int) -> NDArray[np.uint64]:
    """Return raw random bits: numpy keeps these the same across versions, unlike what it derives from them."""
    generator = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch, stream)))
    return np.asarray(generator.random_raw(count), dtype=np.uint64)


def shuffled(count: int, seed: int, epoch: int) -> Integers:
    """Return 0 … count-1 in random order, by sorting random numbers with the index in their last bits."""
    mask = np.uint64((1 << count.bit_length()) - 1)
    keys_N = random_bits(count, seed, epoch, SHUFFLE) & ~mask | np.arange(count, dtype=np.uint64)
    keys_N.sort()
    return np.asarray(keys_N & mask, np.int64)


def arrange(sizes_DN: Sequence[Integers], starts_B: Integers) -> Integers:
    """Return indices ordered so that each brick (from one start to the next) holds items alike in size, largest first.

    By one size, that is a stable sort. By several, the bricks are halved again and again, each time across the size
    that differs most in them. Nothing here rounds, so that every rank gets the same order on any processor.
    """
    if len(sizes_DN) == 1:
        return np.asarray(np.argsort(-sizes_DN[0].astype(np.int64, copy=False), kind="stable"))
    sizes = np.stack([sizes_N.astype(np.float64) for sizes_N in sizes_DN])
    places_N = np.arange(sizes.shape[1])
    cells = np.array([0, len(starts_B) - 1])  # where each cell begins, in bricks
    while len(cells) < len(starts_B):
        places_N = places_N[_by_widest(sizes[:, places_N], starts_B[cells])]
        cells = np.unique(np.concatenate((cells, (cells[:-1] + cells[1:]) // 2)))
    return places_N


def _by_widest(sizes_DN: NDArray[np.float64], starts_C: Integers) -> Integers:
    """Return indices sorted, within each cell, by the size that varies most there (largest / smallest)."""
    largest_DC = np.maximum.reduceat(sizes_DN, starts_C[:-1], axis=1)
    smallest_DC = np.minimum.reduceat(sizes_DN, starts_C[:-1], axis=1)
    widest_C = np.argmax(largest_DC / np.maximum(smallest_DC, 1.0), axis=0)
    cell_N = np.repeat(np.arange(len(starts_C) - 1), np.diff(starts_C))
    key_N = sizes_DN[widest_C[cell_N], np.arange(sizes_DN.shape[1])]
    return np.asarray(np.lexsort((-key_N, cell_N)))


BLOCK = 128  # a share is cut in blocks of so many items: the best cuts of K items take K² steps
EVEN = 1.001  # ranks with a cost below this multiple of the mean are left as they are
MOST_SWAPPED = 512  # more items are even enough when dealt, and too many to try every swap


@dataclass(frozen=True)
class MicroBatchLimits:
    """What a micro-batch may hold."""

    budgets_B: tuple[float, ...] = ()
    most: int | None = None
    padding: float | None = None  # None: nothing is padded


@dataclass(frozen=True)
class ShareSizes:
    """The sizes of a rank's items in a step: those that are padded, and for each budget the factors it limits."""

    padded_DK: Floats
    factors_B: tuple[Floats, ...]  # each [factors, K]

    def take(self, places: Integers) -> ShareSizes:
        return ShareSizes(self.padded_DK[:, places], tuple(factors[:, places] for factors in self.factors_B))


def deal_to_ranks(costs_E: Floats, ranks: int) -> list[Integers]:
    """Return each rank's indices, of about equal cost; with fewer items than ranks some get none."""
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
    """Swap items of the costliest rank with other ranks', or give them away, while that lowers the higher cost."""
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


def cut_micro_batches(share: ShareSizes, limits: MicroBatchLimits) -> list[Integers]:
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


def _cut_sums(share: ShareSizes, limits: MicroBatchLimits) -> list[Integers]:
    """Try more and more micro-batches until all fit; the cost of concatenated items is their sum."""
    count = share.padded_DK.shape[1]
    budgets_B = np.array(limits.budgets_B)
    sizes_BK = np.array([factors_FK.prod(axis=0) for factors_FK in share.factors_B]).reshape(-1, count)
    costs_K = np.max(sizes_BK / budgets_B[:, None], axis=0, initial=1.0 / (limits.most or count))
    least = np.ceil(sizes_BK.sum(axis=1) / budgets_B).max(initial=np.ceil(count / (limits.most or count)))
    for number in range(int(least), count + 1):
        parts = deal_to_ranks(costs_K, number)
        most = max(len(part) for part in parts)
        if most <= (limits.most or count) and all((sizes_BK[:, part].sum(axis=1) <= budgets_B).all() for part in parts):
            return parts
    raise ValueError("a single item exceeds the budget of a micro-batch")


def _cut_padded(places_K: Integers, share: ShareSizes, limits: MicroBatchLimits) -> list[Integers]:
    """Cut an arranged share into as few micro-batches as possible, and among those ways the most even."""
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


def _costs(share: ShareSizes, limits: MicroBatchLimits) -> Floats:
    """Return the cost of a micro-batch from each index to each other [K, K]: 1, and a little more the larger it is."""
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
    """Return the product of the largest sizes from each index to each other [K, K]."""
    tables_FKK = np.where(upper_KK, sizes_FK[:, None, :], 0.0)
    return np.asarray(np.maximum.accumulate(tables_FKK, axis=2).prod(axis=0))
