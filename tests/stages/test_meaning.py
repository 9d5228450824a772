"""What a record says, judged: each thing that can be wrong is done to a real record, and must be named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.encoder.embedding_recipe import EmbeddingRecipe as Encoding
from pipeline.encoder.embedding_recipe import SequenceCut, Variant
from pipeline.graphs.build_graph import encoded_graph
from pipeline.graphs.item_graph import GraphRecipe
from pipeline.keys import recipe_key
from pipeline.records import Inventory, Item, Part, Role
from pipeline.stages.encoder_checks import allowed, distance, wrong_embedding, wrong_limit, wrong_parity, wrong_weights
from pipeline.stages.remade_records import differences
from pipeline.stages.structure_checks import (
    wrong,
    wrong_beside_inventory,
    wrong_file,
    wrong_inventory,
    wrong_recipe,
    wrong_table,
)
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.record import Record, decode_record, encode_record
from pipeline.structures.inventory import Complex, examine_item
from pipeline.structures.inventory import ScanRecipe as Structures
from pipeline.structures.inventory import plain_recipe as plain_structures
from pipeline.structures.parsing.read_structure import FileReading
from pipeline.structures.parsing.structure_files import File, read_file
from pipeline.structures.policy import Policy
from pipeline.structures.sources.data_source import items
from pipeline.structures.sources.item_ids import SourceSpec
from pipeline.structures.synthetic import complex_pdb
from pipeline.training.items.item_table import TableBuilder
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


def inventory_of(seed: int, structures: Structures = PLAIN) -> Record:
    inventory, read = made(seed, structures)
    return as_read(dict(read.maps), inventory.to_json())


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


def typed(name: str, dtype: str) -> Change:
    return lambda arrays, _meta: arrays.update({name: arrays[name].astype(dtype)})


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
    "another format": (said("format", value=9), "its format is 9, not 1"),
}  # fmt: skip


OF_ATOMS = {
    "a residue beyond all": (put("receptor.node.residue", -1, 77), "is 77: of 30 residues"),
    "a row beyond the text": (put("ligand.residue.row", 24, 30), "ligand row[24] is 30"),
    "a path beyond all": (put("receptor.path.angle", (0, 1), 255), "receptor.path.angle[0, 1] is 255"),
    "no names": (without("ligand.residue.name"), "there is no ligand.residue.name"),
}  # fmt: skip


def test_without_its_recipe_a_graph_is_judged_by_what_holds_for_any(residue_graph: Record, atom_graph: Record) -> None:
    assert not [*wrong(residue_graph), *wrong(atom_graph)]
    assert list(wrong(changed(residue_graph, swap("receptor.edge.near.neighbour", 0, 1))))


def test_a_reason_in_place_of_a_graph_is_judged() -> None:
    assert not list(wrong(as_read({}, {"reason": "no_contacts", "detail": "far apart"})))
    assert list(wrong(as_read({}, {"reason": "whim", "detail": ""}))) == ["the reason 'whim' is unknown"]
    assert len(list(wrong(as_read({"a": np.zeros(1)}, {"reason": "no_edges"})))) == 2


def renamed(inventory: Inventory, **changes: Any) -> Inventory:
    receptor, ligand = inventory.partners
    chains = (replace(receptor.chains[0], **changes),)
    return replace(inventory, partners=(replace(receptor, chains=chains), ligand))


OF_INVENTORIES = {
    "no such role": (said("partners", 0, "role", value="host"), "it is not an inventory"),
    "a role twice": (said("partners", 0, "role", value="ligand"), "its partners are ligand, ligand"),
    "a letter less": (said("partners", 0, "chains", 0, "sequence", value="W" * 29), "30 residues, 29 letters"),
    "a sign that is no letter": (said("partners", 0, "chains", 0, "sequence", value="w" * 30), "contains non-letters"),
    "more nodes than residues": (said("partners", 0, "chains", 0, "nodes", value=31), "30 residues, 31 nodes"),
    "fewer atoms than residues": (said("partners", 0, "chains", 0, "atoms", value=3), "30 nodes and 3 atoms"),
    "a note that is not so": (said("partners", 0, "notes", "incomplete", value=2), "notes.incomplete is 2"),
    "a list of others": (said("partners", 0, "left_out", value=[["A", "GLY", "1", "N"]]), "left_out lists 1, and 0"),
    "content that is no digest": (said("partners", 1, "content", value="abc"), "ligand: content is 'abc'"),
    "a map too much": (lambda a, _: a.update({"rows.ligand": np.arange(25, dtype=np.int32)}), "its maps are"),
    "a reason and more": (said("reason", value="no_atoms"), "it has both a reason (no_atoms) and contents"),
    "a kind that is none": (said("partners", 0, "chains", 0, "kind", value="wood"), "it is not an inventory"),
}  # fmt: skip


def test_what_is_remembered_of_a_file_is_a_digest_and_a_size_or_a_reason() -> None:
    assert not list(wrong_file(as_read({}, {"content": DIGEST, "bytes": 12})))
    assert not list(wrong_file(as_read({}, {"reason": "empty_file", "detail": "nothing in it"})))
    for meta in ({"content": "zz", "bytes": 1}, {"content": DIGEST, "bytes": 0}, {"reason": "whim", "detail": ""}, {}):
        assert list(wrong_file(as_read({}, meta))), meta


OF_MAPS = {
    f"row {at} of the map is {value}": (put("rows.receptor", at, value), "is inconsistent")
    for at, value in ((29, 30), (3, 2), (0, -1))
}
ENCODING = Encoding(DIGEST, layer=2, context="chain", precision="fp32", storage="fp32")
TEXT = "ACDEFGHIKLMNPQRSTVWY"


def embedding(recipe: Encoding = ENCODING, variant: Variant | None = None, text: str = TEXT, width: int = 8) -> Record:
    """Return an embedding as the stage stores it."""
    variant = variant or Variant(recipe.precision)
    cut, rows = variant.cut, len(text)
    if cut and cut.policy == "truncate":
        rows = min(rows, cut.length)
    rows_LD = np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)
    stored = {"fp32": rows_LD, "fp16": rows_LD.astype(np.float16), "bf16": (rows_LD.view(np.uint32) >> 16).astype("u2")}
    meta = {
        "residues": len(text), "rows": rows, "precision": variant.precision, "cut": asdict(cut) if cut else None,
        "text": text, "weights": recipe.weights, "layer": recipe.layer, "context": recipe.context,
    }  # fmt: skip
    arrays = {"rows": stored[recipe.storage]} | ({"cls": stored[recipe.storage][0]} if recipe.cls else {})
    bfloat16 = tuple(arrays) if recipe.storage == "bf16" else ()
    return as_read(arrays, meta, recipe.key(text, variant), bfloat16)


OF_EMBEDDINGS = {
    "a row less": (shorter("rows"), "rows is 19 long, and its text has 20 residues"),
    "no number": (put("rows", (3, 2), np.nan), "rows[3, 2] is not finite (and 0 more)"),
    "a row that nobody wrote": (put("rows", 5, 0.0), "rows[5] is all zeros"),
    "another storage": (typed("rows", "f2"), "storage is 'fp16'; the recipe of its key says 'fp32'"),
    "a type that is none": (typed("rows", "f8"), "rows is float64, which is not a supported precision"),
    "another text": (said("text", value=TEXT[::-1]), "its key belongs to another sequence"),
    "a letter that is none": (said("text", value="J" * 20), "text: 'J' at position 1"),
    "other weights": (said("weights", value="f" * 32), f"weights is '{'f' * 32}'; the recipe of its key says"),
    "another layer": (said("layer", value=1), "layer is 1; the recipe of its key says 2"),
    "another context": (said("context", value="partner"), "context is 'partner'; the recipe"),
    "another precision": (said("precision", value="fp16"), "precision is 'fp16'; the recipe"),
    "a number of residues": (said("residues", value=19), "residues is 19; its text has 20"),
    "a cut that is none": (said("cut", value={"policy": "windows", "length": 4, "overlap": 4}), "cut is"),
    "no rows": (without("rows"), "its arrays are none, not rows [L, D]"),
}  # fmt: skip


OF_MARKS = {
    "no number": (put("cls", 2, np.nan), "cls[0, 2] is not finite"),
    "a row that nobody wrote": (put("cls", slice(None), 0.0), "cls[0] is all zeros"),
    "another storage": (typed("cls", "f2"), "cls is float16 [8], and rows is float32 [20, 8]"),
    "another width": (shorter("cls"), "cls is float32 [7], and rows"),
    "none": (without("cls"), "cls is None; the recipe of its key says True"),
}


WEIGHTS = {
    "name": "m", "form": "fair-esm", "path": "m.pt", "digest": DIGEST, "layers": 2, "dim": 16, "heads": 2,
    "precision": "fp32", "bytes": 99,
}  # fmt: skip


def test_what_is_remembered_of_weights_fits_together() -> None:
    assert not list(wrong_weights(as_read({}, WEIGHTS)))
    for change in ({"digest": "x"}, {"heads": 3}, {"dim": 0, "heads": 1}, {"precision": "fp8"}, {"bytes": "many"}):
        assert list(wrong_weights(as_read({}, WEIGHTS | change))), change
    assert "it does not describe a checkpoint" in next(wrong_weights(as_read({}, {"name": "m"})))


def test_parity_limits_and_recipes_are_what_their_keys_were_made_from() -> None:
    made_from = {"version": [1, 1], "weights": DIGEST, "layer": 2, "precision": "fp32", "device": "cpu"}
    meta = {**made_from, "lowest": 1.0, "sequences": 9, "threshold": 0.99999}
    key = recipe_key("parity", made_from)
    assert not list(wrong_parity(as_read({}, meta, key)))
    assert list(wrong_parity(as_read({}, meta | {"lowest": 0.9}, key)))
    assert list(wrong_parity(as_read({}, meta | {"device": "card"}, key)))
    assert list(wrong_parity(as_read({}, meta | {"cls": True}, key)))
    assert not list(wrong_parity(as_read({}, meta | {"cls": True}, recipe_key("parity", made_from | {"cls": True}))))
    limit = {"weights": DIGEST, "layer": 2, "precision": "fp32", "device": "cpu", "memory": 70, "week": "2026-01"}
    limit |= {"budget": 512}
    assert not list(wrong_limit(as_read({}, limit, recipe_key("limits", limit))))
    assert list(wrong_limit(as_read({}, limit | {"budget": 1024}, recipe_key("limits", limit))))
    recipe = {"kind": "graph", "recipe": RESIDUES.plain()}
    assert not list(wrong_recipe(as_read({}, recipe, recipe_key("recipe", recipe))))
    assert list(wrong_recipe(as_read({}, {**recipe, "kind": "scan"}, recipe_key("recipe", recipe))))
    for odd in ({"nothing": 1}, {}, {**recipe, "kind": 7}, {**recipe, "recipe": ["neighbours"]}):
        assert list(wrong_recipe(as_read({}, odd, recipe_key("recipe", odd)))), odd


OF_TABLES = {
    "a split that is none": (put("split", 2, 7), "split[2] is 7 of 1 splits"),
    "texts that end before they begin": (put("id.end", 1, 1), "id.end[1] is before the end of the text before"),
    "texts that end too soon": (put("id.end", 4, 9), "id.end ends at 9 of 10 bytes"),
    "a size below nothing": (put("size.nodes", 3, -1), "size.nodes[3] is -1"),
    "another size": (put("size.nodes", 3, 77), "its key belongs to another table"),
    "an item less": (shorter("size.edges"), "size.edges is [4], not [5]"),
    "no sizes": (without("size.edges"), "its arrays are"),
    "another format": (said("format", value=2), "its format is 2, not 1"),
}


def item_table(folder: Path) -> Record:
    builder = TableBuilder()
    for number in range(5):
        builder.add(f"i{number}", bytes([number] * 16), "train", {"nodes": number + 1, "edges": 3})
    store = CacheFolder(folder / "cache").kind("sets")
    return store.get(builder.write(store))


def test_each_thing_that_can_be_wrong_with_a_record_is_named(
    residue_graph: Record, atom_graph: Record, tmp_path: Path
) -> None:
    full, marked, plain = Structures(reading=FileReading(seqres=True)), replace(ENCODING, cls=True), Variant("fp32")
    embedding_recipe, marked_recipe = ENCODING.plain(plain), marked.plain(plain)
    missed = []
    for record, judge, table in (
        (residue_graph, lambda one: wrong(one, RESIDUES.plain()), OF_RESIDUES),
        (atom_graph, lambda one: wrong(one, ATOMS.plain()), OF_ATOMS),
        (inventory_of(1), lambda one: wrong_inventory(one, plain_structures(PLAIN)), OF_INVENTORIES),
        (inventory_of(1, full), lambda one: wrong_inventory(one, plain_structures(full)), OF_MAPS),
        (embedding(), lambda one: wrong_embedding(one, embedding_recipe), OF_EMBEDDINGS),
        (embedding(marked), lambda one: wrong_embedding(one, marked_recipe), OF_MARKS),
        (item_table(tmp_path), wrong_table, OF_TABLES),
    ):
        assert not list(judge(record))
        for name, (change, wanted) in table.items():
            found = list(judge(changed(record, change)))
            if not any(wanted in what for what in found):
                missed.append((name, found))
    assert not missed


def test_a_record_of_another_recipe_or_size_is_named(residue_graph: Record) -> None:
    assert list(wrong(residue_graph, ATOMS.plain()))
    assert list(wrong_inventory(inventory_of(1), plain_structures(Structures(max_residues=54))))
    for change in (said("weights", value="f" * 32), said("layer", value=1), typed("rows", "f2")):
        assert list(wrong_embedding(changed(embedding(), change)))  # its key vouches for what it says
    marked, plain = embedding(replace(ENCODING, cls=True)), embedding()
    assert list(wrong_embedding(changed(marked, without("cls"))))
    assert list(wrong_embedding(replace(plain, arrays={**plain.arrays, "cls": marked.arrays["cls"]})))
    half = replace(ENCODING, storage="bf16")
    assert list(wrong_embedding(changed(embedding(half), put("rows", (2, 1), 0x7F80))))  # no finite bfloat16


def test_an_embedding_as_it_is_made_is_in_order() -> None:
    for storage, cut, cls in product(
        ("fp32", "fp16", "bf16"), (None, SequenceCut("windows", 10, 4), SequenceCut("truncate", 10)), (False, True)
    ):
        recipe, variant = replace(ENCODING, storage=storage, cls=cls), Variant("fp32", cut)
        record = embedding(recipe, variant)
        assert not [*wrong_embedding(record, recipe.plain(variant)), *wrong_embedding(record)], (storage, cut, cls)


def test_a_graph_that_its_inventory_contradicts_is_named(residue_graph: Record, atom_graph: Record) -> None:
    inventory = made(1)[0]
    hydrogens = ATOMS.plain() | {"hydrogens": True}
    for record, recipe in ((residue_graph, RESIDUES.plain()), (atom_graph, ATOMS.plain())):
        assert not list(wrong_beside_inventory(record, inventory, {}, recipe))
    for name, record, recipe, other in (
        ("a chain's name", residue_graph, RESIDUES.plain(), renamed(inventory, name="Z")),
        ("a chain's sequence", residue_graph, RESIDUES.plain(), renamed(inventory, sequence="W" * 30)),
        ("a node less", residue_graph, RESIDUES.plain(), renamed(inventory, nodes=29)),
        ("a partner less", residue_graph, RESIDUES.plain(), replace(inventory, partners=inventory.partners[:1])),
        ("fewer atoms", atom_graph, ATOMS.plain(), renamed(inventory, atoms=100)),
        ("other atoms, with hydrogens", atom_graph, hydrogens, renamed(inventory, atoms=999)),
    ):
        assert list(wrong_beside_inventory(record, other, {}, recipe)), name


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
    inventory, read = made(seed, structures, sizes)
    record, kept = graph_of(read, recipe), as_read(dict(read.maps), inventory.to_json())
    assert not list(wrong(record, recipe.plain()))
    assert not list(wrong(record))
    assert not list(wrong_inventory(kept, plain_structures(structures)))
    assert not list(wrong_inventory(kept))
    assert not list(wrong_beside_inventory(record, inventory, kept.arrays, recipe.plain()))


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
        inventory, read = examine_item(item, files, scan)
        kept = as_read(dict(read.maps) if read else {}, inventory.to_json())
        assert not list(wrong_inventory(kept, plain_structures(scan))), item.id
        if read is not None:
            wanted = recipe if not read.bound else replace(recipe, cross_neighbours=0, cross_radius=None)
            record = graph_of(read, wanted)
            assert not list(wrong(record, wanted.plain())), item.id
            assert not list(wrong_beside_inventory(record, inventory, kept.arrays, wanted.plain())), item.id
            judged += "reason" not in record.meta
    assert judged >= 3
