"""Sequences become tokens and windows: of what an item has, as fair-esm has them, with every residue once."""

from __future__ import annotations

import esm
import pytest

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
