"""Crops items to a size that fits: keeps the residues nearest to one native contact, and the edges between them.

The contact is drawn in each epoch from (seed, epoch, item) alone, so every rank, a resumed run and a replay crop alike.
The larger partner is cropped first. Atoms of a residue stay or go together. Coordinates are not changed.

Shapes: N nodes and R residues of a partner, U units that stay or go together (residues, or single nodes), E edges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import xxhash

from pipeline.errors import PlanInfeasible
from pipeline.graphs.item_graph import LABEL, ItemGraph, PartnerGraph, decode_graph, encode_graph
from pipeline.training.items.item_source import PAIRS, FieldForm, parse_field

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pipeline.training.items.item_source import ItemArrays

    Array = NDArray[Any]
    Integers = NDArray[np.int64]

Sizes: TypeAlias = Mapping[str, int]
Measure: TypeAlias = Callable[[Mapping[str, int]], Mapping[str, Any]]  # sizes of a graph → the sizes that are limited

CONTACTS = "contact_pairs"
CA = 1  # of a residue node's positions: N, CA, C, CB
_STREAM = 1  # the item's random numbers in training come from another stream


def crop_rng(seed: int, epoch: int, id_: str) -> np.random.Generator:
    """Return a random generator determined by the seed, the epoch and the item alone."""
    return np.random.default_rng([seed, epoch, xxhash.xxh3_64_intdigest(id_.encode()), _STREAM])


def crop_item(item: ItemArrays, limits: Sizes, rng: np.random.Generator, measure: Measure = dict) -> ItemArrays:
    """Return an item cropped to the limits, or itself if it fits.

    `measure` turns the sizes of a graph into those that are limited, as a task's `cost` does.
    """
    if _fits(measure(item.meta["sizes"]), limits):
        return item
    graph = decode_graph(item.arrays, item.meta)
    sides = [_OrderedPartner.around(part, node) for part, node in zip(graph.parts, _anchors(graph, rng), strict=True)]

    def fits(most: Sequence[int]) -> bool:
        return _fits(measure(_outline(graph, sides, _counts(sides, most)).sizes()), limits)

    kept = _counts(sides, _most(fits, [part.size for part in graph.parts]))
    if not fits(kept):
        asked = ", ".join(f"{most:,} {name}" for name, most in limits.items())
        remedy = "--set train.oversize=skip, or use a larger GPU"
        raise PlanInfeasible(f"it cannot be cropped to {asked}", where=item.id, remedy=remedy)
    arrays, meta = encode_graph(_cut(graph, sides, kept))
    return item._replace(arrays=arrays, meta={**item.meta, **meta})


def _fits(sizes: Mapping[str, Any], limits: Sizes) -> bool:
    return all(sizes[name] <= most for name, most in limits.items())


def _anchors(graph: ItemGraph, rng: np.random.Generator) -> list[int]:
    """Return a node of each partner: a random native contact, else a random cross edge, else random nodes."""
    pairs_P2 = graph.labels.get(CONTACTS, np.zeros((0, 2), np.int64))
    if not len(pairs_P2) and graph.cross:
        pairs_P2 = np.concatenate([edges_2E[::-1].T for edges_2E in graph.cross.values()])
    if len(pairs_P2):
        return [int(node) for node in pairs_P2[rng.integers(len(pairs_P2))]]
    return [int(rng.integers(part.size)) for part in graph.parts]


@dataclass(frozen=True)
class _OrderedPartner:
    """A partner and the order in which its nodes are kept: nearest unit first, each unit's nodes together."""

    part: PartnerGraph
    order_N: Integers
    start_U: Integers  # where each unit begins in that order

    @classmethod
    def around(cls, part: PartnerGraph, node: int) -> _OrderedPartner:
        """Order a partner's nodes by the distance of their unit, then their own, from `node`."""
        pos_N3 = part.nodes["pos"].astype(np.float64)
        pos_N3 = pos_N3[:, CA] if pos_N3.ndim > 2 else pos_N3
        x_N, y_N, z_N = (pos_N3 - pos_N3[node]).T
        far_N = x_N * x_N + y_N * y_N + z_N * z_N
        unit_N = part.nodes["residue"].astype(np.int64) if part.residues else np.arange(part.size)
        far_U = np.full(int(unit_N.max()) + 1, np.inf)
        np.minimum.at(far_U, unit_N, far_N)
        order_N = np.lexsort((far_N, unit_N, far_U[unit_N]))
        start_U = np.flatnonzero(np.diff(unit_N[order_N], prepend=-1))
        return cls(part, order_N, start_U)

    @cached_property
    def rank_N(self) -> Integers:
        """The index of each node in the order."""
        rank_N = np.empty_like(self.order_N)
        rank_N[self.order_N] = np.arange(len(rank_N))
        return rank_N

    @cached_property
    def edge_ranks(self) -> dict[str, Integers]:
        """For each kind of edge, the sorted ranks of the later ends: an edge stays if that end does."""
        return {name: np.sort(self.rank_N[edges_2E].max(axis=0)) for name, edges_2E in self.part.edges.items()}

    def count(self, most: int) -> int:
        """Return how many nodes stay of at most `most`: whole units, unless the first alone is larger."""
        if most >= self.part.size:
            return self.part.size
        whole = int(self.start_U[np.searchsorted(self.start_U, most, side="right") - 1])
        return whole or most

    def units(self, count: int) -> int:
        """Return how many residues stay (nodes, if these are residues)."""
        if count == self.part.size:
            return len(self.part.row_R)
        return int(np.searchsorted(self.start_U, count))


