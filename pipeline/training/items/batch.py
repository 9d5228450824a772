"""A batch as training sees it: the fields of its graphs as tensors over one run of bytes, joined or item by item.

Shapes: B items, N rows of all items along an axis, M rows of the item that has most, E edges, R residues, D numbers of
an embedded residue.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
import xxhash

from pipeline.device.batch_transfer import moved
from pipeline.errors import DataError
from pipeline.graphs import item_graph as graphs
from pipeline.graphs import pyg_view
from pipeline.graphs.item_graph import CROSS, EDGE, LABEL, NODE, PATH, RESIDUE
from pipeline.records import Role
from pipeline.training.items.item_source import CENTRE, OF_GRAPHS, PTR, FieldForm, parse_field

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from pipeline.records import Rejection
    from pipeline.training.items.item_source import Array, ArrayField, ItemArrays
    from pipeline.training.sampling import BatchOrigin

    Integers = NDArray[np.int64]
    Bytes = NDArray[np.uint8]
    Column = list[Array | None]  # an array for each item

T = TypeVar("T")

EMBEDDING, ENCODED = "embedding", "encoded"
FIELDS = "fields"  # the group of fields along edges
ALIGNMENT = 64
_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    getattr(torch, name): np.dtype(name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
} | {torch.bfloat16: np.dtype(np.uint16)}
# torch computes with few unsigned types, and a record's type may be narrower in one item than in the next.
_TORCH = {dtype: name for name, dtype in _NUMPY.items()} | {
    np.dtype(np.uint16): torch.int32,
    np.dtype(np.uint32): torch.int64,
    np.dtype(np.uint64): torch.int64,
}
_dtype_of = attrgetter("dtype")


class FieldPlace(NamedTuple):
    """Where a field lies in the batch's memory, and its shape."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    axis: str = ""  # along which it lies; empty for one vector an item
    points_to: tuple[str, ...] = ()  # axes whose rows its numbers are: one for all, or one for each of a pair
    are_edges: bool = False  # [2, E]: the axis is the second dimension

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class BatchLayout:
    """The places of all fields of a batch, and the row bounds of each item.

    It is no dataclass, so that code that walks through a batch's tensors skips it.
    """

    def __init__(self) -> None:
        self.places: dict[str, FieldPlace] = {}
        self.bounds: dict[str, Integers] = {}  # axis → [B + 1]
        self.used = 0  # bytes

    def add(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], axis: str = "", **what: Any) -> None:
        """Place a field behind the others."""
        place = self.places[name] = FieldPlace(self.used, dtype, shape, axis, **what)
        self.used += place.bytes + -place.bytes % ALIGNMENT

    def view(self, name: str, memory: Bytes) -> Array:
        """Return a field as an array over the batch's memory; bfloat16 as its bits."""
        place = self.places[name]
        return memory[place.start : place.start + place.bytes].view(_NUMPY[place.dtype]).reshape(place.shape)

    def rows(self, axis: str, item: int) -> slice:
        """Return an item's rows along an axis."""
        start, stop = self.bounds[axis][item : item + 2].tolist()
        return slice(start, stop)

    def total(self, axis: str) -> int:
        """Return the rows of all items along an axis."""
        return int(self.bounds[axis][-1])

    def roles(self) -> list[str]:
        return [role.value for role in Role if f"{role.value}.{NODE}" in self.bounds]

    def residues(self, role: str) -> str:
        """Return the axis of a partner's residues: its nodes, if these are residues."""
        return f"{role}.{RESIDUE}" if f"{role}.{RESIDUE}" in self.bounds else f"{role}.{NODE}"


