"""The rule for memory that ends: smaller pieces, then the remedies for a single item, then without the item."""

from __future__ import annotations

import pytest

from pipeline.memory.runtime.governor import Cut, Governor
from pipeline.memory.runtime.recovery import each_that_fits, until_it_fits

LADDER = ("checkpointing", "offload")


def spans(cuts: list[Cut]) -> list[tuple[int, int, int]]:
    return [(cut.start, cut.stop, cut.rung) for cut in cuts]


def test_a_failed_piece_is_halved_and_so_are_those_that_cost_as_much_until_the_step_ends() -> None:
    governor = Governor(budget=100)
    costs = [20, 20, 20, 20]
    assert spans(governor.cuts(costs)) == [(0, 4, 0)]
    assert governor.failed(costs)
    assert spans(governor.cuts(costs)) == [(0, 2, 0), (2, 4, 0)]
    assert spans(governor.cuts([30, 30])) == [(0, 2, 0)], "it costs less than what failed"
    assert governor.failed(costs[:2])
    assert spans(governor.cuts(costs)) == [(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 4, 0)]
    want = governor.after_step()
    governor.adopt(want.budget)
    assert spans(governor.cuts(costs)) == [(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 4, 0)]


def test_a_single_item_climbs_the_ladder_and_its_like_start_on_its_rung() -> None:
    governor = Governor(budget=100, ladder=LADDER)
    assert governor.failed([90])
    assert spans(governor.cuts([95, 50])) == [(0, 1, 1), (1, 2, 0)]
    assert governor.failed([90], 1)
    assert not governor.failed([90], 2), "nothing is left"
    assert spans(governor.cuts([90])) == [(0, 1, 2)]
    assert governor.after_step().budget == 100, "an item alone says nothing of the budget"


@pytest.mark.parametrize("costs", [[0, 0, 0], [1, 1], [0, 5], [7, 7, 7, 7, 7]])
@pytest.mark.parametrize("padded", [False, True])
def test_any_costs_end_in_single_items(costs: list[int], padded: bool) -> None:
    governor = Governor(padded=padded)
    for _ in range(10):
        largest = max(governor.cuts(costs), key=lambda cut: cut.stop - cut.start)
        if largest.stop - largest.start == 1:
            return
        assert governor.failed(costs[largest.start : largest.stop])
    pytest.fail("it is cut for ever")


def test_halving_thousands_of_items_takes_no_time() -> None:
    governor, costs = Governor(), [3, 1, 4, 1, 5] * 40_000
    for _ in range(4):
        first = governor.cuts(costs)[0]
        governor.failed(costs[first.start : first.stop])
    assert len(governor.cuts(costs)) == 16


def test_what_leaves_nothing_behind_runs_again_by_itself() -> None:
    ran, tried = [], []

    def run(cut: Cut) -> None:
        tried.append((cut.start, cut.stop, cut.rung))
        if cut.stop - cut.start > 2 or cut.stop == 6 or (cut.start == 0 and cut.rung < 1):
            raise MemoryError("full")
        ran.append((cut.start, cut.stop, cut.rung))

    governor = Governor(ladder=("cpu",))
    done = list(each_that_fits(governor, [9, 1, 1, 1, 1, 9], run, device="cpu"))
    assert [(cut.start, cut.stop, error) for cut, error in done] == [
        (0, 1, ""),
        (1, 3, ""),
        (3, 5, ""),
        (5, 6, "full"),
    ]
    assert ran == [(0, 1, 1), (1, 3, 0), (3, 5, 0)]
    assert tried.count((1, 3, 0)) == 1, "what fits runs once"


def test_a_step_runs_again_until_it_fits_on_all_ranks() -> None:
    reports = iter([[True, False], [False, True], [True, True]])
    rewound = []
    assert until_it_fits(lambda: next(reports), fits=all, rewind=lambda: rewound.append(1)) == [True, True]
    assert len(rewound) == 2


def test_other_errors_pass() -> None:
    def run(_: Cut) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(each_that_fits(Governor(), [1], run, device="cpu"))
