"""Small molecules and ions: which are kept, how they are named, whose they are; and what a file says of bonds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.records import Item, Kind, Part, Reason, Role
from pipeline.structures.atoms import UnusableInput, name_text
from pipeline.structures.inventory import Complex, ScanRecipe, examine_item
from pipeline.structures.parsing.read_structure import FileReading, parse_structure
from pipeline.structures.parsing.structure_files import HAS_BIOTITE, File, format_of, read_file
from pipeline.structures.partners import joined_embedding_rows
from pipeline.structures.policy import Policy, Structure, apply_policy
from tests.structures.pdb_text import atom, chain

LIMIT = 64 << 20
KEEP = ScanRecipe(policy=Policy(ligands="keep"))


def molecule(name: str, chain_name: str, number: int, *atoms: str, x: float = 0.0) -> str:
    """Return a small molecule; an atom's element is the first letter of its name."""
    return "".join(
        atom(one, name, chain_name, number, xyz=(x, 1.5 * index, 5.0), record="HETATM")
        for index, one in enumerate(atoms)
    )


HEME = molecule("HEM", "C", 1, "NA", "NB")
WATER = atom("O", "HOH", "A", 900, record="HETATM")
LINES = (
    chain("A", "GLY", "ALA")
    + chain("B", "ALA", "CYS", "ASP")
    + molecule("GTP", "A", 301, "PA", "O1", "C2")
    + molecule("GTP", "A", 303, "PA", "O1", "C2", x=20)
    + atom("MG", "MG", "A", 302, xyz=(9, 9, 9), record="HETATM", element="MG")
    + WATER
    + molecule("HEM", "B", 401, "NA", "NB", x=40)
)


def parsed(lines: str, policy: Policy | None = None) -> Structure:
    return apply_policy(parse_structure((lines + "END\n").encode(), "pdb", FileReading()), policy or KEEP.policy)


def part(role: Role, *chains: str) -> Part:
    return Part(role, "c.pdb", chains)


def read(*parts: Part, lines: str = LINES, recipe: ScanRecipe = KEEP) -> Complex:
    inventory, found = examine_item(Item("c", parts=parts), {"c.pdb": File((lines + "END\n").encode(), "00")}, recipe)
    assert found is not None, inventory
    return found


def refused(*parts: Part, lines: str = LINES, recipe: ScanRecipe = KEEP) -> tuple[Reason, str]:
    inventory, found = examine_item(Item("c", parts=parts), {"c.pdb": File((lines + "END\n").encode(), "00")}, recipe)
    assert found is None
    assert inventory.reason is not None
    return inventory.reason, inventory.detail


def names(found: Complex) -> dict[str, list[str]]:
    return {role.value: [one.name for one in side.chains] for role, side in found.sides.items()}


def test_molecules_follow_the_polymers_each_a_chain_of_its_own_and_water_is_none() -> None:
    structure = parsed(LINES)
    assert [(one.name, one.kind.value, one.sequence, one.last - one.first) for one in structure.chains] == [
        ("A", "protein", "GA", 2), ("B", "protein", "ACD", 3), ("A:GTP:301", "other", "", 1),
        ("A:GTP:303", "other", "", 1), ("A:MG:302", "other", "", 1), ("B:HEM:401", "other", "", 1),
    ]  # fmt: skip
    assert structure.atoms_R.tolist()[5:] == [3, 3, 1, 2]
    assert not structure.node_R[5:].any()
    assert (structure.backbone_R5[5:] == -1).all()


def test_polymers_are_the_same_whether_molecules_are_kept_or_not() -> None:
    kept, dropped = parsed(LINES), parsed(LINES, Policy())
    size, residues = len(dropped.name_A), len(dropped.name_R)
    assert kept.chains[:2] == dropped.chains
    np.testing.assert_array_equal(kept.pos_A3[:size], dropped.pos_A3)
    np.testing.assert_array_equal(kept.residue_A[:size], dropped.residue_A)
    np.testing.assert_array_equal(kept.node_R[:residues], dropped.node_R)
    assert kept.notes == dropped.notes


def test_a_chain_brings_its_molecules() -> None:
    found = read(part(Role.RECEPTOR, "B"), part(Role.LIGAND, "A"))
    assert names(found) == {"receptor": ["B", "B:HEM:401"], "ligand": ["A", "A:GTP:301", "A:GTP:303", "A:MG:302"]}
    receptor, ligand = found.partners.values()
    assert [(one.residues, one.nodes, one.atoms) for one in (receptor, ligand)] == [(4, 3, 14), (5, 2, 15)]
    assert joined_embedding_rows(ligand, None).tolist() == [0, 1, -1, -1, -1]
    assert "incomplete" not in ligand.notes
    assert "modified" not in ligand.notes


