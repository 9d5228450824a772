"""Atom graphs: what is an edge of which kind, contacts, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from pipeline.graphs import atom_graph
from pipeline.graphs.item_graph import GraphRecipe, PartnerGraph, decode_graph, encode_graph
from pipeline.records import Item, Kind, Reason, Role
from pipeline.records import Part as ItemPart
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.inventory import Complex, examine_item
from pipeline.structures.parsing.structure_files import File, read_file
from tests.graphs.complexes import KEEP, LIMIT, complex_in, complex_of, side
from tests.graphs.test_encoding import assert_equal
from tests.structures.pdb_text import atom as line
from tests.structures.pdb_text import chain

ATOM = GraphRecipe(nodes="atom")
BOTH = ItemPart(Role.COMPLEX, "")
RING = 1.4 * np.array([[np.cos(turn), np.sin(turn), 0] for turn in np.arange(6) * np.pi / 3])


def benzene(shift: float = 0.0, name: str = "BNZ", number: int = 1) -> str:
    return "".join(
        line(f"C{index}", name, "A", number, xyz=(x + shift, y, z), record="HETATM")
        for index, (x, y, z) in enumerate(RING.tolist())
    )


def pairs(part: PartnerGraph, kind: str) -> set[tuple[int, int]]:
    return set(zip(*part.edges[kind].tolist(), strict=True))


def reason(read: Complex, recipe: GraphRecipe = ATOM) -> Reason:
    with pytest.raises(UnusableInput) as raised:
        atom_graph.build_atom_graph(read, recipe)
    assert raised.value.detail
    return raised.value.reason


def test_the_pairs_of_a_ring_are_bonds_angles_and_across_it_dihedrals() -> None:
    (part,) = atom_graph.build_atom_graph(complex_of(benzene()), ATOM).parts
    assert {kind: edges.shape[1] for kind, edges in part.edges.items()} == {
        "bond": 12, "angle": 12, "dihedral": 6, "near": 0,
    }  # fmt: skip
    assert part.paths["angle"].tolist() == [[0, 1, 2], [0, 5, 4], [1, 0, 5], [1, 2, 3], [2, 3, 4], [3, 4, 5]]
    assert part.paths["dihedral"].shape == (6, 4)
    assert (part.paths["dihedral"][:, 0] < part.paths["dihedral"][:, 3]).all()


def test_what_hops_leaves_out_is_near_where_the_radius_reaches_it() -> None:
    kinds = ["bond", "angle", "dihedral"]
    for hops, near in ((1, 18), (2, 6), (3, 0)):
        (part,) = atom_graph.build_atom_graph(complex_of(benzene()), replace(ATOM, hops=hops)).parts
        assert list(part.edges) == [*kinds[:hops], "near"]
        assert list(part.paths) == kinds[1:hops]
        assert part.edges["near"].shape[1] == near, hops
    (part,) = atom_graph.build_atom_graph(complex_of(benzene()), replace(ATOM, atom_radius=None)).parts
    assert list(part.edges) == kinds


def test_nodes_say_element_name_and_residue_and_residues_what_they_are() -> None:
    lines = chain("A", "GLY", "TRP") + line("ZN", "ZN", "A", 90, xyz=(5, 5, 5), element="ZN", record="HETATM")
    (part,) = atom_graph.build_atom_graph(complex_of(lines), ATOM).parts
    names = [bytes(name).rstrip(b"\0").decode() for name in part.nodes["name"]]
    assert names == ["N", "CA", "C", "O"] * 2 + ["ZN"]
    assert part.nodes["element"].tolist() == [7, 6, 6, 8] * 2 + [30]
    assert part.nodes["residue"].tolist() == [0] * 4 + [1] * 4 + [2]
    assert [atom_graph.RESIDUE_TYPES[one] for one in part.residues["type"]] == ["G", "W", "other"]
    assert [atom_graph.KINDS[one] for one in part.residues["kind"]] == [Kind.PROTEIN, Kind.PROTEIN, Kind.OTHER]
    assert part.residues["chain"].tolist() == [0, 0, 1]
    assert part.row_R.tolist() == [0, 1, -1]
    assert part.residues["number"].tolist() == [1, 2, 90]
    assert [(one.name, one.sequence) for one in part.chains] == [("A", "GW"), ("A:ZN:90", "")]
    assert part.texts == ("GW",)


def test_hydrogens_are_nodes_only_when_asked_for_and_deuterium_is_hydrogen() -> None:
    lines = benzene() + line("D0", "BNZ", "A", 1, xyz=(2.48, 0, 0), element="D", record="HETATM")
    assert atom_graph.build_atom_graph(complex_of(lines), ATOM).parts[0].size == 6
    (part,) = atom_graph.build_atom_graph(complex_of(lines), replace(ATOM, hydrogens=True)).parts
    assert part.nodes["element"].tolist() == [6] * 6 + [1]
    assert (0, 6) in pairs(part, "bond")


SIDES = (side(Role.RECEPTOR, "A:BNZ:1"), side(Role.LIGAND, "A:BNZ:2"))


def test_contacts_and_cross_edges_run_between_the_partners_by_their_own_cut_offs() -> None:
    read = complex_of(benzene() + benzene(6.0, number=2), *SIDES)
    graph = atom_graph.build_atom_graph(read, replace(ATOM, contacts=3.3, cross_radius=4.0, cross_neighbours=1))
    assert graph.labels["contact_pairs"].tolist() == [[0, 3]]
    assert graph.labels["contact_nearest"].tolist() == pytest.approx([3.2], abs=1e-3)
    apart = cdist(RING, RING + np.array([6.0, 0, 0]))
    wanted = {(int(ligand), int(receptor)) for receptor, ligand in np.argwhere(apart <= 4.0)}
    wanted |= {(int(ligand), receptor) for receptor, ligand in enumerate(apart.argmin(axis=1))}
    assert set(zip(*graph.cross["near"].tolist(), strict=True)) == wanted


def test_without_contacts_there_are_no_labels_and_far_partners_are_fine() -> None:
    read = complex_of(benzene() + benzene(60.0, number=2), *SIDES)
    assert not atom_graph.build_atom_graph(read, replace(ATOM, contacts=None)).labels
    assert reason(read) is Reason.NO_CONTACTS


def test_what_has_no_graph_is_a_reason() -> None:
    on_another = benzene() + line("X", "BNZ", "A", 1, xyz=(1.405, 0, 0), record="HETATM", element="C")
    for read, why in (
        (complex_of(on_another), Reason.COINCIDENT_ATOMS),
        (complex_of(benzene() + benzene(2.8, number=2), *SIDES), Reason.COINCIDENT_ATOMS),
        (complex_of(line("H1", "HYD", "A", 1, record="HETATM", element="H")), Reason.NO_NODES),
        (complex_of(line("MG", "MG", "A", 1, record="HETATM", element="MG")), Reason.NO_EDGES),
    ):
        assert reason(read) is why


def test_atoms_too_far_apart_for_any_edge_are_no_graph_and_an_ion_beside_a_partner_is() -> None:
    far = "".join(
        line(f"C{index}", "LIG", "A", 1, xyz=(50.0 * index, 0, 0), record="HETATM", element="C") for index in range(2)
    )
    ion = line("MG", "MG", "A", 2, xyz=(0, 3, 0), record="HETATM", element="MG")
    sides = side(Role.RECEPTOR, "A:LIG"), side(Role.LIGAND, "A:MG")
    assert reason(complex_of(far + ion, *sides)) is Reason.NO_EDGES
    graph = atom_graph.build_atom_graph(
        complex_of(benzene() + ion, side(Role.RECEPTOR, "A:BNZ"), side(Role.LIGAND, "A:MG")), ATOM
    )
    assert graph.parts[1].size == 1
    assert len(graph.labels["contact_pairs"]) == 6


def test_contacts_are_those_of_the_benchmark_atom_by_atom(structures: Path) -> None:
    for path in sorted(structures.glob("complexes/*.pdb")):
        check_contacts(path)


def check_contacts(path: Path) -> None:
    """Compare the contacts of a complex with its table of atom pairs within 5 Å."""
    graph = atom_graph.build_atom_graph(complex_in(path, BOTH), ATOM)
    pairs_P2, apart_P = graph.labels["contact_pairs"], graph.labels["contact_nearest"]
    ours = {(named(graph.parts[0], a), named(graph.parts[1], b)) for a, b in pairs_P2.tolist()}
    rows = [row.split() for row in path.with_suffix(".contacts5.txt").read_text().splitlines()]
    theirs = {((chain, number, name), (second, at, other)) for number, chain, name, at, second, other, _ in rows}
    assert ours == theirs, path.name
    assert len(rows) == len(pairs_P2)
    np.testing.assert_allclose(np.sort(apart_P), sorted(float(row[-1]) for row in rows), atol=1e-4)


def named(part: PartnerGraph, node: int) -> tuple[str, str, str]:
    """Return chain, number and name of an atom, as the benchmark's tables have them."""
    residue = part.nodes["residue"][node]
    number = f"{part.residues['number'][residue]}{chr(part.residues['icode'][residue]).strip()}"
    name = bytes(part.nodes["name"][node]).rstrip(b"\0").decode()
    return part.chains[part.residues["chain"][residue]].name, number, name


