"""A complex as a structure file with its ligand moved: PDB, or mmCIF if any of its files is.

Shapes: N atoms of the ligand, P poses.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import TYPE_CHECKING

import gemmi
import numpy as np

from pipeline.records import Role
from pipeline.structures.atoms import BLANK_CHAIN
from pipeline.structures.parsing.pdb_lines import read_on
from pipeline.structures.parsing.read_structure import PDB_LINE_LENGTH
from pipeline.tasks.docking.docked_partners import free_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from pipeline.tasks.docking.docked_partners import SourceFile
    from pipeline.tasks.docking.pose_quality import RigidMoves

LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
PAIRS = [first + second for first in string.ascii_uppercase for second in string.ascii_uppercase]
NAMES = {".pdb": [*LETTERS], ".cif": [*string.ascii_uppercase, *PAIRS]}  # for chains that are renamed
REMARK_LENGTH = 69
LIGAND, OTHER, DROPPED = "L", "O", "-"  # flags of residues


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


def posed_file(sources: Sequence[SourceFile]) -> PosedFile:
    """Return one file, or two as one, in which the ligand's chains are renamed if need be."""
    suffix = ".pdb" if all(source.form == "pdb" for source in sources) else ".cif"
    documents = [gemmi.cif.read_string(source.data) if source.form == "mmcif" else None for source in sources]
    whole, *more = map(_structure, sources, documents)
    notes = tuple(note for ligand in more for note in _join(whole, ligand, NAMES[suffix]))
    pos = [atom.pos.tolist() for atom in _ligand(whole[0])]
    return PosedFile(whole, suffix, np.array(pos, np.float64).reshape(-1, 3), None if more else documents[0], notes)


def _block(document: gemmi.cif.Document) -> gemmi.cif.Block:
    """Return the first block that has atoms."""
    return next(block for block in document if block.find_values("_atom_site.id"))


def _structure(source: SourceFile, document: gemmi.cif.Document | None) -> gemmi.Structure:
    """Return what is written of a file: one model, its ligand without anisotropy, as that would have to turn."""
    if document is None:
        structure = gemmi.read_pdb_string(read_on(source.data)[0], max_line_length=PDB_LINE_LENGTH)
        structure.setup_entities()
    else:
        structure = gemmi.make_structure_from_block(_block(document))
    for index in reversed(range(len(structure))):
        if index != source.model - 1:
            del structure[index]
    for residue, role in zip(_residues(structure[0]), _roles(structure[0], source), strict=True):
        residue.flag = LIGAND if role is Role.LIGAND else OTHER if source.keeps(role) else DROPPED
    _drop(structure[0], DROPPED)
    for atom in _ligand(structure[0]):
        atom.aniso = gemmi.SMat33f(0, 0, 0, 0, 0, 0)
    return structure


def _residues(model: gemmi.Model) -> Iterator[gemmi.Residue]:
    return (residue for chain in model for residue in chain)


def _ligand(model: gemmi.Model) -> Iterator[gemmi.Atom]:
    return (atom for residue in _residues(model) if residue.flag == LIGAND for atom in residue)


def _drop(model: gemmi.Model, flag: str) -> None:
    for chain in model:
        for index in reversed(range(len(chain))):
            if chain[index].flag == flag:
                del chain[index]


def _place(model: gemmi.Model, pos_N3: NDArray[np.float64]) -> None:
    for atom, place in zip(_ligand(model), pos_N3.tolist(), strict=True):
        atom.pos = gemmi.Position(*place)


def _roles(model: gemmi.Model, source: SourceFile) -> list[Role | None]:
    """Return whose each residue is.

    Waters and molecules, whose chains have labels of their own, go with the chain that authors give them to.
    """
    of_chain: dict[str, set[Role]] = {}
    found = list[tuple[str, Role | None]]()
    for chain in model:
        for residue in chain:
            own = (residue.subchain if source.by_label else chain.name) or BLANK_CHAIN
            role = source.role_of(own, f"{own}:{residue.name}:{residue.seqid}")
            found.append((chain.name, role))
            of_chain.setdefault(chain.name, set()).update([role] if role else [])
    only = {name: next(iter(roles)) for name, roles in of_chain.items() if source.by_label and len(roles) == 1}
    return [role or only.get(name) for name, role in found]


def _join(whole: gemmi.Structure, ligand: gemmi.Structure, names: Sequence[str]) -> list[str]:
    """Add a ligand's file to the receptor's; return which of its chains have new names."""
    taken, own = ({chain.name: None for chain in structure[0]} for structure in (whole, ligand))
    new = free_names({*taken, *own}, [name for name in own if name in taken], names)
    for old, name in new.items():
        ligand.rename_chain(old, name)
    for residue in _residues(ligand[0]):
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
