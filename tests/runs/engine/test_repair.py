"""What is done about a task that has not ended well."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cluster.candidates import Candidate
from pipeline.cluster.job_spec import Limits, format_ranges, parse_ranges
from pipeline.cluster.verdict import Cause
from pipeline.journal.attempts import Ask, Attempt, TaskRecord
from pipeline.records import Reason
from pipeline.runs.engine.dispatch import pieces
from pipeline.runs.engine.repair import Again, GiveUp, LeaveOut, Means, Split, bad_nodes, decide, progressed, stuck

MIB = 1 << 20
ASK = Ask(mem_bytes=512 * MIB, time_s=600)
MEANS = Means(Limits(mem_bytes=4096 * MIB, time_s=3600), items=10, tries=3)
FULL = replace(ASK, mem_bytes=4096 * MIB)
ENDINGS = [cause for cause in Cause if cause not in (Cause.DONE, Cause.ACTIVE, Cause.HELD)]


def died(cause: Cause, *, ask: Ask = ASK, done: int = 0, on: tuple[str, ...] = (), **more: object) -> Attempt:
    return Attempt(task=0, number=1, ask=ask, cause=cause, reason="why", done=done, on=on, **more)  # type: ignore[arg-type]


def test_a_task_that_ran_out_of_memory_gets_twice_the_limit_that_killed_it() -> None:
    decision = decide([died(Cause.HOST_OOM, peak_rss_bytes=100 * MIB)], MEANS)
    assert isinstance(decision, Again)
    assert decision.ask.mem_bytes == 1024 * MIB


def test_a_peak_above_the_limit_is_the_better_bound() -> None:
    decision = decide([died(Cause.HOST_OOM, peak_rss_bytes=700 * MIB)], MEANS)
    assert isinstance(decision, Again)
    assert decision.ask.mem_bytes >= 1400 * MIB
    rounded = decide([died(Cause.HOST_OOM, peak_rss_bytes=650 * MIB)], MEANS)
    assert isinstance(rounded, Again)
    assert rounded.ask.mem_bytes == 21 * 64 * MIB


LAST = replace(ASK, mem_bytes=1024 * MIB, time_s=900, shrink=2)


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
def test_what_is_asked_for_follows_from_the_last_attempt_and_not_from_the_first(cause: Cause, ask: Ask) -> None:
    first = died(Cause.HOST_OOM, on=("a",))
    decision = decide([first, died(cause, ask=LAST)], MEANS)
    assert isinstance(decision, Again)
    assert decision.ask == ask


def test_what_the_last_attempt_was_on_is_left_out_and_not_what_the_first_was_on() -> None:
    history = [died(Cause.HOST_OOM, on=("a",)), died(Cause.HOST_OOM, ask=FULL, on=("b",))]
    decision = decide(history, replace(MEANS, items=1))
    assert isinstance(decision, LeaveOut)
    assert (decision.names, decision.ask) == (("b",), FULL)


def test_memory_never_grows_beyond_the_largest_node() -> None:
    decision = decide([died(Cause.HOST_OOM, ask=replace(ASK, mem_bytes=3000 * MIB))], MEANS)
    assert isinstance(decision, Again)
    assert decision.ask.mem_bytes == 4096 * MIB


def test_what_does_not_fit_the_largest_node_is_halved_and_at_last_left_out() -> None:
    full = replace(ASK, mem_bytes=4096 * MIB)
    first = died(Cause.HOST_OOM, ask=full, on=("a",))
    assert isinstance(decide([first], MEANS), Split)
    alone = decide([first], replace(MEANS, items=1))
    assert isinstance(alone, LeaveOut)
    assert (alone.names, alone.reason) == (("a",), Reason.DOES_NOT_FIT)
    twice = decide([first, first], MEANS)
    assert isinstance(twice, LeaveOut)
    assert twice.names == ("a",)


def test_of_a_task_of_which_nothing_else_is_said_halves_are_made() -> None:
    plain = Means(MEANS.limits, items=10, tries=3)
    assert isinstance(decide([died(Cause.HOST_OOM, ask=FULL, on=("a", "b"))], plain), Split)
    assert isinstance(decide([died(Cause.TIMEOUT, ask=replace(ASK, time_s=3600))], plain), Split)
    careful = decide([died(Cause.CRASHED, on=("a", "b"))], plain)
    assert isinstance(careful, Again)
    assert careful.ask.careful
    assert (plain.places, plain.nodes) == ((), 1)


def test_a_task_that_does_not_even_begin_in_the_largest_node_is_given_up() -> None:
    decision = decide([died(Cause.HOST_OOM, ask=replace(ASK, mem_bytes=4096 * MIB))], MEANS)
    assert isinstance(decision, GiveUp)
    assert "does not even begin" in decision.why


def test_a_gpu_without_room_gets_smaller_batches_and_not_more_host_memory() -> None:
    decision = decide([died(Cause.GPU_OOM, on=("a", "b"))], MEANS)
    assert isinstance(decision, Again)
    assert decision.ask == replace(ASK, shrink=1)
    last = decide([died(Cause.GPU_OOM, ask=replace(ASK, shrink=5), on=("a", "b"))], MEANS)
    assert last == Again(replace(ASK, shrink=6), "again with batches of half the size")
    smallest = decide([died(Cause.GPU_OOM, ask=replace(ASK, shrink=6), on=("a", "b"))], MEANS)
    assert isinstance(smallest, Split)


def test_a_time_limit_grows_up_to_the_longest_and_then_the_task_goes_on_where_it_stopped() -> None:
    first = decide([died(Cause.TIMEOUT, done=4)], MEANS)
    assert isinstance(first, Again)
    assert first.ask.time_s == 1200
    longest = replace(ASK, time_s=3600)
    onward = decide([died(Cause.TIMEOUT, ask=longest, done=4)], MEANS)
    assert onward == Again(longest, "it goes on where it stopped")


def test_without_a_longest_time_what_comes_no_further_is_not_given_ever_more() -> None:
    endless = replace(MEANS, limits=Limits())
    history = [died(Cause.TIMEOUT, ask=replace(ASK, time_s=600 << tried)) for tried in range(3)]
    more = decide(history[:2], endless)
    assert isinstance(more, Again)
    assert more.ask.time_s == 2400
    assert isinstance(decide(history, endless), Split)


def test_a_task_that_came_no_further_in_the_longest_time_is_halved_and_a_single_item_given_up() -> None:
    longest = died(Cause.TIMEOUT, ask=replace(ASK, time_s=3600))
    for items in (2, 10):
        assert isinstance(decide([longest], replace(MEANS, items=items)), Split)
        assert isinstance(decide([replace(longest, cause=Cause.INTERRUPTED)], replace(MEANS, items=items)), Split)
    assert isinstance(decide([longest], replace(MEANS, items=1)), GiveUp)


def test_a_six_day_task_under_a_day_s_limit_is_not_failing() -> None:
    longest = replace(ASK, time_s=3600)
    history = [died(Cause.TIMEOUT, ask=longest, done=done) for done in range(1, 60)]
    assert isinstance(decide(history, MEANS), Again)


@pytest.mark.parametrize("cause", [Cause.NODE, Cause.PREEMPTED, Cause.LOST])
def test_what_was_not_the_tasks_fault_is_tried_again_as_it_was_but_not_for_ever(cause: Cause) -> None:
    once = decide([died(cause)], MEANS)
    assert isinstance(once, Again)
    assert once.ask == ASK
    given_up = decide([died(cause)] * 3, MEANS)
    assert isinstance(given_up, GiveUp)
    assert "3 attempts came no further" in given_up.why
    assert isinstance(decide([died(cause, done=done) for done in range(1, 30)], MEANS), Again)


def test_a_task_told_to_end_before_it_came_any_further_gets_more_time() -> None:
    decision = decide([died(Cause.INTERRUPTED)], MEANS)
    assert isinstance(decision, Again)
    assert decision.ask.time_s == 1200
    onward = decide([died(Cause.INTERRUPTED, done=3)], MEANS)
    assert isinstance(onward, Again)
    assert onward.ask == ASK


def test_a_crash_is_repeated_one_thing_at_a_time_and_its_culprit_left_out() -> None:
    first = died(Cause.CRASHED, on=("a", "b"))
    careful = decide([first], MEANS)
    assert isinstance(careful, Again)
    assert careful == Again(replace(ASK, careful=True), "again, one thing at a time")
    second = decide([first, died(Cause.CRASHED, ask=careful.ask, on=("b",))], MEANS)
    assert isinstance(second, LeaveOut)
    assert (second.names, second.reason, second.ask.careful) == (("b",), Reason.KILLED_ITS_TASK, False)


def test_a_crash_on_nothing_in_particular_is_repeated_as_it_was() -> None:
    assert decide([died(Cause.CRASHED)], MEANS) == Again(ASK, "again")
    read_once = replace(MEANS, is_read_once=True)
    assert decide([died(Cause.CRASHED)], read_once) == Again(ASK, "again, from the beginning")


def test_a_thing_on_which_a_task_died_in_two_ways_is_no_culprit() -> None:
    history = [died(Cause.HOST_OOM, on=("a",)), died(Cause.CRASHED, on=("a",))]
    assert isinstance(decide(history, MEANS), Again)


def test_the_culprit_is_what_all_of_the_last_deaths_that_are_alike_were_on() -> None:
    history = [died(Cause.CRASHED, on=on) for on in (("x", "a", "b"), ("a", "b"), ("b", "y"))]
    decision = decide(history, MEANS)
    assert isinstance(decision, LeaveOut)
    assert decision.names == ("b",)
    apart = decide([died(Cause.CRASHED, on=on) for on in (("b",), ("a",), ("a", "b"))], MEANS)
    assert isinstance(apart, LeaveOut)
    assert apart.names == ("a",)


def test_a_crash_on_another_thing_each_time_names_no_culprit_and_is_bounded() -> None:
    history = [died(Cause.CRASHED, on=(name,)) for name in "abc"]
    assert isinstance(decide(history[:2], MEANS), Again)
    assert isinstance(decide(history, MEANS), GiveUp)


@pytest.mark.parametrize(("cause", "ask"), [(Cause.HOST_OOM, FULL), (Cause.GPU_OOM, replace(ASK, shrink=6))])
def test_of_a_split_that_ranks_share_only_the_item_that_does_not_fit_is_left_out(cause: Cause, ask: Ask) -> None:
    """Before, all that any rank was on went: 32 innocent items of a split for one that was too large."""
    means = replace(MEANS, items=500, is_shared=True)
    first = died(cause, ask=ask, on=tuple(f"item {number}" for number in range(32)))
    careful = decide([first], means)
    assert isinstance(careful, Again)
    assert careful.ask == replace(ask, careful=True)
    second = died(cause, ask=careful.ask, done=3, on=("item 3", "item 9", "item 40", "item 41"))
    again = decide([first, second], means)
    assert again == Again(careful.ask, again.why)
    third = died(cause, ask=careful.ask, done=5, on=("item 9", "item 17", "item 42", "item 43"))
    without = decide([first, second, third], means)
    assert isinstance(without, LeaveOut)
    assert (without.names, without.reason, without.ask) == (("item 9",), Reason.DOES_NOT_FIT, ask)
    never = [first, *[died(cause, ask=careful.ask, on=("a", "b", "c", "d"))] * 3]
    assert isinstance(decide(never, means), GiveUp)


def test_a_split_that_ranks_share_is_never_halved() -> None:
    longest = died(Cause.TIMEOUT, ask=replace(ASK, time_s=3600))
    decision = decide([longest], replace(MEANS, items=500, is_shared=True))
    assert decision == GiveUp("it came no further in 60 min, the longest there is")


@pytest.mark.parametrize("cause", [Cause.CRASHED, Cause.HOST_OOM])
def test_of_what_is_read_once_from_beginning_to_end_nothing_is_left_out_and_the_place_is_told(cause: Cause) -> None:
    largest = replace(ASK, mem_bytes=MEANS.limits.mem_bytes or 0)
    history = [died(cause, ask=largest, on=("item 101 (a.mgf:7)",))] * 3
    means = replace(MEANS, items=1, is_read_once=True)
    decisions = [decide(history[:count], means) for count in (1, 2, 3)]
    assert not any(isinstance(one, LeaveOut | Split) for one in decisions)
    assert isinstance(decisions[2], GiveUp)
    if cause is Cause.CRASHED:
        assert isinstance(decisions[0], Again)
        assert decisions[0].why == "again, from the beginning; it was on item 101 (a.mgf:7)"
        assert decisions[2].why.endswith("it was on item 101 (a.mgf:7)")


class TestTraining:
    MEANS = replace(MEANS, is_whole=True)

    def test_a_crash_is_begun_again_as_it_was_until_it_comes_no_further(self) -> None:
        on = ("a", "b")
        history = [died(Cause.CRASHED, on=on, done=5)]
        for done in (9, 11):
            again = decide(history, self.MEANS)
            assert isinstance(again, Again)
            assert not again.ask.careful
            history.append(died(Cause.CRASHED, on=on, done=done))
        history.append(died(Cause.CRASHED, on=on, done=11))
        careful = decide(history, self.MEANS)
        assert isinstance(careful, Again)
        assert careful.ask.careful

    def test_it_is_begun_again_once_as_it_was_also_before_its_first_checkpoint(self) -> None:
        crash = died(Cause.CRASHED, ask=replace(ASK, careful=True), on=("a", "b"))
        assert decide([crash], self.MEANS) == Again(ASK, "again, from its last checkpoint")
        careful = decide([crash, crash], self.MEANS)
        assert isinstance(careful, Again)
        assert careful.ask.careful

    def test_one_item_that_it_was_on_at_two_deaths_in_two_epochs_is_not_left_out(self) -> None:
        history = [died(Cause.CRASHED, on=("a",), done=done) for done in (5, 9)]
        assert isinstance(decide(history, self.MEANS), Again)

    def test_it_is_begun_again_where_it_was_told_to_end_at_once_but_not_for_ever(self) -> None:
        means = replace(self.MEANS, limits=Limits(time_s=ASK.time_s))
        history = [died(Cause.INTERRUPTED)]
        assert isinstance(decide(history, means), Again)
        assert isinstance(decide(history * means.tries, means), GiveUp)

    @pytest.mark.parametrize("cause", [Cause.HOST_OOM, Cause.GPU_OOM, Cause.TIMEOUT])
    def test_it_is_never_split_nor_made_smaller(self, cause: Cause) -> None:
        means = replace(self.MEANS, limits=Limits(mem_bytes=ASK.mem_bytes, time_s=ASK.time_s))
        last = died(cause, ask=replace(ASK, shrink=99), on=("a", "b"))
        assert isinstance(decide([last], means), GiveUp)


@pytest.mark.parametrize("means", [MEANS, TestTraining.MEANS])
def test_an_item_that_was_left_out_in_vain_ends_the_task(means: Means) -> None:
    history = [died(Cause.CRASHED, on=("b",))] * 2
    out = decide(history, means)
    assert isinstance(out, LeaveOut)
    assert out.names == ("b",)
    assert decide([*history, history[-1]], means) == GiveUp("it died on b again, which had been left out")
    assert decide(history, means) == out, "the same evidence, judged by the next supervisor"


@pytest.mark.parametrize("cause", [Cause.CANCELLED, Cause.DISK, Cause.REFUSED, Cause.FAILED])
def test_what_would_end_the_same_again_ends_the_stage(cause: Cause) -> None:
    assert isinstance(decide([died(cause)], MEANS), GiveUp)


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
    MEANS = replace(MEANS, limits=Limits(), places=(SHORT, LONG, HIGHMEM))
    IN_SHORT = replace(ASK, partition="short")

    def test_twice_the_memory_moves_a_task_only_where_its_partition_does_not_have_it(self) -> None:
        once = decide([died(Cause.HOST_OOM, ask=self.IN_SHORT)], self.MEANS)
        assert isinstance(once, Again)
        assert (once.ask.mem_bytes, once.ask.partition) == (1024 * MIB, "short")
        twice = decide([died(Cause.HOST_OOM, ask=once.ask)], self.MEANS)
        assert isinstance(twice, Again)
        assert (twice.ask.mem_bytes, twice.ask.partition) == (2048 * MIB, "highmem")
        assert twice.why == "again with 2048MiB of memory, in highmem, not short"

    def test_where_a_task_is_follows_from_its_last_attempt(self) -> None:
        first = died(Cause.NODE, ask=self.IN_SHORT)
        decision = decide([first, died(Cause.NODE, ask=replace(ASK, partition="long"))], self.MEANS)
        assert isinstance(decision, Again)
        assert (decision.ask.partition, decision.why) == ("long", "again, its node failed")
        large = died(Cause.NODE, ask=replace(ASK, mem_bytes=4096 * MIB, partition="highmem"))
        decision = decide([first, large], self.MEANS)
        assert isinstance(decision, Again)
        assert (decision.ask, decision.why) == (large.ask, "again, its node failed")
        most = replace(ASK, mem_bytes=8192 * MIB, partition="highmem")
        assert isinstance(decide([first, died(Cause.HOST_OOM, ask=most, on=("a", "b"))], self.MEANS), Split)
        longest = replace(ASK, mem_bytes=4096 * MIB, time_s=3600, partition="highmem")
        assert isinstance(decide([first, died(Cause.TIMEOUT, ask=longest, on=("a", "b"))], self.MEANS), Split)

    def test_more_time_than_its_partition_gives_moves_a_task_to_the_first_that_gives_it(self) -> None:
        decision = decide([died(Cause.TIMEOUT, ask=self.IN_SHORT)], self.MEANS)
        assert isinstance(decision, Again)
        assert (decision.ask.time_s, decision.ask.partition) == (1200, "long")

    def test_it_never_moves_to_one_that_is_not_listed(self) -> None:
        alone = replace(self.MEANS, places=(self.SHORT,))
        full = replace(self.IN_SHORT, mem_bytes=1024 * MIB)
        assert isinstance(decide([died(Cause.HOST_OOM, ask=full, on=("a", "b"))], alone), Split)

    def test_the_largest_of_all_is_where_memory_ends(self) -> None:
        most = replace(ASK, mem_bytes=8192 * MIB, partition="highmem")
        halves = decide([died(Cause.HOST_OOM, ask=most, on=("a", "b"))], self.MEANS)
        assert isinstance(halves, Split)
        assert halves.ask == most

    def test_what_was_preempted_twice_without_coming_further_goes_where_jobs_are_left_alone(self) -> None:
        first = died(Cause.PREEMPTED, ask=self.IN_SHORT)
        once, twice = decide([first], self.MEANS), decide([first, first], self.MEANS)
        assert isinstance(once, Again)
        assert isinstance(twice, Again)
        assert (once.ask.partition, twice.ask.partition) == ("short", "long")
        assert once.why == "again, it was preempted"
        onward = decide([first, replace(first, done=3)], self.MEANS)
        assert isinstance(onward, Again)
        assert onward.ask.partition == "short"
        alone = decide([first, first], replace(self.MEANS, places=(self.SHORT,)))
        assert isinstance(alone, Again)
        assert alone.ask.partition == "short"

    def test_only_the_last_two_ends_say_whether_a_task_keeps_making_room(self) -> None:
        node, preempted = (died(cause, ask=self.IN_SHORT) for cause in (Cause.NODE, Cause.PREEMPTED))
        for history, partition in (([node, preempted], "short"), ([preempted, node], "short")):
            decision = decide(history, self.MEANS)
            assert isinstance(decision, Again)
            assert decision.ask.partition == partition
        longer = decide([node, preempted, preempted], replace(self.MEANS, tries=9))
        assert isinstance(longer, Again)
        assert longer.ask.partition == "long"

    def test_what_keeps_making_room_without_a_place_of_its_own_gets_one(self) -> None:
        decision = decide([died(Cause.PREEMPTED)] * 2, replace(self.MEANS, places=(self.SHORT,)))
        assert isinstance(decision, Again)
        assert decision.ask.partition == "short"

    def test_what_keeps_making_room_stays_where_no_place_that_leaves_it_alone_holds_it(self) -> None:
        roomy = replace(self.SHORT, limits=replace(self.SHORT.limits, mem_bytes=8192 * MIB))
        large = died(Cause.PREEMPTED, ask=replace(self.IN_SHORT, mem_bytes=2048 * MIB))
        for places, partition in (((roomy, self.LONG), "short"), ((roomy, self.LONG, self.HIGHMEM), "highmem")):
            decision = decide([large, large], replace(self.MEANS, places=places))
            assert isinstance(decision, Again)
            assert decision.ask.partition == partition

    def test_what_keeps_making_room_leaves_a_place_that_no_longer_holds_it_for_one_that_does(self) -> None:
        large = died(Cause.PREEMPTED, ask=replace(self.IN_SHORT, mem_bytes=2048 * MIB))
        roomy = Candidate("roomy", replace(self.SHORT.limits, mem_bytes=8192 * MIB))
        decision = decide([large, large], replace(self.MEANS, places=(self.SHORT, self.LONG, roomy)))
        assert isinstance(decision, Again)
        assert decision.ask.partition == "roomy"

    def test_a_task_goes_where_there_are_nodes_enough_for_it(self) -> None:
        few = replace(self.LONG, limits=replace(self.LONG.limits, nodes=1))
        listed = replace(self.MEANS, places=(self.SHORT, few, self.HIGHMEM))
        for nodes, partition in ((1, "long"), (2, "highmem")):
            decision = decide([died(Cause.TIMEOUT, ask=self.IN_SHORT)], replace(listed, nodes=nodes))
            assert isinstance(decision, Again)
            assert decision.ask.partition == partition
        alone = decide([died(Cause.TIMEOUT, ask=self.IN_SHORT)], listed)
        assert isinstance(alone, Again)
        assert alone.ask.partition == "long"


places = st.lists(limits, min_size=1, max_size=4).map(
    lambda found: tuple(Candidate(f"p{number}", each) for number, each in enumerate(found))
)


@given(st.lists(attempts, min_size=1, max_size=6), places, st.integers(1, 50), st.data())
def test_a_task_goes_only_to_listed_partitions_and_to_one_that_holds_it_if_its_own_did(
    history: list[Attempt], listed: tuple[Candidate, ...], items: int, data: st.DataObject
) -> None:
    now = data.draw(st.sampled_from(listed))
    history = [replace(attempt, ask=replace(attempt.ask, partition=now.partition)) for attempt in history]
    decision = decide(history, Means(Limits(), items, 3, places=listed))
    if isinstance(decision, GiveUp):
        return
    chosen = next(place for place in listed if place.partition == decision.ask.partition)
    last = history[-1].ask
    if not now.refuses(last.mem_bytes, last.time_s):
        assert not chosen.refuses(decision.ask.mem_bytes, decision.ask.time_s)


@given(st.lists(attempts, min_size=1, max_size=6), limits, st.integers(1, 50), st.integers(1, 4))
def test_every_history_has_a_decision_within_what_there_is_to_give(
    history: list[Attempt], there: Limits, items: int, tries: int
) -> None:
    decision = decide(history, Means(there, items, tries))
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
def test_a_task_that_always_ends_the_same_way_comes_to_an_end(cause: Cause, there: Limits, items: int) -> None:
    """Follow one branch: retries as they are decided, splits into their first half."""
    ask, history = ASK, list[Attempt]()
    for _ in range(200):
        history.append(died(cause, ask=ask, on=("a",)))
        decision = decide(history, Means(there, items, 3))
        if isinstance(decision, (GiveUp, LeaveOut)):
            return
        ask = decision.ask
        if isinstance(decision, Split):
            items, history = max(1, items // 2), []
    raise AssertionError(f"{cause} goes on for ever")


@given(st.sets(st.integers(0, 300)).map(sorted))
def test_ranges_say_every_number_once(chosen: list[int]) -> None:
    assert parse_ranges(format_ranges(chosen)) == chosen


@given(
    st.sets(st.integers(0, 300), min_size=1).map(sorted),
    st.none() | st.integers(0, 50),
    st.none() | st.integers(1, 50),
    st.integers(1, 100),
)
def test_pieces_fit_an_array_and_the_queue(due: list[int], highest: int | None, most: int | None, room: int) -> None:
    found = list(pieces(due, Limits(highest_task=highest, job_tasks=most), room))
    assert [number for piece in found for number in piece] == due
    for piece in found:
        assert len(piece) <= min(most or 1 << 30, room)
        if highest is not None:
            assert piece[0] // (highest + 1) == piece[-1] // (highest + 1)


def test_progress_is_measured_against_the_best_attempt_before() -> None:
    history = [died(Cause.NODE, done=done) for done in (5, 3, 5)]
    assert not progressed(history)
    assert stuck(history) == 2
    assert progressed([*history, died(Cause.NODE, done=6)])
    assert not progressed(history[:2])
    assert progressed([died(Cause.NODE, done=1)])
    assert not progressed([died(Cause.NODE)])


def test_a_node_that_failed_twice_is_left_out() -> None:
    tasks = [TaskRecord(0, ended=[died(Cause.NODE, node="n1"), died(Cause.NODE, node="n2")]), TaskRecord(1)]
    assert bad_nodes(tasks) == ()
    tasks[1].ended.append(died(Cause.NODE, node="n1"))
    assert bad_nodes(tasks) == ("n1",)


def test_a_node_is_left_out_for_its_own_failures_only() -> None:
    crashed, unknown = died(Cause.CRASHED, node="n2"), died(Cause.NODE)
    tasks = [TaskRecord(0, ended=[crashed, crashed, unknown, unknown, died(Cause.NODE, node="n3")])]
    assert bad_nodes(tasks) == ()
    assert bad_nodes(tasks, times=1) == ("n3",)
