"""Divides a data set into blocks, and keeps a stage's tally of each block for later runs.

A block is some hundred consecutive items. An item's id decides whether a block ends there, so that adding or removing
an item changes one block only. A block's digest covers the lines of its items and the state of their files. A tally in
which nothing is missing is stored under that digest, for later runs with the same settings, code and parsers. It is
used only after all records that it counts were read and verified, shard by shard, without parsing.
"""

from __future__ import annotations

import json
import os
import shutil
from array import array
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import xxhash

from pipeline.dataset import worklist
from pipeline.dataset.worklist import KnownItem
from pipeline.files import write_whole
from pipeline.journal.attempts import left_out_items, refused_parts
from pipeline.keys import KEY_BYTES, content_digest
from pipeline.project.project import once
from pipeline.project.run_code import package_digest
from pipeline.records import Item, Rejection
from pipeline.stage_names import StageName
from pipeline.store.format.record import decode_record, encode_record
from pipeline.store.store import WholeRecords, in_chunks
from pipeline.structures.parsing.structure_files import parsers
from pipeline.structures.scan_items import file_states

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.structures.scan_items import FileStates

FOLDER = ".found"  # of the runs
KEPT = 12  # folders there, of the stages of all data sets and configurations
ITEMS, MOST_ITEMS = 256, 1024  # of a block: about, and at most
BLOCKS_AT_ONCE = 256  # whose records are verified together
NO_RECORDS: Mapping[str, WholeRecords] = {}
LARGEST = ("longest", "largest")  # fields that keep the larger value; the others are added up


@dataclass
class BlockTally:
    """What a stage counted of a block, or of all of them."""

    counts: Counter[str] = field(default_factory=Counter)  # the counts of a survey
    keys: dict[str, bytearray] = field(default_factory=dict)  # of the counted records, by kind
    lines: dict[str, bytearray] = field(default_factory=dict)  # for the lists of the run, by their names there
    absent: list[Any] = field(default_factory=list)  # facts about the items that are not done
    is_final: bool = True  # otherwise each survey counts the block again


T = TypeVar("T", bound=BlockTally)
_ONCE = ("keys", "lines", "rows", "absent")  # are taken from each block, and not added up


def add_up(total: Any, part: Any) -> None:
    """Add the fields of one value to those of another of the same type."""
    if hasattr(total, "add_all"):
        total.add_all(part)
        return
    for name in (known.name for known in fields(total) if known.name not in _ONCE):
        have, more = getattr(total, name), getattr(part, name)
        if is_dataclass(have):
            add_up(have, more)
        elif isinstance(have, dict):
            _add_entries(have, more)
        elif isinstance(more, array | bytearray):
            have.extend(more)
        elif isinstance(have, str | bool):
            setattr(total, name, have or more)
        else:
            setattr(total, name, max(have, more) if name in LARGEST else have + more)


def _add_entries(have: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, int):
            have[name] = have.get(name, 0) + value
        elif is_dataclass(value):
            add_up(have[name], value)
        elif isinstance(value, array | bytearray):
            have.setdefault(name, value[:0]).extend(value)
        else:
            have.setdefault(name, value)


def _plain(value: Any, columns: list[Any]) -> Any:
    """Return a value as JSON data, in which its columns are replaced by their numbers."""
    if isinstance(value, array | bytearray):
        columns.append(np.frombuffer(value, np.uint8))
        return [len(columns) - 1, getattr(value, "typecode", "")]
    if is_dataclass(value):
        value = {known.name: getattr(value, known.name) for known in fields(value)}
    return {name: _plain(each, columns) for name, each in value.items()} if isinstance(value, dict) else value


def _rebuilt(plain: Any, columns: Mapping[str, Any], like: Any = None) -> Any:
    """Return the value that `_plain` turned into JSON data; `like` is a value of its type."""
    if is_dataclass(like):
        for name, value in plain.items():
            setattr(like, name, _rebuilt(value, columns, getattr(like, name)))
        return like
    if isinstance(plain, dict):
        of = like if isinstance(like, dict) else {}
        return type(of)({name: _rebuilt(value, columns, of.get(name)) for name, value in plain.items()})
    if isinstance(plain, list) and plain:
        number, code = plain
        content = columns[f"c{number}"].tobytes()
        return array(code, content) if code else bytearray(content)
    return plain


