"""Letters become the tokens that fair-esm gives them, and what is no residue is refused where it stands."""

from __future__ import annotations

import esm
import pytest

from pipeline.encoder.embedding_recipe import CLS, EOS, LETTERS, MASK, PAD, VOCABULARY, BadSequence, tokenize

ALPHABET = esm.data.Alphabet.from_architecture("ESM-1b")


def test_the_vocabulary_is_that_of_fair_esm() -> None:
    assert tuple(ALPHABET.all_toks) == VOCABULARY
    assert (
        ALPHABET.cls_idx,
        ALPHABET.padding_idx,
        ALPHABET.eos_idx,
        ALPHABET.mask_idx,
    ) == (CLS, PAD, EOS, MASK)


def test_every_letter_has_the_token_that_fair_esm_gives_it() -> None:
    _, _, tokens = ALPHABET.get_batch_converter()([("all", LETTERS)])
    assert tokens[0, 1:-1].tolist() == tokenize(LETTERS).tolist()


@pytest.mark.parametrize(
    ("sequence", "what"),
    [
        ("", "empty"),
        ("MKJ", "'J' at position 3"),
        ("MK*V", r"'\*' at position 3"),
        (".MK", r"'\.' at position 1"),
        ("M-K", "'-' at position 2"),
        ("MK<mask>V", "'<' at position 3"),
        ("mkv", "'m' at position 1"),
        ("M K", "' ' at position 2"),
        ("MK\n", "position 3"),
        ("MКV", "'К' at position 2"),  # a Cyrillic letter
        ("M\ud800", "position 2"),
        ("MÿK", "'ÿ' at position 2"),
    ],
)
def test_what_is_no_residue_is_refused_by_name_and_place(sequence: str, what: str) -> None:
    with pytest.raises(BadSequence, match=what):
        tokenize(sequence)
