"""Files of docking benchmarks, molecular dynamics and crystallographers: read, or refused for what they are."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from pipeline.graphs import bonds
from pipeline.records import Reason
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.parsing.read_structure import FileReading, parse_structure
from pipeline.structures.parsing.structure_files import read_file
from pipeline.structures.policy import Policy, Structure, apply_policy
from tests.structures.pdb_text import atom, chain, residue

PLAIN = chain("A", "ALA", "GLY")
ZINC = atom("ZN", "ZN", "Z", 1, record="HETATM", element="ZN")
NUCLEOTIDE = ("P", "O5'", "C5'", "C4'", "O4'", "C1'", "N9", "C2'", "O2'", "C3'", "O3'")


def read(lines: str, form: str = "pdb", **policy: str) -> Structure:
    return apply_policy(parse_structure(lines.encode(), form, FileReading()), Policy(**policy))


def refusal(lines: str, form: str = "pdb") -> UnusableInput:
    with pytest.raises(UnusableInput) as raised:
        read(lines, form)
    return raised.value


# ---- behind END ----


@pytest.mark.parametrize("more", ["", ZINC], ids=["plain", "by gemmi"])
def test_chains_behind_end_are_read_where_they_are_new_and_counted(more: str) -> None:
    structure = read(PLAIN + more + "END\n" + chain("B", "SER", "HIS", first=50) + "END\n")
    assert [(one.name, one.sequence) for one in structure.chains] == [("A", "AG"), ("B", "SH")]
    assert structure.notes["chains_behind_end"] == 1
    assert "chains_behind_end" not in read(PLAIN + more + "END\n").notes


def test_a_chain_that_comes_again_behind_end_is_another_frame_and_stays_where_it_is() -> None:
    structure = read(PLAIN + "END\n" + PLAIN.replace("3.800", "9.900") + chain("C", "TRP", first=9) + "END\n")
    assert [(one.name, one.sequence) for one in structure.chains] == [("A", "AG"), ("C", "W")]
    assert structure.pos_A3[0, 0] == 3.8
    models = f"MODEL        1\n{PLAIN}ENDMDL\nEND\n{chain('B', 'SER')}"
    assert [one.name for one in read(models).chains] == ["A"]


def test_serial_numbers_behind_end_are_bonds_of_nothing() -> None:
    bonded = "CONECT    1    1\n"
    structure = read(PLAIN + ZINC + bonded + "END\n" + chain("B", "SER", first=50) + bonded + "END\n", ligands="keep")
    assert not len(structure.links().atoms_L2)


# ---- numbers that are none ----


def test_a_coordinate_that_is_no_number_is_refused_with_its_line() -> None:
    for text in ("********", "  ab.cde", "        ", "   1_0.0", "   1.2.3", "  - 1.00", " 1 2.000"):
        for more in ("", ZINC):  # as the quick reader reads it, and gemmi
            problem = refusal("REMARK 1\n" + PLAIN.replace("   7.600", text, 1) + more + "END\n")
            assert (problem.reason, "line 6" in problem.detail) == (Reason.PARSE_ERROR, True), text


def test_a_residue_number_that_is_none_is_refused_and_one_in_base_36_is_read() -> None:
    assert "line 5" in refusal(PLAIN.replace("A   2 ", "A**** ") + "END\n").detail
    assert read(PLAIN.replace("A   2 ", "AA000 ") + "END\n").number_R.tolist() == [1, 10000]


def test_numbers_in_other_forms_are_read() -> None:
    for text in ("  1.0e+1", "10      ", "   10.  ", "   +10.0", "  10.000"):
        assert read(PLAIN.replace("   7.600", text, 1) + ZINC + "END\n").pos_A3[4, 0] == 10, text


# ---- molecular dynamics ----

LEFT = ("N", "CA", "C", "O", "CB", "CG", "SD", "CE", "HG")


def without_elements(*resnames: str) -> str:
    """Return residues whose atom names begin a column early, without a column of elements."""
    return "".join(
        f"ATOM  {at:5d} {name:<4} {resname} A{number:4d}    {number * 3.8:8.3f}{at:8.3f}{0:8.3f}  1.00  0.00      4AK\n"
        for number, resname in enumerate(resnames, 1)
        for at, name in enumerate(LEFT)
    )


def test_a_ca_without_an_element_is_what_its_residue_makes_it() -> None:
    structure = read(without_elements("MET", "HSD", "ZZZ", "MET") + "END\n")
    assert [(one.sequence, one.nodes) for one in structure.chains] == [("MHXM", 4)]
    assert structure.element_A[: len(LEFT)].tolist() == [7, 6, 6, 8, 6, 6, 16, 6, 1]


@pytest.mark.parametrize(("sugar", "kind", "letters"), [(NUCLEOTIDE, "rna", "GACU"), (NUCLEOTIDE[:8], "dna", "GACT")])
def test_nucleotides_by_the_names_of_charmm_are_a_chain_of_their_kind(
    sugar: tuple[str, ...], kind: str, letters: str
) -> None:
    names = ("GUA", "ADE", "CYT", "URA" if kind == "rna" else "THY")
    lines = "".join(residue(name, "A", number, sugar) for number, name in enumerate(names, 1))
    structure = read(lines + atom("POT", "POT", "A", 9, element="K") + "END\n")
    assert [(one.kind.value, one.sequence, one.nodes) for one in structure.chains] == [(kind, letters, 4)]
    assert bonds.bonds_of("GUA") == bonds.bonds_of("G")


@pytest.mark.parametrize("name", ["LYSH", "CYS2", "HISB", "ARGN"])
@pytest.mark.parametrize("chain_name", ["A", " "])
def test_residues_by_the_names_of_gromos_stay_in_their_chain(name: str, chain_name: str) -> None:
    """gemmi reads two letters as the chain's name: `LYSHA` would be a lysine in a chain HA."""
    short = name[:3]
    lines = chain(chain_name, "ALA", short, "GLY").replace(f"{short} {chain_name}", f"{name}{chain_name}")
    (only,) = read(lines).chains
    assert (only.name, len(only.sequence), "X" in only.sequence) == (chain_name.replace(" ", "_"), 3, False)


