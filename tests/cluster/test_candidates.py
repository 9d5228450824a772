"""Which partition a task goes to, of several that are listed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.cluster.candidates import Candidate, candidates_of, choose, envelope, reach, why_there
from pipeline.cluster.job_spec import Limits
from pipeline.config.schema_cluster import SlurmSection

GIB = 1 << 30
SHORT = Candidate("short", Limits(mem_bytes=4 * GIB, time_s=600, nodes=8))
LONG = Candidate("long", Limits(mem_bytes=4 * GIB, time_s=86_400, nodes=4))
HIGHMEM = Candidate("highmem", Limits(mem_bytes=64 * GIB, time_s=3600, nodes=1), price=3.0)
ALL = (SHORT, LONG, HIGHMEM)


def test_a_task_goes_to_the_first_that_holds_it_and_stays_while_that_holds_it() -> None:
    assert choose(ALL, GIB, 60) == "short"
    assert choose(ALL, GIB, 3600) == "long"
    assert choose(ALL, 5 * GIB, 3600) == "highmem"
    assert choose((LONG, SHORT), GIB, 60, nodes=5) == "short"
    assert choose(ALL, GIB, 60, stay="highmem") == "highmem"
    assert choose(ALL, GIB, 7200, stay="highmem") == "long"


def test_what_none_holds_stays_or_goes_where_its_time_fits_and_most_memory_is() -> None:
    assert choose(ALL, 99 * GIB, 60) == "highmem"
    assert choose(ALL, 99 * GIB, 60, stay="long") == "long"
    assert choose(ALL, GIB, 999_999) == "short"


def test_the_cheapest_goes_first_and_of_equal_ones_the_first_in_the_list() -> None:
    limits = {place.partition: place.limits for place in ALL}
    site = SlurmSection(partitions=("highmem", "long", "short"), prices={"highmem": 3.0})
    assert [place.partition for place in candidates_of(site, limits.__getitem__)] == ["long", "short", "highmem"]
    assert candidates_of(SlurmSection(partition="short"), limits.__getitem__) == ()


def test_a_partition_without_such_nodes_holds_nothing() -> None:
    bare = Candidate("bare", Limits(lacks="has no node with 1 cores and 2 GPUs"))
    assert choose((bare, SHORT), GIB, 60) == "short"
    assert envelope([bare.limits, SHORT.limits]).mem_bytes == 4 * GIB


limits = st.builds(
    Limits,
    mem_bytes=st.none() | st.integers(1, 64).map(lambda count: count * GIB),
    time_s=st.none() | st.integers(1, 100).map(lambda count: count * 60),
    preempts=st.booleans(),
    lacks=st.sampled_from(["", "", "has no such node"]),
)
places = st.lists(limits, min_size=1, max_size=5).map(
    lambda found: tuple(Candidate(f"p{number}", each) for number, each in enumerate(found))
)


@given(places, st.integers(1, 80).map(lambda count: count * GIB), st.integers(1, 120).map(lambda count: count * 60))
def test_the_choice_is_listed_and_holds_the_task_if_any_does(
    listed: tuple[Candidate, ...], mem_bytes: int, time_s: int
) -> None:
    chosen = next(place for place in listed if place.partition == choose(listed, mem_bytes, time_s))
    holding = [place for place in listed if not place.refuses(mem_bytes, time_s)]
    if holding:
        assert chosen is holding[0]
    assert why_there(listed, chosen.partition, mem_bytes, time_s)


@given(places, st.integers(1, 80).map(lambda count: count * GIB), st.integers(1, 120).map(lambda count: count * 60))
def test_what_can_be_reached_is_held_by_one_of_those_that_are_listed(
    listed: tuple[Candidate, ...], mem_bytes: int, time_s: int
) -> None:
    if all(place.refuses(mem_bytes, time_s) for place in listed):
        return
    there = reach(listed, mem_bytes, time_s, Limits())
    most, longest = there.mem_bytes or 1 << 60, there.time_s or 1 << 40
    assert any(not place.refuses(most, time_s) for place in listed)
    assert any(not place.refuses(mem_bytes, longest) for place in listed)
