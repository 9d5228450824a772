"""Counters of memory in use, and a test whether one grows: from epoch to epoch, and from lap to lap within them."""

from __future__ import annotations

import ctypes
import functools
import sys
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

Marks: TypeAlias = "dict[Hashable, tuple[int, int]]"  # bucket -> (least live bytes, the step at which it was)

ANY = "any bucket"
MOST_BUCKETS = 512  # of one span; where nearly every step has its own, all are compared as one
COMMON = 3  # buckets that two spans must share to be compared by them
LASTING = 0.5  # of the growth before: a cache that fills slows down, a leak does not
LAPS, LAST_LAPS = 16, 6  # kept at most; and how many must all have grown
LAP_STEPS = 8  # at first: 56 steps are the earliest at which a lap can raise suspicion
EPOCHS = 3  # that are compared; the first of a run, in which caches fill, is dropped


def note_least(marks: Marks, bucket: Hashable, live: int, step: int) -> None:
    """Keep the least live bytes of a bucket, and of all buckets."""
    for key in (bucket, ANY):
        known = marks.get(key)
        if live < known[0] if known else len(marks) < MOST_BUCKETS:
            marks[key] = live, step


def growth(before: Marks, after: Marks) -> tuple[float, float]:
    """Return the median growth of a bucket between two spans, in bytes and in bytes per step."""
    shared = after.keys() & before.keys()
    buckets = shared - {ANY} if len(shared - {ANY}) >= COMMON else shared
    gains = [(after[bucket][0] - before[bucket][0], after[bucket][1] - before[bucket][1]) for bucket in buckets]
    if not gains:
        return 0.0, 0.0
    return median(gained for gained, _ in gains), median(gained / max(steps, 1) for gained, steps in gains)


def leaking(spans: Sequence[Marks], floor_bytes: float) -> float:
    """Return bytes per step if every span grew on the one before, by enough in all and without slowing down; else 0."""
    gains = [growth(before, after) for before, after in pairwise(spans)]
    if len(gains) < 2 or min(gained for gained, _ in gains) <= 0:
        return 0.0
    half = len(gains) // 2
    early, late = (median(rate for _, rate in part) for part in (gains[:half], gains[-half:]))
    gained, rate = growth(spans[0], spans[-1])
    return rate if late >= LASTING * early and gained >= floor_bytes * len(gains) else 0.0


class Series:
    """One counter of bytes over a run."""

    def __init__(self, name: str, floor_bytes: int, count: Callable[[], int]) -> None:
        self.name, self.floor_bytes, self.count = name, floor_bytes, count
        self.epochs: list[Marks] = []
        self.laps: list[Marks] = []
        self.live_bytes = 0  # when last counted
        self._base: Marks = {}  # the first lap
        self._epoch: Marks = {}
        self._lap: Marks = {}
        self._lap_steps, self._lap_end = LAP_STEPS, 2 * LAP_STEPS
        self._is_first_epoch = True

    def add(self, bucket: Hashable, live: int, step: int) -> bool:
        """Note the live bytes after a step; return whether a lap ended."""
        self.live_bytes = live
        note_least(self._epoch, bucket, live, step)
        if step <= LAP_STEPS:  # optimizer state, workspaces, compiled kernels
            return False
        note_least(self._lap, bucket, live, step)
        if step < self._lap_end:
            return False
        self.laps.append(self._lap)
        self._base = self._base or self._lap
        self._lap = {}
        if len(self.laps) == LAPS:  # a run of any length is known by so many
            self.laps = [_merged(*pair) for pair in zip(self.laps[::2], self.laps[1::2], strict=True)]
            self._lap_steps *= 2
        self._lap_end = step + self._lap_steps
        return True

    def end_epoch(self) -> None:
        if self._epoch and not self._is_first_epoch:
            self.epochs = [*self.epochs[1 - EPOCHS :], self._epoch]
        self._is_first_epoch, self._epoch = False, {}

    def restart(self) -> None:
        """Forget the epochs and laps so far."""
        self.epochs, self.laps = [], []

    @property
    def by_epochs(self) -> float:
        """Return the growth over the last epochs in bytes per step; 0 if there is none."""
        return leaking(self.epochs, self.floor_bytes) if len(self.epochs) == EPOCHS else 0.0

    @property
    def by_laps(self) -> float:
        """Return the growth over the last laps in bytes per step; 0 if there is none."""
        return leaking(self.laps[-LAST_LAPS:], self.floor_bytes / LAST_LAPS) if len(self.laps) >= LAST_LAPS else 0.0

    @property
    def gained_bytes(self) -> int:
        """Return the growth since the first lap."""
        return max(0, round(growth(self._base, self._lap or (self.laps[-1] if self.laps else {}))[0]))


def _merged(first: Marks, second: Marks) -> Marks:
    marks = dict(first)
    for bucket, (live, step) in second.items():
        note_least(marks, bucket, live, step)
    return marks


BLOCK_BYTES = 48  # of a small Python object, typically: Python counts only how many there are
_PROBE_BYTES = 1 << 20


class _Mallinfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in names.split())


@functools.cache
def malloc_counter() -> Callable[[], int] | None:
    """Return a function that counts the bytes allocated by malloc, tensors and arrays included; None if unavailable."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2  # glibc since 2.33; `mallinfo` would wrap at 4 GiB
    except (AttributeError, OSError):
        return None
    mallinfo.restype = _Mallinfo

    def count() -> int:
        figures = mallinfo()
        return int(figures.uordblks + figures.hblkhd)

    # Another malloc may stand before glibc's, which then counts nothing.
    before = count()
    probe = ctypes.create_string_buffer(_PROBE_BYTES)
    counted = count() - before
    del probe
    return count if counted >= _PROBE_BYTES else None


def resident_bytes() -> int:
    """Return the process's resident memory without mapped files."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


def small_objects_bytes() -> int:
    """Return about how much memory Python's small objects take, which malloc does not see."""
    return sys.getallocatedblocks() * BLOCK_BYTES
