"""What a store promises, on every kind of disk, alone and beside others."""

from __future__ import annotations

import errno
import os
import stat
import tracemalloc
from itertools import product

import numpy as np
import pytest

from pipeline.errors import RecordMissing
from pipeline.keys import recipe_key
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from pipeline.store.shard_index import IndexState
from tests.store.content import arrays_of, is_right, is_undamaged, key_of, put, rebuild_index
from tests.store.faulty_disks import HidingDisk, NoLinkDisk


def alone(root, disk):
    return CacheFolder(root / "cache", disk)


def over_another(root, disk):
    """Lay the cache over one that holds other records, whose index is old."""
    return CacheFolder.over(root / "cache", [others(root / "shared")], disk)


def behind_another(root, disk):
    return CacheFolder(root / "cache", disk).behind(CacheFolder(others(root / "scratch"), disk))


def others(root):
    """Make a cache of records that no test asks for."""
    if not root.exists():
        store = CacheFolder(root).kind("files")
        for number in (10**6, 10**6 + 1):
            with store.writer() as writer:
                put(writer, number)
            if number == 10**6:
                store.write_index()
    return root


CACHES = {
    "posix": (alone, Disk),
    "no links": (alone, NoLinkDisk),
    "links not supported": (alone, lambda: NoLinkDisk(errno.ENOTSUP)),
    "stale listings": (alone, HidingDisk),
    "over another": (over_another, Disk),
    "over another, stale listings": (over_another, HidingDisk),
    "behind another": (behind_another, Disk),
}


@pytest.fixture(params=CACHES.values(), ids=CACHES.keys())
def open_store(tmp_path, request):
    opened, make_disk = request.param
    disk = make_disk()
    return lambda: opened(tmp_path, disk).kind("scan")


@pytest.fixture
def store(open_store):
    return open_store()


def test_an_empty_store_has_nothing_and_nothing_asked_is_nothing_found(store):
    assert store.missing([key_of(1)]) == [key_of(1)]
    assert list(store.keys()) == []
    for _ in range(2):
        assert store.missing([]) == store.locate([]) == list(store.read([])) == []
        assert store.stat().records == 0
        store.write_index()


def test_what_was_put_is_got_back_in_the_order_asked_as_read_only_aligned_arrays(store):
    with store.writer() as writer:
        keys = put(writer, *range(300))
    assert store.stat().shards == 1  # the fewest files that the size of a shard allows
    asked = [keys[number] for number in np.random.default_rng(0).permutation(300)]
    for record, key in zip(store.read(iter(asked)), asked, strict=True):
        assert is_right(record, key)
        assert not any(array.flags.writeable for array in record.arrays.values())
        assert all(array.flags.aligned for array in record.arrays.values())
    assert all(is_right(store.get(key), key) for key in keys)
    records = store.read(keys)  # which can be left early
    assert is_right(next(records), keys[0])
    records.close()


def after_lag(store):
    """Return a store once its folders show what was published."""
    store.refresh()
    if isinstance(store.disk, HidingDisk):
        store.disk.wait(10)
        store.refresh()
    return store


@pytest.mark.parametrize("indexed", [False, True])
def test_another_process_finds_it_through_the_index_or_later(store, open_store, indexed):
    with store.writer() as writer:
        keys = put(writer, *range(5))
    if indexed:
        store.write_index()
    other = open_store() if indexed else after_lag(open_store())
    assert other.missing([key_of(9), *keys, key_of(7)]) == [key_of(9), key_of(7)]
    assert all(is_right(other.get(key), key) for key in keys)


def test_flush_names_every_key_that_became_safe(store, open_store):
    with store.writer(shard_bytes=2000) as writer:
        keys = put(writer, *range(20))
        assert keys[-1] in writer
        assert writer.flush() == keys
        assert not any(key in writer for key in keys)  # the store is asked from now on
        assert after_lag(open_store()).missing(keys) == []
        assert writer.flush() == []


def test_work_is_kept_when_the_block_is_left_by_an_exception(store):
    keys = [key_of(1), key_of(2)]
    with pytest.raises(KeyboardInterrupt), store.writer() as writer:  # noqa: PT012 - the block is what is tested
        put(writer, 1, 2)
        raise KeyboardInterrupt
    assert store.missing(keys) == []


def in_memory_of_its_own(share):
    """Give memory for a record in two stretches, the first of which is a share of it; and say where they are."""
    given = []

    def room(length):
        first = int(share * length)
        given.extend(np.zeros(size, np.uint8) for size in (first, length - first))
        return given[-2].data, given[-1].data

    return room, given


def test_a_record_is_read_into_a_callers_memory(store):
    with store.writer() as writer:
        keys = put(writer, *range(30))
    for share, (key, places) in product((0.0, 0.1, 0.5, 0.9, 0.99, 1.0), zip(keys, store.locate(keys), strict=True)):
        room, given = in_memory_of_its_own(share)
        record = store.get_at(key, places, room)
        assert is_right(record, key)
        for array in record.arrays.values():
            assert not array.flags.writeable
            if share in (0.0, 1.0) and array.size:
                assert any(np.shares_memory(array, memory) for memory in given)


