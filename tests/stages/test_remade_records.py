"""What makes a graph useless is named, and what is made again differs where it should: on real records, changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.audit.meaning import allowed, differences, distance
from pipeline.graphs.graph_checks import wrong_graph
from pipeline.graphs.item_graph import GraphRecipe
from pipeline.graphs.make_graphs import encoded_graph
from pipeline.records import Inventory, Item, Part, Role
from pipeline.store.format.record import Record, decode_record, encode_record
from pipeline.structures.inventory import Complex, examine_item
from pipeline.structures.inventory import ScanRecipe as Structures
from pipeline.structures.parsing.read_structure import FileReading
from pipeline.structures.parsing.structure_files import File, read_file
from pipeline.structures.policy import Policy
from pipeline.structures.sources.data_source import items
from pipeline.structures.sources.item_ids import SourceSpec
from pipeline.structures.synthetic import complex_pdb
from tests.graphs.complexes import LIMIT

RESIDUES = GraphRecipe(neighbours=6, radius=8.0, cross_neighbours=3, cross_radius=9.0)
ATOMS = GraphRecipe(nodes="atom", cross_radius=6.0)
DIGEST = "0123456789abcdef" * 2
KEY = bytes(16)
PLAIN = Structures()
Read = tuple[Inventory, Complex]
Change = Callable[[dict[str, Any], dict[str, Any]], Any]


def as_read(arrays: dict[str, Any], meta: dict[str, Any], key: bytes = KEY, bfloat16: tuple[str, ...] = ()) -> Record:
    """Return a record as the store gives it."""
    return decode_record(encode_record(key, arrays, meta, bfloat16).blob)


def changed(record: Record, change: Change) -> Record:
    """Return a record in which something was changed."""
    arrays = {name: array.copy() for name, array in record.arrays.items()}
    meta = json.loads(json.dumps(record.meta))
    change(arrays, meta)
    return as_read(arrays, meta, record.key, tuple(record.bfloat16))


def made(seed: int, structures: Structures = PLAIN, residues: tuple[int, int] = (30, 25)) -> Read:
    """Return a made complex as it is read."""
    item = Item("c", parts=(Part(Role.COMPLEX, "c.pdb"),))
    inventory, read = examine_item(item, {"c.pdb": File(complex_pdb(seed, *residues), DIGEST)}, structures)
    return inventory, read


def graph_of(read: Complex, recipe: GraphRecipe) -> Record:
    return as_read(*encoded_graph(read, recipe))


@pytest.fixture(scope="module")
def residue_graph() -> Record:
    return graph_of(made(1)[1], RESIDUES)


@pytest.fixture(scope="module")
def atom_graph() -> Record:
    return graph_of(made(1)[1], ATOMS)


def put(name: str, at: Any, value: Any) -> Change:
    """Return a change of one place of an array."""

    def change(arrays: dict[str, Any], _meta: dict[str, Any]) -> None:
        arrays[name][at] = value

    return change


def swap(name: str, one: int, other: int) -> Change:
    def change(arrays: dict[str, Any], _meta: dict[str, Any]) -> None:
        arrays[name][[one, other]] = arrays[name][[other, one]]

    return change


def shorter(name: str) -> Change:
    return lambda arrays, _meta: arrays.update({name: arrays[name][:-1]})


def without(name: str) -> Change:
    return lambda arrays, _meta: arrays.pop(name)


def said(*path: Any, value: Any) -> Change:
    """Return a change of what the JSON of a record says."""

    def change(_arrays: dict[str, Any], meta: dict[str, Any]) -> None:
        for step in path[:-1]:
            meta = meta[step]
        meta[path[-1]] = value

    return change


OF_RESIDUES = {
    "an array is missing": (without("ligand.node.side"), "there is no ligand.node.side"),
    "an array too much": (lambda arrays, _: arrays.update(more=np.zeros(3)), "more does not belong in such a graph"),
    "another length": (shorter("receptor.node.row"), "receptor.node.row is [29]"),
    "a wrong size": (said("sizes", "pairs", value=1), "sizes.pairs is 1, expected 750"),
    "no number": (put("receptor.node.pos", (4, 1), np.nan), "receptor.node.pos[4]"),
    "a chain that is none": (put("ligand.node.chain", 24, 3), "ligand chain[24] is 3: of 1 chains"),
    "a row beyond the text": (put("ligand.node.row", 24, 25), "ligand row[24] is 25: of 25 letters"),
    "an edge to itself": (put("receptor.edge.near.neighbour", 0, 0), "receptor.edge.near.neighbour[0] is 0: is"),
    "edges out of order": (swap("receptor.edge.near.neighbour", 0, 1), "receptor.edge.near.neighbour[1]"),
    "a cross edge from elsewhere": (put("cross.near.neighbour", 0, 25), "cross.near.neighbour[0] is 25: of 25 nodes"),
    "a contact outside": (put("label.contact_pairs", (0, 1), 25), "label.contact_pairs[0] is 25: of 25 ligand nodes"),
    "a contact that is not near": (put("label.contact_nearest", 0, np.nan), "label.contact_nearest[0]"),
    "partners out of order": (lambda a, m: m["partners"].reverse(), "its partners are ligand, receptor"),
}  # fmt: skip


OF_ATOMS = {
    "a residue beyond all": (put("receptor.node.residue", -1, 77), "is 77: of 30 residues"),
    "a row beyond the text": (put("ligand.residue.row", 24, 30), "ligand row[24] is 30"),
    "a path beyond all": (put("receptor.path.angle", (0, 1), 255), "receptor.path.angle[0, 1] is 255"),
    "no names": (without("ligand.residue.name"), "there is no ligand.residue.name"),
}  # fmt: skip


def test_each_thing_that_makes_a_graph_useless_is_named(residue_graph: Record, atom_graph: Record) -> None:
    missed = []
    for record, recipe, table in ((residue_graph, RESIDUES, OF_RESIDUES), (atom_graph, ATOMS, OF_ATOMS)):
        assert not [*wrong_graph(record, recipe.plain()), *wrong_graph(record)]
        for name, (change, wanted) in table.items():
            found = list(wrong_graph(changed(record, change), recipe.plain()))
            if not any(wanted in what for what in found):
                missed.append((name, found))
    assert not missed
    assert list(wrong_graph(residue_graph, ATOMS.plain()))
    assert list(wrong_graph(changed(residue_graph, swap("receptor.edge.near.neighbour", 0, 1))))
    with pytest.raises(ValueError, match="format 9, not 1"):
        list(wrong_graph(changed(residue_graph, said("format", value=9))))


def test_what_was_made_anew_differs_by_more_than_a_digit_of_a_file_or_not_at_all(residue_graph: Record) -> None:
    arrays, meta = dict(residue_graph.arrays), dict(residue_graph.meta)
    assert not list(differences(residue_graph, arrays, meta))
    nudged = changed(residue_graph, lambda a, _: a["receptor.node.pos"].__iadd__(np.float32(1e-5)))
    assert not list(differences(nudged, arrays, meta))
    moved = changed(residue_graph, lambda a, _: a["receptor.node.pos"][2, 1].__iadd__(np.float32(0.01)))
    assert [what[:30] for what in differences(moved, arrays, meta)] == ["receptor.node.pos[2, 1, 0] is "]
    other = changed(residue_graph, put("receptor.node.number", 0, 5))
    assert next(differences(other, arrays, meta)).startswith("receptor.node.number[0] is 5; rebuilt, 1")
    assert "rebuilt, no_edges" in next(differences(residue_graph, {}, {"reason": "no_edges", "detail": ""}))


def test_a_scaled_embedding_is_as_far_as_a_turned_one() -> None:
    rows_LD = np.random.default_rng(0).normal(size=(20, 8)).astype(np.float32)
    assert distance(rows_LD, rows_LD, by_row=True) == 0
    assert distance(rows_LD * np.float32(1.01), rows_LD, by_row=True) > allowed(0.99999)
    one_row = rows_LD.copy()
    one_row[3] *= 1.01
    assert distance(one_row, rows_LD, by_row=True) > allowed(0.99999) > distance(one_row, rows_LD, by_row=False)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    sizes=st.tuples(st.integers(2, 60), st.integers(2, 60)),
    recipe=st.builds(
        GraphRecipe,
        nodes=st.sampled_from(["residue", "atom"]),
        neighbours=st.integers(1, 30),
        radius=st.none() | st.floats(6, 12),
        cross_neighbours=st.integers(0, 5),
        cross_radius=st.none() | st.floats(4, 12),
        contacts=st.none() | st.floats(5, 9),
        atom_radius=st.none() | st.floats(3, 6),
        hops=st.integers(1, 3),
        hydrogens=st.booleans(),
    ),
    structures=st.builds(Structures, reading=st.builds(FileReading, seqres=st.booleans())),
)
def test_nothing_that_is_made_by_the_real_code_is_ever_accused(
    seed: int, sizes: tuple[int, int], recipe: GraphRecipe, structures: Structures
) -> None:
    _, read = made(seed, structures, sizes)
    record = graph_of(read, recipe)
    assert not [*wrong_graph(record, recipe.plain()), *wrong_graph(record)]


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", [RESIDUES, ATOMS, GraphRecipe(nodes="atom", hydrogens=True, hops=2)])
@pytest.mark.parametrize("source", ["complexes", "bound", "unbound", "varied"])
def test_nothing_real_is_ever_accused(structures: Path, source: str, recipe: GraphRecipe) -> None:
    scan = Structures(policy=Policy(ligands="keep" if recipe.nodes == "atom" else "drop"))
    spec = {
        "complexes": SourceSpec("glob", structures / "complexes", pattern=("*.pdb",)),
        "varied": SourceSpec("glob", structures / "varied", pattern=("*.gz",), partners="none"),
    }.get(source) or SourceSpec("pairs", structures / "pairs", state=source)
    judged = 0
    for item in (one for one in items(spec) if isinstance(one, Item)):
        files = {part.path: File(read_file(Path(part.path), LIMIT), DIGEST) for part in (*item.parts, *item.bound)}
        _, read = examine_item(item, files, scan)
        if read is not None:
            wanted = recipe if not read.bound else replace(recipe, cross_neighbours=0, cross_radius=None)
            record = graph_of(read, wanted)
            assert not list(wrong_graph(record, wanted.plain())), item.id
            judged += "reason" not in record.meta
    assert judged >= 3
