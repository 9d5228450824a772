"""What a store holds is counted alike in one piece and in many, by the index, by tables, and by both."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.keys import TAG_BYTES
from pipeline.store import shard_index
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.users import sorted_keys

TAGS = [b"\0\0\0\1", b"\0\0\0\2", b"\xff\xff\xff\xff", b"\0\0\0\3"]


def key(tag, number):
    return tag + number.to_bytes(16 - TAG_BYTES, "big")


@pytest.mark.parametrize("indexed", ["none", "half", "all"])
@pytest.mark.parametrize("piece", [1, 40, 2048])
def test_records_tags_and_absent_keys_are_counted_once_each(tmp_path, monkeypatch, piece, indexed):
    monkeypatch.setattr(shard_index, "_PIECE_ROWS", piece)
    store = CacheFolder(tmp_path / "cache").kind("graph")
    there = [key(tag, number) for tag in TAGS[:3] for number in range(100)]
    rng = np.random.default_rng(0)
    for turn in range(4):  # copies of many, so that some lie on both sides of where a piece ends
        with store.writer() as writer:
            for one in there if turn == 0 else rng.permutation(np.array(there, "V16"))[:150]:
                writer.put(bytes(one), {"a": np.zeros(8)}, {})
        if indexed == "all" or (indexed == "half" and turn == 1):
            store.write_index()
    assert list(store.keys()) == sorted(there)
    assert all(record.key == one for record, one in zip(store.read(there), there, strict=True))
    absent = [key(tag, number) for tag in TAGS for number in range(500, 540)]
    found = store.tally(TAGS, sorted_keys(b"".join([*there, *absent])))
    length = store.locate(there[:1])[0][0].length
    assert found.stat == store.stat()
    assert found.stat.records == len(there)
    assert found.tagged == dict.fromkeys(TAGS[:3], (100, 100 * length)) | {TAGS[3]: (0, 0)}
    assert found.absent.tolist() == sorted_keys(b"".join(absent)).tolist()
