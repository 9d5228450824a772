"""Bytes that are not those that were written: noticed on read, never served."""

from __future__ import annotations

import json
import struct
import time

import numpy as np
import pytest

from pipeline.errors import CacheDamaged, RecordMissing
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from pipeline.store.format.shard import TRAILER_BYTES, read_table
from pipeline.store.snapshot import IndexState
from tests.store.content import damaged, is_right, is_undamaged, judged, key_of, put

KEYS = [key_of(0), key_of(1), key_of(2)]


def overwrite(path, content):
    path.chmod(0o644)
    path.write_bytes(content)


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


@pytest.mark.nightly
@pytest.mark.parametrize(("indexed", "stride"), [(False, 1), (True, 5)])
def test_a_shard_cut_anywhere_serves_nothing(filled, shard, tmp_path, indexed, stride):
    if indexed:
        filled.write_index()
    content = shard.read_bytes()
    for length in range(0, len(content), stride):
        overwrite(shard, content[:length])
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


def test_a_shard_that_grew_serves_nothing(filled, shard, tmp_path):
    content = shard.read_bytes()
    for tail in (b"\0", content[-TRAILER_BYTES:], content):
        overwrite(shard, content + tail)
        assert served(tmp_path / "cache") == 0
        assert not is_undamaged(CacheFolder(tmp_path / "cache").kind("scan"))


def test_a_truncated_shard_is_caught_by_who_has_read_it_before(filled, shard):
    assert is_right(filled.get(KEYS[0]), KEYS[0])
    overwrite(shard, shard.read_bytes()[:-1])
    filled.refresh()
    assert filled.missing(KEYS) == KEYS
    assert filled.stat().unreadable[0][0] == shard.name


def test_damage_names_the_shard_the_key_and_the_next_command(filled, shard):
    content = shard.read_bytes()
    overwrite(shard, flip(content, read_table(Disk(), shard).data_start))
    with pytest.raises(CacheDamaged) as caught:
        filled.get(KEYS[0])
    for word in (shard.name, KEYS[0].hex(), "pipeline submit --stage all"):
        assert word in str(caught.value)


def test_a_damaged_copy_gives_way_to_a_whole_one(filled, shard):
    with filled.writer() as writer:
        put(writer, 0)
    first = filled.locate(KEYS)[0][0]
    path = shard.parent / first.shard
    overwrite(path, flip(path.read_bytes(), first.offset))
    assert is_right(filled.get(KEYS[0]), KEYS[0])
    assert [len(copies) for copies in filled.locate(KEYS)] == [1, 1, 1]


def test_a_damaged_record_can_be_computed_again_at_once(filled, shard):
    overwrite(shard, flip(shard.read_bytes(), read_table(Disk(), shard).data_start))
    with pytest.raises(CacheDamaged):
        filled.get(KEYS[0])
    assert filled.missing(KEYS) == KEYS[:1]
    with filled.writer() as writer:
        put(writer, 0)
    assert is_right(filled.get(KEYS[0]), KEYS[0])


def test_a_purged_shard_leaves_its_records_absent(filled, shard, tmp_path):
    with filled.writer() as writer:
        put(writer, 7)
    filled.write_index()
    shard.unlink()
    store = CacheFolder(tmp_path / "cache").kind("scan")
    assert store.missing([*KEYS, key_of(7)]) == KEYS
    assert store.stat().unreadable == ((shard.name, "gone: purged or deleted"),)
    with pytest.raises(RecordMissing):
        store.get(KEYS[0])
    store.write_index()
    assert store.stat().unreadable == ()
    assert list(store.keys()) == [key_of(7)]


def test_a_shard_purged_under_a_reader_is_absent(filled, shard):
    filled.write_index()
    assert filled.missing(KEYS) == []
    shard.unlink()
    with pytest.raises(RecordMissing):
        filled.get(KEYS[0])
    assert filled.missing(KEYS) == KEYS


def test_a_copy_made_after_a_purge_is_found(filled, shard, tmp_path):
    filled.write_index()
    assert filled.missing(KEYS) == []
    shard.unlink()
    with CacheFolder(tmp_path / "cache").kind("scan").writer() as writer:
        put(writer, 0)
    assert is_right(filled.get(KEYS[0]), KEYS[0])


@pytest.mark.nightly
def test_a_flipped_bit_in_any_byte_of_the_index_changes_no_answer(filled, tmp_path):
    with filled.writer() as writer:
        put(writer, *range(3, 70))
    filled.write_index()
    path = tmp_path / "cache/scan/index.bin"
    content = path.read_bytes()
    asked = [key_of(number) for number in range(75)]
    for place in range(0, len(content), 3):
        overwrite(path, flip(content, place))
        store = CacheFolder(tmp_path / "cache").kind("scan")
        assert store.missing(asked) == asked[70:], place
        assert store.stat().index is IndexState.DAMAGED, place
        assert store.stat().records == 70


