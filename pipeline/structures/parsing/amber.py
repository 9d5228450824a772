"""AMBER: atoms, residues and bonds of a topology, and their coordinates from the restart file next to it.

A topology has no chains. Residues that follow each other and are bonded are one; those that hold a residue of a
protein, RNA or DNA are A, B, …, and all else (ligands, ions, waters) is in the chain `_`: a molecule of it is `_:LIG`,
or `_:LIG:37`. Bonds are those of the topology, all of them. Shapes: A atoms, R residues, B bonds.
"""

from __future__ import annotations

import os
import re
from io import BytesIO
from itertools import product
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

import gemmi
import numpy as np

from pipeline.records import Reason
from pipeline.structures.atoms import AtomTable, Links, UnusableInput, name_word
from pipeline.structures.policy import HETATM, LINKING_WORDS, POLYMER, WATER, is_standard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

REVISION = 2  # raise it when the same files give other atoms
TOPOLOGIES = (".prmtop", ".parm7")
COORDINATES = (".inpcrd", ".rst7", ".crd")  # the first of these that is there; ASCII or NetCDF
ENDINGS = tuple(suffix + packed for packed in ("", ".gz") for suffix in COORDINATES)
TOPOLOGY_ENDINGS = tuple(suffix + packed for packed in ("", ".gz") for suffix in TOPOLOGIES)
LONGEST_ENDING = max(map(len, TOPOLOGY_ENDINGS))
OXYGEN, HYDROGEN, ELEMENTS = 8, 1, 118
NON_POLYMER = 2
FORMAT = re.compile(r"%FORMAT\(\s*\d*[aAiIeEfFdD]([1-9]\d*)(?:\.\d+)?\s*\)")
MASSES = np.array([0.0, *(gemmi.Element(number).weight for number in range(1, ELEMENTS + 1))])
WIDTH, PER_LINE = 12, 6  # of the numbers of a restart file
NETCDF_ERRORS = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, MemoryError)
LETTERS = [*ascii_uppercase, *map("".join, product(ascii_uppercase, repeat=2))]  # the names of chains
# The length of each list of a topology: this entry of POINTERS, times a factor.
LENGTHS = {
    "ATOM_NAME": (0, 1),
    "RESIDUE_LABEL": (11, 1),
    "RESIDUE_POINTER": (11, 1),
    "BONDS_INC_HYDROGEN": (2, 3),
    "BONDS_WITHOUT_HYDROGEN": (12, 3),
}
NUCLEOTIDES = {
    **{f"{old}{base}{end}": base for old, base, end in product(("", "R"), "ACGU", ("5", "3", "N"))},
    **{f"R{base}": base for base in "ACGU"},
    **{f"D{base}{end}": f"D{base}" for base, end in product("ACGT", "53N")},
}


def coordinate_candidates(path: str) -> tuple[str, ...]:
    """Return the files that may hold the coordinates of a topology; none for a path that is no topology."""
    if not path[-LONGEST_ENDING:].lower().endswith(TOPOLOGY_ENDINGS):  # asked of every file of a data set
        return ()
    stem = path[: path.rindex(".", 0, -len(".gz"))] if path[-3:].lower() == ".gz" else path[: path.rindex(".")]
    return tuple(stem + ending for ending in ENDINGS)


def coordinates_beside(path: str) -> tuple[str, ...]:
    """Return the file that holds the coordinates of a topology, or the first that should; none for another path."""
    if not (candidates := coordinate_candidates(path)):
        return ()
    return tuple(candidate for candidate in candidates if os.path.exists(candidate))[:1] or candidates[:1]  # noqa: PTH110


def read_amber(topology: bytes, coordinates: bytes) -> AtomTable:
    """Return the atoms of a topology at their coordinates."""
    sections = _sections(topology)
    atoms = len(sections["ATOM_NAME"])
    first_R = first_atoms(sections["RESIDUE_POINTER"], atoms)
    residue_A = np.repeat(np.arange(len(first_R)), np.diff(first_R, append=atoms))
    name_A = _words(sections["ATOM_NAME"])
    linking_R = np.bincount(residue_A, weights=np.isin(name_A, LINKING_WORDS), minlength=len(first_R)) > 0
    labels = [
        NUCLEOTIDES.get(label, label) if links else label
        for label, links in zip(sections["RESIDUE_LABEL"], linking_R.tolist(), strict=True)
    ]
    standard_R = np.array([is_standard(label) for label in labels]) & linking_R
    bonds_B2 = _bonds(sections)
    chain_R = _chains(residue_A[bonds_B2], standard_R)
    element_A, water_R = _elements(sections, residue_A)
    entity_R = np.where(water_R, WATER, np.where(chain_R > 0, POLYMER, NON_POLYMER))
    blank_A = np.zeros(atoms, np.int8)
    return AtomTable(
        pos_A3=read_positions(coordinates, atoms),
        name_A=name_A,
        resname_A=_words(labels)[residue_A],
        chain_A=chain_R[residue_A],
        number_A=(residue_A + 1).astype(np.int32),
        icode_A=blank_A + np.int8(ord(" ")),
        altloc_A=blank_A,
        occupancy_A=np.ones(atoms, np.float32),
        element_A=element_A.astype(np.uint8),
        entity_A=entity_R[residue_A].astype(np.uint8),
        hetero_A=np.where(standard_R, ord("A"), HETATM)[residue_A].astype(np.int8),
        links=lambda: Links(bonds_B2, np.ones(len(bonds_B2), np.bool_), is_complete=True),
    )


