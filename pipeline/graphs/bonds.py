"""Covalent bonds, from templates of standard residues, the file and distances; and paths of bonds.

Shapes: A atoms, R residues, T templates, S places of a template, B bonds of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import gemmi
import numpy as np
from scipy.spatial import cKDTree

from pipeline.graphs.item_graph import edge_lengths
from pipeline.structures.atoms import name_word
from pipeline.structures.policy import CHARMM_BASES, SYNONYMS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from pipeline.graphs.item_graph import Edges
    from pipeline.structures.atoms import Links

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
    """The templates of all standard residues as arrays; names are sorted words."""

    residue_T: NDArray[np.uint64]
    atom_M: NDArray[np.uint64]
    place_TM: NDArray[np.int8]  # of each atom name, ABSENT where the template has none such
    bond_TB2: NDArray[np.int8]  # between places; ABSENT fills the rows
    places: int


@cache
def _texts() -> dict[str, str]:
    """Return the bonds of every template as text, by residue name."""
    texts = {name: AMINO_ACID + side for name, side in SIDE_CHAINS.items()}
    texts |= {prefix + name: NUCLEOTIDE + base for name, base in BASES.items() for prefix in ("", "D")}
    return texts | {name: texts[parent] for name, parent in {**SYNONYMS, **PARENTS, **CHARMM_BASES}.items()}


def bonds_of(name: str) -> list[tuple[str, str]]:
    """Return the bonded pairs of atom names in a standard residue; empty if it has no template."""
    return [(left, right) for left, _, right in (pair.partition("-") for pair in _texts().get(name, "").split())]


@cache
def templates() -> Templates:
    """Return the templates as arrays."""
    names = sorted(_texts(), key=name_word)
    pairs = [bonds_of(name) for name in names]
    atoms = [list(dict.fromkeys(atom for pair in bonded for atom in pair)) for bonded in pairs]
    words = [np.array([*map(name_word, atom_names)], np.uint64) for atom_names in atoms]
    atom_M = np.unique(np.concatenate(words))
    place_TM = np.full((len(names), len(atom_M)), ABSENT, np.int8)
    bond_TB2 = np.full((len(names), max(map(len, pairs)), 2), ABSENT, np.int8)
    for kind, (atom_names, bonded) in enumerate(zip(atoms, pairs, strict=True)):
        place_TM[kind, np.searchsorted(atom_M, words[kind])] = range(len(atom_names))
        bond_TB2[kind, : len(bonded)] = [[atom_names.index(left), atom_names.index(right)] for left, right in bonded]
    residue_T = np.array([*map(name_word, names)], np.uint64)
    return Templates(residue_T, atom_M, place_TM, bond_TB2, max(map(len, atoms)))


def _look_up(sorted_M: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the place of each word in a sorted list, ABSENT where it is missing."""
    place = np.minimum(np.searchsorted(sorted_M, wanted), len(sorted_M) - 1)
    return np.where(sorted_M[place] == wanted, place, ABSENT)


def _by_templates(atoms: Atoms) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the bonds that templates give, and a mask of the atoms that are in their residue's template.

    Of a name that occurs twice in a residue, the first atom counts.
    """
    table = templates()
    kind_R, column_A = _look_up(table.residue_T, atoms.resname_R), _look_up(table.atom_M, atoms.name_A)
    kind_A = kind_R[atoms.residue_A]
    place_A = np.where((kind_A != ABSENT) & (column_A != ABSENT), table.place_TM[kind_A, column_A], ABSENT)
    known = np.flatnonzero(place_A != ABSENT)[::-1]
    atom_RS = np.full((len(kind_R), table.places), ABSENT, np.int64)
    atom_RS[atoms.residue_A[known], place_A[known]] = known
    rows, bonds = np.nonzero((table.bond_TB2[..., 0] != ABSENT)[kind_R] & (kind_R != ABSENT)[:, None])
    pairs_B2 = atom_RS[rows[:, None], table.bond_TB2[kind_R[rows], bonds]]
    known_A = np.zeros(len(atoms.name_A), np.bool_)
    known_A[atom_RS[atom_RS != ABSENT]] = True
    return pairs_B2[(pairs_B2 != ABSENT).all(axis=1)], known_A


LONGEST = 3.0  # Å; iodine on lead is shorter
PEPTIDE, PHOSPHODIESTER, DISULFIDE, HYDROGEN = 2.0, 2.2, 2.5, 1.5  # Å within which those are
TOLERANCE = 0.4  # Å by which a bond may exceed the sum of covalent radii
CHAIN_BONDS = (("C", "N", PEPTIDE), ("O3'", "P", PHOSPHODIESTER), ("O3*", "P", PHOSPHODIESTER))
HYDROGENS = (1, 119)  # gemmi counts deuterium behind the elements
SULFUR = 16
CLOSEST_HEAVY = 8  # atoms among which that of a hydrogen is looked for


@dataclass(frozen=True, slots=True)
class Atoms:
    """The atoms of a side as needed to find bonds."""

    pos_A3: NDArray[np.float64]
    name_A: NDArray[np.uint64]
    element_A: NDArray[np.uint8]
    residue_A: NDArray[np.int64]  # ascending
    resname_R: NDArray[np.uint64]
    strand_R: NDArray[np.int64]  # the polymer chain of each residue, ABSENT for molecules
    links: Links
    file_has_bonds: bool  # of these atoms or others

    def near(self, pairs_B2: NDArray[np.int64], most: float | NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the pairs that are within a distance."""
        return pairs_B2[edge_lengths(self.pos_A3, self.pos_A3, pairs_B2.T) <= most]


