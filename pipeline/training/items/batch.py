"""A batch as training sees it: the fields of its graphs as tensors over one run of bytes, joined or item by item.

Shapes: B items, N rows of all items along an axis, M rows of the item that has most, E edges, R residues, D numbers of
an embedded residue.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from pipeline.device.batch_transfer import moved
from pipeline.errors import DataError
from pipeline.graphs import item_graph as graphs
from pipeline.graphs import pyg_view
from pipeline.graphs.item_graph import CROSS, EDGE, LABEL, NODE, PATH, RESIDUE
from pipeline.records import Role
from pipeline.training.items.batch_layout import CENTRE, EMBEDDING, ENCODED, OF_GRAPHS, PTR, nodes_axis

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from pipeline.records import Rejection
    from pipeline.training.items.batch_layout import BatchLayout

FIELDS = "fields"  # the group of what lies along edges


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


@dataclass(frozen=True, slots=True)
class ItemTensors:
    """The graph of one item as tensors; edges and labels use the item's own node numbers."""

    id: str
    number: int  # in the table
    sides: Mapping[str, PartnerTensors]
    cross: Mapping[str, Tensor]
    labels: Mapping[str, Tensor]
    rng: np.random.Generator  # the item's own in this epoch, whatever batch it is in
    values: Mapping[str, Tensor] = field(default_factory=dict)  # what a reader gave, or data.labels, by name
    cross_fields: Mapping[str, Tensor] = field(default_factory=dict)  # as edge_fields are

    def pyg(self) -> Any:
        """Return the item as a PyTorch Geometric object over the same CPU memory, with embeddings as `x`."""
        parts = tuple(
            graphs.PartnerGraph(
                role=Role(side.role),
                chains=(),
                centre_3=side.centre.numpy(),
                nodes=_arrays(side.nodes),
                edges=_arrays(side.edges),
                residues=_arrays(side.residues),
                paths=_arrays(side.paths),
                edge_fields=_arrays(side.edge_fields),
            )
            for side in self.sides.values()
        )
        between = _arrays(self.cross), _arrays(self.labels), _arrays(self.cross_fields)
        shown = pyg_view.data(graphs.ItemGraph(parts, *between))
        for side in self.sides.values():
            if side.embedding is not None:
                residues = f"{side.role}_{RESIDUE}" if side.residues else side.role
                (shown if len(parts) == 1 and not side.residues else shown[residues]).x = side.embedding
        return shown


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class BatchOrigin:
    """The place of a micro-batch in the training: epoch, step and index."""

    epoch: int
    step: int
    index: int
    of: int  # micro-batches of this rank in this step
    seed: int = 0


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
    rejected: tuple[Rejection, ...] = ()  # items that were asked for and have no graph

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, name: str) -> bool:
        return name in self.layout.places

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    @cached_property
    def fields(self) -> dict[str, Tensor]:
        """Every field by its name, such as `receptor.node.pos`; they are views."""
        return {
            name: self.memory[place.start : place.start + place.bytes]
            .view(getattr(torch, place.dtype))
            .view(place.shape)
            for name, place in self.layout.places.items()
        }

    @property
    def sides(self) -> dict[str, PartnerTensors]:
        """The joined graphs of each role."""
        return {role: _side(role, self._groups) for role in self.layout.roles()}

    @property
    def cross(self) -> dict[str, Tensor]:
        """The edges between partners, from the ligand (row 0) to the receptor."""
        return self._groups[CROSS]

    @property
    def cross_fields(self) -> dict[str, Tensor]:
        """The fields of those edges, such as near.pae."""
        return self._groups[f"{CROSS}.{FIELDS}"]

    @property
    def labels(self) -> dict[str, Tensor]:
        """The labels of the interfaces."""
        return self._groups[LABEL]

    @cached_property
    def _groups(self) -> dict[str, dict[str, Tensor]]:
        return _grouped(self.fields)

    @property
    def items(self) -> list[ItemTensors]:
        """The single items, their tensors as views of the batch, but for node numbers, which count within the item."""
        names = [name for name in self.layout.places if not name.startswith(f"{PTR}.")]
        if not names:
            return []
        rows = zip(*map(self._split, names), strict=True)
        return [self._item(place, dict(zip(names, own, strict=True))) for place, own in enumerate(rows)]

    def _split(self, name: str) -> Sequence[Tensor]:
        """Return each item's rows of a field."""
        values, place = self[name], self.layout.places[name]
        if not place.axis:
            return values.unbind()
        parts = torch.split_with_sizes(values, np.diff(self.layout.bounds[place.axis]).tolist(), int(place.are_edges))
        if not place.points_to:
            return parts
        first_BT = torch.stack([self.ptr(target)[:-1] for target in place.points_to], dim=1)
        return [
            part - (first[:, None] if place.are_edges else first) for part, first in zip(parts, first_BT, strict=True)
        ]

    def _item(self, place: int, fields: Mapping[str, Tensor]) -> ItemTensors:
        """Return an item by its own fields; of partners that it lacks there are fields without rows."""
        bounds, groups = self.layout.bounds, _grouped(fields)
        nodes = {role: bounds[nodes_axis(role)] for role in self.layout.roles()}
        return ItemTensors(
            id=self.ids[place],
            number=self.numbers[place],
            sides={role: _side(role, groups) for role, start in nodes.items() if start[place] < start[place + 1]},
            cross=groups[CROSS],
            cross_fields=groups[f"{CROSS}.{FIELDS}"],
            labels=groups[LABEL],
            rng=item_rng(self.origin, self.ids[place]),
            values=groups[""],
        )

    @property
    def rng(self) -> np.random.Generator:
        """The random numbers of the batch as a whole; each item has its own."""
        return item_rng(self.origin, "\n".join(self.ids))

    def ptr(self, axis: str) -> Tensor:
        """Return the offset at which each item's rows begin along an axis [B + 1], as in PyG."""
        return self[f"{PTR}.{axis}"]

    def owner(self, axis: str) -> Tensor:
        """Return the item that each row along an axis belongs to [N], as PyG's `batch`."""
        ptr = self.ptr(axis)
        total = int(self.layout.bounds[axis][-1])
        return torch.arange(len(self), device=ptr.device).repeat_interleave(ptr.diff(), output_size=total)

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> ItemBatch:
        """Copy the batch to a device, in one transfer."""
        return replace(self, memory=moved(self.memory, device, waits=not non_blocking))

    def clone(self) -> ItemBatch:
        return replace(self, memory=self.memory.clone())

    def pin_memory(self) -> ItemBatch:
        """Return the batch in pinned memory; a loader with `pin` has it there already."""
        return self if self.memory.is_pinned() else replace(self, memory=self.memory.pin_memory())


