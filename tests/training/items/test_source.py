from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.errors import DataError
from pipeline.graphs.build_graph import build_graph
from pipeline.graphs.item_graph import GraphRecipe, encode_graph
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


def test_a_file_that_changed_after_the_table_was_made_is_an_error(prepared):
    _, table = prepared
    path = Path(table.item(1).parts[0].path)
    path.write_bytes(complex_pdb(9, 30, 25))
    with pytest.raises(DataError, match=r"c1: its files or the configuration changed.*\n.*submit --stage graph"):
        list(batches(BuiltGraphs(table, READING, RECIPE)))


def test_another_recipe_than_the_tables_is_an_error(prepared):
    _, table = prepared
    with pytest.raises(DataError, match="the configuration changed"):
        list(batches(BuiltGraphs(table, READING, GraphRecipe(neighbours=3))))


def test_a_file_that_is_gone_after_the_table_was_made_is_an_error(prepared):
    _, table = prepared
    Path(table.item(0).parts[0].path).unlink()
    with pytest.raises(DataError, match=r"missing_file: c0: no such file.*\n.*submit --stage graph"):
        list(batches(BuiltGraphs(table, READING, RECIPE)))


def test_an_item_that_has_no_graph_is_left_out_and_told(prepared, monkeypatch):
    _, table = prepared
    real = build_graph

    def sometimes(read, recipe):
        if len(read.sides[Role.RECEPTOR].residues()) == 30:
            raise UnusableInput(Reason.NO_CONTACTS, "too far apart")
        return real(read, recipe)

    monkeypatch.setattr("pipeline.training.items.item_source.build_graph", sometimes)
    told = []
    got = [list(batch.numbers) for batch in batches(BuiltGraphs(table, READING, RECIPE), reject=told.append)]
    assert got == [[2], [1]]
    assert [(one.id, one.reason, one.split) for one in told] == [("c0", Reason.NO_CONTACTS, "train")]


def test_a_bug_in_the_building_costs_one_item(prepared, monkeypatch, caplog):
    _, table = prepared
    real = build_graph

    def sometimes(read, recipe):
        if len(read.sides[Role.RECEPTOR].residues()) == 31:
            raise ZeroDivisionError("as bugs do")
        return real(read, recipe)

    monkeypatch.setattr("pipeline.training.items.item_source.build_graph", sometimes)
    told = []
    got = [list(batch.numbers) for batch in batches(BuiltGraphs(table, READING, RECIPE), reject=told.append)]
    assert got == [[2, 0], []]
    assert (told[0].id, told[0].reason) == ("c1", Reason.GRAPH_FAILED)
    assert "as bugs do" in told[0].detail


def test_the_order_of_items_asked_for_is_kept(prepared):
    store, table = prepared
    found = list(CachedGraphs(store, table).read([2, 0, 1, 2]))
    assert [one.id for one in found] == ["c2", "c0", "c1", "c2"]
    assert np.array_equal(found[0].arrays["receptor.node.pos"], found[3].arrays["receptor.node.pos"])
