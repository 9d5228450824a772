"""A data set from a reader: its usable items, changes of its files, and the tables that runs have read.

Each run's folder records the files, the reader and the key of the table. If any of them has changed, the data set is
read again. Reading takes the memory of the table and 12 bytes an id, whatever the items hold.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import CacheDamaged, ConfigError, DataError, PipelineError, RecordMissing
from pipeline.files import read_json, state_of
from pipeline.journal.run_folder import runs_in
from pipeline.keys import content_digest, is_settled
from pipeline.project.project import once
from pipeline.project.run_code import READER, load_reader, reading_digest, user_code_failed
from pipeline.protocol import ITEMS
from pipeline.records import Entry, Reason, Rejection
from pipeline.structures.sources.item_ids import SeenIds, id_problem
from pipeline.training.items.item_source import (
    NUMBERS,
    OF_GRAPHS,
    array_sizes,
    arrays_digest,
    as_arrays,
    parse_field,
)
from pipeline.training.items.item_table import KIND, ItemTable, TableBuilder
from pipeline.units import printable_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.protocol import Reader
    from pipeline.training.items.item_source import Array
TAKEN = {ITEMS, NUMBERS, *OF_GRAPHS}
_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*", re.ASCII)
_WIDEST = 8  # bytes of a number
Form = tuple[np.dtype[Any], tuple[int, ...]]
ITEMS_READ = "items_read"  # a figure that tells how many so far


@dataclass(slots=True)
class ArrayForms:
    """The types and shapes of a data set's arrays so far; later items must match, since batches join any of them."""

    known: dict[str, Form] = field(default_factory=dict)  # of one item, or of a row
    most: dict[str, int] = field(default_factory=dict)  # rows of any item along each axis

    def wrong(self, arrays: Mapping[str, Array]) -> str:
        """Return why an item's arrays cannot be joined with earlier ones; empty if they can."""
        return next(self._problems(arrays), "") if arrays else "it has no arrays"

    def add(self, arrays: Mapping[str, Array]) -> None:
        """Add an item's arrays, which later ones must match."""
        for name, values in arrays.items():
            self.known.setdefault(name, _form(name, values))
        for axis, rows in array_sizes(arrays).items():
            self.most[axis] = max(rows, self.most.get(axis, 0))

    def _problems(self, arrays: Mapping[str, Array]) -> Iterator[str]:
        """Yield the problems of the arrays: of each alone, together, and compared with earlier items."""
        for name, values in arrays.items():
            yield from _problems_alone(name, values)
        sizes = array_sizes(arrays)
        for name, values in arrays.items():
            axis, form = parse_field(name).axis, _form(name, values)
            if axis and sizes[axis] != len(values):
                yield f"{name} has {len(values)} rows; {axis} has {sizes[axis]}"
            if form != (before := self.known.get(name, form)):
                yield f"{name} is {_shown(form)}, but {_shown(before)} in earlier items"
            if self.most and name not in self.known and not _may_lack(name, values.dtype, self.most):
                yield f"earlier items have no {name} ({values.dtype.name} has no fill value)"
        for name, (dtype, _) in self.known.items():
            if name not in arrays and not _may_lack(name, dtype, sizes):
                yield f"it has no {name}, which earlier items have ({dtype.name} has no fill value)"


def _problems_alone(name: str, values: Array) -> Iterator[str]:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        yield f"{name!r} is not a valid array name: use letters, digits, _ and dots"
    if (first := name.partition(".")[0]) in TAKEN:
        yield f"{name}: the name {first} is taken"
    if values.dtype.kind not in "biuf" or values.dtype.itemsize > _WIDEST or not values.dtype.isnative:
        yield f"{name} has dtype {values.dtype}, which torch does not support"
    if (axis := parse_field(name).axis) and not values.ndim:
        yield f"{name} is a scalar, but its axis is {axis}"


def _form(name: str, values: Array) -> Form:
    return values.dtype, values.shape[1:] if parse_field(name).axis else values.shape


def _shown(form: Form) -> str:
    return f"{form[0].name} {list(form[1])}"


