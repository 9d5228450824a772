"""Where the time of an epoch goes, by name: a stopwatch that always runs, and belongs to one phase at any moment.

    with clock.within(READ):  # what was before goes on after it
        batch = next(batches)

Whoever does something on the main thread that is not the model's work surrounds it so, wherever that is: phases nest,
and time counts for the innermost alone. So the phases of an epoch add up to its wall to the nanosecond; what nobody
has named is `other`. Only the thread that trains uses it: what runs beside it costs no time but that of waiting for it.
On a card the times are those of the processor, which hands work over and waits for it where a result is needed: at the
latest in `update`, for the norm of the gradients.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

T = TypeVar("T")

FORWARD, BACKWARD, REDUCE, UPDATE = "forward", "backward", "reduce", "update"
MODEL_PHASES = (FORWARD, BACKWARD, REDUCE, UPDATE)  # what a step is for; all else is told where it is much
READ, COPY, WEIGH = "read", "copy", "weigh"  # reading ends with what `collate` makes
WORDS, OBSERVE, CHECKPOINT, VALIDATE, OTHER = "words", "observe", "checkpoint", "validate", "other"
TOLD = {
    READ: "waiting for data",
    COPY: "copying to the device",
    WEIGH: "computing loss weights",
    WORDS: "waiting for other ranks",
    OBSERVE: "logs",
    CHECKPOINT: "checkpoint",
    VALIDATE: "validation",
}
TOLD_FROM = 0.05  # of an epoch
FIGURE = "phase."  # how the figures of a process begin that tell the seconds of its last epoch
_OF_STEP = {  # what `training.step.step.StepWatch` is told → a phase
    "inputs": COPY,
    "forward": FORWARD,
    "embed": FORWARD,
    "evaluate": FORWARD,
    "contrast": FORWARD,
    "backward": BACKWARD,
    "scale": UPDATE,
    "clip": UPDATE,
    "optimizer": UPDATE,
    "ema": UPDATE,
    "release": UPDATE,
    "idle": OTHER,
}


class StepClock:
    """Adds up the time of phases; it watches a `Step`, which tells it what it does."""

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._ns: dict[str, int] = {}
        self._name, self._since_ns = OTHER, now_ns()
        self.is_held = False  # a phase counts for all that begins within it

    def begin(self, name: str) -> str:
        """End the present phase and begin another, unless one holds on; return the name of the one before."""
        before = self._name
        if not self.is_held:
            now_ns = self._now_ns()
            self._ns[before] = self._ns.get(before, 0) + now_ns - self._since_ns
            self._name, self._since_ns = name, now_ns
        return before

    def within(self, name: str) -> _Within:
        """Surround a phase; what was before goes on after it, whatever began meanwhile."""
        return _Within(self, name)

    def whole(self, name: str) -> _Within:
        """Surround a phase that has none within: whatever begins meanwhile counts for it."""
        return _Within(self, name, holds=True)

    def each(self, name: str, iterator: Iterator[T]) -> Iterator[T]:
        """Return an iterator whose every `next` is a phase; it keeps nothing of what it gives."""
        return _Each(self, name, iterator)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase so far; they add up to the time since `restart`."""
        held, self.is_held = self.is_held, False
        self.begin(self._name)
        self.is_held = held
        return {name: spent_ns / 1e9 for name, spent_ns in self._ns.items()}

    def restart(self, seconds: Mapping[str, float] | None = None) -> dict[str, float]:
        """Begin anew, after some seconds of an epoch that an earlier process made; return those until now."""
        so_far = self.seconds()
        self._ns = dict.fromkeys(self._ns, 0) | {name: round(spent * 1e9) for name, spent in (seconds or {}).items()}
        return so_far

    def phase(self, name: str) -> None:
        """Take what a step says that it does."""
        self.begin(_OF_STEP[name])

    def terms(self, terms: Mapping[str, Any]) -> None:
        """Take what a step says of its loss: nothing to time."""


class _Within:
    """A phase while it lasts; a class of its own, as a generator takes twice the time."""

    __slots__ = ("_before", "_clock", "_holds", "_name")

    def __init__(self, clock: StepClock, name: str, *, holds: bool = False) -> None:
        self._clock, self._name, self._holds, self._before = clock, name, holds, OTHER

    def __enter__(self) -> Self:
        self._before = self._clock.begin(self._name)
        self._holds = self._holds and not self._clock.is_held
        if self._holds:
            self._clock.is_held = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._holds:
            self._clock.is_held = False
        self._clock.begin(self._before)


class _Each(Generic[T]):
    def __init__(self, clock: StepClock, name: str, iterator: Iterator[T]) -> None:
        self._clock, self._name, self._iterator = clock, name, iterator

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._clock.within(self._name):
            return next(self._iterator)


def told_shares(seconds: Mapping[str, float]) -> list[str]:
    """Say what takes more than a twentieth of an epoch beside the model's work, the most first: `12% collates`."""
    whole = sum(seconds.values())
    others = sorted((-spent, name) for name, spent in seconds.items() if name not in MODEL_PHASES)
    return [f"{-spent / whole:.0%} {TOLD.get(name, name)}" for spent, name in others if -spent > TOLD_FROM * whole]


def shares_so_far(figures: Mapping[str, float]) -> list[str]:
    """Say the same of the last epoch of a process that goes on, by its figures."""
    return told_shares({name.removeprefix(FIGURE): s for name, s in figures.items() if name.startswith(FIGURE)})
