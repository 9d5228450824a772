from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.errors import DataError
from pipeline.graphs.item_graph import GraphRecipe, encode_graph
from pipeline.graphs.make_graphs import build_graph
from pipeline.keys import content_digest
from pipeline.records import Item, Part, Reason, Role
from pipeline.store.cache_folder import CacheFolder
from pipeline.structures import inventory
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.parsing import structure_files
from pipeline.structures.synthetic import complex_pdb
from pipeline.training.items.item_source import BuiltGraphs, CachedGraphs
from pipeline.training.items.item_table import TableBuilder
from pipeline.training.items.loader import Loader
from tests.training.items.content import Micros

READING, RECIPE = inventory.ScanRecipe(), GraphRecipe(cross_neighbours=3)


@pytest.fixture
def prepared(tmp_path):
    """Three complexes in files, and a table of them with the graphs in the cache."""
    store = CacheFolder(tmp_path / "cache").kind("graph")
    builder = TableBuilder()
    with store.writer() as writer:
        for number in range(3):
            path = tmp_path / f"c{number}.pdb"
            path.write_bytes(complex_pdb(number, 30 + number, 25))
            item = Item(path.stem, parts=(Part(Role.COMPLEX, str(path)),), split="train")
            files = {str(path): structure_files.File(path.read_bytes(), content_digest(path.read_bytes()).hex())}
            key = RECIPE.key(inventory.item_key(item, READING, {str(path): files[str(path)].digest}))
            _, read = inventory.examine_item(item, files, READING)
            graph = build_graph(read, RECIPE)
            writer.put(key, *encode_graph(graph))
            builder.add(item.id, key, "train", graph.sizes(), item)
    return store, builder.table()


def batches(graphs, **options):
    return Loader(graphs, None, Micros([[2, 0], [1]]), **options)


def test_a_graph_built_on_the_fly_is_the_one_in_the_cache_bit_for_bit(prepared):
    store, table = prepared
    both = zip(batches(CachedGraphs(store, table)), batches(BuiltGraphs(table, READING, RECIPE)), strict=True)
    for cached, built in both:
        assert cached.ids == built.ids
        assert cached.layout.places == built.layout.places
        for name, tensor in cached.fields.items():
            assert torch.equal(tensor.view(torch.uint8), built[name].view(torch.uint8)), name


def test_what_changed_after_the_table_was_made_is_an_error(prepared):
    """Another recipe, another file, no file."""
    _, table = prepared
    with pytest.raises(DataError, match="configuration"):
        list(batches(BuiltGraphs(table, READING, GraphRecipe(neighbours=3))))
    for number, change in ((1, lambda path: path.write_bytes(complex_pdb(9, 30, 25))), (0, Path.unlink)):
        change(Path(table.item(number).parts[0].path))
        with pytest.raises(DataError, match=f"c{number}") as raised:
            list(BuiltGraphs(table, READING, RECIPE).read([number]))
        assert "submit graph" in raised.value.remedy


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (UnusableInput(Reason.NO_CONTACTS, "too far apart"), Reason.NO_CONTACTS),
        (ZeroDivisionError("as bugs do"), Reason.GRAPH_FAILED),
    ],
)
def test_an_item_that_has_no_graph_or_whose_graph_fails_is_left_out_and_told(prepared, monkeypatch, raised, reason):
    _, table = prepared
    real = build_graph

    def sometimes(read, recipe):
        if len(read.sides[Role.RECEPTOR].residues()) == 30:
            raise raised
        return real(read, recipe)

    monkeypatch.setattr("pipeline.training.items.item_source.build_graph", sometimes)
    told = []
    got = [list(batch.numbers) for batch in batches(BuiltGraphs(table, READING, RECIPE), reject=told.append)]
    assert got == [[2], [1]]
    assert [(one.id, one.reason, one.split) for one in told] == [("c0", reason, "train")]
    assert str(raised).rpartition(": ")[2] in told[0].detail
