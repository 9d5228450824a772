"""Many small shards become few, and nobody who reads or writes meanwhile notices."""

from __future__ import annotations

import errno
import shutil
import threading
from contextlib import suppress

import numpy as np
import pytest

from pipeline.errors import PipelineError
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from pipeline.store.format.shard import read_table
from pipeline.store.maintenance import rewrite as compaction
from pipeline.store.maintenance import scrub
from pipeline.store.maintenance.rewrite import (
    CARRIED_HEADER_BYTES,
    CarriedRows,
    carried,
    compact_shards,
    plan_compaction,
)
from pipeline.store.shard_index import indexed
from pipeline.store.snapshot import IndexState
from tests.store.content import is_right, key_of
from tests.store.faulty_disks import CHANGES, FailingDisk, HidingDisk, InterruptingDisk
from tests.store.maintenance.damage import CountingDisk, MeddlingDisk, fill, flip, listed, overwrite, record_place

NUMBERS = range(40)


@pytest.fixture
def store(cache):
    store = cache.kind("scan")
    fill(store, *([number] for number in NUMBERS))
    return store


def compacted(store, **options):
    return compacted_as(store, plan_compaction(store, **options), **options)


def compacted_as(store, todo, *, settle_s=0, **options):
    compact_shards([(store, todo)], settle_s=settle_s, **options)
    return todo


def all_right(root, numbers=NUMBERS):
    store = CacheFolder(root).kind("scan")
    keys = [key_of(number) for number in numbers]
    return all(is_right(record, key) for record, key in zip(store.read(keys), keys, strict=True))


def wrong(root):
    return [one for checked in scrub.full(CacheFolder(root).kind("scan")) for one in checked.findings]


def test_small_shards_become_one(cache, store):
    told = compacted(store)
    assert (told.shards, told.gone, told.after) == (40, 40, 1)
    assert all_right(cache.root)
    assert wrong(cache.root) == []
    assert CacheFolder(cache.root).kind("scan").stat().index is IndexState.CURRENT
    assert len(CacheFolder(cache.root).kind("scan").locate([key_of(0)])[0]) == 1


def test_a_second_compaction_finds_nothing_to_do(cache, store):
    compacted(store)
    before = listed(store)
    assert plan_compaction(store).small == ()
    compacted(store)
    assert listed(store) == before


def test_planning_changes_nothing(store):
    before = listed(store)
    told = plan_compaction(store)
    assert (len(told.small), told.records) == (40, 40)
    assert listed(store) == before


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
    assert told.gone == 2
    assert large in listed(store)


def test_new_shards_are_no_larger_than_asked_for(cache, store):
    compacted(store, shard_bytes=4_000)
    sizes = [int(read_table(store.disk, store.layout.shard(name)).rows["length"].sum()) for name in listed(store)]
    assert 1 < len(sizes) < 40
    assert max(sizes) <= 4_000


def test_records_keep_the_order_in_which_they_were_written(cache):
    store = cache.kind("scan")
    for number in (5, 3, 9):
        fill(store, [number])
    keys = [read_table(store.disk, store.layout.shard(name)).rows[["hi", "lo"]][0].tolist() for name in listed(store)]
    compacted(store)
    (name,) = listed(store)
    assert read_table(store.disk, store.layout.shard(name)).rows[["hi", "lo"]].tolist() == keys


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
    assert told.damaged == [damaged][at:]  # one whose records are all safe already may go
    assert all_right(cache.root, [0, 1])


def test_shards_that_another_process_took_meanwhile_are_not_called_damaged(cache, store):
    told = plan_compaction(store)
    compacted(CacheFolder(cache.root).kind("scan"))
    told = compacted_as(store, told)
    assert (told.damaged, told.gone, len(told.taken)) == ([], 0, 40)
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


def test_a_new_shard_with_much_room_left_in_its_header_is_small_still(cache):
    store = cache.kind("scan")
    for first in (0, 10):
        with store.writer() as writer:
            for number in range(first, first + 10):
                writer.put(key_of(number), {"x": np.full(40_000, number)}, {})
    compacted(store)
    (merged,) = listed(store)
    assert read_table(store.disk, store.layout.shard(merged)).data_start == CARRIED_HEADER_BYTES
    fill(store, [100])
    compacted(store)
    assert len(listed(store)) == 1