class BatchBuilder:
    """Lays out the items of a batch field by field, then writes them to memory."""

    def __init__(self, items: Sequence[ItemArrays], embedding: tuple[torch.dtype, int] | None = None) -> None:
        """Lay items out, with room for an `embedding` of this type and width of each residue."""
        layout = self.layout = BatchLayout()
        arrays_B = [{**item.values, **item.arrays} if item.values else item.arrays for item in items]
        names = sorted({name for arrays in arrays_B for name in arrays})
        columns = [(parse_field(name), [arrays.get(name) for arrays in arrays_B]) for name in names]
        counts = _row_counts(columns)
        for axis, counts_B in counts.items():
            layout.bounds[axis] = np.cumsum([0, *counts_B])
        self._columns = [(entry, _filled(entry, column, counts)) for entry, column in columns]
        self._degrees = {entry.name: column for entry, column in self._columns if entry.form is FieldForm.DEGREE}
        for entry, arrays in self._columns:
            self._place(entry, arrays)
        if embedding is not None:
            self._place_embeddings(*embedding)
        for axis, bounds in layout.bounds.items():
            layout.add(f"{PTR}.{axis}", torch.int64, bounds.shape)

    def _place(self, entry: ArrayField, arrays: Sequence[Array]) -> None:
        """Add a field to the layout."""
        layout, (name, form, axis, points_to) = self.layout, entry
        points_to = tuple(target for target in points_to if target in layout.bounds)
        if form is FieldForm.ITEM:
            layout.add(name, _dtype(name, arrays), (len(arrays), *arrays[0].shape))
        elif form is FieldForm.NEIGHBOUR:
            layout.add(name, torch.int64, (2, layout.total(axis)), axis, points_to=points_to, are_edges=True)
        elif form is FieldForm.ROWS:
            dtype = torch.int64 if points_to else _dtype(name, arrays)
            layout.add(name, dtype, (layout.total(axis), *arrays[0].shape[1:]), axis, points_to=points_to)

    def _place_embeddings(self, dtype: torch.dtype, width: int) -> None:
        for role in self.layout.roles():
            axis = self.layout.residues(role)
            rows = self.layout.total(axis)
            self.layout.add(f"{role}.{EMBEDDING}", dtype, (rows, width), axis)
            self.layout.add(f"{role}.{ENCODED}", torch.bool, (rows,), axis)

    def write(self, memory: Bytes) -> None:
        """Write everything but the embeddings."""
        for entry, arrays in self._columns:
            if entry.form is FieldForm.DEGREE:
                continue
            out = self.layout.view(entry.name, memory)
            if entry.form is FieldForm.ITEM:
                np.stack(arrays, out=out)
            elif entry.form is FieldForm.NEIGHBOUR:  # pairs of a tail and a head, which is repeated by its degree
                np.concatenate(arrays, out=out[0], casting="same_kind")
                out[0] += self._offsets(entry.points_to[0], entry.axis)
                degree_N = np.concatenate(self._degrees[entry.name])
                out[1] = np.repeat(np.arange(len(degree_N)), degree_N)
            else:
                np.concatenate(arrays, out=out, casting="same_kind")
                self._renumber(out, self.layout.places[entry.name])
        for axis, bounds in self.layout.bounds.items():
            self.layout.view(f"{PTR}.{axis}", memory)[:] = bounds

    def _renumber(self, out: Array, place: FieldPlace) -> None:
        """Turn an item's numbers of nodes and residues into those of the batch."""
        if len(place.points_to) == 1:
            out += self._offsets(place.points_to[0], place.axis).reshape(-1, *[1] * (out.ndim - 1))
        elif place.points_to:
            for column, target in enumerate(place.points_to):
                out[:, column] += self._offsets(target, place.axis)

    def _offsets(self, target: str, axis: str) -> Integers:
        """Return, for each row along an axis, the total rows along `target` of the items before its own."""
        return np.repeat(self.layout.bounds[target][:-1], np.diff(self.layout.bounds[axis]))


def _row_counts(columns: Sequence[tuple[ArrayField, Column]]) -> dict[str, list[int]]:
    """Return every item's rows along every axis; refuse fields that disagree. A missing field has -1."""
    counts: dict[str, list[int]] = {}
    for entry, column in columns:
        if not entry.axis:
            continue
        mine = [-1 if array is None else len(array) for array in column]
        known = counts.setdefault(entry.axis, mine)
        if known != mine:
            both = list(zip(known, mine, strict=True))
            if different := [pair for pair in both if -1 < min(pair) < max(pair)]:
                raise ValueError(f"{entry.name} has {different[0][1]} rows, but {entry.axis} has {different[0][0]}")
            counts[entry.axis] = [max(pair) for pair in both]
    return {axis: [max(count, 0) for count in counts_B] for axis, counts_B in counts.items()}


