"""The data set of a run, frozen as lines of JSON, and the part of it that is still to do, cut into tasks."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from pipeline.records import Item, Reason, Rejection
from pipeline.runs.folder import writing
from pipeline.stages.scan import look_up
from pipeline.structures.sources import items as source_items

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pipeline.runs.folder import RunFolder
    from pipeline.runs.project import Project

T = TypeVar("T")
LOOKED_UP_AT_ONCE = 1024
AT_A_GLANCE = frozenset({Reason.MISSING_FILE, Reason.UNREADABLE_FILE, Reason.FILE_TOO_LARGE, Reason.NEEDS_EXTRA})


@dataclass(frozen=True, slots=True)
class Todo:
    """How much of a data set the store already knows."""

    items: int
    refused: int  # by the source: bad rows, bad and duplicate ids
    unusable: int  # missing or unreadable as they stand
    cached: int
    missing: int
    offsets: array[int]  # where each missing item begins in the todo file, and the end: 8 bytes an item


@dataclass(frozen=True, slots=True)
class Shard:
    """One task's range of the todo file."""

    start: int
    end: int
    items: int


def list_items(project: Project) -> Iterator[Item | Rejection]:
    """Yield the data set as its source gives it."""
    return source_items(project.source)


def survey(project: Project, found: Iterable[Item | Rejection], folder: RunFolder | None) -> Todo:
    """Compare a data set with the store; write both lists when there is a run folder to hold them."""
    recipe, shelves = project.recipe, project.shelves
    counts = {"items": 0, "refused": 0, "unusable": 0, "cached": 0, "missing": 0}
    offsets = array("Q")
    with _Lines(folder.items if folder else None) as everything, _Lines(folder.todo if folder else None) as todo:
        for chunk in chunks(found, LOOKED_UP_AT_ONCE):
            for entry in chunk:
                everything.write(entry)
            items = [entry for entry in chunk if isinstance(entry, Item)]
            counts["items"] += len(chunk)
            counts["refused"] += len(chunk) - len(items)
            for item, inventory in zip(items, look_up(items, recipe, shelves), strict=True):
                if inventory is not None:
                    counts["unusable" if inventory.reason in AT_A_GLANCE else "cached"] += 1
                    continue
                offsets.append(todo.position)
                counts["missing"] += 1
                todo.write(item)
        offsets.append(todo.position)
    return Todo(offsets=offsets, **counts)


def cut(todo: Todo, items_per_task: int) -> list[Shard]:
    """Cut what is to do into tasks of so many items."""
    bounds = [*range(0, todo.missing, max(1, items_per_task)), todo.missing]
    return [Shard(todo.offsets[first], todo.offsets[last], last - first) for first, last in pairwise(bounds)]


def read_shard(path: Path, shard: Shard) -> Iterator[Item]:
    """Yield the items of one task."""
    with path.open("rb") as file:
        file.seek(shard.start)
        while file.tell() < shard.end:
            yield Item.from_json(json.loads(file.readline()))


def read_items(path: Path) -> Iterator[Item | Rejection]:
    """Yield the whole data set of a run."""
    with path.open("rb") as file:
        for line in file:
            data = json.loads(line)
            yield Rejection.from_json(data) if "reason" in data else Item.from_json(data)


def chunks(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of at most `size` values."""
    rest = iter(values)
    while chunk := list(islice(rest, size)):
        yield chunk


class _Lines:
    """Writes records as lines, or only counts their bytes when there is no file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        with writing(path or Path()):
            self._file: IO[bytes] | None = path.open("wb") if path else None
        self.position = 0

    def write(self, record: Item | Rejection) -> None:
        """Write one record."""
        line = json.dumps(record.to_json()).encode() + b"\n"
        self.position += len(line)
        if self._file and self._path:
            with writing(self._path):
                self._file.write(line)

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file and self._path:
            with writing(self._path):
                self._file.close()
