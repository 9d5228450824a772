"""Keys: everything that can change a number is in them, and nothing else; which results may stand in for others."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from pipeline.encoder.embedding_recipe import EmbeddingRecipe, SequenceCut, Variant

RECIPE = EmbeddingRecipe(weights="w", layer=3, context="chain", precision="fp16", storage="fp16")
OTHER: dict[str, Any] = {
    "weights": "v", "layer": 2, "context": "partner", "precision": "bf16", "storage": "fp32", "cls": True,
}  # fmt: skip
WITHOUT_EFFECT = {
    "long",
    "length",
    "overlap",
    "on_oom",
    "half_fallback",
    "letters",
    "whole",
}  # on a short one it can read


def key(recipe: EmbeddingRecipe, text: str = "MKV") -> bytes:
    return recipe.key(text, recipe.wanted(len(text)))


@pytest.mark.parametrize("name", OTHER)
def test_whatever_changes_a_number_changes_the_key(name: str) -> None:
    assert key(replace(RECIPE, **{name: OTHER[name]})) != key(RECIPE)


def test_the_key_of_who_does_not_keep_the_mark_is_what_it_always_was() -> None:
    silent = EmbeddingRecipe(weights="w", layer=3, context="chain", precision="fp16", storage="fp16")
    assert silent.plain(Variant("fp16")).keys() == {"version", "weights", "layer", "context", "precision", "storage"}
    assert key(silent).hex() == "93818ecd90bcf087ff522af21832d66f"
    kept = replace(silent, cls=True).plain(Variant("fp16"))
    assert kept == {**silent.plain(Variant("fp16")), "cls": True}


def test_every_field_is_known_to_change_the_key_or_not() -> None:
    assert {field.name for field in fields(EmbeddingRecipe)} == set(OTHER) | WITHOUT_EFFECT


def test_how_long_sequences_are_treated_does_not_change_the_keys_of_short_ones() -> None:
    other = replace(RECIPE, long="windows", length=100, overlap=10, on_oom="cpu", half_fallback=False)
    assert key(other) == key(RECIPE)
    assert key(other, "M" * 101) != key(RECIPE, "M" * 101)
    assert key(replace(other, overlap=20), "M" * 101) != key(other, "M" * 101)


def test_a_truncated_sequence_is_never_taken_for_a_whole_one() -> None:
    short = replace(RECIPE, long="truncate", length=100)
    assert key(short, "M" * 101) != key(RECIPE, "M" * 101)
    assert Variant("fp16") not in short.accepted(101)


def test_half_precision_may_be_replaced_by_full_only_where_the_configuration_allows_it() -> None:
    assert RECIPE.accepted(10) == (Variant("fp16"), Variant("fp32"))
    assert replace(RECIPE, half_fallback=False).accepted(10) == (Variant("fp16"),)
    assert replace(RECIPE, precision="fp32").accepted(10) == (Variant("fp32"),)


def test_windows_may_replace_a_long_sequence_where_memory_ends() -> None:
    windows = SequenceCut("windows", 1022, 256)
    full = replace(RECIPE, precision="fp32")
    assert full.accepted(1022) == (Variant("fp32"),)
    assert full.accepted(1023) == (Variant("fp32"), Variant("fp32", windows))
    assert replace(full, on_oom="cpu").accepted(1023) == (Variant("fp32"),)


def test_the_wanted_variant_is_accepted_first() -> None:
    for long in ("full", "windows", "truncate"):
        recipe = replace(RECIPE, long=long)
        for residues in (10, 5000):
            assert recipe.accepted(residues)[0] == recipe.wanted(residues)
            assert len(set(recipe.accepted(residues))) == len(recipe.accepted(residues))


def test_error_refuses_what_is_longer_and_nothing_else() -> None:
    recipe = replace(RECIPE, long="error", length=100)
    assert not recipe.refuses(100)
    assert recipe.refuses(101)
    assert not RECIPE.refuses(10**6)


def test_what_is_longer_than_a_sequence_may_be_as_one_is_cut_as_the_configuration_says() -> None:
    windows, truncate = (replace(RECIPE, long=long, length=100, overlap=10) for long in ("windows", "truncate"))
    assert [recipe.wanted(100).cut for recipe in (windows, truncate)] == [None, None]
    assert windows.wanted(101).cut == SequenceCut("windows", 100, 10)
    assert truncate.wanted(101).cut == SequenceCut("truncate", 100)
    larger = replace(windows, whole=150)
    assert (larger.cut_beyond, larger.wanted(150).cut, larger.wanted(151).cut) == (150, None, windows.wanted(101).cut)
    assert replace(windows, whole=50).cut_beyond == 100


def test_all_accepted_variants_are_those_of_short_of_long_and_of_the_longest_sequences() -> None:
    cut = SequenceCut("windows", 100, 10)
    larger = replace(RECIPE, long="windows", length=100, overlap=10, whole=101, half_fallback=False)
    assert set(larger.variants()) == {Variant("fp16"), Variant("fp16", cut)}
    truncate = replace(larger, long="truncate")
    assert set(truncate.variants()) == {
        Variant("fp16"),
        Variant("fp16", cut),
        Variant("fp16", SequenceCut("truncate", 100)),
    }
    assert set(replace(truncate, on_oom="cpu").variants()) == {
        Variant(precision, kept) for precision in ("fp16", "fp32") for kept in (None, SequenceCut("truncate", 100))
    }


def test_only_what_is_longer_than_a_window_may_be_computed_in_windows_where_memory_ends() -> None:
    recipe = replace(RECIPE, long="error", length=100, overlap=10)
    assert (recipe.windowed(100), recipe.windowed(101)) == (None, SequenceCut("windows", 100, 10))
    assert replace(recipe, on_oom="cpu").windowed(101) is None
    for on_oom in ("windows", "cpu"):
        truncate = replace(recipe, long="truncate", on_oom=on_oom)
        assert truncate.windowed(101) == SequenceCut("truncate", 100)


def test_full_precision_will_do_on_the_cpu_or_where_it_was_allowed() -> None:
    strict = replace(RECIPE, half_fallback=False)
    assert not strict.full_precision_will_do
    assert replace(strict, on_oom="cpu").full_precision_will_do
    assert RECIPE.full_precision_will_do