class KnownBlock(NamedTuple):
    """A block with what the store knows of its items."""

    entries: list[KnownItem | Rejection]
    refused: Counter[str]  # entries that the source refused, by the reason
    keys: dict[str, bytearray]  # of the files and inventories that were found
    digest: bytes  # empty while a file is too recent for its times to tell


class DataBlocks:
    """The blocks of a run's frozen data set, or, without a run, of the present one."""

    def __init__(self, project: Project, folder: RunFolder | None) -> None:
        self._project, self._folder = project, folder
        self.digests, self._starts = list[bytes](), array("Q")  # starts in bytes, without a run in entries
        self._entries: Iterator[tuple[bytes, Item | Rejection]] = iter(())  # without a run: the second pass
        self._at = 0
        at, block = 0, list[tuple[bytes, Item | Rejection]]()
        for line, entry in worklist.frozen_lines(project, folder):
            block.append((line, entry))
            at += len(line) if folder else 1
            if len(block) == MOST_ITEMS or xxhash.xxh32_intdigest(entry.id.encode()) % ITEMS == 0:
                self._end(block, at)
                block.clear()
        if block:
            self._end(block, at)

    def _end(self, block: list[tuple[bytes, Item | Rejection]], end: int) -> None:
        self._starts = self._starts or array("Q", [0])
        self._starts.append(end)
        items = [entry for _, entry in block if isinstance(entry, Item)]
        self.digests.append(_digest((line for line, _ in block), file_states(items, self._project.recipe)))

    def know(self, number: int, look: worklist.Look) -> KnownBlock:
        """Look up the items of a block; without a run, blocks come in order."""
        block = list(self._read(number))
        seen = file_states([entry for _, entry in block if isinstance(entry, Item)], self._project.recipe)
        entries, scans = look.known([entry for _, entry in block], seen)
        refused = Counter(entry.reason.value for _, entry in block if isinstance(entry, Rejection))
        marks = dict.fromkeys(mark for mark in seen.marks.values() if isinstance(mark, bytes))
        self.digests[number] = _digest((line for line, _ in block), seen)
        keys = {"files": bytearray().join(marks), "scan": scans}
        return KnownBlock(entries, refused, keys, self.digests[number])

    def _read(self, number: int) -> Iterator[tuple[bytes, Item | Rejection]]:
        start, end = self._starts[number : number + 2]
        if self._folder is not None:
            yield from worklist.lines_between(self._folder.items, start, end)
            return
        if start < self._at or not self._at:
            self._entries, self._at = worklist.frozen_lines(self._project, None), 0
        yield from islice(self._entries, start - self._at, end - self._at)
        self._at = end


def _digest(lines: Iterable[bytes], seen: FileStates) -> bytes:
    """Return the digest of a block; empty while a file is too recent for its times to tell."""
    digest = xxhash.xxh3_128()
    for line in lines:
        digest.update(line)
    for path in (path for paths in seen.paths for path in paths):
        mark = seen.marks[path]
        if mark is None:
            return b""
        digest.update(mark if isinstance(mark, bytes) else f"{path}\0{mark.reason}\0{mark.detail}\0".encode())
    return digest.digest()


