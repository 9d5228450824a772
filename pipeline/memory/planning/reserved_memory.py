"""What an allocator holds for the steps of a plan: its buckets in random order, played to the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pipeline.memory.footprint import Category, Origin, Part, Step, Tape
from pipeline.memory.hardware.allocator_replay import Alternative, recommend
from pipeline.memory.hardware.caching_allocator import AllocatorSettings
from pipeline.memory.planning.memory_plan import Reserved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.memory.footprint import Micro, Standing
    from pipeline.memory.planning.budget_search import Found

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


GATHERED = 2  # blocks whose parameters are whole at once: the one that computes and the one fetched ahead
_SPREAD = {Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER, Category.EMA}
_NOTE = "sharded by a formula: nobody traced it"
_OWN = 1 << 40  # a block number that no tape of a model has


def sharded_standing(standing: Standing, shards: int) -> Standing:
    """Return what of a model's state is left on one of several ranks."""
    parts = tuple(_share(part, shards) for part in standing.parts)
    setup = _spread(standing.setup, shards, only_shared=False)
    whole = sum(part.bytes for part in parts) - setup.left_bytes
    return replace(
        standing,
        setup=_then(setup, whole) if whole > 0 else setup,
        first_update=_spread(standing.first_update, shards, only_shared=False),
        update=_spread(standing.update, shards, only_shared=False),
        parts=parts,
        origin=Origin.ASSUMED,
        notes=(*standing.notes, f"{_NOTE}, over {shards} ranks"),
    )


def sharded_micro(micro: Micro, standing: Standing, shards: int) -> Micro:
    """Return what a micro-batch takes where the model (whose whole state is given) is spread."""
    gathered = gathered_bytes(standing)
    parts = (*(_share(part, shards) for part in micro.parts), Part(Category.PARAMETERS, "gathered blocks", gathered))
    return replace(
        micro,
        first=_around(_spread(micro.first, shards), gathered),
        again=_around(_spread(micro.again, shards), gathered),
        parts=parts,
        origin=Origin.ASSUMED,
        notes=(*micro.notes, _NOTE),
    )


def gathered_bytes(standing: Standing) -> int:
    """Return what the largest block takes while it is whole: parameters, those fetched ahead, and gradients."""
    every = sum(part.bytes for part in standing.parts if part.category is Category.PARAMETERS)
    return (GATHERED + 1) * (standing.largest_block_bytes or every)


def _share(part: Part, shards: int) -> Part:
    return replace(part, bytes=-(-part.bytes // shards)) if part.category in _SPREAD else part


def _spread(tape: Tape, shards: int, *, only_shared: bool = True) -> Tape:
    """Return a tape whose blocks, or only those it shares with other tapes, are one part in `shards`."""
    part_E = np.sign(tape.bytes_E) * -(-np.abs(tape.bytes_E) // shards)
    if not only_shared:
        return Tape(tape.block_E, part_E)
    return Tape(tape.block_E, np.where(tape.block_E < 0, part_E, tape.bytes_E))


def _around(tape: Tape, extra: int) -> Tape:
    """Return a tape during which one more block is live."""
    return Tape(np.concatenate(([_OWN], tape.block_E, [_OWN])), np.concatenate(([extra], tape.bytes_E, [-extra])))


def _then(tape: Tape, extra: int) -> Tape:
    """Return a tape with one more block at its end."""
    return Tape(np.append(tape.block_E, _OWN), np.append(tape.bytes_E, extra))