def all_bonds(atoms: Atoms) -> NDArray[np.int64]:
    """Return every bond once, the lower atom first, sorted."""
    if atoms.links.is_complete:
        return _distinct(atoms.links.atoms_L2, len(atoms.name_A))
    from_templates, known_A = _by_templates(atoms)
    heavy_A = ~is_hydrogen(atoms.element_A)
    pairs = [
        from_templates,
        *(_along_chains(atoms, *ends) for ends in CHAIN_BONDS),
        _disulfides(atoms),
        _of_file(atoms, known_A),
        _by_radii(atoms, ~known_A & heavy_A),
        _of_hydrogens(atoms, heavy_A),
    ]
    return _distinct(atoms.near(np.concatenate(pairs), LONGEST), len(atoms.name_A))


def _distinct(pairs_B2: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return each pair once, the lower atom first, sorted."""
    low_B, high_B = np.sort(pairs_B2, axis=1).T
    return np.stack(np.divmod(np.unique(low_B * size + high_B), size), axis=1)


def is_hydrogen(element_A: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return a mask of the atoms that are hydrogen or deuterium."""
    hydrogen, deuterium = HYDROGENS  # two comparisons, which take a tenth of np.isin's time
    is_one_A: NDArray[np.bool_] = (element_A == hydrogen) | (element_A == deuterium)
    return is_one_A


def _along_chains(atoms: Atoms, left: str, right: str, most: float) -> NDArray[np.int64]:
    """Return the bonds between an atom of each residue and one of the next in its chain."""
    left_R, right_R = _named(atoms, left), _named(atoms, right)
    follows = (atoms.strand_R[1:] == atoms.strand_R[:-1]) & (atoms.strand_R[1:] != ABSENT)
    there = np.flatnonzero(follows & (left_R[:-1] != ABSENT) & (right_R[1:] != ABSENT))
    return atoms.near(np.stack([left_R[there], right_R[there + 1]], axis=1), most)


def _named(atoms: Atoms, name: str) -> NDArray[np.int64]:
    """Return the atom of that name in each residue, ABSENT where there is none."""
    atom_R = np.full(len(atoms.resname_R), ABSENT)
    matches = np.flatnonzero(atoms.name_A == name_word(name))
    atom_R[atoms.residue_A[matches]] = matches
    return atom_R


def _disulfides(atoms: Atoms) -> NDArray[np.int64]:
    """Return the bonds between the sulfurs of cysteines."""
    sulfurs = np.flatnonzero((atoms.name_A == name_word("SG")) & (atoms.element_A == SULFUR))
    pairs_B2: NDArray[np.int64] = sulfurs[cKDTree(atoms.pos_A3[sulfurs]).query_pairs(DISULFIDE, output_type="ndarray")]
    return pairs_B2[~_is_within(atoms, pairs_B2)]


def _is_within(atoms: Atoms, pairs_B2: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask of the pairs within a residue."""
    within_B: NDArray[np.bool_] = atoms.residue_A[pairs_B2[:, 0]] == atoms.residue_A[pairs_B2[:, 1]]
    return within_B


def _of_file(atoms: Atoms, known_A: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the bonds in the file, except those that templates decide."""
    pairs_L2 = atoms.links.atoms_L2
    within_L = _is_within(atoms, pairs_L2)
    both_known_L = known_A[pairs_L2].all(axis=1)
    ionic_L = _is_ionic(atoms)[pairs_L2].any(axis=1)
    return pairs_L2[np.where(within_L, ~both_known_L, atoms.links.covalent_L | ~ionic_L)]


def _is_ionic(atoms: Atoms) -> NDArray[np.bool_]:
    """Return a mask of the atoms that are metals or alone in their residue."""
    ionic_A: NDArray[np.bool_] = np.bincount(atoms.residue_A)[atoms.residue_A] == 1
    ionic_A |= _elements()[1][atoms.element_A]
    return ionic_A


@cache
def _elements() -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the covalent radius and a metal flag for every element code."""
    elements = [gemmi.Element(1 if code in HYDROGENS else code) for code in range(256)]
    return np.array([element.covalent_r for element in elements]), np.array([element.is_metal for element in elements])


def _by_radii(atoms: Atoms, unknown_A: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the bonds of atoms without a template: those within covalent radii."""
    unknown = np.flatnonzero(unknown_A)
    heavy = np.flatnonzero(~is_hydrogen(atoms.element_A))
    if not len(unknown):
        return np.empty((0, 2), np.int64)
    tree = cKDTree(atoms.pos_A3[unknown])
    around = tree.sparse_distance_matrix(cKDTree(atoms.pos_A3[heavy]), LONGEST, output_type="ndarray")
    pairs_B2 = np.stack([unknown[around["i"]], heavy[around["j"]]], axis=1)
    pairs_B2 = pairs_B2[(pairs_B2[:, 0] != pairs_B2[:, 1])]
    pairs_B2 = atoms.near(pairs_B2, _elements()[0][atoms.element_A[pairs_B2]].sum(axis=1) + TOLERANCE)
    return pairs_B2[_is_within(atoms, pairs_B2) | _may_join(atoms, pairs_B2)]


def _may_join(atoms: Atoms, pairs_B2: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask of near pairs that may bond residues: one has no template, none is ionic, the file has no bonds."""
    if atoms.file_has_bonds:
        return np.zeros(len(pairs_B2), np.bool_)
    known_A = (_look_up(templates().residue_T, atoms.resname_R) != ABSENT)[atoms.residue_A]
    ionic_A = _is_ionic(atoms)
    left, right = pairs_B2.T
    joins_B: NDArray[np.bool_] = ~((known_A[left] & known_A[right]) | ionic_A[left] | ionic_A[right])
    return joins_B


def _of_hydrogens(atoms: Atoms, heavy_A: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the bond of each hydrogen: to the nearest heavy atom of its residue."""
    hydrogens, heavy = np.flatnonzero(~heavy_A), np.flatnonzero(heavy_A)
    if not len(hydrogens) or not len(heavy):
        return np.empty((0, 2), np.int64)
    nearest_HK = cKDTree(atoms.pos_A3[heavy]).query(
        atoms.pos_A3[hydrogens], k=np.arange(1, CLOSEST_HEAVY + 1), distance_upper_bound=HYDROGEN
    )[1]
    candidate_HK = np.append(heavy, ABSENT)[nearest_HK]
    own_HK = (candidate_HK != ABSENT) & (atoms.residue_A[candidate_HK] == atoms.residue_A[hydrogens][:, None])
    bonded = np.flatnonzero(own_HK.any(axis=1))
    return np.stack([hydrogens[bonded], candidate_HK[bonded, own_HK[bonded].argmax(axis=1)]], axis=1)


HOPS = ("bond", "angle", "dihedral")  # what a pair of nodes one, two, three bonds apart is called


def bond_paths(bonds_B2: NDArray[np.int64], nodes: int, hops: int) -> Iterator[NDArray[np.int64]]:
    """Yield the paths of one bond, of two and so on, each once: from its lower end, sorted."""
    ends_E2 = np.concatenate([bonds_B2, bonds_B2[:, ::-1]])
    ends_E2 = ends_E2[np.lexsort((ends_E2[:, 1], ends_E2[:, 0]))]
    degree_N = np.bincount(ends_E2[:, 0], minlength=nodes)
    first_N = np.cumsum(degree_N) - degree_N
    paths_PX = ends_E2
    for hop in range(hops):
        if hop:  # one bond longer
            last_P = paths_PX[:, -1]
            counts_P = degree_N[last_P]
            before_P = np.cumsum(counts_P) - counts_P
            bond = np.repeat(first_N[last_P] - before_P, counts_P) + np.arange(int(counts_P.sum()))
            next_P = ends_E2[bond, 1]
            longer_PX = np.column_stack([np.repeat(paths_PX, counts_P, axis=0), next_P])
            paths_PX = longer_PX[(longer_PX[:, :-1] != next_P[:, None]).all(axis=1)]  # drop paths that cross themselves
        yield paths_PX[paths_PX[:, 0] < paths_PX[:, -1]]


def pair_keys(paths_PX: NDArray[np.int64], nodes: int) -> NDArray[np.int64]:
    """Return distinct sorted numbers for the pairs of nodes that paths join; they sort as the pairs do."""
    return np.unique(paths_PX[:, 0] * nodes + paths_PX[:, -1])


def without(keys: NDArray[np.int64], excluded: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return sorted numbers without those in another sorted array."""
    if not len(excluded):
        return keys
    place = np.minimum(np.searchsorted(excluded, keys), len(excluded) - 1)
    kept: NDArray[np.int64] = keys[excluded[place] != keys]
    return kept


def both_ways(keys: NDArray[np.int64], nodes: int) -> Edges:
    """Return pairs as edges in both directions, sorted by node, then by neighbour."""
    left, right = np.divmod(keys, max(nodes, 1))
    ends = np.sort(np.concatenate([keys, right * nodes + left]))
    return np.stack(np.divmod(ends, max(nodes, 1))[::-1])
