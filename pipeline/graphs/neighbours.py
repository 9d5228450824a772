"""Nearest neighbours and neighbours within a distance, exactly and reproducibly.

Distances are compared as squares of coordinate differences, in whole steps of 1e-6 Å²; equal ones by index. For
coordinates of three decimals, which files have, that compares the true distances: their squares are whole steps, and
what a rotation or a translation does to a float64 is a million times less than one.

Shapes: N nodes, S sources (their possible neighbours), C candidates of a node in the order of their indices, E edges.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from scipy.spatial import cKDTree
from scipy.spatial.distance import cdist

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from pipeline.graphs.item_graph import Edges

    Floats = NDArray[np.float64]
    Ids = NDArray[np.int64]  # node * sources + source: sorted, they are in canonical order

STEP = 1e-6  # Å²
COINCIDENT = 0.01  # Å; no two atoms of one conformer are so near
# Up to so many sources, all distances at once cost less than the tree: for k = 20, 0.15 against 0.43 ms with 170 nodes,
# 0.7 against 1.1 ms with 430, 2.3 against 2.7 ms with 760; with 1,000 the tree is ahead.
FEW = 800
LONGEST_ROW = 512  # numpy sorts longer rows of 16-bit numbers ten times slower
COARSE = 65_000  # steps over which squared distances are spread to be sorted as 16-bit numbers, which is fastest
ROUGHNESS = 2**-20  # of the largest squared distance: more than float32 can be wrong by
BLOCK = 1 << 18  # distances at a time: 1 MB
PIECE = 1 << 18  # multiplications, for which BLAS starts no threads
OWN = np.iinfo(np.uint16).max  # a node is not its own neighbour


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
    pairs_P2: NDArray[np.int64] = close[found_2E[::-1, found_2E[0] > found_2E[1]].T]
    return pairs_P2


def squared_steps(source_E3: Floats, target_E3: Floats) -> Floats:
    """Return squared distances in whole steps, row by row."""
    apart_E3 = source_E3 - target_E3
    apart_E3 *= apart_E3
    return _steps(apart_E3.sum(axis=-1))


def reach_steps(radius: float) -> float:
    """Return the squared radius in whole steps."""
    return float(np.rint(radius * radius / STEP))


def _steps(squared: Floats) -> Floats:
    """Return squared distances in whole steps."""
    squared /= STEP
    steps: Floats = np.rint(squared, out=squared)
    return steps


def _edges(source_S3: Floats, target_N3: Floats, nearest: int, radius: float | None, *, same: bool) -> Edges:
    """Return the union of both kinds of edges."""
    kind = _Matrix if len(source_S3) <= FEW else _Tree
    sources = max(1, len(source_S3))
    index = kind(source_S3, target_N3, same)
    nearest = min(nearest, len(source_S3) - same)
    ids_E = index.nearest(nearest) if nearest > 0 else np.empty(0, np.int64)
    if radius is not None:
        in_reach_E = index.in_reach(radius)
        ids_E = np.union1d(ids_E, in_reach_E) if len(ids_E) else in_reach_E
    edges_2E = np.empty((2, len(ids_E)), np.int64)
    np.floor_divide(ids_E, sources, out=edges_2E[1])  # which numpy does faster than divmod
    np.subtract(ids_E, edges_2E[1] * sources, out=edges_2E[0])
    return edges_2E


def matrix_product(from_NK: Floats, to_KS: Floats) -> NDArray[np.float32]:
    """Return the product of two matrices in float32, in pieces so small that none starts threads."""
    from_NK, to_KS = from_NK.astype(np.float32), to_KS.astype(np.float32)
    product_NS = np.empty((len(from_NK), to_KS.shape[1]), np.float32)
    rows = max(1, PIECE // max(1, to_KS.size))
    for first in range(0, len(from_NK), rows):
        here = slice(first, first + rows)
        np.matmul(from_NK[here], to_KS, out=product_NS[here])
    return product_NS


def _nearest_of(steps_NC: Floats, nearest: int) -> NDArray[np.bool_]:
    """Return a mask of each node's nearest candidates; of equal ones, the first."""
    last_N1 = np.partition(steps_NC, nearest - 1, axis=1)[:, nearest - 1 : nearest]
    nearer_NC = steps_NC < last_N1
    equal_NC = steps_NC == last_N1
    room_N1 = nearest - nearer_NC.sum(axis=1, keepdims=True)
    chosen_NC: NDArray[np.bool_] = nearer_NC | (equal_NC & (np.cumsum(equal_NC, axis=1) <= room_N1))
    return chosen_NC


