"""An mmCIF file with its ligand moved: the table of atoms that was read, with other coordinates.

Shapes: N atoms of the ligand, P poses.
"""

from __future__ import annotations

import string
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import gemmi
import numpy as np

from pipeline.records import Role
from pipeline.structures.atoms import BLANK_CHAIN
from pipeline.structures.parsing.read_structure import PDB_LINE_LENGTH
from pipeline.tasks.docking.docked_partners import free_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from pipeline.tasks.docking.docked_partners import SourceFile
    from pipeline.tasks.docking.pose_quality import RigidMoves

SITE, ANISOTROPY = "_atom_site.", "_atom_site_anisotrop."
XYZ = ("Cartn_x", "Cartn_y", "Cartn_z")
MODEL, SERIAL = "pdbx_PDB_model_num", "id"
CHAINS, ENTITY = ("auth_asym_id", "label_asym_id"), "label_entity_id"
NAMES = [*string.ascii_uppercase, *(a + b for a in string.ascii_uppercase for b in string.ascii_uppercase)]
UNKNOWN = ("?", ".")


@dataclass(frozen=True, slots=True)
class _Atoms:
    """The table of atoms, as text, and whose they are."""

    columns: dict[str, list[str]]
    roles: list[Role | None]

    def take(self, rows: Sequence[int]) -> _Atoms:
        columns = {name: [column[row] for row in rows] for name, column in self.columns.items()}
        return _Atoms(columns, [self.roles[row] for row in rows])


@dataclass(frozen=True, slots=True)
class PosedCif:
    """The blocks of a file, its atoms, and which of them move."""

    document: gemmi.cif.Document
    columns: dict[str, list[str]]
    moved: tuple[int, ...]
    pos_N3: NDArray[np.float64]
    notes: tuple[str, ...] = ()  # what is not as in the files
    suffix: str = ".cif"

    def pose(self, moves: RigidMoves, remarks: Sequence[str]) -> bytes:
        """Return the file in which the ligand has made the first of some moves."""
        columns = {**self.columns, **{name: [*self.columns[name]] for name in XYZ}}
        for name, texts in zip(XYZ, _texts(moves.of(self.pos_N3)[0]), strict=True):
            for at, text in zip(self.moved, texts, strict=True):
                columns[name][at] = text
        _loop(_block(self.document)).set_all_values([*columns.values()])
        return (self._comments(remarks) + self.document.as_string()).encode()

    def frames(self, moves: RigidMoves, remarks: Sequence[str]) -> Iterator[bytes]:
        """Yield a file of several models, the ligand after each move."""
        tags = "".join(f"{SITE}{name}\n" for name in self.columns)
        yield f"{self._comments(remarks)}data_{_block(self.document).name}\n\nloop_\n{tags}".encode()
        ligand = {name: [column[at] for at in self.moved] for name, column in self.columns.items()}
        for model, pos_N3 in enumerate(moves.of(self.pos_N3), start=1):
            ligand |= dict(zip(XYZ, _texts(pos_N3), strict=True))
            ligand[MODEL] = [str(model)] * len(self.moved)
            yield "".join(f"{' '.join(row)}\n" for row in zip(*ligand.values(), strict=True)).encode()

    def _comments(self, remarks: Sequence[str]) -> str:
        return "".join(f"# {' '.join(text.split())}\n" for text in (*remarks, *self.notes))


def _texts(pos_N3: NDArray[np.float64]) -> list[list[str]]:
    return [[f"{number:.3f}" for number in column] for column in pos_N3.T.tolist()]


def posed_cif(sources: Sequence[SourceFile]) -> PosedCif:
    """Return the atoms of one file, or of two as one, in which the ligand's chains are renamed if need be.

    Of two files nothing but the atoms is kept; a PDB file beside an mmCIF file is turned into one.
    """
    documents = [_document(source) for source in sources]
    tables = [_atoms(document, source) for document, source in zip(documents, sources, strict=True)]
    notes: tuple[str, ...] = ()
    document, (atoms, *more) = documents[0], tables
    if more:
        ligand, notes = _apart(atoms, more[0])
        atoms, document = _together(atoms, ligand), _of_atoms(_block(document).name)
    else:
        _drop_anisotropy(_block(document), atoms)
    moved = tuple(row for row, role in enumerate(atoms.roles) if role is Role.LIGAND)
    pos = [[float(gemmi.cif.as_number(atoms.columns[name][row])) for name in XYZ] for row in moved]
    block = _block(document) if not more else document[0]
    block.init_loop(SITE, [*atoms.columns]).set_all_values([*atoms.columns.values()])
    return PosedCif(document, atoms.columns, moved, np.array(pos, np.float64).reshape(-1, 3), notes)


def _document(source: SourceFile) -> gemmi.cif.Document:
    if source.form == "mmcif":
        return gemmi.cif.read_string(source.data)
    structure = gemmi.read_pdb_string(source.data, max_line_length=PDB_LINE_LENGTH)
    structure.setup_entities()
    return structure.make_mmcif_document()


def _block(document: gemmi.cif.Document) -> gemmi.cif.Block:
    """Return the first block that has atoms."""
    return next(block for block in document if block.find_values(f"{SITE}{SERIAL}"))


