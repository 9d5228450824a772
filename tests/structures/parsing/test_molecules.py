"""Ligands in SDF, MOL and MOL2: atoms and bonds as the file tells, and what is refused by name."""

from __future__ import annotations

import gzip
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rdkit import Chem
from rdkit.Chem import rdDistGeom

from pipeline.graphs import atom_graph
from pipeline.graphs.item_graph import GraphRecipe as GraphRecipe
from pipeline.records import Inventory, Item, Kind, Part, Reason, Role
from pipeline.structures.atoms import AtomTable, UnusableInput, name_text
from pipeline.structures.inventory import Complex, ScanRecipe, examine_item
from pipeline.structures.parsing.read_structure import FileReading, parse_structure
from pipeline.structures.parsing.structure_files import plain_files
from tests.structures.parsing.molecule_text import ACETAMIDE, THEOPHYLLINE
from tests.structures.pdb_text import chain

LIMIT = 1 << 20
ATOMS = GraphRecipe(nodes="atom", contacts=None)


def table(block: str, form: str = "sdf") -> AtomTable:
    return parse_structure(block.encode(), form, FileReading())


def refused(block: str, form: str = "sdf") -> UnusableInput:
    with pytest.raises(UnusableInput) as caught:
        table(block, form)
    return caught.value


def bonds(one: AtomTable) -> set[tuple[int, ...]]:
    assert one.links().is_complete
    return {tuple(pair) for pair in one.links().atoms_L2.tolist()}


def bonds_of(molecule: Any) -> set[tuple[int, ...]]:
    return {tuple(sorted((bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()))) for bond in molecule.GetBonds()}


def made(smiles: str) -> Any:
    molecule = Chem.AddHs(Chem.MolFromSmiles(smiles))
    assert rdDistGeom.EmbedMolecule(molecule, randomSeed=7) == 0
    return molecule


def read(folder: Path, name: str, content: str | bytes) -> tuple[Inventory, Complex | None]:
    """Return what is read of a file that is one side, beside a chain of protein."""
    (folder / "r.pdb").write_text(chain("A", "ALA", "GLY", "SER"))
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    parts = (Part(Role.RECEPTOR, str(folder / "r.pdb")), Part(Role.LIGAND, str(path)))
    item = Item("x", parts=parts)
    return examine_item(item, plain_files(LIMIT).of(item), ScanRecipe())


def test_theophylline_has_the_atoms_and_bonds_of_its_lines() -> None:
    one = table(THEOPHYLLINE)
    lines = THEOPHYLLINE.splitlines()
    wanted = {tuple(sorted((int(line[:3]) - 1, int(line[3:6]) - 1))) for line in lines[4 + 21 : 4 + 21 + 22]}
    assert bonds(one) == wanted
    assert len(wanted) == 22
    assert one.element_A.tolist() == [{"C": 6, "N": 7, "O": 8, "H": 1}[line[31]] for line in lines[4 : 4 + 21]]
    assert one.pos_A3[0].tolist() == [-2.9147, -0.3889, -0.0322]
    assert [name_text(name) for name in one.name_A[:5]] == ["C1", "N1", "C2", "O1", "C3"]
    assert not one.notes


@pytest.mark.parametrize(
    "smiles", ["Cn1c(=O)c2[nH]cnc2n(C)c1=O", "O=C([O-])c1ccc(Br)cc1I", "C[N+](C)(C)CCOP(=O)([O-])O"]
)
@pytest.mark.parametrize("version", ["V2000", "V3000"])
def test_a_molecule_has_the_bonds_that_rdkit_has(smiles: str, version: str) -> None:
    molecule = made(smiles)
    block = Chem.MolToMolBlock(molecule) if version == "V2000" else Chem.MolToV3KMolBlock(molecule)
    assert version in block
    one = table(block)
    assert bonds(one) == bonds_of(molecule)
    assert one.element_A.tolist() == [each.GetAtomicNum() for each in molecule.GetAtoms()]
    assert np.abs(one.pos_A3 - molecule.GetConformer().GetPositions()).max() < 1e-4


def test_a_mol2_file_has_the_names_and_bonds_of_its_lines() -> None:
    one = table(ACETAMIDE, "mol2")
    assert [name_text(name) for name in one.name_A] == ["CT", "C", "O", "N", "H1", "H2", "H3", "HN1", "HN2"]
    assert bonds(one) == {(0, 1), (1, 2), (1, 3), (0, 4), (0, 5), (0, 6), (3, 7), (3, 8)}
    assert one.element_A.tolist() == [6, 6, 8, 7, 1, 1, 1, 1, 1]
    apart = table(ACETAMIDE.replace("     3     2     4   am", "     3     2     4   nc"), "mol2")
    assert bonds(one) - bonds(apart) == {(1, 3)}


