"""From bytes to an `AtomTable`: PDB and mmCIF by gemmi, BinaryCIF by biotite, each also gzipped.

The table comes from gemmi's FlatStructure, whose columns numpy views without a loop over atoms. AMBER topologies and
small molecules are read by `amber` and `molecules`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import gemmi
import numpy as np

from pipeline.records import Reason
from pipeline.structures.atoms import (
    BLANK_CHAIN,
    NAME_BYTES,
    AtomTable,
    Links,
    UnusableInput,
    name_text,
    name_word,
)
from pipeline.structures.parsing import aligned_errors, amber, molecules, plain_pdb, structure_files
from pipeline.structures.parsing.structure_files import MOLECULES
from pipeline.structures.policy import CA_WORD, is_standard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

# Columns 79-80 hold a charge that 34 of 924 benchmark files fill with something else; gemmi then refuses the file.
PDB_LINE_LENGTH = 78
# What gemmi needs of a BinaryCIF block to see the same structure as in the text file.
BCIF_CATEGORIES = (
    "entry", "cell", "symmetry", "entity", "entity_poly", "entity_poly_seq", "struct_asym", "struct_conn",
    "pdbx_struct_mod_residue", "pdbx_struct_assembly", "pdbx_struct_assembly_gen", "pdbx_struct_oper_list", "atom_site",
    "exptl", "ma_qa_metric",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileReading:
    """How files are read; every field can change the result, so all are part of the recipe."""

    model: int = 1
    chain_names: Literal["author", "label"] = "author"
    assembly: str | None = None
    seqres: bool = False
    b_factors: bool = False

    def plain(self) -> dict[str, Any]:
        """Return the choices as JSON data; B-factors only where they are read, so that other keys stay."""
        chosen = asdict(self)
        return chosen if self.b_factors else {name: value for name, value in chosen.items() if name != "b_factors"}


PLAIN = FileReading()  # the only one that `plain_pdb` supports


def parse_structure(
    data: bytes, form: str, reading: FileReading, max_residues: int | None = None, *, beside: bytes = b""
) -> AtomTable:
    """Return the atoms in a file's bytes; any error of a parser becomes `UnusableInput`.

    `beside` holds the coordinates file of a topology.
    """
    try:
        if form in ("amber", *MOLECULES):
            return _simple(data, form, reading, beside)
        if form == "pdb":
            return _pdb(data, reading, max_residues)
        return _by_gemmi(data, form, reading, max_residues)
    except (ValueError, RuntimeError, LookupError, TypeError, ArithmeticError) as error:
        what = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnusableInput(Reason.PARSE_ERROR, what) from error


def _pdb(data: bytes, reading: FileReading, max_residues: int | None) -> AtomTable:
    if reading.chain_names == "label":
        what = "a PDB file has no label chain names; set structures.chain_names: author"
        raise UnusableInput(Reason.MISSING_CHAIN, what)
    if reading == PLAIN and (table := plain_pdb.read_plain_pdb(data, to_end=True)) is not None:
        return table
    data, chains = read_on(data)
    if reading != PLAIN or (table := plain_pdb.read_plain_pdb(data)) is None:
        _check_numbers(data)
        table = _with_likely_elements(_by_gemmi(_with_short_names(data), "pdb", reading, max_residues))
    return replace(table, notes={**table.notes, BEHIND_END: chains}) if chains else table


def _by_gemmi(data: bytes, form: str, reading: FileReading, max_residues: int | None) -> AtomTable:
    """Return the atoms in a file's bytes as gemmi reads them."""
    structure, is_predicted = _structure(data, form)
    if sum(model.count_atom_sites() for model in structure) == 0:
        raise UnusableInput(Reason.NO_ATOMS, "the file holds no atoms")
    if reading.model > len(structure):  # counted from 1, whatever its number is
        what = f"the file has {len(structure)} models, number {reading.model} was requested"
        raise UnusableInput(Reason.MISSING_MODEL, what)
    for index in reversed(range(len(structure))):
        if index != reading.model - 1:
            del structure[index]
    structure.setup_entities()
    if reading.seqres:
        _check_alignment(structure, max_residues)
        structure.assign_label_seq_id(force=False)
    if reading.assembly is not None:
        _build_assembly(structure, reading.assembly, max_residues)
    table = _table(structure, reading)
    return replace(table, is_predicted=is_predicted) if reading.b_factors else table


