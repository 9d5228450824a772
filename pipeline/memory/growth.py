"""Whether memory grows from step to step: rules on the least that was live, bucket by bucket.

Live bytes at a step's boundary differ by what the loop holds: the batch, one read ahead, a copy that is being saved.
The least of a bucket over an epoch (or over a lap of some steps) has none of it, and is at a known step: two of them
give a rate that does not depend on where in the epoch the bucket came.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

Marks: TypeAlias = "dict[Hashable, tuple[int, int]]"  # bucket -> (least live bytes, the step at which it was)

ANY = "any bucket"
MOST_BUCKETS = 512  # of one span; where nearly every step has its own, all are compared as one
COMMON = 3  # buckets that two spans must share to be compared by them
LASTING = 0.5  # of the growth before: a cache that fills slows down, a leak does not
LAPS, LAST_LAPS = 16, 6  # kept at most; and how many must all have grown
LAP_STEPS = 8  # at first: 56 steps are the earliest at which anything is suspected


def note(marks: Marks, bucket: Hashable, live: int, step: int) -> None:
    """Keep the least of a bucket, and of all."""
    for one in (bucket, ANY):
        known = marks.get(one)
        if (known is None and len(marks) < MOST_BUCKETS) or (known is not None and live < known[0]):
            marks[one] = live, step


def growth(before: Marks, after: Marks) -> tuple[float, float]:
    """Return by how many bytes the usual bucket grew between two spans, and how many that is per step."""
    common = [one for one in after if one in before and one != ANY]
    if len(common) < COMMON:
        common = [one for one in after if one in before]
    pairs = [(after[one][0] - before[one][0], after[one][1] - before[one][1]) for one in common]
    if not pairs:
        return 0.0, 0.0
    return median(gained for gained, _ in pairs), median(gained / max(steps, 1) for gained, steps in pairs)


def leaking(spans: Sequence[Marks], floor_bytes: float) -> float:
    """Return bytes per step if every span grew on the one before, by enough in all and without slowing down; else 0."""
    gains = [growth(before, after) for before, after in pairwise(spans)]
    if len(gains) < 2 or min(gained for gained, _ in gains) <= 0:
        return 0.0
    half = len(gains) // 2
    early, late = (median(rate for _, rate in part) for part in (gains[:half], gains[-half:]))
    if late < LASTING * early:
        return 0.0
    gained, rate = growth(spans[0], spans[-1])
    return rate if gained >= floor_bytes * len(gains) else 0.0


class Series:
    """One count of bytes over a run: by epochs, and by laps within them."""

    def __init__(self, name: str, floor_bytes: int) -> None:
        self.name, self.floor_bytes = name, floor_bytes
        self.epochs: list[Marks] = []  # the first, in which caches fill, is dropped
        self.laps: list[Marks] = []
        self.base: Marks = {}  # what was live when growth began to count
        self.live_bytes = 0  # when last looked
        self._epoch: Marks = {}
        self._lap: Marks = {}
        self._lap_steps, self._lap_end = LAP_STEPS, 2 * LAP_STEPS
        self._ended = 0

    def add(self, bucket: Hashable, live: int, step: int) -> bool:
        """Note what is live after a step; return whether a lap ended."""
        self.live_bytes = live
        note(self._epoch, bucket, live, step)
        if step <= LAP_STEPS:  # optimizer state, workspaces, compiled kernels
            return False
        note(self._lap, bucket, live, step)
        if step < self._lap_end:
            return False
        self._end_lap(step)
        return True

    def _end_lap(self, step: int) -> None:
        self.laps.append(self._lap)
        self.base = self.base or self._lap
        self._lap = {}
        if len(self.laps) == LAPS:  # a run of any length is known by so many
            self.laps = [_merged(*self.laps[place : place + 2]) for place in range(0, LAPS, 2)]
            self._lap_steps *= 2
        self._lap_end = step + self._lap_steps

    def end_epoch(self) -> None:
        """Let an epoch end."""
        self._ended += 1
        if self._ended > 1 and self._epoch:
            self.epochs = [*self.epochs[-2:], self._epoch]
        self._epoch = {}

    @property
    def by_epochs(self) -> float:
        """Return the bytes per step by which the last three epochs grew; 0: they did not."""
        return leaking(self.epochs, self.floor_bytes) if len(self.epochs) == 3 else 0.0

    @property
    def by_laps(self) -> float:
        """Return the bytes per step by which the last laps grew; 0: they did not."""
        return leaking(self.laps[-LAST_LAPS:], self.floor_bytes / LAST_LAPS) if len(self.laps) >= LAST_LAPS else 0.0

    @property
    def gained_bytes(self) -> int:
        """Return how much more is live than when growth began to count."""
        newest = self._lap or (self.laps[-1] if self.laps else {})
        return max(0, round(growth(self.base, newest)[0])) if self.base and newest else 0


def _merged(first: Marks, second: Marks) -> Marks:
    both = dict(first)
    for bucket, (live, step) in second.items():
        note(both, bucket, live, step)
    return both
