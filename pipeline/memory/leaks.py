"""Finds what makes memory grow from step to step, and says so before it ends the run.

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
that it would end the run. Then some steps are looked at closely (`window.Window`), and what they leave behind is told.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.memory import counters
from pipeline.memory.allocator import format_bytes
from pipeline.memory.growth import Series

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from pipeline.memory.window import Found, Window

TENSORS, HOST, OBJECTS = "tensors", "host memory", "Python objects"
# What may come in an epoch without being a leak: records of the epoch, free lists, malloc's bookkeeping.
TENSOR_FLOOR_BYTES, HOST_FLOOR_BYTES, RESIDENT_FLOOR_BYTES = 64 << 10, 1 << 20, 8 << 20
OBJECTS_EVERY = 8  # steps: to count Python's objects takes 25 µs for 160 000 of them [measured], and more for more
WINDOWS = (4, 16, 64)  # steps: what does not leak at every step wants a longer look
EXPLAINED = 0.5  # of what grows must be found, or a longer look follows
LEAST_SHARE = 0.05  # of what was found, to be told
NEAR = 20  # within an epoch: the limit is so many times as far as the run has come, or nearer
WITHOUT_LIMIT = 0.25  # of what is live, as growth, where there is no limit
_NOT_FOUND = "what grows was not found: neither operators nor Python code allocate it within a step"
REST = 4  # times the steps so far are made after a look in vain, before the next
AGAIN = 2.0  # a leak is told again when it has taken so many times as much


@dataclass(frozen=True, slots=True)
class Leak:
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
        """Say it."""
        epoch = "" if self.bytes_per_epoch is None else f", {_size(self.bytes_per_epoch)} an epoch"
        grows = "grows" if self.memory == HOST else "grow"
        growth = (
            f"{self.memory} {grows} by {_size(self.bytes_per_step)} a step{epoch}, {_size(self.total_bytes)} so far"
        )
        said = []
        said.append(
            ", ".join(self.types) or "what grows was not found: it is allocated by no operator and no Python code"
        )
        if self.sites:
            said.append(f"made at {'; '.join(self.sites)}")
        if self.holder:
            said.append(f"kept by {self.holder}")
        if self.steps_left is not None:
            said.append(f"out of memory in about {self.steps_left} steps")
        return f"{growth}: {', '.join(said)}"


class Leaks:
    """Watches the memory of one process at the boundaries of its steps."""

    def __init__(
        self,
        *,
        device: str,
        live: Callable[[], int] | None = None,
        tell: Callable[[Leak], None],
        limit_bytes: int | None,
        step_bytes: int = 0,
    ) -> None:
        """Take what counts the bytes of tensors, where torch does not; `step_bytes` is what a step adds at its peak."""
        self.limit_bytes, self.step_bytes = limit_bytes, step_bytes
        self._tell = tell
        on_cpu = device.partition(":")[0] == "cpu"
        self._tensors = live or (None if on_cpu else counters.card_counter(device))
        self._limited = self._tensors or counters.resident_bytes  # what ends at the limit
        self._series = _series(self._tensors, shared=on_cpu)
        self._step = self._epoch_began = 0
        self._epoch_steps: int | None = None
        self._window: Window | None = None
        self._tries = 0
        self._searched = False  # in vain
        self._rests_until = 0  # the step before which no further look is taken
        self._leaks: dict[tuple[str, ...], Leak] = {}
        self._told: dict[tuple[str, ...], int] = {}
        self._rates: dict[str, float] = {}  # that are looked into, in bytes per step

    def step(self, bucket: Hashable) -> None:
        """Hear that a step of a bucket has ended, its gradients released."""
        self._step += 1
        lap = False
        for series, count in self._series:
            # A look's own records are host memory, too.
            if (self._window is None or series.name == TENSORS) and _is_due(series, self._step):
                lap |= series.add(bucket, count(), self._step)
        if self._window is not None:
            self._look(self._window)
        elif lap:
            self._consider([one for one, _ in self._series if self._is_grave(one)], by_epochs=False)

    def epoch(self) -> list[Leak]:
        """Hear that an epoch has ended; return the leaks that are known, as they are now."""
        self._epoch_steps, self._epoch_began = self._step - self._epoch_began, self._step
        for series, _ in self._series:
            series.end_epoch()
        if self._window is None:
            self._consider([one for one, _ in self._series if one.by_epochs > 0], by_epochs=True)
        return list(self._leaks.values())

    def watching(self) -> AbstractContextManager[Any]:
        """Return what to run forward and backward in: nothing, unless something is suspected."""
        return nullcontext() if self._window is None else self._window.watching()

    def close(self) -> None:
        """Stop looking."""
        if self._window is not None:
            self._window.close()
        self._window = None

    def _is_grave(self, series: Series) -> bool:
        """Tell whether a series grows so fast that the run would not last much longer."""
        rate = series.by_laps
        if rate <= 0:
            return False
        left = self._steps_left(series.name, rate)
        if left is None:
            return series.gained_bytes > WITHOUT_LIMIT * (series.live_bytes - series.gained_bytes)
        return left < NEAR * self._step

    def _steps_left(self, memory: str, rate: float) -> int | None:
        if self.limit_bytes is None or (memory != TENSORS and self._tensors is not None):
            return None
        return max(0, int((self.limit_bytes - self.step_bytes - self._limited()) / rate))

    def _consider(self, suspected: Sequence[Series], *, by_epochs: bool) -> None:
        """Look closely at what is suspected, unless it is what is known."""
        if not suspected:
            return
        rates = {one.name: one.by_epochs if by_epochs else one.by_laps for one in suspected}
        known = sum(one.bytes_per_step for one in self._leaks.values())
        if known and sum(rates.values()) < known * AGAIN:
            self._refresh(rates, suspected)
        elif self._searched:
            self._searched = False
            for one in suspected:
                self._report(self._leak(one.name, rates[one.name], one.gained_bytes, None))
        elif self._step >= self._rests_until:
            self._rates = rates
            self._open()

    def _open(self) -> None:
        from pipeline.memory.window import Window

        steps = WINDOWS[min(self._tries, len(WINDOWS) - 1)]
        self._window = Window(steps, with_objects=set(self._rates) != {TENSORS})

    def _look(self, window: Window) -> None:
        """Let a look go on; judge when it has seen enough."""
        if not window.boundary():
            return
        # Where small objects grow, what refers to them does too, in leaps, and is not counted with them.
        without = HOST if OBJECTS in self._rates else None
        expected = sum(rate for name, rate in self._rates.items() if name != without)
        found = _found(window, expected)
        self.close()
        explained = sum(one.bytes_per_step for one in found)
        if explained < EXPLAINED * expected:
            self._tries += 1
            if self._tries < len(WINDOWS):
                self._open()
                return
            self._searched = not found
            self._rests_until = 0 if found else REST * self._step  # a look slows training down several times
        self._tries = 0
        self._name(found, explained, expected)

    def _name(self, found: Sequence[Found], explained: float, expected: float) -> None:
        """Report what was found."""
        # Items differ in size, and some steps are few; where only tensors and arrays grow, the long run is exact.
        scale = expected / explained if explained and OBJECTS not in self._rates else 1.0
        if not EXPLAINED <= scale <= 1 / EXPLAINED:
            scale = 1.0
        gained = sum(one.gained_bytes for one, _ in self._series if one.name in self._rates)
        memory = max(self._rates, key=lambda name: self._rates[name])
        for one in found:
            share = one.bytes_per_step / explained
            if share >= LEAST_SHARE:
                self._report(self._leak(memory, scale * one.bytes_per_step, round(share * gained), one))

    def _leak(self, memory: str, rate: float, total: int, found: Found | None) -> Leak:
        epoch = None if self._epoch_steps is None else round(rate * self._epoch_steps)
        left = self._steps_left(memory, max(rate, sum(self._rates.values())))
        what = (found.kinds, found.sites, found.holder) if found else ((), (), "")
        return Leak(memory, round(rate), epoch, total, *what, left)

    def _refresh(self, rates: dict[str, float], suspected: Sequence[Series]) -> None:
        """Bring what is known up to date, and tell it again where it has become much."""
        self._rates = rates
        known = sum(one.bytes_per_step for one in self._leaks.values())
        gained = sum(one.gained_bytes for one in suspected)
        for one in list(self._leaks.values()):
            share = one.bytes_per_step / max(known, 1)
            epoch = None if self._epoch_steps is None else one.bytes_per_step * self._epoch_steps
            left = self._steps_left(one.memory, max(sum(rates.values()), 1.0))
            total = round(share * gained)
            self._report(replace(one, bytes_per_epoch=epoch, total_bytes=total, steps_left=left))

    def _report(self, leak: Leak) -> None:
        """Keep a leak; tell it if it is new, or has become much."""
        key = (leak.memory, leak.holder, *leak.sites)
        known = self._leaks.get(key)
        self._leaks[key] = leak
        if known is None or leak.total_bytes >= AGAIN * self._told.get(key, 0):
            self._told[key] = leak.total_bytes
            self._tell(leak)


def _found(window: Window, expected: float) -> list[Found]:
    """Return what a look has found; a search that fails has found nothing, and ends no run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return window.found(expected)
        except Exception:  # noqa: BLE001 - it looks at all objects there are, and some are built to object
            return []


def _size(size: int) -> str:
    return format_bytes(size) if size >= 1 << 20 else f"{size / 1024:.1f} KiB"


def _is_due(series: Series, step: int) -> bool:
    return series.name != OBJECTS or step % OBJECTS_EVERY == 0


def _series(tensors: Callable[[], int] | None, *, shared: bool) -> list[tuple[Series, Callable[[], int]]]:
    """Return what is counted, and how: tensors, the host's memory, Python's objects."""
    malloc = counters.malloc_counter()
    found = [(Series(OBJECTS, HOST_FLOOR_BYTES), counters.small_objects_bytes)]
    if tensors is not None:
        found.append((Series(TENSORS, TENSOR_FLOOR_BYTES), tensors))
    if malloc is None:
        return [*found, (Series(HOST, RESIDENT_FLOOR_BYTES), counters.resident_bytes)]
    if tensors is not None and shared:
        host, counted = malloc, tensors  # tensors are in malloc's memory: what is left of it is counted
        return [*found, (Series(HOST, HOST_FLOOR_BYTES), lambda: host() - counted())]
    return [*found, (Series(HOST, HOST_FLOOR_BYTES), malloc)]
