"""Bonds in a row: paths of two and three bonds, and the pairs of atoms so far apart; joins of a sparse table.

Shapes: N nodes, B bonds, P paths, E edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from pipeline.graphs.item_graph import Edges

NAMES = ("bond", "angle", "dihedral")  # what a pair of nodes one, two, three bonds apart is called


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Who is bonded to each node, ascending; those of node n are from `first_N[n]` on, `degree_N[n]` of them."""

    first_N: NDArray[np.int64]
    degree_N: NDArray[np.int64]
    other_E: NDArray[np.int64]


def neighbours_of(bonds_B2: NDArray[np.int64], nodes: int) -> Neighbours:
    """Return bonds, each given once, as a table by node."""
    both = np.concatenate([bonds_B2, bonds_B2[:, ::-1]])
    order = np.lexsort((both[:, 1], both[:, 0]))
    degree_N = np.bincount(both[:, 0], minlength=nodes)
    return Neighbours(np.cumsum(degree_N) - degree_N, degree_N, both[order, 1])


def extend(paths_PX: NDArray[np.int64], bonded: Neighbours) -> NDArray[np.int64]:
    """Return every path that is one bond longer and does not cross itself, in the order of the paths."""
    last_P = paths_PX[:, -1]
    counts_P = bonded.degree_N[last_P]
    before = np.cumsum(counts_P) - counts_P
    place = np.repeat(bonded.first_N[last_P] - before, counts_P) + np.arange(int(counts_P.sum()))
    next_P = bonded.other_E[place]
    longer = np.column_stack([np.repeat(paths_PX, counts_P, axis=0), next_P])
    straight: NDArray[np.int64] = longer[(longer[:, :-1] != next_P[:, None]).all(axis=1)]
    return straight


def bond_paths(bonds_B2: NDArray[np.int64], nodes: int, hops: int) -> Iterator[NDArray[np.int64]]:
    """Yield the paths of one bond, of two and so on, each once: from its lower end, sorted."""
    bonded = neighbours_of(bonds_B2, nodes)
    both_ways = np.stack([np.repeat(np.arange(nodes), bonded.degree_N), bonded.other_E], axis=1)
    for hop in range(hops):
        both_ways = extend(both_ways, bonded) if hop else both_ways
        yield both_ways[both_ways[:, 0] < both_ways[:, -1]]


def pair_keys(paths_PX: NDArray[np.int64], nodes: int) -> NDArray[np.int64]:
    """Return a number for each pair of nodes that paths join, once and sorted; numbers sort as pairs do."""
    keys = np.sort(paths_PX[:, 0] * nodes + paths_PX[:, -1])
    distinct = np.ones(len(keys), np.bool_)
    distinct[1:] = keys[1:] != keys[:-1]
    chosen: NDArray[np.int64] = keys[distinct]
    return chosen


def without(keys: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers that are not among others; both are sorted."""
    if not len(others):
        return keys
    place = np.minimum(np.searchsorted(others, keys), len(others) - 1)
    left: NDArray[np.int64] = keys[others[place] != keys]
    return left


def both_ways(keys: NDArray[np.int64], nodes: int) -> Edges:
    """Return pairs as edges in both directions, sorted by node, then by neighbour."""
    left, right = np.divmod(keys, max(nodes, 1))
    ends = np.sort(np.concatenate([keys, right * nodes + left]))
    return np.stack(np.divmod(ends, max(nodes, 1))[::-1])
