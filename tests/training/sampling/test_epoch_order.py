"""How a rank's share of a step is cut into micro-batches."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.training.sampling.epoch_order import (
    EpochOrder,
    MicroBatchLimits,
    SamplerSettings,
    ShareSizes,
    cut_micro_batches,
)

SIZES_DK = np.array([[50.0, 30, 80, 20, 70, 60], [40.0, 10, 90, 30, 20, 60]])
SHARE = ShareSizes(SIZES_DK, (SIZES_DK, SIZES_DK[:1]))  # one budget is for the product, one for the first size


@pytest.mark.parametrize(("batch", "drop_last", "steps"), [(24, False, 2), (20, False, 3), (20, True, 2)])
def test_only_what_is_left_over_makes_a_short_step(batch: int, drop_last: bool, steps: int) -> None:
    settings = SamplerSettings(batch=batch, drop_last=drop_last)
    assert EpochOrder([np.arange(48)], settings).steps == steps


def test_without_budgets_and_limits_all_concatenated_items_are_one_micro_batch() -> None:
    alone = ShareSizes(SIZES_DK, ())
    assert [part.tolist() for part in cut_micro_batches(alone, MicroBatchLimits())] == [[0, 1, 2, 3, 4, 5]]
    assert sorted(map(len, cut_micro_batches(alone, MicroBatchLimits(most=4)))) == [3, 3]


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
    with pytest.raises(ValueError, match="budget"):
        cut_micro_batches(SHARE, MicroBatchLimits((4.0, 3000.0), most))