def _smallest(rows_NS: NDArray[np.uint16], count: int) -> NDArray[np.uint16]:
    """Return the smallest numbers of each row, sorted.

    A sort is as fast as a partition at one place, and three times as fast as one at two; long rows are split first.
    """
    pieces = -(-rows_NS.shape[1] // LONGEST_ROW)
    if pieces == 1:
        return np.sort(rows_NS, axis=1)
    smallest = [np.sort(piece, axis=1)[:, :count] for piece in np.array_split(rows_NS, pieces, axis=1)]
    return np.sort(np.concatenate(smallest, axis=1), axis=1)


class _Matrix:
    """All distances between two small sets.

    First roughly, as |a|² + |b|² - 2ab: one product of matrices, ten times as fast as differences. Its float32 is good
    to `ROUGHNESS` of the largest distance; what that leaves open is compared in steps.
    """

    def __init__(self, source_S3: Floats, target_N3: Floats, same: bool) -> None:  # noqa: FBT001 - a fact
        self._source_S3, self._target_N3, self._same = source_S3, target_N3, same

    def nearest(self, nearest: int) -> Ids:
        """Return each node's nearest sources.

        Squared distances are sorted as 16-bit numbers, which keep the order of any two more than one unit apart.
        """
        sources = len(self._source_S3)
        if nearest >= sources - 1:
            return self._ids(lambda nodes: np.flatnonzero(_nearest_of(self._steps(nodes), nearest)))
        rough = self._rough()
        return self._ids(lambda nodes: np.flatnonzero(self._nearest(rough(nodes), nodes, nearest)))

    def in_reach(self, radius: float) -> Ids:
        """Return each node's sources within a distance."""
        if not len(self._source_S3) or not len(self._target_N3):
            return np.empty(0, np.int64)
        rough = self._rough()
        return self._ids(lambda nodes: self._in_reach(rough(nodes), nodes, radius))

    def _ids(self, choose: Callable[[NDArray[np.int64]], Ids]) -> Ids:
        """Return the chosen edges, working through the nodes in blocks."""
        sources, nodes = len(self._source_S3), np.arange(len(self._target_N3))
        block = max(1, BLOCK // max(1, sources))
        if len(nodes) <= block:
            return choose(nodes)
        firsts = range(0, len(nodes), block)
        return np.concatenate([choose(nodes[first : first + block]) + first * sources for first in firsts])

    def _rough(self) -> Callable[[NDArray[np.int64]], NDArray[np.float32]]:
        """Return what gives a block's squared distances to all sources, in units of which the largest is `COARSE`."""
        source_3S = np.ascontiguousarray(self._source_S3.T)
        target_3N = source_3S if self._same else np.ascontiguousarray(self._target_N3.T)
        low_3 = np.minimum(source_3S.min(axis=1), target_3N.min(axis=1))
        high_3 = np.maximum(source_3S.max(axis=1), target_3N.max(axis=1))
        span_3, middle_31 = high_3 - low_3, ((low_3 + high_3) / 2)[:, None]
        self._unit = max(float(span_3 @ span_3) / COARSE, 2 * STEP)
        from_5N, to_5S = np.ones((5, target_3N.shape[1])), np.ones((5, source_3S.shape[1]))
        for factor_5, points_3, at in ((from_5N, target_3N, 3), (to_5S, source_3S, 4)):
            np.subtract(points_3, middle_31, out=factor_5[:3])
            factor_5[:3] /= math.sqrt(self._unit)
            np.einsum("xn,xn->n", factor_5[:3], factor_5[:3], out=factor_5[at])
        to_5S[:3] *= -2
        return lambda nodes: matrix_product(from_5N[:, nodes[0] : nodes[-1] + 1].T, to_5S)

    def _nearest(self, rough_NS: NDArray[np.float32], nodes: NDArray[np.int64], nearest: int) -> NDArray[np.bool_]:
        """Return a mask of some nodes' nearest sources."""
        coarse_NS = rough_NS.astype(np.uint16)
        if self._same:
            coarse_NS.ravel()[nodes[0] :: len(self._source_S3) + 1] = OWN
        ranked_NC = _smallest(coarse_NS, nearest + 1)
        last_N, next_N = ranked_NC[:, nearest - 1], ranked_NC[:, nearest]
        chosen_NS: NDArray[np.bool_] = coarse_NS <= last_N[:, None]
        unclear = np.flatnonzero(next_N <= last_N + 1)
        if len(unclear):
            chosen_NS[unclear] = self._settled(coarse_NS[unclear], last_N[unclear], nodes[unclear], nearest)
        return chosen_NS

    def _settled(
        self, coarse_NS: NDArray[np.uint16], last_N: NDArray[np.uint16], nodes: NDArray[np.int64], nearest: int
    ) -> NDArray[np.bool_]:
        """Return a mask of some nodes' nearest sources, comparing in steps what is within a unit of the last."""
        chosen_NS: NDArray[np.bool_] = coarse_NS < np.maximum(last_N, 1)[:, None] - np.uint16(1)
        maybe = np.flatnonzero((coarse_NS <= last_N[:, None] + np.uint16(1)) & ~chosen_NS)
        node, source = np.divmod(maybe, coarse_NS.shape[1])
        steps = squared_steps(self._source_S3[source], self._target_N3[nodes[node]])
        order = np.lexsort((steps, node))  # of equal ones the first stays first
        count_N = np.bincount(node, minlength=len(nodes))
        rank = np.arange(len(node)) - (np.cumsum(count_N) - count_N)[node]
        room_N = nearest - np.count_nonzero(chosen_NS, axis=1)
        chosen_NS.ravel()[maybe[order[rank < room_N[node]]]] = True
        return chosen_NS

    def _in_reach(self, rough_NS: NDArray[np.float32], nodes: NDArray[np.int64], radius: float) -> Ids:
        """Return the edges from some nodes' sources within a distance; steps are compared only at its edge."""
        if self._same:
            rough_NS.ravel()[nodes[0] :: len(self._source_S3) + 1] = np.inf
        reach, slack = (radius * radius + STEP) / self._unit, ROUGHNESS * COARSE
        near_E = np.flatnonzero(rough_NS <= reach + slack)
        unclear = np.flatnonzero(rough_NS.ravel()[near_E] > reach - slack - 2 * STEP / self._unit)
        if not len(unclear):
            return near_E
        node, source = np.divmod(near_E[unclear], len(self._source_S3))
        steps = squared_steps(self._source_S3[source], self._target_N3[nodes[node]])
        return np.delete(near_E, unclear[steps > reach_steps(radius)])

    def _steps(self, nodes: NDArray[np.int64]) -> Floats:
        """Return some nodes' squared distances to all sources in steps, infinite to themselves."""
        steps_NS = _steps(cdist(self._target_N3[nodes], self._source_S3, "sqeuclidean"))
        if self._same:
            steps_NS[np.arange(len(nodes)), nodes] = np.inf
        return steps_NS


class _Tree:
    """A tree over the sources, for large sets."""

    def __init__(self, source_S3: Floats, target_N3: Floats, same: bool) -> None:  # noqa: FBT001 - a fact
        self._source_S3, self._target_N3, self._same = source_S3, target_N3, same
        self._tree = cKDTree(source_S3)

    def nearest(self, nearest: int) -> Ids:
        """Return each node's nearest sources; nodes with ties query more and more candidates."""
        nodes, sources, own = np.arange(len(self._target_N3)), len(self._source_S3), int(self._same)
        if nearest + own >= sources:
            return self._of_candidates(nodes, nearest, sources)[0]
        apart_NC, source_NC = self._tree.query(self._target_N3, nearest + own + 1)
        unclear_N = np.diff(apart_NC[:, -2:] ** 2, axis=1)[:, 0] <= 2 * STEP
        if self._same:
            unclear_N |= source_NC[:, 0] != nodes
        ids_NC = nodes[:, None] * sources + source_NC[:, own:-1]
        ids = [ids_NC[~unclear_N].ravel()]
        nodes, wanted = nodes[unclear_N], 4 * nearest
        while len(nodes):
            ids_E, clear_N = self._of_candidates(nodes, nearest, min(wanted, sources))
            ids.append(ids_E)
            nodes, wanted = nodes[~clear_N], 4 * wanted
        return np.sort(np.concatenate(ids))

    def in_reach(self, radius: float) -> Ids:
        """Return each node's sources within a distance."""
        reach = np.nextafter(radius + STEP, np.inf)
        pairs = cKDTree(self._target_N3).sparse_distance_matrix(self._tree, reach, output_type="ndarray")
        node_E, source_E = pairs["i"], pairs["j"]
        near_E = squared_steps(self._source_S3[source_E], self._target_N3[node_E]) <= reach_steps(radius)
        if self._same:
            near_E &= node_E != source_E
        return np.sort(node_E[near_E] * len(self._source_S3) + source_E[near_E])

    def _of_candidates(self, nodes: NDArray[np.int64], nearest: int, wanted: int) -> tuple[Ids, NDArray[np.bool_]]:
        """Return nodes' nearest among so many candidates, and a mask of the nodes for which these are enough."""
        sources = len(self._source_S3)
        _, source_NC = self._tree.query(self._target_N3[nodes], range(1, wanted + 1))
        source_NC.sort(axis=1)
        steps_NC = squared_steps(self._source_S3[source_NC], self._target_N3[nodes, None])
        farthest_N = steps_NC.max(axis=1)
        if self._same:
            steps_NC[source_NC == nodes[:, None]] = np.inf
        chosen_NC = _nearest_of(steps_NC, nearest)
        last_N = np.max(steps_NC, axis=1, initial=0, where=chosen_NC)
        clear_N = (farthest_N > last_N + 1) | (wanted == sources)
        return (nodes[:, None] * sources + source_NC)[chosen_NC & clear_N[:, None]], clear_N
