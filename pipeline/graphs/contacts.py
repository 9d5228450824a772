"""The native interface of two partners: which residues touch, by how many pairs of heavy atoms, and how near.

Shapes: A atoms, H of them heavy, and S residues of a structure, N nodes of a partner, E pairs of atoms, P pairs of a
receptor node and a ligand node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.graphs import bonds, neighbours
from pipeline.structures.atoms import name_word

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pipeline.structures.policy import Structure

    Floats = NDArray[np.float64]

SLACK = 1e-3  # Å; atoms that are left out before distances are compared are farther away than the cut-off by so much
LAST_OXYGENS = frozenset(map(name_word, ("OXT", "OT1", "OT2")))  # as CHARMM calls them, too
OX, OT = (int.from_bytes(begin, "little") for begin in (b"OX", b"OT"))


@dataclass(frozen=True, slots=True)
class HeavyAtoms:
    """The H heavy atoms of a structure, residue by residue, and what side chains are found from.

    Coordinates are rows, which numpy processes several times faster than columns of three.
    """

    pos_3A: Floats
    pos_3H: Floats
    residue_H: NDArray[np.int64]
    atoms_S: NDArray[np.int64]
    middle_3S: Floats
    oxygens_S: NDArray[np.int64]  # at the end of a chain, besides O
    oxygen_3S: Floats  # the sum of their coordinates


def heavy_atoms(structure: Structure) -> HeavyAtoms:
    """Return the heavy atoms of a structure's residues; the middle of a residue without any means nothing."""
    is_hydrogen_A = bonds.is_hydrogen(structure.element_A)
    pos_3A = np.ascontiguousarray(structure.pos_A3.T)
    pos_3H, residue_H, name_H, atoms_S = pos_3A, structure.residue_A, structure.name_A, structure.atoms_R
    if is_hydrogen_A.any():
        heavy = np.flatnonzero(~is_hydrogen_A)
        pos_3H, residue_H, name_H = pos_3H[:, heavy], residue_H[heavy], name_H[heavy]
        atoms_S = np.bincount(residue_H, minlength=len(atoms_S))
    first_S = np.cumsum(atoms_S) - atoms_S
    if first_S[-1] == len(residue_H):  # of the last residue no heavy atom is there: what is summed for it begins here
        pos_3H = np.concatenate([pos_3H, np.zeros((3, 1))], axis=1)
        residue_H, name_H = np.append(residue_H, len(atoms_S) - 1), np.append(name_H, np.uint64(0))
    begin_H = name_H.view(np.uint16)[::4]
    maybe = np.flatnonzero((begin_H == OX) | (begin_H == OT)).tolist()
    oxygens = [atom for atom in maybe if int(name_H[atom]) in LAST_OXYGENS]
    oxygens_S, oxygen_S3 = np.bincount(residue_H[oxygens], minlength=len(atoms_S)), np.zeros((len(atoms_S), 3))
    np.add.at(oxygen_S3, residue_H[oxygens], pos_3H[:, oxygens].T)
    middle_3S = np.add.reduceat(pos_3H, first_S, axis=1) / np.maximum(atoms_S, 1)
    return HeavyAtoms(pos_3A, pos_3H, residue_H, atoms_S, middle_3S, oxygens_S, oxygen_S3.T)


@dataclass(frozen=True, slots=True)
class Contacts:
    """Pairs of nodes with a pair of heavy atoms within a distance; sorted by receptor node, then by ligand node."""

    receptor_P: NDArray[np.int64]
    ligand_P: NDArray[np.int64]
    atoms_P: NDArray[np.int64]  # how many pairs of atoms are
    nearest_P: Floats


@dataclass(frozen=True, slots=True)
class Surface:
    """Heavy atoms of one partner that may touch the other, and the node of each."""

    pos_3H: Floats
    node_H: NDArray[np.int64]

    @classmethod
    def of(cls, atoms: HeavyAtoms, residue_N: NDArray[np.int64]) -> Surface:
        """Return the heavy atoms of some residues."""
        node_S = np.full(len(atoms.atoms_S), -1)
        node_S[residue_N] = np.arange(len(residue_N))
        node_H = node_S[atoms.residue_H]
        chosen = np.flatnonzero(node_H >= 0)
        return cls(atoms.pos_3H.take(chosen, axis=1), node_H[chosen])

    def towards(self, partner: Surface, reach: float) -> Surface:
        """Return the atoms that are so near the bounding box of the partner."""
        inside_3H = self.pos_3H >= partner.pos_3H.min(axis=1, keepdims=True) - reach
        inside_3H &= self.pos_3H <= partner.pos_3H.max(axis=1, keepdims=True) + reach
        chosen = np.flatnonzero(inside_3H.all(axis=0))
        return Surface(self.pos_3H.take(chosen, axis=1), self.node_H[chosen])


def find_contacts(receptor: Surface, ligand: Surface, cutoff: float) -> Contacts | None:
    """Return the contacts between heavy atoms, or None if there are none."""
    for _ in range(2):  # a smaller partner has a smaller box
        receptor = receptor.towards(ligand, cutoff + SLACK)
        if not len(receptor.node_H):
            return None
        ligand = ligand.towards(receptor, cutoff + SLACK)
        if not len(ligand.node_H):
            return None
    found_2E = neighbours.between(ligand.pos_3H.T, receptor.pos_3H.T, radius=cutoff)
    if not found_2E.size:
        return None
    apart_3E = ligand.pos_3H[:, found_2E[0]] - receptor.pos_3H[:, found_2E[1]]
    nearest_E = np.sqrt(np.einsum("xe,xe->e", apart_3E, apart_3E))
    return _by_residue(receptor.node_H[found_2E[1]], ligand.node_H[found_2E[0]], nearest_E)


def _by_residue(receptor_E: NDArray[np.int64], ligand_E: NDArray[np.int64], nearest_E: Floats) -> Contacts:
    """Group pairs of atoms by their pair of nodes."""
    order = np.lexsort((ligand_E, receptor_E))
    receptor_E, ligand_E = receptor_E[order], ligand_E[order]
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = (receptor_E[1:] != receptor_E[:-1]) | (ligand_E[1:] != ligand_E[:-1])
    first_P = np.flatnonzero(is_new)
    return Contacts(
        receptor_E[first_P],
        ligand_E[first_P],
        np.diff(first_P, append=len(order)),
        np.minimum.reduceat(nearest_E[order], first_P),
    )