def _filled(entry: ArrayField, column: Column, counts: Mapping[str, list[int]]) -> list[Array]:
    """Fill in arrays that some items lack: NaN for floats, False for booleans, else no rows."""
    found = [array for array in column if array is not None]
    if len(found) == len(column):
        return found
    sample, is_item = found[0], entry.form is FieldForm.ITEM
    kind, fill = sample.dtype.kind, np.nan if sample.dtype.kind == "f" else 0
    shapes = [sample.shape if is_item else (rows, *sample.shape[1:]) for rows in counts.get(entry.axis, column)]
    filled = []
    for array, shape in zip(column, shapes, strict=True):
        if array is None and kind not in "bf" and entry.form is not FieldForm.DEGREE and 0 not in shape:
            what = f"some graphs of a batch have {entry.name} and others do not: they come from different recipes"
            raise ValueError(what)
        filled.append(np.full(shape, fill, sample.dtype) if array is None else array)
    return filled


def _dtype(name: str, arrays: Sequence[Array]) -> torch.dtype:
    """Return a field's type, which must be the same in every batch."""
    if name.endswith(".chain") and name.partition(".")[0] in OF_GRAPHS:
        return torch.int32
    dtypes = set(map(_dtype_of, arrays))
    return _TORCH[np.result_type(*dtypes) if len(dtypes) > 1 else dtypes.pop()]


@dataclass(frozen=True, slots=True)
class PartnerTensors:
    """The graph of one partner (receptor or ligand) as tensors, of one item or joined over a batch."""

    role: str
    centre: Tensor
    nodes: Mapping[str, Tensor]
    edges: Mapping[str, Tensor]  # each [2, E]
    residues: Mapping[str, Tensor]
    paths: Mapping[str, Tensor]
    embedding: Tensor | None = None  # [R, D]
    encoded: Tensor | None = None  # [R]: whether a residue has an embedding; those without have zeros
    edge_fields: Mapping[str, Tensor] = field(default_factory=dict)  # each [E, …], by the kind of edge: near.pae