def test_a_chain_of_molecules_only_is_a_side_where_they_are_kept() -> None:
    lines = chain("A", "GLY", "ALA") + HEME
    assert names(read(part(Role.RECEPTOR, "A"), part(Role.LIGAND, "C"), lines=lines))["ligand"] == ["C:HEM:1"]
    sides = part(Role.RECEPTOR, "A"), part(Role.LIGAND, "C")
    assert refused(*sides, lines=lines, recipe=ScanRecipe())[0] is Reason.CHAIN_WITHOUT_POLYMER
    both = part(Role.RECEPTOR, "A", "C"), part(Role.LIGAND, "C:HEM")
    assert refused(*both, lines=lines)[0] is Reason.CHAIN_WITHOUT_POLYMER


def test_a_file_of_one_molecule_is_a_partner_where_they_are_kept() -> None:
    assert names(read(part(Role.WHOLE), lines=HEME))["whole"] == ["C:HEM:1"]
    assert refused(part(Role.WHOLE), lines=HEME, recipe=ScanRecipe())[0] is Reason.NO_POLYMER
    assert refused(part(Role.WHOLE), lines=WATER)[0] is Reason.NO_POLYMER


def test_atoms_of_a_molecule_that_share_a_name_are_all_kept() -> None:
    lines = chain("A", "GLY") + molecule("LIG", "A", 9, "C", "C", "O", "C")
    assert parsed(lines).atoms_R.tolist() == [4, 4]


def test_alternatives_of_a_molecule_are_resolved_as_those_of_residues_are() -> None:
    lines = chain("A", "GLY") + "".join(
        atom("C1", "LIG", "A", 9, altloc=label, occupancy=share, xyz=(x, 0, 9), record="HETATM")
        for label, share, x in (("A", 0.3, 1.0), ("B", 0.7, 2.0))
    )
    structure = parsed(lines)
    assert structure.atoms_R.tolist() == [4, 1]
    assert structure.pos_A3[-1].tolist() == [2.0, 0.0, 9.0]
    assert parsed(lines, replace(KEEP.policy, altlocs="first")).pos_A3[-1].tolist() == [1.0, 0.0, 9.0]


def test_molecules_have_no_full_sequence() -> None:
    lines = "SEQRES   1 A    3  GLY ALA CYS\n" + chain("A", "GLY", "ALA") + molecule("HEM", "A", 9, "NA", "NB")
    found = read(part(Role.WHOLE), lines=lines, recipe=replace(KEEP, reading=FileReading(seqres=True)))
    assert found.maps["rows.whole"].tolist() == [0, 1, -1]
    assert joined_embedding_rows(found.partners[Role.WHOLE], found.maps["rows.whole"]).tolist() == [0, 1, -1]


def bound_map(mine: str, theirs: str) -> list[int]:
    """Return the residue of the bound file that each residue of the unbound one is."""
    item = Item("c", parts=(Part(Role.WHOLE, "u.pdb"),), bound=(Part(Role.WHOLE, "b.pdb"),))
    files = {name: File((lines + "END\n").encode(), name) for name, lines in (("u.pdb", mine), ("b.pdb", theirs))}
    inventory, found = examine_item(item, files, KEEP)
    if found is None:
        raise UnusableInput(inventory.reason or Reason.SCAN_FAILED, inventory.detail)
    return found.maps["bound.whole"].tolist()


def test_a_molecule_corresponds_to_the_only_one_of_its_name_in_the_bound_structure() -> None:
    heme, twice = molecule("HEM", "A", 9, "NA", "NB"), molecule("SO4", "A", 7, "S") + molecule("SO4", "A", 8, "S")
    protein = chain("A", "GLY", "ALA", "CYS", "ASP")
    assert bound_map(protein + heme + twice, protein + twice + heme) == [0, 1, 2, 3, 6, -1, -1]
    assert bound_map(heme, protein + heme) == [4]
    with pytest.raises(UnusableInput, match="HEM"):
        bound_map(heme, protein + twice)


