"""Topologies of AMBER: atoms, chains and bonds as they are told, what is refused, and the file beside them."""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path

import numpy as np
import parmed
import pytest
from scipy.io import netcdf_file

from pipeline.graphs import atom_graph
from pipeline.graphs.item_graph import GraphRecipe as GraphRecipe
from pipeline.records import Inventory, Item, Kind, Part, Reason, Role
from pipeline.structures.atoms import UnusableInput, name_text
from pipeline.structures.inventory import Complex, ScanRecipe, examine_item, item_key
from pipeline.structures.parsing.read_structure import FileReading, parse_structure
from pipeline.structures.parsing.structure_files import item_paths, plain_files
from pipeline.structures.policy import Policy, Structure, apply_policy
from tests.structures.parsing.amber_text import complex_files, edited, write_complex
from tests.structures.parsing.molecule_text import THEOPHYLLINE

KEEP = ScanRecipe(policy=Policy(ligands="keep"))
LIMIT = 1 << 20


def structure(topology: bytes | None = None, coordinates: bytes | None = None, **policy: str) -> Structure:
    own, beside = complex_files()
    table = parse_structure(topology or own, "amber", FileReading(), beside=coordinates or beside)
    return apply_policy(table, Policy(**policy))


def refused(topology: bytes | None = None, coordinates: bytes | None = None) -> UnusableInput:
    with pytest.raises(UnusableInput) as caught:
        structure(topology, coordinates, ligands="keep")
    return caught.value


def item_of(path: Path, *chains: str) -> Item:
    sides = zip((Role.RECEPTOR, Role.LIGAND), chains, strict=False)
    parts = tuple(Part(role, str(path), tuple(names.split(","))) for role, names in sides)
    return Item("x", parts=parts or (Part(Role.WHOLE, str(path)),))


def read(item: Item, recipe: ScanRecipe = KEEP) -> tuple[Inventory, Complex | None]:
    return examine_item(item, plain_files(LIMIT).of(item), recipe)


def key(item: Item) -> bytes:
    files = plain_files(LIMIT).of(item)
    return item_key(item, KEEP, {path: file.digest for path, file in files.items()})


def test_strands_are_chains_and_all_else_is_in_the_chain_without_a_name() -> None:
    found = structure(ligands="keep").chains
    assert [(one.name, one.kind, one.sequence) for one in found] == [
        ("A", Kind.RNA, "AGU"),
        ("B", Kind.RNA, "CG"),
        ("_:LIG:6", Kind.OTHER, ""),
        ("_:Na+:7", Kind.OTHER, ""),
    ]


def test_every_bond_of_every_atom_that_is_kept_is_the_one_parmed_has(tmp_path: Path) -> None:
    theirs = parmed.load_file(str(write_complex(tmp_path)))
    wanted = {frozenset((bond.atom1.idx, bond.atom2.idx)) for bond in theirs.bonds if bond.atom1.residue.name != "WAT"}
    ours = structure(ligands="keep")
    names = [(one.residue.idx + 1, one.name) for one in theirs.atoms]
    label = [
        (int(ours.number_R[residue]), name_text(name))
        for residue, name in zip(ours.residue_A, ours.name_A, strict=True)
    ]
    links = ours.links()
    assert links.is_complete
    assert {frozenset(label[one] for one in pair) for pair in links.atoms_L2.tolist()} == {
        frozenset(names[one] for one in pair) for pair in wanted
    }
    assert len(links.atoms_L2) == len(wanted) == 5 * 8 + 3 + 3


def test_the_graph_has_those_bonds_and_what_follows_from_them(tmp_path: Path) -> None:
    _, found = read(item_of(write_complex(tmp_path), "A,B", "_:LIG"))
    graph = atom_graph.build_atom_graph(found, GraphRecipe(nodes="atom", hydrogens=True, contacts=None))
    rna, ligand = graph.parts
    assert rna.edges["bond"].shape[1] == 2 * (5 * 8 + 3)
    assert ligand.edges["bond"].T.tolist() == [[1, 0], [3, 0], [0, 1], [2, 1], [1, 2], [0, 3]]
    assert ligand.paths["angle"].tolist() == [[0, 1, 2], [1, 0, 3]]
    assert ligand.paths["dihedral"].tolist() == [[2, 1, 0, 3]]
    assert ligand.nodes["element"].tolist() == [6, 7, 17, 1]
    without = atom_graph.build_atom_graph(found, GraphRecipe(nodes="atom", contacts=None)).parts
    assert [part.edges["bond"].shape[1] for part in without] == [2 * (5 * 7 + 3), 4]
    assert {bytes(name).rstrip(b"\0") for name in rna.residues["name"]} == {b"A", b"C", b"G", b"U"}


def test_a_bond_longer_than_any_is_refused_by_the_graph_and_named(tmp_path: Path) -> None:
    path = write_complex(tmp_path)
    beside = path.with_suffix(".inpcrd")
    lines = beside.read_text().splitlines()
    lines[2] = f"{99:12.7f}" + lines[2][12:]
    beside.write_text("\n".join(lines))
    _, found = read(item_of(path))
    with pytest.raises(UnusableInput, match="O5' of A 1"):
        atom_graph.build_atom_graph(found, GraphRecipe(nodes="atom", contacts=None))


