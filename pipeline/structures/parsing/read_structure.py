"""From bytes to an `AtomTable`: PDB and mmCIF by gemmi, BinaryCIF by biotite, each also gzipped.

The table comes from gemmi's FlatStructure, whose columns numpy views without a loop over atoms. Topologies of AMBER and
files of small molecules are read next door.
"""

from __future__ import annotations

import os
import stat
import zlib
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gemmi
import numpy as np

from pipeline.records import Reason
from pipeline.structures.atoms import BLANK_CHAIN, NAME_BYTES, AtomTable, Unusable
from pipeline.structures.parsing import amber, molecules, plain_pdb, unfolding
from pipeline.structures.parsing.file_bonds import links_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

BIOTITE = (1, 5)  # the first that reads masked columns


def has_biotite() -> bool:
    """Say whether there is a biotite that reads BinaryCIF, without importing it."""
    try:
        return tuple(int(part) for part in version("biotite").split(".")[:2]) >= BIOTITE
    except (PackageNotFoundError, ValueError):
        return False


HAS_BIOTITE = has_biotite()
PARSER = f"gemmi-{gemmi.__version__}"  # type: ignore[attr-defined]  # its stubs leave the version out
FORMATS = {
    ".pdb": "pdb",
    ".ent": "pdb",
    ".pdb1": "pdb",
    ".cif": "mmcif",
    ".mmcif": "mmcif",
    ".mcif": "mmcif",
    ".bcif": "bcif",
    **dict.fromkeys(amber.TOPOLOGIES, "amber"),
    ".sdf": "sdf",
    ".mol": "sdf",
    ".mol2": "mol2",
}
MOLECULES = ("sdf", "mol2")
EXTRA = {"amber": "parmed", "sdf": "rdkit", "mol2": "rdkit"}  # what the extra `molecules` installs to read them
REVISIONS = {"amber": amber.REVISION, "sdf": molecules.REVISION, "mol2": molecules.REVISION}
# Columns 79-80 hold a charge that 34 of 924 benchmark files fill with something else; gemmi then refuses the file.
PDB_LINE_LENGTH = 78
# What gemmi needs of a BinaryCIF block to see the same structure as in the text file.
BCIF_CATEGORIES = (
    "entry", "cell", "symmetry", "entity", "entity_poly", "entity_poly_seq", "struct_asym", "struct_conn",
    "pdbx_struct_mod_residue", "pdbx_struct_assembly", "pdbx_struct_assembly_gen", "pdbx_struct_oper_list", "atom_site",
)  # fmt: skip
GZIP_WINDOW = 31
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Reading:
    """How files are read; every field can change what comes out, so all of it is in the recipe."""

    model: int = 1
    chain_names: Literal["author", "label"] = "author"
    assembly: str | None = None
    seqres: bool = False


PLAIN = Reading()  # under which `plain_pdb` reads what gemmi would


def stat_file(path: Path, max_bytes: int) -> os.stat_result:
    """Return a file's state, refusing what cannot be read for reasons that show without reading."""
    if not HAS_BIOTITE and ".bcif" in path.suffixes[-2:]:
        raise Unusable(Reason.NEEDS_EXTRA, "BinaryCIF needs Python 3.11 and an extra: pip install 'pipeline[bcif]'")
    needed = EXTRA.get(FORMATS.get(_suffix(path), ""))
    if needed and find_spec(needed) is None:
        what = f"{_suffix(path)} needs {needed}, an extra: pip install 'pipeline[molecules]'"
        raise Unusable(Reason.NEEDS_EXTRA, what)
    try:
        state = path.stat()
    except FileNotFoundError:
        others = ", nor one ending in " + " ".join(amber.COORDINATES[1:]) if path.suffix == amber.COORDINATES[0] else ""
        raise Unusable(Reason.MISSING_FILE, f"no such file: {path}{others}") from None
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
    unfolded = bytearray()
    while data:
        member = zlib.decompressobj(GZIP_WINDOW)
        while not member.eof:
            if not data:
                raise Unusable(Reason.TRUNCATED_FILE, "the gzip stream ends early")
            try:
                unfolded += member.decompress(data, PIECE_BYTES)
            except zlib.error as error:
                raise Unusable(Reason.TRUNCATED_FILE, f"not a whole gzip file: {error}") from error
            if len(unfolded) > max_bytes:
                raise Unusable(Reason.FILE_TOO_LARGE, f"unfolds beyond structures.max_file_bytes ({max_bytes:,})")
            data = member.unconsumed_tail
        data = member.unused_data.lstrip(b"\0")
    return bytes(unfolded)


