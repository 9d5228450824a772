"""A pocket from AMBER's files: the atoms of its RNA, and the terms of their force field, scaled as RNA-3E-FFI has them.

Only RNA counts: ligands, ions, waters and proteins of a topology are left out, with every term that they take part in,
so that what a ligand is cannot be read off its pocket. Bonds, angles and dihedrals are those without hydrogen, as the
topology lists them; every term of a dihedral is one of its own, impropers too. Pairs near each other are all others
within 4 Å that no bond joins, with hydrogen as well.

Shapes: A atoms of a topology, R its residues, N atoms of RNA, E entries of one kind, P atoms of an entry, K parameters
of a kind.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.spatial import cKDTree

from pipeline.readers.entry import UnusableEntry
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.parsing.amber import (
    NUCLEOTIDES,
    first_atoms,
    read_lengths,
    read_lists,
    read_numbers,
    read_positions,
    read_words,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

CHARGE_UNIT = 18.2223  # of the charges in a topology, to one elementary charge
NEAR = 4.0  # Å
ONE_PLACE = 0.1  # Å: atoms no farther apart have the same position
DEGREES = 180 / math.pi
LENGTH, STIFFNESS, ANGLE, BEND, BARRIER, FOLD, PHASE = 2.0, 500.0, 180.0, 200.0, 20.0, 6.0, 6.28318
MODIFIED = ("PSU", "I", "M2G", "M7G", "OMC", "OMG", "5MU", "5MC", "1MA", "2MG", "6MA", "URA", "GUA", "ADE", "CYT")
RNA = frozenset({*(name for name, base in NUCLEOTIDES.items() if not base.startswith("D")), *"ACGU", *MODIFIED})
ELEMENTS = 118
ATOMS, TYPES, RESIDUES = 0, 1, 11  # of POINTERS
# Numbers of POINTERS that lists are as long as, and times what.
LENGTHS = {
    "CHARGE": (ATOMS, 1),
    "ATOMIC_NUMBER": (ATOMS, 1),
    "MASS": (ATOMS, 1),
    "ATOM_TYPE_INDEX": (ATOMS, 1),
    "RESIDUE_POINTER": (RESIDUES, 1),
    "BOND_FORCE_CONSTANT": (15, 1),
    "BOND_EQUIL_VALUE": (15, 1),
    "ANGLE_FORCE_CONSTANT": (16, 1),
    "ANGLE_EQUIL_VALUE": (16, 1),
    "DIHEDRAL_FORCE_CONSTANT": (17, 1),
    "DIHEDRAL_PERIODICITY": (17, 1),
    "DIHEDRAL_PHASE": (17, 1),
    "BONDS_WITHOUT_HYDROGEN": (12, 3),
    "BONDS_INC_HYDROGEN": (2, 3),
    "ANGLES_WITHOUT_HYDROGEN": (13, 4),
    "DIHEDRALS_WITHOUT_HYDROGEN": (14, 5),
}
TERMS = {  # lists of entries, and the atoms and numbers of each
    "bonds": ("BONDS_WITHOUT_HYDROGEN", 2),
    "angles": ("ANGLES_WITHOUT_HYDROGEN", 3),
    "dihedrals": ("DIHEDRALS_WITHOUT_HYDROGEN", 4),
    "hydrogens": ("BONDS_INC_HYDROGEN", 2),  # which are no entries, but no near pairs either
}
KINDS = ("bonds", "angles", "dihedrals")


class PocketArrays(NamedTuple):
    """What the network reads of a pocket: entries by kind, each with its atoms [E, P] and parameters [E, K].

    Near pairs, like bonds, are told once, the lower atom first, and run both ways in the network.
    """

    feature_N3: NDArray[np.float32]  # charge, atomic number, mass
    pos_N3: NDArray[np.float32]
    entries: Mapping[str, tuple[NDArray[np.int32], NDArray[np.float32]]]

    def named(self) -> dict[str, NDArray[Any]]:
        """Return the arrays as a reader gives them."""
        kinds = {
            f"{kind}.{name}": array
            for kind, both in self.entries.items()
            for name, array in zip(("atom", "constant"), both, strict=True)
        }
        return {"atoms.feature": self.feature_N3, "atoms.pos": self.pos_N3, **kinds}


def read_pocket(topology: bytes, coordinates: bytes, more_residues: Collection[str] = ()) -> PocketArrays:
    """Return the RNA of a topology at its coordinates; `more_residues` are names that are RNA, too."""
    try:
        sections = _sections(topology)
        kept_A = _is_rna(sections, more_residues)
        feature_A3 = _features(sections, kept_A)
        pos_A3 = read_positions(coordinates, len(kept_A))
    except UnusableInput as error:
        raise UnusableEntry(error.detail) from error
    pos_N3 = pos_A3[kept_A].astype(np.float32)
    if not np.isfinite(pos_N3).all():
        atom = int(np.flatnonzero(kept_A)[int(np.argmin(np.isfinite(pos_N3).all(1)))])
        raise UnusableEntry(f"the coordinates of atom {atom + 1} are not finite")
    number_A = np.where(kept_A, np.cumsum(kept_A) - 1, -1)
    entries = {kind: _term(sections, kind, number_A) for kind in KINDS}
    bonded_B2 = np.concatenate([entries["bonds"][0], _term(sections, "hydrogens", number_A)[0]])
    type_N = sections["ATOM_TYPE_INDEX"].astype(np.int64)[kept_A]
    near_E2, distance_E = near_pairs(pos_N3, bonded_B2)
    constants = np.column_stack([_coefficients(sections, type_N[near_E2]), distance_E]).astype(np.float32)
    return PocketArrays(feature_A3[kept_A].astype(np.float32), pos_N3, {**entries, "near": (near_E2, constants)})


# ---- the topology ----


def _sections(data: bytes) -> dict[str, Any]:
    """Return the lists of a topology that are needed: numbers, and the labels of residues."""
    lists = read_lists(data)
    pointers, lengths = read_lengths(lists, LENGTHS)
    lengths["NONBONDED_PARM_INDEX"] = int(pointers[TYPES]) ** 2
    lengths["LENNARD_JONES_ACOEF"] = lengths["LENNARD_JONES_BCOEF"] = int(pointers[TYPES] * (pointers[TYPES] + 1) // 2)
    sections: dict[str, Any] = {name: read_numbers(lists, name, length) for name, length in lengths.items()}
    sections["RESIDUE_LABEL"] = read_words(lists, "RESIDUE_LABEL", int(pointers[RESIDUES]))
    if not pointers[ATOMS] or not pointers[RESIDUES]:
        raise UnusableEntry("the topology has no atoms")
    return sections


def _is_rna(sections: Mapping[str, Any], more_residues: Collection[str]) -> NDArray[np.bool_]:
    """Return a mask of the atoms of RNA."""
    atoms = len(sections["CHARGE"])
    first_R = first_atoms(sections["RESIDUE_POINTER"], atoms)
    known, labels = RNA | set(more_residues), sections["RESIDUE_LABEL"]
    is_rna_R = np.array([label in known for label in labels])
    if len(labels) != len(first_R) or not is_rna_R.any():
        names = ", ".join(dict.fromkeys(labels)) or "none"
        raise UnusableEntry(f"no residue is RNA: {names[:80]}; list further names in data.options.residues")
    kept_A: NDArray[np.bool_] = np.repeat(is_rna_R, np.diff(first_R, append=atoms))
    return kept_A


def _features(sections: Mapping[str, Any], kept_A: NDArray[np.bool_]) -> Floats:
    """Return charge, atomic number and mass of each atom."""
    number_A, mass_A = sections["ATOMIC_NUMBER"], sections["MASS"]
    wrong_A = kept_A & ~((number_A >= 1) & (number_A <= ELEMENTS) & (mass_A > 0))
    if wrong_A.any():
        atom = int(np.argmax(wrong_A))
        raise UnusableEntry(f"atom {atom + 1} has the atomic number {number_A[atom]:g} and the mass {mass_A[atom]:g}")
    return np.stack([sections["CHARGE"] / CHARGE_UNIT, number_A, mass_A], axis=1)


# ---- terms ----


def _term(sections: Mapping[str, Any], kind: str, number_A: Integers) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the entries of a kind between atoms of RNA, and their scaled parameters."""
    name, width = TERMS[kind]
    rows = sections[name].astype(np.int64).reshape(-1, width + 1)
    atom_EP, parameter_E = np.abs(rows[:, :-1]) // 3, rows[:, -1] - 1  # below 0: an improper, or no 1-4 pair
    _check_places(name, atom_EP, len(number_A), "atom")
    values = _scaled(sections, kind)
    _check_places(name, parameter_E[:, None], len(values), "parameter")
    own_EP = number_A[atom_EP]
    is_kept_E = (own_EP >= 0).all(1)
    return own_EP[is_kept_E].astype(np.int32), values[parameter_E[is_kept_E]].astype(np.float32)


