"""Neighbours: as by brute force, ties included, by whichever way they are found and wherever the points are."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from pipeline.graphs import neighbours
from pipeline.graphs.neighbours import between, closest, coincident, within

Points = NDArray[np.float64]
WAYS = pytest.mark.parametrize("few", [0, 10**9], ids=["tree", "matrix"])
CELLS = st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=2, max_size=60, unique=True)
SOME = settings(max_examples=40, deadline=None)  # other work may share the machine
SPACINGS = st.sampled_from([1.0, 3.8, 0.125, 2.345])


def by_brute_force(source: Points, target: Points, nearest: int, radius: float | None, same: bool) -> NDArray[np.int64]:
    edges = []
    for node, point in enumerate(target):
        steps = np.rint(((source - point) ** 2).sum(axis=1) * 1e6)
        others = [one for one in range(len(source)) if not (same and one == node)]
        ranked = sorted(others, key=lambda one: (steps[one], one))
        chosen = set(ranked[:nearest])
        if radius is not None:
            chosen |= {one for one in others if steps[one] <= np.rint(radius**2 * 1e6)}
        edges += [(one, node) for one in sorted(chosen)]
    return np.array(edges, np.int64).reshape(-1, 2).T


def turned(points: Points, seed: int) -> Points:
    rng = np.random.default_rng(seed)
    return points @ Rotation.random(random_state=seed).as_matrix().T + rng.uniform(-500, 500, 3)


@WAYS
@SOME
@given(cells=CELLS, spacing=SPACINGS, nearest=st.integers(0, 30), reach=st.integers(0, 6), seed=st.integers(0, 99))
def test_a_lattice_full_of_ties_gives_the_same_edges_however_it_lies(
    few: int, cells: list[tuple[int, int, int]], spacing: float, nearest: int, reach: int, seed: int
) -> None:
    points = np.array(cells, np.float64) * spacing
    radius = spacing * np.sqrt(reach) if reach else None  # exactly as far as some are
    expected = by_brute_force(points, points, nearest, radius, same=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "FEW", few)
        np.testing.assert_array_equal(within(points, nearest, radius), expected)
        np.testing.assert_array_equal(within(turned(points, seed), nearest, radius), expected)


@WAYS
@SOME
@given(cells=CELLS, others=CELLS, nearest=st.integers(0, 9), reach=st.integers(0, 6), seed=st.integers(0, 99))
def test_neighbours_in_another_set_are_those_of_brute_force(
    few: int,
    cells: list[tuple[int, int, int]],
    others: list[tuple[int, int, int]],
    nearest: int,
    reach: int,
    seed: int,
) -> None:
    points, targets = np.array(cells, np.float64), np.array(others, np.float64)
    radius = np.sqrt(reach) if reach else None
    expected = by_brute_force(points, targets, nearest, radius, same=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "FEW", few)
        np.testing.assert_array_equal(between(points, targets, nearest, radius), expected)
        both = turned(np.concatenate([points, targets]), seed)
        moved, elsewhere = both[: len(points)], both[len(points) :]
        np.testing.assert_array_equal(between(moved, elsewhere, nearest, radius), expected)


def test_who_has_fewer_others_than_asked_for_gets_all_of_them() -> None:
    points = np.eye(3)
    assert within(points, 20).tolist() == [[1, 2, 0, 2, 0, 1], [0, 0, 1, 1, 2, 2]]
    assert within(points[:1], 20).shape == (2, 0)
    assert between(points[:2], points, 20).tolist() == [[0, 1] * 3, [0, 0, 1, 1, 2, 2]]
    assert between(points[:0], points, 20, 3.0).shape == (2, 0)


@WAYS
def test_a_step_beyond_the_radius_is_beyond_it(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "FEW", few)
    points = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0.001]])  # the square of the last one's distance is 1.000001
    assert within(points, radius=1.0).tolist() == [[1, 0], [0, 1]]


@WAYS
@SOME
@given(CELLS, st.integers(2, 4), st.integers(1, 9), st.randoms(use_true_random=False))
def test_several_points_at_one_place_are_each_others_neighbours_and_never_their_own(
    few: int, cells: list[tuple[int, int, int]], times: int, nearest: int, random: Random
) -> None:
    again = cells * times
    random.shuffle(again)
    points = np.array(again, np.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "FEW", few)
        np.testing.assert_array_equal(within(points, nearest), by_brute_force(points, points, nearest, None, same=True))


@WAYS
@pytest.mark.parametrize("far", [1e3, 1e5])
def test_one_point_far_away_does_not_blur_the_others(few: int, far: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "FEW", few)
    points = np.random.default_rng(2).integers(-20_000, 20_000, (80, 3)) / 1000
    points[7] = far
    np.testing.assert_array_equal(within(points, 9, 6.5), by_brute_force(points, points, 9, 6.5, same=True))
    others = points[::-1] + 0.5
    np.testing.assert_array_equal(between(others, points, 0, 9.0), by_brute_force(others, points, 0, 9.0, same=False))


def test_the_closest_two_are_found_within_a_set_and_between_two() -> None:
    points = np.array([[0, 0, 0], [5, 0, 0], [5, 3, 0]], np.float64)
    assert closest(points) == 3
    assert closest(points[:2], points[2:]) == 3
    assert closest(points[:1]) == float("inf")


@SOME
@given(CELLS, st.lists(st.integers(0, 59), max_size=8), st.integers(0, 99))
def test_points_at_one_place_are_found_and_no_others(
    cells: list[tuple[int, int, int]], again: list[int], seed: int
) -> None:
    copies = sorted({one for one in again if one < len(cells)})
    points = np.array(cells + [cells[one] for one in copies], np.float64)
    points[len(cells) :, 1] += 0.01  # exactly as near as still counts
    expected = [[one, len(cells) + number] for number, one in enumerate(copies)]
    assert coincident(points).tolist() == expected
    assert coincident(turned(points, seed)).tolist() == expected
    points[len(cells) :, 1] += 0.001
    assert coincident(points).tolist() == []
