"""What is done about a task that has not ended well."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cluster.candidates import Candidate
from pipeline.cluster.job_spec import Job, Limits, format_ranges, parse_ranges
from pipeline.cluster.verdict import Cause
from pipeline.engine.dispatch import pieces
from pipeline.engine.repair import (
    GiveUp,
    LeaveOut,
    Retry,
    Situation,
    Split,
    avoid_bad_nodes,
    bad_nodes,
    decide,
    progressed,
    restarts_in_job,
    stuck,
)
from pipeline.journal.attempts import Ask, Attempt, TaskRecord
from pipeline.journal.run_status import RunStatus, StageStatus
from pipeline.records import Reason

MIB = 1 << 20
ASK = Ask(mem_bytes=512 * MIB, time_s=600)
SITUATION = Situation(Limits(mem_bytes=4096 * MIB, time_s=3600), items=10, tries=3)
FULL = replace(ASK, mem_bytes=4096 * MIB)
LONGEST = replace(ASK, time_s=3600)
SMALLEST = replace(ASK, shrink=6)
ENDINGS = [cause for cause in Cause if cause not in (Cause.DONE, Cause.ACTIVE, Cause.HELD)]


def died(cause: Cause, *, ask: Ask = ASK, done: int = 0, on: tuple[str, ...] = (), **more: object) -> Attempt:
    return Attempt(task=0, number=1, ask=ask, cause=cause, reason="why", done=done, on=on, **more)  # type: ignore[arg-type]


def again(history: list[Attempt], situation: Situation = SITUATION) -> Ask:
    """Return what the task gets when it is tried again."""
    decision = decide(history, situation)
    assert isinstance(decision, Retry), decision
    return decision.ask


def left_out(history: list[Attempt], situation: Situation = SITUATION) -> LeaveOut:
    decision = decide(history, situation)
    assert isinstance(decision, LeaveOut), decision
    return decision


def kind(history: list[Attempt], situation: Situation = SITUATION) -> type:
    return type(decide(history, situation))


def test_a_task_that_ran_out_of_memory_gets_twice_the_limit_that_killed_it() -> None:
    assert again([died(Cause.HOST_OOM, peak_rss_bytes=100 * MIB)]) == replace(ASK, mem_bytes=1024 * MIB)


@pytest.mark.parametrize(
    ("ask", "peak", "then"),
    [
        (ASK, 100 * MIB, replace(ASK, shrink=1)),  # one huge array was refused
        (ASK, 500 * MIB, replace(ASK, mem_bytes=1024 * MIB)),
        (FULL, 4000 * MIB, replace(FULL, shrink=1)),
        (replace(FULL, shrink=6), 4000 * MIB, None),
    ],
)
def test_a_script_gets_smaller_batches_where_more_memory_helps_not_or_is_not_there(
    ask: Ask, peak: int, then: Ask | None
) -> None:
    decision = decide(
        [died(Cause.HOST_OOM, ask=ask, peak_rss_bytes=peak)], replace(SITUATION, is_whole=True, has_batches=True)
    )
    assert then == (decision.ask if isinstance(decision, Retry) else None)


def test_memory_never_grows_beyond_the_largest_node() -> None:
    assert again([died(Cause.HOST_OOM, ask=replace(ASK, mem_bytes=3000 * MIB))]) == FULL


LAST = replace(ASK, mem_bytes=1024 * MIB, time_s=900, shrink=2)


@pytest.mark.parametrize(
    ("attempt", "ask"),
    [
        # Where the peak is higher than the limit, it is the better bound.
        (died(Cause.HOST_OOM, peak_rss_bytes=700 * MIB), replace(ASK, mem_bytes=1408 * MIB)),
        (died(Cause.HOST_OOM, peak_rss_bytes=650 * MIB), replace(ASK, mem_bytes=21 * 64 * MIB)),
        # A GPU without room: smaller batches and not more host memory.
        (died(Cause.GPU_OOM, on=("a", "b")), replace(ASK, shrink=1)),
        (died(Cause.GPU_OOM, ask=replace(ASK, shrink=5), on=("a", "b")), SMALLEST),
        # Time grows up to the longest; what came further in that goes on.
        (died(Cause.TIMEOUT, done=4), replace(ASK, time_s=1200)),
        (died(Cause.TIMEOUT, ask=LONGEST, done=4), LONGEST),
        (died(Cause.INTERRUPTED), replace(ASK, time_s=1200)),
        (died(Cause.INTERRUPTED, done=3), ASK),
        # A crash is repeated one thing at a time; on nothing in particular as it was.
        (died(Cause.CRASHED, on=("a", "b")), replace(ASK, careful=True)),
        (died(Cause.CRASHED), ASK),
        (died(Cause.NODE), ASK),
        (died(Cause.PREEMPTED), ASK),
        (died(Cause.LOST), ASK),
    ],
)
def test_a_first_failure_is_tried_again_with_what_it_lacked(attempt, ask):
    assert again([attempt]) == ask


@pytest.mark.parametrize(
    ("cause", "ask"),
    [
        (Cause.HOST_OOM, replace(LAST, mem_bytes=2048 * MIB)),
        (Cause.GPU_OOM, replace(LAST, shrink=3)),
        (Cause.TIMEOUT, replace(LAST, time_s=1800)),
        (Cause.CRASHED, LAST),
        (Cause.PREEMPTED, LAST),
    ],
)
def test_what_is_asked_for_follows_from_the_last_attempt_and_not_from_the_first(cause, ask):
    assert again([died(Cause.HOST_OOM, on=("a",)), died(cause, ask=LAST)]) == ask


def test_what_the_last_attempt_was_on_is_left_out_and_not_what_the_first_was_on():
    history = [died(Cause.HOST_OOM, on=("a",)), died(Cause.HOST_OOM, ask=FULL, on=("b",))]
    found = left_out(history, replace(SITUATION, items=1))
    assert (found.names, found.ask) == (("b",), FULL)


def test_what_does_not_fit_the_largest_node_is_halved_and_at_last_left_out():
    first = died(Cause.HOST_OOM, ask=FULL, on=("a",))
    assert kind([first]) is Split
    alone = left_out([first], replace(SITUATION, items=1))
    assert (alone.names, alone.reason) == (("a",), Reason.DOES_NOT_FIT)
    assert left_out([first, first]).names == ("a",)
    assert kind([died(Cause.HOST_OOM, ask=FULL)]) is GiveUp  # it does not even begin
    assert kind([died(Cause.GPU_OOM, ask=SMALLEST, on=("a", "b"))]) is Split


def test_without_a_longest_time_what_comes_no_further_is_not_given_ever_more():
    endless = replace(SITUATION, limits=Limits())
    history = [died(Cause.TIMEOUT, ask=replace(ASK, time_s=600 << tried)) for tried in range(3)]
    assert again(history[:2], endless).time_s == 2400
    assert kind(history, endless) is Split


def test_a_task_that_came_no_further_in_the_longest_time_is_halved_and_a_single_item_given_up():
    longest = died(Cause.TIMEOUT, ask=LONGEST)
    for items in (2, 10):
        assert kind([longest], replace(SITUATION, items=items)) is Split
        assert kind([replace(longest, cause=Cause.INTERRUPTED)], replace(SITUATION, items=items)) is Split
    assert kind([longest], replace(SITUATION, items=1)) is GiveUp


def test_a_six_day_task_under_a_day_s_limit_is_not_failing():
    again([died(Cause.TIMEOUT, ask=LONGEST, done=done) for done in range(1, 60)])


@pytest.mark.parametrize("cause", [Cause.NODE, Cause.PREEMPTED, Cause.LOST])
def test_what_was_not_the_tasks_fault_is_tried_again_but_not_for_ever(cause):
    assert kind([died(cause)] * 3) is GiveUp
    again([died(cause, done=done) for done in range(1, 30)])


@pytest.mark.parametrize(
    ("ends", "goes_on"),
    [
        ([(Cause.CRASHED, 5)], True),
        ([(Cause.CRASHED, 5), (Cause.CRASHED, 6)], True),
        ([(Cause.CRASHED, 5), (Cause.CRASHED, 5)], False),
        ([(Cause.CRASHED, 0)], False),
        *(([(cause, 5)], False) for cause in ENDINGS if cause is not Cause.CRASHED),
    ],
)
def test_a_training_restarts_in_its_job_where_it_came_further_and_only_crashed(ends, goes_on):
    assert restarts_in_job([died(cause, done=done) for cause, done in ends]) is goes_on


def test_the_culprit_of_a_crash_is_left_out():
    first = died(Cause.CRASHED, on=("a", "b"))
    second = left_out([first, died(Cause.CRASHED, ask=again([first]), on=("b",))])
    assert (second.names, second.reason, second.ask.careful) == (("b",), Reason.KILLED_ITS_TASK, False)


def test_a_thing_on_which_a_task_died_in_two_ways_is_no_culprit():
    again([died(Cause.HOST_OOM, on=("a",)), died(Cause.CRASHED, on=("a",))])


def test_the_culprit_is_what_all_of_the_last_deaths_that_are_alike_were_on():
    for deaths, culprit in (((("x", "a", "b"), ("a", "b"), ("b", "y")), "b"), ((("b",), ("a",), ("a", "b")), "a")):
        assert left_out([died(Cause.CRASHED, on=on) for on in deaths]).names == (culprit,)


def test_a_crash_on_another_thing_each_time_names_no_culprit_and_is_bounded():
    history = [died(Cause.CRASHED, on=(name,)) for name in "abc"]
    again(history[:2])
    assert kind(history) is GiveUp


@pytest.mark.parametrize(("cause", "ask"), [(Cause.HOST_OOM, FULL), (Cause.GPU_OOM, SMALLEST)])
def test_of_a_split_that_ranks_share_only_the_item_that_does_not_fit_is_left_out(cause, ask):
    situation = replace(SITUATION, items=500, is_shared=True)
    careful = replace(ask, careful=True)
    first = died(cause, ask=ask, on=tuple(f"item {number}" for number in range(32)))
    second = died(cause, ask=careful, done=3, on=("item 3", "item 9", "item 40", "item 41"))
    third = died(cause, ask=careful, done=5, on=("item 9", "item 17", "item 42", "item 43"))
    assert again([first], situation) == again([first, second], situation) == careful
    found = left_out([first, second, third], situation)
    assert (found.names, found.reason, found.ask) == (("item 9",), Reason.DOES_NOT_FIT, ask)
    assert kind([first, *[died(cause, ask=careful, on=("a", "b", "c", "d"))] * 3], situation) is GiveUp
    assert kind([died(Cause.TIMEOUT, ask=LONGEST)], situation) is GiveUp  # it is never halved


@pytest.mark.parametrize("cause", [Cause.CRASHED, Cause.HOST_OOM])
def test_of_what_is_read_once_from_beginning_to_end_nothing_is_left_out_and_the_place_is_named(cause):
    history = [died(cause, ask=FULL, on=("item 101 (a.mgf:7)",))] * 3
    decisions = [decide(history[:count], replace(SITUATION, items=1, is_read_once=True)) for count in (1, 2, 3)]
    assert not any(isinstance(one, LeaveOut | Split) for one in decisions)
    assert isinstance(decisions[2], GiveUp)
    if cause is Cause.CRASHED:
        assert isinstance(decisions[0], Retry)
        assert "item 101 (a.mgf:7)" in decisions[0].why
        assert "item 101 (a.mgf:7)" in decisions[2].why


class TestTraining:
    SITUATION = replace(SITUATION, is_whole=True)

    def test_a_crash_is_begun_again_as_it_was_until_it_comes_no_further(self):
        on = ("a", "b")
        history = [died(Cause.CRASHED, on=on, done=5)]
        for done in (9, 11):
            assert not again(history, self.SITUATION).careful
            history.append(died(Cause.CRASHED, on=on, done=done))
        assert again([*history, died(Cause.CRASHED, on=on, done=11)], self.SITUATION).careful

    def test_it_is_begun_again_once_as_it_was_also_before_its_first_checkpoint(self):
        crash = died(Cause.CRASHED, ask=replace(ASK, careful=True), on=("a", "b"))
        assert again([crash], self.SITUATION) == ASK
        assert again([crash, crash], self.SITUATION).careful

    def test_one_item_that_it_was_on_at_two_deaths_in_two_epochs_is_not_left_out(self):
        again([died(Cause.CRASHED, on=("a",), done=done) for done in (5, 9)], self.SITUATION)

    def test_it_is_begun_again_where_it_was_asked_to_end_at_once_but_not_for_ever(self):
        situation = replace(self.SITUATION, limits=Limits(time_s=ASK.time_s))
        again([died(Cause.INTERRUPTED)], situation)
        assert kind([died(Cause.INTERRUPTED)] * situation.tries, situation) is GiveUp

    @pytest.mark.parametrize("cause", [Cause.HOST_OOM, Cause.GPU_OOM, Cause.TIMEOUT])
    def test_it_is_never_split_nor_made_smaller(self, cause):
        situation = replace(self.SITUATION, limits=Limits(mem_bytes=ASK.mem_bytes, time_s=ASK.time_s))
        assert kind([died(cause, ask=replace(ASK, shrink=99), on=("a", "b"))], situation) is GiveUp


@pytest.mark.parametrize("situation", [SITUATION, TestTraining.SITUATION])
def test_an_item_that_was_left_out_in_vain_ends_the_task(situation):
    history = [died(Cause.CRASHED, on=("b",))] * 2
    out = left_out(history, situation)
    assert out.names == ("b",)
    assert kind([*history, history[-1]], situation) is GiveUp
    assert decide(history, situation) == out, "the same evidence, judged by the next supervisor"


@pytest.mark.parametrize("cause", [Cause.CANCELLED, Cause.DISK, Cause.REFUSED, Cause.FAILED])
def test_what_would_end_the_same_again_ends_the_stage(cause):
    assert kind([died(cause)]) is GiveUp


asks = st.builds(
    Ask,
    mem_bytes=st.integers(1, 8192).map(lambda count: count * MIB),
    time_s=st.integers(60, 7200),
    shrink=st.integers(0, 6),
    careful=st.booleans(),
)
attempts = st.builds(
    died,
    st.sampled_from(ENDINGS),
    ask=asks,
    done=st.integers(0, 5),
    on=st.lists(st.sampled_from("abc"), max_size=2, unique=True).map(tuple),
)
limits = st.builds(
    Limits,
    mem_bytes=st.none() | st.integers(1, 8192).map(lambda count: count * MIB),
    time_s=st.none() | st.integers(60, 7200),
)


class TestSeveralPartitions:
    SHORT = Candidate("short", Limits(mem_bytes=1024 * MIB, time_s=900, preempts=True))
    LONG = Candidate("long", Limits(mem_bytes=1024 * MIB, time_s=86_400))
    HIGHMEM = Candidate("highmem", Limits(mem_bytes=8192 * MIB, time_s=3600), price=2.0)
    SITUATION = replace(SITUATION, limits=Limits(), places=(SHORT, LONG, HIGHMEM))
    ALONE = replace(SITUATION, places=(SHORT,))
    IN_SHORT = replace(ASK, partition="short")
    MOST = replace(ASK, mem_bytes=8192 * MIB, partition="highmem")

    def test_twice_the_memory_moves_a_task_only_where_its_partition_does_not_have_it(self):
        once = again([died(Cause.HOST_OOM, ask=self.IN_SHORT)], self.SITUATION)
        assert (once.mem_bytes, once.partition) == (1024 * MIB, "short")
        twice = again([died(Cause.HOST_OOM, ask=once)], self.SITUATION)
        assert (twice.mem_bytes, twice.partition) == (2048 * MIB, "highmem")

    def test_where_a_task_is_follows_from_its_last_attempt(self):
        first = died(Cause.NODE, ask=self.IN_SHORT)
        assert again([first, died(Cause.NODE, ask=replace(ASK, partition="long"))], self.SITUATION).partition == "long"
        large = died(Cause.NODE, ask=replace(ASK, mem_bytes=4096 * MIB, partition="highmem"))
        assert again([first, large], self.SITUATION) == large.ask
        assert kind([first, died(Cause.HOST_OOM, ask=self.MOST, on=("a", "b"))], self.SITUATION) is Split
        longest = replace(ASK, mem_bytes=4096 * MIB, time_s=3600, partition="highmem")
        assert kind([first, died(Cause.TIMEOUT, ask=longest, on=("a", "b"))], self.SITUATION) is Split

    def test_more_time_than_its_partition_gives_moves_a_task_to_the_first_that_gives_it(self):
        ask = again([died(Cause.TIMEOUT, ask=self.IN_SHORT)], self.SITUATION)
        assert (ask.time_s, ask.partition) == (1200, "long")

    def test_it_never_moves_to_one_that_is_not_listed_and_memory_ends_with_the_largest(self):
        full = replace(self.IN_SHORT, mem_bytes=1024 * MIB)
        assert kind([died(Cause.HOST_OOM, ask=full, on=("a", "b"))], self.ALONE) is Split
        halves = decide([died(Cause.HOST_OOM, ask=self.MOST, on=("a", "b"))], self.SITUATION)
        assert isinstance(halves, Split)
        assert halves.ask == self.MOST

    def test_what_was_preempted_twice_without_coming_further_goes_where_jobs_are_left_alone(self):
        node, first = (died(cause, ask=self.IN_SHORT) for cause in (Cause.NODE, Cause.PREEMPTED))
        for history, situation, partition in (
            ([first], self.SITUATION, "short"),
            ([first, first], self.SITUATION, "long"),
            ([first, replace(first, done=3)], self.SITUATION, "short"),
            ([first, first], self.ALONE, "short"),
            ([died(Cause.PREEMPTED)] * 2, self.ALONE, "short"),  # it had no place of its own
            ([node, first], self.SITUATION, "short"),
            ([first, node], self.SITUATION, "short"),
            ([node, first, first], replace(self.SITUATION, tries=9), "long"),  # only the last two ends count
        ):
            assert again(history, situation).partition == partition, history

    def test_what_keeps_making_room_goes_only_where_there_is_room_for_it(self):
        large = died(Cause.PREEMPTED, ask=replace(self.IN_SHORT, mem_bytes=2048 * MIB))
        roomy = replace(self.SHORT, limits=replace(self.SHORT.limits, mem_bytes=8192 * MIB))
        other = Candidate("roomy", roomy.limits)
        for places, partition in (
            ((roomy, self.LONG), "short"),
            ((roomy, self.LONG, self.HIGHMEM), "highmem"),
            ((self.SHORT, self.LONG, other), "roomy"),  # its own holds it no longer
        ):
            assert again([large, large], replace(self.SITUATION, places=places)).partition == partition

    def test_a_task_goes_where_there_are_nodes_enough_for_it(self):
        few = replace(self.LONG, limits=replace(self.LONG.limits, nodes=1))
        listed = replace(self.SITUATION, places=(self.SHORT, few, self.HIGHMEM))
        for situation, partition in ((listed, "long"), (replace(listed, nodes=2), "highmem")):
            assert again([died(Cause.TIMEOUT, ask=self.IN_SHORT)], situation).partition == partition


places = st.lists(limits, min_size=1, max_size=4).map(
    lambda found: tuple(Candidate(f"p{number}", each) for number, each in enumerate(found))
)


@given(st.lists(attempts, min_size=1, max_size=6), places, st.integers(1, 50), st.data())
def test_a_task_goes_only_to_listed_partitions_and_to_one_that_holds_it_if_its_own_did(history, listed, items, data):
    now = data.draw(st.sampled_from(listed))
    history = [replace(attempt, ask=replace(attempt.ask, partition=now.partition)) for attempt in history]
    decision = decide(history, Situation(Limits(), items, 3, places=listed))
    if isinstance(decision, GiveUp):
        return
    chosen = next(place for place in listed if place.partition == decision.ask.partition)
    last = history[-1].ask
    if not now.refuses(last.mem_bytes, last.time_s):
        assert not chosen.refuses(decision.ask.mem_bytes, decision.ask.time_s)


@given(st.lists(attempts, min_size=1, max_size=6), limits, st.integers(1, 50), st.integers(1, 4))
def test_every_history_has_a_decision_within_what_there_is_to_give(history, there, items, tries):
    decision = decide(history, Situation(there, items, tries))
    last = history[-1].ask
    if isinstance(decision, GiveUp):
        assert decision.why
        return
    assert decision.ask.mem_bytes <= max(last.mem_bytes, there.mem_bytes or 1 << 62)
    assert decision.ask.time_s <= max(last.time_s, there.time_s or 1 << 62)
    if isinstance(decision, Split):
        assert items > 1
    if isinstance(decision, LeaveOut):
        assert set(decision.names) <= {*history[-1].on}


@given(st.sampled_from(ENDINGS), limits.filter(lambda there: there.mem_bytes and there.time_s), st.integers(1, 64))
def test_a_task_that_always_ends_the_same_way_comes_to_an_end(cause, there, items):
    """Follow one branch: retries as they are decided, splits into their first half."""
    ask, history = ASK, list[Attempt]()
    for _ in range(200):
        history.append(died(cause, ask=ask, on=("a",)))
        decision = decide(history, Situation(there, items, 3))
        if isinstance(decision, (GiveUp, LeaveOut)):
            return
        ask = decision.ask
        if isinstance(decision, Split):
            items, history = max(1, items // 2), []
    raise AssertionError(f"{cause} goes on for ever")


@given(st.sets(st.integers(0, 300)).map(sorted))
def test_ranges_say_every_number_once(chosen):
    assert parse_ranges(format_ranges(chosen)) == chosen


@given(
    st.sets(st.integers(0, 300), min_size=1).map(sorted),
    st.none() | st.integers(0, 50),
    st.none() | st.integers(1, 50),
    st.integers(1, 100),
)
def test_pieces_fit_an_array_and_the_queue(due, highest, most, room):
    found = list(pieces(due, Limits(highest_task=highest, job_tasks=most), room))
    assert [number for piece in found for number in piece] == due
    for piece in found:
        assert len(piece) <= min(most or 1 << 30, room)
        if highest is not None:
            assert piece[0] // (highest + 1) == piece[-1] // (highest + 1)


def test_progress_is_measured_against_the_best_attempt_before():
    history = [died(Cause.NODE, done=done) for done in (5, 3, 5)]
    assert not progressed(history)
    assert stuck(history) == 2
    assert progressed([*history, died(Cause.NODE, done=6)])
    assert not progressed(history[:2])
    assert progressed([died(Cause.NODE, done=1)])
    assert not progressed([died(Cause.NODE)])


@pytest.mark.parametrize(
    ("there", "failed", "excluded", "begins_s"),
    [(3, 2, 2, 0), (2, 2, 0, 60), (2, 1, 1, 0), (8, 4, 4, 0), (8, 5, 0, 60)],
)
def test_nodes_that_failed_are_excluded_until_a_task_ends_well_there_or_too_few_are_left(
    there, failed, excluded, begins_s
):
    """An outage that ends many tasks at once is no reason to keep off most of a cluster."""
    bad = [f"n{number}" for number in range(failed)]
    ends = [died(Cause.NODE, node=node, ended_at=1.0) for node in (*bad, "well")]
    well = died(Cause.DONE, node="well", ended_at=2.0)
    run = RunStatus("run", stages={"scan": StageStatus("scan", work={0: TaskRecord(0, ended=[well, *ends])})})
    executor = cast("Any", SimpleNamespace(limits_of=lambda *_: Limits(nodes=there)))
    job = avoid_bad_nodes(run, executor, Job("embed", ("true",), range(1), "logs"))
    assert (job.exclude, job.begin_s) == (tuple(bad[:excluded]), begins_s)


def test_a_node_is_left_out_for_its_own_failures_only():
    crashed, unknown = died(Cause.CRASHED, node="n2"), died(Cause.NODE)
    tasks = [TaskRecord(0, ended=[crashed, crashed, unknown, unknown, died(Cause.NODE, node="n3")])]
    assert bad_nodes(tasks) == ("n3",)
