"""The data set of a run, frozen as lines of JSON; what the store knows of it; a stage's missing work, in tasks."""

from __future__ import annotations

import json
import math
import secrets
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import IO, TYPE_CHECKING

import numpy as np
import xxhash

from pipeline.codec import read_plain, write_plain
from pipeline.journal.attempts import left_out_items, refused_parts
from pipeline.journal.run_folder import writing_run
from pipeline.records import Item, Rejection
from pipeline.stage_names import StageName
from pipeline.store.store import in_chunks
from pipeline.store.users import recall, remember_keys
from pipeline.structures.scan_items import look_again, look_up_items
from pipeline.structures.sources.data_source import items as source_items

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from numpy.typing import NDArray

    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.records import Inventory, Reason, TaskContext
    from pipeline.store.cache_folder import CacheFolder
    from pipeline.store.users import WantedKeys
    from pipeline.structures.scan_items import FileStates, Seen

LOOKED_UP_AT_ONCE = 1024
MOST_PER_TASK = 50_000  # items: a task's process holds some hundred bytes of each
_ENCODER = json.JSONEncoder()  # made once: a data set has many lines


@dataclass(frozen=True, slots=True)
class Shard:
    """One task's range: bytes of a todo file, or rows of its order."""

    start: int
    end: int
    items: int
    largest: int = 0  # the cost of the largest item, in the stage's unit; 0: unknown
    of: str = ""  # the encoder, where there are several, or the point of a sweep


@dataclass(frozen=True, slots=True)
class StageSurvey:
    """A stage's survey: how much the store already holds, and the rest cut into tasks."""

    counts: Mapping[str, int]  # items, refused, unusable, cached, missing, and what else a stage counts
    shards: tuple[Shard, ...]
    bytes: int = 0  # of the results in the cache
    cost: float = 0.0  # in the unit in which tasks report progress
    parts: Mapping[str, StageSurvey] = field(default_factory=dict)  # the same of each encoder, where there are several
    search: Mapping[str, Any] = field(default_factory=dict)  # of a sweep that is a search

    @property
    def names(self) -> tuple[str, ...]:
        """What tasks are of, where not all are of one thing."""
        return tuple(dict.fromkeys(shard.of for shard in self.shards if shard.of))

    @classmethod
    def together(cls, parts: Mapping[str, StageSurvey]) -> StageSurvey:
        """Return what the surveys of several encoders come to."""
        surveys = parts.values()
        counts = Counter[str](encoders=len(parts))
        for survey in surveys:
            counts.update(survey.counts)
        counts["encoders"] = len(parts)
        shards = tuple(chain.from_iterable(survey.shards for survey in surveys))
        cost = sum(survey.cost for survey in surveys)
        return cls(dict(counts), shards, sum(survey.bytes for survey in surveys), cost, parts)

    def write_shards(self, folder: RunFolder, stage: str) -> None:
        """Write each task's shard into the run's folder."""
        with writing_run(folder.shards(stage)):
            write_plain(folder.shards(stage), self.shards)


def read_shards(folder: RunFolder, stage: str) -> list[Shard]:
    """Return the shard of every task."""
    return read_plain(folder.shards(stage), list[Shard])


def read_shard(folder: RunFolder, stage: str, task: int) -> Shard:
    """Return the shard of a task."""
    return read_shards(folder, stage)[task]


def split_shards(
    folder: RunFolder, stage: str, tasks: Sequence[int], halve: Callable[[RunFolder, Shard], tuple[Shard, Shard]]
) -> dict[int, list[int]]:
    """Append two tasks for each given one, each with half of its work; return their numbers."""
    shards = read_shards(folder, stage)
    known = {shard: number for number, shard in enumerate(shards)}
    into = {}
    for task in tasks:
        halves = halve(folder, shards[task])
        for half in halves:  # known halves: a process split it, and died before the ledger recorded that
            if known.get(half, -1) <= task:
                known[half] = len(shards)
                shards.append(half)
        into[task] = [known[half] for half in halves]
    StageSurvey({}, tuple(shards)).write_shards(folder, stage)
    return into