def links(structure: Structure) -> set[tuple[str, str, bool]]:
    """Return what a file says of bonds, by name."""
    found = structure.links()
    return {
        (
            *(
                f"{name_text(structure.name_R[structure.residue_A[one]])}.{name_text(structure.name_A[one])}"
                for one in pair
            ),
            sure,
        )
        for pair, sure in zip(found.atoms_L2.tolist(), found.covalent_L.tolist(), strict=True)
    }


LINK = "LINK         C   ALA A   2                 C2  GTP A 301     1555   1555  1.45  \n"


def test_links_lead_to_the_atoms_that_are_kept() -> None:
    assert links(parsed(LINK + LINES)) == {("ALA.C", "GTP.C2", True)}
    assert links(parsed(LINK + LINES, Policy())) == set()
    mirror = LINK.replace("1555   1555", "1555   2555")
    assert links(parsed(mirror + LINES)) == set()


def test_a_link_leads_to_the_alternative_that_is_kept() -> None:
    lines = LINK.replace("GTP A 301", "LIG A   9") + chain("A", "GLY", "ALA")
    for label, share in (("A", 0.3), ("B", 0.7)):
        lines += atom("C2", "LIG", "A", 9, altloc=label, occupancy=share, xyz=(share, 0, 9), record="HETATM")
    assert links(parsed(lines)) == {("ALA.C", "LIG.C2", True)}


def test_text_binary_and_pdb_tell_of_the_same_bonds(structures: Path) -> None:
    told = []
    for name in ("1aki.pdb.gz", "1aki.cif.gz", "1aki.bcif.gz")[: 3 if HAS_BIOTITE else 2]:
        path = structures / "varied" / name
        found = apply_policy(parse_structure(read_file(path, LIMIT), format_of(path), FileReading()), Policy()).links()
        assert found.covalent_L.all()
        told.append(found.atoms_L2.tolist())
    assert len(told[0]) == 4
    assert all(one == told[0] for one in told)


def test_a_link_of_an_assembly_is_in_every_copy(structures: Path) -> None:
    path = structures / "varied" / "1A8O.cif.gz"
    data = read_file(path, LIMIT)
    one, two = (
        apply_policy(parse_structure(data, "mmcif", FileReading(assembly=assembly)), Policy())
        for assembly in (None, "1")
    )
    assert len(two.chains) == 2
    assert len(two.links().atoms_L2) == 2 * len(one.links().atoms_L2)
    assert {chain.kind for chain in two.chains} == {Kind.PROTEIN}


def test_a_side_may_be_a_molecule_which_the_chain_on_the_other_side_then_lacks() -> None:
    for named, molecules, left in (
        ("A:GTP", ["A:GTP:301", "A:GTP:303"], ["A", "A:MG:302"]),
        ("A:GTP:303", ["A:GTP:303"], ["A", "A:GTP:301", "A:MG:302"]),
        ("A:MG", ["A:MG:302"], ["A", "A:GTP:301", "A:GTP:303"]),
        ("B:HEM:401", ["B:HEM:401"], ["A", "A:GTP:301", "A:GTP:303", "A:MG:302"]),
    ):
        found = read(part(Role.RECEPTOR, "A"), part(Role.LIGAND, named))
        assert names(found) == {"receptor": left, "ligand": molecules}
        ligand = found.partners[Role.LIGAND]
        assert (ligand.nodes, ligand.residues) == (0, len(molecules))
        swapped = read(part(Role.LIGAND, "A"), part(Role.RECEPTOR, named))
        assert names(swapped) == {"ligand": left, "receptor": molecules}


def test_molecules_that_cannot_be_had_are_a_named_reason() -> None:
    for receptor, ligand, recipe, reason in (
        (("A:GTP",), "A:GTP:303", KEEP, Reason.SHARED_CHAIN),
        (("A", "A:MG"), "A:MG", KEEP, Reason.SHARED_CHAIN),
        (("B",), "A:ATP", KEEP, Reason.MISSING_CHAIN),
        (("B",), "A:GTP:9", KEEP, Reason.MISSING_CHAIN),
        (("B",), "Q:GTP", KEEP, Reason.MISSING_CHAIN),
        (("A",), "A:GTP", ScanRecipe(), Reason.MISSING_CHAIN),
    ):
        found, detail = refused(part(Role.RECEPTOR, *receptor), part(Role.LIGAND, ligand), recipe=recipe)
        assert (found, bool(detail)) == (reason, True), ligand
    whole, molecule_alone = part(Role.RECEPTOR), part(Role.LIGAND, "C:HEM")
    assert refused(whole, molecule_alone, lines=HEME)[0] is Reason.CHAIN_WITHOUT_POLYMER