def test_chains_of_two_letters_keep_their_names() -> None:
    lines = "".join(chain("A", "ALA", "LYS", "HIS").replace(" A ", f"{first}A ") for first in "HB")
    assert [(one.name, one.sequence) for one in read(lines).chains] == [("HA", "AKH"), ("BA", "AKH")]


def test_solvent_and_ions_among_atom_records_are_no_chains() -> None:
    waters = "".join(residue("SOL", "V", number, ("OW", "HW1", "HW2"), element="O") for number in range(5, 40))
    ions = "".join(atom("CL-", "CL-", "I", number, element="CL") for number in range(40, 44))
    structure = read(PLAIN + waters + "TER\n" + ions + "TER\nEND\n")
    assert [(one.name, one.sequence) for one in structure.chains] == [("A", "AG")]
    assert (structure.notes["waters"], structure.notes["ligands"]) == (35, 4)


# ---- what is no structure ----


def test_a_core_cif_is_named_for_what_it_is() -> None:
    cif = "data_x\nloop_\n_atom_site_label\n_atom_site_fract_x\n_atom_site_fract_y\nC1 0.1 0.2\n"
    problem = refusal(cif, "mmcif")
    assert problem.reason is Reason.UNKNOWN_FORMAT


@pytest.mark.parametrize("packed", ["w", "w:gz"])
def test_a_tar_by_the_name_of_gzip_is_named_for_what_it_is(tmp_path: Path, packed: str) -> None:
    path = tmp_path / "a.pdb.gz"
    with tarfile.open(path, packed) as archive:
        member = tarfile.TarInfo("a.pdb")
        member.size = len(PLAIN)
        archive.addfile(member, io.BytesIO(PLAIN.encode()))
    with pytest.raises(UnusableInput, match="tar") as raised:
        read_file(path, 1 << 20)
    assert raised.value.reason is Reason.UNKNOWN_FORMAT
