"""From an item to its inventory: partners, maps and sizes, on hand-made and on real complexes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.records import Inventory, Item, Part, Reason, Role
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.inventory import (
    LigandChoice,
    ScanRecipe,
    examine_item,
    item_key,
)
from pipeline.structures.parsing.read_structure import FileReading
from pipeline.structures.parsing.structure_files import File, read_file
from pipeline.structures.partners import bound_rows
from pipeline.structures.policy import Policy
from pipeline.structures.sources.data_source import items
from pipeline.structures.sources.item_ids import SourceSpec
from tests.structures.pdb_text import atom, chain, residue

LIMIT = 64 << 20
COMPLEX = chain("H", "ALA", "CYS") + chain("L", "ASP", "GLU", "PHE") + chain("X", "GLY", "HIS", "ILE", "LYS")
COMPLEX += atom("ZN", "ZN", "Z", 1, record="HETATM", element="ZN") + "END\n"
ANTIBODY, ANTIGEN = Part(Role.RECEPTOR, "c.pdb", ("H", "L")), Part(Role.LIGAND, "c.pdb", ("X",))


def inventory_of(*parts: Part, lines: str = COMPLEX, recipe: ScanRecipe | None = None) -> Inventory:
    inventory, _ = examine_item(Item("c", parts=parts), {"c.pdb": File(lines.encode(), "00")}, recipe or ScanRecipe())
    return inventory


def test_partners_of_several_chains_keep_the_order_that_was_asked() -> None:
    inventory = inventory_of(replace(ANTIBODY, chains=("L", "H")), ANTIGEN)
    assert [[one.name for one in partner.chains] for partner in inventory.partners] == [["L", "H"], ["X"]]
    assert [partner.nodes for partner in inventory.partners] == [5, 4]
    assert [partner.atoms for partner in inventory.partners] == [20, 16]


def test_two_polymer_chains_are_receptor_and_ligand() -> None:
    lines = chain("A", "ALA", "CYS") + chain("B", "GLY") + "END\n"
    partners = inventory_of(Part(Role.COMPLEX, "c.pdb"), lines=lines).partners
    assert [(one.role, one.chains[0].name) for one in partners] == [(Role.RECEPTOR, "A"), (Role.LIGAND, "B")]


def test_the_lower_case_twin_of_a_single_chain_antibody_is_that_chain() -> None:
    row = replace(ANTIBODY, chains=("H", "h"), optional=("h",))
    assert [one.name for one in inventory_of(row, ANTIGEN).partners[0].chains] == ["H"]
    assert inventory_of(replace(row, optional=()), ANTIGEN).reason is Reason.MISSING_CHAIN
    lines = COMPLEX.replace(" L ", " h ")
    split = inventory_of(row, ANTIGEN, lines=lines)
    assert [one.name for one in split.partners[0].chains] == ["H", "h"]


def test_twenty_thousand_residues_are_refused_by_size() -> None:
    lines = "".join(chain(name, *["ALA"] * 5000) for name in "ABCD") + "END\n"
    inventory = inventory_of(Part(Role.WHOLE, "c.pdb"), lines=lines)
    assert inventory.reason is Reason.TOO_MANY_RESIDUES
    assert inventory_of(Part(Role.WHOLE, "c.pdb"), lines=lines, recipe=ScanRecipe(max_residues=20_000)).reason is None
    item = Item("c", parts=(Part(Role.WHOLE, "c.pdb", ("A",)),), bound=(Part(Role.WHOLE, "c.pdb"),))
    beside, _ = examine_item(item, {"c.pdb": File(lines.encode(), "00")}, ScanRecipe())
    assert beside.reason is Reason.TOO_MANY_RESIDUES  # before it is aligned with what is bound


def test_a_bare_sequence_needs_no_file() -> None:
    inventory, _ = examine_item(Item("s", sequence="ACDE"), {}, ScanRecipe())
    assert inventory.partners[0].chains[0].sequence == "ACDE"
    assert (
        examine_item(Item("s", sequence="A" * 99), {}, ScanRecipe(max_residues=98))[0].reason
        is Reason.TOO_MANY_RESIDUES
    )


SIZED = {  # of an antibody of 20 atoms and an antigen of 16, and the other way round
    "as_named": (("H L", "X"), ("X", "H L")),
    "swapped": (("X", "H L"), ("H L", "X")),
    "smaller": (("H L", "X"), ("H L", "X")),
    "larger": (("X", "H L"), ("X", "H L")),
}


@pytest.mark.parametrize("choice", SIZED)
def test_which_partner_is_the_ligand_is_a_choice(choice: LigandChoice) -> None:
    other_way = replace(ANTIGEN, role=Role.RECEPTOR), replace(ANTIBODY, role=Role.LIGAND)
    for parts, expected in zip(((ANTIBODY, ANTIGEN), other_way), SIZED[choice], strict=True):
        inventory = inventory_of(*parts, recipe=ScanRecipe(ligand=choice))
        assert [partner.role for partner in inventory.partners] == [Role.RECEPTOR, Role.LIGAND]
        assert tuple(" ".join(chain.name for chain in side.chains) for side in inventory.partners) == expected


def test_of_equal_partners_and_of_one_partner_the_size_chooses_none() -> None:
    twins = chain("A", "ALA", "CYS") + chain("B", "ALA", "CYS") + "END\n"
    for choice in ("smaller", "larger"):
        inventory = inventory_of(Part(Role.COMPLEX, "c.pdb"), lines=twins, recipe=ScanRecipe(ligand=choice))
        assert [partner.chains[0].name for partner in inventory.partners] == ["A", "B"]
        whole = inventory_of(Part(Role.WHOLE, "c.pdb"), lines=twins, recipe=ScanRecipe(ligand=choice))
        assert [partner.role for partner in whole.partners] == [Role.WHOLE]


@pytest.mark.parametrize("choice", ["smaller", "larger"])
def test_the_bound_structures_say_which_partner_of_a_real_pair_is_smaller_whatever_the_state(
    structures: Path, choice: LigandChoice
) -> None:
    chosen: dict[str, list[list[str]]] = {}
    for state in ("bound", "unbound"):
        for item in items(SourceSpec("pairs", structures / "pairs", state=state)):
            paths = {part.path for part in (*item.parts, *item.bound)}
            files = {path: File(read_file(Path(path), LIMIT), path) for path in paths}
            _, read = examine_item(item, files, ScanRecipe(ligand=choice))
            receptor, ligand = (read.bound or read.sides)[Role.RECEPTOR], (read.bound or read.sides)[Role.LIGAND]
            assert (receptor.atoms >= ligand.atoms) == (choice == "smaller")
            files_of_sides = [Path(read.sides[role].part.path).name[:6] for role in (Role.RECEPTOR, Role.LIGAND)]
            chosen.setdefault(item.id, []).append(files_of_sides)
            maps = {f"bound.{role.value}": side.residues() for role, side in read.sides.items() if read.bound}
            assert {name: len(rows) for name, rows in read.maps.items()} == {name: len(of) for name, of in maps.items()}
    assert len(chosen) == 5
    assert all(bound == unbound for bound, unbound in chosen.values())
    assert (chosen["1R8S"][0] == ["1R8S_l", "1R8S_r"]) == (choice == "smaller"), "its ligand's file is the larger one"


def test_bound_rows_pair_chains_by_sequence_not_by_order() -> None:
    heavy, light = "EVQLVESGGDLVKPGGSLKLSCAAS", "NIMMTQSPSSLAVSAGEKVTMNCKS"
    rows = bound_rows([heavy[2:], light], [light, heavy])
    assert rows.tolist() == [*range(len(light) + 2, len(light) + len(heavy)), *range(len(light))]


def test_residues_that_the_bound_structure_lacks_are_marked() -> None:
    rows = bound_rows(["ACDEFGHIKLMNPQRSTVWY"], ["ACDEFGHIKPQRSTVWY"])
    assert (rows == -1).sum() == 3
    with pytest.raises(UnusableInput):
        bound_rows(["ACDEFGHIKLMNPQRSTVWY"], ["WWWWWWWWWWWWWWWWWWWW"])


@given(st.text("ACDEFGHIKLMNPQRSTVWY", min_size=20, max_size=60), st.integers(0, 8), st.integers(0, 8))
def test_a_trimmed_chain_maps_onto_itself(sequence: str, head: int, tail: int) -> None:
    trimmed = sequence[head : len(sequence) - tail]
    rows = bound_rows([trimmed], [sequence])
    assert (np.diff(rows[rows >= 0]) > 0).all()
    assert (rows >= 0).all()
    assert "".join(sequence[row] for row in rows) == trimmed


def test_a_side_without_a_single_node_is_refused() -> None:
    trace = residue("ALA", "A", 1, ("CA",)) + residue("CYS", "A", 2, ("CA",)) + "TER\n" + chain("B", "GLY") + "END\n"
    recipe = ScanRecipe(policy=Policy(require="backbone"))
    inventory = inventory_of(Part(Role.COMPLEX, "c.pdb"), lines=trace, recipe=recipe)
    assert inventory.reason is Reason.INCOMPLETE_RESIDUES
    assert inventory_of(Part(Role.COMPLEX, "c.pdb"), lines=trace).reason is None


def test_what_nobody_asked_for_rejects_nothing() -> None:
    lines = COMPLEX.replace("END\n", "") + chain("M", "MSE", "ALA") + "END\n"
    recipe = ScanRecipe(policy=Policy(modified="reject"))
    assert inventory_of(ANTIBODY, ANTIGEN, lines=lines, recipe=recipe).reason is None
    everything = inventory_of(Part(Role.WHOLE, "c.pdb"), lines=lines, recipe=recipe)
    assert everything.reason is Reason.MODIFIED_RESIDUES


def test_chains_that_cannot_be_had_are_a_named_reason() -> None:
    for parts, reason in (
        ((replace(ANTIBODY, chains=("H", "Q")), ANTIGEN), Reason.MISSING_CHAIN),
        ((ANTIBODY, replace(ANTIGEN, chains=("Z",))), Reason.CHAIN_WITHOUT_POLYMER),
        ((ANTIBODY, replace(ANTIGEN, chains=("X", "L"))), Reason.SHARED_CHAIN),
        ((Part(Role.COMPLEX, "c.pdb"),), Reason.AMBIGUOUS_PARTNERS),
        ((replace(ANTIBODY, model=2), ANTIGEN), Reason.MISSING_MODEL),
    ):
        inventory = inventory_of(*parts)
        assert (inventory.reason, bool(inventory.detail)) == (reason, True)


def test_the_key_changes_with_everything_that_can_change_the_inventory_and_with_nothing_else() -> None:
    item, digests = Item("c", parts=(ANTIBODY, ANTIGEN)), {"c.pdb": "00", "d.cif": "00", "e.pdb": "00"}
    readings = ({"chain_names": "label"}, {"assembly": "1"}, {"seqres": True}, {"model": 2})
    policies = (
        *({"altlocs": "first"}, {"modified": "unknown"}, {"require": "backbone"}),
        *({"incomplete": "reject"}, {"ligands": "keep"}),
    )
    recipes = [
        ScanRecipe(),
        *(ScanRecipe(reading=FileReading(**one)) for one in readings),
        *(ScanRecipe(policy=Policy(**one)) for one in policies),
        ScanRecipe(max_residues=5),
        *(ScanRecipe(ligand=choice) for choice in ("swapped", "smaller", "larger")),
    ]
    others = [
        replace(item, parts=(ANTIGEN, ANTIBODY)),
        replace(item, parts=(replace(ANTIBODY, chains=("L", "H")), ANTIGEN)),
        replace(item, parts=(replace(ANTIBODY, model=2), ANTIGEN)),
        replace(item, bound=(ANTIBODY,)),
        replace(item, parts=(replace(ANTIBODY, path="d.cif"), replace(ANTIGEN, path="d.cif"))),
    ]
    keys = [item_key(item, recipe, digests) for recipe in recipes]
    keys += [item_key(other, ScanRecipe(), digests) for other in others]
    keys.append(item_key(item, ScanRecipe(), {"c.pdb": "01"}))
    assert len(set(keys)) == len(keys)
    parts = (replace(ANTIBODY, path="e.pdb"), replace(ANTIGEN, path="e.pdb"))
    elsewhere = replace(item, id="other", split="test", labels={"kd": "1"}, parts=parts)
    assert item_key(elsewhere, ScanRecipe(max_file_bytes=1 << 30), digests) == keys[0]


def test_rows_of_residues_lead_into_the_full_sequence() -> None:
    full, unknown = (ScanRecipe(FileReading(seqres=True), policy=Policy(modified=how)) for how in ("parent", "unknown"))
    capped = residue("ACE", "A", 1, ("C", "O", "CH3")) + residue("ALA", "A", 2) + residue("CYS", "A", 3) + "TER\n"
    for name, lines, names, recipe, wanted in (
        (" ", chain(" ", "CYS", "ASP", first=2), "ALA CYS ASP GLU", full, ("ACDE", [1, 2])),
        ("A", chain("A", "MSE", "ASP", first=2), "ALA MSE ASP MSE", full, ("AMDM", [1, 2])),
        ("A", chain("A", "MSE", "ASP", first=2), "ALA MSE ASP MSE", unknown, ("AXDX", [1, 2])),
        ("A", capped, "ACE ALA CYS ASP NH2", full, ("ACD", [0, 1])),
    ):
        text = f"SEQRES   1 {name}    {len(names.split())}  {names}\n{lines}END\n"
        item = Item("c", parts=(Part(Role.WHOLE, "c.pdb"),))
        inventory, read = examine_item(item, {"c.pdb": File(text.encode(), "00")}, recipe)
        assert (inventory.partners[0].chains[0].sequence, read.maps["rows.whole"].tolist()) == wanted
