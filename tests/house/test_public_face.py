"""Users import from `pipeline.api` alone; what was published elsewhere still works, and says where it went."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from pipeline import api
from pipeline.moved import MOVED

ROOT = Path(__file__).resolve().parents[2]
IMPORT = re.compile(r"^\s*(?:from (pipeline[\w.]*) import|import (pipeline[\w.]*))", re.MULTILINE)
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", *sorted((ROOT / "tests/users").glob("*.py"))]


@pytest.mark.parametrize("name", api.PLACES)
def test_a_public_name_is_there(name: str) -> None:
    assert getattr(api, name) is not None


def test_all_public_names_are_listed() -> None:
    assert sorted(api.__all__) == sorted(api.PLACES)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"pipeline\.api.*nothing"):
        api.nothing  # noqa: B018


def test_importing_the_public_face_does_not_import_torch() -> None:
    code = "import sys, pipeline.api\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documentation_and_users_import_from_the_public_face_alone(page: Path) -> None:
    modules = {first or second for first, second in IMPORT.findall(page.read_text())}
    assert modules <= {"pipeline", "pipeline.api"}


@pytest.mark.parametrize("module", MOVED)
def test_what_was_published_still_works_and_says_where_it_went(module: str) -> None:
    for old, new in MOVED[module].items():
        with pytest.warns(
            DeprecationWarning, match=rf"{re.escape(module)}\.{old} has moved: from pipeline\.api import {new}"
        ):
            assert getattr(import_module(module), old) is getattr(api, new)


def test_nothing_else_is_found_in_a_module_that_moved() -> None:
    with pytest.raises(ImportError):
        from pipeline.runs.loading import source_of  # noqa: F401
