"""Detects memory that grows from step to step, finds its cause, and reports it before it ends the run.

    leaks = Leaks(device="cpu", report=lambda leak: print(leak.words()), limit_bytes=4 << 30)
    for epoch in range(50):
        for batch in loader:
            with leaks.watching():  # does nothing, unless growth is suspected
                model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            leaks.step(bucket)  # a few microseconds
        leaks.epoch()

Growth is suspected if memory grew in two consecutive epochs, not counting the first. Within an epoch, it is suspected
if lap after lap grew so fast that the run would not last. Then some steps are inspected closely (`Inspection`), and
their leftovers are reported. Inspected steps are slow, so inspections take at most 2% of the training's time, except
for the first.
"""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from pipeline.device.kinds import CPU
from pipeline.memory.leaks.inspection import SETTLED, WINDOW, Inspection, Leftover
from pipeline.memory.leaks.memory_growth import (
    Series,
    malloc_counter,
    resident_bytes,
    small_objects_bytes,
)
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from torch import Tensor

TENSORS, HOST, OBJECTS = "tensors", "host memory", "Python objects"
# The growth of an epoch that is no leak: records of the epoch, free lists, malloc's bookkeeping.
TENSOR_FLOOR_BYTES, HOST_FLOOR_BYTES, RESIDENT_FLOOR_BYTES = 64 << 10, 1 << 20, 8 << 20
OBJECTS_EVERY = 8  # steps: to count Python's objects takes 25 µs for 160 000 of them [measured], and more for more
EXPLAINED = 0.5  # the share of the growth that found leftovers, or later growth, must reach
LEAST_SHARE = 0.05  # of the growth, to be reported
NEAR = 20  # within an epoch: the limit is so many times as far as the run has come, or nearer
WITHOUT_LIMIT = 0.25  # of the live bytes, as growth, where there is no limit
INSPECTION_COST, INSPECTION_SHARE = 20, 0.02  # of an inspected step, in steps; and of all steps at most
AGAIN = 2.0  # a leak is reported again when it has grown so many times as large


class State(Enum):
    """The detector's knowledge of the growth of memory."""

    QUIET = auto()  # nothing grows
    INSPECTING = auto()  # something grows, and steps are inspected
    NAMED = auto()  # known leaks explain the growth
    NOT_FOUND = auto()  # an inspection found nothing: if the growth goes on, it is reported without a name


