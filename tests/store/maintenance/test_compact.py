"""Many small shards become few, and nobody who reads or writes meanwhile notices."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.shard import read_table, row_keys
from pipeline.store.maintenance.checking import check
from pipeline.store.maintenance.shard_plans import Fate, apply, plan_compaction
from pipeline.store.shard_index import IndexState
from tests.store.content import is_right, key_of
from tests.store.maintenance.damage import MeddlingDisk, fill, flip, listed, overwrite, record_place

NUMBERS = range(40)


@pytest.fixture
def store(cache):
    store = cache.kind("scan")
    fill(store, *([number] for number in NUMBERS))
    return store


def compacted(store, todo=None, *, settle_s=0, **options):
    todo = todo or plan_compaction(store, **options)
    list(apply(todo.small, settle_s=settle_s, **options))
    return todo


def all_right(root, numbers=NUMBERS):
    store = CacheFolder(root).kind("scan")
    keys = [key_of(number) for number in numbers]
    return all(is_right(record, key) for record, key in zip(store.read(keys), keys, strict=True))


def keys_in(store, name):
    return row_keys(read_table(store.disk, store.layout.shard(name)).rows)


def wrong(root):
    return [one for checked in check(CacheFolder(root).kind("scan")) for one in checked.findings]


def test_small_shards_become_one_in_the_order_in_which_they_were_written(cache, store):
    before = listed(store)
    plan = plan_compaction(store)
    assert (len(plan.small), plan.records) == (40, 40)
    assert listed(store) == before  # planning changes nothing
    keys = [key for name in before for key in keys_in(store, name)]
    told = compacted(store)
    assert (told.shards, len(told.of(Fate.REWRITTEN)), told.after) == (40, 40, 1)
    assert all_right(cache.root)
    assert wrong(cache.root) == []
    assert CacheFolder(cache.root).kind("scan").stat().index is IndexState.CURRENT
    assert len(CacheFolder(cache.root).kind("scan").locate([key_of(0)])[0]) == 1
    (after,) = listed(store)
    assert keys_in(store, after) == keys
    assert plan_compaction(store).small == ()
    compacted(store)
    assert listed(store) == [after]


def test_there_is_at_most_one_file_for_200_records(cache):
    store = cache.kind("scan")
    for first in range(0, 3000, 60):
        with store.writer() as writer:
            for number in range(first, first + 60):  # more to say of each than most records need
                arrays = {f"array_{at}": np.full(3, number) for at in range(12)}
                writer.put(key_of(number), arrays, {})
    assert len(listed(store)) == 50
    compacted(store)
    assert len(listed(store)) <= 3000 / 200
    assert plan_compaction(store).small == ()


def test_large_shards_are_left_alone(cache):
    store = cache.kind("scan")
    with store.writer() as writer:
        writer.put(key_of(100), {"x": np.zeros(700)}, {})
    (large,) = listed(store)
    fill(store, [1], [2])
    told = compacted(store, shard_bytes=8_000)
    assert len(told.of(Fate.REWRITTEN)) == 2
    assert large in listed(store)


def test_new_shards_are_no_larger_than_asked_for_and_damaged_ones_are_left_to_repair(cache, store):
    header, bad = listed(store)[3:5]
    for name, place in ((header, 20), (bad, store.layout.shard(bad).stat().st_size - 1)):
        flip(store.layout.shard(name), place)
    compacted(store, shard_bytes=4_000)
    assert header not in listed(store)  # whose records are intact
    assert bad in listed(store)
    names = set(listed(store)) - {bad}
    sizes = [int(read_table(store.disk, store.layout.shard(name)).rows["length"].sum()) for name in names]
    assert 1 < len(sizes) < 38
    assert max(sizes) <= 4_000


def test_of_copies_one_is_kept(cache, store):
    fill(store, [0], [0, 1], [100])
    told = plan_compaction(store)
    assert told.twice == {key_of(0), key_of(1)}
    compacted(store)
    assert [len(places) for places in store.locate([key_of(0), key_of(1), key_of(100)])] == [1, 1, 1]
    assert all_right(cache.root, [*NUMBERS, 100])


@pytest.mark.parametrize("at", [0, 1], ids=["first", "second"])
def test_of_a_damaged_and_a_whole_copy_the_whole_one_is_kept(cache, at):
    store = cache.kind("scan")
    damaged = sorted(fill(store, [0, 1], [0, 1]))[at]
    flip(store.layout.shard(damaged), record_place(store, damaged, 0)[0])
    told = compacted(store)
    assert told.of(Fate.LEFT) == [damaged][at:]  # one whose records are all safe already may go
    assert all_right(cache.root, [0, 1])


def test_shards_that_another_process_took_meanwhile_are_not_called_damaged(cache, store):
    told = plan_compaction(store)
    compacted(CacheFolder(cache.root).kind("scan"))
    told = compacted(store, told)
    assert len(told.of(Fate.GONE)) == 40
    assert all_right(cache.root)


def test_records_whose_description_fills_a_header_soon_are_not_copied_again_and_again(cache):
    store = cache.kind("scan")
    arrays = {f"an_array_of_some_name_{at:02}": np.zeros((5, 3)) for at in range(53)}
    for first in range(0, 600, 60):
        with store.writer() as writer:
            for number in range(first, first + 60):
                writer.put(key_of(number), arrays, {})
    before = len(listed(store))
    compacted(store)
    after = listed(store)
    assert len(after) <= before / 2
    assert plan_compaction(store).small == ()
    assert store.missing([key_of(number) for number in range(600)]) == []


def test_a_shard_that_goes_bad_while_it_is_copied_stays(cache, store):
    name = listed(store)[-1]
    path = store.layout.shard(name)
    content = path.read_bytes()
    place = read_table(store.disk, path).data_start
    disk = MeddlingDisk("write_at", lambda: flip(path, place))
    told = compacted(CacheFolder(cache.root, disk).kind("scan"))
    assert told.of(Fate.LEFT) == [name]
    overwrite(path, content)
    assert all_right(cache.root)
