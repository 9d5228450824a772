"""Which atoms of a standard residue are bonded, as a table; looked up for all residues at once.

Shapes: A atoms, R residues, T templates, S places of a template, B bonds of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from pipeline.structures.atoms import word
from pipeline.structures.policy import SYNONYMS

if TYPE_CHECKING:
    from numpy.typing import NDArray

AMINO_ACID = "N-CA CA-C C-O C-OXT CA-CB "
RING = "CB-CG CG-CD1 CG-CD2 CD1-CE1 CD2-CE2 CE1-CZ CE2-CZ "
SIDE_CHAINS = {
    "GLY": "",
    "ALA": "",
    "SER": "CB-OG",
    "CYS": "CB-SG",
    "SEC": "CB-SE",
    "THR": "CB-OG1 CB-CG2",
    "VAL": "CB-CG1 CB-CG2",
    "PRO": "CB-CG CG-CD CD-N",
    "LEU": "CB-CG CG-CD1 CG-CD2",
    "ILE": "CB-CG1 CB-CG2 CG1-CD1",
    "ASP": "CB-CG CG-OD1 CG-OD2",
    "ASN": "CB-CG CG-OD1 CG-ND2",
    "GLU": "CB-CG CG-CD CD-OE1 CD-OE2",
    "GLN": "CB-CG CG-CD CD-OE1 CD-NE2",
    "MET": "CB-CG CG-SD SD-CE",
    "MSE": "CB-CG CG-SE SE-CE",
    "LYS": "CB-CG CG-CD CD-CE CE-NZ",
    "ARG": "CB-CG CG-CD CD-NE NE-CZ CZ-NH1 CZ-NH2",
    "HIS": "CB-CG CG-ND1 CG-CD2 ND1-CE1 CD2-NE2 CE1-NE2",
    "PHE": RING,
    "TYR": RING + "CZ-OH",
    "TRP": "CB-CG CG-CD1 CG-CD2 CD1-NE1 NE1-CE2 CD2-CE2 CD2-CE3 CE2-CZ2 CE3-CZ3 CZ2-CH2 CZ3-CH2",
}
NUCLEOTIDE = (
    "P-OP1 P-OP2 P-OP3 P-O5' O5'-C5' C5'-C4' C4'-O4' C4'-C3' C3'-O3' C3'-C2' C2'-O2' C2'-C1' C1'-O4' "  # DNA has no O2'
)
PURINE = "C1'-N9 N9-C8 C8-N7 N7-C5 C5-C6 C6-N1 N1-C2 C2-N3 N3-C4 C4-C5 C4-N9 "
PYRIMIDINE = "C1'-N1 N1-C2 C2-O2 C2-N3 N3-C4 C4-C5 C5-C6 C6-N1 "
BASES = {
    "A": PURINE + "C6-N6",
    "G": PURINE + "C6-O6 C2-N2",
    "I": PURINE + "C6-O6",
    "C": PYRIMIDINE + "C4-N4",
    "U": PYRIMIDINE + "C4-O4",
    "T": PYRIMIDINE + "C4-O4 C5-C7",
}
# Modified residues that hold the whole of another. Not every one does: pseudouridine's base hangs on C5, not on N1.
PARENTS = {
    "SEP": "SER", "TPO": "THR", "PTR": "TYR", "HYP": "PRO", "CSO": "CYS", "OCS": "CYS", "CSD": "CYS", "CME": "CYS",
    "MLY": "LYS", "M3L": "LYS", "MLZ": "LYS", "ALY": "LYS", "KCX": "LYS", "LLP": "LYS",
    "1MA": "A", "5MC": "C", "OMC": "C", "2MG": "G", "M2G": "G", "7MG": "G", "OMG": "G",
    "5MU": "U", "OMU": "U", "H2U": "U", "4SU": "U", "5CM": "C", "BRU": "U",
}  # fmt: skip
ABSENT = -1


@dataclass(frozen=True, slots=True)
class Templates:
    """Every template in arrays; the words of names are sorted."""

    residue_T: NDArray[np.uint64]
    atom_M: NDArray[np.uint64]
    place_TM: NDArray[np.int8]  # of each atom name, ABSENT where the template has none such
    bond_TB2: NDArray[np.int8]  # between places; ABSENT fills the rows
    places: int


def bonds_of(name: str) -> list[tuple[str, str]]:
    """Return the pairs of atom names that are bonded in a standard residue; none for a name without a template."""
    found = _texts().get(name, "")
    return [(left, right) for left, _, right in (pair.partition("-") for pair in found.split())]


def _texts() -> dict[str, str]:
    """Return the bonds of every residue name that has a template."""
    texts = {name: AMINO_ACID + side for name, side in SIDE_CHAINS.items()}
    texts |= {name: NUCLEOTIDE + base for name, base in BASES.items()}
    texts |= {f"D{name}": NUCLEOTIDE + base for name, base in BASES.items()}
    return texts | {name: texts[parent] for name, parent in {**SYNONYMS, **PARENTS}.items()}


@cache
def templates() -> Templates:
    """Return the table in arrays."""
    names = sorted(_texts(), key=word)
    pairs = [bonds_of(name) for name in names]
    atoms = [list(dict.fromkeys(atom for pair in some for atom in pair)) for some in pairs]
    atom_M = np.unique(np.array([word(atom) for some in atoms for atom in some], dtype=np.uint64))
    place_TM = np.full((len(names), len(atom_M)), ABSENT, np.int8)
    bond_TB2 = np.full((len(names), max(map(len, pairs)), 2), ABSENT, np.int8)
    for kind, (some, bonded) in enumerate(zip(atoms, pairs, strict=True)):
        place_TM[kind, np.searchsorted(atom_M, np.array([word(atom) for atom in some], np.uint64))] = range(len(some))
        bond_TB2[kind, : len(bonded)] = [[some.index(left), some.index(right)] for left, right in bonded]
    residue_T = np.array([word(name) for name in names], dtype=np.uint64)
    return Templates(residue_T, atom_M, place_TM, bond_TB2, max(map(len, atoms)))


def _look_up(sorted_M: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the place of each word in a sorted list, ABSENT where it is not there."""
    place = np.minimum(np.searchsorted(sorted_M, wanted), len(sorted_M) - 1)
    found: NDArray[np.int64] = np.where(sorted_M[place] == wanted, place, ABSENT)
    return found


