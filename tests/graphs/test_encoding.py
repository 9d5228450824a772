"""A graph comes back from the store as it went in, in few bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipeline.graphs import residue_graph
from pipeline.graphs.item_graph import (
    FORMAT,
    ChainText,
    GraphRecipe,
    ItemGraph,
    PartnerGraph,
    decode_graph,
    encode_graph,
)
from pipeline.records import Kind, Reason, Role
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format import record
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.inventory import Complex
from pipeline.structures.synthetic import complex_pdb
from tests.graphs.complexes import complex_of, side

KEY = bytes(16)
AB = (side(Role.RECEPTOR, "A"), side(Role.LIGAND, "B"))
MOST_BYTES = 80_000  # a complex, k = 20; pickles of the same take 598 kB


def assert_equal(one: ItemGraph, other: ItemGraph) -> None:
    assert [(part.role, part.chains) for part in one.parts] == [(part.role, part.chains) for part in other.parts]
    for left, right in zip(one.parts, other.parts, strict=True):
        assert_same({"centre": left.centre_3}, {"centre": right.centre_3})
        for name in ("nodes", "edges", "residues", "paths"):
            assert_same(getattr(left, name), getattr(right, name))
    assert_same(one.cross, other.cross)
    assert_same(one.labels, other.labels)
    assert one.sizes() == other.sizes()


def assert_same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.dtype == other[name].dtype, name
        np.testing.assert_array_equal(array, other[name], err_msg=name)


def stored(graph: ItemGraph) -> ItemGraph:
    arrays, meta = encode_graph(graph)
    back = record.decode_record(record.encode_record(KEY, arrays, meta).blob)
    return decode_graph(back.arrays, back.meta)


def test_every_complex_in_survives_the_store_in_few_bytes(complexes: dict[str, Complex], tmp_path: Path) -> None:
    graphs = [residue_graph.build_residue_graph(read, GraphRecipe(cross_neighbours=5)) for read in complexes.values()]
    store, keys = CacheFolder(tmp_path / "cache").kind("graph"), [bytes([number]) * 16 for number in range(len(graphs))]
    with store.writer() as writer:
        for key, graph in zip(keys, graphs, strict=True):
            writer.put(key, *encode_graph(graph))
    for key, graph in zip(keys, graphs, strict=True):
        back = store.get(key)
        assert_equal(decode_graph(back.arrays, back.meta), graph)
    sizes = [
        len(record.encode_record(KEY, *encode_graph(residue_graph.build_residue_graph(read, GraphRecipe()))).blob)
        for read in complexes.values()
    ]
    assert np.mean(sizes) <= MOST_BYTES


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 300),
    pairs=hnp.arrays(np.int64, st.tuples(st.just(2), st.integers(0, 80)), elements=st.integers(0, 299)),
    path=hnp.arrays(np.uint16, st.tuples(st.integers(0, 9), st.just(3)), elements=st.integers(0, 299)),
)
def test_any_edges_in_canonical_order_survive(size: int, pairs: Any, path: Any) -> None:
    edges = np.unique(pairs % size, axis=1)[::-1]  # sorted by node, then by neighbour
    chains = (ChainText("A", Kind.PROTEIN, "AC"), ChainText("B", Kind.RNA, "ACGU"))
    nodes = {"pos": np.zeros((size, 4, 3), np.float32), "row": np.zeros(size, np.int32)}
    paths = {"angle": np.minimum(path, size - 1).astype(np.uint8 if size <= 256 else np.uint16)}
    part = PartnerGraph(Role.WHOLE, chains, np.zeros(3), nodes, {"near": edges, "bond": edges[:, :0]}, {}, paths)
    back = stored(ItemGraph((part,))).parts[0]
    for name in ("near", "bond"):
        np.testing.assert_array_equal(back.edges[name], part.edges[name])
    np.testing.assert_array_equal(back.paths["angle"], part.paths["angle"])
    assert back.chains == chains
    assert back.texts == ("AC",)


def test_another_format_is_no_graph_and_a_reason_is_that_reason() -> None:
    arrays, meta = encode_graph(
        residue_graph.build_residue_graph(complex_of(complex_pdb(0, 20, 20).decode(), *AB), GraphRecipe())
    )
    with pytest.raises(ValueError, match="format"):
        decode_graph(arrays, {**meta, "format": FORMAT + 1})
    with pytest.raises(UnusableInput) as raised:
        decode_graph({}, {"reason": Reason.NO_EDGES.value, "detail": "why"})
    assert (raised.value.reason, raised.value.detail) == (Reason.NO_EDGES, "why")
