"""The layout of a batch in memory, and the meaning of the names of its arrays.

A field of a batch has the name of the array, `receptor.node.pos`, but for edges: `receptor.edge.near` and `cross.near`
are pairs, and `receptor.edge.near.pae` lies along them. An axis is what has as many rows in all its fields:
`receptor.node`, `receptor.edge.near`, `label.contact`.

What a reader gives (`protocol.Reader`) is named more simply: `peaks.mz` lies along `peaks`, `precursor` is one an item.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.graphs.item_graph import CROSS, DEGREE, EDGE, LABEL, NEIGHBOUR, NODE, PATH, RESIDUE
from pipeline.records import Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Array = NDArray[Any]
    Integers = NDArray[np.int64]
    Bytes = NDArray[np.uint8]

EMBEDDING, ENCODED, PTR = "embedding", "encoded", "ptr"
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
    values: Mapping[str, Array] = MappingProxyType({})  # labels of the data set, which are no part of a graph


class FieldForm(Enum):
    """How the arrays of the items become one field of a batch."""

    ROWS = "rows"  # joined along its axis
    ITEM = "item"  # stacked: one vector an item
    DEGREE = "degree"  # how many edges each node has
    NEIGHBOUR = "neighbour"  # the other ends of the edges


@dataclass(frozen=True, slots=True)
class ArrayField:
    """What the name of an array says about it."""

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
    if first == CROSS:
        return _edges(f"{CROSS}.{parts[0]}", parts[1], nodes_axis(RECEPTOR), nodes_axis(LIGAND))
    if first == LABEL:
        nodes = (nodes_axis(RECEPTOR), nodes_axis(LIGAND)) if parts[0].endswith(PAIRS) else ()
        return ArrayField(name, FieldForm.ROWS, f"{LABEL}.{parts[0].partition('_')[0]}", nodes)
    if parts[0] == EDGE:
        return _edges(f"{first}.{EDGE}.{parts[1]}", parts[2], nodes_axis(first), nodes_axis(first))
    if parts[0] == PATH:
        return ArrayField(name, FieldForm.ROWS, name, (nodes_axis(first),))
    points_to = (residues_axis(first),) if parts[1] == RESIDUE else ()
    return ArrayField(name, FieldForm.ROWS, f"{first}.{parts[0]}", points_to)


def nodes_axis(role: str) -> str:
    """Return the axis of a partner's nodes."""
    return f"{role}.{NODE}"


def residues_axis(role: str) -> str:
    """Return the axis of a partner's residues, if its nodes are atoms."""
    return f"{role}.{RESIDUE}"


def _edges(name: str, last: str, heads: str, tails: str) -> ArrayField:
    """Describe one of the two arrays that encode edges, degrees of the heads or neighbours (the tails), or a field."""
    if last == DEGREE:
        return ArrayField(name, FieldForm.DEGREE, heads)
    if last == NEIGHBOUR:
        return ArrayField(name, FieldForm.NEIGHBOUR, name, (tails, heads))
    return ArrayField(f"{name}.{last}", FieldForm.ROWS, name)


_DTYPE_OF = attrgetter("dtype")
ALIGNMENT = 64
BFLOAT16 = "bfloat16"
# torch computes with few unsigned types, and a record's type may be narrower in one item than in the next.
_WIDER: dict[str, np.dtype[Any]] = {
    "uint16": np.dtype(np.int32),
    "uint32": np.dtype(np.int64),
    "uint64": np.dtype(np.int64),
}
_ANY_WIDTH: dict[str, np.dtype[Any]] = {"chain": np.dtype(np.int32)}


class FieldPlace(NamedTuple):
    """Where a field lies in the batch's memory, and its shape."""

    start: int
    dtype: str  # as numpy names it, or bfloat16
    shape: tuple[int, ...]
    axis: str = ""  # along which it lies; empty for one vector an item
    points_to: tuple[str, ...] = ()  # axes whose rows its numbers are: one for all, or one for each of a pair
    are_edges: bool = False  # [2, E]: the axis is the second dimension

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * held_as(self.dtype).itemsize


class EmbeddingForm(NamedTuple):
    """The type and width of residue embeddings."""

    dtype: str
    width: int


