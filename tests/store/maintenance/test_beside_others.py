"""Repair, compaction and clean-up run beside readers, writers and each other, which notice nothing of it."""

from __future__ import annotations

import threading

import pytest

from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from pipeline.store.maintenance import shard_plans
from pipeline.store.maintenance.checking import check
from pipeline.store.maintenance.shard_plans import Fate, Live, apply, mark, plan_compaction
from pipeline.store.shard_index import indexed
from pipeline.store.users import sorted_keys
from tests.store.content import is_right, key_of
from tests.store.faulty_disks import HidingDisk
from tests.store.maintenance.damage import MeddlingDisk, fill, flip, listed, record_place

KEYS = [key_of(number) for number in range(8)]
NEEDLESS = range(100, 105)


def compact(cache, settle_s):
    list(apply(plan_compaction(cache.kind("scan")).small, settle_s=settle_s))


def clean(cache, settle_s):
    store = cache.kind("scan")
    live = Live(keys=sorted_keys(b"".join([*KEYS, key_of(50)])))
    marked = mark(store, live, 1e12)
    for fate in (Fate.GOES, Fate.REWRITTEN):
        list(apply(marked.of(fate), settle_s=settle_s))


def repair(cache, settle_s):
    shard_plans.repair(cache, settle_s=settle_s)


@pytest.fixture(params=[repair, compact, clean], ids=lambda verb: verb.__name__)
def tidy(request, store):
    """Make a cache with something to do for it, and return what does it; it is to keep KEYS."""
    names = fill(store, [0, 1, *NEEDLESS], [2, 3], [4, 5], [6, 7, 103, 104], [100])
    store.write_index()
    if request.param is repair:
        flip(store.layout.shard(names[0]), record_place(store, names[0], 101)[0])
        flip(store.layout.shard(names[1]), 30)
    return lambda disk=None, settle_s=0.0: request.param(CacheFolder(store.layout.folder.parent, disk), settle_s)


def reads_all(reader):
    return all(is_right(record, key) for record, key in zip(reader.read(KEYS), KEYS, strict=True))


def finds_no_damage(cache):
    store = CacheFolder(cache.root).kind("scan")
    return not any(one.findings for quick in (True, False) for one in check(store, quick=quick))


def test_who_knew_where_records_were_finds_them_again(cache, store, tidy):
    lagging = HidingDisk(lag_s=60)  # a network whose folders lag: the new shards are found by the index
    readers = [CacheFolder(cache.root, disk).kind("scan") for disk in (None, lagging)]
    lagging.list_folder(store.layout.shards)
    lagging.time = 61
    located = [reader.locate(KEYS) for reader in readers]
    before = listed(store)
    tidy()
    assert listed(store) != before
    for reader, places in zip(readers, located, strict=True):
        assert all(is_right(reader.get_at(key, copies), key) for key, copies in zip(KEYS, places, strict=True))
        assert reader.missing(KEYS) == []
        assert reads_all(reader)
    assert finds_no_damage(cache)


def test_readers_beside_it_read_on(cache, store, tidy):
    ended, failed = threading.Event(), []

    def read_on():
        reader = CacheFolder(cache.root).kind("scan")
        while not ended.is_set():
            try:
                assert reads_all(reader)
                assert reader.missing(KEYS) == []
            except Exception as error:  # noqa: BLE001 - told to the test
                failed.append(error)

    readers = [threading.Thread(target=read_on) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in (200, 300, 400):
        tidy()
        fill(CacheFolder(cache.root).kind("scan"), [number], [number + 1])
    ended.set()
    for reader in readers:
        reader.join()
    assert failed == []


def test_three_at_once_lose_nothing(cache, store, tidy):
    threads = [threading.Thread(target=tidy) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reads_all(CacheFolder(cache.root).kind("scan"))
    tidy()
    assert finds_no_damage(cache)


def test_an_index_written_while_a_shard_goes_does_not_name_it(cache, store, shards):
    gone = store.layout.shard(shards[1])
    CacheFolder(cache.root, MeddlingDisk("rename", gone.unlink)).kind("scan").write_index()
    assert sorted(indexed(Disk(), store.layout)) == sorted({*shards} - {gone.name})


def test_what_is_written_meanwhile_stays(cache, store, tidy):
    tidy(MeddlingDisk("rename", lambda: fill(CacheFolder(cache.root).kind("scan"), [1, 50])))
    reader = CacheFolder(cache.root).kind("scan")
    assert reads_all(reader)
    assert is_right(reader.get(key_of(50)), key_of(50))


def test_shards_go_only_after_the_index_has_not_named_them_for_a_while(cache, store, tidy):
    waits = []

    class WatchedDisk(Disk):
        def wait(self, seconds):
            assert finds_no_damage(cache) or tidies_damage
            waits.append((seconds, set(listed(store)), set(indexed(Disk(), store.layout))))
            CacheFolder(cache.root).kind("scan").write_index()  # another process does so: it must be forgotten again

    tidies_damage = not finds_no_damage(cache)
    before = set(listed(store))
    tidy(WatchedDisk(), 7.0)
    assert {seconds for seconds, _, _ in waits} == {7.0}
    assert before <= waits[0][1]
    steps = [*(there for _, there, _ in waits), set(listed(store))]
    for (_, there, named), later in zip(waits, steps[1:], strict=True):
        assert there - later
        assert not (there - later) & named
    assert sorted(indexed(Disk(), store.layout)) == listed(store)
    assert finds_no_damage(cache)