def _check_places(name: str, place_EX: Integers, most: int, what: str) -> None:
    wrong_E = ((place_EX < 0) | (place_EX >= most)).any(1)
    if wrong_E.any():
        entry = int(np.argmax(wrong_E))
        raise UnusableEntry(f"%FLAG {name}: entry {entry + 1} names {what} {int(place_EX[entry].max()) + 1} of {most}")


def _scaled(sections: Mapping[str, Any], kind: str) -> Floats:
    """Return the parameters of all terms of a kind [·, K], scaled."""
    if TERMS[kind][1] == 2:
        columns = [sections["BOND_EQUIL_VALUE"] / LENGTH, sections["BOND_FORCE_CONSTANT"] / STIFFNESS]
    elif kind == "angles":
        columns = [sections["ANGLE_EQUIL_VALUE"] * DEGREES / ANGLE, sections["ANGLE_FORCE_CONSTANT"] / BEND]
    else:
        columns = [
            sections["DIHEDRAL_FORCE_CONSTANT"] / BARRIER,
            sections["DIHEDRAL_PERIODICITY"] / FOLD,
            sections["DIHEDRAL_PHASE"] * DEGREES / PHASE,  # degrees, which published weights want so
        ]
    return np.stack(columns, axis=1)


def _coefficients(sections: Mapping[str, Any], type_E2: Integers) -> Floats:
    """Return the logarithms of the Lennard-Jones coefficients of pairs of atom types [E, 2], both above by 1."""
    types = math.isqrt(len(sections["NONBONDED_PARM_INDEX"]))
    _check_places("ATOM_TYPE_INDEX", type_E2 - 1, types, "type")
    place_E = sections["NONBONDED_PARM_INDEX"].astype(np.int64)[(type_E2[:, 0] - 1) * types + type_E2[:, 1] - 1]
    _check_places("NONBONDED_PARM_INDEX", np.abs(place_E)[:, None] - 1, len(sections["LENNARD_JONES_ACOEF"]), "pair")
    both = np.stack([sections["LENNARD_JONES_ACOEF"], sections["LENNARD_JONES_BCOEF"]], axis=1)
    if (both < 0).any():
        raise UnusableEntry("a Lennard-Jones coefficient is below 0")
    coefficients: Floats = np.log1p(both[np.abs(place_E) - 1]) * (place_E > 0)[:, None]  # below 0: a 10-12 pair
    return coefficients


def near_pairs(
    pos_N3: NDArray[np.float32], bonded_B2: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Return pairs of atoms near each other that no bond joins, the lower atom first, and their distances."""
    pos = pos_N3.astype(np.float64)
    pairs_E2 = cKDTree(pos).query_pairs(NEAR, output_type="ndarray")
    keys, bonded = (np.sort(some, axis=1) @ np.array([len(pos), 1]) for some in (pairs_E2, bonded_B2))
    near_E2 = np.stack(np.divmod(np.setdiff1d(keys, bonded), len(pos)), axis=1)
    distance_E: Floats = np.linalg.norm(pos[near_E2[:, 0]] - pos[near_E2[:, 1]], axis=1)
    if (distance_E < ONE_PLACE).any():
        left, right = near_E2[int(np.argmin(distance_E))] + 1
        raise UnusableEntry(f"the atoms {left} and {right} of the RNA have the same position")
    return near_E2.astype(np.int32), distance_E
