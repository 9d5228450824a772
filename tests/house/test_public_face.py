"""Users import from `pipeline.api` alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import api

ROOT = Path(__file__).resolve().parents[2]
IMPORT = re.compile(r"^\s*(?:from (pipeline[\w.]*) import|import (pipeline[\w.]*))", re.MULTILINE)
PAGES = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "tests/users").glob("*.py")]


def test_every_public_name_is_there_and_listed() -> None:
    assert [name for name in api.PLACES if getattr(api, name) is None] == []
    assert sorted(api.__all__) == sorted(api.PLACES)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"pipeline\.api.*nothing"):
        api.nothing  # noqa: B018


def test_importing_the_public_face_does_not_import_torch() -> None:
    code = "import sys, pipeline.api\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_documentation_and_users_import_from_the_public_face_alone() -> None:
    found = [(name, page) for page in PAGES for names in IMPORT.findall(page.read_text()) for name in names if name]
    allowed = ("pipeline", "pipeline.api", "pipeline.tasks.interface")  # the last: a task that `train.task` names
    assert [place for place in found if place[0] not in allowed] == []
    assert len(found) > 5