def test_every_record_is_read_once(cache):
    class MeasuringDisk(CountingDisk):
        read_bytes = 0

        def read_at(self, fd, length, offset):
            self.read_bytes += length
            return super().read_at(fd, length, offset)

        def read_into(self, fd, buffer, offset):
            self.read_bytes += len(buffer)
            return super().read_into(fd, buffer, offset)

    store, disk = cache.kind("scan"), MeasuringDisk()
    for number in range(3):  # so much that a new shard is not read once more, to make it tight
        with store.writer() as writer:
            writer.put(key_of(number), {"x": np.full(250_000, number)}, {})
    told = compacted_as(CacheFolder(cache.root, disk).kind("scan"), plan_compaction(store), settle_s=0)
    assert told.gone == 3
    assert disk.read_bytes < 1.3 * told.size_bytes


@pytest.mark.parametrize("place", [20, -1], ids=["header", "end"])
def test_a_damaged_shard_is_left_to_repair(cache, store, place):
    name = listed(store)[3]
    flip(store.layout.shard(name), place % store.layout.shard(name).stat().st_size)
    compacted(store)
    assert len(listed(store)) == 2
    assert name in listed(store)


def test_a_shard_that_goes_bad_while_it_is_copied_stays(cache, store):
    name = listed(store)[-1]
    path = store.layout.shard(name)
    content = path.read_bytes()
    place = read_table(store.disk, path).data_start
    disk = MeddlingDisk("write_at", lambda: flip(path, place))
    told = compacted_as(CacheFolder(cache.root, disk).kind("scan"), plan_compaction(store), settle_s=0)
    assert told.damaged == [name]
    overwrite(path, content)
    assert all_right(cache.root)


def test_who_has_located_a_record_in_an_old_shard_finds_it_again(cache, store):
    store.write_index()
    reader = CacheFolder(cache.root).kind("scan")
    keys = [key_of(number) for number in NUMBERS]
    places = reader.locate(keys)
    compacted(CacheFolder(cache.root).kind("scan"))
    refreshed = 0
    refresh = reader.refresh

    def counted():
        nonlocal refreshed
        refreshed += 1
        refresh()

    reader.refresh = counted
    for key, copies in zip(keys, places, strict=True):
        assert is_right(reader.get_at(key, copies), key)
    assert refreshed == 1


def test_who_looked_before_misses_nothing_afterwards(cache, store):
    store.write_index()
    reader = CacheFolder(cache.root).kind("scan")
    keys = [key_of(number) for number in NUMBERS]
    assert reader.missing(keys[:1]) == []
    compacted(CacheFolder(cache.root).kind("scan"))
    assert reader.missing(keys) == []


def test_readers_beside_a_compaction_read_on(cache, store):
    store.write_index()
    ended, failed = threading.Event(), []

    def read_on():
        reader = CacheFolder(cache.root).kind("scan")
        keys = [key_of(number) for number in NUMBERS]
        while not ended.is_set():
            try:
                assert all(is_right(one, key) for one, key in zip(reader.read(keys), keys, strict=True))
                assert reader.missing(keys) == []
            except Exception as error:  # noqa: BLE001 - told to the test
                failed.append(error)

    readers = [threading.Thread(target=read_on) for _ in range(2)]
    for reader in readers:
        reader.start()
    for first in (100, 200, 300):
        fill(CacheFolder(cache.root).kind("scan"), *([number] for number in range(first, first + 5)))
        compacted(CacheFolder(cache.root).kind("scan"))
    ended.set()
    for reader in readers:
        reader.join()
    assert failed == []


def test_on_a_network_whose_folders_lag_readers_find_the_new_shards_by_the_index(cache, store):
    store.write_index()
    disk = HidingDisk(lag_s=60)
    reader = CacheFolder(cache.root, disk).kind("scan")
    disk.list_folder(store.layout.shards)
    disk.time = 61
    keys = [key_of(number) for number in NUMBERS]
    assert reader.missing(keys) == []
    compacted(store)
    assert all(is_right(record, key) for record, key in zip(reader.read(keys), keys, strict=True))


def test_old_shards_go_only_after_the_index_has_named_the_new_ones_for_a_while(cache, store):
    events = []

    class WatchedDisk(HidingDisk):
        def wait(self, seconds):
            events.append((seconds, len(listed(store)), indexed(Disk(), store.layout)))

    before = set(listed(store))
    compacted_as(CacheFolder(cache.root, WatchedDisk(0)).kind("scan"), plan_compaction(store), settle_s=7)
    (new,) = listed(store)
    assert new not in before
    assert events == [(7, 41, [new])]
    assert indexed(Disk(), store.layout) == [new]


