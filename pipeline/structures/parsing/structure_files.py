"""The bytes of structure files: each read once while the items that share it follow each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.keys import content_digest
from pipeline.structures.inventory import File
from pipeline.structures.parsing.amber import beside
from pipeline.structures.parsing.read_structure import read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipeline.records import Item

KEPT_FILES, KEPT_BYTES = 4, 16 << 20


class Files:
    """Reads the files of items, and keeps the last few."""

    def __init__(self, read: Callable[[str], File]) -> None:
        self._read = read
        self._kept: dict[str, File] = {}

    def of(self, item: Item) -> dict[str, File]:
        """Return the files of an item by path; raise Unusable where one cannot be read."""
        return {path: self._file(path) for path in paths(item)}

    def _file(self, path: str) -> File:
        if path not in self._kept:
            self._kept[path] = self._read(path)
            while len(self._kept) > KEPT_FILES or (len(self._kept) > 1 and size(self._kept) > KEPT_BYTES):
                del self._kept[next(iter(self._kept))]
        return self._kept[path]


def plain_files(max_bytes: int) -> Files:
    """Return what reads files and writes nothing down about them."""
    return Files(lambda path: read(path, max_bytes))


def read(path: str, max_bytes: int) -> File:
    """Return the bytes of a file, and their digest."""
    data = read_file(Path(path), max_bytes)
    return File(data, content_digest(data).hex())


def paths(item: Item) -> list[str]:
    """Return the files of an item, each once; that of its coordinates follows a topology."""
    found: dict[str, None] = {}
    for part in (*item.parts, *item.bound):
        found[part.path] = None
        found.update(dict.fromkeys(beside(part.path)))
    return list(found)


def size(files: Mapping[str, File]) -> int:
    """Return the bytes of some files."""
    return sum(len(file.data) for file in files.values())
