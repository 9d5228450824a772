from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ConfigError
from pipeline.keys import recipe_key
from pipeline.memory.planning import memory_plan
from pipeline.planning.prepare import phase_items, sized
from pipeline.records import Item, Part, Role
from pipeline.store.cache_folder import CacheFolder
from pipeline.training.items import item_table
from pipeline.training.items.item_table import ItemTable, TableBuilder, TablePages
from pipeline.training.prepared import PhasePlan, likeness
from tests.testkit.counted import calls_of

ROWS = st.lists(
    st.tuples(
        st.text(st.characters(codec="utf-8")),
        st.binary(min_size=16, max_size=16),
        st.sampled_from(["train", "val", ""]),
        st.integers(0, 2**40),
    ),
    max_size=20,
)


@pytest.fixture
def store(tmp_path):
    return CacheFolder(tmp_path / "cache").kind("sets")


def builder_of(rows, items=False):
    builder = TableBuilder()
    for name, key, split, size in rows:
        item = Item(name, parts=(Part(Role.COMPLEX, f"/data/{name}.pdb"),), split=split) if items else None
        builder.add(name, key, split, {"nodes": size, "pairs": size // 2}, item)
    return builder


def rows_of(table):
    return [
        (table.ids[number], table.key(number), table.splits[table.split_N[number]], int(table.sizes["nodes"][number]))
        for number in range(len(table))
    ]


@given(ROWS)
def test_a_table_holds_what_was_added(rows):
    table = builder_of(rows).table()
    assert rows_of(table) == rows
    for split in table.splits:
        assert rows_of(table.of_split(split)) == [row for row in rows if row[2] == split]


def test_a_table_is_read_as_it_was_written(store):
    rows = [(f"ü{number}", recipe_key("t", {"n": number}), "ab"[number % 2], number << 30) for number in range(50)]
    key = builder_of(rows, items=True).write(store)
    table = ItemTable.read(store, key)
    assert rows_of(table) == rows
    assert table.sizes["nodes"].dtype == np.int64  # else of as many bytes as are needed
    assert table.of_split("b").item(3) == Item("ü7", parts=(Part(Role.COMPLEX, "/data/ü7.pdb"),), split="b")


def test_the_same_table_is_stored_once_and_another_under_another_key(store):
    rows = [(f"i{number}", recipe_key("t", {"n": number}), "train", number) for number in range(3)]
    first = builder_of(rows).write(store)
    assert builder_of(rows).write(store) == first
    others = [
        builder_of(rows[:2]),
        builder_of(rows[::-1]),
        builder_of(rows, items=True),
        builder_of([*rows[:2], (*rows[2][:3], 9)]),
        builder_of([*rows[:2], (*rows[2][:2], "val", 2)]),
    ]
    keys = {one.write(store) for one in others}
    assert len(keys | {first}) == 6
    assert store.stat().records == 6


def test_a_split_that_is_not_there_is_named_with_those_that_are(store):
    nothing = ItemTable.read(store, TableBuilder().write(store))
    assert len(nothing) == 0
    with pytest.raises(ConfigError, match="train"):
        nothing.of_split("train")
    table = builder_of([("a", bytes(16), "train", 1), ("b", bytes(16), "val", 1)]).table()
    with pytest.raises(ConfigError, match="tset") as refused:
        table.of_split("tset", "train.split")
    assert refused.value.where == "train.split"
    assert "--set train.split=val" in refused.value.remedy


def test_a_large_table_is_a_few_bytes_an_item_and_read_at_once(store):
    count = 100_000
    builder = TableBuilder()
    keys = np.random.default_rng(0).bytes(16 * count)
    for number in range(count):
        builder.add(f"item{number:08d}", keys[16 * number : 16 * number + 16], "train", {"nodes": number, "edges": 3})
    key = builder.write(store)
    assert store.stat().bytes < 56 * count
    read = []
    assert (
        calls_of(lambda: read.append(ItemTable.read(store, key).of_split("train"))) < count / 100
    )  # no item by itself
    (train,) = read
    assert (train.ids[count - 1], train.key(7)) == (f"item{count - 1:08d}", keys[112:128])


def test_a_training_keeps_of_each_item_its_name_key_and_costs_and_never_has_it_twice_over(store):
    count, names = 20_000, [f"size{number}" for number in range(8)]
    builder = TableBuilder()
    for number in range(count):
        builder.add(f"c{number:07d}", recipe_key("t", {"n": number}), "train", dict.fromkeys(names, number))
    key = builder.write(store)
    phase = PhasePlan("all", 1, 1 << 40, 0, 0, 0, {"item": 2.0, "size0*size1": 0.5, "size2": 1.0})

    def costed():
        table = ItemTable.read(store, key).of_split("train")
        return phase_items(table, phase)

    costed()  # what is imported and opened once is not the items'
    tracemalloc.start()
    try:
        items = costed()
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(items.table) == len(items.cost_N) == count
    assert kept < 64 * count  # two numbers of what it costs, its key, its name and where that begins and ends
    assert most < 165 * count


class OfTheLargest:
    """A task that cannot say what no items cost."""

    def cost(self, item):
        return {"atoms": np.minimum(item["nodes"], item["nodes"].max()) * 3}


def test_a_table_of_pages_is_read_in_the_sizes_of_a_task_and_makes_the_same_table_again(store, monkeypatch):
    monkeypatch.setattr(item_table, "PAGE", 3)
    rows = [(f"i{n}", recipe_key("t", {"n": n}), "ab"[3 <= n < 6], max(0, n - 2)) for n in range(11)]
    pages = TablePages(store)
    for first in range(0, 11, 3):  # the first costs nothing, the second has no item of the split
        pages.add(builder_of(rows[first : first + 3]))
    key, task, prepared = pages.write(), OfTheLargest(), SimpleNamespace(crop={"atoms": 20, "other": 1})
    table = ItemTable.read(store, key, lambda page: sized(task, prepared, page.in_split("a")))
    kept = [row for row in rows if row[2] == "a"]
    assert [table.ids[number] for number in range(len(table))] == [row[0] for row in kept]
    assert {name: size_N.tolist() for name, size_N in table.sizes.items()} == {
        "atoms": [min(20, 3 * row[3]) for row in kept]
    }
    again = TableBuilder()
    again.add_page(ItemTable.read(store, key))
    assert again.write(store) == builder_of(rows).write(store)


def test_costs_and_likenesses_are_the_same_however_many_items_are_reckoned_together(monkeypatch):
    numbers_N = np.random.default_rng(0).integers(1, 9000, 100)
    sizes = {"nodes": numbers_N.astype(np.int32), "pairs": numbers_N * 7}
    phase = PhasePlan("all", 1, 1 << 20, 0, 0, 0, {"item": 2.5, "nodes*pairs": 0.3, "pairs": 1.1})
    at_once = phase.cost(sizes), likeness(sizes)
    monkeypatch.setattr(memory_plan, "AT_ONCE", 7)
    for one, other in zip(at_once, (phase.cost(sizes), likeness(sizes)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert at_once[0].max() == 1 << 20
    assert at_once[0].min() == np.ceil(2.5 + (0.3 * 7 * numbers_N + 7.7) * numbers_N).min()


def labelled(labels):
    builder = TableBuilder()
    for number, label in enumerate(labels):
        builder.add(f"i{number}", recipe_key("t", {"n": number}), "train", {"nodes": 5}, labels={"affinity": label})
    return builder


def test_labels_are_read_as_they_were_written_and_make_another_table(store):
    key = labelled([-9.5, float("nan"), 2.0]).write(store)
    table = ItemTable.read(store, key).of_split("train")
    np.testing.assert_array_equal(table.labels["affinity"], np.array([-9.5, np.nan, 2.0], np.float32))
    assert table.take(np.array([2, 0])).values(0) == {"affinity": 2.0}
    assert labelled([-9.5, float("nan"), 2.5]).write(store) != key
