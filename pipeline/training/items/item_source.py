"""An item as named arrays, the meaning of the names, and the sources of items.

A field of a batch has the name of the array, such as `receptor.node.pos`. Edges differ: `receptor.edge.near` and
`cross.near` are pairs, and `receptor.edge.near.pae` lies along them. An axis is a prefix whose fields all have the same
number of rows: `receptor.node`, `receptor.edge.near`, `label.contact`. Arrays of a user's reader (`protocol.Reader`)
have simpler names: `peaks.mz` lies along `peaks`, and `precursor` has one value an item.

Items come from the cache, from structure files (graphs are built on reading), or from a user's reader. All give an item
as the arrays and the JSON of its record, so that batches are the same bit for bit.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import xxhash

from pipeline.command_line import Command
from pipeline.errors import CacheDamaged, DataError, PipelineError, RecordMissing
from pipeline.graphs.item_graph import CROSS, DEGREE, EDGE, LABEL, NEIGHBOUR, NODE, PATH, RESIDUE, encode_graph
from pipeline.graphs.make_graphs import build_graph
from pipeline.records import Reason, Rejection, Role
from pipeline.store.store import ONLY_MISSING
from pipeline.structures import inventory
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.parsing.structure_files import read_structure_file
from pipeline.units import first_few

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.graphs.item_graph import GraphRecipe
    from pipeline.protocol import Reader
    from pipeline.records import Item
    from pipeline.store.format.record import Record
    from pipeline.store.store import RecordPlace, Store
    from pipeline.training.items.item_table import ItemTable

    Array = NDArray[Any]

log = logging.getLogger(__name__)

GONE = frozenset({Reason.MISSING_FILE, Reason.UNREADABLE_FILE})  # of files that existed when the data set was prepared
GRAPH_AGAIN = Command.submit("graph", then="   (processes only missing items)")
REBUILD_GRAPHS = Command.submit("graph", then=f"   ({ONLY_MISSING})")
REPAIR = Command.of("cache repair --yes", then="   then   ")
MEND = Command.submit("train", before=REPAIR, then="   (rebuilds lost records and continues)")
SCAN_AGAIN = Command.submit("scan", then="   (touch the file first if this finds nothing to do)")
NAMED = 3  # items in a message

PTR = "ptr"
RECEPTOR, LIGAND = Role.RECEPTOR.value, Role.LIGAND.value
CENTRE = "centre"  # a name that ends so is one vector an item
PAIRS = "pairs"  # a label that ends so holds nodes: of the receptor, of the ligand
OF_GRAPHS = {*(role.value for role in Role), CROSS, LABEL, PTR}  # with which the names of a graph's arrays begin


class ItemArrays(NamedTuple):
    """An item's graph as `item_graph.encode` lays it out; the arrays may be views that last as long as the batch."""

    number: int
    id: str
    arrays: Mapping[str, Array]
    meta: Mapping[str, Any]
    values: Mapping[str, Array] = MappingProxyType({})  # labels of the data set, which are not part of the graph


class FieldForm(Enum):
    """How the arrays of the items become one field of a batch."""

    ROWS = "rows"  # joined along its axis
    ITEM = "item"  # stacked: one vector an item
    DEGREE = "degree"  # the number of edges of each node
    NEIGHBOUR = "neighbour"  # the other ends of the edges


class ArrayField(NamedTuple):
    """The meaning of an array, from its name."""

    name: str  # in a batch
    form: FieldForm
    axis: str = ""
    points_to: tuple[str, ...] = ()  # axes whose rows the numbers are: one for all columns, or one for each


