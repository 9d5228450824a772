"""The files that a docked complex was read from, and which of their atoms are whose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipeline.errors import DataError
from pipeline.records import Kind, Role
from pipeline.structures.parsing.structure_files import format_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.records import Item, Part
    from pipeline.structures.inventory import Complex, ComplexSide
    from pipeline.structures.parsing.read_structure import FileReading
    from pipeline.structures.parsing.structure_files import File

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
            "poses are written with the text of the files, which holds no copies of an assembly",
            item=item.id,
            remedy="write the assembly to a file of its own, and leave out structures.assembly",
        )
    parts: dict[tuple[str, int], list[Part]] = {}
    for part in sorted(item.parts, key=lambda part: part.role is Role.LIGAND):
        parts.setdefault((part.path, part.model or reading.model), []).append(part)
    return tuple(_source(files[path], path, model, own, read, reading) for (path, model), own in parts.items())


def _source(file: File, path: str, model: int, parts: list[Part], read: Complex, reading: FileReading) -> SourceFile:
    form = format_of(Path(path))
    if form not in WRITTEN:
        raise DataError(
            "poses can be written of PDB and mmCIF files only", where=path, remedy="convert the file to one of them"
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
            f"receptor and ligand have {len(taken)} chains, too many to name them apart", remedy="give both as mmCIF"
        )
    return dict(zip(clashing, free, strict=False))
