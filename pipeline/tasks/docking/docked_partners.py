"""The partners of a docked complex, each as it is docked and as it truly is.

Shapes: A heavy atoms, R residues, B names of backbone atoms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.records import Kind
from pipeline.structures.atoms import name_word
from pipeline.structures.partners import bound_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pipeline.structures.inventory import ComplexSide
    from pipeline.structures.policy import Structure

BACKBONE = (
    "CA", "C", "N", "O",
    "P", "OP1", "OP2", "O2'", "O3'", "O4'", "O5'", "C1'", "C2'", "C3'", "C4'", "C5'",
)  # fmt: skip
HYDROGENS = (1, 119)  # gemmi's 119 is deuterium


@dataclass(frozen=True, slots=True)
class PartnerAtoms:
    """The heavy atoms of a partner's polymers, without modified residues."""

    pos_A3: NDArray[np.float64]
    residue_A: NDArray[np.int64]
    backbone_RB: NDArray[np.int64]  # the atom of each name in `BACKBONE`, -1 where missing
    sequences: tuple[str, ...]  # of its chains
    number_R: NDArray[np.int64]  # with the insertion code

    @property
    def residues(self) -> int:
        """Count the residues of all chains."""
        return len(self.backbone_RB)

    def letters(self) -> NDArray[np.str_]:
        """Return the letter of each residue."""
        return np.array([*"".join(self.sequences)], np.str_)

    def chains(self) -> NDArray[np.int64]:
        """Return the chain of each residue, as a number."""
        return np.repeat(np.arange(len(self.sequences)), [*map(len, self.sequences)])


def partner_atoms(side: ComplexSide) -> PartnerAtoms:
    """Return what of a side is compared."""
    structure, chains = side.structure, [chain for chain in side.chains if chain.kind is not Kind.OTHER]
    kept = [chain.first + np.flatnonzero(~structure.modified_R[chain.first : chain.last]) for chain in chains]
    sequences = (
        "".join(np.array([*chain.sequence])[own - chain.first]) for chain, own in zip(chains, kept, strict=True)
    )
    residues = np.concatenate(kept) if kept else np.empty(0, np.int64)
    atoms, residue_A = _heavy_atoms(structure, residues)
    backbone_RB = np.full((len(residues), len(BACKBONE)), -1)
    for column, name in enumerate(BACKBONE):
        rows = np.flatnonzero(structure.name_A[atoms] == name_word(name))
        backbone_RB[residue_A[rows], column] = rows
    number_R = structure.number_R[residues].astype(np.int64) * 256 + structure.icode_R[residues]
    pos_A3 = structure.pos_A3[atoms].astype(np.float64)
    return PartnerAtoms(pos_A3, residue_A, backbone_RB, tuple(sequences), number_R)


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


class MatchedPartner(NamedTuple):
    """A partner as it is docked and as it truly is, with the residues that both have."""

    docked: PartnerAtoms
    true: PartnerAtoms
    shared_R2: NDArray[np.int64]  # residues of either that are the same


def matched_partner(docked: PartnerAtoms, true: PartnerAtoms) -> MatchedPartner:
    """Find the residues that a docked and a true partner share: corresponding ones, of one kind."""
    if docked.sequences == true.sequences:
        return MatchedPartner(docked, true, np.stack([np.arange(docked.residues)] * 2, 1))
    row_R = bound_rows(docked.sequences, true.sequences).astype(np.int64)
    row_R[(row_R >= 0) & (docked.letters() != true.letters()[row_R])] = -1
    for chain in range(len(docked.sequences)):
        _prefer_numbers(docked, true, row_R, np.flatnonzero(docked.chains() == chain))
    shared_R = np.flatnonzero(row_R >= 0)
    return MatchedPartner(docked, true, np.stack([shared_R, row_R[shared_R]], 1))


def _prefer_numbers(
    docked: PartnerAtoms, true: PartnerAtoms, row_R: NDArray[np.int64], own_R: NDArray[np.int64]
) -> None:
    """Let the residues of a chain correspond by their numbers where those pair as many as the alignment does."""
    aligned_R = row_R[own_R[row_R[own_R] >= 0]]
    if not len(aligned_R):
        return
    their_R = np.flatnonzero(true.chains() == true.chains()[aligned_R[0]])
    _, mine, theirs = np.intersect1d(docked.number_R[own_R], true.number_R[their_R], return_indices=True)
    mine_R, same_R = own_R[mine], their_R[theirs]
    alike = docked.letters()[mine_R] == true.letters()[same_R]
    if alike.sum() >= len(aligned_R):
        row_R[own_R] = -1
        row_R[mine_R[alike]] = same_R[alike]


def shared_backbones(
    pair: MatchedPartner, chosen: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the backbone atoms of some shared residues, as docked and in truth, where both have them."""
    docked = pair.docked.backbone_RB[pair.shared_R2[chosen, 0]]
    true = pair.true.backbone_RB[pair.shared_R2[chosen, 1]]
    both = (docked >= 0) & (true >= 0)
    return pair.docked.pos_A3[docked[both]], pair.true.pos_A3[true[both]]
