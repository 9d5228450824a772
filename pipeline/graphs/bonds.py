"""Who is bonded to whom: templates of standard residues, what the file says, and covalent radii for the rest.

Two atoms that their residue's template knows are bonded if it says so, and not otherwise. For every other pair within
a residue (of a ligand, of a modified residue, with a name that the template lacks) CONECT and covalent radii decide.
Between residues there are the peptide and phosphodiester bonds of neighbours in a chain that are near enough (a break
has none), disulfides, and what SSBOND, LINK, CONECT or struct_conn say; where a file says nothing at all, radii decide
for what has no template (a glycan, a cap). Nothing longer than LONGEST is a bond, whoever says so: a template does not
mend broken coordinates. To another residue, a metal or an ion has none unless the file calls it covalent: coordination
is not a bond.

A file that tells of all its bonds (an AMBER topology, SDF, MOL2) is taken at its word: those are the bonds.

Shapes: A atoms, R residues, B bonds, L links.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import gemmi
import numpy as np
from scipy.spatial import cKDTree

from pipeline.graphs import templates
from pipeline.structures.atoms import word

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pipeline.structures.atoms import Links

LONGEST = 3.0  # Å; iodine on lead is shorter
PEPTIDE, PHOSPHODIESTER, DISULFIDE, HYDROGEN = 2.0, 2.2, 2.5, 1.5  # Å within which those are
TOLERANCE = 0.4  # Å by which a bond may exceed the sum of covalent radii
CHAIN_BONDS = (("C", "N", PEPTIDE), ("O3'", "P", PHOSPHODIESTER), ("O3*", "P", PHOSPHODIESTER))
HYDROGENS = (1, 119)  # gemmi counts deuterium behind the elements
SULFUR = 16
CLOSEST_HEAVY = 8  # atoms among which that of a hydrogen is looked for
ABSENT = -1


@dataclass(frozen=True, slots=True)
class Atoms:
    """What bonds are found from."""

    pos_A3: NDArray[np.float64]
    name_A: NDArray[np.uint64]
    element_A: NDArray[np.uint8]
    residue_A: NDArray[np.int64]  # ascending
    resname_R: NDArray[np.uint64]
    strand_R: NDArray[np.int64]  # the polymer chain of each residue, ABSENT for molecules
    links: Links
    is_told: bool  # whether the file tells of any bond, of these atoms or others

    def apart(self, left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the distances of some pairs."""
        between = self.pos_A3[left] - self.pos_A3[right]
        distances: NDArray[np.float64] = np.sqrt(np.einsum("bx,bx->b", between, between))
        return distances

    def near(self, pairs_B2: NDArray[np.int64], most: float | NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the pairs that are within a distance."""
        return pairs_B2[self.apart(*pairs_B2.T) <= most]


def find(atoms: Atoms) -> NDArray[np.int64]:
    """Return every bond once, the lower atom first, sorted."""
    if atoms.links.is_complete:
        return _distinct(atoms.links.atoms_L2, len(atoms.name_A))
    from_templates, known_A = templates.find_bonds(atoms.resname_R, atoms.name_A, atoms.residue_A)
    heavy_A = ~is_hydrogen(atoms.element_A)
    found = [
        from_templates,
        *(_along_chains(atoms, *ends) for ends in CHAIN_BONDS),
        _disulfides(atoms),
        _of_file(atoms, known_A),
        _by_radii(atoms, ~known_A & heavy_A),
        _of_hydrogens(atoms, heavy_A),
    ]
    return _distinct(atoms.near(np.concatenate(found), LONGEST), len(atoms.name_A))


def _distinct(pairs_B2: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return pairs of so many atoms once, the lower first, sorted."""
    low_B, high_B = np.sort(pairs_B2, axis=1).T
    return np.stack(np.divmod(np.unique(low_B * size + high_B), size), axis=1)


def is_hydrogen(element_A: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Say which atoms are hydrogen or deuterium."""
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
    found = np.flatnonzero(atoms.name_A == word(name))
    atom_R[atoms.residue_A[found]] = found
    return atom_R


def _disulfides(atoms: Atoms) -> NDArray[np.int64]:
    """Return the bonds between the sulfurs of cysteines."""
    sulfurs = np.flatnonzero((atoms.name_A == word("SG")) & (atoms.element_A == SULFUR))
    return _between_residues(atoms, sulfurs[_pairs_within(atoms.pos_A3[sulfurs], DISULFIDE)])


def _between_residues(atoms: Atoms, pairs_B2: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the pairs whose atoms are of different residues."""
    return pairs_B2[~_is_within(atoms, pairs_B2)]


def _is_within(atoms: Atoms, pairs_B2: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Say which pairs are of one residue."""
    within_B: NDArray[np.bool_] = atoms.residue_A[pairs_B2[:, 0]] == atoms.residue_A[pairs_B2[:, 1]]
    return within_B


def _pairs_within(pos_A3: NDArray[np.float64], most: float) -> NDArray[np.int64]:
    """Return the pairs of points within a distance."""
    if len(pos_A3) < 2:
        return np.empty((0, 2), np.int64)
    pairs_B2: NDArray[np.int64] = cKDTree(pos_A3).query_pairs(most, output_type="ndarray")
    return pairs_B2


def _of_file(atoms: Atoms, known_A: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the bonds that the file names, but for those on which a template has the last word."""
    pairs_L2 = atoms.links.atoms_L2
    within_L = _is_within(atoms, pairs_L2)
    both_known_L = known_A[pairs_L2].all(axis=1)
    ionic_L = _is_ionic(atoms)[pairs_L2].any(axis=1)
    return pairs_L2[np.where(within_L, ~both_known_L, atoms.links.covalent_L | ~ionic_L)]


def _is_ionic(atoms: Atoms) -> NDArray[np.bool_]:
    """Say which atoms are metals or stand alone."""
    ionic_A: NDArray[np.bool_] = np.bincount(atoms.residue_A)[atoms.residue_A] == 1
    ionic_A |= _elements()[1][atoms.element_A]
    return ionic_A


@cache
def _elements() -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return covalent radius and whether it is a metal for every code of an element."""
    elements = [gemmi.Element(1 if code in HYDROGENS else code) for code in range(256)]
    return np.array([one.covalent_r for one in elements]), np.array([one.is_metal for one in elements])


def _by_radii(atoms: Atoms, unknown_A: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the bonds of atoms that no template knows: those within covalent radii."""
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
    """Say which pairs may be bonds between residues for their nearness: of what has no template, if no file tells."""
    if atoms.is_told:
        return np.zeros(len(pairs_B2), np.bool_)
    settled_A = templates.known(atoms.resname_R)[atoms.residue_A]
    ionic_A = _is_ionic(atoms)
    left, right = pairs_B2.T
    joins_B: NDArray[np.bool_] = ~((settled_A[left] & settled_A[right]) | ionic_A[left] | ionic_A[right])
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