@dataclass(slots=True)
class BatchLayout:
    """The places of all fields of a batch, and the row bounds of each item."""

    items: int
    places: dict[str, FieldPlace] = field(default_factory=dict)
    bounds: dict[str, Integers] = field(default_factory=dict)  # axis → [B + 1]
    used: int = 0  # bytes

    def add(self, name: str, dtype: str, shape: tuple[int, ...], axis: str = "", **what: Any) -> None:
        """Place a field behind the others."""
        place = FieldPlace(self.used, dtype, shape, axis, **what)
        self.places[name] = place
        self.used += place.bytes + -place.bytes % ALIGNMENT

    def view(self, name: str, memory: Bytes) -> Array:
        """Return a field as an array over the batch's memory; bfloat16 as its bits."""
        place = self.places[name]
        return memory[place.start : place.start + place.bytes].view(held_as(place.dtype)).reshape(place.shape)

    def rows(self, axis: str, item: int) -> slice:
        """Return an item's rows along an axis."""
        start, stop = self.bounds[axis][item : item + 2].tolist()
        return slice(start, stop)

    def most(self, axis: str) -> int:
        """Return the most rows that any item has along an axis."""
        return int(np.diff(self.bounds[axis]).max(initial=0))

    def roles(self) -> list[str]:
        """Return the roles of partners in the batch."""
        return [role.value for role in Role if nodes_axis(role.value) in self.bounds]

    def residues(self, role: str) -> str:
        """Return the axis of a partner's residues: its nodes, if these are residues."""
        return residues_axis(role) if residues_axis(role) in self.bounds else nodes_axis(role)