def read_lists(data: bytes) -> dict[str, str]:
    """Return the text of each list of a topology, by its flag."""
    head, *parts = data.decode("latin-1").split("\n%FLAG ")
    if not head.startswith("%VERSION"):
        raise _bad("not an AMBER topology: its first line is not %VERSION")
    return {part.partition("\n")[0].strip(): part for part in parts}


def read_words(lists: Mapping[str, str], name: str, length: int | None = None) -> list[str]:
    """Return the cells of a list, each of the width that its format says, and as many as POINTERS say."""
    if name not in lists:
        raise _bad(f"the topology has no %FLAG {name}")
    lines = lists[name].split("\n")[1:]
    found = next((match for line in lines if (match := FORMAT.match(line))), None)
    if found is None:
        raise _bad(f"%FLAG {name} needs a plain %FORMAT, such as (20a4) or (10I8)")
    cells = _cells((line.rstrip() for line in lines if not line.startswith("%")), int(found[1]))
    if length is not None and len(cells) != length:
        raise _bad(f"%FLAG {name} holds {len(cells)} values, but POINTERS say {length}")
    return cells


def _cells(lines: Iterable[str], width: int) -> list[str]:
    return [line[at : at + width].strip() for line in lines for at in range(0, len(line), width)]


def read_numbers(lists: Mapping[str, str], name: str, length: int | None = None) -> NDArray[np.float64]:
    """Return a list of numbers, which must be finite."""
    try:
        values = np.array([float(cell) for cell in read_words(lists, name, length)])
    except ValueError as error:
        raise _bad(f"%FLAG {name}: {error}") from error
    if not np.isfinite(values).all():
        raise _bad(f"%FLAG {name}: value {int(np.argmin(np.isfinite(values))) + 1} is not finite")
    return values


def read_lengths(
    lists: Mapping[str, str], entries: Mapping[str, tuple[int, int]]
) -> tuple[NDArray[np.int64], dict[str, int]]:
    """Return POINTERS, and each list's length: an entry of POINTERS times a factor."""
    pointers = read_numbers(lists, "POINTERS").astype(np.int64)
    if len(pointers) <= max(place for place, _ in entries.values()) or (pointers < 0).any():
        raise _bad("%FLAG POINTERS has too few or negative numbers")
    return pointers, {name: int(pointers[place]) * times for name, (place, times) in entries.items()}


def _bad(what: str) -> UnusableInput:
    return UnusableInput(Reason.PARSE_ERROR, what[:200])


def _sections(data: bytes) -> dict[str, Any]:
    """Return the lists of a topology that are needed; before 2012 an element was known by its mass."""
    lists = read_lists(data)
    pointers, lengths = read_lengths(lists, LENGTHS)
    lengths["ATOMIC_NUMBER" if "ATOMIC_NUMBER" in lists else "MASS"] = int(pointers[0])
    sections: dict[str, Any] = {}
    for name, length in lengths.items():
        read = read_words if name in ("ATOM_NAME", "RESIDUE_LABEL") else read_numbers
        sections[name] = read(lists, name, length)
    if not sections["ATOM_NAME"] or not sections["RESIDUE_LABEL"]:
        raise UnusableInput(Reason.NO_ATOMS, "the topology has no atoms")
    return sections


def first_atoms(pointers: NDArray[np.float64], atoms: int) -> NDArray[np.int64]:
    """Return the first atom of each residue, by RESIDUE_POINTER."""
    first_R: NDArray[np.int64] = pointers.astype(np.int64) - 1
    if first_R[0] != 0 or (np.diff(first_R) < 1).any() or first_R[-1] >= atoms:
        raise _bad("%FLAG RESIDUE_POINTER: residues do not follow each other")
    return first_R


