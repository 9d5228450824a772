"""Peptides that a model finds, from what it says of each place: the most probable letters, or those of the right mass.

The second is the most probable peptide that weighs what its precursor weighs, exactly. Places are independent: a
peptide's probability is the product of its letters' and of the end's. The best one within the tolerance is searched
best first. How good the rest may still become is bounded by a table of place by remaining mass, in steps of 0.1 Da:
rounding can only make it look better than it is, so that the first whole peptide found is the best.

Shapes: R residues, L places, V letters, G steps of mass.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.tasks.peptides.vocabulary import EOS, SPECIAL

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pipeline.tasks.peptides.peptide_losses import Constants
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


LETTERS, CONFIDENCE, LABEL, ANSWERS = "letter", "confidence", "letter_label", "answer"
MZ, CHARGE, ALL = "precursor_mz", "charge", "log_probability"
OF_PPM = 20.0  # how far from the precursor's mass a peptide loses most of its rank


class FoundPeptide(NamedTuple):
    """A peptide, how sure the model is of each of its residues, and how far its mass is from the precursor's."""

    letter_R: NDArray[np.int64]
    confidence_R: NDArray[np.float64]
    ppm: float  # not a number where the precursor's mass is not known
    fits_by_search: bool = False  # whether it was searched by the mass

    @property
    def score(self) -> float:
        """The mean confidence in its residues."""
        return float(self.confidence_R.mean()) if len(self.confidence_R) else 0.0


class Answered(NamedTuple):
    """What was found for a spectrum, and what is true; no letters where that is not known."""

    found: FoundPeptide
    true_R: NDArray[np.int64]
    mz: float  # not a number where it is not known
    charge: int  # 0 where it is not known


@dataclass(frozen=True)
class PeptideChoice:
    """How a peptide is chosen: by its letters, or among those and the best ones of the right mass."""

    vocabulary: Vocabulary
    constants: Constants
    tolerance_ppm: float = 0.0  # 0: masses are not looked at
    mass_weight: float = 0.5  # of agreement in mass, in the rank of a peptide

    def answers(self, outputs: Mapping[str, Sequence[Any]]) -> Iterator[Answered]:
        """Yield what was found for each spectrum, in order."""
        for place in range(len(outputs[LETTERS])):
            yield self.answer({name: np.asarray(column[place]) for name, column in outputs.items()})

    def answer(self, row: Mapping[str, NDArray[Any]]) -> Answered:
        """Return what was found for one spectrum."""
        mz, charge = float(row[MZ]), int(row[CHARGE])
        mass = charge * (mz - self.constants.proton) if charge else math.nan
        candidates = [self._likeliest(row[LETTERS], row[CONFIDENCE], mass)]
        if self.tolerance_ppm and ALL in row and math.isfinite(mass):
            candidates += self._searched(row[ALL].astype(np.float64), mass)
        found = max(candidates, key=lambda one: rank_score(one.score, one.ppm, self.mass_weight))
        return Answered(found, true_letters(row[LABEL]), mz, charge)

    def mz_of(self, found: FoundPeptide, charge: int) -> float:
        """Return the m/z that a peptide should have."""
        mass = float(self.vocabulary.masses_V[found.letter_R].sum()) + self.constants.water
        return mass / charge + self.constants.proton if charge else math.nan

    def ppm(self, letter_R: NDArray[np.int64], mass: float) -> float:
        """Return how much heavier than the precursor a peptide is, in millionths."""
        own = float(self.vocabulary.masses_V[letter_R].sum()) + self.constants.water
        return (own - mass) / mass * 1e6

    def _likeliest(self, letter_L: NDArray[Any], sure_L: NDArray[Any], mass: float) -> FoundPeptide:
        kept = before_end(letter_L)
        letter_R = letter_L[kept].astype(np.int64)
        return FoundPeptide(letter_R, sure_L[kept].astype(np.float64), self.ppm(letter_R, mass))

    def _searched(self, log_LV: NDArray[np.float64], mass: float) -> list[FoundPeptide]:
        letter_R = MassDecoder(self.vocabulary, self.tolerance_ppm, self.constants.water).best(log_LV, mass)
        if letter_R is None:
            return []
        sure_R = np.exp(log_LV[np.arange(len(letter_R)), letter_R])
        return [FoundPeptide(letter_R, sure_R, self.ppm(letter_R, mass), fits_by_search=True)]


def before_end(letter_L: NDArray[Any]) -> NDArray[np.int64]:
    """Return the places of residues before the end."""
    is_end_L = letter_L == EOS
    last = int(np.argmax(is_end_L)) if is_end_L.any() else len(letter_L)
    return np.flatnonzero(letter_L[:last] >= len(SPECIAL))


def true_letters(label_L: NDArray[Any]) -> NDArray[np.int64]:
    """Return the residues of a true peptide."""
    letter_R: NDArray[np.int64] = label_L[label_L >= len(SPECIAL)].astype(np.int64)
    return letter_R


def rank_score(score: float, ppm: float, mass_weight: float) -> float:
    """Return the score that candidates are ranked by: the model's, and how well the mass agrees."""
    if not math.isfinite(ppm):
        return score
    return (1 - mass_weight) * score + mass_weight * math.exp(-abs(ppm) / OF_PPM)
