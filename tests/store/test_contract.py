"""What a store promises, on every kind of disk, alone and beside others."""

from __future__ import annotations

import errno
import os
import stat
import tracemalloc

import numpy as np
import pytest

from pipeline.errors import RecordMissing
from pipeline.keys import recipe_key
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from pipeline.store.snapshot import IndexState
from tests.store.content import arrays_of, is_right, is_undamaged, key_of, put
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


def test_an_empty_store_has_nothing(store):
    assert store.missing([key_of(1)]) == [key_of(1)]
    assert list(store.keys()) == []
    assert store.stat().records == 0


def test_nothing_asked_is_nothing_found(store):
    for _ in range(2):
        assert store.missing([]) == []
        assert store.locate([]) == []
        assert list(store.read([])) == []
        store.write_index()


def test_what_was_put_is_got_back(store):
    with store.writer() as writer:
        keys = put(writer, *range(50))
    assert all(is_right(store.get(key), key) for key in keys)


def test_another_process_finds_it_at_the_latest_when_patient(store, open_store):
    with store.writer() as writer:
        keys = put(writer, *range(5))
    other = open_store()
    assert other.missing(keys, patience_s=10) == []
    assert all(is_right(other.get(key), key) for key in keys)


def test_another_process_finds_it_through_the_index(store, open_store):
    with store.writer() as writer:
        keys = put(writer, *range(5))
    store.write_index()
    assert open_store().missing(keys) == []


def test_missing_keeps_the_order_and_names_only_what_is_missing(store):
    with store.writer() as writer:
        put(writer, 3, 5)
    asked = [key_of(number) for number in (9, 3, 1, 5, 7)]
    assert store.missing(asked) == [key_of(9), key_of(1), key_of(7)]


def test_flush_names_every_key_that_became_safe(store, open_store):
    with store.writer(shard_bytes=2000) as writer:
        keys = put(writer, *range(20))
        assert writer.flush() == keys
        assert open_store().missing(keys, patience_s=10) == []
        assert writer.flush() == []


def test_work_is_kept_when_the_block_is_left_by_an_exception(store):
    keys = [key_of(1), key_of(2)]
    with pytest.raises(KeyboardInterrupt), store.writer() as writer:  # noqa: PT012 - the block is what is tested
        put(writer, 1, 2)
        raise KeyboardInterrupt
    assert store.missing(keys) == []


def test_duplicates_are_harmless(store):
    for _ in range(3):
        with store.writer() as writer:
            keys = put(writer, 1, 2, 1)
    assert list(store.keys()) == sorted(keys[:2])
    assert store.stat().records == 2
    assert len(store.locate([keys[0]])[0]) == 3
    store.write_index()
    assert len(store.locate([keys[0]])[0]) == 3
    assert is_right(store.get(keys[0]), keys[0])


def test_many_copies_of_one_key_spread_over_index_blocks(store):
    for number in range(40):
        with store.writer() as writer:
            put(writer, 0, number)
    store.write_index()
    assert len(store.locate([key_of(0)])[0]) == 40
    assert store.missing([key_of(number) for number in range(41)]) == [key_of(40)]


def test_read_yields_in_the_order_asked(store):
    with store.writer(shard_bytes=5000) as writer:
        keys = put(writer, *range(300))
    asked = [keys[number] for number in np.random.default_rng(0).permutation(300)]
    assert all(is_right(record, key) for record, key in zip(store.read(iter(asked)), asked, strict=True))


def in_memory_of_its_own(share):
    """Give memory for a record in two stretches, the first of which is a share of it; and say where they are."""
    given = []

    def room(length):
        first = int(share * length)
        given.extend(np.zeros(size, np.uint8) for size in (first, length - first))
        return given[-2].data, given[-1].data

    return room, given


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99, 1.0])
def test_a_record_is_read_into_a_callers_memory(store, share):
    with store.writer() as writer:
        keys = put(writer, *range(30))
    for key, places in zip(keys, store.locate(keys), strict=True):
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


def test_read_can_be_left_early(store):
    with store.writer() as writer:
        keys = put(writer, *range(50))
    records = store.read(keys)
    assert is_right(next(records), keys[0])
    records.close()


def test_a_missing_record_is_a_key_error_that_says_what_to_type(store):
    with pytest.raises(RecordMissing, match="pipeline submit --stage all") as caught:
        store.get(key_of(1))
    assert isinstance(caught.value, KeyError)
    with pytest.raises(RecordMissing):
        list(store.read([key_of(1)]))


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
    store.rebuild_index()
    assert open_store().stat().index is IndexState.CURRENT
    assert open_store().missing(keys, patience_s=10) == []


def test_published_files_are_read_only_and_group_readable(store, tmp_path):
    with store.writer() as writer:
        put(writer, 1)
    store.write_index()
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(files) == 3
    for path in files:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode & 0o440 == 0o440
        assert not mode & 0o222
    assert all(path.stat().st_mode & 0o050 == 0o050 for path in (tmp_path / "cache").rglob("*") if path.is_dir())


def test_nothing_is_left_in_the_folder_of_unfinished_files(store, tmp_path):
    with store.writer(shard_bytes=1000) as writer:
        put(writer, *range(10))
    with store.writer():
        pass
    store.write_index()
    assert list((tmp_path / "cache/scan/tmp").iterdir()) == []


def test_the_fewest_files_that_the_shard_size_allows(store):
    with store.writer() as writer:
        put(writer, *range(500))
    assert store.stat().shards == 1


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


def test_arrays_come_back_read_only_and_aligned(store):
    with store.writer() as writer:
        put(writer, *range(20))
    for key in list(store.keys()):
        for array in store.get(key).arrays.values():
            assert not array.flags.writeable
            assert array.flags.aligned


def test_stat_tells_size_and_age(store, tmp_path):
    with store.writer(shard_bytes=2000) as writer:
        put(writer, *range(30))
    told = store.stat()
    sizes = [path.stat().st_size for path in (tmp_path / "cache/scan/shards").iterdir()]
    assert (told.records, told.bytes, told.shards) == (30, sum(sizes), len(sizes))
    assert told.oldest <= told.newest
    assert told.unreadable == ()


@pytest.mark.parametrize("key", [b"", b"short", bytes(17), "text of 16 chars"])
def test_what_is_no_key_is_refused(store, key):
    with pytest.raises(ValueError, match="a key is 16 bytes"), store.writer() as writer:
        writer.put(key, {})
    with pytest.raises((ValueError, TypeError)):
        store.get(key)


@pytest.mark.parametrize("kind", ["", "..", "a/b", "Scan", ".hidden"])
def test_a_kind_cannot_leave_its_folder(tmp_path, kind):
    with pytest.raises(ValueError, match="cannot name a kind"):
        CacheFolder(tmp_path).kind(kind)
