"""Bytes that are no structure are refused with a reason, never with a traceback, and never without bound."""

from __future__ import annotations

import gzip
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.records import Reason
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.parsing import structure_files as read_module
from pipeline.structures.parsing.read_structure import FileReading, parse_structure
from pipeline.structures.parsing.structure_files import format_of, read_file
from pipeline.structures.policy import Policy, apply_policy
from tests.structures.pdb_text import chain

PDB = (chain("A", "ALA", "CYS", "ASP") + "END\n").encode()
CIF_HEAD = b"data_x\nloop_\n_atom_site.id\n_atom_site.type_symbol\n"


def reason_of(path: Path, max_bytes: int = 1 << 20) -> Reason:
    with pytest.raises(UnusableInput) as caught:
        apply_policy(parse_structure(read_file(path, max_bytes), format_of(path), FileReading()), Policy())
    assert caught.value.detail
    return caught.value.reason


BAD_FILES = {
    "empty.pdb": (b"", Reason.EMPTY_FILE),
    "blank.cif": (b" \n\n", Reason.EMPTY_FILE),
    "junk.pdb": (b"\x00\xff\x8a\x01junk" * 400, Reason.NO_ATOMS),
    "junk.cif": (b"\x00\xff\x8a\x01junk" * 400, Reason.PARSE_ERROR),
    "junk.bcif": (b"\x00\xff\x8a\x01junk" * 400, Reason.PARSE_ERROR),
    "text.bcif": (b"data_x\n", Reason.PARSE_ERROR),
    "noatoms.cif": (b"data_x\n_cell.length_a 1\n", Reason.NO_ATOMS),
    "ragged.cif": (CIF_HEAD + b"1 C 2\n", Reason.PARSE_ERROR),
    "coordinates.cif": (CIF_HEAD + b"1 C\n", Reason.NO_ATOMS),
    "short.pdb.gz": (gzip.compress(PDB * 50, mtime=0)[:-20], Reason.TRUNCATED_FILE),
    "not.pdb.gz": (PDB, Reason.UNKNOWN_FORMAT),
    "empty.pdb.gz": (gzip.compress(b"", mtime=0), Reason.EMPTY_FILE),
    "bomb.pdb.gz": (gzip.compress(b"\0" * (8 << 20), mtime=0), Reason.FILE_TOO_LARGE),
    "large.pdb": (b" " * (2 << 20), Reason.FILE_TOO_LARGE),
    "structure.docx": (PDB, Reason.UNKNOWN_FORMAT),
    "structure": (PDB, Reason.UNKNOWN_FORMAT),
}


def test_bad_files_are_refused_with_the_right_reason(tmp_path: Path) -> None:
    for name, (data, reason) in BAD_FILES.items():
        (tmp_path / name).write_bytes(data)
        assert reason_of(tmp_path / name) is reason, name


def test_a_missing_file_a_folder_and_an_impossible_name_are_refused(tmp_path: Path) -> None:
    assert reason_of(tmp_path / "none.pdb") is Reason.MISSING_FILE
    (tmp_path / "folder.pdb").mkdir()
    assert reason_of(tmp_path / "folder.pdb") is Reason.UNREADABLE_FILE
    assert reason_of(tmp_path / ("x" * 300 + ".pdb")) is Reason.UNREADABLE_FILE
    assert reason_of(tmp_path / "nul\0.pdb") is Reason.UNREADABLE_FILE


def test_a_file_without_permission_is_refused(unprivileged: Path) -> None:
    path = unprivileged / "closed.pdb"
    path.write_bytes(PDB)
    path.chmod(0)
    assert reason_of(path) is Reason.UNREADABLE_FILE


def test_a_gzip_file_of_several_members_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "two.pdb.gz"
    for parts in ((PDB[:200], PDB[200:]), (b"REMARK\n" * (1 << 20), b"", PDB)):  # more than what unfolds at once
        path.write_bytes(b"".join(map(gzip.compress, parts)))
        assert read_file(path, 1 << 24) == b"".join(parts)


@given(st.binary(max_size=300), st.sampled_from(["pdb", "mmcif", "bcif"]))
def test_no_bytes_make_the_parser_fail_in_any_other_way(data: bytes, form: str) -> None:
    with suppress(UnusableInput):
        apply_policy(parse_structure(data, form, FileReading()), Policy())


