"""The peptide that a model finds, from its probabilities at each place: the most probable letters, or by mass.

The letters are pepTRM's 24, and modified residues unless `as_published`; there modifications are cut off, and the
letter is kept.

The search by mass gives the most probable peptide that weighs what its precursor weighs, exactly. Places are
independent: a peptide's probability is the product of its letters' and of the end's. The best one within the tolerance
is searched best first. How good the rest may still become is bounded by a table of place by remaining mass, in steps of
0.1 Da: rounding can only make it look better than it is, so that the first whole peptide found is the best.

Shapes: R residues, L places, V letters, G steps of mass.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.readers import peptides
from pipeline.readers.peptides import LETTER_OF, RESIDUE_MASSES, RESIDUES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]


SPECIAL = (PAD, SOS, EOS, UNK) = (0, 1, 2, 3)
PUBLISHED = "ARNDCEQGHILKMFPSTWYV"
PUBLISHED_MASSES = (
    *(71.03711, 156.10111, 114.04293, 115.02694, 103.00919, 129.04259, 128.05858, 57.02146, 137.05891, 113.08406),
    *(113.08406, 128.09496, 131.04049, 147.06841, 97.05276, 87.03203, 101.04768, 186.07931, 163.06333, 99.06841),
)
PUBLISHED_WATER, PUBLISHED_PROTON = 18.01056, 1.00727
MODIFIED = RESIDUES[20:]


@dataclass(frozen=True)
class Vocabulary:
    """The letters that a model knows: special ones, residues, and modified residues, as ProForma has them."""

    modified: tuple[str, ...] = MODIFIED
    as_published: bool = False

    @cached_property
    def names(self) -> tuple[str, ...]:
        return ("<PAD>", "<SOS>", "<EOS>", "<UNK>", *PUBLISHED, *(() if self.as_published else self.modified))

    @cached_property
    def codes_V(self) -> NDArray[np.int64]:
        """The code of each letter among `peptides.RESIDUES`; -1 of special ones."""
        return np.array([RESIDUES.index(name) if name in RESIDUES else -1 for name in self.names])

    @cached_property
    def masses_V(self) -> NDArray[np.float64]:
        """The mass of each letter, 0 of special ones."""
        if self.as_published:
            return np.array([0.0] * len(SPECIAL) + list(PUBLISHED_MASSES))
        return np.where(self.codes_V < 0, 0.0, RESIDUE_MASSES[self.codes_V])

    @cached_property
    def is_terminal_V(self) -> NDArray[np.bool_]:
        """Which letters occur only before the first residue."""
        return (self.codes_V >= 0) & (LETTER_OF[self.codes_V] < 0)

    @property
    def water(self) -> float:
        """What a peptide weighs more than its residues."""
        return PUBLISHED_WATER if self.as_published else peptides.WATER

    @property
    def proton(self) -> float:
        return PUBLISHED_PROTON if self.as_published else peptides.PROTON

    def letters(self, code_L: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the letters of a peptide's codes; raise ValueError for a residue that has none."""
        code_L = np.asarray(code_L, np.int64)
        if self.as_published:
            code_L = LETTER_OF[code_L].astype(np.int64)
            code_L = code_L[code_L >= 0]
        is_letter_LV = code_L[:, None] == self.codes_V
        if not (is_known_L := is_letter_LV.any(1)).all():
            raise ValueError(RESIDUES[code_L[int(np.argmin(is_known_L))]])
        letter_L: NDArray[np.int64] = is_letter_LV.argmax(1)
        return letter_L

    def text(self, letter_L: NDArray[np.integer]) -> str:
        """Return letters up to the end as ProForma; special ones are left out."""
        return "".join(self.names[letter] for letter in letter_L[before_end(letter_L)])

    def mass(self, letter_R: NDArray[np.integer]) -> float:
        return float(self.masses_V[letter_R].sum()) + self.water


STEP = 0.1  # Da
SPARE = 50.0  # Da that a remaining mass may come to below 0, and above the whole: losses have negative mass
UNIT = 1e-6  # Da, below which masses count as equal
MOST_STEPS = 20_000  # of a search: where all letters are alike, there are too many peptides to look at
NEVER = -math.inf


def letter_scores(log_LV: Numbers, vocabulary: Vocabulary) -> tuple[Numbers, Numbers]:
    """Return the score of each residue at each place, and of an end before it [L + 1].

    As published no letter is an end, and each length is as good as another.
    """
    letter_LV = np.array(log_LV, np.float64)
    end_N = np.zeros(len(letter_LV) + 1)
    if not vocabulary.as_published:
        end_N[:-1] = letter_LV[:, EOS]
    letter_LV[:, list(SPECIAL)] = NEVER
    letter_LV[1:, vocabulary.is_terminal_V] = NEVER
    return letter_LV, end_N