class FoundTallies(Generic[T]):
    """The tallies of one stage, each in a file by the digest of its block."""

    def __init__(self, folder: Path, like: Callable[[], T]) -> None:
        self._folder, self._like, self._lost = folder, like, set[bytes]()

    def get(self, block: bytes) -> T | None:
        """Return the tally of a block; None where it is not known."""
        if not block or block in self._lost:
            return None
        try:
            content = (self._folder / block.hex()).read_bytes()
        except OSError:
            return None
        if xxhash.xxh3_128_digest(blob := content[16:]) != content[:16]:
            return None
        record = decode_record(blob)
        tally: T = _rebuilt(record.meta, record.arrays, self._like())
        return tally

    def put(self, block: bytes, tally: BlockTally) -> None:
        """Write down the tally of a block."""
        columns: list[Any] = []
        meta = _plain(tally, columns)
        blob = encode_record(block, {f"c{number}": column for number, column in enumerate(columns)}, meta).blob
        with suppress(OSError):  # then it is counted again
            self._folder.mkdir(0o700, parents=True, exist_ok=True)
            write_whole(self._folder / block.hex(), xxhash.xxh3_128_digest(blob) + blob)
            self._lost.discard(block)

    def verify(self, blocks: Iterable[bytes], records: Mapping[str, WholeRecords]) -> None:
        """Forget the tallies of blocks with missing or damaged records."""
        for chunk in in_chunks(blocks, BLOCKS_AT_ONCE):
            keys = [tally.keys if (tally := self.get(block)) else {} for block in chunk]
            for kind, whole in records.items():
                columns = [column.get(kind, b"") for column in keys]
                whole_K = whole.mask(np.frombuffer(b"".join(columns), f"V{KEY_BYTES}").tolist())
                owner_K = np.repeat(np.arange(len(chunk)), [len(column) // KEY_BYTES for column in columns])
                self._lost |= {chunk[number] for number in np.unique(owner_K[~whole_K])}

    def keep(self, blocks: Iterable[bytes]) -> None:
        """Remove the tallies of other blocks, and the oldest of other settings."""
        with suppress(OSError):
            os.utime(self._folder)
            for name in {path.name for path in self._folder.iterdir()} - {block.hex() for block in blocks}:
                (self._folder / name).unlink()
            by_age = sorted(self._folder.parent.iterdir(), key=lambda path: path.stat().st_mtime)
            for path in by_age[:-KEPT]:
                shutil.rmtree(path, ignore_errors=True)


def tallies(
    project: Project,
    folder: RunFolder | None,
    stage: str,
    recipe: Mapping[str, Any],
    like: Callable[[], T],
    count: Callable[[KnownBlock], T],
    records: Mapping[str, WholeRecords] = NO_RECORDS,
    *,
    again: bool = True,
) -> Iterator[T]:
    """Yield a stage's tally of each block in order; `count` is called only for blocks without a stored tally.

    `records` verifies, by kind, the counted records other than inventories. `again` reads files again that changed too
    recently. A run that left out items, or that is restricted to a list, stores no tallies: the next run tries those
    items again.
    """
    look = worklist.Look(project, folder, again=again)
    blocks, known_as = _blocks(project, folder), (FoundTallies, folder, stage)
    if known_as not in project.made_once:
        project.made_once[known_as] = _found(project, stage, recipe, like, blocks.digests, records)
    found: FoundTallies[T] = project.made_once[known_as]
    own = look.left_out or (stage != StageName.SCAN and (left_out_items(folder, stage) or refused_parts(folder, stage)))
    keeps = folder is not None and project.only.is_all and not own
    for number in range(len(blocks.digests)):
        tally = found.get(blocks.digests[number]) if project.only.is_all else None
        if tally is None:
            known = blocks.know(number, look)
            tally = count(known)
            if keeps and known.digest and tally.is_final and not tally.absent:
                found.put(known.digest, tally)
        yield tally
    if keeps:
        found.keep(blocks.digests)


@once
def _blocks(project: Project, folder: RunFolder | None) -> DataBlocks:
    """Return the blocks of a run's data set, which all of its stages share."""
    return DataBlocks(project, folder)


def _found(
    project: Project,
    stage: str,
    recipe: Mapping[str, Any],
    like: Callable[[], T],
    blocks: Sequence[bytes],
    records: Mapping[str, WholeRecords],
) -> FoundTallies[T]:
    """Return the verified tallies of earlier runs."""
    layers = [str(layer.root) for layer in (project.cache, *project.cache.under)]
    asked = [stage, dict(recipe), worklist.deciding(project.config, stage), layers, package_digest(), parsers()]
    name = content_digest(json.dumps(asked, sort_keys=True, default=str).encode()).hex()
    found = FoundTallies(project.config.cluster.runs / FOLDER / f"{stage}-{name}", like)
    scanned = {"files": WholeRecords(project.shelves.files), "scan": WholeRecords(project.shelves.inventories)}
    found.verify(blocks if project.only.is_all else (), {**scanned, **records})
    return found