def _simple(data: bytes, form: str, reading: FileReading, beside: bytes) -> AtomTable:
    """Return the atoms of a file that holds one model and no chain names or assemblies to choose from."""
    if reading.model != 1:
        raise UnusableInput(Reason.MISSING_MODEL, f"the file has 1 model, number {reading.model} was requested")
    if reading.assembly is not None:
        what = f"no assembly {reading.assembly!r} in the file: its format has no assemblies"
        raise UnusableInput(Reason.MISSING_ASSEMBLY, what)
    return amber.read_amber(data, beside) if form == "amber" else molecules.read_molecule(data, form)


def _structure(data: bytes, form: str) -> tuple[gemmi.Structure, bool]:
    """Parse by format, and say whether it is a prediction."""
    if form == "pdb":
        return gemmi.read_pdb_string(data, max_line_length=PDB_LINE_LENGTH), aligned_errors.pdb_is_predicted(data)
    block = _bcif_block(data) if form == "bcif" else _cif_block(data)
    structure_files.check_operations(block.find_values("_pdbx_struct_assembly_gen.oper_expression"))
    return gemmi.make_structure_from_block(block), aligned_errors.cif_is_predicted(block)  # with all its assemblies


def _cif_block(data: bytes) -> gemmi.cif.Block:
    """Return the first block with atoms."""
    document = gemmi.cif.read_string(data)
    blocks = [block for block in document if block.find_values("_atom_site.id")] or list(document)
    if any(block.find_values("_atom_site_fract_x") or block.find_values("_atom_site_Cartn_x") for block in blocks):
        what = "a core CIF (small-molecule crystal), not an mmCIF; convert the molecule to SDF or MOL2"
        raise UnusableInput(Reason.UNKNOWN_FORMAT, what)
    return blocks[0]


def _bcif_block(data: bytes) -> gemmi.cif.Block:
    """Turn BinaryCIF into the same block as its text form, so that one reader interprets both."""
    import msgpack
    from biotite.file import DeserializationError, InvalidFileError
    from biotite.structure.io.pdbx import BinaryCIFFile
    from msgpack.exceptions import UnpackException

    try:
        content = msgpack.unpackb(data, use_list=True, raw=False)
        structure_files.check_columns(content, BCIF_CATEGORIES)
        source: Any = BinaryCIFFile.deserialize(content).block
        block = gemmi.cif.Block("bcif")
        for name in BCIF_CATEGORIES:
            if name in source:
                block.set_mmcif_category(f"_{name}.", {tag: _values(column) for tag, column in source[name].items()})
    except (InvalidFileError, DeserializationError, UnpackException, AttributeError) as error:
        raise UnusableInput(Reason.PARSE_ERROR, f"not BinaryCIF: {type(error).__name__} {error}"[:200]) from error
    return block


def _values(column: Any) -> list[str | bool | None]:
    """Return a BinaryCIF column as gemmi takes it: False for inapplicable (.), None for unknown (?)."""
    values: list[str | bool | None] = column.as_array(str).tolist()
    if column.mask is not None:
        for state, stand_in in ((1, False), (2, None)):
            for index in np.flatnonzero(column.mask.array == state).tolist():
                values[index] = stand_in
    return values


def _check_alignment(structure: gemmi.Structure, max_residues: int | None) -> None:
    """Refuse sequences so long that aligning them with a chain would take more than `max_residues` squared bytes."""
    observed = max((len(chain) for chain in structure[0]), default=0)
    named = max((len(entity.full_sequence) for entity in structure.entities), default=0)
    if max_residues is not None and observed * named > max_residues**2:
        what = f"a SEQRES of {named:,} residues; structures.max_residues is {max_residues:,}"
        raise UnusableInput(Reason.TOO_MANY_RESIDUES, what)


