"""Writes the map of ARCHITECTURE.md from the folders as they are: `python -m tests.docs.tree_map`."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, PAGE = ROOT / "pipeline", ROOT / "ARCHITECTURE.md"
MAP = re.compile(r"(?<=## The map\n\n).*?(?=\n## )", re.DOTALL)
WIDTH = 118


def map_text() -> str:
    """Return the map: each folder, what it answers, and its files."""
    folders = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))
    return "```\n" + "\n".join(_folder(folder) for folder in folders) + "\n```\n"


def _folder(folder: Path) -> str:
    depth = len(folder.relative_to(PACKAGE).parts)
    indent = "  " * depth
    answer = (ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "").partition("\n")[0]
    head = textwrap.wrap(
        f"{folder.name + '/':<14} {answer}", WIDTH, initial_indent=indent, subsequent_indent=indent + " " * 15
    )
    files = ", ".join(path.stem for path in sorted(folder.glob("*.py")) if path.stem != "__init__")
    names = textwrap.wrap(files, WIDTH, initial_indent=indent + "    ", subsequent_indent=indent + "    ")
    return "\n".join([*head, *names])


if __name__ == "__main__":
    PAGE.write_text(MAP.sub(lambda _old: map_text(), PAGE.read_text(), count=1))
