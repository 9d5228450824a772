"""What the quick reader of plain PDB files returns is what gemmi returns, to the bit; it leaves alone what is odd."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.structures.atoms import AtomTable, sites_of
from pipeline.structures.parsing import plain_pdb
from pipeline.structures.parsing.read_structure import FileReading, parse_structure, read_on
from pipeline.structures.policy import Policy, Structure, apply_policy
from pipeline.structures.synthetic import complex_pdb
from tests.structures.pdb_text import atom, chain, residue

OTHERS = ("seqres", "parents", "aliases", "label_seq_A", "notes", "b_iso_A", "is_predicted")
POLYMERS = "entity_A"  # goes by TER records, of which no policy makes anything for the residues of plain files
COLUMNS = tuple(
    field.name
    for field in fields(AtomTable)
    if field.name.endswith(("_A", "_A3")) and field.name not in (*OTHERS, POLYMERS)
)
PROTEIN = chain("A", "ALA", "GLY", "TRP") + chain("B", "CYS", "ASP")
DNA = ("P", "O5'", "C5'", "C4'", "C3'", "O3'", "C1'")


def by_gemmi(data: bytes) -> AtomTable:
    """Parse as if there were no quick reader."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_pdb, "read_plain_pdb", lambda _, **_how: None)
        return parse_structure(data, "pdb", FileReading())


def is_plain(data: bytes) -> bool:
    """Say whether the quick reader reads this; if it does, it must be right."""
    data, _ = read_on(data)  # as every file is before it comes here
    ours = plain_pdb.read_plain_pdb(data)
    if ours is None:
        return False
    theirs = by_gemmi(data)
    if not ours.notes:  # no waters, which are only counted
        for name in COLUMNS:
            is_equal(name, getattr(ours, name), getattr(theirs, name))
        assert [getattr(ours, name) for name in OTHERS] == [getattr(theirs, name) for name in OTHERS]
        assert sites_of(ours).first_S.tolist() == sites_of(theirs).first_S.tolist()
    ours, theirs = (apply_policy(table, Policy(ligands="keep")) for table in (ours, theirs))
    for field in fields(Structure):
        if field.name != "links":
            is_equal(field.name, getattr(ours, field.name), getattr(theirs, field.name))
    for name in ("atoms_L2", "covalent_L"):
        is_equal(name, getattr(ours.links(), name), getattr(theirs.links(), name))
    return True


def test_waters_whose_number_is_not_in_its_columns_are_left_to_gemmi() -> None:
    for number in ("1A  ", "12  ", "1   ", " 1  ", "  1A", "- 1 ", "   -", "    "):
        assert not is_plain((PROTEIN + WATERS.replace(" 900 ", number + " ", 1)).encode()), number
    for number in ("   1", "  -1", "  12", " -12", " 900", "-123", "1234"):
        assert is_plain((PROTEIN + WATERS.replace(" 900 ", number + "B", 1)).encode()), number


def is_equal(name: str, mine: object, other: object) -> None:
    """Require two values to be equal, to the bit where they are arrays."""
    if isinstance(mine, np.ndarray) and isinstance(other, np.ndarray):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape), name
        assert np.ascontiguousarray(mine).tobytes() == np.ascontiguousarray(other).tobytes(), name
    else:
        assert mine == other, name


@pytest.mark.parametrize(("folder", "least"), [("complexes", 3), ("pairs", 12)])
def test_real_files_are_read_as_gemmi_reads_them(structures: Path, folder: str, least: int) -> None:
    paths = sorted((structures / folder).glob("*.pdb*"))
    plain = [path.name for path in paths if is_plain(unzipped(path))]
    assert len(plain) >= least, f"{len(plain)} of {len(paths)}"