def _build_assembly(structure: gemmi.Structure, name: str, max_residues: int | None) -> None:
    """Replace the model by a biological assembly; copies of chain A are A, A-2, A-3, by operation."""
    assembly = next((candidate for candidate in structure.assemblies if candidate.name == name), None)
    if assembly is None:
        known = ", ".join(candidate.name for candidate in structure.assemblies) or "none"
        raise UnusableInput(Reason.MISSING_ASSEMBLY, f"no assembly {name!r} in the file (it has: {known})")
    structure.merge_chain_parts()
    source = structure[0]
    copies = _copies(assembly, source)
    residues = sum(residue.subchain in members for _, members in copies for chain in source for residue in chain)
    if max_residues is not None and residues > max_residues:
        what = f"{residues:,} residues in assembly {name}, waters included; structures.max_residues is {max_residues:,}"
        raise UnusableInput(Reason.TOO_MANY_RESIDUES, what)
    built = gemmi.Model(source.num)
    names = {chain.name for chain in source}
    for number, (transform, members) in enumerate(copies, start=1):
        copy = source.clone()
        copy.transform_pos_and_adp(transform)
        for chain in copy:
            for index in reversed(range(len(chain))):
                if chain[index].subchain not in members:
                    del chain[index]
            if number > 1:
                _rename_copy(chain, number, names)
            if len(chain):
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


def _rename_copy(chain: gemmi.Chain, number: int, taken: set[str]) -> None:
    """Name a copy after its chain and its operation, and never like a chain that the file has."""
    suffix = f"-{number}"
    while chain.name + suffix in taken:
        suffix = f"-{suffix}"
    chain.name += suffix
    for residue in chain:
        residue.subchain += suffix


def _table(structure: gemmi.Structure, reading: FileReading) -> AtomTable:
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
        parents={
            residue.res_id.name: residue.parent_comp_id for residue in structure.mod_residues if residue.parent_comp_id
        },
        aliases=aliases,
        b_iso_A=flat.b_iso if reading.b_factors else None,
        links=partial(_links, structure, flat, aliases, is_assembly=reading.assembly is not None),
    )


def _sequences(structure: gemmi.Structure, reading: FileReading) -> dict[str, tuple[str, ...]]:
    """Return the full sequence (SEQRES) of each polymer chain; the copies in an assembly have that of their chain."""
    by_subchain = {name: entity.full_sequence for entity in structure.entities for name in entity.subchains}
    sequences = {}
    for chain in structure[0]:
        polymer = chain.get_polymer()
        subchain = polymer.subchain_id() if len(polymer) else ""
        sequence = by_subchain.get(subchain) or by_subchain.get(subchain.rpartition("-")[0].rstrip("-"))
        if sequence:
            sequences[(chain.name if reading.chain_names == "author" else subchain) or BLANK_CHAIN] = tuple(sequence)
    return sequences


def _words(names: Any) -> NDArray[np.uint64]:
    """View 8-character columns as integers, which compare in one instruction."""
    return np.ascontiguousarray(names).view("<u8")[:, 0]


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


COVALENT = (gemmi.ConnectionType.Covale, gemmi.ConnectionType.Disulf)
COPY_MARK = "-"
End: TypeAlias = "tuple[int, int, int, int, int]"  # chain, number, insertion code, residue name, atom name
Pair: TypeAlias = "tuple[int, int]"


def _links(
    structure: gemmi.Structure, flat: gemmi.FlatStructure, aliases: Mapping[str, str], *, is_assembly: bool
) -> Links:
    """Return the pairs of atoms that a file says are bonded; contacts of metals and of hydrogen bonds are not."""
    named = _in_order(_connected(structure, flat, aliases, is_assembly=is_assembly))
    bare = _in_order(_conect(structure, flat)).keys() - named.keys()
    atoms_L2 = np.array([*named, *sorted(bare)], dtype=np.int64).reshape(-1, 2)
    return Links(atoms_L2, np.arange(len(atoms_L2)) < len(named))


def _in_order(pairs: Iterable[Pair]) -> dict[Pair, None]:
    """Return each pair once, its lower atom first, leaving out an atom with itself."""
    return dict.fromkeys((min(pair), max(pair)) for pair in pairs if pair[0] != pair[1])


