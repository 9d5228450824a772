"""Division into splits, as properties: nothing is cut, fractions are met, the order of items does not matter."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.dataset.item_splits import (
    ChainLinks,
    distribute,
    find_components,
    find_leaking,
    shared_by_splits,
    text_digest,
    whole_numbers,
)

FRACTIONS = (0.8, 0.1, 0.1)
# Of each item the clusters of its two chains: few clusters make large components, many make small ones.
PAIRS = st.integers(2, 60).flatmap(lambda n: st.lists(st.tuples(st.integers(0, n), st.integers(0, n)), max_size=80))


def links_of(pairs: list[tuple[int, int]]) -> ChainLinks:
    links = ChainLinks()
    for item, clusters in enumerate(pairs):
        for partner, cluster in enumerate(clusters):
            links.add(item, partner, text_digest(f"cluster {cluster}"))
    return links


def plainly(items: int, links: list[ChainLinks]) -> list[int]:
    """Find components by a walk through the graph of items and what they have."""
    having, of = defaultdict(set), defaultdict(set)
    for level, each in enumerate(links):
        for item, token in zip(each.items, each.tokens, strict=True):
            having[level, token].add(item)
            of[item].add((level, token))
    lowest = [-1] * items
    for first in range(items):
        reached = [first] if lowest[first] < 0 else []
        while reached:
            item = reached.pop()
            if lowest[item] < 0:
                lowest[item] = first
                reached += [other for token in of[item] for other in having[token]]
    return lowest


def divided(pairs: list[tuple[int, int]], sizes: list[int], fractions: tuple[float, ...], seed: int) -> list[int]:
    """Divide items that are called by their numbers."""
    draws = np.array([text_digest(str(item), seed) for item in range(len(pairs))], np.uint64)
    component_N = find_components(len(pairs), [links_of(pairs)])
    return distribute(component_N, np.array(sizes, np.int64), draws, fractions).tolist()


@given(pairs=PAIRS, others=PAIRS)
@settings(max_examples=150, deadline=None)
def test_components_are_those_of_a_plain_walk(pairs: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    levels = [links_of(pairs), links_of(others[: len(pairs)])]
    assert find_components(len(pairs), levels).tolist() == plainly(len(pairs), levels)


@pytest.mark.parametrize("order", ["along", "back", "mixed"])
def test_a_chain_of_a_thousand_items_is_one_component(order: str) -> None:
    pairs = [(number, number + 1) for number in range(1000)]
    rng = np.random.default_rng(1)
    chosen = {"along": pairs, "back": pairs[::-1], "mixed": [pairs[at] for at in rng.permutation(1000)]}[order]
    assert find_components(1000, [links_of(chosen)]).tolist() == [0] * 1000


@given(pairs=PAIRS, seed=st.integers(0, 5), data=st.data())
@settings(max_examples=150, deadline=None)
def test_no_component_is_cut_and_every_share_is_within_the_largest_of_it(
    pairs: list[tuple[int, int]], seed: int, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 500), min_size=len(pairs), max_size=len(pairs)))
    fractions = data.draw(st.sampled_from([FRACTIONS, (0.5, 0.5), (0.2,) * 5]))
    splits = divided(pairs, sizes, fractions, seed)
    where = defaultdict(set)
    for clusters, split in zip(pairs, splits, strict=True):
        for cluster in clusters:
            where[cluster].add(split)
    assert all(len(found) == 1 for found in where.values())
    components = np.bincount(find_components(len(pairs), [links_of(pairs)])) if pairs else np.array([0])
    wanted = whole_numbers(len(pairs), fractions)
    got = np.bincount(splits, minlength=len(fractions)) if pairs else np.zeros(len(fractions))
    assert max(got - wanted) <= max(0, components.max() - 1)


@given(pairs=PAIRS, seed=st.integers(0, 5), data=st.data())
@settings(max_examples=100, deadline=None)
def test_the_order_of_the_items_is_irrelevant(pairs: list[tuple[int, int]], seed: int, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(pairs))))
    size_N = np.array([10 + 7 * (item % 13) for item in range(len(pairs))], np.int64)
    draw_N = np.array([text_digest(str(item), seed) for item in range(len(pairs))], np.uint64)
    plain = distribute(find_components(len(pairs), [links_of(pairs)]), size_N, draw_N, FRACTIONS)
    mixed = [pairs[item] for item in order]
    at = np.array(order, np.int64)
    other = distribute(find_components(len(pairs), [links_of(mixed)]), size_N[at], draw_N[at], FRACTIONS)
    assert other.tolist() == plain[at].tolist()


def test_single_items_meet_the_fractions_exactly_and_every_split_has_items_of_all_sizes() -> None:
    pairs = [(2 * item, 2 * item + 1) for item in range(1000)]
    sizes = [100 + item for item in range(1000)]
    splits = np.array(divided(pairs, sizes, FRACTIONS, seed=3))
    assert np.bincount(splits).tolist() == [800, 100, 100]
    for split in range(3):
        quarter = np.histogram(np.array(sizes)[splits == split], bins=4, range=(100, 1100))[0]
        assert max(quarter) - min(quarter) <= 2


@given(sizes=st.lists(st.integers(1, 500), max_size=30), seed=st.integers(0, 5))
def test_few_single_items_meet_the_fractions_exactly_too(sizes: list[int], seed: int) -> None:
    splits = divided([(2 * item, 2 * item + 1) for item in range(len(sizes))], sizes, FRACTIONS, seed)
    assert np.bincount(splits, minlength=3).tolist() == whole_numbers(len(sizes), FRACTIONS)


def test_a_division_is_what_it_was() -> None:
    """A seed is written down, and must give the same splits with every later version."""
    rng = np.random.default_rng(11)
    pairs = [
        (int(one), int(other))
        for one, other in zip(rng.integers(0, 900, 1200), rng.integers(0, 9000, 1200), strict=True)
    ]
    splits = divided(pairs, rng.integers(20, 900, 1200).tolist(), (0.7, 0.2, 0.09, 0.01), seed=4)
    assert np.bincount(splits).tolist() == [840, 240, 108, 12]
    assert text_digest("".join(map(str, splits))) == 4968404186693908298


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=40))
@settings(max_examples=150, deadline=None)
def test_what_leaks_is_what_a_plain_look_at_each_thing_finds(marks: list[tuple[int, int]]) -> None:
    splits = defaultdict(set)
    for thing, split in marks:
        splits[thing].add(split)
    things = sorted(thing for thing, found in splits.items() if len(found) > 1)
    wanted = [
        (things.index(thing), split, at) for thing in things for at, (own, split) in enumerate(marks) if own == thing
    ]
    digests = np.array([thing for thing, _ in marks], np.uint64)
    found = find_leaking(digests, np.array([split for _, split in marks], np.uint16), np.arange(len(marks)))
    assert list(zip(found.group_M.tolist(), found.split_M.tolist(), found.ordinal_M.tolist(), strict=True)) == wanted


def test_a_component_larger_than_small_splits_goes_where_it_fits() -> None:
    pairs = [(0, -1 - item) for item in range(500)] + [(1 + item, 10_000 + item) for item in range(500)]
    splits = divided(pairs, [100] * 1000, FRACTIONS, seed=0)
    assert set(splits[:500]) == {0}
    assert np.bincount(splits).tolist() == [800, 100, 100]


def test_what_splits_share_is_counted_with_one_partner_and_with_both() -> None:
    links = links_of([(1, 2), (2, 1), (1, 3), (4, 5), (4, 4)])
    split_N, names = np.array([1, 2, 2, 1, 3]), ("", "train", "test", "val")
    one = {(found.splits, found.groups, found.items) for found in shared_by_splits("x", "one", links, split_N, names)}
    assert one == {(("train", "test"), 2, (1, 2)), (("train", "val"), 1, (1, 1))}
    both = list(shared_by_splits("x", "both", links.of_both(), split_N, names))
    assert [(found.splits, found.groups, found.items) for found in both] == [(("train", "test"), 1, (1, 1))]
    for level, items in ((links, {0, 1, 2, 3, 4}), (links.of_both(), {0, 1})):
        leaking = find_leaking(level.token_L, split_N[level.item_L], level.item_L)
        assert set(leaking.ordinal_M.tolist()) == items
    unnamed = ("", "", "test", "val")  # what is in no split leaks nowhere
    assert list(shared_by_splits("x", "one", links, split_N, unnamed)) == []


def test_what_is_left_of_a_total_goes_to_the_largest_rests_and_of_equal_ones_to_the_first() -> None:
    assert whole_numbers(10, (0.58, 0.42)) == [6, 4]
    assert whole_numbers(10, (0.42, 0.58)) == [4, 6]
    assert whole_numbers(2, (0.25, 0.25, 0.5)) == [1, 0, 1]


def test_what_fits_nowhere_goes_where_the_largest_part_is_lacking() -> None:
    pairs = [(item // 6, -1 - item) for item in range(12)]  # two components of six
    assert sorted(np.bincount(divided(pairs, [100] * 12, (0.4, 0.3, 0.3), seed=0), minlength=3).tolist()) == [0, 6, 6]
    largest_first = divided(pairs, [100] * 12, (0.1, 0.45, 0.45), seed=0)
    assert np.bincount(largest_first, minlength=3).tolist() == [0, 6, 6]


@given(total=st.integers(0, 10_000), parts=st.lists(st.integers(1, 100), min_size=1, max_size=9))
def test_whole_numbers_add_up(total: int, parts: list[int]) -> None:
    fractions = [part / sum(parts) for part in parts]
    counts = whole_numbers(total, fractions)
    assert sum(counts) == total
    assert all(abs(count - total * fraction) < 1 + 1e-6 for count, fraction in zip(counts, fractions, strict=True))