def known(resname_R: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Say which residues have a template."""
    known_R: NDArray[np.bool_] = _look_up(templates().residue_T, resname_R) != ABSENT
    return known_R


def find_bonds(
    resname_R: NDArray[np.uint64], name_A: NDArray[np.uint64], residue_A: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the bonds between atoms whose templates say so, and which atoms the template of their residue knows."""
    table = templates()
    kind_R = _look_up(table.residue_T, resname_R)
    atom_RS = _atoms_by_place(kind_R, name_A, residue_A)
    rows, bonds = np.nonzero((table.bond_TB2[..., 0] != ABSENT)[kind_R] & (kind_R != ABSENT)[:, None])
    pairs_B2 = atom_RS[rows[:, None], table.bond_TB2[kind_R[rows], bonds]]
    known_A = np.zeros(len(name_A), np.bool_)
    known_A[atom_RS[atom_RS != ABSENT]] = True
    return pairs_B2[(pairs_B2 != ABSENT).all(axis=1)], known_A


def _atoms_by_place(
    kind_R: NDArray[np.int64], name_A: NDArray[np.uint64], residue_A: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the atom at each place of each residue's template; of a name that a residue has twice, the first."""
    table = templates()
    kind_A, column_A = kind_R[residue_A], _look_up(table.atom_M, name_A)
    place_A = np.where((kind_A != ABSENT) & (column_A != ABSENT), table.place_TM[kind_A, column_A], ABSENT)
    held = np.flatnonzero(place_A != ABSENT)[::-1]
    atom_RS = np.full((len(kind_R), table.places), ABSENT, np.int64)
    atom_RS[residue_A[held], place_A[held]] = held
    return atom_RS
