"""The native interface of two partners: which residues touch, by how many pairs of heavy atoms, and how near.

Shapes: A atoms, H of them heavy, and S residues of a structure, N nodes of a partner, E pairs of atoms, P pairs of a
receptor node and a ligand node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.graphs import bonds, neighbours
from pipeline.structures.atoms import changes, name_word

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pipeline.graphs.partner_nodes import Pairs
    from pipeline.structures.policy import Structure

    Floats = NDArray[np.float64]

SLACK = 1e-3  # Å; residues are skipped only if their balls are this much farther apart than the cut-off
SIGNS = np.array([1.0, 1.0, 1.0, -1.0])  # of a ball's middle and its radius
MANY = 1 << 18  # pairs of residues; with more, residues far from the other side are left out first


LAST_OXYGENS = frozenset(map(name_word, ("OXT", "OT1", "OT2")))  # as CHARMM calls them, too
OX, OT = (int.from_bytes(begin, "little") for begin in (b"OX", b"OT"))


@dataclass(frozen=True, slots=True)
class Bodies:
    """The H heavy atoms of a structure's residues, with a bounding ball for each residue.

    Coordinates are rows, which numpy processes several times faster than columns of three.
    """

    pos_3A: Floats
    pos_3H: Floats
    first_S: NDArray[np.int64]
    atoms_S: NDArray[np.int64]
    middle_3S: Floats
    reach_S: Floats
    oxygens_S: NDArray[np.int64]  # at the end of a chain, besides O
    oxygen_3S: Floats  # the sum of their coordinates


def rigid_bodies(structure: Structure) -> Bodies:
    """Return the bodies of a structure's residues; those without a heavy atom have meaningless values."""
    is_hydrogen_A = bonds.is_hydrogen(structure.element_A)
    pos_3A = np.ascontiguousarray(structure.pos_A3.T)
    pos_3H, residue_H, name_H, atoms_S = pos_3A, structure.residue_A, structure.name_A, structure.atoms_R
    if is_hydrogen_A.any():
        heavy = np.flatnonzero(~is_hydrogen_A)
        pos_3H, residue_H, name_H = pos_3H[:, heavy], residue_H[heavy], name_H[heavy]
        atoms_S = np.bincount(residue_H, minlength=len(atoms_S))
    first_S = np.cumsum(atoms_S) - atoms_S
    if first_S[-1] == len(residue_H):  # the sum for a last residue without heavy atoms starts here
        pos_3H = np.concatenate([pos_3H, np.zeros((3, 1))], axis=1)
        residue_H, name_H = np.append(residue_H, len(atoms_S) - 1), np.append(name_H, np.uint64(0))
    middle_3S = np.add.reduceat(pos_3H, first_S, axis=1) / np.maximum(atoms_S, 1)
    apart_3H = pos_3H - middle_3S.take(residue_H, axis=1)
    apart_3H *= apart_3H
    reach_S = np.sqrt(np.maximum.reduceat(apart_3H.sum(axis=0), first_S))
    begin_H = name_H.view(np.uint16)[::4]
    maybe = np.flatnonzero((begin_H == OX) | (begin_H == OT)).tolist()
    oxygens = [atom for atom in maybe if int(name_H[atom]) in LAST_OXYGENS]
    oxygens_S, oxygen_S3 = np.bincount(residue_H[oxygens], minlength=len(atoms_S)), np.zeros((len(atoms_S), 3))
    np.add.at(oxygen_S3, residue_H[oxygens], pos_3H[:, oxygens].T)
    return Bodies(pos_3A, pos_3H, first_S, atoms_S, middle_3S, reach_S, oxygens_S, oxygen_S3.T)


