"""Sources of the items' graphs: the cache, the structure files (graphs are built on reading), or a user's reader.

All give an item as the arrays and the JSON of its record, so that batches are the same bit for bit.
"""

from __future__ import annotations

import logging
import re
from contextlib import nullcontext
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash

from pipeline.command_line import Command
from pipeline.errors import CacheDamaged, DataError, PipelineError, RecordMissing
from pipeline.graphs import item_graph as graphs
from pipeline.graphs.build_graph import build_graph
from pipeline.protocol import ITEMS
from pipeline.records import Reason, Rejection
from pipeline.store.store import ONLY_MISSING
from pipeline.structures import inventory
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.parsing.structure_files import read_structure_file as read_one
from pipeline.training.items.batch_layout import OF_GRAPHS, FieldForm, ItemArrays, parse_field

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from pipeline.graphs.item_graph import GraphRecipe
    from pipeline.protocol import Reader
    from pipeline.records import Item
    from pipeline.store.format.record import Record
    from pipeline.store.store import RecordPlace, Store
    from pipeline.structures.parsing.structure_files import File
    from pipeline.training.items.item_table import ItemTable

    Array = NDArray[Any]

log = logging.getLogger(__name__)

GONE = frozenset({Reason.MISSING_FILE, Reason.UNREADABLE_FILE})  # of files that existed when the data set was prepared
GRAPH_AGAIN = Command.submit("graph", then="   (processes only missing items)")
REBUILD_GRAPHS = Command.submit("graph", then=f"   ({ONLY_MISSING})")
NAMED = 3  # items in a message
REPAIR = Command.of("cache repair --yes", then="   then   ")
MEND = Command.submit("train", before=REPAIR, then="   (rebuilds lost records and continues)")
SCAN_AGAIN = Command.submit("scan", then="   (touch the file first if this finds nothing to do)")


class ItemSource(Protocol):
    """Reads the graphs of items; called from several threads at once."""

    def read(self, numbers: Sequence[int]) -> Iterator[ItemArrays | Rejection]:
        """Yield each item's graph, or why it has none, by its number in the table, in the order given."""


@dataclass(eq=False)
class DamagedItems:
    """Items whose records a training finds damaged: graphs are rebuilt, items without embeddings are skipped.

    Loaders call it from several threads. Between two steps, all ranks decide whether the training may continue.
    """

    rebuild: Callable[[str, bytes], bool]  # the graph of an item, under this key; returns whether it can be read now
    items: int  # of the training
    most: int  # of these that may be skipped
    where: str  # the cache
    refuse: Callable[[str, Reason, str], None] = lambda _id, _reason, _detail: None  # records a skipped item
    say: Callable[[str], None] = lambda _: None
    everywhere: set[str] = field(default_factory=set)  # items that any rank skips

    def __post_init__(self) -> None:
        self._lock = Lock()
        self._why: dict[str, str] = {}
        self._reported: set[str] = set()

    def is_rebuilt(self, error: PipelineError, key: bytes) -> bool:
        """Rebuild the graph of the error's item in the cache; return whether it can be read now."""
        with self._lock:
            if error.item in self._why or not self.rebuild(error.item, key):
                return False
            self.say(f"{error.what}: rebuilt")
            return True

    def leave_out(self, error: PipelineError) -> Rejection:
        """Return a rejection of the error's item."""
        with self._lock:
            if error.item not in self._why:
                self._why[error.item] = f"{error.where}: {error.what}"
                self.say(f"{error.what}: {error.item} is skipped")
            return Rejection(error.item, Reason.DAMAGED, self._why[error.item])

    def news(self) -> list[str]:
        """Report the items that this rank skips since the last call, and return them."""
        with self._lock:
            new = [item for item in self._why if item not in self._reported]
            self._reported.update(new)
        for item in new:
            self.refuse(item, Reason.DAMAGED, self._why[item])
        return new

    def too_many(self, new: set[str]) -> CacheDamaged | None:
        """Add the items that any rank skips from now on; return the error if these are too many in all."""
        self.everywhere |= new
        if len(self.everywhere) <= self.most:
            return None
        named = ", ".join(sorted(self.everywhere)[:NAMED]) + (", …" if len(self.everywhere) > NAMED else "")
        what = (
            f"the records of {len(self.everywhere):,} of {self.items:,} items are damaged ({named}), more than"
            " data.max_rejected_fraction allows to skip; a checkpoint was saved"
        )
        return CacheDamaged(what, where=self.where, remedy=MEND)


