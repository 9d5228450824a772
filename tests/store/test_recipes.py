"""What there is of each recipe shows in the index alone, because all keys of a recipe begin with its tag."""

from __future__ import annotations

import numpy as np

from pipeline.keys import KEY_BYTES, TAG_BYTES, recipe_tag, tagged_key
from pipeline.store.cache_folder import CacheFolder

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
