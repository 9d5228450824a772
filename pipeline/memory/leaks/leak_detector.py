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
Inspected steps are slow: but for one short look, they cost 2% of the training's time at most.
"""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.memory.leaks import inspection
from pipeline.memory.leaks.memory_growth import (
    Series,
    card_counter,
    malloc_counter,
    resident_bytes,
    small_objects_bytes,
)
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from torch import Tensor

    from pipeline.memory.leaks.inspection import InspectionWindow, Leftover

TENSORS, HOST, OBJECTS = "tensors", "host memory", "Python objects"
# What may come in an epoch without being a leak: records of the epoch, free lists, malloc's bookkeeping.
TENSOR_FLOOR_BYTES, HOST_FLOOR_BYTES, RESIDENT_FLOOR_BYTES = 64 << 10, 1 << 20, 8 << 20
OBJECTS_EVERY = 8  # steps: to count Python's objects takes 25 µs for 160 000 of them [measured], and more for more
WINDOWS = (4, 16, 64)  # steps: what does not leak at every step wants a longer look
EXPLAINED = 0.5  # of what grows must be found, or a longer look follows
LEAST_SHARE = 0.05  # of what grows, to be told
NEAR = 20  # within an epoch: the limit is so many times as far as the run has come, or nearer
WITHOUT_LIMIT = 0.25  # of what is live, as growth, where there is no limit
NOT_FOUND = "no growing object was found in the inspected steps"
LOOK_COST, LOOK_SHARE = 20, 0.02  # of an inspected step, in steps; and the most of all steps for looks
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

    @property
    def key(self) -> tuple[str, ...]:
        """Return what makes it the same leak, however much it has grown."""
        return (self.memory, self.holder, *self.sites)

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
        steps: float = math.inf,
        own: Callable[[], Sequence[Tensor]] = tuple,
    ) -> None:
        """Begin; `live` counts bytes of tensors where torch does not, `step_bytes` is what a step adds at its peak.

        Looks are paid for by `steps`, of the whole training; `own` returns buffers that may grow and are no leak.
        """
        self.limit_bytes, self.step_bytes = limit_bytes, step_bytes
        self.steps, self.own = steps, own
        self._tell = tell
        on_cpu = device.partition(":")[0] == "cpu"
        self._tensors = live or (None if on_cpu else card_counter(device))
        self._limited = self._tensors or resident_bytes  # what ends at the limit
        self._series = _series(self._tensors, lambda: _unpinned_bytes(self.own()), shared=on_cpu)
        self._step = self._epoch_began = 0
        self._epoch_steps: int | None = None
        self._window: InspectionWindow | None = None
        self._tries = 0
        self._inspected = 0  # steps
        self._searched: dict[str, tuple[int, int]] = {}  # in vain: when, and what was live then
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
            return
        self._rates = rates
        went_on = [series for series, rate in suspected.items() if self._went_on(series, rate)]
        for series in went_on:
            del self._searched[series.name]
            self._report(self._leak(series.name, suspected[series], series.gained_bytes, None))
        if not went_on and not self._open():
            self._give_up()

    def _open(self) -> bool:
        """Begin an inspection, if the training is long enough for it; one short look is always taken."""
        inspected = self._inspected + WINDOWS[self._tries] + inspection.SETTLED
        if self._inspected and LOOK_COST * inspected > LOOK_SHARE * max(self.steps, self._step):
            return False
        self._inspected = inspected
        self._window = inspection.InspectionWindow(
            WINDOWS[self._tries], with_objects=set(self._rates) != {TENSORS}, own=self.own
        )
        return True

    def _give_up(self) -> None:
        """Note that what grows was not found: should it go on, that is a leak all the same."""
        for series in self._series:
            if series.name in self._rates:
                self._searched[series.name] = self._step, series.live_bytes
                series.forget()

    def _went_on(self, series: Series, rate: float) -> bool:
        """Tell whether a series has grown ever since it was looked for in vain: noise that rose thrice does not."""
        if series.name not in self._searched:
            return False
        step, live = self._searched[series.name]
        return series.live_bytes - live >= EXPLAINED * rate * (self._step - step)

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
        if explained < EXPLAINED * expected and self._tries + 1 < len(WINDOWS):
            self._tries += 1
            if self._open():
                return
        self._tries = 0
        grown = max(explained, expected)  # what is little of it, a log say, is not why memory grows
        leftovers = [leftover for leftover in leftovers if leftover.bytes_per_step >= LEAST_SHARE * grown]
        if leftovers:
            self._name(leftovers, explained, expected)
        else:
            self._give_up()

    def _name(self, leftovers: Sequence[Leftover], explained: float, expected: float) -> None:
        # Items differ in size, and some steps are few; where only tensors and arrays grow, the long run is exact.
        scale = expected / explained if explained and OBJECTS not in self._rates else 1.0
        if not EXPLAINED <= scale <= 1 / EXPLAINED:
            scale = 1.0
        gained = sum(series.gained_bytes for series in self._series if series.name in self._rates)
        memory = max(self._rates, key=lambda name: self._rates[name])
        for leftover in leftovers:
            total = round(leftover.bytes_per_step / explained * gained)
            self._report(self._leak(memory, scale * leftover.bytes_per_step, total, leftover))

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
        known = self._leaks.get(leak.key)
        self._leaks[leak.key] = leak
        if known is None or leak.total_bytes >= AGAIN * self._told.get(leak.key, 0):
            self._told[leak.key] = leak.total_bytes
            self._tell(leak)


def _unpinned_bytes(buffers: Sequence[Tensor]) -> int:
    return sum(buffer.nbytes for buffer in buffers if not buffer.is_pinned())


def _series(tensors: Callable[[], int] | None, own: Callable[[], int], *, shared: bool) -> list[Series]:
    """Return the series to watch: Python objects, tensors, host memory."""
    series = [Series(OBJECTS, HOST_FLOOR_BYTES, small_objects_bytes)]
    if tensors is not None:
        series.append(Series(TENSORS, TENSOR_FLOOR_BYTES, tensors))
    malloc = malloc_counter()
    if malloc is None:
        return [*series, Series(HOST, RESIDENT_FLOOR_BYTES, lambda: resident_bytes() - own())]
    if tensors is not None and shared:
        host, counted = malloc, tensors  # tensors are in malloc's memory: what is left of it is counted
        return [*series, Series(HOST, HOST_FLOOR_BYTES, lambda: host() - counted())]
    return [*series, Series(HOST, HOST_FLOOR_BYTES, lambda: malloc() - own())]
