"""The house is walkable: small folders that say what they answer, names with one meaning, short lists of parameters."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.house.names import (
    MEANT,
    PACKAGE,
    names_with_two_meanings,
    overlong_signatures,
    places_of_names,
    trees,
)

ROOT = PACKAGE.parent
MOST_FILES = 20
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("*.py")})
OTHERS = sorted({path.parent for room in ("tests", "benchmarks") for path in (ROOT / room).rglob("*.py")})


def in_root(path: Path) -> str:
    """Name a folder."""
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("folder", [*FOLDERS, *OTHERS], ids=in_root)
def test_a_folder_has_few_files(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= MOST_FILES


@pytest.mark.nightly
@pytest.mark.parametrize("folder", FOLDERS, ids=in_root)
def test_a_room_says_what_it_answers(folder: Path) -> None:
    tree = trees()[str((folder / "__init__.py").relative_to(PACKAGE))]
    assert len(ast.get_docstring(tree) or "") > 30
    assert folder == PACKAGE or len(tree.body) == 1, "an __init__.py holds nothing but its docstring"


@pytest.mark.parametrize("kind", ["class", "function", "file"])
def test_a_name_has_one_meaning(kind: str) -> None:
    assert names_with_two_meanings(kind) == {}


def test_what_is_excused_is_there() -> None:
    for kind, names in MEANT.items():
        assert all(len(places_of_names()[kind][name]) > 1 for name in names)


def test_no_function_takes_more_than_eight_parameters() -> None:
    assert overlong_signatures() == []