def test_coordinates_are_read_from_netcdf_as_from_text() -> None:
    packed = io.BytesIO()
    own = structure().pos_A3
    all_A3 = parse_structure(complex_files()[0], "amber", FileReading(), beside=complex_files()[1]).pos_A3
    file = netcdf_file(packed, "w")
    file.createDimension("atom", len(all_A3))
    file.createDimension("spatial", 3)
    file.createVariable("coordinates", "f8", ("atom", "spatial"))[:] = all_A3
    file.flush()
    assert np.array_equal(structure(coordinates=packed.getvalue()).pos_A3, own)
    told = refused(coordinates=packed.getvalue()[:200])
    assert told.reason is Reason.PARSE_ERROR


def test_without_atomic_numbers_masses_tell_the_elements() -> None:
    old = structure(edited("ATOMIC_NUMBER", None), ligands="keep")
    assert np.array_equal(old.element_A, structure(ligands="keep").element_A)


def change(line: int, content: str) -> bytes:
    lines = complex_files()[1].decode().splitlines()
    return "\n".join([*lines[:line], content, *lines[line + 1 :]]).encode()


def test_the_coordinates_are_part_of_the_item_and_of_its_key(tmp_path: Path) -> None:
    item = item_of(write_complex(tmp_path), "A", "B")
    beside = tmp_path / "x.inpcrd"
    assert item_paths(item) == [str(tmp_path / "x.prmtop"), str(beside)]
    before = key(item)
    contents = {one.content for one in read(item)[0].partners}
    beside.write_bytes(beside.read_bytes().replace(b"0.4000000", b"0.4000001", 1))
    assert key(item) != before
    assert {one.content for one in read(item)[0].partners}.isdisjoint(contents)


def test_a_topology_without_coordinates_misses_a_file(tmp_path: Path) -> None:
    path = write_complex(tmp_path)
    path.with_suffix(".inpcrd").unlink()
    with pytest.raises(UnusableInput, match=r"x\.inpcrd") as caught:
        plain_files(LIMIT).of(item_of(path))
    assert caught.value.reason is Reason.MISSING_FILE


def test_packed_files_are_read_like_plain_ones(tmp_path: Path) -> None:
    for name, data in zip(("x.prmtop.gz", "x.rst7.gz"), complex_files(), strict=True):
        (tmp_path / name).write_bytes(gzip.compress(data))
    inventory, _ = read(item_of(tmp_path / "x.prmtop.gz", "A,B", "_:LIG"))
    assert [one.residues for one in inventory.partners] == [5, 1]


def test_a_broken_topology_or_broken_coordinates_are_refused() -> None:
    for number, topology in enumerate((
        b"hello\n",
        edited("BONDS_INC_HYDROGEN", None),
        edited("BONDS_WITHOUT_HYDROGEN", lambda body: body.rsplit("\n", 2)[0] + "\n"),
        edited("ATOM_NAME", lambda body: body[:40] + "\n"),
        edited("RESIDUE_POINTER", lambda body: body.replace("      10", "       x", 1)),
        edited("RESIDUE_POINTER", lambda body: body.replace("      10", "      99", 1)),
        edited("BONDS_INC_HYDROGEN", lambda body: " 9999999" + body[8:]),
        edited("ATOMIC_NUMBER", lambda body: "       0" + body[8:]),
        edited("ATOMIC_NUMBER", lambda body: body.replace("      17", "     170")),
        complex_files()[0].replace(b"%FORMAT(20a4)", b"%FORMAT(20a0)"),
        complex_files()[0][:3000],
    )):  # fmt: skip
        assert refused(topology).reason is Reason.PARSE_ERROR, number
    for number, coordinates in enumerate((
        change(1, "   12"),
        change(1, "  0.123   4.567"),
        b"one line",
        complex_files()[1][:400],
        change(2, " " * 36 + "*" * 36),
        change(2, " " * 9 + "nan" + "   0.1000000" * 5),
    )):  # fmt: skip
        assert refused(coordinates=coordinates).reason is Reason.PARSE_ERROR, number


@pytest.mark.parametrize("form", ["amber", "sdf"])
def test_a_second_model_or_an_assembly_is_not_there(form: str) -> None:
    data, beside = complex_files() if form == "amber" else (THEOPHYLLINE.encode(), None)
    for reading, reason in (
        (FileReading(model=2), Reason.MISSING_MODEL),
        (FileReading(assembly="1"), Reason.MISSING_ASSEMBLY),
    ):
        with pytest.raises(UnusableInput) as caught:
            parse_structure(data, form, reading, beside=beside)
        assert caught.value.reason is reason


@pytest.mark.parametrize(("module", "name"), [("rdkit", "x.sdf"), ("rdkit", "x.mol2.gz")])
def test_without_what_reads_a_form_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    write_complex(tmp_path)
    (tmp_path / "x.sdf").write_text(THEOPHYLLINE)
    (tmp_path / "x.mol2.gz").write_text(THEOPHYLLINE)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnusableInput, match=r"\[molecules\]") as caught:
        plain_files(LIMIT).of(item_of(tmp_path / name))
    assert caught.value.reason is Reason.NEEDS_EXTRA
