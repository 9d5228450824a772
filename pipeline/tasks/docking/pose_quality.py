"""How good poses are, by the measures of CAPRI and DockQ, and in how many complexes poses are good.

They are those of the package DockQ 2 run on two merged chains, as is done for antibodies: all chains of a partner are one.
As there, modified residues are left out, residues are those that docked and true structure share (by sequence), and
LRMSD superposes the larger partner, whichever is docked.

Shapes: P poses, A heavy atoms, R residues, B backbone atoms, N points, K pairs of atoms, C contacts of the truth.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from scipy.spatial import cKDTree

from pipeline.records import Kind, Reason, Role
from pipeline.structures.atoms import UnusableInput, name_word
from pipeline.structures.partners import bound_rows
from pipeline.tasks.docking.pose_sampling import superposed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.structures.inventory import Complex, ComplexSide
    from pipeline.structures.policy import Structure

CONTACT, INTERFACE, CLASH = 5.0, 10.0, 3.0  # Å between heavy atoms
BACKBONE = (
    "CA", "C", "N", "O",
    "P", "OP1", "OP2", "O2'", "O3'", "O4'", "O5'", "C1'", "C2'", "C3'", "C4'", "C5'",
)  # fmt: skip
HYDROGENS = (1, 119)  # gemmi's 119 is deuterium
POSES_AT_ONCE = 32
CLASSES = ("incorrect", "acceptable", "medium", "high")
LEAST_DOCKQ = (0.23, 0.49, 0.80)  # of the classes after the first
RMSD_BELOW = (2.0, 5.0, 10.0)  # Å
TOPS = {"top-1": 1, "top-5": 5, "oracle": None}


class RigidMoves(NamedTuple):
    """Moves of a ligand from where its file has it: x → turn @ x + shift."""

    turn_P33: NDArray[np.float64]
    shift_P3: NDArray[np.float64]

    def of(self, pos_N3: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return positions after each move [P, N, 3]."""
        moved_PN3: NDArray[np.float64] = pos_N3 @ self.turn_P33.transpose(0, 2, 1) + self.shift_P3[:, None]
        return moved_PN3

    def undone(self, pos_N3: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return positions after the opposite of each move [P, N, 3]."""
        back_PN3: NDArray[np.float64] = (pos_N3 - self.shift_P3[:, None]) @ self.turn_P33
        return back_PN3

    def take(self, chosen: NDArray[np.int64] | slice) -> RigidMoves:
        """Return some of the moves."""
        return RigidMoves(self.turn_P33[chosen], self.shift_P3[chosen])


def nearest_move(pos_N3: NDArray[np.float64], onto_N3: NDArray[np.float64]) -> RigidMoves:
    """Return the one move that brings points nearest to others (Kabsch)."""
    centre_3, target_3 = pos_N3.mean(0), onto_N3.mean(0)
    left_33, _, right_33 = np.linalg.svd((onto_N3 - target_3).T @ (pos_N3 - centre_3))
    left_33[:, 2] *= np.linalg.det(left_33 @ right_33)
    turn_33 = left_33 @ right_33
    return RigidMoves(turn_33[None], (target_3 - turn_33 @ centre_3)[None])


@dataclass(frozen=True, slots=True)
class PartnerAtoms:
    """The heavy atoms of a partner's polymers, without modified residues."""

    pos_A3: NDArray[np.float64]
    residue_A: NDArray[np.int64]
    backbone_RB: NDArray[np.int64]  # the atom of each name in `BACKBONE`, -1 where missing
    sequences: tuple[str, ...]  # of its chains

    @property
    def residues(self) -> int:
        """Count the residues of all chains."""
        return len(self.backbone_RB)


def partner_atoms(side: ComplexSide) -> PartnerAtoms:
    """Return what of a side is compared."""
    structure, chains = side.structure, [chain for chain in side.chains if chain.kind is not Kind.OTHER]
    kept = [chain.first + np.flatnonzero(~structure.modified_R[chain.first : chain.last]) for chain in chains]
    sequences = ("".join(np.array([*chain.sequence])[own - chain.first]) for chain, own in zip(chains, kept, strict=True))
    residues = np.concatenate(kept) if kept else np.empty(0, np.int64)
    atoms, residue_A = _heavy_atoms(structure, residues)
    backbone_RB = np.full((len(residues), len(BACKBONE)), -1)
    for column, name in enumerate(BACKBONE):
        rows = np.flatnonzero(structure.name_A[atoms] == name_word(name))
        backbone_RB[residue_A[rows], column] = rows
    return PartnerAtoms(structure.pos_A3[atoms].astype(np.float64), residue_A, backbone_RB, tuple(sequences))


def _heavy_atoms(structure: Structure, residues: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the heavy atoms of some residues, and the place of each one's residue among them."""
    place_R = np.full(len(structure.number_R), -1)
    place_R[residues] = np.arange(len(residues))
    place_A = place_R[structure.residue_A]
    atoms = np.flatnonzero((place_A >= 0) & ~np.isin(structure.element_A, HYDROGENS))
    atoms = atoms[np.argsort(place_A[atoms], kind="stable")]
    return atoms, place_A[atoms]


def heavy_positions(side: ComplexSide) -> NDArray[np.float64]:
    """Return the positions of all heavy atoms of a side, those of modified residues and kept molecules, too."""
    atoms, _ = _heavy_atoms(side.structure, side.residues())
    return side.structure.pos_A3[atoms].astype(np.float64)


class _Pair(NamedTuple):
    """A partner as it is docked and as it truly is, with the residues that both have."""

    docked: PartnerAtoms
    true: PartnerAtoms
    shared_R2: NDArray[np.int64]  # residues of either that are the same


def _paired(docked: PartnerAtoms, true: PartnerAtoms) -> _Pair:
    """Find the residues that a docked and a true partner share: aligned, and of one kind."""
    if docked.sequences == true.sequences:
        return _Pair(docked, true, np.stack([np.arange(docked.residues)] * 2, 1))
    row_R = bound_rows(docked.sequences, true.sequences)
    mine, theirs = np.array([*"".join(docked.sequences)]), np.array([*"".join(true.sequences)])
    shared_R = np.flatnonzero((row_R >= 0) & (mine == theirs[row_R]))
    return _Pair(docked, true, np.stack([shared_R, row_R[shared_R].astype(np.int64)], 1))


def _backbones(pair: _Pair, chosen: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the backbone atoms of some shared residues, as docked and in truth, where both have them."""
    docked = pair.docked.backbone_RB[pair.shared_R2[chosen, 0]]
    true = pair.true.backbone_RB[pair.shared_R2[chosen, 1]]
    both = (docked >= 0) & (true >= 0)
    return pair.docked.pos_A3[docked[both]], pair.true.pos_A3[true[both]]


def _near_residues(receptor: PartnerAtoms, ligand: PartnerAtoms) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the pairs of residues with heavy atoms within the reach of an interface, and the least distance of each."""
    trees = cKDTree(receptor.pos_A3), cKDTree(ligand.pos_A3)
    near_K = trees[0].sparse_distance_matrix(trees[1], INTERFACE, output_type="ndarray")
    code_K = receptor.residue_A[near_K["i"]] * ligand.residues + ligand.residue_A[near_K["j"]]
    order_K = np.lexsort((near_K["v"], code_K))
    code_C, first_C = np.unique(code_K[order_K], return_index=True)
    return np.stack(np.divmod(code_C, max(ligand.residues, 1)), 1), near_K["v"][order_K][first_C]


class _AtomPairs(NamedTuple):
    """All pairs of docked heavy atoms between the residues of each contact."""

    receptor_K: NDArray[np.int64]
    ligand_K: NDArray[np.int64]
    first_C: NDArray[np.int64]


def _atom_pairs(receptor: PartnerAtoms, ligand: PartnerAtoms, contacts_C2: NDArray[np.int64]) -> _AtomPairs:
    """List the pairs of atoms of some pairs of residues."""
    bounds = [np.searchsorted(own.residue_A, np.arange(own.residues + 1)) for own in (receptor, ligand)]
    pairs = [np.empty((0, 2), np.int64)]
    for left, right in contacts_C2.tolist():
        mine, theirs = np.arange(*bounds[0][left : left + 2]), np.arange(*bounds[1][right : right + 2])
        pairs.append(np.stack([np.repeat(mine, len(theirs)), np.tile(theirs, len(mine))], 1))
    pairs_K2 = np.concatenate(pairs)
    return _AtomPairs(pairs_K2[:, 0], pairs_K2[:, 1], np.cumsum([0, *map(len, pairs[1:-1])])[: len(contacts_C2)])


@dataclass(frozen=True, slots=True)
class DockingTruth:
    """What poses of one complex are compared with."""

    receptor: _Pair
    ligand: _Pair
    contacts: int  # of the truth, between residues that were docked or not
    found: _AtomPairs  # by which the contacts between docked residues are looked for
    near: tuple[NDArray[np.int64], NDArray[np.int64]]  # shared residues at the interface


def docking_truth(read: Complex) -> DockingTruth:
    """Return what poses of a complex are compared with: its bound structures, or the input where that is bound."""
    true = {role: read.bound.get(role, side) for role, side in read.sides.items()}
    receptor, ligand = (
        _paired(*(partner_atoms(sides[role]) for sides in (read.sides, true))) for role in (Role.RECEPTOR, Role.LIGAND)
    )
    return truth_of(receptor, ligand)


def truth_of(receptor: _Pair, ligand: _Pair) -> DockingTruth:
    """Find the contacts and the interface of the truth; refuse one without contacts."""
    near_C2, distance_C = _near_residues(receptor.true, ligand.true)
    contact_C = distance_C < CONTACT
    if not contact_C.any():
        raise UnusableInput(Reason.NO_CONTACTS, f"no heavy atoms of the true partners within {CONTACT:g} Å")
    places_C2 = np.stack([_places(pair)[near_C2[:, at]] for at, pair in enumerate((receptor, ligand))], 1)
    is_shared_C, is_inside_C = (places_C2 >= 0).all(1), distance_C < INTERFACE
    docked = [pair.shared_R2[places_C2[contact_C & is_shared_C, at], 0] for at, pair in enumerate((receptor, ligand))]
    near = [np.unique(places_C2[is_shared_C & is_inside_C, at]) for at in (0, 1)]
    if not len(near[0]):
        raise UnusableInput(Reason.NO_CONTACTS, "no residue of the true interface is in the docked structures")
    found = _atom_pairs(receptor.docked, ligand.docked, np.stack(docked, 1))
    return DockingTruth(receptor, ligand, int(contact_C.sum()), found, (near[0], near[1]))


def _places(pair: _Pair) -> NDArray[np.int64]:
    """Return the place of each true residue among the shared ones, -1 where it is not shared."""
    place_R = np.full(pair.true.residues, -1)
    place_R[pair.shared_R2[:, 1]] = np.arange(len(pair.shared_R2))
    return place_R


class PoseQuality(NamedTuple):
    """How near poses are to the truth [P]."""

    fnat_P: NDArray[np.float64]  # share of the true contacts
    irmsd_P: NDArray[np.float64]  # Å, backbone of the interface, superposed
    lrmsd_P: NDArray[np.float64]  # Å, backbone of the smaller partner, the larger one superposed
    dockq_P: NDArray[np.float64]

    def classes(self) -> list[str]:
        """Return the class of each pose by the criteria of CAPRI."""
        return [capri_class(*row) for row in zip(self.fnat_P, self.irmsd_P, self.lrmsd_P, strict=True)]


def pose_quality(truth: DockingTruth, moves: RigidMoves) -> PoseQuality:
    """Return how near the poses are to the truth, a few at a time."""
    parts = [
        (_fnat(truth, some), _interface_rmsd(truth, some), _smaller_rmsd(truth, some)) for some in _pieces(moves)
    ]
    fnat_P, irmsd_P, lrmsd_P = (np.concatenate(part) for part in zip(*parts, strict=True)) if parts else (np.empty(0),) * 3
    return PoseQuality(fnat_P, irmsd_P, lrmsd_P, dockq_score(fnat_P, irmsd_P, lrmsd_P))


def _pieces(moves: RigidMoves) -> Iterator[RigidMoves]:
    for first in range(0, len(moves.turn_P33), POSES_AT_ONCE):
        yield moves.take(slice(first, first + POSES_AT_ONCE))


def _fnat(truth: DockingTruth, moves: RigidMoves) -> NDArray[np.float64]:
    """Return the share of the true contacts that poses have."""
    if not len(truth.found.first_C):
        return np.zeros(len(moves.turn_P33))
    used, ligand_K = np.unique(truth.found.ligand_K, return_inverse=True)
    receptor_K3 = truth.receptor.docked.pos_A3[truth.found.receptor_K]
    apart_PK3 = moves.of(truth.ligand.docked.pos_A3[used])[:, ligand_K] - receptor_K3
    least_PC = np.minimum.reduceat(np.einsum("pki,pki->pk", apart_PK3, apart_PK3), truth.found.first_C, axis=1)
    share_P: NDArray[np.float64] = (least_PC < CONTACT**2).sum(1) / truth.contacts
    return share_P


def _interface_rmsd(truth: DockingTruth, moves: RigidMoves) -> NDArray[np.float64]:
    (receptor_B3, true_B3), (ligand_N3, true_N3) = (
        _backbones(pair, near) for pair, near in zip((truth.receptor, truth.ligand), truth.near, strict=True)
    )
    moved_PN3 = moves.of(ligand_N3)
    posed_PB3 = np.concatenate([np.broadcast_to(receptor_B3, (len(moved_PN3), *receptor_B3.shape)), moved_PN3], 1)
    onto_B3 = np.concatenate([true_B3, true_N3])
    return _apart(superposed(torch.from_numpy(posed_PB3), torch.from_numpy(onto_B3)).numpy(), onto_B3)


def _smaller_rmsd(truth: DockingTruth, moves: RigidMoves) -> NDArray[np.float64]:
    """Return the RMSD of the smaller partner; the larger one is as rigid, so that it is superposed only once."""
    receptor, ligand = (_backbones(pair, np.arange(len(pair.shared_R2))) for pair in (truth.receptor, truth.ligand))
    if truth.receptor.true.residues > truth.ligand.true.residues:
        fit, posed_PN3, true_N3 = nearest_move(*receptor), moves.of(ligand[0]), ligand[1]
    else:
        fit, posed_PN3, true_N3 = nearest_move(*ligand), moves.undone(receptor[0]), receptor[1]
    return _apart(posed_PN3 @ fit.turn_P33[0].T + fit.shift_P3[0], true_N3)


def _apart(pos_PN3: NDArray[np.float64], true_N3: NDArray[np.float64]) -> NDArray[np.float64]:
    apart_P: NDArray[np.float64] = np.sqrt(np.square(pos_PN3 - true_N3).sum(-1).mean(-1))
    return apart_P


def dockq_score(
    fnat_P: NDArray[np.float64], irmsd_P: NDArray[np.float64], lrmsd_P: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the score that DockQ makes of three measures, between 0 and 1."""
    score_P: NDArray[np.float64] = (fnat_P + 1 / (1 + (irmsd_P / 1.5) ** 2) + 1 / (1 + (lrmsd_P / 8.5) ** 2)) / 3
    return score_P


def capri_class(fnat: float, irmsd: float, lrmsd: float) -> str:
    """Return the class of a pose by the criteria of CAPRI."""
    limits = ((0.5, 1.0, 1.0), (0.3, 2.0, 5.0), (0.1, 4.0, 10.0))
    for name, (least, interface, ligand) in zip(reversed(CLASSES), limits, strict=False):
        if fnat >= least and (irmsd <= interface or lrmsd <= ligand):
            return name
    return CLASSES[0]


def clash_counts(
    receptor_A3: NDArray[np.float64], ligand_N3: NDArray[np.float64], moves: RigidMoves
) -> NDArray[np.int64]:
    """Count the pairs of atoms across partners that are nearer than atoms ever are, without hydrogens 3 Å, by pose."""
    tree, below = cKDTree(receptor_A3), np.nextafter(CLASH, 0)
    counts = [tree.query_ball_point(some.of(ligand_N3), below, return_length=True).sum(-1) for some in _pieces(moves)]
    return np.concatenate([np.empty(0, np.int64), *counts])