def format_of(path: Path) -> str:
    """Return the format that a file's name promises."""
    try:
        return FORMATS[_suffix(path)]
    except KeyError:
        known = " ".join(FORMATS)
        raise Unusable(
            Reason.UNKNOWN_FORMAT, f"{path.name}: the suffix is none of {known} (or these with .gz)"
        ) from None


def _suffix(path: Path) -> str:
    """Return what a file's name ends in but for .gz."""
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


@cache
def parser_of(form: str) -> str:
    """Name what reads a format, version included."""
    if form in EXTRA:
        return f"{EXTRA[form]}-{_version(EXTRA[form])}+{form}-{REVISIONS[form]}"
    if form == "pdb" and plain_pdb.REVISION:
        return f"{PARSER}+plain-{plain_pdb.REVISION}"
    return f"{PARSER}+biotite-{version('biotite')}" if form == "bcif" and HAS_BIOTITE else PARSER


def _version(package: str) -> str:
    """Return the version of a package, which conda may have installed without saying so."""
    try:
        return version(package)
    except PackageNotFoundError:
        return str(import_module(package).__version__)


def parse(
    data: bytes, form: str, reading: Reading, max_residues: int | None = None, *, beside: bytes = b""
) -> AtomTable:
    """Return the atoms in a file's bytes; whatever a parser does not like is one `Unusable`.

    The coordinates of a topology are in the file beside it.
    """
    if form in EXTRA:
        return _simple(data, form, reading, beside)
    if form == "pdb" and reading.chain_names == "label":
        raise Unusable(Reason.MISSING_CHAIN, "a PDB file has no label chain names; set structures.chain_names: author")
    if form == "pdb" and reading == PLAIN and (table := plain_pdb.read(data)) is not None:
        return table
    try:
        structure = _structure(data, form)
        if sum(model.count_atom_sites() for model in structure) == 0:
            raise Unusable(Reason.NO_ATOMS, "the file holds no atoms")
        _keep_model(structure, reading.model)
        structure.setup_entities()
        if reading.seqres:
            structure.assign_label_seq_id(force=False)
        if reading.assembly is not None:
            _build_assembly(structure, reading.assembly, max_residues)
        return _table(structure, reading)
    except (ValueError, RuntimeError, LookupError, TypeError) as error:  # UnicodeDecodeError is a ValueError
        what = " ".join(str(error).split())[:200] or type(error).__name__
        raise Unusable(Reason.PARSE_ERROR, what) from error


def _simple(data: bytes, form: str, reading: Reading, beside: bytes) -> AtomTable:
    """Return the atoms of a file that holds one model and no chain names or assemblies to choose from."""
    if reading.model != 1:
        raise Unusable(Reason.MISSING_MODEL, f"the file has 1 model, number {reading.model} was asked for")
    if reading.assembly is not None:
        raise Unusable(Reason.MISSING_ASSEMBLY, f"no assembly {reading.assembly!r} in the file: its format has none")
    return amber.read(data, beside) if form == "amber" else molecules.read(data, form)


def _keep_model(structure: gemmi.Structure, number: int) -> None:
    """Drop every model but one, counted from 1 whatever its number is."""
    if number > len(structure):
        raise Unusable(Reason.MISSING_MODEL, f"the file has {len(structure)} models, number {number} was asked for")
    for index in reversed(range(len(structure))):
        if index != number - 1:
            del structure[index]


def _structure(data: bytes, form: str) -> gemmi.Structure:
    """Parse by format; the block with atoms is taken where a document has several."""
    if form == "pdb":
        return gemmi.read_pdb_string(data, max_line_length=PDB_LINE_LENGTH)
    if form == "bcif":
        return _made(_bcif_block(data))
    document = gemmi.cif.read_string(data)
    blocks = [block for block in document if block.find_values("_atom_site.id")] or list(document)
    return _made(blocks[0])


def _made(block: gemmi.cif.Block) -> gemmi.Structure:
    """Return the structure of a block, whose assemblies gemmi writes out at once."""
    unfolding.check_operations(block.find_values("_pdbx_struct_assembly_gen.oper_expression"))
    return gemmi.make_structure_from_block(block)


def _bcif_block(data: bytes) -> gemmi.cif.Block:
    """Turn BinaryCIF into the block that its text form would be, so that one reader gives both their meaning."""
    import msgpack
    from biotite.file import DeserializationError, InvalidFileError
    from biotite.structure.io.pdbx import BinaryCIFFile
    from msgpack.exceptions import UnpackException

    try:
        content = msgpack.unpackb(data, use_list=True, raw=False)
        unfolding.check_columns(content, BCIF_CATEGORIES)
        source: Any = BinaryCIFFile.deserialize(content).block
        block = gemmi.cif.Block("bcif")
        for name in BCIF_CATEGORIES:
            if name in source:
                block.set_mmcif_category(f"_{name}.", {tag: _values(column) for tag, column in source[name].items()})
    except (InvalidFileError, DeserializationError, UnpackException, AttributeError) as error:
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


