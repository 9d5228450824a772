"""A stopwatch for the time of an epoch: it always runs, for one named activity at a time.

    with clock.within(READ):  # then the activity before it continues
        batch = next(batches)

Code on the main thread that does anything other than the model's work names its activity like this. Activities nest,
and time counts for the innermost alone. So they add up to the epoch's wall time to the nanosecond; the rest is `other`.
Only the training thread uses the clock: parallel work costs time only where this thread waits for it. On a GPU the
times are those of the CPU, which launches work and waits where it needs a result: at the latest in `update`, for the
norm of the gradients.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

T = TypeVar("T")

FORWARD, BACKWARD, REDUCE, UPDATE = "forward", "backward", "reduce", "update"
MODEL_WORK = (FORWARD, BACKWARD, REDUCE, UPDATE)  # what a step is for
READ, COPY, WEIGH = "read", "copy", "weigh"  # reading includes `collate`
EXCHANGE, OBSERVE, CHECKPOINT, VALIDATE, OTHER = "words", "observe", "checkpoint", "validate", "other"
NOT_OWN = (EXCHANGE, REDUCE, UPDATE, OBSERVE, CHECKPOINT, VALIDATE)  # waits for others, or is no part of a step
LABELS = {
    READ: "waiting for data",
    COPY: "copying to the device",
    WEIGH: "computing loss weights",
    EXCHANGE: "waiting for other ranks",
    OBSERVE: "logs",
    CHECKPOINT: "checkpoint",
    VALIDATE: "validation",
}
SHOWN_FROM = 0.05  # of an epoch
FIGURE = "seconds."  # begins the names of a process' figures that give the times of its last epoch
_OF_STEP = {  # what a step reports to its `StepWatch`
    "inputs": COPY,
    **dict.fromkeys(("forward", "embed", "evaluate", "contrast"), FORWARD),
    "backward": BACKWARD,
    **dict.fromkeys(("scale", "clip", "optimizer", "ema", "release"), UPDATE),
    "idle": OTHER,
}


class StepClock:
    """Adds up the time of each activity; it watches a `Step`, which reports what it does."""

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._ns: dict[str, int] = {}
        self._name, self._since_ns = OTHER, now_ns()
        self.is_held = False  # the present activity counts for all that begins within it

    def begin(self, name: str) -> str:
        """Switch to another activity, unless the present one is held; return the name of the one before."""
        before = self._name
        if not self.is_held:
            now_ns = self._now_ns()
            self._ns[before] = self._ns.get(before, 0) + now_ns - self._since_ns
            self._name, self._since_ns = name, now_ns
        return before

    def within(self, name: str, *, whole: bool = False) -> _Within:
        """Surround an activity, `whole`: with all that begin meanwhile; the one before it continues afterwards."""
        return _Within(self, name, whole=whole)

    def each(self, name: str, iterator: Iterator[T]) -> Iterator[T]:
        """Return an iterator whose every `next` is an activity; it keeps no reference to what it yields."""
        while True:
            with self.within(name):
                held = list(islice(iterator, 1))
            if not held:
                return
            yield held.pop()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each activity so far; they add up to the time since `restart`."""
        held, self.is_held = self.is_held, False
        self.begin(self._name)
        self.is_held = held
        return {name: spent_ns / 1e9 for name, spent_ns in self._ns.items()}

    def restart(self, seconds: Mapping[str, float] | None = None) -> dict[str, float]:
        """Start from 0, or from what an earlier process spent on the epoch; return the seconds until now."""
        so_far = self.seconds()
        self._ns = dict.fromkeys(self._ns, 0) | {name: round(spent * 1e9) for name, spent in (seconds or {}).items()}
        return so_far

    def phase(self, name: str) -> None:
        """Switch to what a step reports that it does."""
        self.begin(_OF_STEP[name])

    def terms(self, terms: Mapping[str, Any]) -> None:
        """Do nothing with what a step reports of its loss."""


class _Within:
    """A surrounded activity; a class, since a generator takes twice the time."""

    __slots__ = ("_before", "_clock", "_holds", "_name")

    def __init__(self, clock: StepClock, name: str, *, whole: bool) -> None:
        self._clock, self._name, self._holds, self._before = clock, name, whole, OTHER

    def __enter__(self) -> None:
        self._before = self._clock.begin(self._name)
        self._holds = self._holds and not self._clock.is_held
        self._clock.is_held |= self._holds

    def __exit__(self, *_: object) -> None:
        if self._holds:
            self._clock.is_held = False
        self._clock.begin(self._before)


def shown_shares(seconds: Mapping[str, float]) -> list[str]:
    """Describe what takes more than a twentieth of an epoch besides the model's work, the most first."""
    whole = sum(seconds.values())
    others = sorted((-spent, name) for name, spent in seconds.items() if name not in MODEL_WORK)
    return [f"{-spent / whole:.0%} {LABELS.get(name, name)}" for spent, name in others if -spent > SHOWN_FROM * whole]


def latest_shares(figures: Mapping[str, float]) -> list[str]:
    """Describe the same of the last epoch of a running process, by its figures."""
    return shown_shares({name.removeprefix(FIGURE): s for name, s in figures.items() if name.startswith(FIGURE)})
