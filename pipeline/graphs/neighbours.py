"""Nearest neighbours and neighbours within a distance, exactly and reproducibly.

Distances are compared as squares of coordinate differences, in whole steps of 1e-6 Å²; equal ones by index. Files have
coordinates with three decimals, whose squared distances are whole steps. Rounding after a rotation or a translation
changes a float64 by a millionth of a step. So equal distances compare as equal.

Shapes: N nodes, S sources (their possible neighbours), C candidates of a node in the order of their indices, E edges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.spatial import cKDTree
from scipy.spatial.distance import cdist

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from pipeline.graphs.item_graph import Edges

    Floats = NDArray[np.float64]
    Ids = NDArray[np.int64]  # node * sources + source: sorted, they are in canonical order
    Sources = NDArray[np.integer[Any]]  # of each node as many, in the order of their indices

STEP = 1e-6  # Å²
COINCIDENT = 0.01  # Å; no two atoms of one conformer are so near
# Up to so many sources, all distances at once cost less than the tree: for k = 20, 0.13 against 0.43 ms with 170 nodes,
# 0.6 against 1.1 ms with 430; with 1,000 the tree is ahead.
FEW = 800
ROUGHNESS = 2**-20  # of the largest squared distance: more than float32 can be wrong by
SHORT_ROW = 256
ONES = np.ones(3)
BLOCK = 1 << 18  # distances at a time: 1 MB
PIECE = 1 << 18  # multiplications: BLAS starts no threads for this few


def within(pos_N3: Floats, nearest: int = 0, radius: float | None = None) -> Edges:
    """Return the edges from each node's `nearest` others, and from all others within `radius`; each edge once."""
    return _edges(pos_N3, pos_N3, nearest, radius, same=True)


def between(source_S3: Floats, target_N3: Floats, nearest: int = 0, radius: float | None = None) -> Edges:
    """Return the edges from each target's `nearest` sources, and from all sources within `radius`; each edge once."""
    return _edges(source_S3, target_N3, nearest, radius, same=False)


def closest(source_S3: Floats, target_N3: Floats | None = None) -> float:
    """Return the smallest distance between two sets, or within one; infinite where there are no two points."""
    target_N3, rank = (source_S3, 2) if target_N3 is None else (target_N3, 1)
    if len(source_S3) < rank or len(target_N3) == 0:
        return float("inf")
    apart_N, _ = cKDTree(source_S3).query(target_N3, [rank])
    return float(apart_N.min())


def coincident(pos_N3: Floats) -> NDArray[np.int64]:
    """Return the sorted pairs of points at one place, [P, 2].

    Only points close to the next one along x can be among them, and these are few.
    """
    x_N = pos_N3[:, 0]
    order_N = x_N.argsort()
    x_N = x_N[order_N]
    is_next = x_N[1:] - x_N[:-1] <= COINCIDENT + STEP
    is_close_N = np.zeros(len(x_N), np.bool_)
    is_close_N[:-1] = is_next
    is_close_N[1:] |= is_next
    close = order_N[is_close_N]
    close.sort()
    close_M3 = pos_N3[close]
    if len(close) <= FEW:
        near_MM = cdist(close_M3, close_M3, "sqeuclidean") < 2 * COINCIDENT**2
        if np.count_nonzero(near_MM) == len(close):  # as nearly always: each is near itself only
            return np.empty((0, 2), np.int64)
    found_2E = within(close_M3, radius=COINCIDENT)
    return close[found_2E[::-1, found_2E[0] > found_2E[1]].T]


def _within_steps(source_E3: Floats, target_E3: Floats, radius: float) -> NDArray[np.bool_]:
    """Return a mask of the pairs that are within a distance, row by row, comparing in whole steps."""
    apart_E3 = source_E3 - target_E3
    apart_E3 *= apart_E3
    near_E: NDArray[np.bool_] = _steps(apart_E3.sum(axis=-1)) <= np.rint(radius * radius / STEP)
    return near_E


def _steps(squared: Floats) -> Floats:
    """Return squared distances in whole steps."""
    squared /= STEP
    return np.rint(squared, out=squared)


