"""The partners of a docked complex: the files they were read from, and each as it is docked and as it truly is.

Shapes: A heavy atoms, R residues, B names of backbone atoms.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.errors import DataError
from pipeline.records import Kind, Role
from pipeline.structures.atoms import name_word
from pipeline.structures.parsing.structure_files import format_of
from pipeline.structures.partners import bound_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.records import Item, Part
    from pipeline.structures.inventory import Complex, ComplexSide
    from pipeline.structures.parsing.read_structure import FileReading
    from pipeline.structures.parsing.structure_files import File
    from pipeline.structures.policy import Structure

WRITTEN = ("pdb", "mmcif")  # the formats whose text is written with other coordinates


class SideNames(NamedTuple):
    """What belongs to a side: whole chains, and molecules of other chains as CHAIN:RESIDUE:NUMBER."""

    chains: frozenset[str]
    molecules: frozenset[str]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a docked complex: it holds one side or both."""

    data: bytes
    form: str
    model: int  # counted from 1
    by_label: bool  # chains go by the names that mmCIF gives, not by those of the authors
    sides: Mapping[Role, SideNames]
    is_whole: bool  # all that the file holds is of its one side

    def role_of(self, chain: str, molecule: str) -> Role | None:
        """Return whose the atoms of a residue are; a chain's waters and molecules are, too, unless named singly."""
        if self.is_whole:
            return next(iter(self.sides))
        singly = (role for role, names in self.sides.items() if molecule in names.molecules)
        wholly = (role for role, names in self.sides.items() if chain in names.chains)
        return next(singly, None) or next(wholly, None)

    def keeps(self, role: Role | None) -> bool:
        """Say whether atoms are written: of neither side are only those beside both."""
        return role is not None or len(self.sides) > 1


def docked_sources(
    item: Item, read: Complex, files: Mapping[str, File], reading: FileReading
) -> tuple[SourceFile, ...]:
    """Return the files of an item, one that holds both sides or the receptor's and the ligand's."""
    if reading.assembly is not None:
        raise DataError(
            "poses are written from the text of the files, which has no assembly copies",
            item=item.id,
            remedy="write the assembly to its own file, and unset structures.assembly",
        )
    parts: dict[tuple[str, int], list[Part]] = {}
    for part in sorted(item.parts, key=lambda part: part.role is Role.LIGAND):
        parts.setdefault((part.path, part.model or reading.model), []).append(part)
    return tuple(_source(files[path], path, model, own, read, reading) for (path, model), own in parts.items())


def _source(file: File, path: str, model: int, parts: list[Part], read: Complex, reading: FileReading) -> SourceFile:
    form = format_of(Path(path))
    if form not in WRITTEN:
        raise DataError(
            "poses can be written only for PDB and mmCIF files", where=path, remedy="convert the file to one of them"
        )
    roles = [role for part in parts for role in (read.sides if part.role is Role.COMPLEX else (part.role,))]
    sides = {role: _names(read.sides[role]) for role in roles}
    is_whole = len(roles) == 1 and not parts[0].chains
    return SourceFile(file.data, form, model, reading.chain_names == "label", sides, is_whole)


def _names(side: ComplexSide) -> SideNames:
    chains = frozenset(chain.name for chain in side.chains if chain.kind is not Kind.OTHER)
    molecules = frozenset(chain.name for chain in side.chains if chain.kind is Kind.OTHER)
    return SideNames(chains, molecules)


def free_names(taken: set[str], clashing: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return new names for chains whose names are taken, the first that are free."""
    free = [name for name in names if name not in taken]
    if len(free) < len(clashing):
        raise DataError(
            f"receptor and ligand have {len(taken)} chains, too many for a PDB file", remedy="give both as mmCIF"
        )
    return dict(zip(clashing, free, strict=False))


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