@pytest.mark.parametrize("name", ["l.sdf", "l.mol", "l.SDF", "l.sdf.gz", "l.mol2"])
def test_a_ligand_of_its_own_file_is_kept_whatever_is_done_with_molecules(tmp_path: Path, name: str) -> None:
    content = (ACETAMIDE if "mol2" in name else THEOPHYLLINE).encode()
    inventory, found = read(tmp_path, name, gzip.compress(content) if name.endswith(".gz") else content)
    assert found is not None, inventory
    (one,) = found.partners[Role.LIGAND].chains
    assert (one.name, one.kind, one.atoms) == ("_:LIG:1", Kind.OTHER, 9 if "mol2" in name else 21)


def test_the_graph_has_those_bonds_with_hydrogens_or_without(tmp_path: Path) -> None:
    _, found = read(tmp_path, "l.sdf", THEOPHYLLINE)
    ligand = atom_graph.build_atom_graph(found, ATOMS).parts[1]
    heavy = {pair for pair in bonds(table(THEOPHYLLINE)) if max(pair) < 13}
    assert {tuple(sorted(pair)) for pair in ligand.edges["bond"].T.tolist()} == heavy
    assert (ligand.size, len(heavy)) == (13, 14)
    full = atom_graph.build_atom_graph(found, GraphRecipe(nodes="atom", contacts=None, hydrogens=True)).parts[1]
    assert {tuple(sorted(pair)) for pair in full.edges["bond"].T.tolist()} == bonds(table(THEOPHYLLINE))


def test_no_distance_makes_or_breaks_a_bond_that_the_file_tells_of(tmp_path: Path) -> None:
    squeezed = THEOPHYLLINE.replace("   -2.9147   -0.3889   -0.0322", "   -0.4000   -0.9000    0.9000")
    _, found = read(tmp_path, "l.sdf", squeezed)
    ligand = atom_graph.build_atom_graph(found, ATOMS).parts[1]
    assert ligand.edges["bond"].shape[1] == 2 * 14
    far = THEOPHYLLINE.replace("   -2.9147", "   -9.9147")
    _, found = read(tmp_path, "l.sdf", far)
    with pytest.raises(UnusableInput, match=r"C1 of LIG 1 in chain _:LIG:1 and N1 .* 8\.44 Å apart"):
        atom_graph.build_atom_graph(found, ATOMS)


def flat(block: str, *, keep: bool) -> str:
    """Return a block with every z, or every coordinate, 0."""
    lines = block.splitlines()
    for at in range(4, 25):
        lines[at] = (lines[at][:20] if keep else f"{0:10.4f}" * 2) + f"{0:10.4f}" + lines[at][30:]
    return "\n".join(lines) + "\n"


def aromatic(block: str) -> str:
    """Return a block all of whose bonds are aromatic, which none of its hydrogens can have."""
    lines = block.splitlines()
    return "\n".join(line[:6] + "  4" + line[9:] if 25 <= at < 47 else line for at, line in enumerate(lines)) + "\n"


