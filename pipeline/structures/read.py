"""From bytes to an `AtomTable`: PDB and mmCIF by gemmi, BinaryCIF by biotite, each also gzipped.

The table comes from gemmi's FlatStructure, whose columns numpy views without a loop over atoms.
"""

from __future__ import annotations

import os
import stat
import zlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gemmi
import numpy as np

from pipeline.records import Reason
from pipeline.structures.atoms import NAME_BYTES, AtomTable, Unusable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

PARSER = f"gemmi-{gemmi.__version__}"  # type: ignore[attr-defined]  # its stubs leave the version out
FORMATS = {
    ".pdb": "pdb",
    ".ent": "pdb",
    ".pdb1": "pdb",
    ".cif": "mmcif",
    ".mmcif": "mmcif",
    ".mcif": "mmcif",
    ".bcif": "bcif",
}
# Columns 79-80 hold a charge that 34 of 924 benchmark files fill with something else; gemmi then refuses the file.
PDB_LINE_LENGTH = 78
# What gemmi needs of a BinaryCIF block to see the same structure as in the text file.
BCIF_CATEGORIES = (
    "entry", "cell", "symmetry", "entity", "entity_poly", "entity_poly_seq", "struct_asym", "struct_conn",
    "pdbx_struct_mod_residue", "pdbx_struct_assembly", "pdbx_struct_assembly_gen", "pdbx_struct_oper_list", "atom_site",
)  # fmt: skip
GZIP_WINDOW = 31


@dataclass(frozen=True, slots=True)
class Reading:
    """How files are read; every field can change what comes out, so all of it is in the recipe."""

    chain_names: Literal["author", "label"] = "author"
    assembly: str | None = None
    seqres: bool = False


def stat_file(path: Path, max_bytes: int) -> os.stat_result:
    """Return a file's state, refusing what cannot be read for reasons that show without reading."""
    try:
        state = path.stat()
    except FileNotFoundError:
        raise Unusable(Reason.MISSING_FILE, f"no such file: {path}") from None
    except (OSError, ValueError) as error:
        raise Unusable(Reason.UNREADABLE_FILE, f"{error}") from error
    if not stat.S_ISREG(state.st_mode):
        raise Unusable(Reason.UNREADABLE_FILE, f"not a file: {path}")
    if state.st_size > max_bytes:
        what = f"{state.st_size:,} bytes; structures.max_file_bytes is {max_bytes:,}"
        raise Unusable(Reason.FILE_TOO_LARGE, what)
    return state


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return a file's decompressed bytes, never more than `max_bytes` of them."""
    stat_file(path, max_bytes)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Unusable(Reason.UNREADABLE_FILE, f"{error}") from error
    if path.suffix.lower() == ".gz":
        data = gunzip(data, max_bytes)
    if not data or data.isspace():
        raise Unusable(Reason.EMPTY_FILE, f"nothing in {path}")
    return data


def gunzip(data: bytes, max_bytes: int) -> bytes:
    """Decompress every member of a gzip file, refusing one that is cut short or unfolds beyond `max_bytes`."""
    parts: list[bytes] = []
    room = max_bytes
    while data:
        member = zlib.decompressobj(GZIP_WINDOW)
        try:
            parts.append(member.decompress(data, room + 1))
        except zlib.error as error:
            raise Unusable(Reason.TRUNCATED_FILE, f"not a whole gzip file: {error}") from error
        room -= len(parts[-1])
        if room < 0:
            raise Unusable(Reason.FILE_TOO_LARGE, f"unfolds beyond structures.max_file_bytes ({max_bytes:,})")
        if not member.eof:
            raise Unusable(Reason.TRUNCATED_FILE, "the gzip stream ends early")
        data = member.unused_data.lstrip(b"\0")
    return b"".join(parts)


def format_of(path: Path) -> str:
    """Return the format that a file's name promises."""
    plain = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    try:
        return FORMATS[plain.suffix.lower()]
    except KeyError:
        known = " ".join(FORMATS)
        raise Unusable(
            Reason.UNKNOWN_FORMAT, f"{path.name}: the suffix is none of {known} (or these with .gz)"
        ) from None


def parse(data: bytes, form: str, reading: Reading) -> AtomTable:
    """Return the atoms in a file's bytes."""
    try:
        structure = _structure(data, form)
    except (ValueError, RuntimeError, IndexError, UnicodeDecodeError) as error:
        raise Unusable(Reason.PARSE_ERROR, " ".join(str(error).split())[:200]) from error
    if form == "pdb" and reading.chain_names == "label":
        raise Unusable(Reason.MISSING_CHAIN, "a PDB file has no label chain names; set structures.chain_names: author")
    if len(structure) == 0 or structure[0].count_atom_sites() == 0:
        raise Unusable(Reason.NO_ATOMS, "the file holds no atoms")
    structure.setup_entities()
    if reading.seqres:
        structure.assign_label_seq_id(force=False)
    sequences = _sequences(structure, reading) if reading.seqres else {}
    if reading.assembly is not None:
        _build_assembly(structure, reading.assembly)
    try:
        return _table(structure, reading, sequences)
    except (ValueError, RuntimeError) as error:  # residue names beyond 7 characters exist in no dictionary
        raise Unusable(Reason.PARSE_ERROR, " ".join(str(error).split())[:200]) from error


def _structure(data: bytes, form: str) -> gemmi.Structure:
    """Parse by format; the block with atoms is taken where a document has several."""
    if form == "pdb":
        return gemmi.read_pdb_string(data, max_line_length=PDB_LINE_LENGTH)
    if form == "bcif":
        return gemmi.make_structure_from_block(_bcif_block(data))
    document = gemmi.cif.read_string(data)
    blocks = [block for block in document if block.find_values("_atom_site.id")] or list(document)
    return gemmi.make_structure_from_block(blocks[0])


