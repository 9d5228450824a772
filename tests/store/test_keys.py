"""Keys are bytes that stand in caches for years: what they were, they are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import keys
from pipeline.encoder.embedding_recipe import EmbeddingRecipe, SequenceCut, Variant
from pipeline.keys import KEY_BYTES, content_digest, is_settled, recipe_key, recipe_tag, tagged_key
from pipeline.store.format.shard import column_keys
from pipeline.store.users import sorted_keys

NOW_NS = 1_700_000_000_123_456_789
MS = 1_000_000
RECIPE = EmbeddingRecipe(weights="w", layer=3, context="chain", precision="fp16", storage="fp16")


def test_keys_are_what_they_were():
    assert recipe_key("graph", {"b": [1, 2.5], "a": None}).hex() == "421a513b97696b9844b76f28e40616bd"
    assert tagged_key("graph", {"neighbours": 5}, "x").hex() == "4894d6958a6ca74c7278acf325c9ffd6"
    assert recipe_tag("graph", {"neighbours": 5}).hex() == "4894d695"
    assert content_digest(b"bytes").hex() == "95f64cad147d23ee983871c230125b12"
    assert RECIPE.key("MKV", Variant("fp16")).hex() == "93818ecd90bcf087ff522af21832d66f"
    windows = Variant("fp32", SequenceCut("windows", 1022, 256))
    assert RECIPE.key("MKV", windows).hex() == "a9f3b8bac91a8e0b1a4b141fa4b9546e"
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON"):
            recipe_key("graph", {"radius": number})


@settings(deadline=None)  # other work may share the machine
@given(
    st.lists(
        st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES) | st.sampled_from([b"\0" * KEY_BYTES, b"a" + b"\0" * 15])
    )
)
def test_keys_are_sorted_as_bytes_and_each_is_there_once(known):
    assert column_keys(sorted_keys(bytearray().join(known))) == sorted(set(known))


@pytest.mark.parametrize(
    ("mtime_ns", "age_ns", "settled"),
    [
        (NOW_NS, 50 * MS, True),
        (NOW_NS, 50 * MS - 1, False),
        (NOW_NS, -50 * MS, True),  # the clock was set back
        (NOW_NS, 1 - 50 * MS, False),
        (1_700_000_000 * 1000 * MS, 2000 * MS, True),  # a clock of whole seconds
        (1_700_000_000 * 1000 * MS, 2000 * MS - 1, False),
        (1_700_000_000 * 1000 * MS + 1, 50 * MS, True),
    ],
)
def test_a_file_is_settled_once_its_next_change_would_show_in_its_times(mtime_ns, age_ns, settled, monkeypatch):
    monkeypatch.setattr(keys.time, "time_ns", lambda: NOW_NS)
    assert is_settled(mtime_ns, NOW_NS - age_ns) is settled