def unzipped(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


WATERS = "".join(atom("O", "HOH", name, 900 + at, record="HETATM") for at, name in enumerate("ABA"))
PLAIN = {
    "no END, no TER": residue("ALA", "A", 1),
    "one atom": atom("CA", "ALA", "A", 1),
    "header": "HEADER    X\nREMARK   2\n\nREMARK 350 BIOMOLECULE: 1\nSEQRES   1 A    3  ALA GLY TRP\n" + PROTEIN,
    "END, then anything": PROTEIN + "END\nCONECT    1    2\nHETATM\n",
    "END cut short": PROTEIN + "END",
    "CR LF": PROTEIN.replace("\n", "\r\n"),
    "blank chain": residue("ALA", " ", 1) + residue("GLY", " ", 2),
    "lower-case chain": residue("ALA", "a", 1),
    "chain in two pieces": residue("ALA", "A", 1) + residue("GLY", "B", 1) + residue("TRP", "A", 2),
    "same number in two pieces of a chain": residue("ALA", "A", 1) + residue("GLY", "B", 1) + residue("TRP", "A", 1),
    "TER within a chain, twice": chain("A", "ALA") + chain("A", "GLY", first=2),
    "TER twice": PROTEIN + "TER\n",
    "TER before all": "TER\n" + PROTEIN,
    "second piece of a chain ends": residue("ALA", "A", 1) + residue("GLY", "B", 1) + chain("A", "TRP", first=2),
    "number that falls": residue("ALA", "A", 9) + residue("GLY", "A", 3) + residue("TRP", "A", -12),
    "insertion codes": "".join(residue("ALA", "A", 52, icode=code) for code in " BAZ"),
    "numbers of all widths": "".join(atom("CA", "ALA", "A", number) for number in (-999, -10, -1, 0, 7, 42, 512, 9999)),
    "alternatives": "".join(atom("CA", "ALA", "A", 1, altloc=code, occupancy=0.5) for code in "AB1?a"),
    "occupancies": "".join(
        atom(f"C{n}", "ALA", "A", 1, occupancy=value) for n, value in enumerate((0, 0.33, 1, -1, 9.99, -0.0, 100))
    ),
    "coordinates": "".join(
        atom(f"C{n}", "ALA", "A", 1, xyz=xyz)
        for n, xyz in enumerate([(-999.999, 9999.999, -0.001), (-0.0, 0.0, 0.1), (-99.5, -9.875, 1234.567)])
    ),
    "hydrogens": "".join(atom(name, "ALA", "A", 1, element="H") for name in ("H", "HA", "HB1", "1HB", "HB11")),
    "names": "".join(atom(name, "ALA", "A", 1, element="C") for name in ("C", "CA", "CA1", "CA12", "C*'", '"C')),
    "selenium": atom("SE", "MET", "A", 1, element="SE"),
    "DNA": "".join(residue(name, "A", 1 + n, DNA) for n, name in enumerate((" DA", " DG", " DC", " DT"))),
    "RNA and protein": residue("  A", "A", 1, DNA) + residue("  U", "A", 2, DNA) + residue("ALA", "B", 1),
    "segments": PROTEIN.replace(" 20.00          ", " 20.00      PROA"),
    "charges": PROTEIN.replace("\n", "1+\n").replace("TER1+", "TER"),
    "waters": PROTEIN + WATERS + "END\n",
    "waters with alternatives": PROTEIN + WATERS + WATERS.splitlines(keepends=True)[-1] + "TER\n",
    "waters between chains": chain("A", "ALA") + WATERS.replace("HOH B", "HOH A") + chain("B", "GLY"),
    "waters in CR LF": (PROTEIN + WATERS).replace("\n", "\r\n"),
    "TER within a chain": PROTEIN + residue("ALA", "B", 3),
    "peptide and nucleotide in one chain": residue("ALA", "A", 1) + residue("  A", "A", 2, DNA),
    "long lines": PROTEIN.replace("\n", " " * 60 + "\n"),
}


ODD_BYTES = b"\0\t\n\r \x0b\x0c\x7f\x80\xffAaHhXx0159.-+*eENTER'\""
RECORDS = """
HEADER TITLE COMPND SOURCE KEYWDS EXPDTA AUTHOR REVDAT JRNL REMARK SEQRES OBSLTE SPLIT CAVEAT NUMMDL MDLTYP SPRSDE DBREF
DBREF1 DBREF2 SEQADV MODRES HET HETNAM HETSYN FORMUL HELIX SHEET TURN SSBOND LINK LINKR CISPEP SITE CRYST1 ORIGX1 SCALE1
SCALE2 SCALE3 MTRIX1 MTRIX3 MODEL ATOM ANISOU SIGATM SIGUIJ TER HETATM ENDMDL CONECT MASTER END TERX ENDX atom hetatm
ter end remark data_x {"data_
""".split()  # noqa: SIM905 - a page of quoted names otherwise
TAILS = (
    "",
    " ",
    "   1",
    "   2 RESOLUTION.    1.80 ANGSTROMS.",
    " 350 BIOMOLECULE: 1",
    "   3   TLS GROUP : 1",
    " 1 A    3  ALA GLY TRP",
    "    1  N   ALA A   1       3.800   0.000   0.000  1.00 20.00           N  ",
    "    1    2    3",
    "   10.000   10.000   10.000  90.00  90.00  90.00 P 1",
    "   10.000   10.000   10.000   0.00  90.00  90.00 P 1",
    "\0",
    "\xe5" * 90,
)
FIELDS = {
    (12, 16): (" CA ", "CA  ", "  CA", "    ", "C A ", "HG11", "1HB ", "CA\t ", " \0A ", "C'* "),
    (16, 17): (" ", "A", "1", "a", "\t", "\0", "?"),
    (17, 20): ("ALA", "GLY", "MSE", "HOH", " DA", "DA ", "  A", "A  ", "   ", "ala", "UNK", "SOL", "GLX"),
    (20, 22): (" A", "A ", "AA", "  ", " B", " 1", " a", "\0A", " \t"),
    (22, 26): ("   1", "  -1", "-999", "9999", "A000", "    ", "1   ", "0001", " 1 1", "  1.", "+  1", "  +1", "--11"),
    (26, 27): (" ", "A", "a", "Z", "1", "\t", "\r", "@", "["),
    (30, 38): (
        "   0.000", "  -0.000", "-999.999", "9999.999", " 12.3456", "     nan", "    1e30", "********", "        ",
        "  1.00 0", "00000001", "   .5000", "   -.500", "  +1.000", "- 12.000", "  1 .000", "   1.0 0", "   0,000",
        "  00.000", "12345678", "     inf", "\t  1.000",
    ),
    (38, 46): ("   1.234", "-123.456", " 1.5E+02", "  1.23.4", "   1-000"),
    (46, 54): ("  -1.234", "-.234567", "1234.567", "  --.000", "  -1. 00"),
    (54, 60): ("  1.00", "  0.50", " -1.00", "      ", "100.00", "  .500", "1.0000", "   nan", "  1.0 ", "  -.50"),
    (60, 72): (" 20.00      ", "      " * 2, "*" * 12, "\n" * 12, "\0" + " " * 11),
    (72, 76): ("PROA", "    ", "A   ", "   A"),
    (76, 78): (" C", "C ", " c", "SE", "Se", " D", "  ", "ZN", "X ", "1+", "\n ", " \t", " *"),
}  # fmt: skip

Change = tuple[int, int, int]


def field_changed(lines: list[str], at: int, value: int) -> None:
    (first, last), texts = list(FIELDS.items())[value % len(FIELDS)]
    lines[at] = lines[at][:first] + texts[value // len(FIELDS) % len(texts)] + lines[at][last:]


def field_changed_in_many(lines: list[str], at: int, value: int) -> None:
    for line in range(at, min(at + 1 + value % 9, len(lines))):
        field_changed(lines, line, value)


def byte_changed(lines: list[str], at: int, value: int) -> None:
    column = value % max(1, len(lines[at]))
    lines[at] = lines[at][:column] + chr(ODD_BYTES[value // 97 % len(ODD_BYTES)]) + lines[at][column + 1 :]


def record_added(lines: list[str], at: int, value: int) -> None:
    lines.insert(at, RECORDS[value % len(RECORDS)].ljust(6) + TAILS[value // len(RECORDS) % len(TAILS)] + "\n")


def line_moved(lines: list[str], at: int, value: int) -> None:
    lines.insert(value % len(lines), lines.pop(at))


def line_doubled(lines: list[str], at: int, value: int) -> None:
    lines.insert(value % len(lines), lines[at])


def line_shortened(lines: list[str], at: int, value: int) -> None:
    lines[at] = lines[at][: value % 81] + "\n" * (value % 3 > 0)


def ter_added(lines: list[str], at: int, value: int) -> None:
    lines.insert(at, ("TER\n", "TER   \n", "TER", "TER\r\n", "TER   12\n")[value % 5 if value % 2 else 0])


def all_lines_changed(lines: list[str], at: int, value: int) -> None:
    old, new = (("\n", "\r\n"), ("\n", "  \n"), ("\n", " \0\n"), ("ATOM", "HETATM"), ("TER", ""), ("TER\n", ""))[
        value % 6
    ]
    lines[:] = [line.replace(old, new) for line in lines]


CHANGES: tuple[Callable[[list[str], int, int], None], ...] = (
    field_changed, field_changed, field_changed, field_changed_in_many, byte_changed, record_added, line_moved,
    line_doubled, line_shortened, ter_added, ter_added, lambda lines, at, _: lines.pop(at), all_lines_changed,
)  # fmt: skip
BASES = (
    complex_pdb(1, 6, 5).decode(),
    PROTEIN + "END\n",
    PLAIN["RNA and protein"] + "TER\nEND",
    PLAIN["chain in two pieces"],
    PLAIN["TER within a chain, twice"],
    PLAIN["insertion codes"] + PLAIN["alternatives"],
    PLAIN["waters"],
    PLAIN["waters between chains"],
)
changes = st.lists(
    st.tuples(st.integers(0, len(CHANGES) - 1), st.integers(0, 9999), st.integers(0, 99_999)), max_size=5
)


def changed(base: str, some: list[Change]) -> bytes:
    """Return a file with some things done to it."""
    lines = base.splitlines(keepends=True)
    for change, at, value in some:
        if lines:
            CHANGES[change](lines, at % len(lines), value)
    return "".join(lines).encode("latin-1")


@given(st.sampled_from(BASES), changes)
@example(BASES[0], [(5, 4, 600)])  # an END behind the first atom: what follows is other chains
@settings(max_examples=400, deadline=None)
def test_whatever_is_done_to_a_file_it_is_read_as_gemmi_reads_it_or_left_alone(base: str, some: list[Change]) -> None:
    is_plain(changed(base, some))


def test_plain_files_are_read_as_gemmi_reads_them() -> None:
    assert {*COLUMNS, *OTHERS, POLYMERS, "first_S", "links"} == {field.name for field in fields(AtomTable)}
    assert [name for name, text in PLAIN.items() if not is_plain(text.encode())] == []
    assert not is_plain((WATERS + PROTEIN).encode())  # their chain is the first that gemmi has
    assert all(is_plain(complex_pdb(seed, 20 + 7 * seed, 30)) for seed in range(3))
