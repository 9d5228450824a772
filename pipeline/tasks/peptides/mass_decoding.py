"""The most probable peptide that weighs what its precursor weighs, exactly.

Places are independent: a peptide's probability is the product of its letters' and of the end's. The best one within the
tolerance is searched best first. How good the rest may still become is bounded by a table of place by remaining mass,
in steps of 0.1 Da: rounding can only make it look better than it is, so that the first whole peptide found is the best.

Shapes: L places, V letters, G steps of mass.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.tasks.peptides.vocabulary import EOS, SPECIAL

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pipeline.tasks.peptides.vocabulary import Vocabulary

    Numbers = NDArray[np.float64]

STEP = 0.1  # Da
SPARE = 50.0  # Da that a remaining mass may come to below 0, and above the whole: what is lost weighs less than nothing
UNIT = 1e-6  # Da, to which masses are told apart
MOST_STEPS = 20_000  # of a search: where all letters are alike, there are too many peptides to look at
NEVER = -math.inf


class LetterScores(NamedTuple):
    """The logarithms of what each letter is worth at each place, and of an end before it."""

    letter_LV: Numbers
    end_N: Numbers  # [L + 1]

    @classmethod
    def of(cls, log_LV: Numbers, vocabulary: Vocabulary) -> LetterScores:
        """Return those of residues; as published no letter is an end, and each length is as good as another."""
        letter_LV = np.array(log_LV, np.float64)
        end_N = np.zeros(len(letter_LV) + 1)
        if not vocabulary.as_published:
            end_N[:-1] = letter_LV[:, EOS]
        letter_LV[:, list(SPECIAL)] = NEVER
        letter_LV[1:, vocabulary.is_terminal_V] = NEVER
        return cls(letter_LV, end_N)


@dataclass(frozen=True)
class MassDecoder:
    """Searches the best peptide of a mass."""

    vocabulary: Vocabulary
    ppm: float  # how far a peptide's mass may be from the precursor's
    water: float

    def best(self, log_LV: Numbers, mass: float) -> NDArray[np.int64] | None:
        """Return the letters of the best peptide; None where none fits, or too many would have to be looked at."""
        rest, tolerance = mass - self.water, self.ppm * 1e-6 * mass
        if not rest > 0:
            return None
        scores, masses_V = LetterScores.of(log_LV, self.vocabulary), self.vocabulary.masses_V
        bound = _Bound(scores, masses_V, rest, tolerance)
        heap = [(-bound.at(0, rest), 0, 0.0, rest, tuple[int, ...]())]
        seen: set[tuple[int, int]] = set()
        for _ in range(MOST_STEPS):
            if not heap:
                break
            _, place, score, rest, letters = heapq.heappop(heap)
            if place < 0:
                return np.array(letters, np.int64)
            if (place, round(rest / UNIT)) in seen:  # the same mass was reached by better letters
                continue
            seen.add((place, round(rest / UNIT)))
            if abs(rest) <= tolerance and letters:
                heapq.heappush(heap, (-(score + scores.end_N[place]), -1, score, rest, letters))
            if place == len(scores.letter_LV):
                continue
            for letter in np.flatnonzero(scores.letter_LV[place] > NEVER).tolist():
                after, left = score + scores.letter_LV[place, letter], rest - masses_V[letter]
                if (worth := after + bound.at(place + 1, left)) > NEVER:
                    heapq.heappush(heap, (-worth, place + 1, after, left, (*letters, letter)))
        return None


class _Bound:
    """At most how much the letters from a place on are worth that make up a remaining mass."""

    def __init__(self, scores: LetterScores, masses_V: Numbers, whole: float, tolerance: float) -> None:
        self._spare = math.ceil((SPARE + tolerance) / STEP)
        steps = math.floor(whole / STEP) + 2 * self._spare + 2
        near = np.zeros(steps, np.bool_)
        near[self._of(-tolerance) - 1 : self._of(tolerance) + 2] = True
        step_V = np.floor(masses_V / STEP).astype(np.int64)
        worth_G = np.where(near, scores.end_N[-1], NEVER)
        self._worth = [worth_G]
        for letter_V, end in zip(scores.letter_LV[::-1], scores.end_N[-2::-1], strict=True):
            worth_G = self._before(worth_G, letter_V, step_V, np.where(near, end, NEVER))
            self._worth.append(worth_G)
        self._worth.reverse()

    def at(self, place: int, rest: float) -> float:
        step = self._of(rest)
        return float(self._worth[place][step]) if 0 <= step < len(self._worth[place]) else NEVER

    def _of(self, rest: float) -> int:
        return math.floor(rest / STEP) + self._spare

    @staticmethod
    def _before(after_G: Numbers, letter_V: Numbers, step_V: NDArray[np.int64], end_G: Numbers) -> Numbers:
        """Return what is worth from a place on. Of x - y, the whole part is that of x less that of y, or one less."""
        either_G = after_G.copy()
        either_G[1:] = np.maximum(after_G[1:], after_G[:-1])
        worth_G = end_G
        for letter in np.flatnonzero(letter_V > NEVER).tolist():
            step = int(step_V[letter])
            moved_G = np.full_like(either_G, NEVER)
            if step >= 0:
                moved_G[step:] = either_G[: max(len(either_G) - step, 0)]
            else:
                moved_G[:step] = either_G[-step:]
            worth_G = np.maximum(worth_G, moved_G + letter_V[letter])
        return worth_G