class BatchBuilder:
    """Lays out the items of a batch field by field, then writes them to memory."""

    def __init__(self, items: Sequence[ItemArrays], encoding: EmbeddingForm | None = None) -> None:
        for item in items:
            roles = [partner["role"] for partner in item.meta["partners"]]
            if len(roles) > 1 and roles != [RECEPTOR, LIGAND]:  # pairs are of the receptor, first, and the ligand
                raise ValueError(f"the graph of {item.id} has the partners {', '.join(roles)}")
        self.layout = BatchLayout(len(items))
        arrays_B = [{**item.values, **item.arrays} if item.values else item.arrays for item in items]
        columns = _columns(arrays_B)
        self._bind(columns)
        self._fields = {(entry.name, entry.form): (entry, self._complete(entry, column)) for entry, column in columns}
        for entry, column in self._fields.values():
            self._place(entry, column)
        for role in self.layout.roles():
            if encoding is None:
                break
            axis = self.layout.residues(role)
            self.layout.add(f"{role}.{EMBEDDING}", encoding.dtype, (self._total(axis), encoding.width), axis)
            self.layout.add(f"{role}.{ENCODED}", "bool", (self._total(axis),), axis)
        for axis, bounds in self.layout.bounds.items():
            self.layout.add(f"{PTR}.{axis}", "int64", bounds.shape)

    def _bind(self, columns: Sequence[tuple[ArrayField, list[Array | None]]]) -> None:
        """Count every item's rows along every axis, and check that its fields agree."""
        counts: dict[str, list[int]] = {}
        for entry, column in columns:
            if entry.axis:
                mine = [-1 if array is None else len(array) for array in column]
                known = counts.setdefault(entry.axis, mine)
                if known != mine:
                    counts[entry.axis] = [_agreed(entry, *both) for both in zip(known, mine, strict=True)]
        for axis, counts_B in counts.items():
            self.layout.bounds[axis] = np.cumsum([0, *(max(count, 0) for count in counts_B)])

    def _complete(self, entry: ArrayField, column: list[Array | None]) -> list[Array]:
        """Fill in arrays that some items lack: NaN for floats, False for booleans, else no rows."""
        if all(array is not None for array in column):
            return column  # type: ignore[return-value]  # none is missing
        sample = next(array for array in column if array is not None)
        if entry.form is FieldForm.ITEM:
            return [np.full_like(sample, np.nan) if array is None else array for array in column]
        rows_B = np.diff(self.layout.bounds[entry.axis])
        return [
            _filler(entry, sample, rows) if array is None else array
            for array, rows in zip(column, rows_B.tolist(), strict=True)
        ]

    def _place(self, entry: ArrayField, arrays: Sequence[Array]) -> None:
        """Add a field to the layout."""
        name, axis, shape = entry.name, entry.axis, arrays[0].shape
        points_to = tuple(target for target in entry.points_to if target in self.layout.bounds)
        if entry.form is FieldForm.ITEM:
            self.layout.add(name, _name(_dtype(name, arrays)), (len(arrays), *shape))
        elif entry.form is FieldForm.NEIGHBOUR:
            self.layout.add(name, "int64", (2, self._total(axis)), axis, points_to=points_to, are_edges=True)
        elif entry.form is FieldForm.ROWS:
            dtype = "int64" if points_to else _name(_dtype(name, arrays))
            self.layout.add(name, dtype, (self._total(axis), *shape[1:]), axis, points_to=points_to)

    def _total(self, axis: str) -> int:
        return int(self.layout.bounds[axis][-1])

    def write(self, memory: Bytes) -> None:
        """Write everything but the embeddings."""
        for entry, arrays in self._fields.values():
            if entry.form is FieldForm.NEIGHBOUR:
                self._write_edges(entry, arrays, memory)
            elif entry.form is FieldForm.ITEM:
                np.stack(arrays, out=self.layout.view(entry.name, memory))
            elif entry.form is FieldForm.ROWS:
                self._write_rows(entry, arrays, memory)
        for axis, bounds in self.layout.bounds.items():
            self.layout.view(f"{PTR}.{axis}", memory)[:] = bounds

    def _write_rows(self, entry: ArrayField, arrays: Sequence[Array], memory: Bytes) -> None:
        """Concatenate arrays; node and residue numbers become those of the batch."""
        out = self.layout.view(entry.name, memory)
        np.concatenate(arrays, out=out, casting="same_kind")
        points_to = self.layout.places[entry.name].points_to
        if len(points_to) == 1:
            out += self._offsets(points_to[0], entry.axis).reshape(-1, *[1] * (out.ndim - 1))
        for column, target in enumerate(points_to[: len(points_to) // 2 * 2]):
            out[:, column] += self._offsets(target, entry.axis)

    def _write_edges(self, entry: ArrayField, neighbours: Sequence[Array], memory: Bytes) -> None:
        """Write edges as pairs (tails, heads), with the heads repeated by their degrees."""
        tails_E, heads_E = self.layout.view(entry.name, memory)
        _, degrees = self._fields[entry.name, FieldForm.DEGREE]
        np.concatenate(neighbours, out=tails_E, casting="same_kind")
        tails_E += self._offsets(entry.points_to[0], entry.axis)
        degree_N = np.concatenate(degrees)
        heads_E[:] = np.repeat(np.arange(len(degree_N)), degree_N)

    def _offsets(self, target: str, axis: str) -> Integers:
        """Return, for each row along an axis, the total rows along `target` of the items before its own."""
        return np.repeat(self.layout.bounds[target][:-1], np.diff(self.layout.bounds[axis]))

    def row_map(self, item: ItemArrays, role: str) -> NDArray[np.int32]:
        """Return the embedding row of each residue of an item's partner."""
        kind = RESIDUE if residues_axis(role) in self.layout.bounds else NODE
        rows_R: NDArray[np.int32] = item.arrays[f"{role}.{kind}.row"]
        return rows_R


def _columns(arrays_B: Sequence[Mapping[str, Array]]) -> list[tuple[ArrayField, list[Array | None]]]:
    """Return each field that any item has, in the order of the names, and the arrays of all items."""
    names = sorted({name for arrays in arrays_B for name in arrays})
    return [(parse_field(name), [arrays.get(name) for arrays in arrays_B]) for name in names]


def _agreed(entry: ArrayField, known: int, mine: int) -> int:
    """Return an item's rows along an axis as two of its fields have them; -1 stands for a missing field."""
    if known != mine and min(known, mine) >= 0:
        raise ValueError(f"{entry.name} has {mine} rows, but {entry.axis} has {known}")
    return max(known, mine)


def _filler(entry: ArrayField, sample: Array, rows: int) -> Array:
    """Return the stand-in for an array that an item lacks."""
    shape = (rows, *sample.shape[1:])
    if rows == 0 or sample.dtype.kind == "b" or entry.form is FieldForm.DEGREE:
        return np.zeros(shape, sample.dtype)
    if sample.dtype.kind == "f":
        return np.full(shape, np.nan, sample.dtype)
    raise ValueError(f"some graphs of a batch have {entry.name} and others do not: they come from different recipes")


def _dtype(name: str, arrays: Sequence[Array]) -> np.dtype[Any]:
    """Return a field's type, which must be the same in every batch."""
    dtypes = set(map(_DTYPE_OF, arrays))
    common = np.dtype(np.result_type(*dtypes)) if len(dtypes) > 1 else dtypes.pop()
    wider = _WIDER.get(_name(common), common)
    return _ANY_WIDTH.get(name.rpartition(".")[2], wider) if name.partition(".")[0] in OF_GRAPHS else wider


@lru_cache(maxsize=64)
def _name(dtype: np.dtype[Any]) -> str:
    """Return a type's name; cached, as numpy composes it anew each time."""
    return str(dtype.name)


@lru_cache(maxsize=64)
def held_as(name: str) -> np.dtype[Any]:
    """Return numpy's type for a type's name: uint16 for bfloat16."""
    return np.dtype(np.uint16 if name == BFLOAT16 else name)
