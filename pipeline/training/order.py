"""The order of an epoch: which items make each step, whatever the ranks and their memory.

An epoch is drawn from (seed, epoch) and the sizes alone. All items are shuffled and taken in windows; a window is
arranged by size and cut into bricks, and each of its steps is made of bricks drawn from all over it.

Shapes: N items, W in a window, E in a step, S steps in a window, B bricks in a window, D sizes items are arranged by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

ORDER_VERSION = 1  # another one whenever the same seed comes to give another order
SHUFFLE = 0  # streams of random numbers: that of all items, and from here on one for each window


class Order:
    """The steps of every epoch; an epoch is shuffled, and a window arranged, when first asked for."""

    def __init__(
        self,
        sizes_DN: Sequence[Integers],
        *,
        batch: int,
        brick: int,
        window: int,
        seed: int,
        shuffle: bool,
        short: bool,
    ) -> None:
        self._sizes_DN = tuple(sizes_DN)
        self._items = len(sizes_DN[0])
        self._batch = batch
        self._brick = brick
        self._seed = seed
        self._shuffle = shuffle
        full = self._items // batch
        self.steps = full + (short and self._items % batch > 0)
        windows = -(-full * batch // max(window, batch))
        self._starts = np.arange(windows + 1) * full // max(windows, 1)  # in steps: windows of about equal length
        self._epoch: tuple[int, NDArray[np.signedinteger]] | None = None
        self._window: tuple[tuple[int, int], Integers] | None = None

    def items(self, epoch: int, step: int) -> Integers:
        """Return the items of one step."""
        if step >= self._starts[-1]:  # what is left makes the last, short step
            return np.array(self._shuffled(epoch)[self._starts[-1] * self._batch :], np.int64)
        window = int(np.searchsorted(self._starts, step, side="right")) - 1
        return np.array(self._arranged(epoch, window)[step - self._starts[window]])

    def _shuffled(self, epoch: int) -> NDArray[np.signedinteger]:
        """Return all items in the order of their draw; the last epoch asked for is kept."""
        kept = self._epoch  # looked at once: a thread that reads ahead may replace it
        if kept is None or kept[0] != epoch:
            drawn_N = shuffled(self._items, self._seed, epoch) if self._shuffle else np.arange(self._items)
            narrow = np.int32 if self._items <= np.iinfo(np.int32).max else np.int64
            self._epoch = kept = (epoch, drawn_N.astype(narrow))
        return kept[1]

    def _arranged(self, epoch: int, window: int) -> Integers:
        """Return the items of a window's steps [S, E]; the last window asked for is kept."""
        kept = self._window
        if kept is None or kept[0] != (epoch, window):
            first, last = self._starts[window : window + 2].tolist()
            items_W = self._shuffled(epoch)[first * self._batch : last * self._batch].astype(np.int64)
            self._window = kept = ((epoch, window), items_W[self._places(epoch, window, items_W)])
        return kept[1]

    def _places(self, epoch: int, window: int, items_W: Integers) -> Integers:
        """Return which places of a window make its steps [S, E].

        Bricks differ by at most one in size, so that a step is always a whole number of them, each from its own series.
        """
        steps = len(items_W) // self._batch
        lengths = near_equal(self._batch, -(-self._batch // self._brick))
        bricks = len(lengths)
        starts_B = np.concatenate(([0], np.cumsum(np.tile(lengths, steps))))
        places_W = arrange([sizes_N[items_W] for sizes_N in self._sizes_DN], starts_B)
        which = np.tile(np.arange(steps), (bricks, 1))
        if self._shuffle:
            keys = raw(steps * bricks, self._seed, epoch, SHUFFLE + 1 + window)
            which = np.argsort(keys.reshape(bricks, steps), axis=1, kind="stable")
        firsts = starts_B[which * bricks + np.arange(bricks)[:, None]]
        columns = [firsts[brick][:, None] + np.arange(length) for brick, length in enumerate(lengths.tolist())]
        return np.asarray(places_W[np.hstack(columns)])


def near_equal(total: int, parts: int) -> Integers:
    """Return the lengths of parts of a total that differ by at most one."""
    return np.asarray(np.diff(np.arange(parts + 1) * total // parts))


def raw(count: int, seed: int, epoch: int, stream: int) -> NDArray[np.uint64]:
    """Return random bits. numpy promises the bits of a generator for ever, but not what it makes of them."""
    generator = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch, stream)))
    return np.asarray(generator.random_raw(count), dtype=np.uint64)


def shuffled(count: int, seed: int, epoch: int) -> Integers:
    """Return 0 … count-1 in random order: random numbers with their place in the last bits, sorted."""
    mask = np.uint64((1 << count.bit_length()) - 1)
    keys_N = raw(count, seed, epoch, SHUFFLE) & ~mask | np.arange(count, dtype=np.uint64)
    keys_N.sort()
    return np.asarray(keys_N & mask, np.int64)


def arrange(sizes_DN: Sequence[Integers], starts_B: Integers) -> Integers:
    """Return places so that those between two starts are alike in size, the largest first; equals stay in order.

    By one size, that is sorting. By several, the bricks are halved again and again, each time across the size that
    differs most in them. Nothing here rounds: every rank must come to the same order, whatever its processor.
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
    """Return places sorted, within each cell, by the size whose largest is the most times its smallest there."""
    largest_DC = np.maximum.reduceat(sizes_DN, starts_C[:-1], axis=1)
    smallest_DC = np.minimum.reduceat(sizes_DN, starts_C[:-1], axis=1)
    widest_C = np.argmax(largest_DC / np.maximum(smallest_DC, 1.0), axis=0)
    cell_N = np.repeat(np.arange(len(starts_C) - 1), np.diff(starts_C))
    key_N = sizes_DN[widest_C[cell_N], np.arange(sizes_DN.shape[1])]
    return np.asarray(np.lexsort((-key_N, cell_N)))