@dataclass(frozen=True, slots=True)
class MemoryLeak:
    """Memory that grows from step to step."""

    memory: str  # which: tensors, host memory or Python objects
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
        self,
        *,
        device: str,
        live: Callable[[], int] | None = None,
        report: Callable[[MemoryLeak], None],
        limit_bytes: int | None,
        steps: float = math.inf,
        own: Callable[[], Sequence[Tensor]] = tuple,
    ) -> None:
        """Start; `live` counts the bytes of tensors on the device, where they are counted.

        `steps` of the whole training limit the inspections. `own` returns buffers that may grow without being a leak.
        """
        self.limit_bytes, self.steps, self.own = limit_bytes, steps, own
        self.state = State.QUIET
        self._report_leak = report
        self._tensors = live
        self._series = _series(live, self.own_bytes, shared=device.partition(":")[0] == CPU)
        self._step = self._epoch_start = self._inspected = self._searched_at = 0
        self._epoch_steps: int | None = None
        self._suspected: Mapping[Series, float] = {}  # bytes per step
        self._live_then: dict[Series, int] = {}  # when an inspection had found nothing
        self._inspection: Inspection | None = None
        self._leaks: dict[tuple[str, ...], MemoryLeak] = {}
        self._reported: dict[tuple[str, ...], int] = {}  # total bytes

    def own_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.own() if not buffer.is_pinned())

    def step(self, bucket: Hashable) -> None:
        """Note the end of a step of a bucket, after its gradients were released."""
        self._step += 1
        lap_ended = False
        for series in self._series:
            is_due = series.name != OBJECTS or self._step % OBJECTS_EVERY == 0
            # An inspection's own records are host memory, too.
            if is_due and (self._inspection is None or series.name == TENSORS):
                lap_ended |= series.add(bucket, series.count(), self._step)
        if self._inspection is not None:
            if self._inspection.end_step():
                self._conclude(self._inspection)
        elif lap_ended:
            self._suspect({series: series.by_laps for series in self._series if self._ends_the_run(series)})

    def epoch(self) -> list[MemoryLeak]:
        """Note the end of an epoch; return the known leaks with current figures."""
        self._epoch_steps, self._epoch_start = self._step - self._epoch_start, self._step
        for series in self._series:
            series.end_epoch()
        if self._inspection is None:
            self._suspect({series: rate for series in self._series if (rate := series.by_epochs) > 0})
        return list(self._leaks.values())

    def watching(self) -> AbstractContextManager[Any]:
        """Return the context to run forward and backward in; it does nothing unless growth is suspected."""
        return nullcontext() if self._inspection is None else self._inspection.watching()

    def close(self) -> None:
        if self._inspection is not None:
            self._inspection.close()
        self._inspection = None

    def _ends_the_run(self, series: Series) -> bool:
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
        return max(0, int((self.limit_bytes - (self._tensors or resident_bytes)()) / rate))

    def _suspect(self, suspected: Mapping[Series, float]) -> None:
        """Inspect growth, unless known leaks explain it, or it went on after an inspection found nothing."""
        if not suspected:
            return
        self._suspected = suspected
        rate, known = sum(suspected.values()), sum(leak.bytes_per_step for leak in self._leaks.values())
        if rate < AGAIN * known:
            for leak in list(self._leaks.values()):
                self._report(replace(leak, **self._figures(leak.memory, leak.bytes_per_step, known)))
        elif self.state is State.NOT_FOUND and self._went_on():
            self.state = State.NAMED
            for series, series_rate in suspected.items():
                self._report(MemoryLeak(series.name, **self._figures(series.name, series_rate, rate)))
        else:
            self._inspect()

    def _inspect(self) -> None:
        """Start an inspection, if the training is long enough for it; the first always starts."""
        inspected = self._inspected + WINDOW + SETTLED
        if self._inspected and INSPECTION_COST * inspected > INSPECTION_SHARE * max(self.steps, self._step):
            self._note_not_found()
            return
        self._inspected, self.state = inspected, State.INSPECTING
        with_objects = {series.name for series in self._suspected} != {TENSORS}
        self._inspection = Inspection(with_objects=with_objects, own=self.own)

    def _note_not_found(self) -> None:
        self.state, self._searched_at = State.NOT_FOUND, self._step
        self._live_then = {series: series.live_bytes for series in self._suspected}
        for series in self._suspected:
            series.restart()

    def _went_on(self) -> bool:
        """Tell whether a series has grown ever since an inspection found nothing; noise that rose does not."""
        return any(
            series.live_bytes - live
            >= EXPLAINED * self._suspected.get(series, math.inf) * (self._step - self._searched_at)
            for series, live in self._live_then.items()
        )

    def _conclude(self, inspection: Inspection) -> None:
        """Report what an inspection found."""
        names = {series.name for series in self._suspected}
        # Where small objects grow, their container does too, in leaps, and is not counted with them.
        expected = sum(rate for series, rate in self._suspected.items() if series.name != HOST or OBJECTS not in names)
        leftovers: list[Leftover] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with suppress(Exception):  # it looks at all objects, and some raise when looked at: that ends no run
                leftovers = inspection.found(expected)
        self.close()
        # Leftovers much smaller than the growth, a log say, are not why memory grows.
        least = LEAST_SHARE * max(expected, sum(leftover.bytes_per_step for leftover in leftovers))
        leftovers = [leftover for leftover in leftovers if leftover.bytes_per_step >= least]
        if not leftovers:
            self._note_not_found()
            return
        self.state = State.NAMED
        explained = sum(leftover.bytes_per_step for leftover in leftovers)
        # Items differ in size, and an inspection is short; where only tensors and arrays grow, the long run is exact.
        scale = expected / explained if OBJECTS not in names else 1.0
        scale = scale if EXPLAINED <= scale <= 1 / EXPLAINED else 1.0
        memory = max(self._suspected.items(), key=lambda pair: pair[1])[0].name
        for found in leftovers:
            figures = self._figures(memory, scale * found.bytes_per_step, scale * explained)
            self._report(MemoryLeak(memory, **figures, types=found.kinds, sites=found.sites, holder=found.holder))

    def _figures(self, memory: str, rate: float, known: float) -> dict[str, Any]:
        """Return the sizes of a leak that grows at some rate, out of that of all known leaks."""
        return {
            "bytes_per_step": round(rate),
            "bytes_per_epoch": None if self._epoch_steps is None else round(rate * self._epoch_steps),
            "total_bytes": round(rate / known * sum(series.gained_bytes for series in self._suspected)),
            "steps_left": self._steps_left(memory, max(rate, sum(self._suspected.values()))),
        }

    def _report(self, leak: MemoryLeak) -> None:
        """Keep a leak; report it if it is new, or has grown much since."""
        is_new = leak.key not in self._leaks
        self._leaks[leak.key] = leak
        if is_new or leak.total_bytes >= AGAIN * self._reported.get(leak.key, 0):
            self._reported[leak.key] = leak.total_bytes
            self._report_leak(leak)


def _series(tensors: Callable[[], int] | None, own_bytes: Callable[[], int], *, shared: bool) -> list[Series]:
    """Return the series to watch: Python objects, tensors, host memory."""
    series = [Series(OBJECTS, HOST_FLOOR_BYTES, small_objects_bytes)]
    if tensors is not None:
        series.append(Series(TENSORS, TENSOR_FLOOR_BYTES, tensors))
    malloc, floor_bytes = malloc_counter(), HOST_FLOOR_BYTES
    if malloc is None:
        malloc, floor_bytes, shared = resident_bytes, RESIDENT_FLOOR_BYTES, False
    # On a CPU, tensors are in malloc's memory, too: only the rest is counted.
    other = tensors if tensors is not None and shared else own_bytes
    return [*series, Series(HOST, floor_bytes, lambda: malloc() - other())]
