"""Bytes that are not those that were written: noticed on read, never served."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from pipeline.errors import CacheDamaged, RecordMissing
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from pipeline.store.format.shard import TRAILER_BYTES, read_table
from tests.store.content import damaged, is_right, is_undamaged, judged, key_of, put, rebuild_index
from tests.store.maintenance.damage import overwrite
from tests.testkit.counted import calls_of

KEYS = [key_of(0), key_of(1), key_of(2)]


def flip(content, place):
    return content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]


def served(root):
    """Return how many of the keys a new process is served; what it is served must be right."""
    store = CacheFolder(root).kind("scan")
    count = 0
    for key in KEYS:
        try:
            record = store.get(key)
        except (CacheDamaged, RecordMissing):
            assert store.missing([key]) == [key]
        else:
            assert is_right(record, key)
            count += 1
    return count


@pytest.mark.parametrize(("indexed", "stride"), [(False, 1), (True, 5)])
def test_a_flipped_bit_in_any_byte_is_caught(filled, shard, tmp_path, indexed, stride):
    if indexed:
        filled.write_index()
    table = read_table(Disk(), shard)
    content = shard.read_bytes()
    for place in range(0, len(content), stride):
        overwrite(shard, flip(content, place))
        (checked,) = judged(CacheFolder(tmp_path / "cache").kind("scan"))
        assert checked.findings
        in_header, in_records = place < table.data_start, table.data_start <= place < table.table_start
        expected = 3 if in_header else 2 if in_records else 3 if indexed else 0
        assert served(tmp_path / "cache") == expected, place
        assert len(damaged(checked)) == in_records, place


@pytest.mark.parametrize(("indexed", "stride"), [(False, 1), (True, 5)])
def test_a_shard_that_was_cut_anywhere_or_grew_serves_nothing(filled, shard, tmp_path, indexed, stride):
    if indexed:
        filled.write_index()
    content = shard.read_bytes()
    grown = [content + tail for tail in (b"\0", content[-TRAILER_BYTES:], content)]
    for other in [*(content[:length] for length in range(0, len(content), stride)), *grown]:
        overwrite(shard, other)
        assert served(tmp_path / "cache") == 0
        assert not is_undamaged(CacheFolder(tmp_path / "cache").kind("scan"))


def test_a_flipped_bit_is_caught_in_a_callers_memory_that_held_the_right_bytes_before(filled, shard, tmp_path):
    content = shard.read_bytes()
    memory = np.zeros(4096, np.uint8)

    def room(length):
        return memory[: length // 2].data, memory[length // 2 : length].data

    places = filled.locate(KEYS[:1])[0]
    for place in range(places[0].offset, places[0].offset + places[0].length, 3):
        overwrite(shard, content)
        store = CacheFolder(tmp_path / "cache").kind("scan")
        assert is_right(store.get_at(KEYS[0], places, room), KEYS[0])
        overwrite(shard, flip(content, place))
        with pytest.raises(CacheDamaged):
            store.get_at(KEYS[0], places, room)


def test_a_damaged_copy_gives_way_to_a_whole_one(filled, shard):
    with filled.writer() as writer:
        put(writer, 0)
    first = filled.locate(KEYS)[0][0]
    path = shard.parent / first.shard
    overwrite(path, flip(path.read_bytes(), first.offset))
    assert is_right(filled.get(KEYS[0]), KEYS[0])
    assert [len(copies) for copies in filled.locate(KEYS)] == [1, 1, 1]


def test_damage_names_shard_key_and_command_and_the_record_can_be_computed_again_at_once(filled, shard):
    overwrite(shard, flip(shard.read_bytes(), read_table(Disk(), shard).data_start))
    with pytest.raises(CacheDamaged) as caught:
        filled.get(KEYS[0])
    assert shard.name in caught.value.where
    assert KEYS[0].hex() in str(caught.value)
    assert "pipeline submit" in caught.value.remedy
    assert filled.missing(KEYS) == KEYS[:1]
    with filled.writer() as writer:
        put(writer, 0)
    assert is_right(filled.get(KEYS[0]), KEYS[0])


def test_a_purged_shard_leaves_its_records_absent(filled, shard, tmp_path):
    with filled.writer() as writer:
        put(writer, 7)
    filled.write_index()
    assert filled.missing(KEYS) == []  # this one has looked
    shard.unlink()
    for store in (filled, CacheFolder(tmp_path / "cache").kind("scan")):
        with pytest.raises(RecordMissing):
            store.get(KEYS[0])
        assert store.missing([*KEYS, key_of(7)]) == KEYS
        assert [name for name, _ in store.stat().unreadable] == [shard.name]
    store.write_index()
    assert store.stat().unreadable == ()
    assert list(store.keys()) == [key_of(7)]
    with CacheFolder(tmp_path / "cache").kind("scan").writer() as writer:
        put(writer, 0)
    assert is_right(filled.get(KEYS[0]), KEYS[0])


def test_a_damaged_index_costs_a_miss_or_a_retry_and_never_a_wrong_byte(filled, tmp_path):
    with filled.writer() as writer:
        put(writer, *range(3, 70))
    filled.write_index()
    path = tmp_path / "cache/scan/index.bin"
    content = path.read_bytes()
    asked = [key_of(number) for number in range(75)]
    reader = CacheFolder(tmp_path / "cache").kind("scan")
    assert reader.missing(asked) == asked[70:]
    flipped = (flip(content, place) for place in range(0, len(content), 5))
    for other in (*flipped, *(content[:length] for length in range(0, len(content), 61)), content[:-1] + b"\xff"):
        overwrite(path, other)
        store = CacheFolder(tmp_path / "cache").kind("scan")
        assert set(store.missing(asked)) >= set(asked[70:])
        for key in asked[:70:7]:
            with suppress(CacheDamaged, RecordMissing):
                assert is_right(store.get(key), key)
    rebuild_index(store)
    for store in (reader, CacheFolder(tmp_path / "cache").kind("scan")):
        assert store.missing(asked) == asked[70:]
        assert all(is_right(record, key) for record, key in zip(store.read(asked[:70]), asked[:70], strict=True))


def test_a_foreign_file_among_the_shards_is_reported_and_harmless(filled, shard):
    (shard.parent / "foreign.safetensors").write_bytes(b"")
    (shard.parent / "notes.txt").write_text("hello")
    filled.refresh()
    assert filled.missing(KEYS) == []
    assert [name for name, _ in filled.stat().unreadable] == ["foreign.safetensors"]
    assert sorted(bool(checked.findings) for checked in judged(filled)) == [False, True]


def test_a_full_read_takes_shards_larger_than_its_buffer(cache, tmp_path):
    store = cache.kind("scan")
    noise = np.random.default_rng(0).integers(0, 255, 700_000, np.uint8)
    with store.writer() as writer:
        for number in range(5):
            writer.put(key_of(number), {"noise": noise}, {})
    (checked,) = judged(store)
    assert not checked.findings
    assert len(checked.whole) == 5
    (path,) = (tmp_path / "cache/scan/shards").iterdir()
    overwrite(path, flip(path.read_bytes(), 2_000_000))
    (checked,) = judged(store)
    assert damaged(checked) == [key_of(2)]


@pytest.mark.parametrize("framework", ["numpy", "pt"])
def test_stock_safetensors_opens_a_shard(cache, tmp_path, framework):
    from safetensors import safe_open

    store = cache.kind("scan")
    with store.writer(header_bytes=8192) as writer:
        put(writer, 0, 1, 2)
        writer.put(key_of(3), {"large": np.arange(300_000)}, {})
        writer.put(key_of(4), {"x": np.array([0x3F80, 0xC000], np.uint16)}, {}, bfloat16=["x"])
    (path,) = (tmp_path / "cache/scan/shards").iterdir()
    with safe_open(path, framework) as stock:
        if framework == "pt":
            assert stock.get_tensor(f"{key_of(4).hex()}/x").tolist() == [1.0, -2.0]
        for key in [*KEYS, key_of(3)]:
            for name, array in store.get(key).arrays.items():
                assert np.array_equal(np.asarray(stock.get_tensor(f"{key.hex()}/{name}")), array)


def test_a_look_up_is_no_more_work_because_thousands_of_other_records_are_damaged(cache):
    store = cache.kind("scan")
    keys = [key_of(number) for number in range(3000)]
    for first in range(0, 3000, 300):
        with store.writer() as writer:
            for key in keys[first : first + 300]:
                writer.put(key, {"x": np.zeros(8)}, {})
    store.write_index()

    def look_up():
        for key in keys[:200]:
            store.locate([key])

    look_up()
    before = calls_of(look_up)
    for place, *_ in store.locate(keys)[100:]:
        store.own.damaged.add(place)
    assert store.missing(keys) == keys[100:]
    assert calls_of(look_up) < 10 * before
