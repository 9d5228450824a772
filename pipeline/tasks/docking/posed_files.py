"""A complex as a structure file with its ligand moved: PDB, or mmCIF if any of its files is.

Shapes: N atoms of the ligand, P poses.
"""

from __future__ import annotations

import string
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import gemmi
import numpy as np

from pipeline.errors import DataError
from pipeline.records import Role
from pipeline.structures.atoms import BLANK_CHAIN
from pipeline.structures.parsing.read_structure import PDB_LINE_LENGTH, PLAIN, FileReading, read_on
from pipeline.structures.parsing.structure_files import format_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.records import Item, Part
    from pipeline.structures.inventory import Complex
    from pipeline.structures.parsing.structure_files import File
    from pipeline.tasks.docking.pose_quality import RigidMoves

WRITTEN = ("pdb", "mmcif")  # the formats that poses are written in
LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
PAIRS = [first + second for first in string.ascii_uppercase for second in string.ascii_uppercase]
NAMES = {".pdb": [*LETTERS], ".cif": [*string.ascii_uppercase, *PAIRS]}  # for chains that are renamed
REMARK_LENGTH = 69
LIGAND, OTHER, DROPPED = "L", "O", "-"  # flags of residues


@dataclass(frozen=True, slots=True)
class DockedComplex:
    """An item that was docked, as it was read, and the bytes of its files by path."""

    item: Item
    read: Complex
    files: Mapping[str, File]
    reading: FileReading = PLAIN
    has_truth: bool = True  # the input is bound, or bound structures are named


@dataclass(frozen=True, slots=True)
class PosedFile:
    """The structure of a complex, whose ligand has flagged residues."""

    structure: gemmi.Structure
    suffix: str
    pos_N3: NDArray[np.float64]  # of the ligand, as it was read
    document: gemmi.cif.Document | None  # of a single mmCIF file: what it says besides its atoms
    notes: tuple[str, ...]  # what is not as in the files

    def pose(self, moves: RigidMoves, remarks: Sequence[str]) -> bytes:
        """Return the file in which the ligand has made the first of some moves."""
        _place(self.structure[0], moves.of(self.pos_N3)[0])
        if self.document is None:
            return self._text(self.structure, remarks)
        groups = gemmi.MmcifOutputGroups(all=False, atoms=True, group_pdb=True, auth_all=True)
        self.structure.update_mmcif_block(_block(self.document), groups)
        return self._as_cif(self.document, remarks)

    def trajectory(self, moves: RigidMoves, remarks: Sequence[str]) -> bytes:
        """Return a file of several models, the ligand after each move."""
        alone = self.structure.clone()
        _drop(alone[0], OTHER)
        for number, pos_N3 in enumerate(moves.of(self.pos_N3), start=1):
            model = alone[0].clone()
            model.num = number
            _place(model, pos_N3)
            alone.add_model(model)
        del alone[0]
        return self._text(alone, remarks)

    def _text(self, structure: gemmi.Structure, remarks: Sequence[str]) -> bytes:
        if self.suffix == ".cif":
            return self._as_cif(structure.make_mmcif_document(), remarks)
        known = structure.raw_remarks
        texts = [text.encode("ascii", "replace").decode() for text in (*remarks, *self.notes)]
        pieces = (text[at : at + REMARK_LENGTH] for text in texts for at in range(0, len(text), REMARK_LENGTH))
        structure.raw_remarks = [*known, *(f"REMARK  99 {piece}" for piece in pieces)]
        options = gemmi.PdbWriteOptions(
            preserve_serial=bool(structure.conect_map), conect_records=True, cryst1_record=structure.cell.is_crystal()
        )
        text = structure.make_pdb_string(options)
        structure.raw_remarks = known
        return text.encode()

    def _as_cif(self, document: gemmi.cif.Document, remarks: Sequence[str]) -> bytes:
        comments = (f"# {' '.join(text.split())}\n" for text in (*remarks, *self.notes))
        return ("".join(comments) + document.as_string()).encode()


def posed_file(docked: DockedComplex) -> PosedFile:
    """Return a complex as one file; of two, the ligand's chains are renamed if need be."""
    item, reading = docked.item, docked.reading
    if reading.assembly is not None:
        raise DataError(
            "poses are written from the text of the files, which has no assembly copies",
            item=item.id,
            remedy="write the assembly to its own file, and unset structures.assembly",
        )
    parts: dict[tuple[str, int], list[Part]] = {}
    for part in sorted(item.parts, key=lambda part: part.role is Role.LIGAND):
        parts.setdefault((part.path, part.model or reading.model), []).append(part)
    documents: list[gemmi.cif.Document | None] = []
    structures: list[gemmi.Structure] = []
    for (path, model), own in parts.items():
        data = docked.files[path].data
        documents.append(gemmi.cif.read_string(data) if _form(path) == "mmcif" else None)
        structures.append(_structure(data, documents[-1], model))
        _flag(structures[-1][0], own, docked)
    suffix = ".cif" if any(documents) else ".pdb"
    whole, *more = structures
    notes = tuple(note for ligand in more for note in _join(whole, ligand, NAMES[suffix]))
    pos = [atom.pos.tolist() for atom in _ligand(whole[0])]
    if not pos:
        raise DataError("no atom of the ligand was found in its file", item=item.id)
    return PosedFile(whole, suffix, np.array(pos, np.float64), None if more else documents[0], notes)


