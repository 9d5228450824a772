"""Peptides that a model finds, from what it says of each place: the most probable letters, or those of the right mass.

Shapes: R residues, L places, V letters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.tasks.peptides.mass_decoding import MassDecoder
from pipeline.tasks.peptides.vocabulary import EOS, SPECIAL

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pipeline.tasks.peptides.peptide_losses import Constants
    from pipeline.tasks.peptides.vocabulary import Vocabulary

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