def test_a_read_that_comes_in_pieces_is_put_together(store, monkeypatch):
    with store.writer() as writer:
        keys = put(writer, *range(10))
    store.missing(keys)
    real = os.preadv

    def some(fd, buffers, offset):
        return real(fd, [next(one for one in buffers if len(one))[:50]], offset)

    monkeypatch.setattr(os, "preadv", some)
    for key, places in zip(keys, store.locate(keys), strict=True):
        assert is_right(store.get_at(key, places, in_memory_of_its_own(0.3)[0]), key)


def test_places_that_have_changed_are_looked_up_again(store):
    with store.writer() as writer:
        first, second = put(writer, 1, 2)
    wrong, gone = store.locate([second])[0], [store.locate([first])[0][0]._replace(shard="purged.safetensors")]
    for places in ([], wrong, gone):
        assert is_right(store.get_at(first, places), first)
        assert is_right(store.get_at(first, places, in_memory_of_its_own(1.0)[0]), first)


def test_copies_are_harmless_however_many(store):
    for number in range(40):
        with store.writer() as writer:
            put(writer, 0, number, 0)
    for _ in range(2):
        assert list(store.keys()) == sorted(key_of(number) for number in range(40))
        assert store.stat().records == 40
        assert len(store.locate([key_of(0)])[0]) == 40
        assert store.missing([key_of(number) for number in range(41)]) == [key_of(40)]
        store.write_index()
    assert is_right(store.get(key_of(0)), key_of(0))


def test_a_missing_record_is_a_key_error_that_says_what_to_type(store):
    for look in (lambda: store.get(key_of(1)), lambda: list(store.read([key_of(1)]))):
        with pytest.raises(RecordMissing) as caught:
            look()
        assert isinstance(caught.value, KeyError)
        assert "pipeline submit" in caught.value.remedy


def test_keys_that_share_their_first_half_are_told_apart(store):
    keys = [bytes(8) + recipe_key("test", {"n": number})[:8] for number in range(100)]
    with store.writer() as writer:
        for key in keys[::2]:
            writer.put(key, arrays_of(key), {"name": key.hex()})
    store.write_index()
    assert store.missing(keys) == keys[1::2]
    assert all(is_right(store.get(key), key) for key in keys[::2])


def test_the_index_follows_and_is_rebuilt(store, open_store):
    with store.writer() as writer:
        keys = put(writer, *range(100))
    assert store.stat().index is IndexState.NONE
    store.write_index()
    assert store.stat().index is IndexState.CURRENT
    with store.writer() as writer:
        keys += put(writer, *range(100, 140))
    assert store.stat().index is IndexState.BEHIND
    assert store.missing(keys) == []
    rebuild_index(after_lag(store))
    assert open_store().stat().index is IndexState.CURRENT
    assert open_store().missing(keys) == []


def test_published_files_are_read_only_and_group_readable_and_nothing_else_is_left(store, tmp_path):
    with store.writer() as writer:
        put(writer, 1)
    with store.writer():
        pass
    store.write_index()
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(files) == 3
    assert {stat.S_IMODE(path.stat().st_mode) & 0o662 for path in files} == {0o440}
    assert all(path.stat().st_mode & 0o050 == 0o050 for path in (tmp_path / "cache").rglob("*") if path.is_dir())


def test_a_shard_is_full_when_its_header_is(store):
    with store.writer(header_bytes=4096) as writer:
        keys = put(writer, *range(50))
    assert store.stat().shards > 1
    assert is_undamaged(store)
    assert all(is_right(store.get(key), key) for key in keys)


def test_a_record_larger_than_shard_and_header_still_goes_in(store):
    arrays = {f"array{number}": np.full(1000, number, np.int16) for number in range(100)}
    with store.writer(shard_bytes=1000, header_bytes=256) as writer:
        put(writer, 1)
        writer.put(key_of(0), arrays, {})
        put(writer, 2)
    assert store.stat().shards == 3
    assert all(np.array_equal(store.get(key_of(0)).arrays[name], array) for name, array in arrays.items())


def test_writing_needs_the_memory_of_a_few_records_only(store):
    noise = np.zeros(1_000_000, np.uint8)
    tracemalloc.start()
    with store.writer() as writer:
        for number in range(60):
            writer.put(key_of(number), {"noise": noise}, {})
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4_000_000


def test_stat_tells_size_and_age(store, tmp_path):
    with store.writer(shard_bytes=2000) as writer:
        put(writer, *range(30))
    told = store.stat()
    sizes = [path.stat().st_size for path in (tmp_path / "cache/scan/shards").iterdir()]
    assert (told.records, told.bytes, told.shards) == (30, sum(sizes), len(sizes))
    assert told.oldest <= told.newest
    assert told.unreadable == ()


def test_what_is_no_key_or_kind_is_refused(store, tmp_path):
    for key in (b"", b"short", bytes(17), "text of 16 chars"):
        with pytest.raises(ValueError, match="16 bytes"), store.writer() as writer:
            writer.put(key, {})
        with pytest.raises((ValueError, TypeError)):
            store.get(key)
    for kind in ("", "..", "a/b", "Scan", ".hidden"):
        with pytest.raises(ValueError, match="is not a valid kind"):
            CacheFolder(tmp_path / "cache").kind(kind)