@dataclass(frozen=True, slots=True)
class CachedGraphs:
    """Reads graphs from the cache, and verifies each."""

    store: Store
    table: ItemTable
    mending: DamagedItems | None = None  # of graphs that cannot be read; without, that is an error

    def read(self, numbers: Sequence[int]) -> Iterator[ItemArrays | Rejection]:
        keys = [self.table.key(number) for number in numbers]
        for number, key, places in zip(numbers, keys, self.store.locate(keys), strict=True):
            id_ = self.table.ids[number]
            try:
                record = self._record(id_, key, places)
            except (CacheDamaged, RecordMissing) as error:
                if self.mending is None:
                    raise
                yield self.mending.leave_out(error)
                continue
            meta = record.meta
            if "reason" in meta:  # stored in the graph's place
                yield Rejection(id_, Reason(meta["reason"]), meta["detail"])
                continue
            if meta["format"] != graphs.FORMAT:
                raise ValueError(f"the graph of {id_} is of format {meta['format']}, not {graphs.FORMAT}")
            yield ItemArrays(number, id_, record.arrays, meta, self.table.values(number))

    def _record(self, id_: str, key: bytes, places: Sequence[RecordPlace]) -> Record:
        """Return the record of a graph, which is rebuilt if it cannot be read."""
        try:
            return self.store.get_at(key, places, _own_memory)
        except (CacheDamaged, RecordMissing) as error:
            what = f"the graph of {id_}: {error.what}"
            lost = type(error)(what, where=error.where, remedy=REBUILD_GRAPHS, item=id_)
            if self.mending is None or not self.mending.is_rebuilt(lost, key):
                raise lost from error
            return self.store.get(key)


def _own_memory(length: int) -> tuple[memoryview, memoryview]:
    """Return memory for a record: tensors over it may be written to."""
    return np.empty(length, np.uint8).data, memoryview(b"")


@dataclass(frozen=True, slots=True)
class BuiltGraphs:
    """Builds graphs from the items' structure files, each time they are read."""

    table: ItemTable
    reading: inventory.ScanRecipe
    recipe: GraphRecipe

    def read(self, numbers: Sequence[int]) -> Iterator[ItemArrays | Rejection]:
        """Yield each item's graph; one that cannot be built is rejected and does not end the run."""
        for number in numbers:
            item = self.table.item(number)
            try:
                yield self._build(number, item)
            except UnusableInput as problem:
                if problem.reason in GONE:
                    what = f"{item.id}: {problem.detail}"
                    raise DataError(what, where=problem.reason.value, remedy=GRAPH_AGAIN) from problem
                yield _rejected(item, problem.reason, problem.detail)
            except (DataError, MemoryError):
                raise
            except Exception as error:  # a bug of ours or of a parser
                log.exception("the graph of %s could not be built", item.id)
                yield _rejected(item, Reason.GRAPH_FAILED, f"{type(error).__name__}: {error}"[:200])

    def _build(self, number: int, item: Item) -> ItemArrays:
        files = {path: read_one(path, self.reading.max_file_bytes) for path in self.reading.paths(item)}
        self._check_key(number, item, files)
        taken, read = inventory.examine_item(item, files, self.reading)
        if taken.reason is not None:
            raise UnusableInput(taken.reason, taken.detail)
        if read is None:
            raise UnusableInput(Reason.NO_NODES, "a sequence without a structure has no graph")
        arrays, meta = graphs.encode_graph(build_graph(read, self.recipe))
        return ItemArrays(number, item.id, arrays, meta, self.table.values(number))

    def _check_key(self, number: int, item: Item, files: Mapping[str, File]) -> None:
        """Refuse files that have changed since the table was made: sizes, splits and labels may be different."""
        digests = {path: file.digest for path, file in files.items()}
        if self.recipe.key(inventory.item_key(item, self.reading, digests)) != self.table.key(number):
            what = f"{item.id}: its files or the configuration changed after the data set was prepared"
            raise DataError(what, where=", ".join(files), remedy=GRAPH_AGAIN)


@dataclass(frozen=True, slots=True)
class ReaderItems:
    """Reads items through a user's reader; raises if an item is not what the scan saw."""

    reader: Reader
    table: ItemTable
    noted: Callable[[Sequence[str]], AbstractContextManager[Any]] = nullcontext  # surrounds reading of these items

    def ids(self, numbers: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.table.ids[number] for number in numbers)

    def read(self, numbers: Sequence[int]) -> Iterator[ItemArrays | Rejection]:
        with self.noted(self.ids(numbers)):
            yield from self._read(numbers)

    def _read(self, numbers: Sequence[int]) -> Iterator[ItemArrays]:
        for number in numbers:
            id_ = self.table.ids[number]
            arrays = self._arrays(number, id_)
            if arrays_digest(arrays) != self.table.key(number):
                raise DataError(f"{id_} changed after the scan", remedy=SCAN_AGAIN)
            yield ItemArrays(number, id_, arrays, {"partners": [], "sizes": array_sizes(arrays)})

    def _arrays(self, number: int, id_: str) -> dict[str, Array]:
        try:
            return as_arrays(self.reader.read(self.table.place(number)))
        except MemoryError as error:
            raise MemoryError(f"out of memory while reading {id_}") from error
        except PipelineError as error:
            raise DataError(f"{id_} cannot be read: {error.what}", where=error.where, remedy=SCAN_AGAIN) from error
        except Exception as error:  # from the user's code
            what = f"{id_} cannot be read: {type(error).__name__}: {error}"
            raise DataError(what, remedy=SCAN_AGAIN) from error


