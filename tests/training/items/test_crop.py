"""An item that is cut to a size is the same item, only smaller."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.errors import PlanInfeasible
from pipeline.graphs.item_graph import decode_graph, encode_graph
from pipeline.store.cache_folder import CacheFolder
from pipeline.training.items.batch import BatchBuilder
from pipeline.training.items.crop import crop_item, crop_rng
from pipeline.training.items.item_source import CachedGraphs, ItemArrays
from tests.training.items.content import ALONE, PAIR, graph_of, made


def found_of(graph, name="item"):
    return ItemArrays(0, name, *encode_graph(graph))


def cut(graph, limits, seed=0, **options):
    found = found_of(graph)
    small = crop_item(found, limits, np.random.default_rng(seed), **options)
    BatchBuilder([small])  # the loader's own checks: every field has the rows of its axis
    return decode_graph(small.arrays, small.meta), small


def kept_nodes(part, small):
    """Return the old number of each node that is left: no two are at one place."""
    place = {row.tobytes(): node for node, row in enumerate(part.nodes["pos"])}
    assert len(place) == part.size
    return np.array([place[row.tobytes()] for row in small.nodes["pos"]])


def pairs_of(edges_2E):
    return list(zip(*edges_2E.tolist(), strict=True))


def check(graph, small):
    """Compare a cut graph with what is left of the whole one, pair by pair, in the slowest and plainest way."""
    kept = [kept_nodes(*both) for both in zip(graph.parts, small.parts, strict=True)]
    new = [{old: place for place, old in enumerate(kept_N.tolist())} for kept_N in kept]
    for part, less, kept_N, new_N in zip(graph.parts, small.parts, kept, new, strict=True):
        assert (np.diff(kept_N) > 0).all()
        assert (less.role, less.chains) == (part.role, part.chains)
        np.testing.assert_array_equal(less.centre_3, part.centre_3)
        for name in part.nodes.keys() - {"residue"}:
            np.testing.assert_array_equal(less.nodes[name], part.nodes[name][kept_N])
        for name, edges in part.edges.items():
            wanted = [(new_N[a], new_N[b]) for a, b in pairs_of(edges) if a in new_N and b in new_N]
            assert pairs_of(less.edges[name]) == wanted
        for name, path in part.paths.items():
            wanted = [[new_N[node] for node in row] for row in path.tolist() if all(node in new_N for node in row)]
            assert less.paths[name].tolist() == wanted
        if part.residues:
            before, after = part.nodes["residue"][kept_N], less.nodes["residue"]
            for name, array in part.residues.items():
                np.testing.assert_array_equal(less.residues[name][after], array[before])
            if less.size < part.size:
                assert set(after.tolist()) == set(range(len(less.row_R)))  # none is left without a node
    receptor, ligand = new[0], new[-1]
    for name, edges in graph.cross.items():
        wanted = [(ligand[a], receptor[b]) for a, b in pairs_of(edges) if a in ligand and b in receptor]
        assert pairs_of(small.cross[name]) == wanted
    if "contact_pairs" in graph.labels:
        pairs = graph.labels["contact_pairs"].tolist()
        rows = [row for row, (a, b) in enumerate(pairs) if a in receptor and b in ligand]
        wanted = [[receptor[pairs[row][0]], ligand[pairs[row][1]]] for row in rows]
        assert small.labels["contact_pairs"].tolist() == wanted
        np.testing.assert_array_equal(small.labels["contact_nearest"], graph.labels["contact_nearest"][rows])
        assert small.labels["contact_pairs"].dtype == graph.labels["contact_pairs"].dtype
    assert small.labels.keys() == graph.labels.keys()
    if "bound_centre" in graph.labels:
        np.testing.assert_array_equal(small.labels["bound_centre"], graph.labels["bound_centre"])
    return kept


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 50),
    roles=st.sampled_from([PAIR, ALONE]),
    options=st.fixed_dictionaries({"rna": st.booleans(), "atoms": st.booleans(), "bound": st.booleans()}),
    names=st.sets(st.sampled_from(["nodes", "edges", "receptor", "ligand", "pairs", "cross", "residues", "contacts"])),
    share=st.floats(0.05, 1.2),
    draw=st.integers(0, 5),
)
def test_whatever_is_cut_is_within_its_limits_and_otherwise_as_it_was(seed, roles, options, names, share, draw):
    graph = graph_of(seed, roles, **options)
    sizes = graph.sizes()
    limits = {name: max(int(sizes[name] * share), 2) for name in names}
    small, found = cut(graph, limits, draw)
    assert all(found.meta["sizes"][name] <= most for name, most in limits.items())
    assert small.sizes() == found.meta["sizes"]
    check(graph, small)
    if all(sizes[name] <= most for name, most in limits.items()):
        assert small.sizes() == sizes


def test_what_stays_is_what_is_nearest_to_a_native_contact():
    graph = graph_of(3)
    contacts = set()
    for seed in range(40):
        small, _ = cut(graph, {"nodes": 11}, seed)
        kept = check(graph, small)
        near = []
        for part, kept_N in zip(graph.parts, kept, strict=True):
            pos_N3 = part.nodes["pos"][:, 1].astype(np.float64)
            far_NN = np.square(pos_N3[:, None] - pos_N3[None]).sum(axis=2)
            near.append({n for n in range(part.size) if set(np.argsort(far_NN[n])[: len(kept_N)]) == set(kept_N)})
        mine = {(a, b) for a, b in graph.labels["contact_pairs"].tolist() if a in near[0] and b in near[1]}
        assert mine
        contacts |= mine
    assert len(contacts) > 1  # not always the same one


def test_as_much_stays_as_may():
    graph = graph_of(5)
    receptor, ligand = (part.size for part in graph.parts)
    for nodes in range(4, receptor + ligand + 1):
        assert cut(graph, {"nodes": nodes})[0].sizes()["nodes"] == nodes
    small = cut(graph, {"receptor": 3})[0].sizes()
    assert (small["receptor"], small["ligand"]) == (3, ligand)
    small = cut(graph, {"pairs": 60})[0].sizes()
    assert 60 - max(small["receptor"], small["ligand"]) < small["pairs"] <= 60


def test_of_atoms_whole_residues_stay_unless_one_alone_is_too_large():
    graph = graph_of(1, atoms=True)
    for nodes in range(2, sum(part.size for part in graph.parts), 7):
        small, _ = cut(graph, {"nodes": nodes})
        for part, less in zip(graph.parts, small.parts, strict=True):
            kept_N = kept_nodes(part, less)
            whole = np.bincount(part.nodes["residue"])
            there = np.bincount(part.nodes["residue"][kept_N], minlength=len(whole))
            assert less.size <= 3 or set((there / whole).tolist()) <= {0.0, 1.0}


def test_without_contacts_the_partners_are_cut_where_they_are_near_each_other():
    graph = graph_of(2)
    graph.labels.clear()
    small, _ = cut(graph, {"receptor": 1, "ligand": 1}, seed=4)
    (receptor,), (ligand,) = (kept.tolist() for kept in check(graph, small))
    assert (ligand, receptor) in pairs_of(graph.cross["near"])


def test_a_tasks_own_sizes_can_be_limited():
    graph = graph_of(2)

    def measure(sizes):
        return {"cells": sizes["receptor"] * sizes["ligand"] + sizes["nodes"]}

    small, found = cut(graph, {"cells": 50}, measure=measure)
    assert 30 < measure(found.meta["sizes"])["cells"] <= 50
    check(graph, small)


def test_limits_that_no_cut_can_meet_name_the_item():
    with pytest.raises(PlanInfeasible, match=r"item: .*1 nodes"):
        cut(graph_of(0), {"nodes": 1})


def test_the_cut_follows_from_seed_epoch_and_item_alone():
    found = found_of(graph_of(3))

    def at(*origin):
        return crop_item(found, {"nodes": 9}, crop_rng(*origin)).arrays["receptor.node.pos"].tobytes()

    assert at(0, 0, "a") == at(0, 0, "a")
    others = {at(seed, epoch, name) for seed in range(3) for epoch in range(4) for name in "ab"}
    assert len(others) > 3
    one, other = crop_rng(1, 2, "a"), crop_rng(2, 1, "a")
    assert one.random() != other.random()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    graphs = [graph_of(seed, rna=seed % 3 == 0, atoms=True) for seed in range(8)]
    return made(CacheFolder(tmp_path_factory.mktemp("crop") / "cache"), graphs)


LIMITS = {"nodes": 60, "pairs": 700}


def bytes_of(item):
    sides = item.sides.values()
    parts = [one for side in sides for one in (side.embedding, side.nodes["pos"], side.edges["near"], side.encoded)]
    return [part.view(torch.uint8).numpy().tobytes() for part in (*parts, item.labels["contact_pairs"])]


def test_the_loader_cuts_alike_whatever_the_batches_and_the_threads(data):
    def read(lists, threads):
        loader = data.loader(lists, threads=threads, crop=LIMITS, seed=7)
        batches = list(loader.read())
        items = {item.number: bytes_of(item) for batch in batches for item in batch.value.items}
        return items, sum(batch.cropped for batch in batches)

    whole, count = read([list(range(8))], 1)
    over = [number for number, graph in data.graphs.items() if any(graph.sizes()[k] > v for k, v in LIMITS.items())]
    assert count == len(over) > 3
    assert read([[number] for number in range(8)], 3) == (whole, count)
    assert read([[4, 2, 0, 6], [7, 5, 3, 1]], 2) == (whole, count)


def test_every_residue_that_stays_has_its_own_embedding(data):
    (batch,) = data.loader([list(range(8))], crop=LIMITS)
    for item in batch.items:
        assert sum(len(side.nodes["pos"]) for side in item.sides.values()) <= 60
        for part in data.graphs[item.number].parts:
            side = item.sides[part.role.value]
            place = {row.tobytes(): node for node, row in enumerate(part.nodes["pos"])}
            kept = np.array([place[row.numpy().tobytes()] for row in side.nodes["pos"]])
            wanted, encoded = data.wanted_rows(part)
            residues, before = side.nodes["residue"], part.nodes["residue"][kept].astype(np.int64)
            np.testing.assert_array_equal(side.embedding[residues].view(torch.int16), wanted[before].view(np.int16))
            np.testing.assert_array_equal(side.encoded[residues], encoded[before])


def test_labels_come_with_their_items_cut_or_whole_in_any_batch(data):
    told = np.array([number / 2 if number != 3 else np.nan for number in range(8)], np.float32)
    graphs = CachedGraphs(data.graph_store, replace(data.table, labels={"affinity": told}))
    for options in ({}, {"crop": LIMITS}):
        for batch in data.loader([[4, 3, 0], [7]], graphs=graphs, **options):
            np.testing.assert_array_equal(batch["affinity"], told[list(batch.numbers)])
            for item in batch.items:
                assert (item.values.keys(), item.values["affinity"].shape) == ({"affinity"}, ())
                np.testing.assert_array_equal(item.values["affinity"], told[item.number])


def test_what_is_fetched_again_is_what_the_ring_had(data):
    loader = data.loader([[3, 1, 4], [5, 2]], crop=LIMITS, seed=5)
    micros = list(data.loader([[3, 1, 4], [5, 2]]).sampler.drawn())
    for batch, micro in zip(loader, micros, strict=True):
        again = loader.fetch(micro.items.tolist(), micro).value
        assert (again.ids, again.numbers, again.origin) == (batch.ids, batch.numbers, batch.origin)
        assert again.layout.places == batch.layout.places
        for name, tensor in batch.fields.items():
            assert torch.equal(again[name].view(torch.uint8), tensor.view(torch.uint8)), name
        assert again.memory.data_ptr() != batch.memory.data_ptr()
        assert again.rng.random() == batch.rng.random()
        half = loader.fetch(micro.items.tolist()[:1], micro).value
        assert bytes_of(half.items[0]) == bytes_of(batch.items[0])
        assert half.items[0].rng.random() == batch.items[0].rng.random()