def _may_lack(name: str, dtype: np.dtype[Any], rows: Mapping[str, int]) -> bool:
    """Whether a missing array can be filled in: with no rows, NaN or False."""
    axis = parse_field(name).axis
    return dtype.kind == "f" or (bool(axis) and (dtype.kind == "b" or not rows.get(axis)))


@dataclass(slots=True)
class EntriesTaken:
    """The table of the usable items read so far, and their counts."""

    table: TableBuilder = field(default_factory=TableBuilder)
    forms: ArrayForms = field(default_factory=ArrayForms)
    seen: SeenIds = field(default_factory=SeenIds)
    entries: int = 0  # so far, unusable ones included
    splits: Counter[str] = field(default_factory=Counter)
    leaks: int = 0  # ids that are in two splits
    leak: str = ""  # the first of them

    def spreads(self) -> dict[str, dict[str, float]]:
        """Return median, 95th percentile and maximum of each size."""
        return {name: _spread(sizes) for name, sizes in self.table.sizes.items() if len(sizes)}

    def take(self, entry: Entry) -> Rejection | None:
        """Add an item to the table; return its rejection if it cannot be used."""
        problem = id_problem(entry.id, names_files=False) if isinstance(entry.id, str) else "is not a string"
        if not isinstance(entry.split, str):
            return _refused(entry._replace(split=""), Reason.BAD_ENTRY, f"its split is {entry.split!r}, not a string")
        if problem:
            return _refused(entry, Reason.BAD_ID, f"the id {problem}")
        arrays = as_arrays(entry.arrays)
        if wrong := _problem(entry) or self.forms.wrong(arrays):
            return _refused(entry, Reason.BAD_ENTRY, wrong)
        splits = self.table.splits
        first = self.seen.first_line(entry.id, splits.get(entry.split, len(splits)))
        if first is not None:
            return self._duplicate(entry, list(splits)[first])
        self._add(entry, arrays)
        return None

    def _add(self, entry: Entry, arrays: Mapping[str, Array]) -> None:
        sizes = array_sizes(arrays)
        self.forms.add(arrays)
        self.table.also(sizes)
        sizes = {**dict.fromkeys(self.table.sizes, 0), **sizes}
        self.table.add(entry.id, arrays_digest(arrays), entry.split, sizes, place=entry.place)
        self.splits[entry.split] += 1

    def _duplicate(self, entry: Entry, split: str) -> Rejection:
        """Reject an item whose id was used before; in another split, it counts as a leak."""
        if split and entry.split and split != entry.split:
            self.leaks += 1
            self.leak = (
                self.leak or f"the same id is in the splits {split} and {entry.split}: {printable_text(entry.id)}"
            )
        detail = f"an earlier item{f' of split {split!r}' if split else ''} already has this id"
        return _refused(entry, Reason.DUPLICATE_ID, detail)


def take_entries(
    entries: Iterable[Entry | Rejection], taken: EntriesTaken, limit: int | None = None
) -> Iterator[Rejection]:
    """Take the items of a reader, `limit` at most, and yield the rejections of those that cannot be used."""
    source = iter(entries)
    while len(taken.table) != limit and (entry := next(source, None)) is not None:
        if not isinstance(entry, Entry | Rejection):
            raise TypeError(f"entries() yields a {type(entry).__name__}, not records.Entry or records.Rejection")
        taken.entries += 1
        rejected = taken.take(entry) if isinstance(entry, Entry) else entry
        if rejected is not None:
            yield rejected


def _refused(entry: Entry, reason: Reason, detail: str) -> Rejection:
    return Rejection(printable_text(str(entry.id)), reason, detail, entry.origin, entry.split)


def _problem(entry: Entry) -> str:
    """Return why an item cannot be read again by its place; '' if it can."""
    if entry.place is None:
        return "it has no place to read it from again"
    try:
        json.dumps(entry.place)
    except (TypeError, ValueError) as error:
        return f"its place is not JSON data: {error}"
    return ""


def _spread(sizes: array[int]) -> dict[str, float]:
    size_N = np.frombuffer(sizes, sizes.typecode)
    median, p95 = np.percentile(size_N, [50, 95])
    return {"median": float(median), "p95": float(p95), "max": int(size_N.max())}


TRIED = 3  # items, before all are read
TRIED_MOST = 100  # where none of the first can be used
FORMAT = 1  # of the record in a run's folder


