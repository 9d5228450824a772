"""Residue graphs: nodes, edges and labels of real complexes, and what is refused with its reason."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from pipeline.graphs import residue_graph
from pipeline.graphs.item_graph import GraphRecipe, ItemGraph, PartnerGraph, edge_lengths
from pipeline.graphs.residue_graph import INCOMPLETE, LETTERS, MODIFIED, NO_BACKBONE, VIRTUAL_CB
from pipeline.records import Kind, Reason, Role
from pipeline.structures.atoms import UnusableInput, name_text
from pipeline.structures.inventory import Complex
from pipeline.structures.inventory import ScanRecipe as ScanRecipe
from pipeline.structures.parsing.read_structure import FileReading
from pipeline.structures.policy import Policy
from pipeline.structures.synthetic import complex_pdb
from tests.graphs.complexes import complex_of, examined, moved, side
from tests.structures.pdb_text import atom
from tests.structures.pdb_text import residue as residue_lines

ONLY_CA = ScanRecipe(policy=Policy(require="ca"))
AB = (side(Role.RECEPTOR, "A"), side(Role.LIGAND, "B"))
NO_LABELS = GraphRecipe(contacts=None)


def strand(name: str, residues: int, y: float = 0.0, apart: float = 3.8, resname: str = "ALA") -> str:
    """Return a straight chain along x with a full backbone."""
    places = {"N": (-1.2, 0.5), "CA": (0.0, 0.0), "C": (1.2, 0.5), "O": (1.2, 1.7)}
    return (
        "".join(
            atom(one, resname, name, number + 1, xyz=(number * apart + x, y + up, 0.0))
            for number in range(residues)
            for one, (x, up) in places.items()
        )
        + "TER\n"
    )


def refusal(read: Complex, recipe: GraphRecipe = GraphRecipe()) -> tuple[Reason, str]:  # noqa: B008 - it is frozen
    with pytest.raises(UnusableInput) as raised:
        residue_graph.build_residue_graph(read, recipe)
    return raised.value.reason, raised.value.detail


def names(part: PartnerGraph) -> list[str]:
    numbers, icodes = part.nodes["number"].tolist(), part.nodes["icode"].tolist()
    return [f"{number}{chr(icode).strip(chr(0) + ' ')}" for number, icode in zip(numbers, icodes, strict=True)]


def labelled(graph: ItemGraph) -> Counter[tuple[str, str]]:
    receptor, ligand = map(names, graph.parts)
    pairs, atoms = graph.labels["contact_pairs"].tolist(), graph.labels["contact_atoms"].tolist()
    return Counter({(receptor[one], ligand[other]): count for (one, other), count in zip(pairs, atoms, strict=True)})


def test_contacts_at_5_angstrom_are_those_of_the_benchmarks_tables(
    structures: Path, complexes: dict[str, Complex]
) -> None:
    for name, read in complexes.items():
        table = (structures / "complexes" / f"{name}.contacts5.txt").read_text().splitlines()
        rows = [line.split() for line in table]
        theirs = Counter((row[0], row[3]) for row in rows)
        graph = residue_graph.build_residue_graph(read, GraphRecipe())
        assert labelled(graph) == theirs, name  # the pairs of residues, and the pairs of atoms of each
        nearest = min(float(row[6]) for row in rows)
        assert graph.labels["contact_nearest"].min() == pytest.approx(nearest, abs=1e-5)


def test_moving_a_complex_changes_no_edge_no_contact_and_no_distance(complexes: dict[str, Complex]) -> None:
    recipe = GraphRecipe(radius=9.0, cross_neighbours=5, cross_radius=8.0)
    for number, (name, read) in enumerate(complexes.items()):
        rotation = Rotation.random(random_state=number).as_matrix()
        shift = np.random.default_rng(number).uniform(-300, 300, 3)
        here, there = (
            residue_graph.build_residue_graph(read, recipe),
            residue_graph.build_residue_graph(moved(read, rotation, shift), recipe),
        )
        for one, other in zip(here.parts, there.parts, strict=True):
            np.testing.assert_array_equal(one.edges["near"], other.edges["near"], err_msg=name)
            ca, elsewhere = one.nodes["pos"][:, 1], other.nodes["pos"][:, 1]
            apart = edge_lengths(ca, ca, one.edges["near"]) - edge_lengths(elsewhere, elsewhere, one.edges["near"])
            assert np.abs(apart).max() < 1e-4
            for array in ("side", "pos"):
                turned = one.nodes[array] @ rotation.T.astype(np.float32)
                between_centres = one.nodes["pos"][:1, 1:2] @ rotation.T - other.nodes["pos"][:1, 1:2]
                offset = between_centres[0, 0] if array == "pos" else 0
                np.testing.assert_allclose(turned - offset, other.nodes[array], atol=1e-4)
        np.testing.assert_array_equal(here.cross["near"], there.cross["near"])
        for label in ("contact_pairs", "contact_atoms"):
            np.testing.assert_array_equal(here.labels[label], there.labels[label])
        np.testing.assert_allclose(here.labels["contact_nearest"], there.labels["contact_nearest"], atol=1e-4)


def test_side_vectors_are_those_of_a_loop_over_residues_and_atoms(complexes: dict[str, Complex]) -> None:
    main = {"N", "CA", "C", "O", "OXT"}
    for read in complexes.values():
        graph = residue_graph.build_residue_graph(read, NO_LABELS)
        for part, one in zip(graph.parts, read.sides.values(), strict=True):
            structure, nodes = one.structure, iter(range(part.size))
            for number in one.residues()[structure.node_R[one.residues()]].tolist():
                atoms = np.flatnonzero(structure.residue_A == number)
                own = [
                    at for at in atoms if name_text(structure.name_A[at]) not in main and structure.element_A[at] != 1
                ]
                node = next(nodes)
                if own:
                    ca = structure.pos_A3[structure.backbone_R5[number, 1]]
                    expected = structure.pos_A3[own].mean(axis=0) - ca
                else:
                    expected = part.nodes["pos"][node, 3] - part.nodes["pos"][node, 1]
                np.testing.assert_allclose(part.nodes["side"][node], expected, atol=1e-5)


def test_a_virtual_cb_is_where_the_real_one_of_ideal_geometry_is() -> None:
    pdb = complex_pdb(1, 40, 40)
    without = b"\n".join(line for line in pdb.split(b"\n") if line[13:15] != b"CB")
    whole, cut = (
        residue_graph.build_residue_graph(complex_of(one.decode(), *AB), GraphRecipe()) for one in (pdb, without)
    )
    for part, bare in zip(whole.parts, cut.parts, strict=True):
        np.testing.assert_allclose(part.nodes["pos"], bare.nodes["pos"], atol=3e-3)  # files have three decimals
        np.testing.assert_allclose(part.nodes["side"], bare.nodes["side"], atol=3e-3)
        assert (bare.nodes["flags"] & VIRTUAL_CB).all()


def test_what_a_node_is_can_be_read_from_its_arrays() -> None:
    lines = residue_lines("GLY", "A", 5) + residue_lines("LEU", "A", 6, icode="B")
    lines += residue_lines("MSE", "A", 7, ("N", "CA", "C", "O", "CB", "CG", "SE", "CE"), record="HETATM")
    lines += residue_lines("SER", "A", 8, ("N", "CA", "C", "O", "CB", "OG", "OXT")) + "TER\n" + strand("B", 3, y=30)
    whole = residue_graph.build_residue_graph(complex_of(lines), NO_LABELS).parts[0]
    assert whole.role is Role.WHOLE
    assert "".join(LETTERS[code] for code in whole.nodes["type"]) == "GLMSAAA"
    assert names(whole) == ["5", "6B", "7", "8", "1", "2", "3"]
    assert whole.nodes["chain"].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert whole.nodes["row"].tolist() == list(range(7))
    incomplete, modified = (whole.nodes["flags"] & bit != 0 for bit in (INCOMPLETE, MODIFIED))
    assert incomplete.tolist() == [False, True, False, False, True, True, True]
    assert modified.tolist() == [False, False, True, False, False, False, False]
    np.testing.assert_allclose(whole.nodes["side"][3], [0, 3.5, 0], atol=1e-5)  # CB and OG, but not OXT


def test_hydrogens_are_no_part_of_side_chains_or_contacts() -> None:
    heavy = strand("A", 3) + strand("B", 3, y=6)
    lines = heavy.splitlines(keepends=True)
    for at in reversed(range(len(lines))):
        if " O   " in lines[at]:
            near = atom("HB", "ALA", lines[at][21], int(lines[at][22:26]), xyz=(3.8, 3.0, 0.0), element="H")
            lines.insert(at, near.replace(" H\n", " D\n") if at % 2 else near)
    plain, protonated = (
        residue_graph.build_residue_graph(complex_of(content, *AB), GraphRecipe(contacts=5.0))
        for content in (heavy, "".join(lines))
    )
    for label, array in plain.labels.items():
        np.testing.assert_array_equal(array, protonated.labels[label])
    for one, other in zip(plain.parts, protonated.parts, strict=True):
        np.testing.assert_allclose(one.nodes["side"], other.nodes["side"], atol=1e-6)


def test_contacts_are_counted_up_to_and_with_the_cutoff_wherever_the_complex_lies() -> None:
    lines = residue_lines("GLY", "A", 1, ("CA",)) + residue_lines("GLY", "A", 9, ("CA",)) + "TER\n"
    lines += "".join(atom("CA", "GLY", "B", number, xyz=(3.8, 5.0 * number, 0.0)) for number in (1, 2)) + "TER\n"
    read = complex_of(lines, *AB, recipe=ONLY_CA)
    graph = residue_graph.build_residue_graph(read, GraphRecipe(contacts=5.0))
    assert graph.labels["contact_pairs"].tolist() == [[0, 0]]
    assert graph.labels["contact_nearest"].tolist() == [5.0]
    for seed in range(20):
        rotation, shift = Rotation.random(random_state=seed).as_matrix(), np.full(3, 77.7 * seed)
        again = residue_graph.build_residue_graph(moved(read, rotation, shift), GraphRecipe(contacts=5.0))
        assert again.labels["contact_pairs"].tolist() == [[0, 0]]
    assert refusal(read, GraphRecipe(contacts=4.999))[0] is Reason.NO_CONTACTS


def test_chains_of_ca_only_are_graphs_where_the_policy_allows_and_say_what_is_missing() -> None:
    lines = "".join(residue_lines("ALA", name, number, ("CA",)) for name in "AB" for number in range(1, 5))
    lines = lines.replace("   0.000   0.000  1.00", "   0.000   4.000  1.00", 4)
    part = residue_graph.build_residue_graph(complex_of(lines, *AB, recipe=ONLY_CA), GraphRecipe()).parts[0]
    assert np.isfinite(part.nodes["pos"][:, 1]).all()
    assert np.isnan(part.nodes["pos"][:, [0, 2, 3]]).all()
    assert np.isnan(part.nodes["side"]).all()
    assert (part.nodes["flags"] == VIRTUAL_CB | INCOMPLETE | NO_BACKBONE).all()


def test_rows_lead_into_full_sequences_where_those_are_encoded() -> None:
    names_of = ["ALA", "GLY", "SER", "ALA", "LEU"]
    seqres = "".join(f"SEQRES   1 {name} {5:4d}  {' '.join(names_of)}\n" for name in "AB")

    def gapped(name: str, y: float) -> str:
        full = strand(name, 5, y=y).splitlines(keepends=True)
        kept = [line.replace("ALA", names_of[int(line[22:26]) - 1]) for line in full[:-1] if line[22:26] != "   3"]
        return "".join(kept) + full[-1]

    recipe = ScanRecipe(reading=FileReading(seqres=True))
    read = complex_of(seqres + gapped("A", 0) + gapped("B", 4), *AB, recipe=recipe)
    for part in residue_graph.build_residue_graph(read, GraphRecipe()).parts:
        assert part.row_R.tolist() == [0, 1, 3, 4]
        assert part.texts == ("AGSAL",)
        assert "".join(LETTERS[code] for code in part.nodes["type"]) == "AGAL"


def test_the_receptor_comes_first_in_whatever_order_the_sides_were_given() -> None:
    read = complex_of(strand("A", 3) + strand("B", 4, y=4), AB[1], AB[0])
    graph = residue_graph.build_residue_graph(read, GraphRecipe(cross_neighbours=1))
    assert [part.role for part in graph.parts] == [Role.RECEPTOR, Role.LIGAND]
    assert graph.cross["near"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert graph.labels["contact_pairs"].max(axis=0).tolist() == [2, 3]


def refused() -> dict[str, tuple[Complex, GraphRecipe, Reason]]:
    """Return what has no graph, with its reason."""
    twice = strand("A", 4) + residue_lines("GLY", "A", 20).replace("  76.000   1.000", "   3.800   0.005")
    bare = "".join(atom(name, "ALA", "B", number, xyz=(number * 3.8, 4, 0)) for number in (1, 2) for name in ("N", "C"))
    rna = "".join(residue_lines("A", "R", number, ("P", "C1'", "C3'", "C4'", "N9")) for number in (1, 2, 3)) + "TER\n"
    sparse = complex_of(strand("A", 4, apart=9.0) + strand("B", 4, y=4), *AB)
    both, default = (side(Role.RECEPTOR, "A", "B"), side(Role.LIGAND, "C")), GraphRecipe()
    lines = "".join(strand(name, 4, y=y) for name, y in zip("ABCD", (0, 40, 80, 80), strict=True))
    bound = (side(Role.RECEPTOR, "C"), side(Role.LIGAND, "D"))
    _, on_each_other = examined((lines + "END\n").encode(), *AB, bound=bound)
    return {
        "a partner of one residue": (complex_of(strand("A", 4) + strand("B", 1, y=4), *AB), default, Reason.NO_EDGES),
        "all farther than the radius": (sparse, GraphRecipe(neighbours=0, radius=8.0), Reason.NO_EDGES),
        "CA atoms at one place": (complex_of(twice + strand("B", 4, y=4), *AB), default, Reason.COINCIDENT_ATOMS),
        "partners at one place": (complex_of(strand("A", 4) + strand("B", 4), *AB), default, Reason.COINCIDENT_ATOMS),
        "bound partners at one place": (on_each_other, default, Reason.COINCIDENT_ATOMS),
        "partners apart": (complex_of(strand("A", 4) + strand("B", 4, y=40), *AB), default, Reason.NO_CONTACTS),
        "partners far apart": (complex_of(strand("A", 4) + strand("B", 4, y=400), *AB), default, Reason.NO_CONTACTS),
        "a chain without CA": (
            complex_of(strand("A", 3) + bare + "TER\n" + strand("C", 3, y=8), *both),
            default,
            Reason.NO_NODES,
        ),
        "a partner of nucleotides": (
            complex_of(strand("A", 4) + rna, AB[0], side(Role.LIGAND, "R")),
            default,
            Reason.NO_NODES,
        ),
    }


def test_what_has_no_graph_is_refused_with_its_reason() -> None:
    for name, (read, recipe, reason) in refused().items():
        found, detail = refusal(read, recipe)
        assert (found, bool(detail)) == (reason, True), name
        if reason in (Reason.NO_CONTACTS,) or name == "bound partners at one place":
            assert not residue_graph.build_residue_graph(read, NO_LABELS).labels, name


def test_nucleotides_are_left_out() -> None:
    rna = "".join(residue_lines("A", "R", number, ("P", "C1'", "C3'", "C4'", "N9")) for number in (1, 2, 3)) + "TER\n"
    parts = (side(Role.RECEPTOR, "A", "R"), side(Role.LIGAND, "B"))
    read = complex_of(strand("A", 4) + rna + strand("B", 4, y=4), *parts)
    receptor = residue_graph.build_residue_graph(read, GraphRecipe()).parts[0]
    assert receptor.size == 4
    assert [one.kind for one in receptor.chains] == [Kind.PROTEIN, Kind.RNA]
    assert receptor.row_R.tolist() == [0, 1, 2, 3]


def places_of_nodes(read: Complex, role: Role) -> list[int]:
    """Return where the nodes are among the residues of a side."""
    return np.flatnonzero(read.sides[role].structure.node_R[read.sides[role].residues()]).tolist()


def test_unbound_graphs_carry_the_contacts_and_places_of_the_bound_structures(
    unbound: dict[str, Complex], bound: dict[str, Complex]
) -> None:
    assert len(unbound) == 5
    for name, read in unbound.items():
        graph, there = (
            residue_graph.build_residue_graph(read, GraphRecipe(cross_neighbours=3)),
            residue_graph.build_residue_graph(bound[name], GraphRecipe()),
        )
        assert not graph.cross, "the partners are not in one frame"
        nodes_of_twins = []
        for part, other in zip(graph.parts, there.parts, strict=True):
            row_N = read.maps[f"bound.{part.role.value}"][places_of_nodes(read, part.role)]
            twin_of = {place: twin for twin, place in enumerate(places_of_nodes(bound[name], part.role))}
            twin_N = np.array([twin_of.get(row, -1) for row in row_N.tolist()])
            labelled_N = part.nodes["labelled"]
            assert (
                set(np.flatnonzero(twin_N >= 0)) <= set(np.flatnonzero(labelled_N)) <= set(np.flatnonzero(row_N >= 0))
            )
            np.testing.assert_array_equal(np.isfinite(part.nodes["bound"]).all(axis=1), labelled_N)
            in_file = part.nodes["bound"][twin_N >= 0] + graph.labels["bound_centre"]
            expected = other.nodes["pos"][twin_N[twin_N >= 0], 1] + other.centre_3
            np.testing.assert_allclose(in_file, expected, atol=1e-4)
            nodes_of_twins.append({twin: node for node, twin in enumerate(twin_N.tolist()) if twin >= 0})
        expected_pairs = {
            (nodes_of_twins[0][one], nodes_of_twins[1][other]): (atoms, nearest)
            for (one, other), atoms, nearest in zip(*map(np.ndarray.tolist, contacts_of(there)), strict=True)
            if one in nodes_of_twins[0] and other in nodes_of_twins[1]
        }
        pairs, *counts = map(np.ndarray.tolist, contacts_of(graph))
        found = {tuple(pair): figures for pair, *figures in zip(pairs, *counts, strict=True)}
        assert len(expected_pairs) > 10
        assert {pair: tuple(found[pair]) for pair in expected_pairs} == expected_pairs, name
        assert list(found) == sorted(found)


def contacts_of(graph: ItemGraph) -> tuple[NDArray[np.int64], ...]:
    return tuple(graph.labels[f"contact_{name}"] for name in ("pairs", "atoms", "nearest"))
