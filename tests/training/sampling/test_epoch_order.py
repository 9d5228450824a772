"""What a seed and given sizes lead to is what it was: a run that goes on under a later version sees the same steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

from pipeline.training.sampling import epoch_order
from pipeline.training.sampling.epoch_order import (
    EpochOrder,
    MicroBatchLimits,
    SamplerSettings,
    ShareSizes,
    cut_micro_batches,
    deal_to_ranks,
)

RNG_SEED = 7


def digest(arrays: Iterable[np.ndarray]) -> str:
    """Return what tells lists of indices apart."""
    return sha256(repr([array.tolist() for array in arrays]).encode()).hexdigest()[:16]


def whole(count: int, low: int = 1, high: int = 400, seed: int = RNG_SEED) -> np.ndarray:
    """Return whole numbers, drawn alike on every machine: sums of them are exact as floats, too."""
    return np.random.PCG64(seed + count).random_raw(count).astype(np.uint64) % np.uint64(high - low) + np.uint64(low)


def share(*counts: int) -> ShareSizes:
    """Return a share of items with two padded sizes; one budget is for their product, one for the first."""
    sizes_DK = np.stack([whole(count, seed=number).astype(float) for number, count in enumerate(counts)])
    return ShareSizes(sizes_DK, (sizes_DK, sizes_DK[:1]))


def test_an_order_says_by_its_version_that_it_is_another() -> None:
    assert epoch_order.ORDER_VERSION == 1, "raise it whenever a digest below changes, and say so in the changelog"


SETTINGS = SamplerSettings(batch=24, seed=5, window=100)


@pytest.mark.parametrize(
    ("settings", "was"),
    [
        (SETTINGS, "bfabc29ed06433bb"),
        (replace(SETTINGS, by=("nodes", "edges")), "9a2ceace349de4ff"),
        (replace(SETTINGS, batch=10, brick=3), "14765614d0f60ae3"),
        (replace(SETTINGS, shuffle=False, drop_last=True), "bfc379638bae0bda"),
    ],
)
def test_epochs_are_what_they_were_in_whatever_order_they_are_asked_for(settings: SamplerSettings, was: str) -> None:
    sizes_DN = [whole(1003, seed=number).astype(np.int64) for number in range(len(settings.by))]
    order = EpochOrder(sizes_DN, settings)
    asked = [(epoch, step) for epoch in (0, 1, 0) for step in (*range(order.steps), 0, order.steps - 1)]
    found = [order.items(epoch, step) for epoch, step in asked]
    assert all(
        np.array_equal(one, EpochOrder(sizes_DN, settings).items(*at)) for one, at in zip(found, asked, strict=True)
    )
    assert digest(found) == was


@pytest.mark.parametrize(
    ("count", "ranks", "was"),
    [
        (1, 2, "4a4d420c11624c4b"),
        (5, 4, "bf5d02bd1b7eb7d4"),
        (24, 1, "bdd936259171f48c"),
        (24, 2, "7a8e0cb64fb753b8"),
        (24, 7, "2a237cf51edeeabb"),
        (64, 8, "e3de815cf71f4b9c"),
        (512, 3, "27a19194ce5adf47"),
        (513, 3, "593762ea8d56b5f3"),
    ],
)
def test_what_each_rank_gets_is_what_it_was(count: int, ranks: int, was: str) -> None:
    found = [deal_to_ranks(whole(count, seed=seed).astype(float) ** 2, ranks) for seed in range(20)]
    assert digest(part for parts in found for part in parts) == was


@pytest.mark.parametrize("count", [512, 513])
def test_what_dealing_leaves_uneven_is_swapped_among_up_to_512_items(count: int) -> None:
    costs = np.zeros(count)
    costs[:7] = 5, 5, 4, 4, 3, 3, 3  # dealing ends with 11, and 9 each is possible
    assert [costs[part].sum() for part in deal_to_ranks(costs, 3)].count(11.0) == (count > 512)


def test_swaps_between_ranks_end_after_four_for_each() -> None:
    """So that a share takes bounded time, and as many as ever, so that an order is what it was."""
    costs = (np.array([300, 9, 56, 23, 255, 269, 382, 11, 36, 19, 21, 34, 351]) ** 3).astype(float)
    higher = max(costs[part].sum() for part in deal_to_ranks(costs, 2))
    assert higher == 82_743_697  # after eight swaps; six would leave 82,751,887 and a ninth 82,742,968


@pytest.mark.parametrize(("batch", "drop_last", "steps"), [(24, False, 2), (20, False, 3), (20, True, 2)])
def test_only_what_is_left_over_makes_a_short_step(batch: int, drop_last: bool, steps: int) -> None:
    settings = SamplerSettings(batch=batch, drop_last=drop_last)
    assert EpochOrder([np.arange(48)], settings).steps == steps


@pytest.mark.parametrize(
    ("count", "limits", "was"),
    [
        (40, MicroBatchLimits((200_000.0, 3000.0), padding=1.03), "88af6ac7c3c6b107"),
        (40, MicroBatchLimits((400_000.0, 4000.0), most=5, padding=1.3), "e73ce9bdc4d1ae2a"),
        (40, MicroBatchLimits((400_000.0, 4000.0)), "3369743134e85030"),
        (40, MicroBatchLimits((400_000.0, 4000.0), most=3), "445d3db8f3f69600"),
        (300, MicroBatchLimits((800_000.0, 8000.0), padding=1.1), "b4e56a3109e93e13"),
        (1, MicroBatchLimits((200_000.0, 3000.0), most=1), "db407f11d7ede59a"),
    ],
)
def test_how_a_share_is_cut_is_what_it_was(count: int, limits: MicroBatchLimits, was: str) -> None:
    assert digest(cut_micro_batches(share(count, count), limits)) == was


def test_without_budgets_and_limits_all_concatenated_items_are_one_micro_batch() -> None:
    alone = ShareSizes(share(6).padded_DK, ())
    assert [part.tolist() for part in cut_micro_batches(alone, MicroBatchLimits())] == [[0, 1, 2, 3, 4, 5]]
    assert sorted(map(len, cut_micro_batches(alone, MicroBatchLimits(most=4)))) == [3, 3]


@pytest.mark.parametrize("most", [None, 3])
def test_concatenated_items_keep_within_each_budget_and_their_number(most: int | None) -> None:
    for seed in range(40):
        sizes_DK = np.stack([whole(12, 1, 100, seed=3 * seed + number).astype(float) for number in range(2)])
        budgets = tuple(1.3 * sizes_DK[row].max() for row in range(2))
        parts = cut_micro_batches(ShareSizes(sizes_DK, (sizes_DK[:1], sizes_DK[1:])), MicroBatchLimits(budgets, most))
        assert sorted(np.concatenate(parts).tolist()) == [*range(12)]
        assert all(len(part) <= (most or 12) for part in parts)
        assert all((sizes_DK[:, part].sum(axis=1) <= budgets).all() for part in parts)


def test_as_many_as_may_be_come_together_where_one_outweighs_all_others() -> None:
    sizes_DK = np.array([[90.0, *[1.0] * 8]])
    parts = cut_micro_batches(ShareSizes(sizes_DK, (sizes_DK,)), MicroBatchLimits((100.0,), most=5))
    assert max(map(len, parts)) <= 5
    assert len(parts) == 3  # two would do, but dealt by cost the light ones come together


def test_padding_is_counted_from_the_first_item_on() -> None:
    sizes_DK = np.array([[2.0, 1.0]])
    assert len(cut_micro_batches(ShareSizes(sizes_DK, ()), MicroBatchLimits(padding=1.0))) == 2
    assert len(cut_micro_batches(ShareSizes(sizes_DK, ()), MicroBatchLimits(padding=4 / 3))) == 1


@pytest.mark.parametrize(("sizes", "parts"), [((0, 0, 0), 1), ((5, 0, 0), 2)])
def test_items_of_no_size_are_one_micro_batch(sizes: tuple[int, ...], parts: int) -> None:
    found = cut_micro_batches(ShareSizes(np.array([sizes], float), ()), MicroBatchLimits(padding=1.0))
    assert len(found) == parts


@pytest.mark.parametrize("most", [None, 2])
def test_an_item_that_exceeds_a_sum_alone_is_refused(most: int | None) -> None:
    with pytest.raises(ValueError, match="exceeds the budget of a micro-batch alone"):
        cut_micro_batches(share(6, 6), MicroBatchLimits((4.0, 3000.0), most))