def best_of_mass(log_LV: Numbers, mass: float, vocabulary: Vocabulary, ppm: float) -> NDArray[np.int64] | None:
    """Return the letters of the best peptide of a mass; None where none fits, or too many would have to be looked at.

    `ppm` is how far a peptide's mass may be from the precursor's.
    """
    rest, tolerance = mass - vocabulary.water, ppm * 1e-6 * mass
    if not rest > 0:
        return None
    letter_LV, end_N = letter_scores(log_LV, vocabulary)
    masses_V = vocabulary.masses_V
    bound = _Bound(letter_LV, end_N, masses_V, rest, tolerance)
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
            heapq.heappush(heap, (-(score + end_N[place]), -1, score, rest, letters))
        if place == len(letter_LV):
            continue
        for letter in np.flatnonzero(letter_LV[place] > NEVER).tolist():
            after, left = score + letter_LV[place, letter], rest - masses_V[letter]
            if (worth := after + bound.at(place + 1, left)) > NEVER:
                heapq.heappush(heap, (-worth, place + 1, after, left, (*letters, letter)))
    return None


class _Bound:
    """At most how much the letters from a place on are worth that make up a remaining mass."""

    def __init__(self, letter_LV: Numbers, end_N: Numbers, masses_V: Numbers, whole: float, tolerance: float) -> None:
        self._spare = math.ceil((SPARE + tolerance) / STEP)
        near = np.zeros(math.floor(whole / STEP) + 2 * self._spare + 2, np.bool_)
        near[self._of(-tolerance) - 1 : self._of(tolerance) + 2] = True
        step_V = np.floor(masses_V / STEP).astype(np.int64)
        worth_G = np.where(near, end_N[-1], NEVER)
        self._worth = [worth_G]
        for letter_V, end in zip(letter_LV[::-1], end_N[-2::-1], strict=True):
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
        """Return the best worth from a place on. The whole part of x - y is that of x less that of y, or one less."""
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


class Answer(NamedTuple):
    """A peptide that was found for a spectrum, with the spectrum's precursor and true peptide."""

    letter_R: NDArray[np.int64]
    confidence_R: NDArray[np.float64]  # how sure the model is of each residue
    is_searched: bool  # by the mass
    ppm: float  # how much heavier it is than the precursor; not a number where that mass is not known
    true_R: NDArray[np.int64]  # no letters where they are not known
    mz: float  # not a number where it is not known
    charge: int  # 0 where it is not known

    @property
    def score(self) -> float:
        """The mean confidence in its residues."""
        return float(self.confidence_R.mean()) if len(self.confidence_R) else 0.0


@dataclass(frozen=True)
class PeptideChoice:
    """How a peptide is chosen: by its letters, or among those and the best ones of the right mass."""

    vocabulary: Vocabulary
    tolerance_ppm: float = 0.0  # 0: masses are not looked at
    mass_weight: float = 0.5  # of agreement in mass, in the rank of a peptide

    def answers(self, outputs: Mapping[str, Sequence[Any]]) -> Iterator[Answer]:
        """Yield the answer for each spectrum, in order."""
        for place in range(len(outputs[LETTERS])):
            yield self._answer({name: np.asarray(column[place]) for name, column in outputs.items()})

    def _answer(self, row: Mapping[str, NDArray[Any]]) -> Answer:
        mz, charge = float(row[MZ]), int(row[CHARGE])
        mass = charge * (mz - self.vocabulary.proton) if charge else math.nan
        kept = before_end(row[LETTERS])
        candidates = [(row[LETTERS][kept].astype(np.int64), row[CONFIDENCE][kept].astype(np.float64), False)]
        if self.tolerance_ppm and ALL in row and math.isfinite(mass):
            log_LV = row[ALL].astype(np.float64)
            letter_R = best_of_mass(log_LV, mass, self.vocabulary, self.tolerance_ppm)
            if letter_R is not None:
                candidates.append((letter_R, np.exp(log_LV[np.arange(len(letter_R)), letter_R]), True))
        true_R = row[LABEL][row[LABEL] >= len(SPECIAL)].astype(np.int64)
        found = [Answer(*peptide, self.ppm(peptide[0], mass), true_R, mz, charge) for peptide in candidates]
        return max(found, key=lambda answer: rank_score(answer.score, answer.ppm, self.mass_weight))

    def mz_of(self, answer: Answer) -> float:
        """Return the m/z that a peptide should have."""
        mass = self.vocabulary.mass(answer.letter_R)
        return mass / answer.charge + self.vocabulary.proton if answer.charge else math.nan

    def ppm(self, letter_R: NDArray[np.int64], mass: float) -> float:
        """Return how much heavier than the precursor a peptide is, in millionths."""
        return (self.vocabulary.mass(letter_R) - mass) / mass * 1e6


def before_end(letter_L: NDArray[Any]) -> NDArray[np.int64]:
    """Return the places of residues before the end."""
    is_end_L = letter_L == EOS
    last = int(np.argmax(is_end_L)) if is_end_L.any() else len(letter_L)
    return np.flatnonzero(letter_L[:last] >= len(SPECIAL))


def rank_score(score: float, ppm: float, mass_weight: float) -> float:
    """Return the score that candidates are ranked by: the model's, and how well the mass agrees."""
    if not math.isfinite(ppm):
        return score
    return (1 - mass_weight) * score + mass_weight * math.exp(-abs(ppm) / OF_PPM)
