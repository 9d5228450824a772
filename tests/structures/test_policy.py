"""Every choice that a structure file leaves open has one documented answer."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.records import Kind, Reason
from pipeline.structures.atoms import UnusableInput, name_text
from pipeline.structures.parsing.read_structure import FileReading, parse_structure
from pipeline.structures.policy import Policy, Structure, apply_policy, check_chain
from tests.structures.pdb_text import atom, chain, residue


def read(lines: str, policy: Policy | None = None, model: int = 1) -> Structure:
    structure = apply_policy(
        parse_structure((lines + "END\n").encode(), "pdb", FileReading(model=model)), policy or Policy()
    )
    for one in structure.chains:
        check_chain(structure, one, policy or Policy())
    return structure


def reason_of(lines: str, policy: Policy | None = None, model: int = 1) -> Reason:
    with pytest.raises(UnusableInput) as caught:
        read(lines, policy, model)
    return caught.value.reason


def sequences(structure: Structure) -> list[str]:
    return [chain.sequence for chain in structure.chains]


def test_the_conformer_of_highest_occupancy_is_kept_whole() -> None:
    lines = residue("SER", "A", 1) + "".join(
        atom("CB", "SER", "A", 1, altloc=label, occupancy=share, xyz=(x, 0, 0))
        + atom("OG", "SER", "A", 1, altloc=label, occupancy=share, xyz=(x, 1, 0), element="O")
        for label, share, x in (("A", 0.4, 10.0), ("B", 0.6, 20.0))
    )
    structure = read(lines + residue("GLY", "A", 2))
    kept = {name_text(name): tuple(position) for name, position in zip(structure.name_A, structure.pos_A3, strict=True)}
    assert structure.notes["altlocs"] == 1
    assert (kept["CB"][0], kept["OG"][0]) == (20.0, 20.0)
    first = read(lines, Policy(altlocs="first"))
    assert first.pos_A3[first.name_A == first.name_A[-1]][0][0] == 10.0


def test_equal_occupancies_go_to_the_first_letter() -> None:
    lines = "".join(residue("ALA", "A", 1, altloc=label, occupancy=0.5) for label in ("B", "A"))
    moved = lines.replace("AALA A   1       3.800", "AALA A   1       9.900")
    assert read(moved).pos_A3[0][0] == pytest.approx(9.9)


def test_an_atom_that_only_the_other_conformer_has_is_not_lost() -> None:
    lines = residue("ALA", "A", 1, ("N", "CA", "C"), altloc="A", occupancy=0.7) + residue(
        "ALA", "A", 1, ("O",), altloc="B", occupancy=0.3
    )
    assert [name_text(name) for name in read(lines).name_A] == ["N", "CA", "C", "O"]


def test_a_mixed_residue_is_one_residue_with_the_likelier_name() -> None:
    lines = residue("SER", "A", 1, altloc="A", occupancy=0.4) + residue("PRO", "A", 1, altloc="B", occupancy=0.6)
    assert sequences(read(lines + residue("GLY", "A", 2))) == ["PG"]
    assert sequences(read(lines + residue("GLY", "A", 2), Policy(altlocs="first"))) == ["SG"]


def test_insertion_codes_make_different_residues() -> None:
    lines = residue("ALA", "A", 52) + residue("CYS", "A", 52, icode="A") + residue("ASP", "A", 52, icode="B")
    structure = read(lines + residue("GLU", "A", 53))
    assert sequences(structure) == ["ACDE"]
    assert structure.number_R.tolist() == [52, 52, 52, 53]


def test_numbers_that_wrap_or_repeat_do_not_merge_residues() -> None:
    lines = residue("ALA", "A", 9999) + residue("CYS", "A", 0) + residue("ASP", "A", 1) + residue("GLU", "A", 9999)
    assert sequences(read(lines)) == ["ACDE"]


def test_a_chain_in_two_pieces_is_one_chain() -> None:
    lines = chain("A", "ALA", "CYS") + chain("B", "GLY", "GLY") + chain("A", "ASP", "GLU", first=10)
    structure = read(lines)
    assert [(one.name, one.sequence) for one in structure.chains] == [("A", "ACDE"), ("B", "GG")]
    assert (np.diff(structure.residue_A) >= 0).all()


def test_duplicated_atoms_are_kept_once() -> None:
    structure = read(residue("ALA", "A", 1) + atom("CA", "ALA", "A", 1, xyz=(99, 99, 99)) + residue("GLY", "A", 2))
    assert len(structure.name_A) == 8
    assert structure.pos_A3.max() < 99


def test_waters_ligands_and_ions_are_counted_and_left_out() -> None:
    lines = chain("A", "ALA", "CYS", "ASP") + "".join(
        atom(name, name, "A", number, record="HETATM", element=element)
        for number, (name, element) in enumerate([("HOH", "O"), ("HOH", "O"), ("ZN", "ZN"), ("HEM", "C")], start=101)
    )
    structure = read(lines)
    assert sequences(structure) == ["ACD"]
    assert (structure.notes["waters"], structure.notes["ligands"]) == (2, 2)


def test_terminal_caps_are_no_residues() -> None:
    lines = (
        residue("ACE", "A", 1, ("C", "O", "CH3"))
        + residue("ALA", "A", 2)
        + residue("GLY", "A", 3)
        + residue("NH2", "A", 4, ("N",))
    )
    assert sequences(read(lines)) == ["AG"]


def test_an_unknown_residue_with_a_backbone_is_x() -> None:
    assert sequences(read(residue("ALA", "A", 1) + residue("QQQ", "A", 2) + chain("A", "GLY", first=3))) == ["AXG"]


def test_a_parent_that_the_file_names_is_used() -> None:
    record = "MODRES 1ABC QQQ A    2  TYR  SOMETHING\n"
    assert sequences(read(record + residue("ALA", "A", 1) + residue("QQQ", "A", 2) + chain("A", "GLY", first=3))) == [
        "AYG"
    ]


def test_a_residue_without_the_backbone_that_is_asked_for_stays_in_the_sequence_but_is_no_node() -> None:
    lines = (
        residue("ALA", "A", 1)
        + residue("CYS", "A", 2, ("N", "CA"))
        + residue("ASP", "A", 3, ("CA",))
        + residue("GLU", "A", 4)
    )
    whole = Policy(require="backbone")
    structure = read(lines, whole)
    assert sequences(structure) == ["ACDE"]
    assert structure.node_R.tolist() == [True, False, False, True]
    assert read(lines).node_R.all()
    assert reason_of(lines, Policy(require="backbone", incomplete="reject")) is Reason.INCOMPLETE_RESIDUES


def test_the_backbone_table_points_at_the_right_atoms() -> None:
    structure = read(residue("ALA", "A", 1, ("CB", "O", "C", "CA", "N")) + residue("GLY", "A", 2))
    names = [
        [name_text(structure.name_A[index]) if index >= 0 else "-" for index in row] for row in structure.backbone_R5
    ]
    assert names == [["N", "CA", "C", "O", "CB"], ["N", "CA", "C", "O", "-"]]


def test_nucleic_chains_are_told_apart() -> None:
    sugar = ("P", "C1'", "O2'")
    lines = "".join(residue(name, "A", i, sugar) for i, name in enumerate(["DA", "DC", "DG"], 1)) + "TER\n"
    lines += "".join(residue(name, "B", i, sugar) for i, name in enumerate(["A", "U", "PSU"], 1)) + "TER\n"
    assert [(one.kind, one.sequence, one.nodes) for one in read(lines).chains] == [
        (Kind.DNA, "ACG", 3),
        (Kind.RNA, "AUU", 3),
    ]


def test_only_the_chosen_model_is_read() -> None:
    lines = "".join(
        f"MODEL     {n:>4}\n{residue('ALA', 'A', 1)}{chain('A', name, first=2)}ENDMDL\n"
        for n, name in ((5, "GLY"), (9, "SER"))
    )
    assert sequences(read(lines)) == ["AG"]
    assert sequences(read(lines, model=2)) == ["AS"]
    assert reason_of(lines, model=3) is Reason.MISSING_MODEL


def test_a_file_of_ligands_only_has_no_polymer() -> None:
    assert reason_of(atom("ZN", "ZN", "A", 1, record="HETATM", element="ZN")) is Reason.NO_POLYMER


def test_coordinates_that_are_no_numbers_are_refused() -> None:
    lines = residue("ALA", "A", 1) + residue("GLY", "A", 2).replace("   7.600", "     nan")
    assert reason_of(lines) in {Reason.PARSE_ERROR}


def test_a_ter_at_a_break_does_not_cut_the_chain_short() -> None:
    whole = "".join(residue(name, "A", number) for number, name in enumerate(["ALA", "CYS", "ASP", "GLU"], 1))
    rest = "".join(residue(name, "A", number) for number, name in enumerate(["PHE", "GLY", "HIS", "ILE"], 7))
    assert sequences(read(whole + "TER\n" + rest)) == ["ACDEFGHI"]
    other = chain("B", "LYS", "LEU")
    assert sequences(read(whole + "TER\n" + other + rest)) == ["ACDEFGHI", "KL"]


def test_a_water_in_the_middle_does_not_end_the_chain() -> None:
    water = atom("O", "HOH", "A", 101, record="HETATM")
    lines = residue("ALA", "A", 1) + residue("CYS", "A", 2) + water + residue("ASP", "A", 3) + residue("GLU", "A", 4)
    structure = read(lines)
    assert sequences(structure) == ["ACDE"]
    assert structure.notes["waters"] == 1


def test_an_ion_before_the_chain_is_no_residue_and_calcium_no_alpha_carbon() -> None:
    ion = atom("CA", "CA", "A", 900, record="HETATM", element="CA")
    lines = ion + "".join(residue(name, "A", number) for number, name in enumerate(["ALA", "CYS", "ASP"], 1))
    for require in ("ca", "backbone"):
        structure = read(lines, Policy(require=require))  # type: ignore[arg-type]
        assert (sequences(structure), structure.chains[0].nodes) == (["ACD"], 3)


def test_the_likelier_of_two_residues_wins_whatever_their_sizes() -> None:
    small = residue("GLY", "A", 1, altloc="A", occupancy=0.65)
    atoms = ("N", "CA", "C", "O", "CB", "CG", "CD1", "CD2", "NE1", "CE2")
    large = residue("TRP", "A", 1, atoms, altloc="B", occupancy=0.35)
    assert sequences(read(small + large + residue("ALA", "A", 2))) == ["GA"]


def test_protonation_states_of_simulations_are_their_residues() -> None:
    names = ("HSD", "HSE", "HSP", "HIE", "HID", "HIP", "CYX", "CYM", "ASH", "GLH", "LYN")
    structure = read(chain("A", "ALA", *names, "ALA"))
    assert sequences(structure) == ["AHHHHHHCCDEKA"]
    assert not structure.modified_R.any()


def test_a_letter_of_another_kind_of_polymer_is_unknown() -> None:
    sugar = ("P", "C1'")
    protein = chain("A", "ALA", "CYS", "ASP").removesuffix("TER\n")
    dna = residue("DA", "A", 10, sugar) + residue("DC", "A", 11, sugar)
    assert sequences(read(protein + dna + "TER\n")) == ["ACDXX"]


def test_old_names_of_the_sugar_carbon_count() -> None:
    lines = "".join(residue(name, "A", i, ("P", "C1*")) for i, name in enumerate(["DA", "DC", "DG"], 1)) + "TER\n"
    assert read(lines).chains[0].nodes == 3