def _connected(
    structure: gemmi.Structure, flat: gemmi.FlatStructure, aliases: Mapping[str, str], *, is_assembly: bool
) -> Iterator[Pair]:
    """Yield the rows of each covalent connection within the file, for every copy of its chains.

    Alternatives share an address, and a policy keeps one of them.
    """
    wanted = [
        (connection.partner1, connection.partner2)
        for connection in structure.connections
        if connection.type in COVALENT and connection.asu != gemmi.Asu.Different
    ]
    if not wanted:
        return
    name_A, number_A, chain_A = _words(flat.atom_names), np.asarray(flat.resnums), _words(flat.chain_ids)
    present = {name_text(code) for code in np.unique(chain_A)} if is_assembly else set()
    short = {full: stand_in for stand_in, full in aliases.items()}
    ends: list[list[End]] = []
    for partners in wanted:
        name = partners[0].chain_name
        copies = sorted(other[len(name) :] for other in present if other.startswith(name + COPY_MARK))
        ends += [[_end(partner, short, copy) for partner in partners] for copy in ["", *copies]]
    numbers, names = ({end[place] for pair in ends for end in pair} for place in (1, 4))
    maybe = np.flatnonzero(np.isin(number_A, [*numbers]) & np.isin(name_A, np.array([*names], np.uint64)))
    columns = (chain_A, number_A, np.asarray(flat.icodes), _words(flat.residue_names), name_A)
    rows: defaultdict[End, list[int]] = defaultdict(list)
    for row, *address in zip(maybe.tolist(), *(column[maybe].tolist() for column in columns), strict=True):
        rows[tuple(address)].append(row)
    for left, right in ends:
        yield from product(rows.get(left, ()), rows.get(right, ()))


def _end(address: gemmi.AtomAddress, short: Mapping[str, str], copy: str) -> End:
    """Return an atom's address in the terms of the columns."""
    chain, seqid = address.chain_name + copy, address.res_id.seqid
    number = 0 if seqid.num is None else int(seqid.num)
    names = (short.get(chain, chain), address.res_id.name, address.atom_name)
    chain_word, residue, atom = map(name_word, names)
    return chain_word, number, ord(seqid.icode), residue, atom


def _conect(structure: gemmi.Structure, flat: gemmi.FlatStructure) -> Iterator[Pair]:
    """Yield the rows of each CONECT pair; copies in an assembly share a serial number and are paired in order."""
    bonded, serial_A = structure.conect_map, np.asarray(flat.serials)
    wanted = [*bonded, *(serial for serials in bonded.values() for serial in serials)]
    rows: defaultdict[int, list[int]] = defaultdict(list)
    for row in np.flatnonzero(np.isin(serial_A, wanted)).tolist() if wanted else ():
        rows[int(serial_A[row])].append(row)
    for serial, others in bonded.items():
        for other in others:
            yield from zip(rows.get(serial, ()), rows.get(other, ()), strict=False)


# ---- lines of a PDB file before a parser reads them: chains behind END, numbers that are none, long names ----

ATOM_RECORDS = (b"ATOM", b"HETATM")
END = re.compile(rb"\nEND(?:\s*$|   )", re.MULTILINE)
BEHIND_END = "chains_behind_end"  # the note of a file that was read on
CHAIN_COLUMN, SERIAL = slice(21, 22), slice(6, 11)
COLUMNS = {"the residue number": slice(22, 26), "x": slice(30, 38), "y": slice(38, 46), "z": slice(46, 54)}
NUMBER = re.compile(rb" *[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)? *| *[-+]?(?:nan|inf) *", re.IGNORECASE)
RESIDUE_NUMBER = re.compile(rb" *-?\d* *|[A-Za-z][0-9A-Za-z]{3}")  # also in base 36


