"""Every promise of the page on security names the tests that hold it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/security.md"
HELD = re.compile(r'\]\(\.\./(tests/[\w/]+\.py) "(\w+)"\)')
SECTION = ROOT / "tests/security"


def test_every_file_of_tests_of_security_holds_a_promise() -> None:
    held = HELD.findall(PAGE.read_text())
    assert len(held) >= 20
    files = {path for path, _ in held}
    assert {f"tests/security/{path.name}" for path in SECTION.glob("test_*.py")} - files == set()


def test_every_promise_in_a_table_says_what_holds_it() -> None:
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    promises = [row for row in rows if row[0].strip() != "promise"]
    assert len(promises) >= 15
    assert [row[0] for row in promises if len(row) != 3 or "](" not in row[2]] == []
