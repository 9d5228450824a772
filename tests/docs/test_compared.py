"""The page that compares: no cell without its source, and ours are tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/compared.md").read_text()
SHOWN = re.compile(r"\]\((?:\.\./)+(?:tests|benchmarks|pipeline)/")
SOURCE = re.compile(r"\]\[([\w-]+)\]")
SAID_ELSEWHERE = {"*not found*", "as submitit"}
TOOLS = 6  # beside the capability and ourselves


def rows() -> list[list[str]]:
    """Return the rows of the tables in which each column is a tool."""
    tables = [
        line.strip("|").split(" | ") for line in TEXT.splitlines() if line.startswith("| ") and "|---" not in line
    ]
    return [[cell.strip(" |") for cell in row] for row in tables if len(row) > 3 and row[1].strip() != "pipeline"]


def test_every_capability_is_compared_with_all_and_ours_is_shown_by_a_test() -> None:
    assert len(rows()) >= 20
    assert [row[0] for row in rows() if len(row) != 2 + TOOLS] == []
    assert [row[0] for row in rows() if not SHOWN.search(row[1])] == []


def test_no_cell_of_another_is_without_its_source() -> None:
    cells = [(row[0], cell) for row in rows() for cell in row[2:]]
    assert [(name, cell) for name, cell in cells if not SOURCE.search(cell) and cell not in SAID_ELSEWHERE] == []
    assert sum(bool(SOURCE.search(cell)) for _, cell in cells) > 40


def test_every_source_is_defined_with_its_address_and_title_and_is_used() -> None:
    defined = re.findall(r'^\[([\w-]+)\]: https://\S+ ".+"$', TEXT, re.MULTILINE)
    assert len(defined) == len(set(defined)) == len(re.findall(r"^\[[\w-]+\]: ", TEXT, re.MULTILINE))
    assert set(defined) == set(SOURCE.findall(TEXT))


def test_others_are_said_to_be_better_where_they_are() -> None:
    better = [line for line in TEXT.partition("## Where others are better")[2].splitlines() if line.startswith("| ")]
    assert len(better) > 6
    assert [line for line in better[1:] if not SOURCE.search(line)] == []
