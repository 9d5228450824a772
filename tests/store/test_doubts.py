"""Damage that a read found is remembered: whoever looks next takes no table's word for what is in that shard."""

from __future__ import annotations

import pytest

from pipeline.errors import CacheDamaged
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.maintenance.leftovers import Left, find_leftovers
from pipeline.store.maintenance.shard_plans import repair
from pipeline.store.store import WholeRecords
from tests.store.content import is_right, key_of, put
from tests.store.faulty_disks import FailingDisk
from tests.store.maintenance.damage import spoil
from tests.store.test_layers import ReadOnlyBelow

KEYS = [key_of(number) for number in range(5)]


@pytest.fixture
def cache(tmp_path):
    cache = CacheFolder(tmp_path / "cache")
    with cache.kind("scan").writer() as writer:
        put(writer, *range(5))
    return cache


def unread(cache):
    """Return the numbers that count as there for somebody who would read nothing."""
    metas = WholeRecords(cache.kind("scan"), limit_bytes=0).metas(KEYS)
    return [number for number, key in enumerate(KEYS) if key in metas]


def notes(cache):
    return cache.disk.list_folder(cache.own("scan").layout.doubted)


def test_what_a_read_found_damaged_is_missing_for_whoever_looks_next(cache):
    path = spoil(cache.root, 2)
    assert unread(CacheFolder(cache.root)) == [0, 1, 2, 3, 4]
    with pytest.raises(CacheDamaged) as caught:
        CacheFolder(cache.root).kind("scan").get(KEYS[2])
    assert "pipeline cache repair" in caught.value.remedy
    assert notes(cache) == [path.name]
    assert unread(CacheFolder(cache.root)) == [0, 1, 3, 4]


def test_what_was_made_anew_is_there_and_a_repair_forgets_the_doubt(cache):
    spoil(cache.root, 2)
    with pytest.raises(CacheDamaged):
        cache.kind("scan").get(KEYS[2])
    with CacheFolder(cache.root).kind("scan").writer() as writer:
        put(writer, 2)
    assert unread(CacheFolder(cache.root)) == [0, 1, 2, 3, 4]
    assert is_right(CacheFolder(cache.root).kind("scan").get(KEYS[2]), KEYS[2])
    repair(CacheFolder(cache.root))
    assert notes(cache) == []


def test_a_disk_that_only_stuttered_costs_a_second_look_and_nothing_else(cache):
    path = spoil(cache.root, 2)
    with pytest.raises(CacheDamaged):
        cache.kind("scan").get(KEYS[2])
    spoil(cache.root, 2)
    assert unread(CacheFolder(cache.root)) == [0, 1, 2, 3, 4]
    repair(CacheFolder(cache.root))
    assert (notes(cache), path.exists()) == ([], True)


def test_damage_in_a_cache_that_is_only_read_is_noted_beside_ones_own_records(cache, tmp_path):
    spoil(cache.root, 2)
    disk = ReadOnlyBelow(cache.root)
    over = CacheFolder.over(tmp_path / "own", [cache.root], disk)
    with pytest.raises(CacheDamaged):
        over.kind("scan").get(KEYS[2])
    assert disk.refused == []
    assert unread(CacheFolder.over(tmp_path / "own", [cache.root], disk)) == [0, 1, 3, 4]
    with pytest.raises(CacheDamaged):  # also where nothing can be noted
        CacheFolder(cache.root, disk).kind("scan").get(KEYS[2])


def test_notes_are_cleaned_with_what_validations_found(cache):
    path = spoil(cache.root, 2)
    with pytest.raises(CacheDamaged):
        cache.kind("scan").get(KEYS[2])
    leftovers, foreign = find_leftovers(cache)
    assert [(file.path.name, file.what) for file in leftovers] == [(path.name, Left.REPORT)]
    assert foreign == []


def test_records_of_more_shards_than_stay_open_are_verified_shard_by_shard(tmp_path):
    shards, each = 80, 12
    for shard in range(shards):
        with CacheFolder(tmp_path / "cache").kind("scan").writer() as writer:
            put(writer, *range(shard, each * shards, shards))
    keys = [key_of(number) for number in range(each * shards)]  # neighbours are in different shards
    cache = CacheFolder(tmp_path / "cache", disk=(disk := FailingDisk("", 0)))
    assert WholeRecords(cache.kind("scan")).metas(keys).keys() == {*keys}
    opened = disk.taken["open_read"] - shards  # each was opened once for its table
    assert opened < each * shards / 2
