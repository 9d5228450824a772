"""Answers of an oracle, each asked for once.

Where it cannot answer for a sharded model, its answers are made from those of the whole one, by a formula that says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pipeline.memory.footprint import (
    AnswersShards,
    Category,
    Computes,
    MemoryPart,
    Provenance,
    StepTapes,
    Tape,
    live_peak_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.memory.footprint import MemoryChoice, MicroFootprint, Oracle, StandingFootprint


class OracleCache:
    """Asks an oracle each question once; sizes are rows in the order of `names`."""

    def __init__(self, oracle: Oracle, names: tuple[str, ...]) -> None:
        self.names = names
        self.asked = 0  # micro-batches that the oracle was asked about
        self._oracle = oracle
        self._standing: dict[MemoryChoice, StandingFootprint] = {}
        self._micro: dict[tuple[MemoryChoice, tuple[int, ...]], MicroFootprint] = {}
        self._peak: dict[tuple[MemoryChoice, tuple[int, ...], bool], int] = {}
        self._why_not: dict[MemoryChoice, str] = {}  # the oracle cannot answer for a choice; empty: it can

    def standing(self, choice: MemoryChoice) -> StandingFootprint:
        """Return the memory that does not depend on the batch."""
        if choice not in self._standing:
            if why_not := self._refused(choice):
                made = sharded_standing(self.standing(replace(choice, shards=1)), choice.shards, why_not)
            else:
                made = self._oracle.standing(choice)
                notes = (*made.notes, _TRACED.format(choice.shards)) if choice.shards > 1 else made.notes
                made = replace(made, notes=notes)
            self._standing[choice] = made
        return self._standing[choice]

    def micro(self, choice: MemoryChoice, row: Sequence[int]) -> MicroFootprint:
        """Return the memory of a micro-batch of exactly these sizes."""
        key = (choice, tuple(int(size) for size in row))
        if key not in self._micro and self._refused(choice):
            whole = replace(choice, shards=1)
            self._micro[key] = sharded_micro(self.micro(whole, row), self.standing(whole), choice.shards)
        elif key not in self._micro:
            self.asked += 1
            self._micro[key] = self._oracle.micro(choice, dict(zip(self.names, key[1], strict=True)))
        return self._micro[key]

    def _refused(self, choice: MemoryChoice) -> str:
        """Return why the oracle cannot answer for a choice, which is then sharded; empty: it can."""
        if choice.shards == 1:
            return ""
        if choice not in self._why_not:
            oracle = self._oracle
            self._why_not[choice] = oracle.refuses_shards(choice) if isinstance(oracle, AnswersShards) else _UNKNOWN
        return self._why_not[choice]

    def confirmed(self, choice: MemoryChoice, row: Sequence[int]) -> bool:
        """Tell whether the oracle stands by its answer to a question; if not, forget all of its answers."""
        key = tuple(int(size) for size in row)
        whole = replace(choice, shards=1) if self._refused(choice) else choice
        if not isinstance(self._oracle, Computes):
            return True
        before, micro = self.micro(whole, row), self._oracle.confirmed(whole, dict(zip(self.names, key, strict=True)))
        stands = before.is_like(micro)
        self._micro = {asked: known for asked, known in self._micro.items() if stands and asked[1] != key}
        self._peak = {asked: known for asked, known in self._peak.items() if stands and asked[1] != key}
        self._micro[whole, key] = micro
        return stands

    def rows(self, choice: MemoryChoice) -> list[tuple[int, ...]]:
        return [row for of, row in self._micro if of == choice]

    def origins(self, choice: MemoryChoice) -> set[Provenance]:
        return {micro.origin for (of, _), micro in self._micro.items() if of == choice}

    def notes(self, choice: MemoryChoice) -> tuple[str, ...]:
        """Return the oracle's notes on its answers, each once."""
        notes = [note for (of, _), micro in self._micro.items() if of == choice for note in micro.notes]
        return tuple(dict.fromkeys((*self.standing(choice).notes, *notes)))

    def peak_bytes(self, choice: MemoryChoice, row: Sequence[int], *, accumulate: bool) -> int:
        """Return the live peak of a step of such micro-batches, the run's first step included."""
        key = (choice, tuple(int(size) for size in row), accumulate)
        if key not in self._peak:
            standing, micro = self.standing(choice), self.micro(choice, row)
            micros = [micro, micro] if accumulate else [micro]
            first = StepTapes.of(standing, micros, first=True).peak_bytes(standing.setup.left_bytes)
            self._peak[key] = max(first, live_peak_bytes(standing, micro, accumulate=accumulate))
        return self._peak[key]


GATHERED = 2  # blocks whose parameters are whole at once: the one that computes and the one fetched ahead
_SPREAD = {Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER, Category.EMA}
_UNKNOWN = "not traced"
_NOTE = "sharded over {} ranks by a formula: {}"
_TRACED = (
    "one rank of {} was traced; FSDP gathers parameters in separate streams, whose free memory the simulation "
    "does not count"
)
_OWN = 1 << 40  # a block number that no tape of a model has


def sharded_standing(standing: StandingFootprint, shards: int, why: str = _UNKNOWN) -> StandingFootprint:
    """Return the standing memory of one rank when the state is sharded; `why` nobody has traced it."""
    parts = tuple(_share(part, shards) for part in standing.parts)
    setup = _spread(standing.setup, shards, only_shared=False)
    whole = sum(part.bytes for part in parts) - setup.left_bytes
    return replace(
        standing,
        setup=_then(setup, whole) if whole > 0 else setup,
        first_update=_spread(standing.first_update, shards, only_shared=False),
        update=_spread(standing.update, shards, only_shared=False),
        parts=parts,
        origin=Provenance.ASSUMED,
        notes=(*standing.notes, _NOTE.format(shards, why)),
    )


def sharded_micro(micro: MicroFootprint, standing: StandingFootprint, shards: int) -> MicroFootprint:
    """Return the memory of a micro-batch on one rank of a sharded model; `standing` is of the whole model."""
    gathered = gathered_bytes(standing)
    parts = (
        *(_share(part, shards) for part in micro.parts),
        MemoryPart(Category.PARAMETERS, "gathered blocks", gathered),
    )
    return replace(
        micro,
        first=_around(_spread(micro.first, shards), gathered),
        again=_around(_spread(micro.again, shards), gathered),
        parts=parts,
        origin=Provenance.ASSUMED,
    )


def gathered_bytes(standing: StandingFootprint) -> int:
    """Return the bytes of the largest block while it is gathered: parameters, prefetched ones, and gradients."""
    every = sum(part.bytes for part in standing.parts if part.category is Category.PARAMETERS)
    return (GATHERED + 1) * (standing.largest_block_bytes or every)


def _share(part: MemoryPart, shards: int) -> MemoryPart:
    return replace(part, bytes=-(-part.bytes // shards)) if part.category in _SPREAD else part


def _spread(tape: Tape, shards: int, *, only_shared: bool = True) -> Tape:
    """Return a tape with its blocks (or only those shared with other tapes) divided by `shards`."""
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
