"""Maps keys of records to items of the current data set, independently of the records' own content."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from pipeline.dataset import worklist
from pipeline.records import Item
from pipeline.store.store import in_chunks
from pipeline.structures.scan_items import Seen, file_mark, look_up_items

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.project.project import Project

# Exceptions that a malformed record can cause.
ODD = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
_SAMPLE_BITS = 64


class KeyedLines:
    """Maps any number of keys to a line of text each, in a temporary file."""

    def __init__(self) -> None:
        self._table = sqlite3.connect(
            "", isolation_level=None, check_same_thread=False
        )  # an unnamed file, deleted with this object
        self._table.execute("CREATE TABLE lines (key BLOB PRIMARY KEY, text TEXT) WITHOUT ROWID")
        self._table.execute("BEGIN")  # never committed, so nothing is synced

    def add(self, key: bytes, text: str) -> None:
        """Keep the text of a key; a later text replaces an earlier one."""
        self._table.execute("INSERT OR REPLACE INTO lines VALUES (?, ?)", (key, text))

    def get(self, key: bytes) -> str | None:
        found = self._table.execute("SELECT text FROM lines WHERE key = ?", (key,)).fetchone()
        return found[0] if found else None


class ItemIndex:
    """The items of a data set, by the keys of their records."""

    def __init__(self) -> None:
        self.inventories = KeyedLines()  # key of a graph → key of its inventory
        self.items = KeyedLines()  # key of an inventory → its item
        self.paths = KeyedLines()  # key of a file's present state → its path; of the sample only

    def read(self, project: Project, sample: float) -> None:
        """Look up every item that a source names."""
        for chunk in in_chunks(worklist.list_items(project), worklist.LOOKED_UP_AT_ONCE):
            items = [entry for entry in chunk if isinstance(entry, Item)]
            for item, seen in zip(items, _look_up_each(items, project), strict=True):
                if seen.key is not None:
                    self.inventories.add(project.graphs.recipe.key(seen.key), seen.key.hex())
                    self.items.add(seen.key, worklist.item_line(item))
            marks = (
                ((file_mark(path, project.recipe), path) for item in items for path in project.recipe.paths(item))
                if sample
                else ()
            )
            for mark, path in marks:
                if isinstance(mark, bytes) and in_sample(mark, sample):
                    self.paths.add(mark, path)


def in_sample(key: bytes, sample: float) -> bool:
    """Tell whether a key is in a sample; a larger sample holds every smaller one."""
    return int.from_bytes(key[-_SAMPLE_BITS // 8 :], "big") < sample * float(1 << _SAMPLE_BITS)


def _look_up_each(items: Sequence[Item], project: Project) -> list[Seen]:
    """Look each item up; one whose own records are malformed counts as unknown."""
    try:
        return look_up_items(items, project.recipe, project.shelves)
    except ODD:
        if len(items) == 1:
            return [Seen()]
    middle = len(items) // 2
    return _look_up_each(items[:middle], project) + _look_up_each(items[middle:], project)
