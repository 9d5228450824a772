"""The pages are short, and so are their sentences."""

from __future__ import annotations

from tests.docs.figures import ROOT, sentences, words, written

FIRST = [ROOT / "README.md", *sorted((ROOT / "docs/tutorials").glob("*.md"))]  # that people read first


def test_the_pages_that_are_written_by_hand_have_no_more_than_16_000_words() -> None:
    assert sum(map(words, written())) <= 16_000
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140


def test_no_sentence_of_the_first_pages_has_more_than_30_words() -> None:
    assert [sentence for page in FIRST for sentence in sentences(page) if len(sentence.split()) > 30] == []
