"""The versions that the page of formats quotes are those of the code, and none is left out."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUOTED = re.compile(r"(\d+) <!-- version: (\S+) (\w+) -->")
CONSTANT = re.compile(r"^([A-Z_]*(?:FORMAT|VERSION)) = \d+", re.MULTILINE)


def test_every_version_of_the_code_is_quoted_as_it_is() -> None:
    page = (ROOT / "docs/reference/formats.md").read_text()
    quoted = {(module, name): int(version) for version, module, name in QUOTED.findall(page)}
    there = {
        (module, name): getattr(importlib.import_module(module), name)
        for path in (ROOT / "pipeline").rglob("*.py")
        for module in [".".join(path.relative_to(ROOT).with_suffix("").parts)]
        for name in CONSTANT.findall(path.read_text())
    }
    assert quoted == there
    assert len(quoted) == 22  # all that the code has: the pattern still finds them