@dataclass(frozen=True)
class ItemTensors:
    """The graph of one item as tensors; edges and labels use the item's own node numbers."""

    id: str
    number: int  # in the table
    sides: Mapping[str, PartnerTensors]
    cross: Mapping[str, Tensor]
    labels: Mapping[str, Tensor]
    origin: BatchOrigin
    values: Mapping[str, Tensor] = field(default_factory=dict)  # arrays of a reader, or data.labels, by name
    cross_fields: Mapping[str, Tensor] = field(default_factory=dict)  # as edge_fields are
    copy: int = 0  # which of the item's draws in an epoch this is

    @cached_property
    def rng(self) -> np.random.Generator:
        """The item's own random numbers in this epoch, whatever batch it is in; each draw of it has others."""
        return item_rng(self.origin, copy_name(self.id, self.copy))

    def pyg(self) -> Any:
        """Return the item as a PyTorch Geometric object over the same CPU memory, with embeddings as `x`."""

        def arrays(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
            return {name: tensor.numpy() for name, tensor in tensors.items()}

        parts = [
            graphs.PartnerGraph(
                Role(side.role),
                (),
                side.centre.numpy(),
                *map(arrays, (side.nodes, side.edges, side.residues, side.paths, side.edge_fields)),
            )
            for side in self.sides.values()
        ]
        graph = graphs.ItemGraph(tuple(parts), *map(arrays, (self.cross, self.labels, self.cross_fields)))
        shown = pyg_view.data(graph)
        for side in self.sides.values():
            if side.embedding is not None:
                residues = f"{side.role}_{RESIDUE}" if side.residues else side.role
                (shown if len(parts) == 1 and not side.residues else shown[residues]).x = side.embedding
        return shown


@dataclass(frozen=True)
class ItemBatch:
    """The graphs of some items over one run of bytes; empty where a rank has no items in a step.

    The memory is not reused while the batch or a view of it exists.
    """

    memory: Tensor  # uint8
    layout: BatchLayout
    numbers: tuple[int, ...]  # of the items in the table
    ids: tuple[str, ...]
    origin: BatchOrigin
    copies: tuple[int, ...] = ()  # which of its item's draws in an epoch each is; empty: the first

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    @cached_property
    def fields(self) -> dict[str, Tensor]:
        """Every field by its name, such as `receptor.node.pos`; they are views."""
        return {
            name: self.memory[place.start : place.start + place.bytes].view(place.dtype).view(place.shape)
            for name, place in self.layout.places.items()
        }

    @property
    def sides(self) -> dict[str, PartnerTensors]:
        """The joined graphs of each role."""
        groups = _grouped(self.fields)
        return {role: _side(role, groups) for role in self.layout.roles()}

    @property
    def items(self) -> list[ItemTensors]:
        """The single items, their tensors as views of the batch, but for node numbers, which count within the item."""
        split = _grouped({name: self._split(name) for name in self.layout.places if not name.startswith(f"{PTR}.")})
        rows = {group: (list(columns), list(zip(*columns.values(), strict=True))) for group, columns in split.items()}
        starts = {role: self.layout.bounds[f"{role}.{NODE}"].tolist() for role in self.layout.roles()}
        items = []
        for place, (name, number, copy) in enumerate(zip(self.ids, self.numbers, self._copies, strict=True)):
            groups: dict[str, dict[str, Tensor]] = defaultdict(dict)
            groups |= {group: dict(zip(names, own[place], strict=True)) for group, (names, own) in rows.items()}
            present = [role for role, start in starts.items() if start[place] < start[place + 1]]
            sides = {role: _side(role, groups) for role in present}
            cross, labels, of_edges = groups[CROSS], groups[LABEL], groups[f"{CROSS}.{FIELDS}"]
            items.append(ItemTensors(name, number, sides, cross, labels, self.origin, groups[""], of_edges, copy))
        return items

    def _split(self, name: str) -> Sequence[Tensor]:
        """Return each item's rows of a field."""
        values, place = self[name], self.layout.places[name]
        if not place.axis:
            return values.unbind()
        if place.points_to:
            first_BT = torch.stack([self.ptr(target)[:-1] for target in place.points_to], dim=1)
            first_NT = first_BT.repeat_interleave(self.ptr(place.axis).diff(), 0)
            values = values - (first_NT.T if place.are_edges else first_NT if values.dim() > 1 else first_NT[:, 0])
        parts = torch.split_with_sizes(values, np.diff(self.layout.bounds[place.axis]).tolist(), int(place.are_edges))
        return [part.contiguous() for part in parts] if place.are_edges else parts

    @property
    def rng(self) -> np.random.Generator:
        """The random numbers of the batch as a whole; each item has its own."""
        return item_rng(self.origin, "\n".join(map(copy_name, self.ids, self._copies)))

    @property
    def _copies(self) -> tuple[int, ...]:
        return self.copies or (0,) * len(self.ids)

    def ptr(self, axis: str) -> Tensor:
        """Return the offset at which each item's rows begin along an axis [B + 1], as in PyG."""
        return self[f"{PTR}.{axis}"]

    def owner(self, axis: str) -> Tensor:
        """Return the item that each row along an axis belongs to [N], as PyG's `batch`."""
        ptr = self.ptr(axis)
        rows = self.layout.total(axis)
        return torch.arange(len(self), device=ptr.device).repeat_interleave(ptr.diff(), output_size=rows)

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> ItemBatch:
        """Copy the batch to a device, in one transfer."""
        return replace(self, memory=moved(self.memory, device, waits=not non_blocking))


@dataclass(frozen=True, eq=False)
class TaskBatch:
    """The items of a micro-batch as a loader yields them: usually the result of the task's `collate`."""

    numbers: tuple[int, ...]  # of the items in the table
    ids: tuple[str, ...]
    origin: BatchOrigin
    value: Any = None  # None where there are no items
    rejected: tuple[Rejection, ...] = ()  # items whose graph could not be read
    weights: Mapping[str, Any] | None = None  # of the terms of its loss, where the task defines them
    cropped: int = 0  # items
    is_made: bool = True  # False: `collate` ran out of memory, or must not run ahead; `part` makes the value
    read_again: Callable[[Sequence[int], BatchOrigin], TaskBatch] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, stop: int) -> Any:
        """Collate some of the items; unless they are all, they are read again."""
        if (start, stop) == (0, len(self)) and self.is_made:
            return self.value
        assert self.read_again is not None
        part, ids = self.read_again(self.numbers[start:stop], self.origin), self.ids[start:stop]
        refuse_changed(ids, part.ids)
        return part.value


