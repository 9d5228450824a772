"""Which items a training step uses, in which order, and how ranks and micro-batches share them.

A step holds exactly `batch` items. An epoch is drawn from (seed, epoch) and the sizes alone: all items are shuffled and
taken in windows; a window is arranged by size and cut into bricks, and each of its steps is made of bricks drawn from
all over it. A rank's share of a step and its micro-batches follow from the step's items alone. So a run that is resumed
on other ranks, or whose budget was halved after an OOM, makes the same steps; only the cuts change.

Sizes are named, one value an item. A product of sizes is written `receptor*ligand`: what it costs in memory is the
largest receptor times the largest ligand, which may be in different items.

With `Draws`, an epoch is a drawn part of the items, by weight, cluster and source.

Shapes: N items, W in a window, E in a step, S steps in a window, B bricks in a window, D sizes items are arranged by,
K items of a rank's share, F factors of a product.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.command_line import Command
from pipeline.errors import ConfigError, DataError, PlanInfeasible
from pipeline.keys import content_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Sizes = Mapping[str, NDArray[np.int64]]

ORDER_VERSION = 1  # raise it whenever the same seed gives another order
WINDOW = 4096
BRICK = 8  # dealt evenly to 1, 2, 4 or 8 ranks; the sizes of steps of 24 then vary like those of 3 random items
SHUFFLE = 0  # the random stream that shuffles all items; the streams of windows follow
DRAW, CLUSTERS, OFFSET = range((1 << 32) - 3, 1 << 32)  # the random streams of draws
BLOCK = 128  # a share is cut in blocks of this many items, because the best cuts of K items take K² steps
EVEN = 1.001  # ranks with a cost below this multiple of the mean are left as they are
MOST_SWAPPED = 512  # beyond this, dealing is even enough, and trying every swap is slow
ROUNDING = 1e-6  # of a sum of expected draws
SHOWN = 3  # oversize items that an error names


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
        limits = {name: getattr(self, name) for name in ("batch", "window", "brick", "micro_batch", "padding")}
        limits |= {f"budget of {name}": most for name, most in self.budget.items()}
        for name, value in limits.items():
            if value is not None and not value >= 1:
                raise ValueError(f"the sampler's {name} is {value}; must be at least 1")


@dataclass(frozen=True, eq=False)
class Draws:
    """How often an epoch is expected to draw each item; sources and clusters get their part in every single epoch.

    Items are laid on a line, source by source and cluster by cluster in random order, each as long as it is expected.
    Marks at distance 1 from a random start then say how often each item is drawn. So the count of an item, a cluster
    or a source differs from its expected value by less than 1.
    """

    expected_N: Floats  # at most 1: an item that is drawn more often has several rows
    source_N: Integers
    cluster_N: Integers
    copy_N: Integers  # which of its item's rows each is, from 0

    @cached_property
    def items(self) -> int:
        """The number of items that an epoch draws: rounded down, so that no row is drawn twice; at least one."""
        return max(1, math.floor(math.fsum(self.expected_N) + ROUNDING)) if len(self.expected_N) else 0

    def take(self, numbers: Integers) -> Draws:
        """Return the draws of some items, each expected as often as before."""
        return Draws(self.expected_N[numbers], self.source_N[numbers], self.cluster_N[numbers], self.copy_N[numbers])

    def epoch(self, seed: int, epoch: int) -> Integers:
        """Return the drawn items; those of a source follow each other."""
        random_N = random_bits(len(self.cluster_N), seed, epoch, DRAW)
        random_C = random_bits(int(self.cluster_N.max()) + 1, seed, epoch, CLUSTERS)
        order_N = np.lexsort((random_N, self.cluster_N, random_C[self.cluster_N], self.source_N))
        start = float(random_bits(1, seed, epoch, OFFSET)[0]) / 2.0**64
        line_N = np.cumsum(self.expected_N[order_N])
        marks_N = np.floor(line_N * (self.items / line_N[-1]) + start).astype(np.int64)
        marks_N[-1] = self.items
        return np.asarray(np.repeat(order_N, np.diff(np.minimum(marks_N, self.items), prepend=0)))


class EpochOrder:
    """The steps of every epoch; the last epoch's shuffle and the last window's arrangement are cached."""

    def __init__(self, sizes_DN: Sequence[Integers], settings: SamplerSettings, draws: Draws | None = None) -> None:
        self._sizes_DN, self._settings, self._draws = tuple(sizes_DN), settings, draws
        self._items, self._batch = len(sizes_DN[0]) if draws is None else draws.items, settings.batch
        full = self._items // self._batch
        self.steps = full + (not settings.drop_last and self._items % self._batch > 0)
        windows = -(-full * self._batch // max(settings.window, self._batch))
        self._starts = np.arange(windows + 1) * full // max(windows, 1)  # in steps: windows of about equal length
        self._shuffled = lru_cache(1)(self._shuffle)
        self._arranged = lru_cache(1)(self._arrange)

    def items(self, epoch: int, step: int) -> Integers:
        if step >= self._starts[-1]:  # the last, short step
            return np.array(self._shuffled(epoch)[self._starts[-1] * self._batch :], np.int64)
        window = int(np.searchsorted(self._starts, step, side="right")) - 1
        return np.array(self._arranged(epoch, window)[step - self._starts[window]])

    def _shuffle(self, epoch: int) -> NDArray[np.int32]:
        """Return all items in the epoch's random order."""
        settings = self._settings
        order_N = shuffled(self._items, settings.seed, epoch) if settings.shuffle else np.arange(self._items)
        drawn_N = order_N if self._draws is None else self._draws.epoch(settings.seed, epoch)[order_N]
        return drawn_N.astype(np.int32, copy=False)

    def _arrange(self, epoch: int, window: int) -> Integers:
        """Return the items of a window's steps [S, E]."""
        first, last = self._starts[window : window + 2].tolist()
        items_W = self._shuffled(epoch)[first * self._batch : last * self._batch].astype(np.int64)
        return np.asarray(items_W[self._places(epoch, window, items_W)])

    def _places(self, epoch: int, window: int, items_W: Integers) -> Integers:
        """Return the indices into a window that make its steps [S, E].

        Bricks differ by at most one in size, so that a step is always a whole number of them, each from its own series.
        """
        steps = len(items_W) // self._batch
        bricks = -(-self._batch // self._settings.brick)
        lengths = np.diff(np.arange(bricks + 1) * self._batch // bricks)
        starts_B = np.concatenate(([0], np.cumsum(np.tile(lengths, steps))))
        places_W = arrange([sizes_N[items_W] for sizes_N in self._sizes_DN], starts_B)
        which = np.tile(np.arange(steps), (bricks, 1))
        if self._settings.shuffle:
            keys = random_bits(steps * bricks, self._settings.seed, epoch, SHUFFLE + 1 + window)
            which = np.argsort(keys.reshape(bricks, steps), axis=1, kind="stable")
        firsts = starts_B[which * bricks + np.arange(bricks)[:, None]]
        columns = [firsts[brick][:, None] + np.arange(length) for brick, length in enumerate(lengths.tolist())]
        return np.asarray(places_W[np.hstack(columns)])


def random_bits(count: int, seed: int, epoch: int, stream: int) -> NDArray[np.uint64]:
    """Return raw random bits: numpy keeps these the same across versions, unlike what it derives from them."""
    generator = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch, stream)))
    return np.asarray(generator.random_raw(count), dtype=np.uint64)


def shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int32]:
    """Return 0 … count-1 in random order, by sorting random numbers with the index in their last bits.

    All of it happens in the memory of these numbers, part by part; half of it is given back.
    """
    mask, parts = np.uint64((1 << count.bit_length()) - 1), range(0, count, WINDOW)
    keys_N = random_bits(count, seed, epoch, SHUFFLE)
    keys_N &= ~mask
    for start in parts:
        keys_N[start : start + WINDOW] |= np.arange(start, min(start + WINDOW, count), dtype=np.uint64)
    keys_N.sort()
    for start in parts:
        keys_N.view(np.int32)[start : start + WINDOW][: count - start] = keys_N[start : start + WINDOW] & mask
    keys_N.resize(-(-count // 2), refcheck=False)
    return keys_N.view(np.int32)[:count]


def narrow(size_N: Integers) -> Integers:
    """Return sizes in 32 bits each, if they fit; products of them may overflow."""
    return size_N if size_N.min(initial=0) < 0 or size_N.max(initial=0) >> 31 else size_N.astype(np.int32)


def arrange(sizes_DN: Sequence[NDArray[Any]], starts_B: Integers) -> Integers:
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


def _by_widest(sizes_DN: Floats, starts_C: Integers) -> Integers:
    """Return indices sorted, within each cell, by the size that varies most there (largest / smallest)."""
    largest_DC = np.maximum.reduceat(sizes_DN, starts_C[:-1], axis=1)
    smallest_DC = np.minimum.reduceat(sizes_DN, starts_C[:-1], axis=1)
    widest_C = np.argmax(largest_DC / np.maximum(smallest_DC, 1.0), axis=0)
    cell_N = np.repeat(np.arange(len(starts_C) - 1), np.diff(starts_C))
    key_N = sizes_DN[widest_C[cell_N], np.arange(sizes_DN.shape[1])]
    return np.asarray(np.lexsort((-key_N, cell_N)))


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


def cut_micro_batches(padded_DK: Floats, limited: Sequence[Floats], settings: SamplerSettings) -> list[Integers]:
    """Return a share's places in as few micro-batches as the settings allow, of about equal cost, the costliest first.

    `limited` has, for each budget, the factors [F, K] whose product it limits. The costliest micro-batch comes first
    because an allocator can serve the smaller ones from what it left.
    """
    count = padded_DK.shape[1]
    if settings.padding is None:
        parts = _cut_sums(count, limited, settings)
    else:
        order_K = arrange(list(padded_DK), np.arange(count + 1))
        blocks = np.split(order_K, range(BLOCK, count, BLOCK))
        parts = [part for block in blocks for part in _cut_padded(block, padded_DK, limited, settings)]
    costs = [padded_DK[:, part].max(axis=1).prod() * len(part) for part in parts]
    return [parts[place] for place in np.argsort(-np.array(costs), kind="stable")]


def _cut_sums(count: int, limited: Sequence[Floats], settings: SamplerSettings) -> list[Integers]:
    """Try more and more micro-batches until all fit; the cost of concatenated items is their sum."""
    budgets_B, limit = np.array([*settings.budget.values()], np.float64), settings.micro_batch or count
    sizes_BK = np.array([factors_FK.prod(axis=0) for factors_FK in limited]).reshape(-1, count)
    costs_K = np.max(sizes_BK / budgets_B[:, None], axis=0, initial=1.0 / limit)
    least = np.ceil(sizes_BK.sum(axis=1) / budgets_B).max(initial=np.ceil(count / limit))
    for number in range(int(least), count + 1):
        parts = deal_to_ranks(costs_K, number)
        most = max(len(part) for part in parts)
        if most <= limit and all((sizes_BK[:, part].sum(axis=1) <= budgets_B).all() for part in parts):
            return parts
    raise ValueError("a single item exceeds the budget of a micro-batch")


def _cut_padded(
    places_K: Integers, padded_DK: Floats, limited: Sequence[Floats], settings: SamplerSettings
) -> list[Integers]:
    """Cut an arranged block into as few micro-batches as possible, and among those ways the most even."""
    costs_KK = _costs(padded_DK[:, places_K], [factors_FK[:, places_K] for factors_FK in limited], settings)
    starts = [0]  # of the last micro-batch, by where it ends
    sums = np.zeros(len(places_K) + 1)
    for stop in range(1, len(places_K) + 1):
        through = sums[:stop] + costs_KK[:stop, stop - 1]
        starts.append(int(np.argmin(through)))
        sums[stop] = through[starts[stop]]
    stop, parts = len(places_K), []
    while stop > 0:
        parts.append(places_K[starts[stop] : stop])
        stop = starts[stop]
    return parts


def _costs(padded_DK: Floats, limited: Sequence[Floats], settings: SamplerSettings) -> Floats:
    """Return the cost of a micro-batch from each index to each other [K, K]: 1, and a little more the larger it is."""
    count = padded_DK.shape[1]
    upper_KK = np.triu(np.ones((count, count), bool))
    many_KK = np.arange(count) - np.arange(count)[:, None] + 1
    padded_KK = many_KK * _largest(padded_DK, upper_KK)
    real_K = np.concatenate(([0.0], np.cumsum(padded_DK.prod(axis=0))))
    allowed_KK = padded_KK <= (settings.padding or np.inf) * (real_K[1:] - real_K[:-1, None])
    np.fill_diagonal(allowed_KK, val=True)
    for factors_FK, budget in zip(limited, settings.budget.values(), strict=True):
        allowed_KK &= many_KK * _largest(factors_FK, upper_KK) <= budget
    if settings.micro_batch is not None:
        allowed_KK &= many_KK <= settings.micro_batch
    largest = max(float(padded_KK.max()), 1.0)
    return np.where(upper_KK & allowed_KK, 1.0 + (padded_KK / (2 * count * largest)) ** 2, np.inf)


def _largest(sizes_FK: Floats, upper_KK: NDArray[np.bool_]) -> Floats:
    """Return the product of the largest sizes from each index to each other [K, K]."""
    tables_FKK = np.where(upper_KK, sizes_FK[:, None, :], 0.0)
    return np.asarray(np.maximum.accumulate(tables_FKK, axis=2).prod(axis=0))


@dataclass(frozen=True)
class BatchOrigin:
    """The place of a micro-batch in a training."""

    epoch: int
    step: int
    index: int
    of: int  # micro-batches of this rank in this step, at least one
    seed: int = field(default=0, kw_only=True)  # of the random numbers that its items draw

    @property
    def is_last(self) -> bool:
        return self.index + 1 == self.of


@dataclass(frozen=True, eq=False)
class MicroBatch(BatchOrigin):
    """Some items of a rank's share of a step; empty if the rank has no share."""

    items: Integers


class Sampler:
    """Yields the micro-batches of one rank; every rank computes its own from the same sizes and settings.

    A loop goes over one epoch, from its start or from where a loaded state says. Once its last micro-batch has been
    used, the next loop goes over the next epoch.
    """

    def __init__(
        self,
        sizes: Sizes,
        settings: SamplerSettings,
        *,
        rank: int = 0,
        ranks: int = 1,
        data: str = "",
        place: Callable[[], tuple[int, int]] | None = None,
        draws: Draws | None = None,
    ) -> None:
        """Take the sizes of all items; `data` identifies the items, in words or as a digest.

        `place` returns rank and ranks as each loop begins, where another program starts the ranks.
        """
        check_sizes(sizes, settings)
        check_budget(sizes, settings)
        self.settings = settings
        self.rank, self.ranks = rank, ranks
        self.epoch = 0
        self._sizes, self._data, self._place = sizes, data, place
        self._draws, self._order = draws, EpochOrder([sizes[name] for name in settings.by], settings, draws)
        self._first = 0  # the step at which a loop over the epoch begins
        self._next = (0, 0)  # the epoch and the step after the last used one

    @property
    def steps(self) -> int:
        return self._order.steps

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of the epoch, and count each as used."""
        for micro in self.drawn():
            self.use(micro)
            yield micro

    def drawn(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of the epoch, perhaps long before they are used.

        One that is empty stands for a step in which it has no items.
        """
        if self._place:
            self.rank, self.ranks = self._place()
            self._check_likeness()
        epoch, first = self._next = self.epoch, self._first
        return (micro for step in range(first, self.steps) for micro in self.micros(epoch, step))

    def use(self, micro: BatchOrigin) -> None:
        """Note that a micro-batch was used; a step continues after its last one, and the epoch after its last step."""
        step = micro.step + micro.is_last
        self._next = (micro.epoch, step) if step < self.steps else (micro.epoch + 1, 0)
        if step == self.steps:
            self._go(*self._next)

    def _check_likeness(self) -> None:
        """Refuse settings by which ranks may have different numbers of batches: loops other than ours would hang."""
        settings = self.settings
        cuts = settings.budget or settings.micro_batch or settings.padding is not None
        if self.ranks > 1 and (cuts or not settings.drop_last or settings.batch < self.ranks):
            what = f"{self.ranks} ranks may get different numbers of batches, and would wait for each other"
            remedy = "SamplerSettings(batch=…, padding=None, drop_last=True), an item or more for each rank"
            raise ConfigError(what, where="open_loader", remedy=remedy)

    def copies(self, items: Sequence[int]) -> tuple[int, ...]:
        """Return which of its item's rows each row is: the copies of an item in an epoch differ in their randomness."""
        return (0,) * len(items) if self._draws is None else tuple(self._draws.copy_N[list(items)].tolist())

    def step_items(self, epoch: int, step: int) -> Integers:
        """Return the items of a step over all ranks."""
        if epoch < 0 or not 0 <= step < self.steps:
            raise ValueError(f"epoch {epoch} has no step {step}: it has {self.steps:,} steps")
        return self._order.items(epoch, step)

    def shares(self, epoch: int, step: int) -> list[list[Integers]]:
        """Return, for each rank, the items of each of its micro-batches of a step; a rank may have none."""
        return [self._cut(items_K) for items_K in self._dealt(epoch, step)]

    def micros(self, epoch: int, step: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of a step, at least one, under the present budget."""
        parts = self._cut(self._dealt(epoch, step)[self.rank]) or [np.zeros(0, np.int64)]
        return [MicroBatch(epoch, step, index, len(parts), part) for index, part in enumerate(parts)]

    def count(self, epoch: int) -> int:
        """Return how many micro-batches this rank has in an epoch; all its steps are cut for that.

        There is no `len`, because `list` would ask for it and pay for every step twice.
        """
        return sum(len(self.micros(epoch, step)) for step in range(self.steps))

    def _dealt(self, epoch: int, step: int) -> list[Integers]:
        """Return each rank's items of a step."""
        items_E, settings = self.step_items(epoch, step), self.settings
        names = factors_of(settings.cost, self._sizes) if settings.cost else settings.by
        costs_E = self._sizes_of(names, items_E).prod(axis=0)
        return [items_E[places] for places in deal_to_ranks(costs_E, self.ranks)]

    def _cut(self, items_K: Integers) -> list[Integers]:
        """Split a share's items into micro-batches."""
        if len(items_K) == 0:
            return []
        settings = self.settings
        padded_DK = self._sizes_of(settings.padded or settings.by, items_K)
        limited = [self._sizes_of(factors_of(name, self._sizes), items_K) for name in settings.budget]
        return [items_K[places] for places in cut_micro_batches(padded_DK, limited, settings)]

    def _sizes_of(self, names: Sequence[str], items_K: Integers) -> Floats:
        return np.array([self._sizes[name][items_K] for name in names], np.float64)

    def adjust(self, budget: Mapping[str, int]) -> None:
        """Change the budget of micro-batches from the next step on, or when one is cut again; steps stay the same."""
        settings = replace(self.settings, budget=budget)
        check_budget(self._sizes, settings)
        self.settings = settings

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; if it is the present one, keep the position of a loaded state."""
        if epoch != self.epoch:
            self._go(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON data: after the last used step; a step that was begun starts again."""
        epoch, step = self._next
        return {"epoch": epoch, "step": step, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position in a state of the same order of items; ranks and budgets may have changed."""
        changed = [
            f"{name} {state.get(name, 'nothing')!r} then, {value!r} now"
            for name, value in self._identity.items()
            if state.get(name) != value
        ]
        if changed:
            raise ConfigError(
                f"the sampler's state belongs to a different order of items: {'; '.join(changed)}",
                remedy="undo the change, or start a new run from the checkpoint's weights",
            )
        self.step_items(state["epoch"], state["step"])  # raises if there is no such step
        self._go(state["epoch"], state["step"])

    def _go(self, epoch: int, step: int) -> None:
        self.epoch, self._first = self._next = epoch, step

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """All that determines the order, as JSON data: settings, sizes, and the version of the algorithm."""
        settings = self.settings
        digests = [content_digest(np.ascontiguousarray(self._sizes[name], np.int64).data) for name in settings.by]
        draws = self._draws
        columns = () if draws is None else (draws.expected_N, draws.source_N, draws.cluster_N)
        drawn = b"".join(column.tobytes() for column in columns)
        return {
            "version": ORDER_VERSION,
            "data": self._data,
            "items": len(self._sizes[settings.by[0]]),
            "sizes": content_digest(b"".join(digests)).hex(),
            "by": list(settings.by),
            **({"draws": content_digest(drawn).hex()} if drawn else {}),
            **{name: getattr(settings, name) for name in ("batch", "brick", "window", "seed", "shuffle", "drop_last")},
        }


def factors_of(name: str, sizes: Sizes) -> tuple[str, ...]:
    """Return the sizes whose product a name stands for."""
    return (name,) if name in sizes else tuple(name.split("*"))


def check_sizes(sizes: Sizes, settings: SamplerSettings) -> None:
    """Refuse sizes that are missing, and too few items."""
    products = (*settings.budget, *([settings.cost] if settings.cost else []))
    names = (*settings.by, *settings.padded, *(factor for name in products for factor in factors_of(name, sizes)))
    if missing := [name for name in names if name not in sizes]:
        raise ValueError(f"no size is named {missing[0]!r}; available: {', '.join(sorted(sizes)) or 'none'}")
    items = len(sizes[settings.by[0]])
    if items < (settings.batch if settings.drop_last else 1):
        least = f"; drop_last needs at least one step of {settings.batch}" if items else ""
        remedy = Command.of("status", then="   (lists rejections and reasons)")
        raise DataError(f"{items} items to draw from{least}", remedy=remedy)


def check_budget(sizes: Sizes, settings: SamplerSettings) -> None:
    """Refuse a budget that some items exceed on their own, and say by how much."""
    texts: dict[int, list[str]] = {}
    for name, most in settings.budget.items():
        first, *others = factors_of(name, sizes)
        size_N = sizes[first].astype(np.float64)
        for factor in others:
            size_N *= sizes[factor]
        for item in np.flatnonzero(size_N > most).tolist():
            texts.setdefault(item, []).append(f"{int(size_N[item]):,} {name}")
    if texts:
        limits = ", ".join(f"{most:,} {name}" for name, most in settings.budget.items())
        shown = "; ".join(f"item {item:,} has {' and '.join(texts[item])}" for item in sorted(texts)[:SHOWN])
        what = f"{len(texts):,} of {len(sizes[settings.by[0]]):,} items alone exceed the budget of a micro-batch"
        raise PlanInfeasible(f"{what} ({limits}): {shown}", remedy="raise the budget, or leave these items out")