@pytest.mark.parametrize("block", [aromatic(THEOPHYLLINE), THEOPHYLLINE.replace("  1  2  1  0", "  1  2  3  0")])
def test_what_cannot_be_sanitised_is_read_and_counted(
    block: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert bonds(table(block)) == bonds(table(THEOPHYLLINE))
    inventory, _ = read(tmp_path, "l.sdf", block)
    assert inventory.partners[1].notes["unsanitised"] == 1
    assert capfd.readouterr().err == ""
    assert "unsanitised" not in read(tmp_path, "m.sdf", THEOPHYLLINE)[0].partners[1].notes


def test_deuterium_is_hydrogen_and_a_hydrogen_bond_is_no_bond() -> None:
    assert table(THEOPHYLLINE.replace(" H  ", " D  ", 1)).element_A[13] == 1
    block = Chem.MolToV3KMolBlock(made("CCO"))
    first = "M  V30 1 1 1 2"
    assert bonds(table(block)) - bonds(table(block.replace(first, "M  V30 1 10 1 2"))) == {(0, 1)}


def test_rdkit_speaks_as_before_once_a_file_is_read(capfd: pytest.CaptureFixture[str]) -> None:
    refused(THEOPHYLLINE.replace(" C  ", " Xx ", 1))
    assert capfd.readouterr().err == ""
    assert Chem.MolFromSmiles("C1CC") is None
    assert "unclosed ring" in capfd.readouterr().err


@pytest.mark.parametrize("is_same", [True, False])
def test_an_unbound_molecule_whose_atoms_are_in_another_order_is_refused(tmp_path: Path, is_same: bool) -> None:
    bound = THEOPHYLLINE if is_same else THEOPHYLLINE.replace("  1  2  1  0", "  1  4  1  0")
    (tmp_path / "r.pdb").write_text(chain("A", "ALA", "GLY", "SER"))
    (tmp_path / "u.sdf").write_text(THEOPHYLLINE)
    (tmp_path / "b.sdf").write_text(bound)
    receptor = Part(Role.RECEPTOR, str(tmp_path / "r.pdb"))
    ligand, there = (Part(Role.LIGAND, str(tmp_path / name)) for name in ("u.sdf", "b.sdf"))
    item = Item("x", parts=(receptor, ligand), bound=(receptor, there))
    inventory, found = examine_item(item, plain_files(LIMIT).of(item), ScanRecipe())
    assert found is not None, inventory
    recipe = GraphRecipe(nodes="atom", contacts=9.0)
    if is_same:
        assert atom_graph.build_atom_graph(found, recipe).parts[1].nodes["labelled"].all()
        return
    with pytest.raises(UnusableInput, match=r"C1 of LIG 1 .* use the same atom order in both files") as caught:
        atom_graph.build_atom_graph(found, recipe)
    assert caught.value.reason is Reason.SEQUENCE_MISMATCH


def test_two_threads_hear_of_their_own_molecules_alone() -> None:
    blocks = [
        (THEOPHYLLINE.replace("  1  2  1  0", "  1 99  1  0"), "sdf"),
        (ACETAMIDE.replace("C.3 ", "c3  "), "mol2"),
    ]
    alone = [refused(*one).detail for one in blocks]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            heard = [*threads.map(lambda number: refused(*blocks[number % 2]).detail, range(200))]
    finally:
        sys.setswitchinterval(before)
    assert heard == alone * 100


BROKEN_SDF = {
    **{symbol: (THEOPHYLLINE.replace(" C  ", f" {symbol:<3}", 1), Reason.PARSE_ERROR)
       for symbol in ("R#", "*", "LP", "A", "Q", "L", "Xx")},
    "a letter in a number": (THEOPHYLLINE.replace("   -2.9147", "   -2.x147"), Reason.PARSE_ERROR),
    "a letter beyond ASCII": (THEOPHYLLINE.replace("   -2.9147", "   -2.\xe9147"), Reason.PARSE_ERROR),
    "a bond to no atom": (THEOPHYLLINE.replace("  1  2  1  0", "  1 99  1  0"), Reason.PARSE_ERROR),
    "a bond to itself": (THEOPHYLLINE.replace("  1  2  1  0", "  1  1  1  0"), Reason.PARSE_ERROR),
    "cut off": (THEOPHYLLINE[:700], Reason.PARSE_ERROR),
    "no end": (THEOPHYLLINE.replace("M  END\n", ""), Reason.PARSE_ERROR),
    "another count": (THEOPHYLLINE.replace(" 21 22 ", " 21 20 "), Reason.PARSE_ERROR),
    "flat": (flat(THEOPHYLLINE, keep=True), Reason.PARSE_ERROR),
    "flat, and called so": (flat(THEOPHYLLINE, keep=True).replace("3D", "2D"), Reason.PARSE_ERROR),
    "all at one place": (flat(THEOPHYLLINE, keep=False), Reason.PARSE_ERROR),
    "text": ("hello\n", Reason.PARSE_ERROR),
    "no molecule": ("$$$$\n", Reason.NO_ATOMS),
    "no atoms": ("x\n\n\n  0  0  0  0  0  0  0  0  0  0999 V2000\nM  END\n", Reason.NO_ATOMS),
    "three molecules": ((THEOPHYLLINE + "$$$$\n") * 3, Reason.AMBIGUOUS_PARTNERS),
}  # fmt: skip
BROKEN_MOL2 = {
    "c3  ": "C.3 ", "LP ": "O.2", "Du ": "O.2", " 8 8 1": " 9 8 1", " 9 7 1": " 9 8 1", "9" * 4301 + " 8 1": "9 8 1",
    "     2     2     3    x": "     2     2     3    2", "     2     2    33    2": "     2     2     3    2",
}  # fmt: skip


def test_a_broken_file_is_refused_with_its_reason_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    for name, (block, reason) in BROKEN_SDF.items():
        problem = refused(block)
        assert (problem.reason, len(problem.detail) < 300) == (reason, True), (name, problem.detail)
    for new, old in BROKEN_MOL2.items():
        assert old in ACETAMIDE
        assert refused(ACETAMIDE.replace(old, new), "mol2").reason is Reason.PARSE_ERROR, new
    assert refused(ACETAMIDE * 2, "mol2").reason is Reason.AMBIGUOUS_PARTNERS
    assert refused("hello\n", "mol2").reason is Reason.NO_ATOMS
    assert capfd.readouterr().err == ""


def test_what_is_no_part_of_a_molecule_changes_nothing() -> None:
    for block in (
        THEOPHYLLINE.replace("\n", "\r\n"),
        THEOPHYLLINE + ">  <affinity>\n6.5\n\n$$$$\n",
        THEOPHYLLINE.replace("theophylline", "th\N{GREEK SMALL LETTER ALPHA}ophylline"),
    ):
        assert bonds(table(block)) == bonds(table(THEOPHYLLINE))
    assert bonds(table(ACETAMIDE.replace("ATOM\n", "ATOM \t\n"), "mol2")) == bonds(table(ACETAMIDE, "mol2"))
