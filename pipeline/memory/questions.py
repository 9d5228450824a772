"""The oracle as the planner asks it: few questions, sizes rounded up so that they repeat, answers kept."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pipeline.memory.footprint import Step, live_peak_bytes
from pipeline.memory.sharding import sharded_micro, sharded_standing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pipeline.memory.footprint import Choice, Micro, Oracle, Origin, Standing

    Integers = NDArray[np.int64]

_DIGITS = 7  # of a size, in binary, are kept: it is at most 1/64 larger


class Questions:
    """Asks an oracle about rows of sizes, which have one order here."""

    def __init__(self, oracle: Oracle, names: tuple[str, ...]) -> None:
        self.names = names
        self.asked = 0  # micro-batches that the oracle was asked about
        self._oracle = oracle
        self._standing: dict[Choice, Standing] = {}
        self._micro: dict[tuple[Choice, tuple[int, ...]], Micro] = {}
        self._peak: dict[tuple[Choice, tuple[int, ...], bool], int] = {}

    def standing(self, choice: Choice) -> Standing:
        """Return what a model takes whatever the batch."""
        if choice not in self._standing:
            whole = replace(choice, shards=1)
            if choice.shards > 1:
                self._standing[choice] = sharded_standing(self.standing(whole), choice.shards)
            else:
                self._standing[choice] = self._oracle.standing(choice)
        return self._standing[choice]

    def micro(self, choice: Choice, row: Sequence[int]) -> Micro:
        """Return what a micro-batch of exactly these sizes takes."""
        key = (choice, tuple(int(size) for size in row))
        if key not in self._micro:
            self._micro[key] = self._answer(*key)
        return self._micro[key]

    def _answer(self, choice: Choice, row: tuple[int, ...]) -> Micro:
        if choice.shards > 1:
            whole = replace(choice, shards=1)
            return sharded_micro(self.micro(whole, row), self.standing(whole), choice.shards)
        self.asked += 1
        return self._oracle.micro(choice, dict(zip(self.names, row, strict=True)))

    def rows(self, choice: Choice) -> list[tuple[int, ...]]:
        """Return what was asked about a choice."""
        return [row for of, row in self._micro if of == choice]

    def origins(self, choice: Choice) -> set[Origin]:
        """Return where the answers so far are from."""
        return {micro.origin for (of, _), micro in self._micro.items() if of == choice}

    def notes(self, choice: Choice) -> tuple[str, ...]:
        """Return what the oracle said about its answers, each once."""
        said = [note for (of, _), micro in self._micro.items() if of == choice for note in micro.notes]
        return tuple(dict.fromkeys((*self.standing(choice).notes, *said)))

    def peak_bytes(self, choice: Choice, row: Sequence[int], *, accumulate: bool) -> int:
        """Return the live peak of a step of such micro-batches, the first step of a run included."""
        key = (choice, tuple(int(size) for size in row), accumulate)
        if key not in self._peak:
            standing, micro = self.standing(choice), self.micro(choice, row)
            micros = [micro, micro] if accumulate else [micro]
            first = Step.of(standing, micros, first=True).peak_bytes(standing.setup.left_bytes)
            self._peak[key] = max(first, live_peak_bytes(standing, micro, accumulate=accumulate))
        return self._peak[key]


def rounded_up(rows_MS: Integers, most_S: Integers) -> Integers:
    """Return sizes of few leading digits that are not below the given ones, and not above what can be.

    A query answers for all sizes below it; sizes nobody has are never asked about, because a model may refuse them.
    """
    bits = np.floor(np.log2(np.maximum(rows_MS, 1))).astype(np.int64) + 1
    step = np.left_shift(1, np.maximum(bits - _DIGITS, 0))
    up = -(-rows_MS // step) * step
    return np.asarray(np.maximum(np.minimum(up, most_S), rows_MS))
