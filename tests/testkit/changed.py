"""Picks the tests that a change can reach: `pytest -m nightly --changed-since origin/main`.

A test is picked when its file, or a module that it imports however far away, has changed. A module that is only named
in a text (`python -m pipeline.engine.worker`, `task: pipeline.tasks.interface:Interface`) counts as imported. A change
of what no module imports (pyproject.toml, a shell script, this kit's conftest) picks all tests.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"\b(?:pipeline|tests)(?:\.\w+)+")
INERT = re.compile(r"(CHANGELOG|ARCHITECTURE|CONTRIBUTING|RELEASING)\.md|CITATION\.cff|LICENSE|benchmarks/.*|\.ci/.*")
READERS = {"docs": "tests.docs", "README.md": "tests.docs", "configs": "pipeline.config", "sbatch": "pipeline.cluster"}


def select(config: pytest.Config, items: list[pytest.Item], base: str) -> None:
    """Deselect what the change cannot reach."""
    reached = reached_by(changed_files(base))
    lost = [item for item in items if reached is not None and module_of(item.path) not in reached]
    config.hook.pytest_deselected(items=lost)
    items[:] = [item for item in items if item not in set(lost)]


def changed_files(base: str) -> list[str]:
    """Return the files that differ from where this branch left another one, new ones included."""
    fork = _git("merge-base", base, "HEAD")[0]
    return [*_git("diff", "--name-only", fork), *_git("ls-files", "--others", "--exclude-standard")]


def reached_by(files: list[str]) -> set[str] | None:
    """Return the modules that files can reach, or None for all."""
    graph = imports()
    reached = set[str]()
    for file in files:
        if INERT.fullmatch(file):
            continue
        starts = modules_at(file, graph.modules)
        if not starts:
            return None
        for start in starts:
            reached |= {start} | graph.find_downstream_modules(start)
    return reached


def modules_at(file: str, modules: set[str]) -> set[str]:
    """Return the modules that a file is, lies next to, or is read by."""
    path = Path(file)
    place = READERS.get(path.parts[0])
    name = place or module_of(ROOT / path).removesuffix(".conftest")
    while not place and name not in modules and "." in name:
        name = name.rpartition(".")[0]  # a file that is no module, or one that is gone: of its folder
    if name in ("pipeline", "tests") or name not in modules:
        return set()
    is_one = path.suffix == ".py" and path.name != "conftest.py" and place is None
    return {name} | {one for one in modules if not is_one and one.startswith(f"{name}.")}


@cache
def imports() -> grimp.ImportGraph:
    """Return who imports whom, with what is only named in a text."""
    graph = grimp.build_graph("pipeline", "tests", cache_dir=None)
    for module in sorted(graph.modules):
        path = ROOT.joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        for named in set(NAMED.findall(path.read_text())):
            if named in graph.modules and named != module and not named.startswith(f"{module}."):
                graph.add_import(importer=module, imported=named)
    for kit in graph.find_children("tests.testkit") | {"tests.docs.reader"}:  # they type `pipeline`
        graph.add_import(importer=kit, imported="pipeline.__main__")
    for recipe in (ROOT / "configs" / "recipes").iterdir():
        for named in set(NAMED.findall(recipe.read_text())) & graph.modules:
            graph.add_import(importer="pipeline.setup.demo_project", imported=named)
    return graph


def module_of(path: Path) -> str:
    """Return the dotted name of a file of the project."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