@dataclass(frozen=True, slots=True)
class InterfaceSide:
    """The residues of one partner."""

    bodies: Bodies
    residue_N: NDArray[np.int64]
    middle_3N: Floats
    reach_N: Floats

    @classmethod
    def of(cls, bodies: Bodies, residue_N: NDArray[np.int64]) -> InterfaceSide:
        """Return some residues of a structure as one partner."""
        return cls(bodies, residue_N, bodies.middle_3S[:, residue_N], bodies.reach_S[residue_N])

    def take(self, nodes: NDArray[np.int64]) -> InterfaceSide:
        return InterfaceSide(self.bodies, self.residue_N[nodes], self.middle_3N[:, nodes], self.reach_N[nodes])

    def towards(self, partner: InterfaceSide, cutoff: float) -> NDArray[np.int64]:
        """Return the residues that can be near the bounding box of the partner."""
        reach_N = partner.reach_N + (cutoff + SLACK)
        low_3, high_3 = (partner.middle_3N - reach_N).min(axis=1), (partner.middle_3N + reach_N).max(axis=1)
        inside_3N = self.middle_3N + self.reach_N >= low_3[:, None]
        inside_3N &= self.middle_3N - self.reach_N <= high_3[:, None]
        return np.flatnonzero(inside_3N.all(axis=0))

    def reaches(self, partner: InterfaceSide, cutoff: float) -> NDArray[np.bool_]:
        """Return a mask of the pairs of residues whose balls are within the cut-off, or hardly farther.

        |m - n|² ≤ (r + s)² is a product of matrices: (|m|² - r²) + (|n|² - s²) - 2mn - 2rs ≤ 0.
        """
        origin_31 = self.middle_3N[:, len(self.reach_N) // 2, None]
        from_6N, to_6M = (np.ones((6, len(side.reach_N)), np.float32) for side in (self, partner))
        most = 0.0
        for ball_6N, side, more, at in ((from_6N, self, 0.0, 4), (to_6M, partner, cutoff, 5)):
            ball_4N = np.empty((4, len(side.reach_N)))
            np.subtract(side.middle_3N, origin_31, out=ball_4N[:3])
            np.add(side.reach_N, more, out=ball_4N[3])
            squared_4N = ball_4N * ball_4N
            ball_6N[:4], ball_6N[at] = ball_4N, SIGNS @ squared_4N
            most += squared_4N.max()
        to_6M[:4] *= -2
        slack = 4 * neighbours.ROUGHNESS * most
        return neighbours.matrix_product(from_6N.T, to_6M) <= slack

    def atoms(self, nodes: NDArray[np.int64]) -> tuple[Floats, NDArray[np.int64]]:
        """Return the heavy atoms of some nodes, and the node of each."""
        residues = self.residue_N[nodes]
        count_N = self.bodies.atoms_S[residues]
        shift_N = self.bodies.first_S[residues] - count_N.cumsum() + count_N
        row_A = shift_N.repeat(count_N)
        row_A += np.arange(len(row_A))
        return self.bodies.pos_3H.take(row_A, axis=1).T, nodes.repeat(count_N)


def find_contacts(receptor: InterfaceSide, ligand: InterfaceSide, cutoff: float) -> Pairs | None:
    """Return the pairs of nodes with heavy atoms within a distance, or None if there are none.

    They are sorted by receptor node, then by ligand node; each has its number of pairs of atoms and its distance.
    """
    rows, columns = _facing(receptor, ligand, cutoff)
    if not len(rows):
        return None
    pos_A3, node_A = receptor.atoms(rows)
    other_A3, other_A = ligand.atoms(columns)
    found_2E = neighbours.between(other_A3, pos_A3, radius=cutoff)
    if not found_2E.size:
        return None
    apart_E3 = other_A3[found_2E[0]] - pos_A3[found_2E[1]]
    nearest_E = np.sqrt(np.einsum("ex,ex->e", apart_E3, apart_E3))
    return _by_residue(node_A[found_2E[1]], other_A[found_2E[0]], nearest_E)


def _facing(
    receptor: InterfaceSide, ligand: InterfaceSide, cutoff: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the residues of either side whose balls are within the cut-off of one of the other's."""
    rows, columns = np.arange(len(receptor.residue_N)), np.arange(len(ligand.residue_N))
    if len(rows) * len(columns) > MANY:
        rows, columns = receptor.towards(ligand, cutoff), ligand.towards(receptor, cutoff)
        if not len(rows) or not len(columns):
            return rows[:0], columns[:0]
        receptor, ligand = receptor.take(rows), ligand.take(columns)
    near_NN = receptor.reaches(ligand, cutoff)
    return rows[near_NN.any(axis=1)], columns[near_NN.any(axis=0)]


def closest_approach(receptor: InterfaceSide, ligand: InterfaceSide) -> float:
    """Return the smallest distance between heavy atoms of two partners."""
    atoms = (side.atoms(np.arange(len(side.residue_N)))[0] for side in (receptor, ligand))
    return neighbours.closest(*atoms)


def _by_residue(receptor_E: NDArray[np.int64], ligand_E: NDArray[np.int64], nearest_E: Floats) -> Pairs:
    """Group pairs of atoms by their pair of nodes."""
    ligands = int(ligand_E.max()) + 1
    pair_E = receptor_E * ligands + ligand_E
    order = pair_E.argsort()
    pair_E = pair_E[order]
    first_P = np.flatnonzero(changes(pair_E))
    receptor_P, ligand_P = np.divmod(pair_E[first_P], ligands)
    atoms_P = np.append(first_P[1:], len(order)) - first_P
    return np.stack([ligand_P, receptor_P]), {
        "contact_atoms": atoms_P.astype(np.min_scalar_type(max(int(atoms_P.max()), 256))),
        "contact_nearest": np.minimum.reduceat(nearest_E[order], first_P).astype(np.float32),
    }
