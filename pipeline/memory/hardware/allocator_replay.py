"""Epochs played to an allocator's simulator: what they reserve, and how they reserve least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.memory.hardware.caching_allocator import Allocator, AllocatorSettings, SimulatedOutOfMemory
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipeline.memory.footprint import StepTapes, Tape

WITHIN = 1.02  # what reserves so little more than the least is as good, and the plainest of them is taken


@dataclass(frozen=True, slots=True)
class Replay:
    """What steps took of a GPU with some settings."""

    allocated_bytes: int  # both at their peaks
    reserved_bytes: int
    segments_made: int
    segments_freed: int
    retries: int
    steps: int

    @property
    def driver_calls(self) -> int:
        """Return how often the driver was asked; after the first steps it should be asked no more."""
        return self.segments_made + self.segments_freed

    @property
    def fragmentation(self) -> float:
        """Return how many times what is live is reserved."""
        return self.reserved_bytes / max(1, self.allocated_bytes)


def replay_steps(
    steps: Iterable[StepTapes], settings: AllocatorSettings, setup: Tape, limit_bytes: int | None = None
) -> Replay:
    """Play steps after a model's setup; where the limit is too small, raise SimulatedOutOfMemory."""
    allocator = Allocator(settings, limit_bytes)
    allocator.play(setup)
    played = 0
    for played, step in enumerate(steps, 1):  # noqa: B007 -- how many there were
        for tape in step.tapes:
            allocator.play(tape)
    return Replay(
        allocator.peak_allocated_bytes,
        allocator.peak_reserved_bytes,
        allocator.segments_made,
        allocator.segments_freed,
        allocator.retries,
        played,
    )


def worst_first(steps: Sequence[StepTapes]) -> list[StepTapes]:
    """Return the steps with the largest first: segments made for it serve all others.

    The last tape of a step, its update, keeps its place: that of a run's first step makes the optimizer's state.
    """
    if not steps:
        return []
    worst = max(range(len(steps)), key=lambda place: steps[place].peak_bytes(0))
    first, largest = steps[0], steps[worst]
    ordered = [type(first)((*largest.tapes[:-1], *first.tapes[-1:])), *steps[1:]]
    if worst:
        ordered[worst] = type(first)((*first.tapes[:-1], *largest.tapes[-1:]))
    return ordered


@dataclass(frozen=True, slots=True)
class AllocatorVariant:
    """A way to run an epoch."""

    settings: AllocatorSettings
    is_worst_first: bool = False

    @property
    def name(self) -> str:
        """Return what it is called in tables."""
        return (self.settings.text or "default") + (", worst shape first" if self.is_worst_first else "")


VARIANTS = (
    AllocatorVariant(AllocatorSettings()),
    AllocatorVariant(AllocatorSettings(expandable=True)),  # before an order: it needs to know nothing of shapes
    AllocatorVariant(AllocatorSettings(), is_worst_first=True),
)


@dataclass(frozen=True, slots=True)
class VariantTrial:
    """An alternative and what came of it; without a replay it ran out of memory."""

    alternative: AllocatorVariant
    replay: Replay | None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The alternative to take, all that were tried, and why; none: each of them runs out of memory."""

    chosen: VariantTrial | None
    trials: tuple[VariantTrial, ...]
    reason: str


def recommend(
    setup: Tape,
    steps: Sequence[StepTapes],
    alternatives: Sequence[AllocatorVariant] = VARIANTS,
    limit_bytes: int | None = None,
) -> Recommendation:
    """Try alternatives, the plainest first, on a shuffled epoch, and choose by what they reserve."""
    trials = tuple(_trial(setup, steps, alternative, limit_bytes) for alternative in alternatives)
    fitting = [(trial, trial.replay) for trial in trials if trial.replay is not None]
    if not fitting:
        return Recommendation(None, trials, f"each way runs out of memory: {trials[-1].failure}" if trials else "")
    least = min(replayed.reserved_bytes for _, replayed in fitting)
    chosen, replayed = next(pair for pair in fitting if pair[1].reserved_bytes <= WITHIN * least)
    return Recommendation(chosen, trials, _reason(chosen.alternative, replayed, trials))


def _trial(
    setup: Tape, steps: Sequence[StepTapes], alternative: AllocatorVariant, limit_bytes: int | None
) -> VariantTrial:
    ordered = worst_first(steps) if alternative.is_worst_first else steps
    try:
        return VariantTrial(alternative, replay_steps(ordered, alternative.settings, setup, limit_bytes))
    except SimulatedOutOfMemory as failure:
        return VariantTrial(alternative, None, str(failure))


def _reason(chosen: AllocatorVariant, replayed: Replay, trials: Iterable[VariantTrial]) -> str:
    """Say what the choice reserves, and what the others would."""
    others = [
        f"{trial.alternative.name}: {format_bytes(trial.replay.reserved_bytes) if trial.replay else 'out of memory'}"
        for trial in trials
        if trial.alternative != chosen
    ]
    reserved = format_bytes(replayed.reserved_bytes)
    taken = f"{chosen.name} reserves {reserved}, {replayed.fragmentation:.2f} times what is live"
    return f"{taken} ({'; '.join(others)})" if others else taken