def _form(path: str) -> str:
    form = format_of(Path(path))
    if form not in WRITTEN:
        raise DataError(
            "poses can be written only for PDB and mmCIF files", where=path, remedy="convert the file to one of them"
        )
    return form


def _block(document: gemmi.cif.Document) -> gemmi.cif.Block:
    """Return the first block that has atoms."""
    return next(block for block in document if block.find_values("_atom_site.id"))


def _structure(data: bytes, document: gemmi.cif.Document | None, number: int) -> gemmi.Structure:
    """Return one model of a file."""
    if document is None:
        structure = gemmi.read_pdb_string(read_on(data)[0], max_line_length=PDB_LINE_LENGTH)
        structure.setup_entities()
    else:
        structure = gemmi.make_structure_from_block(_block(document))
    for index in reversed(range(len(structure))):
        if index != number - 1:
            del structure[index]
    return structure


def _flag(model: gemmi.Model, parts: Sequence[Part], docked: DockedComplex) -> None:
    """Flag residues by their side, and remove those of neither, unless the file holds both.

    A chain's waters and molecules are of its side, unless they are named singly. Where chains go by their labels, those
    of waters and molecules are others: they go with the chain that authors give them to.
    """
    sides, by_label = docked.read.sides, docked.reading.chain_names == "label"
    roles = [role for part in parts for role in (sides if part.role is Role.COMPLEX else (part.role,))]
    side_of = {chain.name: role for role in roles for chain in sides[role].chains}
    is_whole = len(roles) == 1 and not parts[0].chains
    found: list[tuple[gemmi.Residue, str, Role | None]] = []
    of_chain: dict[str, set[Role]] = defaultdict(set)
    for chain in model:
        for residue in chain:
            own = (residue.subchain if by_label else chain.name) or BLANK_CHAIN
            role = side_of.get(f"{own}:{residue.name}:{residue.seqid}") or side_of.get(own)
            found.append((residue, chain.name, roles[0] if is_whole else role))
            of_chain[chain.name] |= {role} if role else set()
    for residue, name, role in found:
        if role is None and by_label and len(of_chain[name]) == 1:
            (role,) = of_chain[name]
        residue.flag = LIGAND if role is Role.LIGAND else OTHER if role or len(roles) > 1 else DROPPED
    _drop(model, DROPPED)
    for atom in _ligand(model):
        atom.aniso = gemmi.SMat33f(0, 0, 0, 0, 0, 0)  # it would have to turn


def _ligand(model: gemmi.Model) -> Iterator[gemmi.Atom]:
    return (atom for chain in model for residue in chain if residue.flag == LIGAND for atom in residue)


def _drop(model: gemmi.Model, flag: str) -> None:
    for chain in model:
        for index in reversed(range(len(chain))):
            if chain[index].flag == flag:
                del chain[index]


def _place(model: gemmi.Model, pos_N3: NDArray[np.float64]) -> None:
    for atom, place in zip(_ligand(model), pos_N3.tolist(), strict=True):
        atom.pos = gemmi.Position(*place)


def _join(whole: gemmi.Structure, ligand: gemmi.Structure, names: Sequence[str]) -> list[str]:
    """Add a ligand's file to the receptor's; return which of its chains have new names."""
    taken, own = ({chain.name: None for chain in structure[0]} for structure in (whole, ligand))
    clashing, free = [name for name in own if name in taken], [name for name in names if name not in {*taken, *own}]
    if len(free) < len(clashing):
        problem = f"receptor and ligand have {len({*taken, *own})} chains, too many for a PDB file"
        raise DataError(problem, remedy="give both as mmCIF")
    new = dict(zip(clashing, free, strict=False))
    for old, name in new.items():
        ligand.rename_chain(old, name)
    for residue in (residue for chain in ligand[0] for residue in chain):
        residue.subchain, residue.entity_id = f"L{residue.subchain}", f"L{residue.entity_id}"
    for entity in ligand.entities:
        entity.name, entity.subchains = f"L{entity.name}", [f"L{name}" for name in entity.subchains]
    last = max((row.atom.serial for row in whole[0].all()), default=0) + 1
    for row in ligand[0].all():
        row.atom.serial += last
    for serial, partners in ligand.conect_map.items():
        for partner in {*partners}:
            if serial < partner or serial not in ligand.conect_map.get(partner, ()):  # bonds are named from both ends
                whole.add_conect(serial + last, partner + last, partners.count(partner))
    for chain in ligand[0]:
        whole[0].add_chain(chain)
    for name in ("entities", "connections", "cispeps", "helices", "sheets", "mod_residues"):
        getattr(whole, name).extend(getattr(ligand, name))
    return [f"LIGAND CHAIN {old or BLANK_CHAIN} IS RENAMED {name}" for old, name in new.items()]
