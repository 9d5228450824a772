"""The data set of a run, frozen as lines of JSON, and what of it a stage has still to do, cut into tasks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import islice
from typing import IO, TYPE_CHECKING, TypeVar

from pipeline.records import Item, Rejection
from pipeline.runs.folder import writing
from pipeline.structures.sources import items as source_items

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from pipeline.runs.folder import RunFolder
    from pipeline.runs.project import Project

T = TypeVar("T")
LOOKED_UP_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Shard:
    """One task's range: bytes of a todo file, or rows of its order."""

    start: int
    end: int
    items: int


@dataclass(frozen=True, slots=True)
class Found:
    """What a stage has before it: how much the store already holds, and the rest in tasks."""

    counts: Mapping[str, int]  # items, refused, unusable, cached, missing, and what else a stage counts
    shards: tuple[Shard, ...]
    bytes: int = 0  # what the results will take in the cache
    cost: float = 0.0  # in the unit in which tasks tell how far they are

    def write_shards(self, folder: RunFolder, stage: str) -> None:
        """Write down what each task takes."""
        with writing(folder.shards(stage)):
            folder.shards(stage).write_text(json.dumps([asdict(shard) for shard in self.shards]))


def read_shard(folder: RunFolder, stage: str, task: int) -> Shard:
    """Return what one task takes."""
    return Shard(**json.loads(folder.shards(stage).read_text())[task])


def read_task(folder: RunFolder, stage: str, task: int) -> Iterator[Item]:
    """Yield the items of one task, of a stage whose list holds items."""
    shard = read_shard(folder, stage, task)
    with folder.todo(stage).open("rb") as file:
        file.seek(shard.start)
        while file.tell() < shard.end:
            yield Item.from_json(json.loads(file.readline()))


def list_items(project: Project) -> Iterator[Item | Rejection]:
    """Yield the data set as its source gives it."""
    return source_items(project.source)


def read_items(path: Path) -> Iterator[Item | Rejection]:
    """Yield the whole data set of a run."""
    with path.open("rb") as file:
        for line in file:
            data = json.loads(line)
            yield Rejection.from_json(data) if "reason" in data else Item.from_json(data)


def frozen_items(project: Project, folder: RunFolder | None) -> Iterator[Item | Rejection]:
    """Yield the data set of a run, freezing it first if no stage has; without a run, as it stands."""
    if folder is None:
        return list_items(project)
    if not folder.items.exists():
        with Lines(folder.items) as lines:
            for entry in list_items(project):
                lines.write_record(entry)
    return read_items(folder.items)


def chunks(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of at most `size` values."""
    rest = iter(values)
    while chunk := list(islice(rest, size)):
        yield chunk


class Lines:
    """Writes lines, or only counts their bytes when there is no file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self.position = 0

    def write_record(self, record: Item | Rejection) -> None:
        """Write one record as JSON."""
        self.write(json.dumps(record.to_json()))

    def write(self, text: str) -> None:
        """Write one line."""
        line = text.encode() + b"\n"
        self.position += len(line)
        if self._file and self._path:
            with writing(self._path):
                self._file.write(line)

    def __enter__(self) -> Lines:
        if self._path:
            with writing(self._path):
                self._file = self._path.open("wb")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file and self._path:
            with writing(self._path):
                self._file.close()
