"""Reads the package as syntax trees: what its files, classes and functions are called, and what they take."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).resolve().parents[2] / "pipeline"
MOST_PARAMETERS = 8
# One meaning each: what a process starts with.
MEANT = {"function": {"main"}, "class": set[str](), "file": set[str]()}
FunctionNode: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of every file, by its path in the package."""
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def places_of_names() -> dict[str, dict[str, list[str]]]:
    """Return where each class, public function and file stands: kind of name → name → files."""
    places: dict[str, dict[str, list[str]]] = {
        "class": defaultdict(list),
        "function": defaultdict(list),
        "file": defaultdict(list),
    }
    for file, tree in trees().items():
        if not file.endswith("__init__.py"):
            places["file"][Path(file).stem].append(file)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places["class"][node.name].append(file)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                places["function"][node.name].append(file)
    return places


def names_with_two_meanings(kind: str) -> dict[str, list[str]]:
    """Return the names that stand in several files and are not excused, with those files."""
    places = places_of_names()[kind]
    return {name: files for name, files in places.items() if len(files) > 1 and name not in MEANT[kind]}


def functions() -> Iterator[tuple[str, FunctionNode]]:
    """Yield every function and method with where it stands."""
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{file}:{node.lineno} {node.name}", node


def parameters(function: FunctionNode) -> int:
    """Return how many parameters a function has, but for `self` and `cls`."""
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")]) + bool(arguments.vararg) + bool(arguments.kwarg)


def overlong_signatures() -> list[str]:
    """Return where functions stand that take too much; a verb takes what people may say."""
    many = [place for place, function in functions() if parameters(function) > MOST_PARAMETERS]
    return [place for place in many if not place.startswith("cli/")]