def test_an_index_cut_at_any_boundary_is_rebuilt(filled, tmp_path):
    filled.write_index()
    path = tmp_path / "cache/scan/index.bin"
    content = path.read_bytes()
    ends = np.cumsum([0, 72, 8, 8, 8, len(filled._taken.names[0]), len(content) - 96 - len(filled._taken.names[0])])
    assert ends[-1] == len(content)  # head, sizes, first keys, digests, names, rows
    for length in {near for end in (*ends, 512) for near in range(end - 1, end + 2) if 0 <= near < len(content)}:
        overwrite(path, content[:length])
        store = CacheFolder(tmp_path / "cache").kind("scan")
        assert store.missing(KEYS) == []
        assert store.stat().index is IndexState.DAMAGED, length
        store.write_index()
        assert store.stat().index is IndexState.CURRENT, length


def test_an_index_that_goes_bad_under_a_reader_is_dropped(filled, tmp_path):
    filled.write_index()
    path = tmp_path / "cache/scan/index.bin"
    overwrite(path, path.read_bytes()[:-1] + b"\xff")  # the same file that the reader holds open
    assert filled.missing(KEYS) == []


def test_a_shard_of_a_newer_format_is_reported_and_absent(filled, shard):
    import xxhash

    content = shard.read_bytes()
    trailer = bytearray(content[-TRAILER_BYTES:-16])
    trailer[8:12] = struct.pack("<I", 99)
    overwrite(shard, content[:-TRAILER_BYTES] + bytes(trailer) + xxhash.xxh3_128_digest(bytes(trailer)))
    filled._tables.clear()
    filled.refresh()
    assert filled.missing(KEYS) == KEYS
    assert "format" in filled.stat().unreadable[0][1]


def test_a_foreign_file_among_the_shards_is_reported_and_harmless(filled, shard):
    (shard.parent / "foreign.safetensors").write_bytes(b"")
    (shard.parent / "notes.txt").write_text("hello")
    filled.refresh()
    assert filled.missing(KEYS) == []
    assert [name for name, _ in filled.stat().unreadable] == ["foreign.safetensors"]
    assert sorted(bool(checked.findings) for checked in judged(filled)) == [False, True]


def test_a_full_read_names_the_good_and_the_damaged_records(filled, shard):
    rows = read_table(Disk(), shard).rows
    overwrite(shard, flip(shard.read_bytes(), int(rows["offset"][1])))
    (checked,) = judged(filled)
    assert damaged(checked) == [KEYS[1]]
    assert checked.whole == (KEYS[0], KEYS[2])
    assert len(checked.findings) == 1


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


def header_of(path):
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length])


def test_a_small_shard_has_no_empty_header_room(shard):
    assert shard.stat().st_size < 8192
    assert header_of(shard)["__metadata__"] == {"pipeline_shard": "1"}


@pytest.mark.parametrize("framework", ["numpy", "pt"])
def test_stock_safetensors_opens_a_shard(cache, tmp_path, framework):
    from safetensors import safe_open

    store = cache.kind("scan")
    with store.writer(header_bytes=8192) as writer:
        put(writer, 0, 1, 2)
        writer.put(key_of(3), {"large": np.arange(2_000_000)}, {})
    (path,) = (tmp_path / "cache/scan/shards").iterdir()
    with safe_open(path, framework) as stock:
        for key in [*KEYS, key_of(3)]:
            for name, array in store.get(key).arrays.items():
                assert np.array_equal(np.asarray(stock.get_tensor(f"{key.hex()}/{name}")), array)


def test_other_readers_see_bfloat16_as_such(cache, tmp_path):
    from safetensors import safe_open

    with cache.kind("scan").writer() as writer:
        writer.put(KEYS[0], {"x": np.array([0x3F80, 0xC000], np.uint16)}, {}, bfloat16=["x"])
    (path,) = (tmp_path / "cache/scan/shards").iterdir()
    with safe_open(path, "pt") as stock:
        assert stock.get_tensor(f"{KEYS[0].hex()}/x").tolist() == [1.0, -2.0]


def test_a_look_up_takes_no_longer_because_thousands_of_other_records_are_damaged(cache):
    store = cache.kind("scan")
    keys = [key_of(number) for number in range(3000)]
    for first in range(0, 3000, 300):
        with store.writer() as writer:
            for key in keys[first : first + 300]:
                writer.put(key, {"x": np.zeros(8)}, {})
    store.write_index()

    def looked_up():
        begun = time.perf_counter()
        for key in keys[:200]:
            store.locate([key])
        return time.perf_counter() - begun

    before = min(looked_up() for _ in range(3))
    for key, (place, *_) in zip(keys[100:], store.locate(keys)[100:], strict=True):
        assert store.whole_at(key, place._replace(digest=b"of others".ljust(16))) is None
    assert store.missing(keys) == keys[100:]
    assert min(looked_up() for _ in range(3)) < 10 * before
