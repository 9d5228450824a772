"""Peptides: codes and masses of residues, also modified ones; fragments; and the notations that people use.

A code is a place in `RESIDUES`: the 20 letters come first, then modified residues, then what may stand before the first
residue. Masses are monoisotopic, in Da. Suffixes: L residues of a peptide, F = L - 1 places where it may break.

People write modifications as ProForma does, as masses behind letters, or in what a USI ends with:

    M[Oxidation]PEPC[UNIMOD:4]K   [Acetyl]-MPEPTIDE   [+42.011]-MPEPTIDE/2     ProForma 2: Casanovo 5, InstaNovo
    M+15.995PEPTIDE   +42.011MPEPTIDE   +43.006-17.027QPEPTIDE                 MassIVE-KB, nine-species
    M(+15.99)PEPTIDE   (+42.01)MPEPTIDE                                        DeepNovo, PEAKS
    mzspec:PXD000561:run:scan:17555:VLHPLEGAVVIIFK/2                           a USI with its peptide

Masses may be rounded or cut to two places. What is none of `MODIFICATIONS` is refused with its name.
"""

from __future__ import annotations

import re
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
    """Return m/z of masses with a number of protons."""
    return mass_F / charge + PROTON


def mass(residue_L: NDArray[np.integer]) -> float:
    """Return the neutral mass of a whole peptide."""
    return float(RESIDUE_MASSES[residue_L].sum() + WATER)


def b_ions(residue_L: NDArray[np.integer], charge: int = 1) -> NDArray[np.float64]:
    """Return m/z of the b ions b1 … bF [F]."""
    return mz(np.cumsum(RESIDUE_MASSES[residue_L])[:-1], charge)


def y_ions(residue_L: NDArray[np.integer], charge: int = 1) -> NDArray[np.float64]:
    """Return m/z of the y ions y1 … yF [F], shortest first."""
    return mz(np.cumsum(RESIDUE_MASSES[residue_L][::-1])[:-1] + WATER, charge)


NEAR = 0.006  # Da: by how much a written mass may be off
MARK = r"\[[^\[\]]*\]|\([^()]*\)|[+-](?:\d+(?:\.\d*)?|\.\d+)"
MARKS = re.compile(MARK)
BEFORE = re.compile(rf"(?:((?:\[[^\[\]]*\])+)-|((?:{MARK})+))")
RESIDUE = re.compile(rf"(.)((?:{MARK})*)", re.DOTALL)
CHARGE = re.compile(r"/\d+$")
NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)")
PREFIXES = ("UNIMOD:", "U:")  # of a number or a name
KNOWN = {name: change.delta for change in MODIFICATIONS for name in (change.name.lower(), str(change.unimod))}
KNOWN |= {
    "carbamidomethylation": KNOWN["carbamidomethyl"],
    "deamidation": KNOWN["deamidated"],
    "cam": KNOWN["carbamidomethyl"],
}
USI = "mzspec:"
USI_PARTS = 5  # before the peptide


def residue_codes(text: str) -> NDArray[np.int8]:
    """Return the codes of a peptide's residues; raise ValueError that names the part that is not understood."""
    text = text.strip()
    if text.startswith(USI):
        *parts, text = text.split(":", USI_PARTS)
        if len(parts) < USI_PARTS:
            raise ValueError(f"{':'.join([*parts, text])!r} has no peptide after the scan number")
    text = CHARGE.sub("", text)
    if not text:
        raise ValueError("a peptide needs at least one letter")
    before, place = 0.0, 0
    if match := BEFORE.match(text):
        before, place = _delta(match[1] or match[2]), match.end()
    codes: list[int] = []
    while place < len(text):
        match = RESIDUE.match(text, place)
        assert match is not None  # it fits any letter
        code, rest = _residue(match[1], match[2], is_first=not codes)
        codes, before, place = [*codes, code], before + rest, match.end()
    if not codes:
        raise ValueError(f"{text!r} has no letter")
    return np.array([*_terminal(before, text), *codes], np.int8)


def _residue(letter: str, marks: str, *, is_first: bool) -> tuple[int, float]:
    """Return a residue's code, and the change that is not its own but the N-terminus's."""
    code = LETTERS.find(letter)
    if code < 0:
        raise ValueError(f"{letter!r} is not an amino acid of {LETTERS}")
    delta = _delta(marks)
    near = np.flatnonzero((code == LETTER_OF) & (np.abs(DELTAS - delta) < NEAR))
    if len(near):
        return int(near[0]), 0.0
    if is_first and len(_terminals(delta)):
        return code, delta
    known = ", ".join(name for name, of in zip(RESIDUES, LETTER_OF, strict=True) if of == code and name != letter)
    raise ValueError(f"{letter}{marks} is not a known modification of {letter}; known: {known or 'none'}")


def _terminal(delta: float, text: str) -> list[int]:
    """Return the code of a change of the N-terminus, if there is one."""
    if abs(delta) < NEAR:
        return []
    if not len(near := _terminals(delta)):
        known = ", ".join(RESIDUES[code] for code in TERMINAL)
        raise ValueError(f"{delta:+g} at the beginning of {text!r} is not a known modification; known: {known}")
    return [int(near[0])]


def _terminals(delta: float) -> NDArray[np.int64]:
    return TERMINAL[np.abs(DELTAS[TERMINAL] - delta) < NEAR]


def _delta(marks: str) -> float:
    """Return the mass of all that is written behind a letter."""
    return sum(_mark(mark) for mark in MARKS.findall(marks))


def _mark(mark: str) -> float:
    name = mark.strip("[]()").strip()
    if NUMBER.fullmatch(name):
        return float(name)
    plain = name
    for prefix in PREFIXES:
        plain = plain[len(prefix) :] if plain.upper().startswith(prefix) else plain
    if plain.lower() not in KNOWN or plain == "0":
        raise ValueError(f"{mark} is not a known modification; known: {', '.join(one.name for one in MODIFICATIONS)}")
    return KNOWN[plain.lower()]