def _loop(block: gemmi.cif.Block) -> gemmi.cif.Loop:
    item = block.find_loop(f"{SITE}{SERIAL}").get_loop()
    assert item is not None  # one atom alone would be no loop, but every table is made one
    return item


def _atoms(document: gemmi.cif.Document, source: SourceFile) -> _Atoms:
    """Return the atoms of a file that are written."""
    table = _block(document).find_mmcif_category(SITE)
    names = [tag.removeprefix(SITE) for tag in table.tags]
    columns = dict(zip(names, ([*column] for column in zip(*table, strict=True)), strict=True))
    columns.setdefault(MODEL, ["1"] * len(columns[SERIAL]))
    models = [*dict.fromkeys(columns[MODEL])]
    roles = [source.role_of(*place) for place in _places(columns, by_label=source.by_label)]
    if source.by_label and CHAINS[0] in columns:
        roles = _with_molecules(roles, columns[CHAINS[0]])
    wanted = models[source.model - 1]
    rows = [row for row, role in enumerate(roles) if columns[MODEL][row] == wanted and source.keeps(role)]
    return _Atoms(columns, roles).take(rows)


def _places(columns: dict[str, list[str]], *, by_label: bool) -> Iterator[tuple[str, str]]:
    """Yield the chain and the molecule, CHAIN:RESIDUE:NUMBER, of each atom."""
    empty = [UNKNOWN[0]] * len(columns[SERIAL])
    author, label = (columns.get(name, empty) for name in CHAINS)
    chains = label if by_label or author is empty else author
    names = columns.get("label_comp_id") or columns.get("auth_comp_id", empty)
    numbers = columns.get("auth_seq_id") or columns.get("label_seq_id", empty)
    letters = columns.get("pdbx_PDB_ins_code", empty)
    for chain, name, number, letter in zip(chains, names, numbers, letters, strict=True):
        own = gemmi.cif.as_string(chain) or BLANK_CHAIN
        yield own, ":".join((own, gemmi.cif.as_string(name), number + gemmi.cif.as_string(letter)))


def _with_molecules(roles: list[Role | None], author: list[str]) -> list[Role | None]:
    """Let waters and molecules, whose chains have labels of their own, go with the chain that authors give them to."""
    of_chain: dict[str, set[Role | None]] = {}
    for chain, role in zip(author, roles, strict=True):
        of_chain.setdefault(chain, set()).add(role)
    only = {chain: next(iter(own)) for chain, found in of_chain.items() if len(own := found - {None}) == 1}
    return [role or only.get(chain) for chain, role in zip(author, roles, strict=True)]


def _drop_anisotropy(block: gemmi.cif.Block, atoms: _Atoms) -> None:
    """Leave the anisotropy of atoms that stay; that of a ligand would have to turn with it."""
    table = block.find_mmcif_category(ANISOTROPY)
    if not len(table):
        return
    names = [tag.removeprefix(ANISOTROPY) for tag in table.tags]
    still = {serial for serial, role in zip(atoms.columns[SERIAL], atoms.roles, strict=True) if role is not Role.LIGAND}
    rows = [[*row] for row in table if row[names.index(SERIAL)] in still]
    if rows:
        block.init_loop(ANISOTROPY, names).set_all_values([[*column] for column in zip(*rows, strict=True)])
    else:
        table.erase()


def _apart(receptor: _Atoms, ligand: _Atoms) -> tuple[_Atoms, tuple[str, ...]]:
    """Return a ligand with names of chains, of entities and of atoms that the receptor does not have."""
    columns, notes = dict(ligand.columns), []
    for tag in CHAINS:
        if tag in columns:
            taken, own = set(receptor.columns.get(tag, [])), [*dict.fromkeys(columns[tag])]
            clashing = [name for name in own if name in taken and (tag == CHAINS[0] or name not in UNKNOWN)]
            new = free_names({*taken, *own}, clashing, NAMES)
            columns[tag] = [new.get(name, name) for name in columns[tag]]
            notes += [f"ligand chain {old} ({tag}) is renamed {name}" for old, name in new.items()]
    if ENTITY in columns:
        columns[ENTITY] = [f"L{name}" if name not in UNKNOWN else name for name in columns[ENTITY]]
    first = max((int(serial) for serial in receptor.columns[SERIAL] if serial.isdigit()), default=0) + 1
    columns[SERIAL] = [str(serial) for serial in range(first, first + len(ligand.roles))]
    columns[MODEL] = receptor.columns[MODEL][:1] * len(ligand.roles)
    return replace(ligand, columns=columns), tuple(notes)


def _together(receptor: _Atoms, ligand: _Atoms) -> _Atoms:
    """Return the atoms of both, with every column that either has."""
    names, tables = dict.fromkeys((*receptor.columns, *ligand.columns)), (receptor, ligand)
    parts = ([atoms.columns.get(name) or [UNKNOWN[0]] * len(atoms.roles) for atoms in tables] for name in names)
    columns = {name: [*first, *last] for name, (first, last) in zip(names, parts, strict=True)}
    return _Atoms(columns, receptor.roles + ligand.roles)


def _of_atoms(name: str) -> gemmi.cif.Document:
    """Return a document that holds nothing yet."""
    document = gemmi.cif.Document()
    document.add_new_block(name)
    return document
