"""Pairs so many bonds apart, and the paths between them, against plain searches."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.graphs import bonds as hops

Pairs = set[tuple[int, int]]


def array(bonds: Pairs) -> NDArray[np.int64]:
    return np.array(sorted(bonds), dtype=np.int64).reshape(-1, 2)


def apart(bonds: Pairs, nodes: int) -> dict[tuple[int, int], int]:
    """Return how many bonds each pair is apart, by breadth-first search."""
    around: dict[int, set[int]] = {node: set() for node in range(nodes)}
    for left, right in bonds:
        around[left].add(right)
        around[right].add(left)
    found = {}
    for start in range(nodes):
        steps, front, seen = 0, {start}, {start}
        while front:
            steps += 1
            front = {other for node in front for other in around[node]} - seen
            seen |= front
            found |= {(start, other): steps for other in front}
    return found


def by_hops(bonds: Pairs, nodes: int) -> list[Pairs]:
    """Return the pairs of each kind, as atom graphs put them together."""
    found, kinds = np.empty(0, np.int64), []
    for path in hops.bond_paths(array(bonds), nodes, 3):
        keys = hops.without(hops.pair_keys(path, nodes), found)
        found = np.sort(np.concatenate([found, keys]))
        kinds.append(set(zip(*hops.both_ways(keys, nodes).tolist(), strict=True)))
    return kinds


@st.composite
def molecules(draw: st.DrawFn) -> tuple[Pairs, int]:
    nodes = draw(st.integers(1, 9))
    pairs = [(left, right) for right in range(nodes) for left in range(right)]
    return set(draw(st.lists(st.sampled_from(pairs), unique=True, max_size=14))) if pairs else set(), nodes


@given(molecules())
def test_a_pair_is_of_its_shortest_path(molecule: tuple[Pairs, int]) -> None:
    distances = apart(*molecule)
    for steps, kind in enumerate(by_hops(*molecule), start=1):
        assert kind == {pair for pair, distance in distances.items() if distance == steps}


@given(molecules())
def test_every_path_of_distinct_atoms_is_there_once_and_in_order(molecule: tuple[Pairs, int]) -> None:
    bonds, nodes = molecule
    both = bonds | {(right, left) for left, right in bonds}
    for length, path in enumerate(hops.bond_paths(array(bonds), nodes, 3), start=2):
        wanted = [
            some
            for some in permutations(range(nodes), length)
            if some[0] < some[-1] and all(pair in both for pair in pairwise(some))
        ]
        assert path.tolist() == [list(some) for some in wanted]
