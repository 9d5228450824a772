"""Keys: everything that can change a number is in them, and nothing else; which results may stand in for others."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from pipeline.encoder.embedding_recipe import EmbeddingRecipe, SequenceCut, Variant

RECIPE = EmbeddingRecipe(weights="w", layer=3, context="chain", precision="fp16", storage="fp16")
OTHER: dict[str, Any] = {
    "weights": "v", "layer": 2, "context": "partner", "precision": "bf16", "storage": "fp32", "cls": True,
}  # fmt: skip
# On a short sequence that it can read.
WITHOUT_EFFECT = {"long", "length", "overlap", "on_oom", "half_fallback", "letters", "whole"}


def key(recipe: EmbeddingRecipe, text: str = "MKV") -> bytes:
    return recipe.key(text, recipe.wanted(len(text)))


def test_whatever_changes_a_number_changes_the_key_and_nothing_else():
    assert {field.name for field in fields(EmbeddingRecipe)} == set(OTHER) | WITHOUT_EFFECT
    keys = [key(RECIPE), *(key(replace(RECIPE, **{name: value})) for name, value in OTHER.items())]
    assert len(set(keys)) == len(keys)
    assert key(RECIPE).hex() == "93818ecd90bcf087ff522af21832d66f"  # as before there was cls


def test_how_long_sequences_are_treated_does_not_change_the_keys_of_short_ones():
    other = replace(RECIPE, long="windows", length=100, overlap=10, on_oom="cpu", half_fallback=False)
    assert key(other) == key(RECIPE)
    assert key(other, "M" * 101) != key(RECIPE, "M" * 101)
    assert key(replace(other, overlap=20), "M" * 101) != key(other, "M" * 101)
    short = replace(RECIPE, long="truncate", length=100)  # which is never taken for a whole one
    assert key(short, "M" * 101) != key(RECIPE, "M" * 101)
    assert Variant("fp16") not in short.accepted(101)


def test_others_that_will_do_are_those_the_configuration_allows():
    half, full, windows = Variant("fp16"), Variant("fp32"), SequenceCut("windows", 1022, 256)
    plain, short = replace(RECIPE, precision="fp32"), replace(RECIPE, long="error", length=100, overlap=10)
    assert RECIPE.accepted(10) == (half, full)
    assert replace(RECIPE, half_fallback=False).accepted(10) == (half,)
    assert plain.accepted(10) == plain.accepted(1022) == (full,)
    assert plain.accepted(1023) == (full, Variant("fp32", windows))
    assert replace(plain, on_oom="cpu").accepted(1023) == (full,)
    assert [short.refuses(residues) for residues in (100, 101)] == [False, True]
    assert not RECIPE.refuses(10**6)
    assert (short.windowed(100), short.windowed(101)) == (None, SequenceCut("windows", 100, 10))
    assert replace(short, on_oom="cpu").windowed(101) is None
    assert replace(short, long="truncate").windowed(101) == SequenceCut("truncate", 100)


def test_what_is_longer_than_a_sequence_may_be_as_one_is_cut_as_the_configuration_says():
    windows, truncate = (replace(RECIPE, long=long, length=100, overlap=10) for long in ("windows", "truncate"))
    assert [recipe.wanted(100).cut for recipe in (windows, truncate)] == [None, None]
    assert windows.wanted(101).cut == SequenceCut("windows", 100, 10)
    assert truncate.wanted(101).cut == SequenceCut("truncate", 100)
    larger = replace(windows, whole=150)
    assert (larger.cut_beyond, larger.wanted(150).cut, larger.wanted(151).cut) == (150, None, windows.wanted(101).cut)
    assert replace(windows, whole=50).cut_beyond == 100


def test_all_accepted_variants_are_those_of_short_of_long_and_of_the_longest_sequences():
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
