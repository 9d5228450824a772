"""Amino acids as codes and masses, and the fragments that a peptide breaks into.

Masses are monoisotopic, in Da. Suffixes: L residues of a peptide, F = L - 1 places where it may break.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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


def masses(*, carbamidomethyl: bool = False, oxidised: bool = False) -> NDArray[np.float64]:
    """Return the mass of each letter, with C or M modified where asked."""
    changed: NDArray[np.float64] = MASSES.copy()
    changed[_CODES["C"]] += CARBAMIDOMETHYL * carbamidomethyl
    changed[_CODES["M"]] += OXYGEN * oxidised
    return changed


def residue_codes(letters: str) -> NDArray[np.int8]:
    """Return the codes of a peptide's letters; raise for a letter that is not one of the 20."""
    if not letters:
        raise ValueError("a peptide needs at least one letter")
    try:
        return np.array([_CODES[letter] for letter in letters], np.int8)
    except KeyError as unknown:
        raise ValueError(f"{unknown.args[0]!r} is no amino acid of {LETTERS}") from None


def peptide_text(residue_L: NDArray[np.integer]) -> str:
    """Return codes as letters."""
    return "".join(LETTERS[code] for code in residue_L)


def mz(mass_F: NDArray[np.float64], charge: int) -> NDArray[np.float64]:
    """Return m/z of masses with so many protons."""
    seen_F: NDArray[np.float64] = mass_F / charge + PROTON
    return seen_F


def mass(residue_L: NDArray[np.integer], each: NDArray[np.float64] = MASSES) -> float:
    """Return the neutral mass of a whole peptide."""
    return float(each[residue_L].sum() + WATER)


def b_ions(residue_L: NDArray[np.integer], charge: int = 1, each: NDArray[np.float64] = MASSES) -> NDArray[np.float64]:
    """Return m/z of the b ions b1 … bF [F]."""
    return mz(np.cumsum(each[residue_L])[:-1], charge)


def y_ions(residue_L: NDArray[np.integer], charge: int = 1, each: NDArray[np.float64] = MASSES) -> NDArray[np.float64]:
    """Return m/z of the y ions y1 … yF [F], shortest first."""
    return mz(np.cumsum(each[residue_L][::-1])[:-1] + WATER, charge)
