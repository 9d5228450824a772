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


def test_nucleic_chains_are_told_apart() -> None:
    sugar = ("P", "C1'", "O2'")
    lines = "".join(residue(name, "A", i, sugar) for i, name in enumerate(["DA", "DC", "DG"], 1)) + "TER\n"
    lines += "".join(residue(name, "B", i, sugar) for i, name in enumerate(["A", "U", "PSU"], 1)) + "TER\n"
    assert [(one.kind, one.sequence, one.nodes) for one in read(lines).chains] == [
        (Kind.DNA, "ACG", 3),
        (Kind.RNA, "AUU", 3),
    ]


def test_an_ion_before_the_chain_is_no_residue_and_calcium_no_alpha_carbon() -> None:
    ion = atom("CA", "CA", "A", 900, record="HETATM", element="CA")
    lines = ion + "".join(residue(name, "A", number) for number, name in enumerate(["ALA", "CYS", "ASP"], 1))
    for require in ("ca", "backbone"):
        structure = read(lines, Policy(require=require))
        assert (sequences(structure), structure.chains[0].nodes) == (["ACD"], 3)


def row(first: int, *names: str) -> str:
    return "".join(residue(name, "A", number) for number, name in enumerate(names, first))


ALANINE, GLYCINE, SUGAR = residue("ALA", "A", 1), residue("GLY", "A", 2), ("P", "C1'")
MIXED = residue("SER", "A", 1, altloc="A", occupancy=0.4) + residue("PRO", "A", 1, altloc="B", occupancy=0.6)
LARGE = residue("TRP", "A", 1, ("N", "CA", "C", "O", "CB", "CG", "CD1", "CD2", "NE1"), altloc="B", occupancy=0.35)
INSERTED = "".join(residue(name, "A", 52, icode=code) for name, code in (("ALA", " "), ("CYS", "A"), ("ASP", "B")))
WATER = atom("O", "HOH", "A", 101, record="HETATM")
MODELS = "".join(
    f"MODEL     {n:>4}\n{ALANINE}{chain('A', name, first=2)}ENDMDL\n" for n, name in ((5, "GLY"), (9, "SER"))
)
PROTONATED = ("HSD", "HSE", "HSP", "HIE", "HID", "HIP", "CYX", "CYM", "ASH", "GLH", "LYN")
SEQUENCES: dict[str, tuple[str, list[str], dict[str, object]]] = {
    "the likelier of two names": (MIXED + GLYCINE, ["PG"], {}),
    "the first of two names": (MIXED + GLYCINE, ["SG"], {"policy": Policy(altlocs="first")}),
    "the likelier, whatever its size": (
        residue("GLY", "A", 1, altloc="A", occupancy=0.65) + LARGE + residue("ALA", "A", 2),
        ["GA"],
        {},
    ),
    "insertion codes": (INSERTED + residue("GLU", "A", 53), ["ACDE"], {}),
    "numbers that wrap or repeat": (row(9999, "ALA") + row(0, "CYS", "ASP") + row(9999, "GLU"), ["ACDE"], {}),
    "caps": (
        residue("ACE", "A", 1, ("C", "O", "CH3")) + row(2, "ALA", "GLY") + residue("NH2", "A", 4, ("N",)),
        ["AG"],
        {},
    ),
    "an unknown residue": (row(1, "ALA", "QQQ") + chain("A", "GLY", first=3), ["AXG"], {}),
    "a parent that the file names": (
        "MODRES 1ABC QQQ A    2  TYR  SOMETHING\n" + row(1, "ALA", "QQQ") + chain("A", "GLY", first=3),
        ["AYG"],
        {},
    ),
    "the first model": (MODELS, ["AG"], {}),
    "the second model": (MODELS, ["AS"], {"model": 2}),
    "TER at a break": (chain("A", "ALA", "CYS", "ASP") + row(7, "PHE", "GLY"), ["ACDFG"], {}),
    "TER and another chain": (
        chain("A", "ALA", "CYS") + chain("B", "LYS", "LEU") + row(7, "PHE", "GLY"),
        ["ACFG", "KL"],
        {},
    ),
    "a water in the middle": (row(1, "ALA", "CYS") + WATER + row(3, "ASP", "GLU"), ["ACDE"], {}),
    "another kind of polymer": (
        row(1, "ALA", "CYS", "ASP") + residue("DA", "A", 10, SUGAR) + residue("DC", "A", 11, SUGAR) + "TER\n",
        ["ACDXX"],
        {},
    ),
    "names of simulations": (chain("A", "ALA", *PROTONATED, "ALA"), ["AHHHHHHCCDEKA"], {}),
    "old names of the sugar": (
        "".join(residue(name, "A", i, ("P", "C1*")) for i, name in enumerate(["DA", "DC", "DG"], 1)) + "TER\n",
        ["ACG"],
        {},
    ),
}


def test_sequences_are_those_of_the_residues() -> None:
    for name, (lines, wanted, how) in SEQUENCES.items():
        structure = read(lines, **how)
        assert sequences(structure) == wanted, name
        assert [one.nodes for one in structure.chains] == [len(one.sequence) for one in structure.chains], name


def test_an_atom_that_only_the_other_conformer_has_is_not_lost() -> None:
    lines = residue("ALA", "A", 1, ("N", "CA", "C"), altloc="A", occupancy=0.7)
    lines += residue("ALA", "A", 1, ("O",), altloc="B", occupancy=0.3)
    assert [name_text(name) for name in read(lines).name_A] == ["N", "CA", "C", "O"]


def test_what_cannot_be_used_has_its_reason() -> None:
    assert reason_of(MODELS, model=3) is Reason.MISSING_MODEL
    assert reason_of(atom("ZN", "ZN", "A", 1, record="HETATM", element="ZN")) is Reason.NO_POLYMER
    assert reason_of(ALANINE + GLYCINE.replace("   7.600", "     nan")) is Reason.PARSE_ERROR