def is_reader(config: Config) -> bool:
    """Tell whether the items come from a reader, not from structures."""
    return config.data.source == "reader"


@once
def reader_of(project: Project) -> Reader:
    """Return the reader of a configuration."""
    data = project.config.data
    return load_reader(data.reader or "", data.path, data.options, beside=project.beside)


def refuse_unreadable(project: Project) -> EntriesTaken:
    """Refuse what cannot be read: no class, no file, or one whose items are not found again; return the first few."""
    reader = reader_of(project)
    look_at_files(reader)
    taken = read_first(reader, TRIED)
    return taken if len(taken.table) or taken.entries < TRIED else read_first(reader, TRIED_MOST)


def refuse_crop(config: Config) -> None:
    """Refuse `oversize: crop` for a reader's items."""
    if is_reader(config) and config.train.oversize == "crop":
        what = "only graphs can be cropped, not the items of a reader"
        raise ConfigError(what, where="train.oversize is crop", remedy="--set train.oversize=skip   (or error)")


def read_first(reader: Reader, most: int) -> EntriesTaken:
    """Return the first few items, each of which must be the same when it is read again by its place."""
    taken = EntriesTaken()
    with blaming_reader():
        for entry in islice(reader.entries(), most):
            before = len(taken.table)
            list(take_entries([entry], taken))
            if len(taken.table) > before:
                table = taken.table.table()
                if arrays_digest(as_arrays(reader.read(table.place(before)))) != table.key(before):
                    what = f"read() and entries() of the reader return different arrays for {table.ids[before]}"
                    remedy = "correct the reader; its methods: python -m pydoc pipeline.protocol"
                    raise ConfigError(what, where=READER.where, remedy=remedy)
    return taken


@contextmanager
def blaming_reader() -> Iterator[None]:
    """Report an exception of the reader as a fault of the reader's code."""
    try:
        yield
    except (PipelineError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise user_code_failed("reading the items", error, READER) from error


def reader_state(project: Project, files: str | None = None) -> dict[str, Any]:
    """Return everything that decides the items: the reader, its options, its code, and the state of its files."""
    data, reader = project.config.data, reader_of(project)
    return {
        "reader": data.reader,
        "path": str(data.path),
        "options": json.loads(json.dumps(data.options)),  # as a run's folder has them: lists, no tuples
        "limit": data.limit,
        "code": reading_digest(reader),
        "files": look_at_files(reader)[0] if files is None else files,
    }


def look_at_files(reader: Reader) -> tuple[str, bool]:
    """Return the digest of the reader's files by name, inode, size and times, and whether a change would show."""
    digests, is_still = list[bytes](), True
    with blaming_reader():
        for path in reader.files():
            try:
                state = Path(path).stat()
            except OSError as error:
                what = f"cannot be read: {error.strerror}"
                raise DataError(what, where=str(path), remedy="ls -l   (see data.path)") from error
            is_still = is_still and is_settled(state.st_mtime_ns, state.st_ctime_ns)
            digests.append(content_digest(json.dumps(state_of(path, state)).encode()))
    return content_digest(b"".join(sorted(digests))).hex(), is_still


def read_by_run(folder: RunFolder) -> dict[str, Any]:
    """Return what a run has recorded of reading a data set; nothing if it did not finish, or in another format."""
    record = read_json(folder.entered)
    return record if isinstance(record, dict) and record.get("format") == FORMAT else {}


def reader_tables(project: Project) -> Iterator[tuple[RunFolder, bytes, ItemTable]]:
    """Yield the tables that runs have read of the present data set, newest first; raise last if one is lost."""
    wanted, lost = reader_state(project), None
    for folder in reversed(runs_in(project.config.cluster.runs)):
        record = read_by_run(folder)
        if record.get("made") == wanted:
            key = bytes.fromhex(record["table"])
            try:
                yield folder, key, ItemTable.read(project.cache.kind(KIND), key)
            except (CacheDamaged, RecordMissing) as error:
                lost = lost or error
    if lost:
        raise lost


def unmade(config: Config) -> str:
    """Return the error for a training whose input is missing."""
    if is_reader(config):
        return "the current version of this data set was not scanned"
    return "this data set has no graphs with this configuration"
