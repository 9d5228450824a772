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
