"""What small sizes tell of large ones: laws, over made truths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.memory.estimating.small_steps import FLOOR, extrapolate, projected
from pipeline.memory.footprint import Tape

MIB = 1 << 20
WANTED = {"items": 64, "nodes": 6400, "edges": 192_000}
FRACTIONS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4)
RAY = [{name: int(value * fraction) for name, value in WANTED.items()} for fraction in FRACTIONS]
slopes = st.integers(0, 50_000)
ratios = st.sampled_from((2, 4, 8, 16))


def times(sizes: dict[str, int], factor: int) -> dict[str, int]:
    return {name: value * factor for name, value in sizes.items()}


@given(st.integers(0, 1 << 30), slopes, slopes, st.sampled_from((0, 1, 500)), ratios)
def test_an_affine_or_quadratic_truth_is_found_again_at_larger_sizes(
    constant: int, per_node: int, per_edge: int, per_pair: int, ratio: int
) -> None:
    def truth(sizes: dict[str, int]) -> int:
        drivers = per_node * sizes["nodes"] + per_edge * sizes["edges"] + per_pair * sizes["nodes"] ** 2
        return MIB + constant + drivers

    wanted = times(RAY[-1], ratio)
    thought = extrapolate([(sizes, truth(sizes)) for sizes in RAY], wanted)
    assert thought.likely == pytest.approx(truth(wanted), rel=0.02)
    assert truth(wanted) <= thought.high <= 1.11 * truth(wanted)
    assert thought.ratio == ratio


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(1, 900)), min_size=8, max_size=12, unique=True), slopes)
def test_drivers_that_vary_apart_are_told_apart(sizes: list[tuple[int, int]], slope: int) -> None:
    def truth(nodes: int, pairs: int) -> int:
        return MIB + 1000 * nodes + slope * pairs

    if len({nodes for nodes, _ in sizes}) < 6 or len({pairs for _, pairs in sizes}) < 6:
        return
    points = [({"nodes": nodes, "pairs": pairs}, truth(nodes, pairs)) for nodes, pairs in sizes]
    thought = extrapolate(points, {"nodes": 3000, "pairs": 5000})
    assert thought.likely == pytest.approx(truth(3000, 5000), rel=0.01)


@pytest.mark.parametrize("ratio", [4, 8])
@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_noise_is_covered_in_nearly_all_cases(noise: float, ratio: int) -> None:
    draw, covered, wanted = np.random.default_rng(7), 0, times(RAY[-1], ratio)
    for _ in range(100):
        constant, slope = draw.integers(MIB, 100 * MIB), draw.integers(1, 50_000)
        points = [(sizes, int((constant + slope * sizes["nodes"]) * draw.normal(1, noise))) for sizes in RAY]
        covered += extrapolate(points, wanted).high >= constant + slope * wanted["nodes"]
    assert covered >= 95


@given(st.integers(0, 1 << 20), st.integers(1, 50_000), st.floats(0.02, 0.1875), ratios)
def test_the_steeper_of_two_regimes_is_followed_once_it_shows(
    constant: int, slope: int, begins: float, ratio: int
) -> None:
    """The peak is the optimizer's until a size where backward's passes it: the largest point at least is beyond."""

    def truth(sizes: dict[str, int]) -> int:
        return max(constant + int(slope * WANTED["nodes"] * begins), constant + slope * sizes["nodes"])

    wanted = times(RAY[-1], ratio)
    assert truth(wanted) <= extrapolate([(sizes, truth(sizes)) for sizes in RAY], wanted).high


@pytest.mark.parametrize(("ratio", "times"), [(1, 1), (4, 3), (1024, 11)])
def test_what_does_not_grow_is_planned_with_the_least_margin_which_grows_with_the_distance(
    ratio: int, times: int
) -> None:
    thought = extrapolate([(sizes, 100 * MIB) for sizes in RAY], dict(RAY[-1], nodes=ratio * RAY[-1]["nodes"]))
    assert (thought.likely, thought.error) == (100 * MIB, 0.0)
    assert thought.margin == pytest.approx(times * FLOOR)


@pytest.mark.parametrize(
    "points", [RAY[:2], [RAY[0]] * 3, [dict(sizes, items=1) for sizes in RAY]], ids=["two", "one thrice", "one driver"]
)
def test_sizes_that_are_few_or_alike_are_no_ground_for_a_larger_one(points: list[dict[str, int]]) -> None:
    with pytest.raises(ValueError, match="too few or too similar"):
        extrapolate([(sizes, place) for place, sizes in enumerate(points)], WANTED)


def step_of(nodes: int) -> Tape:
    """Activations, then a gradient while they go: small sizes have their peak at the end, large ones in the middle."""
    kept, constant = 100 * nodes, 64 * 3000
    return Tape(np.array([0, 1, 2, 2, 0, -1, 1]), np.array([kept, kept, 8 * nodes, -8 * nodes, -kept, constant, -kept]))


def test_a_regime_that_no_small_size_enters_is_found_block_by_block() -> None:
    recorded = [({"nodes": nodes}, step_of(nodes)) for nodes in (10, 20, 40, 80)]
    wanted = {"nodes": 6400}
    assert all(tape.peak_bytes == 64 * 3000 + 100 * sizes["nodes"] for sizes, tape in recorded)
    found = projected(recorded, wanted)
    assert found is not None
    tape, thought = found
    np.testing.assert_array_equal(tape.bytes_E, step_of(6400).bytes_E)
    assert thought.likely == tape.peak_bytes == 208 * 6400
    assert thought.error == 0


def test_releases_are_of_what_was_allocated_although_blocks_are_rounded() -> None:
    counts = {10: 7, 20: 13, 40: 29, 80: 55}  # a mask: about two in three
    tapes = [({"nodes": nodes}, Tape(np.array([0, 0]), np.array([4 * n, -4 * n]))) for nodes, n in counts.items()]
    found = projected(tapes, {"nodes": 640})
    assert found is not None
    tape, thought = found
    assert tape.left_bytes == 0
    assert thought.likely == pytest.approx(4 * 640 * 0.69, rel=0.05)
    assert thought.high > thought.likely * (1 + FLOOR)