def _bcif_block(data: bytes) -> gemmi.cif.Block:
    """Turn BinaryCIF into the block that its text form would be, so that one reader gives both their meaning."""
    try:
        import msgpack
        from biotite.structure.io.pdbx import BinaryCIFFile
    except ImportError:
        raise Unusable(Reason.UNKNOWN_FORMAT, "BinaryCIF needs an extra: pip install 'pipeline[bcif]'") from None
    try:
        source: Any = BinaryCIFFile.read(BytesIO(data)).block
        block = gemmi.cif.Block("bcif")
        for name in BCIF_CATEGORIES:
            if name in source:
                block.set_mmcif_category(f"_{name}.", {tag: _values(column) for tag, column in source[name].items()})
    except (KeyError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise Unusable(Reason.PARSE_ERROR, f"not BinaryCIF: {type(error).__name__} {error}"[:200]) from error
    return block


def _values(column: Any) -> list[str | bool | None]:
    """Return a BinaryCIF column as gemmi takes it: False for inapplicable (.), None for unknown (?)."""
    values: list[str | bool | None] = column.as_array(str).tolist()
    if column.mask is not None:
        for state, stand_in in ((1, False), (2, None)):
            for index in np.flatnonzero(column.mask.array == state).tolist():
                values[index] = stand_in
    return values


def _sequences(structure: gemmi.Structure, reading: Reading) -> dict[str, tuple[str, ...]]:
    """Return the full sequence (SEQRES) of each polymer chain; at a mixed position the first residue stands."""
    found = {}
    for chain in structure[0]:
        polymer = chain.get_polymer()
        entity = structure.get_entity_of(polymer) if len(polymer) else None
        if entity is not None and entity.full_sequence:
            name = chain.name if reading.chain_names == "author" else polymer.subchain_id()
            found[name] = tuple(gemmi.Entity.first_mon(monomer) for monomer in entity.full_sequence)
    return found


def _build_assembly(structure: gemmi.Structure, name: str) -> None:
    """Replace each model by a biological assembly; copies of chain A are A, A-2, A-3."""
    assembly = next((one for one in structure.assemblies if one.name == name), None)
    if assembly is None:
        known = ", ".join(one.name for one in structure.assemblies) or "none"
        raise Unusable(Reason.MISSING_ASSEMBLY, f"no assembly {name!r} in the file (it has: {known})")
    structure.merge_chain_parts()
    for index in range(len(structure)):
        copies = gemmi.make_assembly(assembly, structure[index], gemmi.HowToNameCopiedChain.Dup)
        seen: dict[str, int] = {}
        model = structure[index]
        while len(model):
            del model[0]
        for chain in copies:
            seen[chain.name] = count = seen.get(chain.name, 0) + 1
            if count > 1:
                for residue in chain:
                    residue.subchain += f"-{count}"
                chain.name += f"-{count}"
            model.add_chain(chain)


def _table(structure: gemmi.Structure, reading: Reading, sequences: Mapping[str, tuple[str, ...]]) -> AtomTable:
    """View gemmi's flat columns as an `AtomTable`."""
    flat, aliases = _flatten(structure)
    parents = {record.res_id.name: record.parent_comp_id for record in structure.mod_residues if record.parent_comp_id}
    return AtomTable(
        pos_A3=flat.pos,
        name_A=_words(flat.atom_names),
        resname_A=_words(flat.residue_names),
        chain_A=_words(flat.chain_ids if reading.chain_names == "author" else flat.subchains),
        number_A=flat.resnums,
        icode_A=flat.icodes,
        altloc_A=flat.altlocs,
        occupancy_A=flat.occ,
        element_A=flat.elements,
        entity_A=flat.entity_type,
        model_A=flat.model_num,
        label_seq_A=_label_seq(structure) if reading.seqres else None,
        seqres=sequences,
        parents=parents,
        aliases=aliases,
    )


def _words(names: Any) -> NDArray[np.uint64]:
    """View 8-character columns as integers, which compare in one instruction."""
    columns: NDArray[np.uint64] = np.ascontiguousarray(names).view("<u8")[:, 0]
    return columns


def _label_seq(structure: gemmi.Structure) -> NDArray[np.int32]:
    """Return each atom's position in SEQRES; FlatStructure lacks it, so it is spread from the residues."""
    residues = [(residue.label_seq or 0, len(residue)) for model in structure for chain in model for residue in chain]
    numbers, lengths = zip(*residues, strict=True)
    return np.repeat(np.array(numbers, dtype=np.int32), lengths)


def _flatten(structure: gemmi.Structure) -> tuple[gemmi.FlatStructure, dict[str, str]]:
    """Return the flat columns; chains whose name fills the 8-byte column get a stand-in first."""
    try:
        return gemmi.FlatStructure(structure), {}
    except (ValueError, RuntimeError):
        stand_ins = _shorten_names(structure)
        return gemmi.FlatStructure(structure), {short: full for full, short in stand_ins.items()}


def _shorten_names(structure: gemmi.Structure) -> dict[str, str]:
    """Rename what FlatStructure refuses; return the stand-in of each long name."""
    stand_ins: dict[str, str] = {}

    def short(name: str) -> str:
        return name if len(name.encode()) < NAME_BYTES else stand_ins.setdefault(name, f"~{len(stand_ins)}")

    for model in structure:
        for chain in model:
            chain.name = short(chain.name)
            for residue in chain:
                residue.subchain = short(residue.subchain)
                residue.entity_id = short(residue.entity_id)
    return stand_ins