def _counts(sides: Sequence[_OrderedPartner], most: Sequence[int]) -> list[int]:
    return [side.count(nodes) for side, nodes in zip(sides, most, strict=True)]


def _most(fits: Callable[[Sequence[int]], bool], sizes: Sequence[int]) -> list[int]:
    """Return the most nodes of each partner: the same for all, then more for one where another is the limit."""
    most = [_bisect(lambda count: fits([count] * len(sizes)), max(sizes))] * len(sizes)
    for place, size in enumerate(sizes):
        before, after = most[:place], most[place + 1 :]
        most[place] = _bisect(lambda count, others=(before, after): fits([*others[0], count, *others[1]]), size)  # type: ignore[misc]
    return most


def _bisect(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest count up to `most` that fits; 1 if none does."""
    below, above = 1, most + 1
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if fits(middle) else (below, middle)
    return below


def _outline(graph: ItemGraph, sides: Sequence[_OrderedPartner], counts: Sequence[int]) -> ItemGraph:
    """Return a graph with the sizes of the cropped one but no data, to measure it without memory."""
    parts = []
    for side, count in zip(sides, counts, strict=True):
        edges = {name: _nothing(2, int(np.searchsorted(rank_E, count))) for name, rank_E in side.edge_ranks.items()}
        residues = {"row": _nothing(side.units(count))}
        parts.append(replace(side.part, nodes={"pos": _nothing(count)}, edges=edges, residues=residues))
    stays = {name: _stays(sides[::-1], counts[::-1], ends) for name, ends in graph.cross.items()}
    cross = {name: _nothing(2, int(stays_E.sum())) for name, stays_E in stays.items()}
    pairs = graph.labels.get(CONTACTS)
    contacts = 0 if pairs is None else int(_stays(sides, counts, pairs.T).sum())
    return ItemGraph(tuple(parts), cross, {CONTACTS: _nothing(contacts)})


def _nothing(*shape: int) -> Array:
    return np.broadcast_to(np.int64(0), shape)


def _stays(sides: Sequence[_OrderedPartner], counts: Sequence[int], ends: Array) -> NDArray[np.bool_]:
    """Return which pairs of nodes, a row for each partner, keep both ends."""
    stays = [side.rank_N[nodes] < count for side, count, nodes in zip(sides, counts, ends, strict=True)]
    both: NDArray[np.bool_] = np.logical_and.reduce(stays)
    return both


def _cut(graph: ItemGraph, sides: Sequence[_OrderedPartner], counts: Sequence[int]) -> ItemGraph:
    """Return the cropped graph; nodes, residues, edges and labels keep their order."""
    places = [_places(np.sort(side.order_N[:count]), side.part.size) for side, count in zip(sides, counts, strict=True)]
    return ItemGraph(
        parts=tuple(_cut_part(side.part, new_N) for side, new_N in zip(sides, places, strict=True)),
        cross={name: _kept(places[::-1], edges_2E) for name, edges_2E in graph.cross.items()},
        labels=_cut_labels(graph.labels, places),
        cross_fields=_cut_fields(places[::-1], graph.cross, graph.cross_fields),
    )


def _places(kept: Integers, size: int) -> Integers:
    """Return the new index of each node or residue, -1 if it is dropped."""
    new = np.full(size, -1)
    new[kept] = np.arange(len(kept))
    return new


def _kept(new: Sequence[Integers], ends: Array) -> Array:
    """Return the pairs of nodes whose ends both stay, renumbered; a row for each end."""
    moved = np.stack([mine[nodes] for mine, nodes in zip(new, ends, strict=True)])
    return moved[:, (moved >= 0).all(axis=0)]


def _cut_fields(new: Sequence[Integers], edges: Mapping[str, Array], fields: Mapping[str, Array]) -> dict[str, Array]:
    """Return the fields of the edges whose ends both stay."""
    ends = {name: edges[name.partition(".")[0]] for name in fields}
    stays = {
        name: np.logical_and.reduce([mine[nodes] >= 0 for mine, nodes in zip(new, ends[name], strict=True)])
        for name in fields
    }
    return {name: array[stays[name]] for name, array in fields.items()}


def _cut_part(part: PartnerGraph, new_N: Integers) -> PartnerGraph:
    """Return the cropped graph of a partner."""
    kept_N = np.flatnonzero(new_N >= 0)
    if len(kept_N) == part.size:
        return part
    nodes = {name: array[kept_N] for name, array in part.nodes.items()}
    residues = dict(part.residues)
    if residues:
        kept_R, residue_N = np.unique(nodes["residue"], return_inverse=True)
        nodes["residue"] = residue_N.astype(nodes["residue"].dtype)
        residues = {name: array[kept_R] for name, array in residues.items()}
    return replace(
        part,
        nodes=nodes,
        edges={name: _kept([new_N, new_N], edges_2E) for name, edges_2E in part.edges.items()},
        residues=residues,
        paths={name: _kept([new_N] * path.shape[1], path.T).T for name, path in part.paths.items()},
        edge_fields=_cut_fields([new_N, new_N], part.edges, part.edge_fields),
    )


def _cut_labels(labels: Mapping[str, Array], new: Sequence[Integers]) -> dict[str, Array]:
    """Return the labels of the node pairs that stay, and labels that belong to no pair."""
    fields = {name: parse_field(f"{LABEL}.{name}") for name in labels}
    stays = {
        fields[name].axis: np.logical_and.reduce([mine[nodes] >= 0 for mine, nodes in zip(new, pairs.T, strict=True)])
        for name, pairs in labels.items()
        if name.endswith(PAIRS)
    }
    cut: dict[str, Array] = {}
    for name, array in labels.items():
        kept_P = stays.get(fields[name].axis) if fields[name].form is FieldForm.ROWS else None
        rows = array if kept_P is None else array[kept_P]
        if name.endswith(PAIRS):
            rows = np.stack([mine[nodes] for mine, nodes in zip(new, rows.T, strict=True)], axis=1).astype(array.dtype)
        cut[name] = rows
    return cut
