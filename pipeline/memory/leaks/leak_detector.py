"""Finds what makes memory grow from step to step, and reports it before it ends the run.

    leaks = Leaks(device="cpu", tell=lambda leak: print(leak.words()), limit_bytes=4 << 30)
    for epoch in range(50):
        for batch in loader:
            with leaks.watching():  # nothing, unless something is suspected
                model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            leaks.step(bucket)  # a few microseconds
        leaks.epoch()

Suspected is memory that grew in two epochs running, the first aside, or, within an epoch, in lap after lap so fast
that it would end the run. Then some steps are inspected closely (`InspectionWindow`), and what they leave is reported.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeline.memory.leaks import inspection
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from pipeline.memory.leaks.inspection import InspectionWindow, Leftover

TENSORS, HOST, OBJECTS = "tensors", "host memory", "Python objects"
# What may come in an epoch without being a leak: records of the epoch, free lists, malloc's bookkeeping.
TENSOR_FLOOR_BYTES, HOST_FLOOR_BYTES, RESIDENT_FLOOR_BYTES = 64 << 10, 1 << 20, 8 << 20
OBJECTS_EVERY = 8  # steps: to count Python's objects takes 25 µs for 160 000 of them [measured], and more for more
WINDOWS = (4, 16, 64)  # steps: what does not leak at every step wants a longer look
EXPLAINED = 0.5  # of what grows must be found, or a longer look follows
LEAST_SHARE = 0.05  # of what was found, to be told
NEAR = 20  # within an epoch: the limit is so many times as far as the run has come, or nearer
WITHOUT_LIMIT = 0.25  # of what is live, as growth, where there is no limit
NOT_FOUND = "what grows was not found: it is allocated by no operator and no Python code"
REST = 4  # times the steps so far are made after a look in vain, before the next
AGAIN = 2.0  # a leak is told again when it has taken so many times as much


@dataclass(frozen=True, slots=True)
class MemoryLeak:
    """Something that grows."""

    memory: str  # whose: tensors, host memory or Python objects
    bytes_per_step: int
    bytes_per_epoch: int | None  # none: no epoch has ended yet
    total_bytes: int  # so far
    types: tuple[str, ...] = ()  # what it is: "4 x Tensor float32 [64, 128]" in the steps looked at
    sites: tuple[str, ...] = ()  # where it was made: "train.py:31 in loss"
    holder: str = ""  # who keeps it: "list `history` of mylab.docking.Model"
    steps_left: int | None = None  # until the limit, at this rate; none: nobody knows the limit

    def words(self) -> str:
        epoch = "" if self.bytes_per_epoch is None else f", {format_bytes(self.bytes_per_epoch)} an epoch"
        rate = f"by {format_bytes(self.bytes_per_step)} a step{epoch}, {format_bytes(self.total_bytes)} so far"
        known = (
            ", ".join(self.types) or NOT_FOUND,
            f"made at {'; '.join(self.sites)}" if self.sites else "",
            f"kept by {self.holder}" if self.holder else "",
            f"out of memory in about {self.steps_left} steps" if self.steps_left is not None else "",
        )
        verb = "grows" if self.memory == HOST else "grow"
        return f"{self.memory} {verb} {rate}: {', '.join(filter(None, known))}"


class Leaks:
    """Watches the memory of one process at the boundaries of its steps."""

    def __init__(
        self,
        *,
        device: str,
        live: Callable[[], int] | None = None,
        tell: Callable[[MemoryLeak], None],
        limit_bytes: int | None,
        step_bytes: int = 0,
    ) -> None:
        """Begin; `live` counts bytes of tensors where torch does not, `step_bytes` is what a step adds at its peak."""
        self.limit_bytes, self.step_bytes = limit_bytes, step_bytes
        self._tell = tell
        on_cpu = device.partition(":")[0] == "cpu"
        self._tensors = live or (None if on_cpu else card_counter(device))
        self._limited = self._tensors or resident_bytes  # what ends at the limit
        self._series = _series(self._tensors, shared=on_cpu)
        self._step = self._epoch_began = 0
        self._epoch_steps: int | None = None
        self._window: InspectionWindow | None = None
        self._tries = 0
        self._searched = False  # in vain
        self._rests_until = 0  # the step before which no further look is taken
        self._leaks: dict[tuple[str, ...], MemoryLeak] = {}
        self._told: dict[tuple[str, ...], int] = {}
        self._rates: dict[str, float] = {}  # that are looked into, in bytes per step

    def step(self, bucket: Hashable) -> None:
        """Note the end of a step of a bucket, after its gradients were released."""
        self._step += 1
        lap = False
        for series in self._series:
            is_due = series.name != OBJECTS or self._step % OBJECTS_EVERY == 0
            if is_due and (self._window is None or series.name == TENSORS):  # a look's own records are host memory, too
                lap |= series.add(bucket, series.count(), self._step)
        if self._window is not None:
            self._look(self._window)
        elif lap:
            self._consider({series: series.by_laps for series in self._series if self._is_grave(series)})

    def epoch(self) -> list[MemoryLeak]:
        """Note the end of an epoch; return the known leaks with present figures."""
        self._epoch_steps, self._epoch_began = self._step - self._epoch_began, self._step
        for series in self._series:
            series.end_epoch()
        if self._window is None:
            rates = {series: series.by_epochs for series in self._series}
            self._consider({series: rate for series, rate in rates.items() if rate > 0})
        return list(self._leaks.values())

    def watching(self) -> AbstractContextManager[Any]:
        """Return the context to run forward and backward in; it does nothing unless a leak is suspected."""
        return nullcontext() if self._window is None else self._window.watching()

    def close(self) -> None:
        if self._window is not None:
            self._window.close()
        self._window = None

    def _is_grave(self, series: Series) -> bool:
        """Tell whether a series grows so fast that the run would not last much longer."""
        rate = series.by_laps
        if rate <= 0:
            return False
        steps_left = self._steps_left(series.name, rate)
        if steps_left is None:
            return series.gained_bytes > WITHOUT_LIMIT * (series.live_bytes - series.gained_bytes)
        return steps_left < NEAR * self._step

    def _steps_left(self, memory: str, rate: float) -> int | None:
        if self.limit_bytes is None or (memory != TENSORS and self._tensors is not None):
            return None
        return max(0, int((self.limit_bytes - self.step_bytes - self._limited()) / rate))

    def _consider(self, suspected: Mapping[Series, float]) -> None:
        """Inspect suspected growth (bytes per step by series), unless known leaks explain it."""
        if not suspected:
            return
        rates = {series.name: rate for series, rate in suspected.items()}
        known = sum(leak.bytes_per_step for leak in self._leaks.values())
        if known and sum(rates.values()) < known * AGAIN:
            self._rates = rates
            self._refresh(known, sum(series.gained_bytes for series in suspected))
        elif self._searched:
            self._searched = False
            for series, rate in suspected.items():
                self._report(self._leak(series.name, rate, series.gained_bytes, None))
        elif self._step >= self._rests_until:
            self._rates = rates
            self._open()

    def _open(self) -> None:
        self._window = inspection.InspectionWindow(WINDOWS[self._tries], with_objects=set(self._rates) != {TENSORS})

    def _look(self, window: InspectionWindow) -> None:
        """Go on with an inspection; when complete, report what it found, or take a longer one."""
        if not window.boundary():
            return
        # Where small objects grow, what refers to them does too, in leaps, and is not counted with them.
        without = HOST if OBJECTS in self._rates else None
        expected = sum(rate for name, rate in self._rates.items() if name != without)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                leftovers = window.found(expected)
            except Exception:  # noqa: BLE001 - it looks at all objects there are, and some are built to object
                leftovers = []  # a search that fails has found nothing, and ends no run
        self.close()
        explained = sum(leftover.bytes_per_step for leftover in leftovers)
        if explained < EXPLAINED * expected:
            self._tries += 1
            if self._tries < len(WINDOWS):
                self._open()
                return
            self._searched = not leftovers
            self._rests_until = 0 if leftovers else REST * self._step  # a look slows training down several times
        self._tries = 0
        self._name(leftovers, explained, expected)

    def _name(self, leftovers: Sequence[Leftover], explained: float, expected: float) -> None:
        # Items differ in size, and some steps are few; where only tensors and arrays grow, the long run is exact.
        scale = expected / explained if explained and OBJECTS not in self._rates else 1.0
        if not EXPLAINED <= scale <= 1 / EXPLAINED:
            scale = 1.0
        gained = sum(series.gained_bytes for series in self._series if series.name in self._rates)
        memory = max(self._rates, key=lambda name: self._rates[name])
        for leftover in leftovers:
            share = leftover.bytes_per_step / explained
            if share >= LEAST_SHARE:
                self._report(self._leak(memory, scale * leftover.bytes_per_step, round(share * gained), leftover))

    def _leak(self, memory: str, rate: float, total: int, leftover: Leftover | None) -> MemoryLeak:
        epoch = None if self._epoch_steps is None else round(rate * self._epoch_steps)
        steps_left = self._steps_left(memory, max(rate, sum(self._rates.values())))
        details = (leftover.kinds, leftover.sites, leftover.holder) if leftover else ((), (), "")
        return MemoryLeak(memory, round(rate), epoch, total, *details, steps_left)

    def _refresh(self, known: int, gained: int) -> None:
        """Update the known leaks, and report again those that have grown much."""
        for leak in list(self._leaks.values()):
            epoch = None if self._epoch_steps is None else leak.bytes_per_step * self._epoch_steps
            steps_left = self._steps_left(leak.memory, max(sum(self._rates.values()), 1.0))
            total = round(leak.bytes_per_step / known * gained)
            self._report(replace(leak, bytes_per_epoch=epoch, total_bytes=total, steps_left=steps_left))

    def _report(self, leak: MemoryLeak) -> None:
        """Keep a leak; report it if it is new, or has grown much since."""
        key = (leak.memory, leak.holder, *leak.sites)
        known = self._leaks.get(key)
        self._leaks[key] = leak
        if known is None or leak.total_bytes >= AGAIN * self._told.get(key, 0):
            self._told[key] = leak.total_bytes
            self._tell(leak)


def _series(tensors: Callable[[], int] | None, *, shared: bool) -> list[Series]:
    """Return the series to watch: Python objects, tensors, host memory."""
    series = [Series(OBJECTS, HOST_FLOOR_BYTES, small_objects_bytes)]
    if tensors is not None:
        series.append(Series(TENSORS, TENSOR_FLOOR_BYTES, tensors))
    malloc = malloc_counter()
    if malloc is None:
        return [*series, Series(HOST, RESIDENT_FLOOR_BYTES, resident_bytes)]
    if tensors is not None and shared:
        host, counted = malloc, tensors  # tensors are in malloc's memory: what is left of it is counted
        return [*series, Series(HOST, HOST_FLOOR_BYTES, lambda: host() - counted())]
    return [*series, Series(HOST, HOST_FLOOR_BYTES, malloc)]


Marks: TypeAlias = "dict[Hashable, tuple[int, int]]"  # bucket -> (least live bytes, the step at which it was)

ANY = "any bucket"
MOST_BUCKETS = 512  # of one span; where nearly every step has its own, all are compared as one
COMMON = 3  # buckets that two spans must share to be compared by them
LASTING = 0.5  # of the growth before: a cache that fills slows down, a leak does not
LAPS, LAST_LAPS = 16, 6  # kept at most; and how many must all have grown
LAP_STEPS = 8  # at first: 56 steps are the earliest at which anything is suspected


def note_least(marks: Marks, bucket: Hashable, live: int, step: int) -> None:
    """Keep the least live bytes of a bucket, and of all buckets."""
    for key in (bucket, ANY):
        known = marks.get(key)
        if live < known[0] if known else len(marks) < MOST_BUCKETS:
            marks[key] = live, step


def growth(before: Marks, after: Marks) -> tuple[float, float]:
    """Return the median growth of a bucket between two spans, in bytes and in bytes per step."""
    common = [bucket for bucket in after if bucket in before and bucket != ANY]
    if len(common) < COMMON:
        common = [bucket for bucket in after if bucket in before]
    pairs = [(after[bucket][0] - before[bucket][0], after[bucket][1] - before[bucket][1]) for bucket in common]
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

    def __init__(self, name: str, floor_bytes: int, count: Callable[[], int]) -> None:
        self.name, self.floor_bytes, self.count = name, floor_bytes, count
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
        note_least(self._epoch, bucket, live, step)
        if step <= LAP_STEPS:  # optimizer state, workspaces, compiled kernels
            return False
        note_least(self._lap, bucket, live, step)
        if step < self._lap_end:
            return False
        self._end_lap(step)
        return True

    def _end_lap(self, step: int) -> None:
        self.laps.append(self._lap)
        self.base = self.base or self._lap
        self._lap = {}
        if len(self.laps) == LAPS:  # a run of any length is known by so many
            self.laps = [_merged(*pair) for pair in zip(self.laps[::2], self.laps[1::2], strict=True)]
            self._lap_steps *= 2
        self._lap_end = step + self._lap_steps

    def end_epoch(self) -> None:
        self._ended += 1
        if self._ended > 1 and self._epoch:
            self.epochs = [*self.epochs[-2:], self._epoch]
        self._epoch = {}

    @property
    def by_epochs(self) -> float:
        """Return the growth over the last three epochs in bytes per step; 0 if there is none."""
        return leaking(self.epochs, self.floor_bytes) if len(self.epochs) == 3 else 0.0

    @property
    def by_laps(self) -> float:
        """Return the growth over the last laps in bytes per step; 0 if there is none."""
        return leaking(self.laps[-LAST_LAPS:], self.floor_bytes / LAST_LAPS) if len(self.laps) >= LAST_LAPS else 0.0

    @property
    def gained_bytes(self) -> int:
        """Return how much more is live than at the first lap."""
        newest = self._lap or (self.laps[-1] if self.laps else {})
        return max(0, round(growth(self.base, newest)[0])) if self.base and newest else 0


def _merged(first: Marks, second: Marks) -> Marks:
    marks = dict(first)
    for bucket, (live, step) in second.items():
        note_least(marks, bucket, live, step)
    return marks


BLOCK_BYTES = 48  # of a small object of Python's, as it usually is: only their number is told


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

    # Another malloc may stand before glibc's, which then knows of nothing.
    before = count()
    probe = ctypes.create_string_buffer(_PROBE_BYTES)
    counted = count() - before
    del probe
    return count if counted >= _PROBE_BYTES else None


def resident_bytes() -> int:
    """Return the process's resident memory without mapped files; 0 if unknown."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:  # noqa: PTH123 - asked at every step
            _, resident, shared = file.read(256).split()[:3]
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def small_objects_bytes() -> int:
    """Return about how much memory Python's small objects take, which malloc does not see."""
    return sys.getallocatedblocks() * BLOCK_BYTES


def card_counter(device: str) -> Callable[[], int]:
    """Return a function that counts the bytes of tensors on a card."""
    import torch

    on = torch.device(device)
    return lambda: int(torch.cuda.memory_allocated(on))