def _edges(source_S3: Floats, target_N3: Floats, nearest: int, radius: float | None, *, same: bool) -> Edges:
    """Return the union of both kinds of edges."""
    sources, nodes = max(1, len(source_S3)), np.arange(len(target_N3))
    index = (_Matrix if len(source_S3) <= FEW else _Tree)(source_S3, target_N3, same)
    nearest = max(0, min(nearest, len(source_S3) - same))
    source_NK = index.nearest(nearest) if nearest else np.empty((len(nodes), 0), np.int64)
    if radius is None:
        edges_2NK = np.empty((2, *source_NK.shape), np.int64)
        edges_2NK[0], edges_2NK[1] = source_NK, nodes[:, None]
        return edges_2NK.reshape(2, -1)
    ids_E = index.in_reach(radius)
    if nearest:
        ids_E = np.union1d(nodes[:, None] * sources + source_NK, ids_E)
    edges_2E = np.empty((2, len(ids_E)), np.int64)
    np.floor_divide(ids_E, sources, out=edges_2E[1])  # which numpy does faster than divmod
    np.subtract(ids_E, edges_2E[1] * sources, out=edges_2E[0])
    return edges_2E


def matrix_product(from_NK: NDArray[np.float32], to_KS: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the product of two matrices, in pieces so small that none starts threads."""
    product_NS = np.empty((len(from_NK), to_KS.shape[1]), np.float32)
    rows = max(1, PIECE // max(1, to_KS.size))
    for first in range(0, len(from_NK), rows):
        here = slice(first, first + rows)
        np.matmul(from_NK[here], to_KS, out=product_NS[here])
    return product_NS


def _smallest(key_NS: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """Return at least the smallest numbers of each row, sorted; the rows themselves lose their order.

    numpy has networks for up to 256 numbers: three sorts of these take two thirds of the time of one of 760.
    """
    pieces = [key_NS]
    if key_NS.shape[1] > 2 * SHORT_ROW:
        pieces = np.array_split(key_NS, -(-key_NS.shape[1] // SHORT_ROW), axis=1)
    for piece in pieces:
        piece.sort(axis=1)
    if len(pieces) == 1:
        return key_NS
    return np.sort(np.concatenate([piece[:, :count] for piece in pieces], axis=1), axis=1)


class _Index:
    """Sources and the nodes whose neighbours they may be; `same` if these are one set."""

    def __init__(self, source_S3: Floats, target_N3: Floats, same: bool) -> None:  # noqa: FBT001 - a fact
        self._source_S3, self._target_N3, self._same = source_S3, target_N3, same

    def _by_steps(self, nodes: NDArray[np.int64], nearest: int) -> Sources:
        """Return some nodes' nearest sources, comparing all distances in steps."""
        found = [np.empty((0, nearest), np.int64)]
        rows = max(1, BLOCK // max(1, len(self._source_S3)))
        for first in range(0, len(nodes), rows):
            here = nodes[first : first + rows]
            steps_NS = _steps(cdist(self._target_N3[here], self._source_S3, "sqeuclidean"))
            if self._same:
                steps_NS[np.arange(len(here)), here] = np.inf
            found.append(np.sort(steps_NS.argsort(axis=1, kind="stable")[:, :nearest], axis=1))
        return np.concatenate(found)


class _Matrix(_Index):
    """All distances between two small sets.

    First roughly, as |a|² + |b|² - 2ab: one product of matrices, ten times as fast as differences. Its float32 is good
    to `ROUGHNESS` of the largest distance; what that leaves open is compared in steps.
    """

    def nearest(self, nearest: int) -> Sources:
        """Return each node's nearest sources."""
        if nearest >= len(self._source_S3) - 1:
            return self._by_steps(np.arange(len(self._target_N3)), nearest)
        rough = self._rough()
        return np.concatenate([self._nearest(rough(nodes), nodes, nearest) for nodes in self._blocks()])

    def in_reach(self, radius: float) -> Ids:
        """Return each node's sources within a distance."""
        sources = len(self._source_S3)
        if not sources or not len(self._target_N3):
            return np.empty(0, np.int64)
        rough = self._rough()
        blocks = [self._in_reach(rough(nodes), nodes, radius) + nodes[0] * sources for nodes in self._blocks()]
        return np.concatenate(blocks)

    def _blocks(self) -> list[NDArray[np.int64]]:
        """Return the nodes in blocks whose distances fit in memory at once."""
        nodes, block = np.arange(len(self._target_N3)), max(1, BLOCK // max(1, len(self._source_S3)))
        return [nodes[first : first + block] for first in range(0, len(nodes), block)]

    def _rough(self) -> Callable[[NDArray[np.int64]], NDArray[np.float32]]:
        """Return what gives a block's squared distances to all sources, each too large by `_error`, or hardly wrong."""
        source_3S = np.ascontiguousarray(self._source_S3.T)
        target_3N = source_3S if self._same else np.ascontiguousarray(self._target_N3.T)
        middle_31 = source_3S[:, len(self._source_S3) // 2, None]  # near which few coordinates are large
        at_3S = source_3S - middle_31
        at_3N = at_3S if self._same else target_3N - middle_31
        square_S = ONES @ (at_3S * at_3S)
        square_N = square_S if self._same else ONES @ (at_3N * at_3N)
        self._error = 4 * ROUGHNESS * max(square_S.max().item(), square_N.max().item())
        from_5N, to_5S = (np.ones((5, points_3.shape[1]), np.float32) for points_3 in (at_3N, at_3S))
        from_5N[:3], from_5N[3] = at_3N, square_N + self._error
        np.multiply(at_3S, -2, out=to_5S[:3], casting="same_kind")
        to_5S[4] = square_S
        return lambda nodes: matrix_product(from_5N[:, nodes[0] : nodes[-1] + 1].T, to_5S)

    def _nearest(self, rough_NS: NDArray[np.float32], nodes: NDArray[np.int64], nearest: int) -> Sources:
        """Return some nodes' nearest sources.

        Squared distances, which are positive, sort like the whole numbers of the same bits; the last of these bits are
        given to the source.
        """
        sources = len(self._source_S3)
        own = (1 << (sources - 1).bit_length()) - 1
        if self._same:
            rough_NS.ravel()[nodes[0] :: sources + 1] = np.inf
        key_NS = rough_NS.view(np.int32)
        key_NS &= ~own
        key_NS |= np.arange(sources, dtype=np.int32)
        key_NS = _smallest(key_NS, nearest + 1)
        source_NK = key_NS[:, :nearest] & own
        source_NK.sort(axis=1)
        last_N, next_N = (key_NS[:, nearest - 1] | own).view(np.float32), (key_NS[:, nearest] & ~own).view(np.float32)
        unclear = np.flatnonzero(next_N - last_N <= 2 * self._error + STEP)
        if len(unclear):
            source_NK[unclear] = self._by_steps(nodes[unclear], nearest)
        return source_NK

    def _in_reach(self, rough_NS: NDArray[np.float32], nodes: NDArray[np.int64], radius: float) -> Ids:
        """Return the edges from some nodes' sources within a distance; steps are compared only at its edge."""
        if self._same:
            rough_NS.ravel()[nodes[0] :: len(self._source_S3) + 1] = np.inf
        reach = radius * radius + STEP
        near_E = np.flatnonzero(rough_NS <= reach + 2 * self._error)
        unclear = np.flatnonzero(rough_NS.ravel()[near_E] > reach - 2 * STEP)
        if not len(unclear):
            return near_E
        node, source = np.divmod(near_E[unclear], len(self._source_S3))
        is_near_E = np.ones(len(near_E), np.bool_)
        is_near_E[unclear] = _within_steps(self._source_S3[source], self._target_N3[nodes[node]], radius)
        return near_E[is_near_E]


class _Tree(_Index):
    """A tree over the sources, for large sets."""

    def __init__(self, source_S3: Floats, target_N3: Floats, same: bool) -> None:  # noqa: FBT001 - a fact
        super().__init__(source_S3, target_N3, same)
        self._tree = cKDTree(source_S3)

    def nearest(self, nearest: int) -> Sources:
        """Return each node's nearest sources; those of nodes with ties are compared in steps."""
        nodes, own = np.arange(len(self._target_N3)), int(self._same)
        if nearest + own >= len(self._source_S3):
            return self._by_steps(nodes, nearest)
        apart_NC, source_NC = self._tree.query(self._target_N3, nearest + own + 1)
        unclear_N = np.diff(apart_NC[:, -2:] ** 2, axis=1)[:, 0] <= 2 * STEP
        if self._same:
            unclear_N |= source_NC[:, 0] != nodes
        source_NK = np.sort(source_NC[:, own:-1], axis=1)
        source_NK[unclear_N] = self._by_steps(nodes[unclear_N], nearest)
        return source_NK

    def in_reach(self, radius: float) -> Ids:
        """Return each node's sources within a distance."""
        reach = np.nextafter(radius + STEP, np.inf)
        pairs = cKDTree(self._target_N3).sparse_distance_matrix(self._tree, reach, output_type="ndarray")
        node_E, source_E = pairs["i"], pairs["j"]
        near_E = _within_steps(self._source_S3[source_E], self._target_N3[node_E], radius)
        if self._same:
            near_E &= node_E != source_E
        return np.sort(node_E[near_E] * len(self._source_S3) + source_E[near_E])
