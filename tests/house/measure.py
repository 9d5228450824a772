"""Prints what is aimed at for the house beside what it measures today: `python -m tests.house.measure`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import grimp

from tests.docs.test_map import MOST_WORDS, glossary_words, read_first
from tests.house.names import MEANT, MOST_PARAMETERS, PACKAGE, names_with_two_meanings, overlong_signatures
from tests.house.test_house import FOLDERS, MOST_FILES

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_LINES, MOST_FILES_IN_ALL = 74_000, 340
SUBMIT, MOST_TO_OPEN = "From the command line to a running rank", 12


class Aim(NamedTuple):
    """One thing that is measured: at most so much is wanted."""

    what: str
    most: int
    today: int


def measure() -> Iterator[Aim]:
    """Yield what is measured of the package."""
    files = list(PACKAGE.rglob("*.py"))
    yield Aim("lines of Python in the package", MOST_LINES, sum(len(path.read_text().splitlines()) for path in files))
    yield Aim("files in the package", MOST_FILES_IN_ALL, len(files))
    yield Aim("files in the fullest folder", MOST_FILES, max(len(list(folder.glob("*.py"))) for folder in FOLDERS))
    yield Aim("imports that close a circle", 0, circles())
    yield Aim("names with two meanings", 0, sum(len(names_with_two_meanings(kind)) for kind in MEANT))
    yield Aim(f"functions above {MOST_PARAMETERS} parameters, outside `cli`", 0, len(overlong_signatures()))
    yield Aim("words in the glossary", MOST_WORDS, len(glossary_words()))
    yield Aim("files to open to follow `submit --stage train`", MOST_TO_OPEN, len(read_first(SUBMIT)))


def circles() -> int:
    """Count the imports that would have to go for no files or rooms to import each other in a circle."""
    graph = grimp.build_graph(PACKAGE.name, cache_dir=None)
    rooms = [module for module in graph.modules if graph.find_children(module)]
    return sum(len(graph.nominate_cycle_breakers(room)) for room in rooms)


def table() -> str:
    """Return aims and values in Markdown."""
    rows = [f"| {aim.what} | {aim.most:,} | {aim.today:,} |" for aim in measure()]
    return "\n".join(["| what | aim, at most | today |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())  # noqa: T201
