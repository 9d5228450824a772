"""ARCHITECTURE.md: its map is the tree, what it says to read first is there, and its glossary is short."""

from __future__ import annotations

import re

import pytest

from tests.docs.tree_map import MAP, PACKAGE, PAGE, map_text

TEXT = PAGE.read_text()
MOST_WORDS = 25


def section(title: str) -> str:
    """Return the text under a heading."""
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_map_is_the_tree() -> None:
    found = MAP.search(TEXT)
    assert found is not None
    assert found[0] == map_text(), "python -m tests.docs.tree_map"


def read_first(heading: str) -> list[str]:
    """Return the files that are to be read first, in order, under a heading."""
    text = section("Read these first").split(f"### {heading}\n")[1].split("\n### ")[0]
    return re.findall(r"^\d+\. `([\w/]+\.py)`", text, re.MULTILINE)


def glossary_words() -> list[str]:
    """Return the words that the glossary explains."""
    return re.findall(r"^\| \*\*(.+?)\*\* \|", section("Glossary"), re.MULTILINE)


@pytest.mark.parametrize(
    ("heading", "most"), [("From the command line to a running rank", 12), ("One training step", 8)]
)
def test_few_files_are_to_be_read_first_and_they_are_there(heading: str, most: int) -> None:
    files = read_first(heading)
    assert 0 < len(files) <= most
    assert [file for file in files if not (PACKAGE / file).exists()] == []


def test_the_glossary_is_short() -> None:
    words = glossary_words()
    assert 0 < len(words) <= MOST_WORDS
    assert words == sorted(words)
