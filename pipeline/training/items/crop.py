"""Crops items to a size that fits: keeps the residues nearest to one native contact, and the edges between them.

The contact is drawn in each epoch from (seed, epoch, item) alone, so every rank, a resumed run and a replay crop alike.
The larger partner is cropped first. Atoms of a residue stay or go together. Coordinates are not changed.

Shapes: N nodes and R residues of a partner, U units that stay or go together (residues, or single nodes), E edges.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import xxhash

from pipeline.errors import PlanInfeasible
from pipeline.graphs.item_graph import ItemGraph, PartnerGraph, decode_graph, encode_graph
from pipeline.training.items.item_source import PAIRS

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

    def counts(most: Sequence[int]) -> list[int]:
        return [side.count(nodes) for side, nodes in zip(sides, most, strict=True)]

    def fits(most: Sequence[int]) -> bool:
        return _fits(measure(_outline(graph, sides, counts(most)).sizes()), limits)

    kept = counts(_most(fits, [part.size for part in graph.parts]))
    if not fits(kept):
        what = "it cannot be cropped to " + ", ".join(f"{most:,} {name}" for name, most in limits.items())
        raise PlanInfeasible(what, where=item.id, remedy="--set train.oversize=skip, or use a larger GPU")
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
        return cls(part, order_N, np.flatnonzero(np.diff(unit_N[order_N], prepend=-1)))

    @cached_property
    def rank_N(self) -> Integers:
        """The index of each node in the order."""
        return np.argsort(self.order_N)

    @cached_property
    def edge_ranks(self) -> dict[str, Integers]:
        """For each kind of edge, the sorted ranks of the later ends: an edge stays if that end does."""
        return {name: np.sort(self.rank_N[edges_2E].max(axis=0)) for name, edges_2E in self.part.edges.items()}

    def count(self, most: int) -> int:
        """Return how many nodes stay of at most `most`: whole units, unless the first alone is larger."""
        if most >= self.part.size:
            return self.part.size
        return int(self.start_U[np.searchsorted(self.start_U, most, side="right") - 1]) or most

    def units(self, count: int) -> int:
        """Return how many residues stay (nodes, if these are residues)."""
        if count == self.part.size:
            return len(self.part.row_R)
        return int(np.searchsorted(self.start_U, count))


def _most(fits: Callable[[Sequence[int]], bool], sizes: Sequence[int]) -> list[int]:
    """Return the most nodes of each partner: the same for all, then more for one where another is the limit."""
    most = [_bisect(lambda count: fits([count] * len(sizes)), max(sizes))] * len(sizes)
    for place, size in enumerate(sizes):
        most[place] = _bisect(lambda count: fits([*most[:place], count, *most[place + 1 :]]), size)  # noqa: B023 - called at once
    return most


def _bisect(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest count up to `most` that fits; 1 if none does."""
    return max(1, bisect_left(range(1, most + 1), 1, key=lambda count: not fits(count)))


def _outline(graph: ItemGraph, sides: Sequence[_OrderedPartner], counts: Sequence[int]) -> ItemGraph:
    """Return a graph with the sizes of the cropped one but no data, to measure it without memory."""
    parts = []
    for side, count in zip(sides, counts, strict=True):
        edges = {name: _nothing(2, int(np.searchsorted(rank_E, count))) for name, rank_E in side.edge_ranks.items()}
        residues = {"row": _nothing(side.units(count))}
        parts.append(replace(side.part, nodes={"pos": _nothing(count)}, edges=edges, residues=residues))
    cross = {name: _nothing(2, _stay(sides[::-1], counts[::-1], ends)) for name, ends in graph.cross.items()}
    pairs_P2 = graph.labels.get(CONTACTS)
    contacts = 0 if pairs_P2 is None else _stay(sides, counts, pairs_P2.T)
    return ItemGraph(tuple(parts), cross, {CONTACTS: _nothing(contacts)})


def _nothing(*shape: int) -> Array:
    return np.broadcast_to(np.int64(0), shape)


def _stay(sides: Sequence[_OrderedPartner], counts: Sequence[int], ends: Array) -> int:
    """Return how many pairs of nodes, a row for each partner, keep both ends."""
    stays = [side.rank_N[nodes] < count for side, count, nodes in zip(sides, counts, ends, strict=True)]
    return int(np.logical_and.reduce(stays).sum())


def _cut(graph: ItemGraph, sides: Sequence[_OrderedPartner], counts: Sequence[int]) -> ItemGraph:
    """Return the cropped graph; nodes, residues, edges and labels keep their order."""
    new = []  # index of each node, -1 if it is dropped
    for side, count in zip(sides, counts, strict=True):
        new_N = np.full(side.part.size, -1)
        new_N[np.sort(side.order_N[:count])] = np.arange(count)
        new.append(new_N)
    cross, cross_fields = _cut_edges(new[::-1], graph.cross, graph.cross_fields)
    parts = tuple(_cut_part(side.part, new_N) for side, new_N in zip(sides, new, strict=True))
    return ItemGraph(parts, cross, _cut_labels(graph.labels, new), cross_fields)


def _kept(new: Sequence[Integers], ends: Array) -> tuple[NDArray[np.bool_], Integers]:
    """Return which nodes that belong together, a row for each, all stay, and those renumbered."""
    moved = np.stack([mine[nodes] for mine, nodes in zip(new, ends, strict=True)])
    stays: NDArray[np.bool_] = np.logical_and.reduce(moved >= 0)
    return stays, moved[:, stays]


def _cut_edges(
    new: Sequence[Integers], edges: Mapping[str, Array], fields: Mapping[str, Array]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the edges whose ends both stay, and their fields."""
    cut, cut_fields = dict[str, Any](), dict[str, Any]()
    for kind, edges_2E in edges.items():
        stays_E, cut[kind] = _kept(new, edges_2E)
        cut_fields |= {name: array[stays_E] for name, array in fields.items() if name.startswith(f"{kind}.")}
    return cut, cut_fields


def _cut_part(part: PartnerGraph, new_N: Integers) -> PartnerGraph:
    kept_N = new_N >= 0
    if kept_N.all():
        return part
    nodes = {name: array[kept_N] for name, array in part.nodes.items()}
    residues = dict(part.residues)
    if residues:
        kept_R, residue_N = np.unique(nodes["residue"], return_inverse=True)
        nodes["residue"] = residue_N.astype(nodes["residue"].dtype)
        residues = {name: array[kept_R] for name, array in residues.items()}
    edges, fields = _cut_edges([new_N, new_N], part.edges, part.edge_fields)
    paths = {name: _kept([new_N] * path.shape[1], path.T)[1].T for name, path in part.paths.items()}
    return replace(part, nodes=nodes, edges=edges, residues=residues, paths=paths, edge_fields=fields)


def _cut_labels(labels: Mapping[str, Array], new: Sequence[Integers]) -> dict[str, Array]:
    """Return the labels of the node pairs that stay, and labels that belong to no pair."""
    cut = dict(labels)
    for name, pairs_P2 in labels.items():
        if name.endswith(PAIRS):
            stays_P, ends_2P = _kept(new, pairs_P2.T)
            alike = [other for other in labels if other.startswith(name.removesuffix(PAIRS))]
            cut |= {other: labels[other][stays_P] for other in alike} | {name: ends_2P.T.astype(pairs_P2.dtype)}
    return cut
