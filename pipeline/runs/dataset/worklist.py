"""The data set of a run, frozen as lines of JSON, and what of it a stage has still to do, cut into tasks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import IO, TYPE_CHECKING, TypeAlias

import numpy as np
import xxhash

from pipeline.journal.run_folder import writing_run
from pipeline.records import Item, Rejection
from pipeline.structures.sources import items as source_items

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project

LOOKED_UP_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Shard:
    """One task's range: bytes of a todo file, or rows of its order."""

    start: int
    end: int
    items: int
    largest: int = 0  # the cost of the largest item, in the stage's unit; 0: unknown


@dataclass(frozen=True, slots=True)
class Found:
    """What a stage has before it: how much the store already holds, and the rest in tasks."""

    counts: Mapping[str, int]  # items, refused, unusable, cached, missing, and what else a stage counts
    shards: tuple[Shard, ...]
    bytes: int = 0  # what the results will take in the cache
    cost: float = 0.0  # in the unit in which tasks tell how far they are

    def write_shards(self, folder: RunFolder, stage: str) -> None:
        """Write down what each task takes."""
        _write_shards(folder, stage, self.shards)


def _write_shards(folder: RunFolder, stage: str, shards: Sequence[Shard]) -> None:
    """Replace the list of what each task takes; who reads it meanwhile sees the old or the new one."""
    partial = folder.shards(stage).with_suffix(".partial")
    with writing_run(folder.shards(stage)):
        partial.write_text(json.dumps([asdict(shard) for shard in shards]))
        partial.replace(folder.shards(stage))


def read_shards(folder: RunFolder, stage: str) -> list[Shard]:
    """Return what every task takes."""
    return [Shard(**one) for one in json.loads(folder.shards(stage).read_text())]


def read_shard(folder: RunFolder, stage: str, task: int) -> Shard:
    """Return what one task takes."""
    return Shard(**json.loads(folder.shards(stage).read_text())[task])


Halve: TypeAlias = "Callable[[RunFolder, Shard], tuple[Shard, Shard]]"


def split_shards(folder: RunFolder, stage: str, tasks: Sequence[int], halve: Halve) -> dict[int, list[int]]:
    """Add two tasks for each of some, that share what it takes, at the end of the list; return their numbers."""
    shards = read_shards(folder, stage)
    known = {shard: number for number, shard in enumerate(shards)}
    into = {}
    for task in tasks:
        halves = halve(folder, shards[task])
        for half in halves:  # one that is known already was split by somebody who died before the ledger knew
            if known.get(half, -1) <= task:
                known[half] = len(shards)
                shards.append(half)
        into[task] = [known[half] for half in halves]
    _write_shards(folder, stage, shards)
    return into


def halve_lines(path: Path, shard: Shard) -> tuple[Shard, Shard]:
    """Cut a range of lines in the middle."""
    first = shard.items // 2
    with path.open("rb") as file:
        file.seek(shard.start)
        for _ in range(first):
            file.readline()
        middle = file.tell()
    return (
        Shard(shard.start, middle, first, shard.largest),
        Shard(middle, shard.end, shard.items - first, shard.largest),
    )


def halve_rows(_folder: RunFolder, shard: Shard) -> tuple[Shard, Shard]:
    """Cut a range of rows in the middle."""
    first = shard.items // 2
    middle = shard.start + first
    return (
        Shard(shard.start, middle, first, shard.largest),
        Shard(middle, shard.end, shard.items - first, shard.largest),
    )


def read_task(folder: RunFolder, stage: str, task: int) -> Iterator[Item]:
    """Yield the items of one task, of a stage whose list holds items."""
    shard = read_shard(folder, stage, task)
    with folder.todo(stage).open("rb") as file:
        file.seek(shard.start)
        while file.tell() < shard.end:
            yield Item.from_json(json.loads(file.readline()))


def list_items(project: Project) -> Iterator[Item | Rejection]:
    """Yield the structures of the data set as its source gives them; what a reader gives are none."""
    return iter(()) if project.source.source == "reader" else source_items(project.source)


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
        partial = folder.items.with_suffix(".partial")  # who dies on the way leaves no list that looks whole
        with Lines(partial) as lines:
            for entry in list_items(project):
                lines.write_record(entry)
        with writing_run(folder.items):
            partial.replace(folder.items)
    return read_items(folder.items)


def line_of(record: Item | Rejection) -> str:
    """Return the line that holds a record."""
    return json.dumps(record.to_json())


def cut(offsets: Sequence[int], costs_N: NDArray[np.int64], items_per_task: int | str, tasks: int) -> tuple[Shard, ...]:
    """Cut a list, in order, into tasks of so many items, or so many of about equal cost where that is `auto`.

    `offsets` says where each line begins, and where the last one ends.
    """
    lines = len(costs_N)
    if lines == 0:
        return ()
    if items_per_task != "auto":
        bounds = [*range(0, lines, int(items_per_task)), lines]
    else:
        done_N = np.cumsum(costs_N)
        shares = done_N[-1] * np.arange(1, tasks) / tasks
        bounds = np.unique([0, *(np.searchsorted(done_N, shares) + 1).tolist(), lines]).tolist()
    return tuple(
        Shard(offsets[first], offsets[last], last - first, int(costs_N[first:last].max()))
        for first, last in pairwise(bounds)
    )


def asked(folder: RunFolder, stage: str) -> Callable[[str], bool]:
    """Return what says of a line whether its lack fails a stage: that of any, unless the run is confined to a list."""
    if not folder.only.exists():
        return lambda _line: True
    with folder.todo(stage).open("rb") as file:
        known = {xxhash.xxh3_64_intdigest(line.rstrip(b"\n")) for line in file}
    return lambda line: xxhash.xxh3_64_intdigest(line.encode()) in known


class Lines:
    """Writes lines, or only counts their bytes when there is no file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self.position = 0

    def write_record(self, record: Item | Rejection) -> None:
        """Write one record as JSON."""
        self.write(line_of(record))

    def write(self, text: str) -> None:
        """Write one line."""
        line = text.encode() + b"\n"
        self.position += len(line)
        if self._file and self._path:
            with writing_run(self._path):
                self._file.write(line)

    def __enter__(self) -> Lines:
        if self._path:
            with writing_run(self._path):
                self._file = self._path.open("wb")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file and self._path:
            with writing_run(self._path):
                self._file.close()