@lru_cache(maxsize=4096)
def parse_field(name: str) -> ArrayField:
    """Parse the name of an array."""
    first, *parts = name.split(".")
    if first not in OF_GRAPHS:
        return ArrayField(name, FieldForm.ROWS, first) if parts else ArrayField(name, FieldForm.ITEM)
    if parts[-1].endswith(CENTRE):
        return ArrayField(name, FieldForm.ITEM)
    if first == CROSS or parts[0] == EDGE:
        axis, _, last = name.rpartition(".")
        heads, tails = (RECEPTOR, LIGAND) if first == CROSS else (first, first)
        if last == DEGREE:
            return ArrayField(axis, FieldForm.DEGREE, f"{heads}.{NODE}")
        if last == NEIGHBOUR:
            return ArrayField(axis, FieldForm.NEIGHBOUR, axis, (f"{tails}.{NODE}", f"{heads}.{NODE}"))
        return ArrayField(name, FieldForm.ROWS, axis)
    if first == LABEL:
        nodes = (f"{RECEPTOR}.{NODE}", f"{LIGAND}.{NODE}") if parts[0].endswith(PAIRS) else ()
        return ArrayField(name, FieldForm.ROWS, f"{LABEL}.{parts[0].partition('_')[0]}", nodes)
    if parts[0] == PATH:
        return ArrayField(name, FieldForm.ROWS, name, (f"{first}.{NODE}",))
    points_to = (f"{first}.{RESIDUE}",) if parts[1] == RESIDUE else ()
    return ArrayField(name, FieldForm.ROWS, f"{first}.{parts[0]}", points_to)


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
        self._skipped: dict[str, Rejection] = {}
        self._new: list[str] = []

    def is_rebuilt(self, error: PipelineError, key: bytes) -> bool:
        """Rebuild the graph of the error's item in the cache; return whether it can be read now."""
        with self._lock:
            if error.item in self._skipped or not self.rebuild(error.item, key):
                return False
            self.say(f"{error.what}: rebuilt")
            return True

    def leave_out(self, error: PipelineError) -> Rejection:
        with self._lock:
            if error.item not in self._skipped:
                self._skipped[error.item] = Rejection(error.item, Reason.DAMAGED, f"{error.where}: {error.what}")
                self._new.append(error.item)
                self.say(f"{error.what}: {error.item} is skipped")
            return self._skipped[error.item]

    def newly_skipped(self) -> list[str]:
        """Report the items that this rank skips since the last call, and return them."""
        with self._lock:
            new, self._new = self._new, []
        for item in new:
            self.refuse(item, Reason.DAMAGED, self._skipped[item].detail)
        return new

    def too_many(self, new: set[str]) -> CacheDamaged | None:
        """Add the items that any rank skips from now on; return the error if these are too many in all."""
        self.everywhere |= new
        if len(self.everywhere) <= self.most:
            return None
        named = first_few(sorted(self.everywhere), NAMED)
        what = f"the records of {len(self.everywhere):,} of {self.items:,} items are damaged ({named})"
        what += ", more than data.max_rejected_fraction allows to skip; a checkpoint was saved"
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
            else:
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
                continue
            except UnusableInput as problem:
                reason, detail = problem.reason, problem.detail
                if reason in GONE:
                    raise DataError(f"{item.id}: {detail}", where=reason.value, remedy=GRAPH_AGAIN) from problem
            except (DataError, MemoryError):
                raise
            except Exception as error:  # a bug in this package or in a parser
                log.exception("the graph of %s could not be built", item.id)
                reason, detail = Reason.GRAPH_FAILED, f"{type(error).__name__}: {error}"[:200]
            yield Rejection(item.id, reason, detail, item.origin, item.split)

    def _build(self, number: int, item: Item) -> ItemArrays:
        files = {path: read_structure_file(path, self.reading.max_file_bytes) for path in self.reading.paths(item)}
        digests = {path: file.digest for path, file in files.items()}
        if self.recipe.key(inventory.item_key(item, self.reading, digests)) != self.table.key(number):
            # sizes, splits and labels may be different
            what = f"{item.id}: its files or the configuration changed after the data set was prepared"
            raise DataError(what, where=", ".join(files), remedy=GRAPH_AGAIN)
        taken, read = inventory.examine_item(item, files, self.reading)
        if taken.reason is not None:
            raise UnusableInput(taken.reason, taken.detail)
        if read is None:
            raise UnusableInput(Reason.NO_NODES, "a sequence without a structure has no graph")
        arrays, meta = encode_graph(build_graph(read, self.recipe))
        return ItemArrays(number, item.id, arrays, meta, self.table.values(number))


@dataclass(frozen=True, slots=True)
class ReaderItems:
    """Reads items through a user's reader; raises if an item is not what the scan saw."""

    reader: Reader
    table: ItemTable

    def ids(self, numbers: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.table.ids[number] for number in numbers)

    def read(self, numbers: Sequence[int]) -> Iterator[ItemArrays]:
        for number in numbers:
            id_ = self.table.ids[number]
            try:
                arrays = as_arrays(self.reader.read(self.table.place(number)))
            except MemoryError as error:
                raise MemoryError(f"out of memory while reading {id_}") from error
            except Exception as error:  # from the user's code
                why = error.what if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
                raise DataError(f"{id_} cannot be read: {why}", remedy=SCAN_AGAIN) from error
            if arrays_digest(arrays) != self.table.key(number):
                raise DataError(f"{id_} changed after the scan", remedy=SCAN_AGAIN)
            yield ItemArrays(number, id_, arrays, {"partners": []})


NUMBERS = "numbers"  # the size that every item has: the total number of values in its arrays


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
    rows = {axis: len(array) for name, array in arrays.items() if (axis := parse_field(name).axis)}
    return {NUMBERS: sum(array.size for array in arrays.values()), **rows}
