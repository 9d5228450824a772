"""Detects memory that grows from step to step, and reports its cause before it ends the run.

    leaks = Leaks(live=None, report=lambda leak: print(leak.words()), limit_bytes=4 << 30)
    for epoch in range(50):
        for batch in loader:
            with leaks.watching():  # does nothing, unless growth is suspected
                model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            leaks.step()  # some 30 microseconds
        leaks.epoch()

Growth is suspected if memory grew in two consecutive epochs, not counting the first. Within an epoch, it is suspected
if it grew over laps that double in length, so fast that the run would not last. Then some steps are inspected closely
(`Inspection`), and their leftovers are reported. Inspected steps are slow, so only one step in 1,000 is inspected after
the first inspection.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from pipeline.memory.leak_inspection import INSPECTED, Inspection, Leftover
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

TENSORS, HOST = "tensors", "host memory"
# The growth of an epoch that is no leak: records of the epoch, free lists, malloc's bookkeeping.
TENSOR_FLOOR_BYTES, HOST_FLOOR_BYTES, RESIDENT_FLOOR_BYTES = 64 << 10, 1 << 20, 8 << 20
OBJECT_BYTES = 48  # of a small Python object, typically: Python counts only how many there are
FIRST_LAP = 8  # steps; those before create the optimizer's state, workspaces and compiled kernels
LASTING = 0.5  # of the growth before: a cache that fills slows down, a leak does not
EXPLAINED = 0.5  # the share of the growth that found leftovers, or later growth, must reach
LEAST_SHARE = 0.05  # of the growth, to be reported
NEAR = 20  # within an epoch: the limit is at most this many times as far away as the run has come
WITHOUT_LIMIT = 0.25  # of the live bytes, as growth, where the limit of this memory is unknown
INSPECTED_SHARE = 1 / 1000  # of all steps, as an inspected one takes about 20 times as long
AGAIN = 2.0  # a leak is reported again when it has grown by this factor


class Live(NamedTuple):
    """The bytes in use after a step."""

    bytes: int
    step: int


def leaking(spans: Sequence[Live], floor_bytes: float) -> float:
    """Return bytes per step if the least of three spans grew by enough and without slowing down; else 0."""
    if len(spans) < 3:
        return 0.0
    first, middle, last = spans[-3:]
    early, late, rate = _rate(first, middle), _rate(middle, last), _rate(first, last)
    goes_on = early > 0 and late >= LASTING * early
    return rate if goes_on and last.bytes - first.bytes >= 2 * floor_bytes else 0.0


def _rate(before: Live, after: Live) -> float:
    return (after.bytes - before.bytes) / max(1, after.step - before.step)


class Series:
    """One counter of bytes over a run, known by the least of each epoch and lap."""

    def __init__(self, name: str, floor_bytes: int, count: Callable[[], int]) -> None:
        self.name, self.floor_bytes, self.count = name, floor_bytes, count
        self.epochs: list[Live] = []
        self.laps: list[Live] = []
        self.live = Live(0, 0)
        self._base: Live | None = None
        self._epoch: Live | None = None
        self._lap: Live | None = None
        self._lap_end = 2 * FIRST_LAP
        self._is_first_epoch = True

    def add(self, step: int) -> bool:
        """Count after a step; return whether a lap ended."""
        self.live = live = Live(self.count(), step)
        self._epoch = min(self._epoch or live, live)
        if step <= FIRST_LAP:
            return False
        self._base = self._base or live
        self._lap = min(self._lap or live, live)
        if step < self._lap_end:
            return False
        self.laps.append(self._lap)
        self._lap, self._lap_end = None, 2 * step
        return True

    def end_epoch(self) -> None:
        """Note the end of an epoch; in the first, caches fill."""
        if self._epoch is not None and not self._is_first_epoch:
            self.epochs.append(self._epoch)
        self._is_first_epoch, self._epoch = False, None

    def restart(self) -> None:
        """Forget the epochs and laps so far."""
        self.epochs, self.laps = [], []

    @property
    def gained_bytes(self) -> int:
        """Return the growth since the first lap."""
        return max(0, self.live.bytes - (self._base or self.live).bytes)


@dataclass(frozen=True, slots=True)
class MemoryLeak:
    """Memory that grows from step to step."""

    memory: str  # which: tensors on a GPU, or the host's
    bytes_per_step: int
    bytes_per_epoch: int | None  # None: no epoch has ended yet
    total_bytes: int  # so far
    types: tuple[str, ...] = ()  # "4 x Tensor float32 [64, 128]" in the inspected steps
    sites: tuple[str, ...] = ()  # the lines that made it: "train.py:31 in loss"
    holder: str = ""  # "list `history` of mylab.docking.Model"
    steps_left: int | None = None  # until the limit, at this rate; None: unknown

    @property
    def key(self) -> tuple[str, ...]:
        """Return what identifies a leak, however large it has grown."""
        return (self.memory, self.holder, *self.sites)

    def words(self) -> str:
        epoch = "" if self.bytes_per_epoch is None else f", {format_bytes(self.bytes_per_epoch)} an epoch"
        rate = f"by {format_bytes(self.bytes_per_step)} a step{epoch}, {format_bytes(self.total_bytes)} so far"
        known = (
            ", ".join(self.types) or "no growing object was found in the inspected steps",
            f"made at {'; '.join(self.sites)}" if self.sites else "",
            f"kept by {self.holder}" if self.holder else "",
            f"out of memory in about {self.steps_left} steps" if self.steps_left is not None else "",
        )
        verb = "grows" if self.memory == HOST else "grow"
        return f"{self.memory} {verb} {rate}: {', '.join(filter(None, known))}"


class Leaks:
    """Watches the memory of one process at the boundaries of its steps."""

    def __init__(
        self, *, live: Callable[[], int] | None, report: Callable[[MemoryLeak], None], limit_bytes: int
    ) -> None:
        """Start; `live` counts the bytes of tensors on a GPU: the limit is then that of the GPU.

        `steps` of the whole training limit the inspections.
        """
        self.limit_bytes, self.steps = limit_bytes, math.inf
        self.known: dict[tuple[str, ...], MemoryLeak] = {}
        self._report, self._tensors = report, live
        self._series = self._counted()
        self._step = self._epoch_start = self._inspected = self._missed_at = 0
        self._epoch_steps: int | None = None
        self._rates: Mapping[Series, float] = {}  # of suspected growth, in bytes per step
        self._missed: dict[Series, int] = {}  # live bytes when an inspection had found nothing
        self._inspection: Inspection | None = None
        self._reported: dict[tuple[str, ...], int] = {}  # total bytes

    def _counted(self) -> list[Series]:
        """Return the series to watch: tensors, and the host memory of malloc and of small Python objects."""
        host_floor = RESIDENT_FLOOR_BYTES if malloc_counter() is None else HOST_FLOOR_BYTES
        series = [Series(HOST, host_floor, self._host_bytes)]
        return [*series, Series(TENSORS, TENSOR_FLOOR_BYTES, self._tensors)] if self._tensors is not None else series

    def _host_bytes(self) -> int:
        malloc = malloc_counter()
        return resident_bytes() if malloc is None else malloc() + sys.getallocatedblocks() * OBJECT_BYTES

    def step(self) -> None:
        """Note the end of a step, after its gradients were released."""
        self._step += 1
        if self._inspection is not None:  # its records take memory, too
            if self._inspection.end_step():
                self._conclude(self._inspection)
            return
        laps = [series.add(self._step) for series in self._series]
        if any(laps):
            rates = {series: leaking(series.laps, series.floor_bytes) for series in self._series}
            self._suspect({series: rate for series, rate in rates.items() if self._ends_the_run(series, rate)})

    def epoch(self) -> None:
        """Note the end of an epoch."""
        self._epoch_steps, self._epoch_start = self._step - self._epoch_start, self._step
        for series in self._series:
            series.end_epoch()
        if self._inspection is None:
            rates = {series: leaking(series.epochs, series.floor_bytes) for series in self._series}
            self._suspect({series: rate for series, rate in rates.items() if rate > 0})

    def watching(self) -> AbstractContextManager[Any]:
        """Return the context to run forward and backward in; it does nothing unless growth is suspected."""
        return nullcontext() if self._inspection is None else self._inspection.watch

    def close(self) -> None:
        if self._inspection is not None:
            self._inspection.close()
        self._inspection = None

    def _ends_the_run(self, series: Series, rate: float) -> bool:
        """Tell whether a series grows so fast that the run would not last much longer."""
        steps_left = self._steps_left(series.name, rate)
        if steps_left is None:
            return rate > 0 and series.gained_bytes > WITHOUT_LIMIT * (series.live.bytes - series.gained_bytes)
        return steps_left < NEAR * self._step

    def _steps_left(self, memory: str, rate: float) -> int | None:
        if rate <= 0 or (memory != TENSORS and self._tensors is not None):
            return None
        return max(0, int((self.limit_bytes - (self._tensors or resident_bytes)()) / rate))

    def _suspect(self, rates: Mapping[Series, float]) -> None:
        """Inspect growth, unless known leaks explain it, or it continued after an inspection found nothing."""
        if not rates:
            return
        self._rates = rates
        rate, known = sum(rates.values()), sum(leak.bytes_per_step for leak in self.known.values())
        if rate < AGAIN * known:
            for leak in list(self.known.values()):
                self._note(replace(leak, **self._sizes(leak.memory, leak.bytes_per_step, known)))
        elif self._went_on():
            for series, series_rate in rates.items():
                self._note(MemoryLeak(series.name, **self._sizes(series.name, series_rate, rate)))
        elif self._inspected and self._inspected + INSPECTED > INSPECTED_SHARE * max(self.steps, self._step):
            self._note_missed()
        else:
            self._inspected += INSPECTED
            self._inspection = Inspection(with_objects={series.name for series in rates} != {TENSORS})

    def _note_missed(self) -> None:
        self._missed_at, self._missed = self._step, {series: series.live.bytes for series in self._rates}
        for series in self._rates:
            series.restart()

    def _went_on(self) -> bool:
        """Tell whether a series has grown ever since an inspection found nothing; noise that rose does not."""
        steps = self._step - self._missed_at
        gained = {series: series.live.bytes - then for series, then in self._missed.items()}
        return any(gained.get(series, -1) >= EXPLAINED * rate * steps for series, rate in self._rates.items())

    def _conclude(self, inspection: Inspection) -> None:
        """Report what an inspection found."""
        expected = sum(self._rates.values())
        leftovers: list[Leftover] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with suppress(Exception):  # it looks at all objects, and some raise when looked at: that ends no run
                leftovers = inspection.found()
        self.close()
        # Leftovers much smaller than the growth, a log say, are not why memory grows.
        least = LEAST_SHARE * max(expected, *(leftover.bytes_per_step for leftover in leftovers), 0)
        leftovers = [leftover for leftover in leftovers if leftover.bytes_per_step >= least]
        if not leftovers:
            self._note_missed()
            return
        self._missed = {}
        explained = sum(leftover.bytes_per_step for leftover in leftovers)
        memory = max(self._rates, key=lambda series: self._rates[series]).name
        # Items differ in size, and an inspection is short: the rate over the whole run is more precise for tensors.
        scale = expected / explained if memory == TENSORS else 1.0
        scale = scale if EXPLAINED <= scale <= 1 / EXPLAINED else 1.0
        for found in leftovers:
            sizes = self._sizes(memory, scale * found.bytes_per_step, scale * explained)
            self._note(MemoryLeak(memory, **sizes, types=found.kinds, sites=found.sites, holder=found.holder))

    def _sizes(self, memory: str, rate: float, known: float) -> dict[str, Any]:
        """Return the sizes of a leak that grows at some rate, out of that of all known leaks."""
        return {
            "bytes_per_step": round(rate),
            "bytes_per_epoch": None if self._epoch_steps is None else round(rate * self._epoch_steps),
            "total_bytes": round(rate / known * sum(series.gained_bytes for series in self._rates)),
            "steps_left": self._steps_left(memory, max(rate, sum(self._rates.values()))),
        }

    def _note(self, leak: MemoryLeak) -> None:
        """Keep a leak; report it if it is new, or has grown much since."""
        is_new = leak.key not in self.known
        self.known[leak.key] = leak
        if is_new or leak.total_bytes >= AGAIN * self._reported.get(leak.key, 0):
            self._reported[leak.key] = leak.total_bytes
            self._report(leak)


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
        counts = mallinfo()
        return int(counts.uordblks + counts.hblkhd)

    before, probe = count(), ctypes.create_string_buffer(1 << 20)
    # Another malloc may stand before glibc's, which then counts nothing.
    return count if count() - before >= len(probe) else None


def resident_bytes() -> int:
    """Return the process's resident memory without mapped files."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))
