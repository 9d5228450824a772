"""Sequences become tokens and windows: of what an item has, as fair-esm has them, with every residue once."""

from __future__ import annotations

from itertools import pairwise

import esm
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.encoder.embedding_recipe import (
    CLS,
    EOS,
    LETTERS,
    MASK,
    PAD,
    VOCABULARY,
    BadSequence,
    partner_texts,
    texts,
    tokenize,
    window_shares,
    windows,
)
from pipeline.records import ChainSummary, Inventory, Kind, Partner, Role

ALPHABET = esm.data.Alphabet.from_architecture("ESM-1b")
CASES = st.integers(1, 60).flatmap(
    lambda window: st.tuples(st.integers(1, 400), st.just(window), st.integers(0, window - 1))
)


def partner(role=Role.RECEPTOR, **chains):
    """Return a partner of chains, that of R of RNA."""
    kinds = {name: Kind.RNA if name == "R" else Kind.PROTEIN for name in chains}
    sizes = {name: dict.fromkeys(("residues", "nodes", "atoms"), len(text)) for name, text in chains.items()}
    return Partner(
        role, "content", tuple(ChainSummary(name, kinds[name], chains[name], **sizes[name]) for name in chains)
    )


def test_of_an_item_each_protein_is_encoded_once_by_chain_or_joined():
    heavy_and_light = partner(H="MKV", R="ACGU", L="GG")
    assert partner_texts(heavy_and_light, "chain") == ["MKV", "GG"]
    assert partner_texts(heavy_and_light, "partner") == ["MKVGG"]
    assert texts(Inventory(partners=(partner(A="MKV"), partner(Role.LIGAND, B="MKV"))), "chain") == ["MKV"]
    for context in ("chain", "partner"):
        assert texts(Inventory(partners=(partner(R="ACGU"),)), context) == []


def test_letters_have_the_tokens_of_fair_esm():
    assert tuple(ALPHABET.all_toks) == VOCABULARY
    marks = ALPHABET.cls_idx, ALPHABET.padding_idx, ALPHABET.eos_idx, ALPHABET.mask_idx
    assert marks == (CLS, PAD, EOS, MASK)
    _, _, tokens = ALPHABET.get_batch_converter()([("all", LETTERS)])
    assert tokens[0, 1:-1].tolist() == tokenize(LETTERS).tolist()


BAD = {"": "empty", "MKJ": "'J'", "MK*V": "'*'", ".MK": "'.'", "M-K": "'-'", "MK<mask>V": "'<'", "mkv": "'m'"}
ODD = {"M K": 2, "MK\n": 3, "M\u041aV": 2, "M\ud800": 2, "MÿK": 2}  # at this position; \u041a is a Cyrillic letter


def test_what_is_no_residue_is_refused_by_name_or_place():
    for sequence, what in {**BAD, **{text: f"position {place}" for text, place in ODD.items()}}.items():
        with pytest.raises(BadSequence) as refused:
            tokenize(sequence)
        assert what in str(refused.value)


def test_windows_of_a_sequence_by_hand():
    assert windows(25, 10, 4) == [(0, 10), (6, 16), (12, 22), (15, 25)]
    assert window_shares([(0, 10), (6, 16), (12, 22), (15, 25)]) == [(0, 8), (8, 14), (14, 19), (19, 25)]
    for length, spans in ((10, [(0, 10)]), (3, [(0, 3)]), (11, [(0, 10), (1, 11)])):
        assert windows(length, 10, 4) == spans
    for window, overlap in ((10, 10), (10, 11), (10, -1), (0, 0)):  # which would not move
        with pytest.raises(ValueError, match="overlap"):
            windows(100, window, overlap)


@given(CASES)
def test_windows_are_whole_and_overlap_by_at_least_what_was_asked(case):
    length, window, overlap = case
    spans = windows(*case)
    assert spans[0][0] == 0
    assert spans[-1][1] == length
    assert {end - start for start, end in spans} == {min(length, window)}
    assert all(one[1] - other[0] >= overlap and other[0] > one[0] for one, other in pairwise(spans))


@given(CASES)
def test_every_residue_comes_from_the_window_where_it_is_farthest_from_a_cut(case):
    length = case[0]
    spans = windows(*case)
    parts = [np.array([[number, place] for place in range(start, end)]) for number, (start, end) in enumerate(spans)]
    given = zip(parts, spans, window_shares(spans), strict=True)
    merged = np.concatenate([part[start - begin : stop - begin] for part, (begin, _), (start, stop) in given])
    assert merged[:, 1].tolist() == list(range(length))
    assert merged[:, 0].tolist() == [_best(place, spans, length) for place in range(length)]


def _best(place: int, spans: list[tuple[int, int]], length: int) -> int:
    """Find by comparing all windows which one has a place farthest from its cuts."""
    room = [
        min(place - start if start else length, end - 1 - place if end < length else length)
        if start <= place < end
        else -1
        for start, end in spans
    ]
    return room.index(max(room))