def refuse_changed(ids: tuple[str, ...], again: tuple[str, ...]) -> None:
    """Raise if items that were read for a step cannot be read a second time."""
    if ids != again:
        name = next((name for name in ids if name not in again), ids[0])
        what = f"{name} could be read at the start of the step but not at its end"
        remedy = "check whether its files changed or the disk fails; then   pipeline resume"
        raise DataError(what, where=name, remedy=remedy)


def padded_field(batch: ItemBatch, name: str, fill: float = 0) -> tuple[Tensor, Tensor]:
    """Return a field as a padded tensor [B, M, …], and its mask [B, M]."""
    place = batch.layout.places[name]
    if not place.axis or place.are_edges:
        raise ValueError(f"{name} has no rows to pad")
    rows_B, owner_N = batch.ptr(place.axis).diff(), batch.owner(place.axis)
    most = int(np.diff(batch.layout.bounds[place.axis]).max(initial=0))
    real = torch.arange(most, device=rows_B.device) < rows_B[:, None]
    dense = batch[name].new_full((len(batch), most, *place.shape[1:]), fill)
    dense[owner_N, torch.arange(len(owner_N), device=rows_B.device) - batch.ptr(place.axis)[owner_N]] = batch[name]
    return dense, real


def item_rng(origin: BatchOrigin, name: str) -> np.random.Generator:
    """Return a random generator determined by the seed, the epoch and a name alone."""
    return np.random.default_rng([origin.seed, origin.epoch, xxhash.xxh3_64_intdigest(name.encode())])


def copy_name(id_: str, copy: int) -> str:
    """Return the name by which an item gets its random numbers; `copy` counts its draws in an epoch."""
    return f"{id_}\0{copy}" if copy else id_


@lru_cache(maxsize=4096)
def _group(name: str) -> tuple[str, str]:
    """Return the group of a field, such as `receptor.node`, and its name within; what a reader gave is in group ``."""
    first, _, short = name.partition(".")
    if first not in OF_GRAPHS:
        return "", name
    group = first
    if first not in (CROSS, LABEL) and "." in short:
        kind, _, short = short.partition(".")
        group = f"{first}.{kind}"
    return (f"{group}.{FIELDS}", short) if "." in short else (group, short)


def _grouped(fields: Mapping[str, T]) -> dict[str, dict[str, T]]:
    groups: dict[str, dict[str, T]] = defaultdict(dict)
    for name, values in fields.items():
        group, short = _group(name)
        groups[group][short] = values
    return groups


def _side(role: str, groups: Mapping[str, dict[str, Tensor]]) -> PartnerTensors:
    own, of_edges = groups[role], groups[f"{role}.{EDGE}.{FIELDS}"]
    nodes, edges, residues, paths = (groups[f"{role}.{kind}"] for kind in (NODE, EDGE, RESIDUE, PATH))
    embedding, encoded = own.get(EMBEDDING), own.get(ENCODED)
    return PartnerTensors(role, own[CENTRE], nodes, edges, residues, paths, embedding, encoded, of_edges)