def _bonds(sections: Mapping[str, Any]) -> NDArray[np.int64]:
    """Return the pairs of atoms that are bonded; a topology has three times the number of each, from 0."""
    rows = [sections[name].astype(np.int64).reshape(-1, 3) for name in ("BONDS_WITHOUT_HYDROGEN", "BONDS_INC_HYDROGEN")]
    bonds_B2: NDArray[np.int64] = np.sort(np.concatenate(rows)[:, :2] // 3, axis=1)
    atoms = len(sections["ATOM_NAME"])
    wrong = np.flatnonzero((bonds_B2[:, 0] < 0) | (bonds_B2[:, 1] >= atoms) | (bonds_B2[:, 0] == bonds_B2[:, 1]))
    if len(wrong):
        left, right = (bonds_B2[wrong[0]] + 1).tolist()
        raise _bad(f"a bond between the atoms {left} and {right} of {atoms}")
    return bonds_B2


def _elements(sections: Mapping[str, Any], residue_A: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return atomic numbers, and a mask of the residues that are one oxygen and two hydrogens: water has many names.

    An atom of no element is refused, unless it is the extra point of a water, which is dropped with it.
    """
    if "ATOMIC_NUMBER" in sections:
        element_A = sections["ATOMIC_NUMBER"].astype(np.int64)
    else:
        element_A = np.abs(sections["MASS"][:, None] - MASSES).argmin(1)
    oxygen_R, hydrogen_R, heavy_R = (
        np.bincount(residue_A[chosen_A], minlength=int(residue_A[-1]) + 1)
        for chosen_A in (element_A == OXYGEN, element_A == HYDROGEN, element_A > HYDROGEN)
    )
    water_R = (oxygen_R == 1) & (hydrogen_R == 2) & (heavy_R == 1)
    is_none_A = (element_A < 1) | (element_A > ELEMENTS)
    for atom in np.flatnonzero(is_none_A & ~water_R[residue_A])[:1].tolist():
        residue = int(residue_A[atom])
        where = f"{sections['ATOM_NAME'][atom]} of {sections['RESIDUE_LABEL'][residue]} {residue + 1}"
        raise _bad(f"atom {atom + 1} ({where}) has no element ({element_A[atom]})")
    return np.where(is_none_A, 0, element_A), water_R


def _chains(residue_B2: NDArray[np.int64], standard_R: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Return the chain of each residue: letters for the runs that hold a standard one, nothing for the others.

    A run are consecutive residues that are bonded.
    """
    joined_R = np.zeros(len(standard_R), np.bool_)
    left_B, right_B = np.sort(residue_B2, axis=1).T
    joined_R[right_B[right_B - left_B == 1]] = True
    run_R = np.cumsum(~joined_R) - 1
    runs = np.unique(run_R[standard_R])
    if len(runs) > len(LETTERS):
        raise _bad(f"{len(runs)} chains; {len(LETTERS)} are supported")
    name_of = np.zeros(int(run_R[-1]) + 1, np.uint64)
    name_of[runs] = [name_word(name) for name in LETTERS[: len(runs)]]
    chain_R: NDArray[np.uint64] = name_of[run_R]
    return chain_R


def read_positions(data: bytes, atoms: int) -> NDArray[np.float64]:
    """Return the coordinates in a restart file: text, or NetCDF as AMBER has written it since 2016."""
    if data.startswith(b"CDF"):
        from scipy.io import netcdf_file

        try:
            pos_A3 = np.array(netcdf_file(BytesIO(data), mmap=False).variables["coordinates"].data, np.float64)
        except NETCDF_ERRORS as error:
            raise _bad(f"the coordinates are not a NetCDF restart: {type(error).__name__} {error}") from error
        if pos_A3.shape != (atoms, 3):
            raise _bad(f"the coordinates have the shape {pos_A3.shape}; a restart of this topology has ({atoms}, 3)")
        return pos_A3
    lines = data.decode("latin-1").splitlines()
    count = lines[1].split()[:1] if len(lines) > 1 else []
    if not count or not count[0].isdecimal():
        raise _bad("the coordinates are not an AMBER restart: line 2 has no number of atoms")
    if int(count[0]) != atoms:
        raise _bad(f"the coordinates are of {count[0]} atoms, the topology of {atoms}")
    texts = _cells(lines[2 : 2 + -(-atoms * 3 // PER_LINE)], WIDTH)[: atoms * 3]
    try:
        return np.array([float(number) for number in texts]).reshape(atoms, 3)
    except ValueError as error:
        what = f"the coordinates of {atoms} atoms are {len(texts)} numbers, or contain invalid ones: {error}"
        raise _bad(what) from error


def _words(names: list[str]) -> NDArray[np.uint64]:
    codes = {name: name_word(name) for name in set(names)}
    return np.array([codes[name] for name in names], np.uint64)