def halve_lines(path: Path, shard: Shard) -> tuple[Shard, Shard]:
    """Cut a range of lines in the middle."""
    with path.open("rb") as file:
        file.seek(shard.start)
        for _ in range(shard.items // 2):
            file.readline()
        return _halves(shard, file.tell())


def halve_rows(shard: Shard) -> tuple[Shard, Shard]:
    """Cut a range of rows in the middle."""
    return _halves(shard, shard.start + shard.items // 2)


def _halves(shard: Shard, middle: int) -> tuple[Shard, Shard]:
    first = shard.items // 2
    return replace(shard, end=middle, items=first), replace(shard, start=middle, items=shard.items - first)


def task_items(folder: RunFolder, stage: str, task: int, context: TaskContext) -> Iterator[Item]:
    """Yield the items of a task without those that killed it; each is reported before it is worked on."""
    shard, left_out = read_shard(folder, stage, task), left_out_items(folder, stage)
    with folder.todo(stage).open("rb") as file:
        file.seek(shard.start)
        while file.tell() < shard.end:
            item = Item.from_json(json.loads(file.readline()))
            if item.id not in left_out:
                context.on((item.id,))
                yield item


def list_items(project: Project) -> Iterator[Item | Rejection]:
    """Yield the structures of the data set as its source lists them; a reader has none."""
    return iter(()) if project.source.source == "reader" else source_items(project.source)


def read_items(path: Path) -> Iterator[Item | Rejection]:
    """Yield the whole data set of a run."""
    return (entry for _, entry in lines_between(path, 0, path.stat().st_size))


def items_at(path: Path, ordinals: Iterable[int]) -> Iterator[tuple[int, Item | Rejection]]:
    """Yield the entries at some places, in ascending order, of a run's data set; other lines are not parsed."""
    wanted = iter(ordinals)
    if (next_one := next(wanted, None)) is None:
        return
    with path.open("rb") as file:
        for ordinal, line in enumerate(file):
            if ordinal == next_one:
                yield ordinal, _entry(json.loads(line))
                if (next_one := next(wanted, None)) is None:
                    return


def _entry(data: dict[str, Any]) -> Item | Rejection:
    """Return what a line of a data set says."""
    return Rejection.from_json(data) if "reason" in data else Item.from_json(data)


def lines_between(path: Path, start: int, end: int) -> Iterator[tuple[bytes, Item | Rejection]]:
    """Yield the lines between two bytes of a run's data set, each with its entry."""
    with path.open("rb") as file:
        file.seek(start)
        while file.tell() < end:
            line = file.readline()
            yield line, _entry(json.loads(line))


def frozen_items(project: Project, folder: RunFolder | None) -> Iterator[Item | Rejection]:
    """Yield a run's data set, which is frozen first if no stage has frozen it; without a run, the present one."""
    return (entry for _, entry in frozen_lines(project, folder))


def frozen_lines(project: Project, folder: RunFolder | None) -> Iterator[tuple[bytes, Item | Rejection]]:
    """Yield a run's data set with the line of each entry; without a run, the present one.

    It is frozen, if no stage has, once all are taken.
    """
    if folder is not None and folder.items.exists():
        yield from lines_between(folder.items, 0, folder.items.stat().st_size)
        return
    # Two supervisors may freeze it at once
    partial = folder.items.with_suffix(f".{secrets.token_hex(4)}.partial") if folder else None
    with Lines(partial) as lines:
        for entry in list_items(project):
            yield lines.write(item_line(entry)), entry
    if folder and partial:  # it appears only when it is complete
        with writing_run(folder.items):
            partial.replace(folder.items)


def item_line(record: Item | Rejection) -> str:
    """Return a record as a line of JSON."""
    return _ENCODER.encode(record.to_json())


def tasks_for(seconds: float, minutes_per_task: float, at_once: int, worthwhile_s: float) -> int:
    """Return how many tasks to cut work into: by minutes a task, or more if idle slots make that worthwhile."""
    worthwhile = min(at_once, math.ceil(seconds / worthwhile_s))
    return max(1, math.ceil(seconds / (60 * minutes_per_task)), worthwhile)


def cut_lines(
    offsets: Sequence[int], costs_N: NDArray[np.int64], items_per_task: int | str, tasks: int
) -> tuple[Shard, ...]:
    """Cut a list, in order, into tasks of a number of items, or, with `auto`, of about equal cost.

    `offsets` says where each line begins, and where the last one ends. A task by cost that would have too many items is
    cut evenly.
    """
    lines = len(costs_N)
    if lines == 0:
        return ()
    if items_per_task != "auto":
        bounds = [*range(0, lines, int(items_per_task)), lines]
    else:
        done_N = np.cumsum(costs_N)
        shares = done_N[-1] * np.arange(1, tasks) / tasks
        by_cost = np.unique([0, *(np.searchsorted(done_N, shares) + 1).tolist(), lines]).tolist()
        bounds = [*chain.from_iterable(_evenly(first, last) for first, last in pairwise(by_cost)), lines]
    return tuple(
        Shard(offsets[first], offsets[last], last - first, int(costs_N[first:last].max()))
        for first, last in pairwise(bounds)
    )


def _evenly(first: int, last: int) -> list[int]:
    """Return where the pieces of a range begin, none of which has more than MOST_PER_TASK items."""
    pieces = math.ceil((last - first) / MOST_PER_TASK)
    return [first + (last - first) * piece // pieces for piece in range(pieces)]


def required_items(folder: RunFolder, stage: str) -> Callable[[KnownItem], bool]:
    """Return a predicate: must this item be done? All must, unless the run is confined to a list."""
    if not folder.only.exists():
        return lambda _known: True
    with folder.todo(stage).open("rb") as file:
        required = {xxhash.xxh3_64_intdigest(line.rstrip(b"\n")) for line in file}
    return lambda known: xxhash.xxh3_64_intdigest(item_line(known.item).encode()) in required


class Lines:
    """Writes lines, or only counts their bytes when there is no file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self.position = 0

    def write(self, text: str) -> bytes:
        """Write one line, and return it."""
        line = text.encode() + b"\n"
        self.position += len(line)
        if self._file and self._path:
            with writing_run(self._path):
                self._file.write(line)
        return line

    def __enter__(self) -> Lines:
        if self._path:
            with writing_run(self._path):
                self._file = self._path.open("wb")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file and self._path:
            with writing_run(self._path):
                self._file.close()


@dataclass(frozen=True, slots=True)
class KnownItem:
    """A usable item and its inventory, or None if that is missing."""

    item: Item
    inventory: Inventory | None
    key: bytes | None  # of the inventory; None if a file changed too recently


class Look:
    """Looks items up in the store for a run, which knows the items that it left out.

    With `again`, it reads files that had changed too recently when the run began. Without a run it reads no file.
    """

    def __init__(self, project: Project, folder: RunFolder | None, *, again: bool = True) -> None:
        self._project, self._since_ns = project, folder.stages.stat().st_mtime_ns if folder and again else None
        self.left_out = left_out_items(folder, StageName.SCAN) | refused_parts(folder, StageName.SCAN)

    def known(
        self, entries: Sequence[Item | Rejection], states: FileStates | None = None
    ) -> tuple[list[KnownItem | Rejection], bytearray]:
        """Look up each entry; return what the store knows of each, and the keys of the inventories that it has."""
        items, project = [entry for entry in entries if isinstance(entry, Item)], self._project
        seen = look_up_items(items, project.recipe, project.shelves, states)
        if self._since_ns is not None:
            for at, item in enumerate(items):
                if seen[at].inventory is None:
                    seen[at] = look_again(item, project.recipe, project.shelves, self._since_ns)
        each = iter(seen)
        known = [entry if isinstance(entry, Rejection) else self._known(entry, next(each)) for entry in entries]
        return known, bytearray().join(one.key for one in seen if one.key and one.inventory)

    def _known(self, item: Item, seen: Seen) -> KnownItem | Rejection:
        if seen.inventory is not None and seen.inventory.reason is not None:
            return rejection(item, seen.inventory.reason, seen.inventory.detail)
        if seen.inventory is None and item.id in self.left_out:
            return rejection(item, *self.left_out[item.id])
        return KnownItem(item, seen.inventory, seen.key)


def known_items(
    project: Project, folder: RunFolder | None, entries: Iterable[Item | Rejection]
) -> Iterator[KnownItem | Rejection]:
    """Yield for each entry of a data set, in order, what the store knows of it."""
    look = Look(project, folder)
    return chain.from_iterable(look.known(chunk)[0] for chunk in in_chunks(entries, LOOKED_UP_AT_ONCE))


def rejection(item: Item, reason: Reason, detail: str) -> Rejection:
    """Return the rejection of an item."""
    return Rejection(item.id, reason, detail, item.origin, item.split)


REMEMBERED = (StageName.SCAN, StageName.EMBED, StageName.GRAPH)  # kinds whose needed records are remembered


def remember_needed(project: Project, kind: str, keys: Any) -> None:
    """Record in the cache which records of a kind the data set needs (best effort)."""
    remember_keys(project.cache.disk, project.cache.root, kind, deciding(project.config, kind), keys.pieces("u1"))


def recall_needed(cache: CacheFolder, config: Config, kind: str) -> WantedKeys | None:
    """Return the records of a kind that a data set needed when last recorded; None if never recorded."""
    return recall(cache.disk, cache.root, kind, deciding(config, kind))


def deciding(config: Config, kind: str) -> dict[str, Any]:
    """Return the part of a configuration that decides which records of a kind are needed."""
    deciding: dict[str, Any] = {
        "data": config.data.model_dump(mode="json", exclude={"max_rejected_fraction", "on_leak"}),
        "structures": config.structures.model_dump(mode="json"),
    }
    if kind == StageName.EMBED:
        deciding["embed"] = config.embed.model_dump(mode="json", exclude={"batch", "also"})
        if config.embed.also:
            others = config.embed.also.items()
            deciding["also"] = {name: embed.model_dump(mode="json", exclude={"batch"}) for name, embed in others}
        deciding["gpus"] = config.cluster.embed.gpus > 0
    if kind == StageName.GRAPH:
        deciding["graph"] = config.graph.model_dump(mode="json")
    return deciding
