"""What to ask for, from what was measured: examples that people meet, and laws."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pipeline.memory.history import (
    FLOOR_BYTES,
    NEWEST,
    STEP_BYTES,
    Measured,
    Suggestion,
    SuggestionBounds,
    pace,
    planned,
    suggest,
)
from tests.memory.history.tasks import GIB, MIB, past


def ask(tasks: list[Measured], *, planned_bytes: int = GIB, bounds: SuggestionBounds | None = None) -> Suggestion:
    suggestion = suggest(tasks, bounds or SuggestionBounds(), planned_bytes=planned_bytes)
    assert suggestion is not None
    return suggestion


def test_many_tasks_ask_for_their_largest_and_a_fifth_more() -> None:
    tasks = [past(task, peak_bytes=(400 + task) * MIB) for task in range(41)]
    assert (ask(tasks).mem_bytes, ask(tasks).tasks) == (576 * MIB, 41)


def test_one_freak_among_two_hundred_does_not_make_all_ask_for_more() -> None:
    tasks = [past(task) for task in range(199)]
    assert ask([*tasks, past(199, peak_bytes=50 * GIB)]).mem_bytes == ask(tasks).mem_bytes


def test_few_tasks_may_ask_for_more_than_planned_but_not_for_less() -> None:
    assert ask([past(task, peak_bytes=2 * GIB) for task in range(2)]).mem_bytes == 2496 * MIB
    less = ask([past(task) for task in range(4)])
    assert (less.mem_bytes, less.tasks) == (GIB, 4)
    assert ask([past(task) for task in range(5)]).mem_bytes == 640 * MIB


def test_tasks_too_short_for_a_sampler_do_not_go_below_the_plan() -> None:
    assert ask([past(task, elapsed_s=5.0) for task in range(50)]).mem_bytes == GIB
    assert ask([past(task, elapsed_s=5.0, peak_bytes=2 * GIB) for task in range(50)]).mem_bytes > 2 * GIB


def test_a_kill_counts_with_its_limit_although_its_sampled_peak_is_lower() -> None:
    kills = [past(task, killed=True, asked_bytes=200 * MIB, peak_bytes=119 * MIB) for task in range(2)]
    suggestion = ask(kills, planned_bytes=200 * MIB)
    assert (suggestion.mem_bytes, suggestion.tasks) == (320 * MIB, 2)


def test_a_kill_whose_limit_nobody_knows_counts_with_its_peak() -> None:
    kill = past(killed=True, asked_bytes=None, peak_bytes=2 * GIB)
    assert ask([kill]).mem_bytes == 3 * GIB
    assert suggest([replace(kill, peak_bytes=None)], SuggestionBounds(), planned_bytes=GIB) is None


def test_a_kill_that_a_later_attempt_outlived_is_one_need_among_others() -> None:
    others = [past(task, peak_bytes=300 * MIB) for task in range(1, 6)]
    kill = past(killed=True, asked_bytes=600 * MIB, peak_bytes=400 * MIB)
    assert ask([*others, kill]).mem_bytes == 960 * MIB
    outlived = past(attempt=2, at=2000.0, asked_bytes=900 * MIB, peak_bytes=650 * MIB)
    assert ask([*others, kill, outlived]).mem_bytes == 832 * MIB
    sampled_low = replace(outlived, peak_bytes=310 * MIB)  # it needed 600 MiB at least, whatever was sampled
    assert ask([*others, kill, sampled_low]).mem_bytes == 768 * MIB


def test_a_kill_is_not_settled_by_less_memory_nor_by_a_smaller_task_nor_by_an_unknown_peak() -> None:
    kill = past(killed=True, asked_bytes=2 * GIB, size=100)
    after = past(attempt=2, at=2000.0, asked_bytes=4 * GIB, size=100)
    for settles in (after, replace(after, task=7, attempt=1), replace(after, asked_bytes=None)):
        assert ask([kill, settles]).mem_bytes == 2496 * MIB
    smaller = replace(after, task=7, attempt=1, size=99)
    for fails in (replace(after, asked_bytes=2 * GIB - 1), smaller, replace(after, peak_bytes=None)):
        assert ask([kill, fails]).mem_bytes == 3 * GIB
    assert ask([kill, replace(smaller, size=100, at=1.0)]).mem_bytes == 3 * GIB  # it ended before
    assert ask([replace(kill, attempt=3), after]).mem_bytes == 3 * GIB


def test_only_the_newest_tasks_count() -> None:
    old = [past(task, run="old", peak_bytes=9 * GIB, at=float(task)) for task in range(50)]
    new = [past(task) for task in range(NEWEST)]
    assert ask([*new, *old]).mem_bytes == 640 * MIB


def test_other_recipes_neither_go_below_the_plan_nor_far_above_it() -> None:
    others = SuggestionBounds(" of other recipes", trusted=False, at_most=2)
    tasks = [past(task) for task in range(50)]
    assert ask(tasks, bounds=others).mem_bytes == GIB
    huge = ask([replace(task, peak_bytes=40 * GIB) for task in tasks], bounds=others)
    assert (huge.mem_bytes, huge.tasks) == (2 * GIB, 50)


def test_without_measurements_the_plan_is_asked_for_in_whole_steps() -> None:
    assert suggest([], SuggestionBounds(), planned_bytes=GIB) is None
    assert suggest([past(peak_bytes=None)], SuggestionBounds(), planned_bytes=GIB) is None
    assert planned(GIB + 1).mem_bytes == GIB + 64 * MIB
    assert planned(1).mem_bytes == ask([past(task, peak_bytes=3 * MIB) for task in range(9)]).mem_bytes == 256 * MIB


def test_pace_is_of_tasks_that_ended_well_and_finished_something() -> None:
    tasks = [past(1, items=100, elapsed_s=50.0), past(2, items=300, elapsed_s=50.0), past(3, items=200, elapsed_s=50.0)]
    nothing = [past(4, items=0), past(5, killed=True, items=9000), past(6, elapsed_s=0.0)]
    assert pace([*tasks, *nothing]) == 4.0
    assert pace(nothing) is None


SIZES = st.sampled_from([0, 1, 40, 100, 150, 900])
BYTES = st.integers(1, 64 * GIB)
TASKS = st.lists(
    st.builds(
        past,
        at=st.floats(0, 1e9),
        run=st.sampled_from("ab"),
        task=st.integers(0, 3),
        attempt=st.integers(1, 3),
        killed=st.booleans(),
        peak_bytes=st.none() | BYTES,
        asked_bytes=st.none() | BYTES,
        size=SIZES,
        items=st.integers(0, 100),
        elapsed_s=st.sampled_from([1.0, 400.0]),
    ),
    min_size=1,
    max_size=120,
)


@given(TASKS, BYTES, st.data())
def test_a_larger_peak_never_lowers_the_suggestion(tasks: list[Measured], plan: int, data: st.DataObject) -> None:
    chosen = data.draw(st.integers(0, len(tasks) - 1))
    before = suggest(tasks, SuggestionBounds(), planned_bytes=plan)
    if before is None or tasks[chosen].peak_bytes is None:
        return
    more = tasks[chosen].peak_bytes + data.draw(BYTES)
    after = ask([*tasks[:chosen], replace(tasks[chosen], peak_bytes=more), *tasks[chosen + 1 :]], planned_bytes=plan)
    assert after.mem_bytes >= before.mem_bytes


@given(TASKS, BYTES)
def test_never_at_or_below_a_limit_that_killed_while_nothing_later_lived(tasks: list[Measured], plan: int) -> None:
    suggestion = suggest(tasks, SuggestionBounds(), planned_bytes=plan)
    for kill in tasks:
        if not kill.killed or kill.asked_bytes is None:
            continue
        lived = [task for task in tasks if not task.killed and (task.attempt > kill.attempt or task.at > kill.at)]
        if not any(task.asked_bytes is None or task.asked_bytes > kill.asked_bytes for task in lived):
            assert suggestion is not None
            assert suggestion.mem_bytes > kill.asked_bytes


@given(TASKS, BYTES, st.randoms(use_true_random=False))
def test_the_order_of_records_does_not_matter(tasks: list[Measured], plan: int, random) -> None:
    shuffled = random.sample(tasks, len(tasks))
    one, other = (suggest(order, SuggestionBounds(), planned_bytes=plan) for order in (tasks, shuffled))
    assert one == other
    assert pace(tasks) == pace(shuffled)


@given(TASKS, BYTES, st.sampled_from([1.0, 2.0, float("inf")]))
def test_every_suggestion_is_whole_steps_above_the_floor_and_within_its_bounds(
    tasks: list[Measured], plan: int, at_most: float
) -> None:
    suggestion = suggest(tasks, SuggestionBounds(trusted=False, at_most=at_most), planned_bytes=plan)
    if suggestion is not None:
        assert suggestion.mem_bytes % STEP_BYTES == 0
        assert suggestion.mem_bytes >= max(FLOOR_BYTES, plan)
        assert suggestion.mem_bytes <= max(at_most * plan, FLOOR_BYTES) + STEP_BYTES
        assert 0 < suggestion.tasks <= len(tasks)
