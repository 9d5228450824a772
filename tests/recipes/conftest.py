"""Projects of the recipes whose data were read, each made once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recipes.projects import Recipe, ran, write
from tests.testkit.command import Command

Scanned = Callable[[Recipe], Path]
_made: dict[str, Path] = {}


@pytest.fixture
def scanned(pipeline: Command, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Scanned:
    """Return a function that goes to the project of a recipe, all of whose data were read; nothing is trained."""

    def go(recipe: Recipe) -> Path:
        is_new = recipe.name not in _made
        folder = _made.get(recipe.name) or write(recipe, tmp_path_factory.mktemp(recipe.name))
        monkeypatch.chdir(folder)
        if is_new:
            done = ran(pipeline, recipe.sets(), stage="graph" if recipe.structures else "scan")
            assert done.code == 0, done.err
            _made[recipe.name] = folder
        return folder

    return go