def _build_assembly(structure: gemmi.Structure, name: str, max_residues: int | None) -> None:
    """Replace the model by a biological assembly; copies of chain A are A, A-2, A-3, by operation."""
    assembly = next((one for one in structure.assemblies if one.name == name), None)
    if assembly is None:
        known = ", ".join(one.name for one in structure.assemblies) or "none"
        raise Unusable(Reason.MISSING_ASSEMBLY, f"no assembly {name!r} in the file (it has: {known})")
    structure.merge_chain_parts()
    source = structure[0]
    copies = _copies(assembly, source)
    residues = sum(_count_residues(source, members) for _, members in copies)
    if max_residues is not None and residues > max_residues:
        what = f"{residues:,} residues in assembly {name}, waters included; structures.max_residues is {max_residues:,}"
        raise Unusable(Reason.TOO_MANY_RESIDUES, what)
    built = gemmi.Model(source.num)
    for number, (transform, members) in enumerate(copies, start=1):
        for chain in _copied(source, members, transform):
            if number > 1:
                _rename_copy(chain, number, {one.name for one in source})
            built.add_chain(chain)
    del structure[0]
    structure.add_model(built)
    structure.merge_chain_parts()


def _copies(assembly: gemmi.Assembly, model: gemmi.Model) -> list[tuple[gemmi.Transform, set[str]]]:
    """Return the distinct operations of an assembly, the identity first, with the subchains that each one copies."""
    copies: dict[tuple[float, ...], tuple[gemmi.Transform, set[str]]] = {}
    for generator in assembly.generators:
        members = set(generator.subchains) or {
            residue.subchain for chain in model if chain.name in generator.chains for residue in chain
        }
        for operator in generator.operators:
            rows = [*operator.transform.mat.tolist(), operator.transform.vec.tolist()]
            key = tuple(round(number, 6) for row in rows for number in row)
            copies.setdefault(key, (operator.transform, set()))[1].update(members)
    return sorted(copies.values(), key=lambda copy: not copy[0].is_identity())


def _count_residues(model: gemmi.Model, members: set[str]) -> int:
    """Count the residues of some subchains."""
    return sum(residue.subchain in members for chain in model for residue in chain)


def _copied(model: gemmi.Model, members: set[str], transform: gemmi.Transform) -> list[gemmi.Chain]:
    """Return moved copies of the chains of a model, reduced to some subchains."""
    copy = model.clone()
    for chain in copy:
        for index in reversed(range(len(chain))):
            if chain[index].subchain not in members:
                del chain[index]
    copy.transform_pos_and_adp(transform)
    return [chain for chain in copy if len(chain)]


def _rename_copy(chain: gemmi.Chain, number: int, taken: set[str]) -> None:
    """Name a copy after its chain and its operation, and never like a chain that the file has."""
    suffix = f"-{number}"
    while chain.name + suffix in taken:
        suffix = f"-{suffix}"
    chain.name += suffix
    for residue in chain:
        residue.subchain += suffix


def _table(structure: gemmi.Structure, reading: Reading) -> AtomTable:
    """View gemmi's flat columns as an `AtomTable`."""
    sequences = _sequences(structure, reading) if reading.seqres else {}
    flat, aliases = _flatten(structure)
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
        hetero_A=flat.het_flags,
        label_seq_A=_label_seq(structure) if reading.seqres else None,
        seqres=sequences,
        parents={one.res_id.name: one.parent_comp_id for one in structure.mod_residues if one.parent_comp_id},
        aliases=aliases,
        links=partial(links_of, structure, flat, aliases, is_assembly=reading.assembly is not None),
    )


def _sequences(structure: gemmi.Structure, reading: Reading) -> dict[str, tuple[str, ...]]:
    """Return the full sequence (SEQRES) of each polymer chain; the copies in an assembly have that of their chain."""
    by_subchain = {name: entity.full_sequence for entity in structure.entities for name in entity.subchains}
    found = {}
    for chain in structure[0]:
        polymer = chain.get_polymer()
        subchain = polymer.subchain_id() if len(polymer) else ""
        sequence = by_subchain.get(subchain) or by_subchain.get(subchain.rpartition("-")[0].rstrip("-"))
        if sequence:
            found[(chain.name if reading.chain_names == "author" else subchain) or BLANK_CHAIN] = tuple(sequence)
    return found


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