@dataclass(frozen=True, eq=False)
class TaskBatch:
    """What a loader made of the items of a micro-batch: usually what the task's `collate` returned."""

    numbers: tuple[int, ...]  # of the items in the table
    ids: tuple[str, ...]
    origin: BatchOrigin
    value: Any = None  # None where there are no items
    rejected: tuple[Rejection, ...] = ()  # items that have no graph after all
    weights: Mapping[str, Any] | None = None  # of the terms of its loss, where the task defines them
    cropped: int = 0  # items
    bytes: int = 0  # of its tensors
    is_made: bool = True  # False: `collate` ran out of memory, or must not run ahead; `part` makes the value
    read_again: Callable[[Sequence[int], BatchOrigin], TaskBatch] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, stop: int) -> Any:
        """Return what `collate` makes of some of the items, which are read again unless they are all."""
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
    ptr, owner_N = batch.ptr(place.axis), batch.owner(place.axis)
    most = batch.layout.most(place.axis)
    row_N = torch.arange(len(owner_N), device=ptr.device) - ptr[owner_N]
    dense = batch[name].new_full((len(batch), most, *place.shape[1:]), fill)
    dense[owner_N, row_N] = batch[name]
    real = torch.arange(most, device=ptr.device) < ptr.diff()[:, None]
    return dense, real


def item_rng(origin: BatchOrigin, name: str) -> np.random.Generator:
    """Return a random generator determined by the seed, the epoch and a name alone."""
    return np.random.default_rng([origin.seed, origin.epoch, xxhash.xxh3_64_intdigest(name.encode())])


@lru_cache(maxsize=4096)
def _group(name: str) -> tuple[str, str]:
    """Return the group of a field, such as `receptor.node`, and its name within; what a reader gave is in group ``."""
    first, _, rest = name.partition(".")
    if first not in OF_GRAPHS:
        return "", name
    if first in (CROSS, LABEL):
        group, short = first, rest
    else:
        kind, _, short = rest.partition(".")
        group, short = (f"{first}.{kind}", short) if short else (first, kind)
    return (f"{group}.{FIELDS}", short) if "." in short else (group, short)


def _grouped(fields: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    groups: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in fields.items():
        group, short = _group(name)
        groups[group][short] = tensor
    return groups


def _side(role: str, groups: Mapping[str, dict[str, Tensor]]) -> PartnerTensors:
    return PartnerTensors(
        role=role,
        centre=groups[role][CENTRE],
        nodes=groups[f"{role}.{NODE}"],
        edges=groups[f"{role}.{EDGE}"],
        edge_fields=groups[f"{role}.{EDGE}.{FIELDS}"],
        residues=groups[f"{role}.{RESIDUE}"],
        paths=groups[f"{role}.{PATH}"],
        embedding=groups[role].get(EMBEDDING),
        encoded=groups[role].get(ENCODED),
    )