@given(st.floats(0, 1), st.integers(0, 255), st.sampled_from(["pdb", "mmcif"]))
def test_one_changed_byte_never_crashes_a_read(place: float, value: int, form: str) -> None:
    text = PDB if form == "pdb" else long_named_cif("A")
    position = int(place * (len(text) - 1))
    data = text[:position] + bytes([value]) + text[position + 1 :]
    with suppress(UnusableInput):
        apply_policy(parse_structure(data, form, FileReading(seqres=True)), Policy())


def long_named_cif(chain_name: str) -> bytes:
    columns = """
        group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id label_entity_id label_seq_id
        pdbx_PDB_ins_code Cartn_x Cartn_y Cartn_z occupancy B_iso_or_equiv auth_seq_id auth_asym_id pdbx_PDB_model_num
    """.split()  # noqa: SIM905 - a page of quoted names otherwise
    head = "data_x\nloop_\n" + "".join(f"_atom_site.{column}\n" for column in columns)
    rows = [
        f"ATOM {i} {name[0]} {name} . {residue} {asym} 1 {seq} ? {i}.0 0 0 1 1 {seq} {asym} 1\n"
        for asym in (chain_name, "B")
        for seq, residue in enumerate(["ALA", "GLY"], 1)
        for i, name in enumerate(["N", "CA", "C"], 1)
    ]
    return (head + "".join(rows)).encode()


@pytest.mark.parametrize("names", ["author", "label"])
def test_chain_names_of_any_length_are_kept(names: str) -> None:
    data = long_named_cif("HeavyChain-of-antibody-1")
    structure = apply_policy(parse_structure(data, "mmcif", FileReading(chain_names=names)), Policy())
    assert [(one.name, one.sequence) for one in structure.chains] == [("HeavyChain-of-antibody-1", "AG"), ("B", "AG")]


REMARK_350 = (
    "REMARK 350 BIOMOLECULE: 1\nREMARK 350 APPLY THE FOLLOWING TO CHAINS: {}\n"
    "REMARK 350   BIOMT1   1  1.000000  0.000000  0.000000        0.00000\n"
    "REMARK 350   BIOMT2   1  0.000000  1.000000  0.000000        0.00000\n"
    "REMARK 350   BIOMT3   1  0.000000  0.000000  1.000000        0.00000\n"
)
SECOND = (
    "REMARK 350   BIOMT1   2 -1.000000  0.000000  0.000000       50.00000\n"
    "REMARK 350   BIOMT2   2  0.000000 -1.000000  0.000000        0.00000\n"
    "REMARK 350   BIOMT3   2  0.000000  0.000000  1.000000        0.00000\n"
)


def assembled(lines: str, remarks: str, **choices: object) -> list[tuple[str, str]]:
    reading = FileReading(assembly="1", **choices)
    structure = apply_policy(parse_structure((remarks + lines).encode(), "pdb", reading), Policy())
    return [(one.name, one.sequence) for one in structure.chains]


def test_a_copy_never_takes_the_name_of_another_chain() -> None:
    cif = long_named_cif("A").replace(b" B 1 ", b" A-2 1 ").replace(b" B 1\n", b" A-2 1\n")
    structure = apply_policy(parse_structure(cif, "mmcif", FileReading()), Policy())
    assert [one.name for one in structure.chains] == ["A", "A-2"]
    lines = chain("A", "ALA", "CYS") + "END\n"
    assert assembled(lines, REMARK_350.format("A, B, C") + SECOND) == [("A", "AC"), ("A-2", "AC")]


def test_an_assembly_beyond_the_limit_is_refused_before_it_is_built() -> None:
    data = (REMARK_350.format("A") + SECOND + PDB.decode()).encode()
    with pytest.raises(UnusableInput) as caught:
        parse_structure(data, "pdb", FileReading(assembly="1"), max_residues=5)
    assert caught.value.reason is Reason.TOO_MANY_RESIDUES


def test_binary_cif_without_its_extra_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_module, "HAS_BIOTITE", False)
    (tmp_path / "x.bcif").write_bytes(b"\x80")
    with pytest.raises(UnusableInput, match=r"\[bcif\]") as caught:
        read_file(tmp_path / "x.bcif", 100)
    assert caught.value.reason is Reason.NEEDS_EXTRA
