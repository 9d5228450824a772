"""Predicted aligned errors beside structures: a field of edges, part of keys, and whatever else a JSON may hold."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.graphs.graph_checks import wrong_graph
from pipeline.graphs.item_graph import GraphRecipe, ItemGraph, decode_graph, encode_graph
from pipeline.graphs.make_graphs import build_graph
from pipeline.keys import content_digest
from pipeline.records import Inventory, Item, Part, Reason, Role
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.record import Record
from pipeline.structures import scan_items as scan
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.inventory import Complex, ScanRecipe, examine_item, item_key
from pipeline.structures.parsing.aligned_errors import pae_candidates, read_errors
from pipeline.structures.parsing.structure_files import File
from pipeline.structures.policy import Policy
from pipeline.structures.scan_items import ScanShelves, look_up_items, scan_items
from pipeline.training.items.crop import crop_item, crop_rng
from pipeline.training.items.item_source import BuiltGraphs, ItemArrays
from pipeline.training.items.item_table import TableBuilder
from pipeline.training.items.loader import Loader
from tests.graphs.complexes import side
from tests.graphs.test_plddt import cif, pdb
from tests.testkit.command import Command
from tests.testkit.project import MakeProject, settle
from tests.training.items.content import Micros

LENGTH, CHAINS = 8, "AB"
SIZE = LENGTH * len(CHAINS)
WHOLE = np.random.default_rng(5).integers(0, 32, (SIZE, SIZE))  # of no symmetry, as AlphaFold DB rounds it
BESIDE = ScanRecipe(policy=Policy(pae="beside"))
REQUIRED = ScanRecipe(policy=Policy(pae="required"))
GRAPH = GraphRecipe(neighbours=4, cross_neighbours=3)
PARTNERS = (side(Role.RECEPTOR, "A"), side(Role.LIGAND, "B"))
NAME, JSON = "AF-P00000-F1-model_v4", "AF-P00000-F1-predicted_aligned_error_v4.json"


def alphafold_db(table: np.ndarray, indent: int | None = None) -> bytes:
    whole = {"predicted_aligned_error": table.tolist(), "max_predicted_aligned_error": 31.75}
    return json.dumps([whole], indent=indent).encode()


def colabfold(table: np.ndarray, indent: int | None = None) -> bytes:
    whole = {"plddt": [90.5] * len(table), "max_pae": float(table.max()), "pae": table.tolist(), "ptm": 0.5}
    return json.dumps(whole, indent=indent).encode()


def alphafold_3(table: np.ndarray, indent: int | None = None) -> bytes:
    """Write a table whose first half is chain A's; tokens are those of B, of a ligand between, then of A."""
    half = len(table) // 2
    rows = [*range(half, len(table)), None, None, *range(half)]
    wide = [[31.5 if None in (on, of) else table[on, of].item() for of in rows] for on in rows]
    whole = {
        "atom_chain_ids": ["A", "B"] * 9,
        "contact_probs": [[0.5] * len(rows)] * len(rows),
        "pae": wide,
        "token_chain_ids": ["LIG" if row is None else CHAINS[row // half] for row in rows],
        "token_res_ids": [1 if row is None else row % half + 1 for row in rows],
    }
    return json.dumps(whole, indent=indent).encode()


FORMS = (alphafold_db, colabfold, alphafold_3)


def examined(
    data: bytes, errors: bytes | None, recipe: ScanRecipe = BESIDE, suffix: str = "pdb"
) -> tuple[Inventory, Complex | None]:
    name = f"{NAME}.{suffix}"
    parts = tuple(replace(part, path=name) for part in PARTNERS)
    files = {name: File(data, "1")} | ({} if errors is None else {JSON: File(errors, "2")})
    return examine_item(Item("i", parts=parts), files, recipe)


def graph_of(data: bytes, errors: bytes | None, suffix: str = "pdb") -> ItemGraph:
    """Return a graph as it is read from its record, which a check of the cache must find to be right."""
    inventory, read = examined(data, errors, suffix=suffix)
    assert read is not None, inventory
    arrays, meta = encode_graph(build_graph(read, GRAPH))
    assert list(wrong_graph(Record(b"k" * 16, arrays, meta), GRAPH.plain())) == []
    return decode_graph(arrays, meta)


def wanted(graph: ItemGraph, table: np.ndarray) -> list[np.ndarray]:
    """Return the errors of each partner's edges and of those between them, by the rule: aligned on the node."""
    first = {role: LENGTH * place for place, role in enumerate(part.role for part in graph.parts)}
    kinds = [(part.edges["near"], first[part.role], first[part.role]) for part in graph.parts]
    kinds.append((graph.cross["near"], first[Role.LIGAND], first[Role.RECEPTOR]))
    return [
        np.array([table[node + on, neighbour + of] for neighbour, node in edges_2E.T.tolist()], np.float32)
        for edges_2E, of, on in kinds
    ]


def found(graph: ItemGraph) -> list[np.ndarray]:
    return [fields["near.pae"] for fields in (*(part.edge_fields for part in graph.parts), graph.cross_fields)]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize(("data", "suffix"), [(pdb(), "pdb"), (cif(), "cif")], ids=["pdb", "cif"])
def test_each_edge_has_the_error_of_the_neighbour_aligned_on_the_node(
    form: Callable[..., bytes], data: bytes, suffix: str
) -> None:
    graph = graph_of(data, form(WHOLE), suffix)
    assert all(len(errors_E) for errors_E in found(graph))
    for errors_E, right_E in zip(found(graph), wanted(graph, WHOLE), strict=True):
        assert errors_E.dtype == np.float32
        assert np.array_equal(errors_E, right_E)


def test_residues_that_are_no_nodes_are_rows_all_the_same() -> None:
    policy = Policy(plddt="marked", min_plddt=70.0, pae="beside")
    reading = replace(BESIDE.reading, b_factors=True)
    read = examined(pdb(), alphafold_db(WHOLE), replace(BESIDE, policy=policy, reading=reading))[1]
    graph = build_graph(read, GRAPH)
    kept = [0, 1, 2, 3, 7]  # of the receptor; 70 and more
    neighbour_E, node_E = graph.parts[0].edges["near"]
    right_E = WHOLE[np.ix_(kept, kept)][node_E, neighbour_E]
    assert np.array_equal(found(graph)[0], right_E.astype(np.float32))


def test_a_residue_of_several_tokens_has_their_mean() -> None:
    whole = json.loads(alphafold_3(WHOLE))
    twice = [0, *range(len(whole["pae"]))]  # the first residue of B has two tokens, as a modified one has
    wide = np.array(whole["pae"])[np.ix_(twice, twice)]
    wide[0] += 2
    whole |= {"pae": wide.tolist(), **{name: [whole[name][at] for at in twice] for name in list(whole)[-2:]}}
    table = WHOLE.astype(float)
    table[LENGTH] += 1
    graph = graph_of(pdb(), json.dumps(whole).encode())
    assert all(map(np.array_equal, found(graph), wanted(graph, table)))


def test_edges_have_nan_where_no_json_says_and_the_scan_notes_it() -> None:
    inventory, _ = examined(pdb(), None)
    assert [partner.notes["no_pae"] for partner in inventory.partners] == [1, 1]
    assert all(np.isnan(errors_E).all() for errors_E in found(graph_of(pdb(), None)))
    with_errors, _ = examined(pdb(), alphafold_db(WHOLE))
    assert not any("no_pae" in partner.notes for partner in with_errors.partners)


def test_a_file_without_is_rejected_where_they_are_required() -> None:
    inventory, _ = examined(pdb(), None, REQUIRED)
    assert inventory.reason is Reason.NO_PAE
    assert JSON in inventory.detail
    assert examined(pdb(), alphafold_db(WHOLE), REQUIRED)[0].reason is None


def test_partners_in_files_of_their_own_have_their_own_errors_and_none_between_them() -> None:
    files = {f"{name}.pdb": File(pdb(), name) for name in ("r", "l", "bound")}
    files["r.pae.json"] = File(alphafold_db(WHOLE), "p")
    files["bound.pae.json"] = File(b"is not looked at", "q")
    parts = (Part(Role.RECEPTOR, "r.pdb", ("A",)), Part(Role.LIGAND, "l.pdb", ("B",)))
    bound = tuple(replace(part, path="bound.pdb") for part in parts)
    inventory, read = examine_item(Item("i", parts, bound), files, BESIDE)
    assert read is not None, inventory
    unbound = build_graph(read, replace(GRAPH, cross_neighbours=0))
    receptor, ligand = (part.edge_fields["near.pae"] for part in unbound.parts)
    neighbour_E, node_E = unbound.parts[0].edges["near"]
    assert np.array_equal(receptor, WHOLE[node_E, neighbour_E].astype(np.float32))
    assert np.isnan(ligand).all()
    assert not unbound.cross_fields
    together = examine_item(Item("i", parts), files, BESIDE)[1]
    assert np.isnan(build_graph(together, GRAPH).cross_fields["near.pae"]).all()


def test_the_name_of_a_structure_tells_that_of_its_json() -> None:
    for structure, names in (
        ("AF-P12345-F1-model_v4.cif.gz", ["AF-P12345-F1-predicted_aligned_error_v4"]),
        ("x_unrelaxed_rank_001_alphafold2_ptm_seed_000.pdb", ["x_scores_rank_001_alphafold2_ptm_seed_000"]),
        ("relaxed_model_1_ptm_pred_0.pdb", ["pae_model_1_ptm_pred_0"]),
        ("fold_x_model_0.cif", ["fold_x_full_data_0"]),
        ("x_seed-1_sample-0_model.cif", ["x_seed-1_sample-0_confidences"]),
        ("model.cif", ["confidences"]),
        ("any.ENT", []),
    ):
        stem = structure.removesuffix(".gz").rpartition(".")[0]
        either = [f"a/b/{name}{ending}" for name in (*names, f"{stem}.pae") for ending in (".json", ".json.gz")]
        assert list(pae_candidates(f"a/b/{structure}")) == either
    assert not any(pae_candidates(path) for path in ("x.prmtop", "x.sdf", "x.json", "pdb", ""))


def changed(table: np.ndarray = WHOLE, **what: object) -> bytes:
    return json.dumps([json.loads(alphafold_db(table))[0] | what]).encode()


def put(place: tuple[int, int], value: str, data: bytes | None = None) -> bytes:
    """Return a JSON with something else in one place of its table."""
    table = WHOLE.astype(float)
    table[place] = 77.125
    return (data or alphafold_db(table).replace(b"31.75", b"99")).replace(b"77.125", value.encode())


def of_tokens(**what: object) -> bytes:
    return json.dumps(json.loads(alphafold_3(WHOLE)) | what).encode()


ROWS = WHOLE.tolist()
WRONG = {
    "empty file": b"",
    "text": b"hello",
    "not square": changed(WHOLE[:-1]),
    "too many rows": changed(predicted_aligned_error=[*ROWS, ROWS[0]]),
    "a short row": changed(predicted_aligned_error=[*ROWS[:3], ROWS[3][1:], *ROWS[4:]]),
    "empty": changed(predicted_aligned_error=[[]]),
    "of another structure": alphafold_db(WHOLE[:9, :9]),
    "negative": put((2, 3), "-1"),
    "NaN": put((0, 0), "NaN"),
    "infinite": put((0, 0), "1e999"),
    "null in a row": put((0, 1), "null"),
    "a text": put((0, 1), '"4"'),
    "nothing between commas": put((0, 1), ""),
    "two objects": json.dumps([{}, {}]).encode(),
    "a number": b"5",
    "another JSON": b'{"chain_ptm": [0.5], "iptm": 0.8}',
    "twice": alphafold_db(WHOLE)[:-2] + b', "predicted_aligned_error": [[1]]}]',
    "cut short": alphafold_db(WHOLE)[:300],
    "lists of before 2022": b'[{"residue1": [1], "residue2": [1], "distance": [0.1]}]',
    "tokens too few": of_tokens(token_res_ids=[1]),
    "tokens of no number": of_tokens(token_res_ids=["1"] * 18),
    "tokens of another residue": of_tokens(token_res_ids=[*range(2, 10), 1, 1, *range(1, 9)]),
    "tokens of another chain": of_tokens(token_chain_ids=["A"] * 8 + ["L"] * 10),
}  # fmt: skip


def test_a_json_that_is_none_or_of_other_residues_is_rejected() -> None:
    for what, data in WRONG.items():
        inventory, read = examined(pdb(), data)
        assert (inventory.reason, read) == (Reason.BAD_PAE, None), what
        assert inventory.detail.startswith(f"{JSON}: "), what


TABLE = st.integers(1, 7).flatmap(
    lambda size: st.lists(
        st.lists(st.integers(0, 3175).map(lambda value: value / 100), min_size=size, max_size=size),
        min_size=size,
        max_size=size,
    )
)


@settings(max_examples=60, deadline=None)
@given(TABLE, st.sampled_from([alphafold_db, colabfold]), st.sampled_from([None, 0, 3]), st.floats(0, 1))
def test_any_table_is_read_as_it_was_written_and_no_part_of_its_file_is(
    rows: list[list[float]], form: Callable[..., bytes], indent: int | None, share: float
) -> None:
    data = form(np.array(rows), indent)
    assert np.array_equal(read_errors(data)[0], np.array(rows, np.float32))
    with pytest.raises(UnusableInput):
        read_errors(data[: int(share * (len(data) - 1))])


def test_a_table_is_read_without_a_python_number_for_each_of_its_own() -> None:
    data = alphafold_db(np.random.default_rng(0).integers(0, 3100, (400, 400)) / 100)
    tracemalloc.start()
    pae_NN = read_errors(data)[0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert pae_NN.nbytes == 4 * 400 * 400
    assert peak < 6 * pae_NN.nbytes  # with a Python number for each it would be 13


@pytest.fixture
def predicted(tmp_path: Path) -> tuple[Item, Path]:
    """An item whose file lies in a folder, and where its JSON does."""
    path = tmp_path / f"{NAME}.pdb"
    path.write_bytes(pdb())
    (tmp_path / JSON).write_bytes(alphafold_db(WHOLE))
    settle(tmp_path)
    return Item("i", tuple(replace(part, path=str(path)) for part in PARTNERS), split="train"), tmp_path / JSON


def scanned(item: Item, recipe: ScanRecipe, cache: Path) -> Callable[[], bool]:
    """Scan an item; return a function that tells whether all is known of it as its files are now."""
    folder = CacheFolder(cache)
    shelves = ScanShelves(folder.kind("scan"), folder.kind("files"), 1 << 20)
    list(scan_items([item], recipe, shelves))
    return lambda: look_up_items([item], recipe, shelves)[0].inventory is not None


def test_a_json_that_changes_goes_or_comes_makes_the_item_anew_and_what_stands_still_is_not_opened(
    predicted: tuple[Item, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    item, beside = predicted
    is_known = scanned(item, BESIDE, tmp_path / "cache")
    with monkeypatch.context() as closed:
        closed.setattr(scan, "read_file", lambda *_: pytest.fail("a file was opened"))
        assert is_known()
    for change in (lambda: beside.write_bytes(alphafold_db(WHOLE.T)), beside.unlink):
        change()
        settle(tmp_path)
        assert not is_known()
        assert scanned(item, BESIDE, tmp_path / "cache")()
    beside.with_suffix(".json.gz").write_bytes(gzip.compress(alphafold_db(WHOLE)))
    settle(tmp_path)
    assert not is_known()
    assert scanned(item, BESIDE, tmp_path / "cache")()


def test_a_check_of_the_cache_finds_errors_that_are_none() -> None:
    arrays, meta = encode_graph(graph_of(pdb(), alphafold_db(WHOLE)))
    for name in [name for name in arrays if name.endswith(".pae")]:
        others = [np.full_like(arrays[name], value) for value in (-1.0, np.inf, 1e6)]
        for spoilt in (*others, arrays[name][1:]):
            record = Record(b"k" * 16, {**arrays, name: spoilt}, meta)
            assert any(name in line for line in wrong_graph(record, GRAPH.plain())), spoilt


def test_a_crop_keeps_the_error_of_each_edge_that_stays() -> None:
    graph = graph_of(pdb(), alphafold_db(WHOLE))
    arrays, meta = encode_graph(graph)
    cut = crop_item(ItemArrays(0, "i", arrays, meta), {"nodes": 10}, crop_rng(0, 0, "i"))
    less = decode_graph(cut.arrays, cut.meta)
    numbers = [part.nodes["number"].astype(int) - 1 for part in less.parts]
    assert 0 < sum(map(len, numbers)) <= 10
    ends = [(part.edges["near"], rows, rows, 0) for part, rows in zip(less.parts, numbers, strict=True)]
    ends.append((less.cross["near"], *numbers[::-1], 0))
    first = {0: 0, 1: LENGTH}
    for place, ((neighbour_E, node_E), of, on, _) in enumerate(ends):
        shift = (first[place], first[place]) if place < 2 else (LENGTH, 0)
        right_E = WHOLE[on[node_E] + shift[1], of[neighbour_E] + shift[0]]
        assert np.array_equal(found(less)[place], right_E.astype(np.float32))


def test_tasks_find_it_beside_the_edges_of_each_item_and_of_a_batch(predicted: tuple[Item, Path]) -> None:
    item, _ = predicted
    other = Path(item.parts[0].path).with_name("other.pdb")
    other.write_bytes(pdb())
    alone = replace(item, id="alone", parts=tuple(replace(part, path=str(other)) for part in item.parts))
    builder = TableBuilder()
    for one in (item, alone):
        digests = {path: content_digest(Path(path).read_bytes()).hex() for path in BESIDE.paths(one)}
        builder.add(one.id, GRAPH.key(item_key(one, BESIDE, digests)), "train", graph_of(pdb(), None).sizes(), one)
    (batch,) = Loader(BuiltGraphs(builder.table(), BESIDE, GRAPH), None, Micros([[0, 1]]))
    graph = graph_of(pdb(), alphafold_db(WHOLE))
    first, second = batch.items
    for part, errors_E in zip(graph.parts, wanted(graph, WHOLE), strict=False):
        own = first.sides[part.role.value]
        assert own.edges.keys() == {"near"}
        assert np.array_equal(own.edge_fields["near.pae"], errors_E)
        assert second.sides[part.role.value].edge_fields["near.pae"].isnan().all()
        joined = batch[f"{part.role.value}.edge.near.pae"]
        assert joined.shape == batch[f"{part.role.value}.edge.near"].shape[1:]
        assert np.array_equal(batch.sides[part.role.value].edge_fields["near.pae"], joined, equal_nan=True)
    assert first.cross.keys() == {"near"}
    assert np.array_equal(first.cross_fields["near.pae"], wanted(graph, WHOLE)[2])
    assert len(batch["cross.near.pae"]) == batch["cross.near"].shape[1]


@pytest.mark.nightly
def test_a_run_rejects_what_is_none_and_counts_who_has_none(pipeline: Command, make_project: MakeProject) -> None:
    data = make_project(0, structures__pae="beside", data__max_rejected_fraction=0.5) / "data"
    for name, errors in (("good", alphafold_db(WHOLE)), ("lone", None), ("bad", alphafold_db(WHOLE[:3, :3]))):
        (data / f"{name}.pdb").write_bytes(pdb())
        if errors:
            (data / f"{name}.pae.json").write_bytes(errors)
    for without in (1, 0):
        settle(data)
        said = pipeline("submit", "--stage", "graph", "--executor", "local", "--follow")
        assert (said.code, "1 rejected" in said.err) == (0, True), said.err
        census = json.loads(pipeline("status", "--json").out)["stages"][0]["census"]
        assert (census["accepted"], census["items_without_pae"]) == (2, without), census
        (data / "lone.pae.json").write_bytes(alphafold_db(WHOLE.T))