def unbound(folder: Path, name: str) -> Complex:
    """Return an unbound pair with its bound structures."""
    parts, bound = (
        tuple(ItemPart(role, str(folder / f"{name}_{letter}_{state}.pdb.gz")) for role, letter in SIDE_LETTERS)
        for state in "ub"
    )
    files = {part.path: File(read_file(Path(part.path), LIMIT), part.path) for part in (*parts, *bound)}
    inventory, read = examine_item(Item(name, parts=parts, bound=bound), files, KEEP)
    assert read is not None, inventory
    return read


SIDE_LETTERS = ((Role.RECEPTOR, "r"), (Role.LIGAND, "l"))


@pytest.mark.parametrize("name", ["1HIA", "1KKL", "2VXT"])
def test_unbound_atoms_have_the_contacts_of_their_twins_in_the_bound_structure(structures: Path, name: str) -> None:
    read = unbound(structures / "pairs", name)
    graph = atom_graph.build_atom_graph(read, replace(ATOM, cross_radius=6.0))
    assert not graph.cross
    pairs_P2, apart_P = graph.labels["contact_pairs"], graph.labels["contact_nearest"]
    receptor, ligand = (part.nodes["bound"].astype(np.float64) for part in graph.parts)
    apart = cdist(receptor, ligand)
    np.testing.assert_allclose(apart[tuple(pairs_P2.T)], apart_P, atol=1e-3)
    assert abs(int(np.count_nonzero(apart <= 5.0)) - len(pairs_P2)) <= 1  # the table is of float32 positions
    for part in graph.parts:
        np.testing.assert_array_equal(np.isfinite(part.nodes["bound"]).all(axis=1), part.nodes["labelled"])
        assert part.nodes["labelled"].mean() > 0.9
    order = np.lexsort(pairs_P2.T[::-1])
    np.testing.assert_array_equal(order, np.arange(len(order)))


def test_rna_and_its_small_molecules_are_receptor_and_ligand(structures: Path) -> None:
    sides = side(Role.RECEPTOR, "A"), side(Role.LIGAND, "A:SPM")
    graph = atom_graph.build_atom_graph(complex_in(structures / "varied" / "4p5j.cif.gz", *sides), ATOM)
    rna, spermine = graph.parts
    assert spermine.size == 14
    assert {kind: edges.shape[1] // 2 for kind, edges in spermine.edges.items() if kind != "near"} == {
        "bond": 13, "angle": 12, "dihedral": 11,
    }  # fmt: skip
    assert {chain.name.split(":")[1] for chain in rna.chains[1:]} == {"IRI", "MG"}
    assert set(rna.residues["kind"]) == {atom_graph.KINDS.index(Kind.RNA), atom_graph.KINDS.index(Kind.OTHER)}
    assert (rna.row_R == -1).all()
    assert len(graph.labels["contact_pairs"]) > 20
    assert_equal(decode_graph(*encode_graph(graph)), graph)