def read_on(data: bytes) -> tuple[bytes, int]:
    """Return a PDB file that ends with its first END, and how many chains stood behind that and now stand before it.

    Two files put together, as benchmarks of docking have them, have other chains behind the first END. A chain that was
    there before is another frame of a trajectory, and is left where it is; so are files with MODEL records.
    """
    end = _first_end(data)
    is_more = any(data.find(b"\n" + record, end) >= 0 for record in ATOM_RECORDS)
    if not is_more or data.startswith(b"MODEL ") or b"\nMODEL " in data:
        return data, 0
    kept, more, part, is_new = [data[:end]], set[bytes](), set[bytes](), False
    seen = {line[CHAIN_COLUMN] for line in data[:end].splitlines() if line.startswith(ATOM_RECORDS)}
    for line in data[end:].splitlines(keepends=True):
        record, chain = line[:6].rstrip(), line[CHAIN_COLUMN]
        if record == b"END":
            seen |= part
            part = set()
        elif record in ATOM_RECORDS and len(line) > COLUMNS["z"].stop:
            part.add(chain)
            is_new = chain not in seen
            more |= {chain} if is_new else set()
        if is_new and record in (*ATOM_RECORDS, b"TER", b"ANISOU"):
            kept.append(line[: SERIAL.start] + b"     " + line[SERIAL.stop :])  # no CONECT means these serials
    return b"".join([*kept, b"END\n"]) if more else data, len(more)


def _first_end(data: bytes) -> int:
    """Return where the first END record begins."""
    return found.start() + 1 if (found := END.search(data)) else len(data)


def _check_numbers(data: bytes) -> None:
    """Refuse a file with a coordinate or a residue number that is none, which a parser would take for 0."""
    data = data[: _first_end(data)]
    for start in plain_pdb.unusual_atoms(data):
        line = data[start : data.find(b"\n", start) % (len(data) + 1)]  # to the end of the line or of the file
        for what, columns in COLUMNS.items() if line.startswith((b"ATOM  ", b"HETATM")) else ():
            field, number = line[columns], NUMBER if len(what) == 1 else RESIDUE_NUMBER
            if not number.fullmatch(field) and len(line) >= columns.stop:
                at = data.count(b"\n", 0, start) + 1
                problem = f"line {at}: {what} is {field.decode('latin-1')!r}, not a number"
                raise UnusableInput(Reason.PARSE_ERROR, problem)


# Residues of GROMOS, such as LYSH; and what shows that such a letter is the first of a chain's name.
LONG_NAMES = re.compile(rb"^(ATOM  .{11}(?:(?:ASP|CYS|GLU|HIS|LYS)(?=H)|CYS(?=[12])|HIS(?=[12AB])|ARG(?=N))).", re.M)
LONG_CHAINS = re.compile(rb"^ATOM  .{11}(?:ALA|GLY|LEU|SER|VAL)[12ABHN]", re.M)


def _with_short_names(data: bytes) -> bytes:
    """Return a file without the fourth letters of residues, which gemmi would take for their chain's."""
    return data if LONG_CHAINS.search(data) else LONG_NAMES.sub(rb"\1 ", data)


ORGANIC = {"H": 1, "C": 6, "N": 7, "O": 8, "P": 15, "S": 16}
POSSIBLE = np.array([*ORGANIC.values(), 34, 119], np.uint8)  # in a standard residue; gemmi's 119 is deuterium


def _with_likely_elements(table: AtomTable) -> AtomTable:
    """Return a table in which an element that no standard residue has is the one that its atom's name begins with.

    Without a column of elements, as some programs of molecular dynamics write, CA and CD are calcium and cadmium where
    names begin a column early. A residue that is not standard is known by its N and C, and only its CA is looked at.
    """
    odd = np.flatnonzero(~np.isin(table.element_A, POSSIBLE))
    if not len(odd):
        return table
    has_n, has_c = (np.unique(table.resname_A[table.name_A == name_word(name)]) for name in ("N", "C"))
    names = {name: is_standard(name_text(name)) for name in np.unique(table.resname_A[odd]).tolist()}
    chained = set(np.intersect1d(has_n, has_c).tolist())
    element_A = table.element_A.copy()
    for atom, residue, name in zip(
        odd.tolist(), table.resname_A[odd].tolist(), table.name_A[odd].tolist(), strict=True
    ):
        if names[residue] or (name == CA_WORD and residue in chained):
            element_A[atom] = ORGANIC.get(name_text(name).lstrip("0123456789")[:1], element_A[atom])
    return replace(table, element_A=element_A)
