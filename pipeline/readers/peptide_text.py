"""Peptides as people write them, with their modifications: ProForma, masses behind letters, and what USI ends with.

    M[Oxidation]PEPC[UNIMOD:4]K   [Acetyl]-MPEPTIDE   [+42.011]-MPEPTIDE/2     ProForma 2: Casanovo 5, InstaNovo
    M+15.995PEPTIDE   +42.011MPEPTIDE   +43.006-17.027QPEPTIDE                 MassIVE-KB, nine-species
    M(+15.99)PEPTIDE   (+42.01)MPEPTIDE                                        DeepNovo, PEAKS
    mzspec:PXD000561:run:scan:17555:VLHPLEGAVVIIFK/2                           a USI with its peptide

Masses may be rounded or cut to two places. What is none of `peptides.MODIFICATIONS` is refused with its name.
Suffix: L residues.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from pipeline.readers.peptides import DELTAS, LETTER_OF, LETTERS, MODIFICATIONS, RESIDUES, TERMINAL

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
    """Return the codes of a peptide's residues; raise ValueError, which says what is not understood."""
    text = CHARGE.sub("", _of_usi(text.strip()))
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


def _of_usi(text: str) -> str:
    """Return the peptide of a universal spectrum identifier; a text that is none as it is."""
    if not text.startswith(USI):
        return text
    parts = text.split(":", USI_PARTS)
    if len(parts) <= USI_PARTS:
        raise ValueError(f"{text!r} tells no peptide behind the number of the scan")
    return parts[USI_PARTS]


def _residue(letter: str, marks: str, *, is_first: bool) -> tuple[int, float]:
    """Return a residue's code, and the change that is not its own but the N-terminus's."""
    code = LETTERS.find(letter)
    if code < 0:
        raise ValueError(f"{letter!r} is no amino acid of {LETTERS}")
    delta = _delta(marks)
    near = np.flatnonzero((code == LETTER_OF) & (np.abs(DELTAS - delta) < NEAR))
    if len(near):
        return int(near[0]), 0.0
    if is_first and len(_terminals(delta)):
        return code, delta
    known = ", ".join(name for name, of in zip(RESIDUES, LETTER_OF, strict=True) if of == code and name != letter)
    raise ValueError(f"{letter}{marks} is no known modification of {letter}; known: {known or 'none'}")


def _terminal(delta: float, text: str) -> list[int]:
    """Return the code of a change of the N-terminus, if there is one."""
    if abs(delta) < NEAR:
        return []
    if not len(near := _terminals(delta)):
        known = ", ".join(RESIDUES[code] for code in TERMINAL)
        raise ValueError(f"{delta:+g} at the beginning of {text!r} is no known modification; known: {known}")
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
        raise ValueError(f"{mark} is no known modification; known: {', '.join(one.name for one in MODIFICATIONS)}")
    return KNOWN[plain.lower()]
