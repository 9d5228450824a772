"""Where graphs come from: the cache, or the structure files, from which they are built when they are wanted.

Both give a graph as the arrays and the JSON of its record, so that a batch is the same bit for bit. What a reader gives
is no graph, and comes the same way.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pipeline.errors import CacheDamaged, DataError, PipelineError, RecordMissing
from pipeline.graphs import graph as graphs
from pipeline.graphs.build import build
from pipeline.records import Reason, Rejection
from pipeline.structures import inventory
from pipeline.structures.atoms import Unusable
from pipeline.structures.files import paths
from pipeline.structures.files import read as read_one
from pipeline.training.entries import as_arrays, digest_of, sizes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.graphs.recipe import Recipe
    from pipeline.protocol import Reader
    from pipeline.records import Item
    from pipeline.store.store import Store
    from pipeline.structures.inventory import File
    from pipeline.training.dataset import Table

    Array = NDArray[Any]

log = logging.getLogger(__name__)

GONE = frozenset({Reason.MISSING_FILE, Reason.UNREADABLE_FILE})  # it was there when the data set was prepared
GRAPH_AGAIN = "pipeline submit --stage graph   (does only what is missing)"
SCAN_AGAIN = "pipeline submit --stage scan   (touch the file first if that finds nothing to do)"


class Found(NamedTuple):
    """An item's graph as `graphs.graph.encode` lays it out; the arrays may be views that last as long as the batch."""

    number: int
    id: str
    arrays: Mapping[str, Array]
    meta: Mapping[str, Any]
    values: Mapping[str, Array] = MappingProxyType({})  # labels of the data set, which are no part of a graph


class Graphs(Protocol):
    """Gives the graphs of items; several threads ask at once."""

    def read(self, numbers: Sequence[int]) -> Iterator[Found | Rejection]:
        """Yield the graph of each item, by its number in the table, in the order asked; or why it has none."""


@dataclass(frozen=True, slots=True)
class Cached:
    """Graphs that are in the cache; each is verified when it is read."""

    store: Store
    table: Table

    def read(self, numbers: Sequence[int]) -> Iterator[Found | Rejection]:
        """Yield the graph of each item."""
        keys = [self.table.key(number) for number in numbers]
        for number, key, places in zip(numbers, keys, self.store.locate(keys), strict=True):
            id_ = self.table.ids[number]
            try:
                record = self.store.get_at(key, places)
            except (CacheDamaged, RecordMissing) as error:
                raise type(error)(f"the graph of {id_}: {error.what}", where=error.where, remedy=GRAPH_AGAIN) from error
            yield _checked(Found(number, id_, record.arrays, record.meta, self.table.values(number)))


@dataclass(frozen=True, slots=True)
class Built:
    """Graphs that are built from the files of their items, every time anew."""

    table: Table
    reading: inventory.Recipe
    recipe: Recipe

    def read(self, numbers: Sequence[int]) -> Iterator[Found | Rejection]:
        """Yield the graph of each item; one that cannot be built costs this item, not the run."""
        for number in numbers:
            item = self.table.item(number)
            try:
                yield self._build(number, item)
            except Unusable as problem:
                if problem.reason in GONE:
                    what = f"{item.id}: {problem.detail}"
                    raise DataError(what, where=problem.reason.value, remedy=GRAPH_AGAIN) from problem
                yield _rejected(item, problem.reason, problem.detail)
            except (DataError, MemoryError):
                raise
            except Exception as error:  # a bug of ours or of a parser
                log.exception("%s could not be made a graph", item.id)
                yield _rejected(item, Reason.GRAPH_FAILED, f"{type(error).__name__}: {error}"[:200])

    def _build(self, number: int, item: Item) -> Found:
        files = {path: read_one(path, self.reading.max_file_bytes) for path in paths(item)}
        self._check_key(number, item, files)
        taken, read = inventory.examine(item, files, self.reading)
        if taken.reason is not None:
            raise Unusable(taken.reason, taken.detail)
        if read is None:
            raise Unusable(Reason.NO_NODES, "a bare sequence has no structure to make a graph of")
        return Found(number, item.id, *graphs.encode(build(read, self.recipe)), self.table.values(number))

    def _check_key(self, number: int, item: Item, files: Mapping[str, File]) -> None:
        """Refuse files that are no longer what the table is of: sizes, splits and labels may be others."""
        digests = {path: file.digest for path, file in files.items()}
        if self.recipe.key(inventory.item_key(item, self.reading, digests)) != self.table.key(number):
            what = f"{item.id}: its files or the configuration changed after the data set was prepared"
            raise DataError(what, where=", ".join(files), remedy=GRAPH_AGAIN)


@dataclass(frozen=True, slots=True)
class Entered:
    """What a reader gives, read from its files every time; it is what the scan saw, or an error."""

    reader: Reader
    table: Table

    def read(self, numbers: Sequence[int]) -> Iterator[Found | Rejection]:
        """Yield the arrays of each item."""
        for number in numbers:
            id_ = self.table.ids[number]
            arrays = self._arrays(number, id_)
            if digest_of(arrays) != self.table.key(number):
                raise DataError(f"{id_} is not what it was when the data set was scanned", remedy=SCAN_AGAIN)
            yield Found(number, id_, arrays, {"partners": [], "sizes": sizes_of(arrays)})

    def _arrays(self, number: int, id_: str) -> dict[str, Array]:
        try:
            return as_arrays(self.reader.read(self.table.place(number)))
        except MemoryError:
            raise
        except PipelineError as error:
            raise DataError(f"{id_} cannot be read: {error.what}", where=error.where, remedy=SCAN_AGAIN) from error
        except Exception as error:  # whatever a user's code raises
            what = f"{id_} cannot be read: {type(error).__name__}: {error}"
            raise DataError(what, remedy=SCAN_AGAIN) from error


def _checked(found: Found) -> Found | Rejection:
    """Return a stored graph, or the reason that is stored in its place."""
    if "reason" in found.meta:
        return Rejection(found.id, Reason(found.meta["reason"]), found.meta["detail"])
    if found.meta["format"] != graphs.FORMAT:
        raise ValueError(f"the graph of {found.id} is of format {found.meta['format']}, not {graphs.FORMAT}")
    return found


def _rejected(item: Item, reason: Reason, detail: str) -> Rejection:
    return Rejection(item.id, reason, detail, item.origin, item.split)
