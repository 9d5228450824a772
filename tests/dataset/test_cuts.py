"""How a list of items is cut into tasks: each item once, in order, and no task with more than a process may hold."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.dataset import worklist
from pipeline.dataset.worklist import cut_lines

MOST = 7
COSTS = st.lists(st.integers(1, 1000) | st.just(1), max_size=80)
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])  # it is set once


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worklist, "MOST_PER_TASK", MOST)


def cut(costs: list[int], items_per_task: int | str, tasks: int) -> tuple[worklist.Shard, ...]:
    """Cut a list whose lines have ten bytes each."""
    return cut_lines(range(0, 10 * len(costs) + 10, 10), np.array(costs, np.int64), items_per_task, tasks)


@pytest.mark.usefixtures("few")
@relaxed
@given(COSTS, st.just("auto") | st.integers(1, 20), st.integers(1, 9))
def test_every_item_is_in_one_task_in_order_and_none_has_too_many(
    costs: list[int], items_per_task: int | str, tasks: int
) -> None:
    shards = cut(costs, items_per_task, tasks)
    ends = [0, *(shard.end for shard in shards)]
    assert [(shard.start, shard.end) for shard in shards] == list(pairwise(ends))
    assert ends[-1] == 10 * len(costs)
    most = MOST if items_per_task == "auto" else int(items_per_task)
    for shard in shards:
        assert 0 < shard.items == (shard.end - shard.start) // 10 <= most
        assert shard.largest == max(costs[shard.start // 10 : shard.end // 10])


@pytest.mark.usefixtures("few")
def test_what_a_task_has_too_many_of_is_cut_evenly() -> None:
    assert [shard.items for shard in cut([1] * 20, "auto", 1)] == [6, 7, 7]
    assert [shard.items for shard in cut([14, *[1] * 14], "auto", 2)] == [1, 7, 7], "the others stay as cost cuts them"


def test_a_list_of_a_usual_length_is_cut_by_cost_alone() -> None:
    assert [shard.items for shard in cut([1] * 9 + [9], "auto", 2)] == [9, 1]