def _rejected(item: Item, reason: Reason, detail: str) -> Rejection:
    return Rejection(item.id, reason, detail, item.origin, item.split)


NUMBERS = "numbers"  # the size that every item has: the total number of values in its arrays
TAKEN = {ITEMS, NUMBERS, *OF_GRAPHS}
_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*", re.ASCII)
_WIDEST = 8  # bytes of a number


def arrays_digest(arrays: Mapping[str, Array]) -> bytes:
    """Return a 16-byte digest of the arrays' names, types, shapes and bytes."""
    digest = xxhash.xxh3_128()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def as_arrays(values: Mapping[str, Any]) -> dict[str, Array]:
    """Convert what a reader returned to arrays of their own; it may return plain numbers."""
    return {name: np.array(value) for name, value in values.items()}


def array_sizes(arrays: Mapping[str, Array]) -> dict[str, int]:
    """Return an item's rows along each axis, and its total number of values."""
    rows = {parse_field(name).axis: len(array) for name, array in arrays.items() if parse_field(name).axis}
    return {NUMBERS: sum(array.size for array in arrays.values()), **rows}


@dataclass(slots=True)
class ArrayForms:
    """The types and shapes of a data set's arrays so far; later items must match, since batches join any of them."""

    known: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = field(default_factory=dict)  # of one item, or of a row
    most: dict[str, int] = field(default_factory=dict)  # rows of any item along each axis
    items: int = 0

    def wrong(self, arrays: Mapping[str, Array]) -> str:
        """Return why an item's arrays cannot be joined with earlier ones; empty if they can."""
        return next(self._complaints(arrays), "") if arrays else "it has no arrays"

    def add(self, arrays: Mapping[str, Array]) -> None:
        """Add an item's arrays, which later ones must match."""
        self.items += 1
        for name, array in arrays.items():
            self.known.setdefault(name, _form(name, array))
        for axis, rows in array_sizes(arrays).items():
            self.most[axis] = max(rows, self.most.get(axis, 0))

    def _complaints(self, arrays: Mapping[str, Array]) -> Iterator[str]:
        """Yield the problems of the arrays: of each alone, together, and compared with earlier items."""
        yield from _wrong_alone(arrays)
        first: dict[str, tuple[str, int]] = {}
        for name, array in arrays.items():
            if axis := parse_field(name).axis:
                other, rows = first.setdefault(axis, (name, len(array)))
                if rows != len(array):
                    yield f"{name} has {len(array)} rows, and {other} has {rows}"
        for name, array in arrays.items():
            mine, before = _form(name, array), self.known.get(name)
            if before is not None and mine != before:
                yield f"{name} is {_shown(mine)}, but {_shown(before)} in earlier items"
        sizes = array_sizes(arrays)
        for name, (dtype, _) in self.known.items():
            if name not in arrays and not _may_lack(name, dtype, sizes):
                yield f"it has no {name}, which earlier items have ({dtype.name} has no fill value)"
        for name, array in arrays.items():
            if self.items and name not in self.known and not _may_lack(name, array.dtype, self.most):
                yield f"earlier items have no {name} ({array.dtype.name} has no fill value)"


def _wrong_alone(arrays: Mapping[str, Array]) -> Iterator[str]:
    """Yield the problems of each array by itself."""
    for name, array in arrays.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            yield f"{name!r} is not a valid array name: use letters, digits, _ and dots"
        if (first := name.partition(".")[0]) in TAKEN:
            yield f"{name}: the name {first} is taken"
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > _WIDEST or not array.dtype.isnative:
            yield f"{name} has dtype {array.dtype}, which torch does not support"
        if parse_field(name).axis and not array.ndim:
            yield f"{name} is a scalar, but its axis is {parse_field(name).axis}"


def _form(name: str, array: Array) -> tuple[np.dtype[Any], tuple[int, ...]]:
    return array.dtype, array.shape[1:] if parse_field(name).form is FieldForm.ROWS else array.shape


def _shown(form: tuple[np.dtype[Any], tuple[int, ...]]) -> str:
    return f"{form[0].name} {list(form[1])}"


def _may_lack(name: str, dtype: np.dtype[Any], rows: Mapping[str, int]) -> bool:
    """Whether no rows, NaN or False can stand for an array that an item lacks."""
    is_rows = parse_field(name).form is FieldForm.ROWS
    return dtype.kind == "f" or (is_rows and (dtype.kind == "b" or not rows.get(parse_field(name).axis)))
