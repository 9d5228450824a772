"""Residues as codes and masses, modified ones among them, and the fragments that a peptide breaks into.

A code is a place in `RESIDUES`: the 20 letters come first, then modified residues, then what may stand before the first
residue. Masses are monoisotopic, in Da. Suffixes: L residues of a peptide, F = L - 1 places where it may break.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

LETTERS = "GASPVTCLINDQKEMHFRYW"  # a residue's code is its place here: by mass, L before I
PROTON = 1.007276466621
WATER = 18.010564684
CARBAMIDOMETHYL = 57.021463735  # what iodoacetamide leaves on C
OXYGEN = 15.994914620  # what oxidation leaves on M
MASSES: NDArray[np.float64] = np.array(
    [
        *(57.021463735, 71.037113805, 87.032028435, 97.052763875, 99.068413945),  # G A S P V
        *(101.047678505, 103.009184505, 113.084064015, 113.084064015, 114.042927470),  # T C L I N
        *(115.026943065, 128.058577540, 128.094963050, 129.042593135, 131.040484645),  # D Q K E M
        *(137.058911875, 147.068413945, 156.101111050, 163.063328575, 186.079312980),  # H F R Y W
    ]
)
_CODES = {letter: code for code, letter in enumerate(LETTERS)}


class Modification(NamedTuple):
    """A change of a residue, or of the N-terminus."""

    name: str
    unimod: int  # its number; 0: none
    delta: float
    letters: str  # that it is of; none: the N-terminus


MODIFICATIONS = (
    Modification("Oxidation", 35, OXYGEN, "M"),
    Modification("Carbamidomethyl", 4, CARBAMIDOMETHYL, "C"),
    Modification("Deamidated", 7, 0.984015595, "NQ"),
    Modification("Acetyl", 1, 42.010564684, ""),
    Modification("Carbamyl", 5, 43.005813655, ""),
    Modification("Ammonia-loss", 385, -17.026549101, ""),
    Modification("+25.979265", 0, 43.005813655 - 17.026549101, ""),  # carbamyl, and ammonia lost
)
_CHANGED = tuple((letter, change) for change in MODIFICATIONS for letter in change.letters or ("",))
RESIDUES = (
    *LETTERS,
    *(f"{letter}[{change.name}]" if letter else f"[{change.name}]-" for letter, change in _CHANGED),
)  # as ProForma has them
LETTER_OF: NDArray[np.int8] = np.array([*range(20), *(_CODES.get(letter, -1) for letter, _ in _CHANGED)], np.int8)
DELTAS: NDArray[np.float64] = np.array([*(0.0 for _ in LETTERS), *(change.delta for _, change in _CHANGED)])
RESIDUE_MASSES: NDArray[np.float64] = DELTAS + np.where(LETTER_OF < 0, 0.0, MASSES[LETTER_OF])
TERMINAL = np.flatnonzero(LETTER_OF < 0)  # codes of what stands before the first residue


def peptide_text(residue_L: NDArray[np.integer]) -> str:
    """Return codes as ProForma: `[Acetyl]-M[Oxidation]PEPTIDE`."""
    return "".join(RESIDUES[code] for code in residue_L)


def letters_only(residue_L: NDArray[np.integer]) -> NDArray[np.int8]:
    """Return codes without modifications: the letters that are left."""
    letter_L = LETTER_OF[np.asarray(residue_L, np.int64)]
    return letter_L[letter_L >= 0]


def mz(mass_F: NDArray[np.float64], charge: int) -> NDArray[np.float64]:
    """Return m/z of masses with so many protons."""
    seen_F: NDArray[np.float64] = mass_F / charge + PROTON
    return seen_F


def mass(residue_L: NDArray[np.integer]) -> float:
    """Return the neutral mass of a whole peptide."""
    return float(RESIDUE_MASSES[residue_L].sum() + WATER)


def b_ions(residue_L: NDArray[np.integer], charge: int = 1) -> NDArray[np.float64]:
    """Return m/z of the b ions b1 … bF [F]."""
    return mz(np.cumsum(RESIDUE_MASSES[residue_L])[:-1], charge)


def y_ions(residue_L: NDArray[np.integer], charge: int = 1) -> NDArray[np.float64]:
    """Return m/z of the y ions y1 … yF [F], shortest first."""
    return mz(np.cumsum(RESIDUE_MASSES[residue_L][::-1])[:-1] + WATER, charge)
