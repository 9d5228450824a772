"""The versions that the page of formats quotes are those of the code, and none is left out."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/formats.md").read_text()
QUOTED = re.compile(r"(\d+) <!-- version: (\S+) (\w+) -->")
CONSTANT = re.compile(r"^([A-Z_]*(?:FORMAT|VERSION)) = \d+", re.MULTILINE)


def constants() -> set[tuple[str, str]]:
    """Return the versions that the code has: by module and name."""
    return {
        (".".join(path.relative_to(ROOT).with_suffix("").parts), name)
        for path in (ROOT / "pipeline").rglob("*.py")
        for name in CONSTANT.findall(path.read_text())
    }


def test_every_version_that_is_quoted_is_that_of_the_code() -> None:
    quoted = QUOTED.findall(PAGE)
    wrong = [
        f"{name} of {module} is {value}, quoted as {told}"
        for told, module, name in quoted
        if (value := getattr(importlib.import_module(module), name)) != int(told)
    ]
    assert wrong == []
    assert len(quoted) > 20


def test_every_version_of_the_code_is_on_the_page() -> None:
    assert constants() == {(module, name) for _, module, name in QUOTED.findall(PAGE)}
