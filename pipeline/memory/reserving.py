"""What an allocator holds for the steps of a plan: its buckets in random order, played to the simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from pipeline.memory.allocator import AllocatorSettings
from pipeline.memory.footprint import Origin, Step
from pipeline.memory.plan import Reserved
from pipeline.memory.replay import Alternative, recommend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.memory.budget import Found
    from pipeline.memory.footprint import Micro, Standing

SETTINGS = (Alternative(AllocatorSettings()), Alternative(AllocatorSettings(expandable=True)))
_MOST_EVENTS = 300_000  # that are played, a few seconds
_MOST_SHARES = 64


class Reserve(Protocol):
    """Says what is held while steps are made."""

    def __call__(self, standing: Standing, steps: Sequence[Sequence[Micro]]) -> Reserved:
        """Return what is held at most; each step is given by its micro-batches."""


def reserve(
    standing: Standing, steps: Sequence[Sequence[Micro]], alternatives: Sequence[Alternative] = SETTINGS
) -> Reserved:
    """Return what torch's caching allocator holds with the best settings."""
    played = [Step.of(standing, micros, first=place == 0) for place, micros in enumerate(steps)]
    advice = recommend(standing.setup, played, alternatives)
    assert advice.chosen is not None, "without a limit nothing runs out of memory"
    assert advice.chosen.replay is not None
    compared = tuple((trial.alternative.name, trial.replay.reserved_bytes) for trial in advice.trials if trial.replay)
    settings = advice.chosen.alternative.settings.text
    return Reserved(advice.chosen.replay.reserved_bytes, settings, compared, notes=(advice.reason,))


def live_only(live: int) -> Reserved:
    """Return what is held where no allocator keeps what is free."""
    return Reserved(live, origin=Origin.TRACED)


def sample(found: Found, micro_of: Sequence[Micro], seed: int) -> list[list[Micro]]:
    """Return shares of steps, drawn at random, with the buckets' micro-batches in place of their own.

    Every bucket has its turn, also those that only another order would bring.
    """
    group_M = np.zeros(len(found.rows_MS) + len(found.possible_MS), np.int64)
    for number, group in enumerate(found.groups):
        group_M[group.places] = number
    group_M = group_M[: len(found.rows_MS)]
    ranks = int(found.micros.rank_M.max(initial=0)) + 1
    share_M = found.micros.step_M * ranks + found.micros.rank_M
    generator = np.random.default_rng(seed)
    shares = generator.permutation(np.unique(share_M)).tolist()
    steps = [[micro_of[number] for number in group_M[share_M == share].tolist()] for share in shares[:_MOST_SHARES]]
    repeat = 2 if found.accumulate else 1
    return _limited([[micro] * repeat for micro in micro_of], steps, generator)


def _limited(buckets: list[list[Micro]], steps: list[list[Micro]], generator: np.random.Generator) -> list[list[Micro]]:
    """Return a step of every bucket, and as many others as can be played in time, in random order."""
    kept = list(buckets)
    events = sum(len(micro.again.bytes_E) for micros in kept for micro in micros)
    for micros in steps:
        events += sum(len(micro.again.bytes_E) for micro in micros)
        if events > _MOST_EVENTS:
            break
        kept.append(micros)
    return [kept[place] for place in generator.permutation(len(kept)).tolist()]
