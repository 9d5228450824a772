"""What there is of each recipe shows in the index alone, because all keys of a recipe begin with its tag."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.keys import KEY_BYTES, TAG_BYTES, recipe_tag, tagged_key
from pipeline.store import shard_index
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.users import sorted_keys

FEW, MANY = {"neighbours": 5}, {"neighbours": 20}


def put(cache: CacheFolder, recipe: dict[str, int], count: int) -> None:
    with cache.kind("graph").writer() as writer:
        for number in range(count):
            writer.put(tagged_key("graph", recipe, number), {"rows": np.zeros(100)})


def test_keys_of_one_recipe_share_their_beginning_and_nothing_else():
    keys = {tagged_key("graph", MANY, number) for number in range(100)}
    assert {key[:TAG_BYTES] for key in keys} == {recipe_tag("graph", MANY)}
    assert len({key[TAG_BYTES:] for key in keys}) == 100
    assert {len(key) for key in keys} == {KEY_BYTES}
    others = {tagged_key(*of, 1)[TAG_BYTES:] for of in (("graph", FEW), ("graph", MANY), ("embed", FEW))}
    assert len(others) == 3


def test_records_are_counted_by_recipe(tmp_path):
    cache = CacheFolder(tmp_path / "cache")
    for recipe, count in ((FEW, 3), (MANY, 40)):
        for _ in range(2):  # it is described once
            cache.describe("graph", recipe)
        put(cache, recipe, count)
    put(cache, FEW, 3)  # the same again: copies count once
    cache.describe("graph", {"neighbours": 1})  # nothing was made by it
    cache.describe("embed", FEW)
    found = CacheFolder(tmp_path / "cache").recipes("graph")
    assert [(dict(one.recipe), one.records) for one in found] == [(MANY, 40), (FEW, 3)]
    assert all(one.bytes > 800 * one.records for one in found)
    assert cache.kind("recipes").stat().records == 4


def test_a_record_that_describes_no_recipe_hides_none(tmp_path):
    cache = CacheFolder(tmp_path / "cache")
    cache.describe("graph", FEW)
    put(cache, FEW, 3)
    odd: list[dict[str, object]] = [{"nothing": 1}, {"kind": "graph"}, {"kind": 7, "recipe": {}}]
    odd += [{"kind": "graph", "recipe": ["neighbours"]}, {"kind": ["graph"], "recipe": FEW}]
    with cache.kind("recipes").writer() as writer:
        for number, meta in enumerate(odd):
            writer.put(bytes([number] * KEY_BYTES), {}, meta)
    again = CacheFolder(tmp_path / "cache")
    assert [(kind, dict(recipe)) for _, kind, recipe in again.described()] == [("graph", FEW)]
    assert [one.records for one in again.recipes("graph")] == [3]


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