def test_an_index_never_names_a_shard_that_a_compaction_removed_wherever_that_ends(cache, store, tmp_path):
    store.write_index()
    for step in range(8):
        root = tmp_path / f"{step}"
        shutil.copytree(cache.root, root)
        with suppress(PipelineError):
            compacted(CacheFolder(root, FailingDisk("unlink", errno.EIO, step)).kind("scan"))
        there = CacheFolder(root).kind("scan")
        assert set(indexed(Disk(), there.layout)) <= set(listed(there))
        assert wrong(root) == []
        assert all_right(root)


def test_an_index_that_another_process_wrote_while_old_shards_went_forgets_them(cache, store):
    class MeddledDisk(HidingDisk):
        def wait(self, seconds):
            CacheFolder(cache.root).kind("scan").write_index()

    compacted_as(CacheFolder(cache.root, MeddledDisk(0)).kind("scan"), plan_compaction(store), settle_s=7)
    assert indexed(Disk(), store.layout) == listed(store)


def test_a_compaction_that_ends_anywhere_loses_nothing_and_a_second_finishes(cache, tmp_path):
    store = cache.kind("scan")
    fill(store, [0], [1], [2])
    shutil.copytree(cache.root, tmp_path / "counted")
    disk = InterruptingDisk()
    compacted(CacheFolder(tmp_path / "counted", disk).kind("scan"))
    assert disk.steps > 20
    for step in range(1, disk.steps + 1):
        for moment in ("before", "halfway"):  # after one step is before the next
            root = tmp_path / f"{step}-{moment}"
            shutil.copytree(cache.root, root)
            with suppress(KeyboardInterrupt):  # there is no half of most steps
                compacted(CacheFolder(root, InterruptingDisk(step, moment)).kind("scan"))
            assert all_right(root, [0, 1, 2])
            compacted(CacheFolder(root).kind("scan"))
            assert len(listed(CacheFolder(root).kind("scan"))) == 1
            assert all_right(root, [0, 1, 2])
            shutil.rmtree(root)


@pytest.mark.parametrize("step", CHANGES)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_a_disk_that_fails_costs_nothing(cache, step, number, tmp_path):
    store = cache.kind("scan")
    fill(store, [0], [1], [2])
    for after in (0, 1, 2, 5):
        root = tmp_path / f"{after}"
        shutil.copytree(cache.root, root)
        with suppress(PipelineError):  # anything else is a bug
            compacted(CacheFolder(root, FailingDisk(step, number, after)).kind("scan"))
        assert all_right(root, [0, 1, 2])


def test_two_compactions_at_once_lose_nothing(cache, store):
    threads = [threading.Thread(target=compacted, args=(CacheFolder(cache.root).kind("scan"),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all_right(cache.root)


def test_old_shards_go_while_the_rest_is_still_copied_if_there_are_many_bytes(cache, store, monkeypatch):
    monkeypatch.setattr(compaction, "BATCH_BYTES", 10_000)
    told = compacted(store, shard_bytes=4_000)
    assert told.gone == 40
    assert all_right(cache.root)
    assert wrong(cache.root) == []


def test_a_source_may_go_as_soon_as_it_is_told_of(store):
    names = listed(store)
    sources = (CarriedRows(name, read_table(store.disk, store.layout.shard(name)).rows) for name in names)
    told = []
    for one in carried(store, sources, shard_bytes=4_000):
        store.layout.shard(one.shard).unlink()
        told.append(one.shard)
        gone = [
            number
            for number in NUMBERS
            if not CacheFolder(store.layout.folder.parent).kind("scan").has_whole(key_of(number))
        ]
        assert gone == []
    assert told == names


def test_only_the_rows_that_are_wanted_are_carried_over(store):
    (name,) = fill(store, range(100, 104))
    rows = read_table(store.disk, store.layout.shard(name)).rows
    before = set(listed(store))
    (one,) = carried(store, [CarriedRows(name, rows[1:3])])
    assert (one.records, one.size_bytes, one.refused) == (2, int(rows["length"][1:3].sum()), ())
    (new,) = set(listed(store)) - before
    assert (read_table(store.disk, store.layout.shard(new)).rows["digest"] == rows["digest"][1:3]).all()


def test_what_is_not_as_it_was_written_is_refused_by_name(store):
    (name,) = fill(store, range(100, 103))
    rows = read_table(store.disk, store.layout.shard(name)).rows
    flip(store.layout.shard(name), record_place(store, name, 101)[0])
    ghost = CarriedRows("gone.safetensors", rows[:1])
    one, other = carried(store, [CarriedRows(name, rows), ghost])
    assert one.refused == ((key_of(101), "the bytes are not those that were written"),)
    assert other.refused == ((key_of(100), "its shard is gone"),)
