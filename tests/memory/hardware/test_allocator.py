"""The allocator's simulator: torch's rules, and what always holds."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.memory.footprint import Tape
from pipeline.memory.hardware.allocator_blocks import CACHED, UNMAPPED
from pipeline.memory.hardware.caching_allocator import Allocator, AllocatorSettings, Replay, SimulatedOutOfMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1 << 20
DEFAULT = AllocatorSettings()
EXPANDABLE = AllocatorSettings(expandable=True)
ALL = (DEFAULT, EXPANDABLE)


def filled(sizes: Sequence[float], chosen: AllocatorSettings = DEFAULT, limit_mib: int | None = None) -> Allocator:
    """Return an allocator with blocks of so many MiB in use, numbered from 0."""
    allocator = Allocator(chosen, None if limit_mib is None else limit_mib * MIB)
    for number, size in enumerate(sizes):
        allocator.allocate(number, int(size * MIB))
    return allocator


def reserved_mib(sizes: Sequence[float], chosen: AllocatorSettings = DEFAULT) -> float:
    return filled(sizes, chosen).reserved_bytes / MIB


def tape(*events: tuple[int, int]) -> Tape:
    return Tape(np.array([one for one, _ in events], np.int64), np.array([size for _, size in events], np.int64))


def check_blocks(allocator: Allocator) -> None:
    """Check what holds between the blocks: nothing is empty, lost, out of order, or beside its like."""
    cached_bytes = 0
    for pool in (allocator._small, allocator._large):
        assert pool.keys == sorted((block.bytes << 56) + block.address for block in pool.blocks)
        assert pool.keys == [(block.bytes << 56) + block.address for block in pool.blocks]
        assert all(block.state == CACHED and block.pool is pool for block in pool.blocks)
        assert all(block.state == UNMAPPED for block in pool.unmapped)
        assert all((block.address - pool.start) % pool.page_bytes == 0 for block in pool.unmapped)
        assert all(one.address < other.address for one, other in pairwise(pool.unmapped))
        cached_bytes += sum(block.bytes for block in pool.blocks)
        for block in (*pool.blocks, *pool.unmapped):
            assert block.bytes > 0
            for before, after in ((block.before, block), (block, block.after)):
                if before is not None and after is not None:
                    assert before.after is after
                    assert after.before is before
                    assert before.address + before.bytes == after.address
                    assert before.state != after.state
    assert cached_bytes + allocator.allocated_bytes == allocator.reserved_bytes


@pytest.mark.parametrize(
    ("size", "rounded"), [(1, 512), (512, 512), (513, 1024), (1 * MIB, 1 * MIB), (1 * MIB + 1, 1 * MIB + 512)]
)
def test_sizes_are_rounded_up_to_512_bytes(size: int, rounded: int) -> None:
    allocator = Allocator(DEFAULT)
    allocator.allocate(0, size)
    assert allocator.allocated_bytes == rounded


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1], 2),
        ([1, 1], 2),
        ([1, 1, 0.001], 4),
        ([1.5], 20),
        ([9.5, 9.5], 20),
        ([9.5, 9.5, 1.5], 40),
        ([10], 10),
        ([10.5], 12),
        ([33], 34),
        ([1, 1.5], 22),  # pools are apart
    ],
)
def test_segments_are_as_large_as_torch_makes_them(sizes: Sequence[float], reserved: int) -> None:
    assert reserved_mib(sizes) == reserved


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [([1], 2), ([1, 1, 0.001], 4), ([1.5], 20), ([33], 40), ([33, 6.5], 40), ([33, 8], 60), ([33, 20], 60)],
)
def test_expandable_segments_grow_by_pages(sizes: Sequence[float], reserved: int) -> None:
    assert reserved_mib(sizes, EXPANDABLE) == reserved


def test_a_freed_block_is_given_to_the_next_that_fits() -> None:
    allocator = filled([50])
    allocator.release(0)
    allocator.allocate(1, 40 * MIB)
    assert (allocator.reserved_bytes, allocator.segments_made) == (50 * MIB, 1)


def test_of_the_cached_blocks_the_smallest_that_fits_is_taken() -> None:
    allocator = filled([100, 60, 80])
    for number in range(3):
        allocator.release(number)
    allocator.allocate(3, 70 * MIB)  # from the 80
    allocator.allocate(4, 100 * MIB)
    allocator.allocate(5, 60 * MIB)
    assert allocator.segments_made == 3


def test_a_rest_of_a_large_block_is_split_off_only_above_a_mebibyte() -> None:
    allocator = filled([40])
    allocator.release(0)
    allocator.allocate(1, 39 * MIB)  # the rest of 1 MiB stays with it
    assert allocator.allocated_bytes == 40 * MIB
    allocator.release(1)
    allocator.allocate(2, 39 * MIB - 512)
    assert allocator.allocated_bytes == 39 * MIB - 512


def test_in_an_expandable_segment_any_rest_is_split_off() -> None:
    allocator = filled([40], EXPANDABLE)
    allocator.release(0)
    allocator.allocate(1, 40 * MIB - 512)
    assert allocator.allocated_bytes == 40 * MIB - 512


def test_neighbours_that_are_free_become_one() -> None:
    allocator = filled([9, 9])  # of one segment of 20
    allocator.release(0)
    allocator.release(1)
    check_blocks(allocator)
    allocator.allocate(2, 20 * MIB)
    assert allocator.segments_made == 1


def test_a_segment_that_is_partly_used_is_not_given_back() -> None:
    allocator = filled([9, 9, 30])
    allocator.release(0)
    allocator.release(2)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.segments_freed) == (20 * MIB, 1)


def test_whole_pages_within_an_expandable_segment_are_given_back() -> None:
    allocator = filled([30, 50, 30], EXPANDABLE)
    assert allocator.reserved_bytes == 120 * MIB
    allocator.release(1)  # 30 to 80, in which lie the pages from 40 to 80
    allocator.empty_cache()
    assert allocator.reserved_bytes == 80 * MIB  # and the page from 100 on is used
    assert allocator.segments_freed == 1
    check_blocks(allocator)
    allocator.allocate(3, 45 * MIB)  # fills the hole again: 30 to 75
    assert allocator.reserved_bytes == 120 * MIB
    assert (30 * MIB, 45 * MIB) in {(address % (1 << 54), size) for address, size in allocator.live()}


def test_what_is_left_of_a_page_on_both_sides_stays_and_is_used_again() -> None:
    allocator = filled([30, 45, 25], EXPANDABLE)
    allocator.release(1)  # 30 to 75, in which lies the page from 40 to 60
    allocator.empty_cache()
    assert allocator.reserved_bytes == 80 * MIB
    check_blocks(allocator)
    allocator.allocate(3, 15 * MIB)  # from 60 to 75
    allocator.allocate(4, 10 * MIB)
    assert allocator.reserved_bytes == 80 * MIB


def test_the_end_of_an_expandable_segment_is_left_for_what_fits_nowhere_else() -> None:
    """`get_free_block` takes a block for as large as it can grow; the 8 MiB at the end would fit better."""
    allocator = filled([30, 2], EXPANDABLE)
    allocator.release(0)
    allocator.allocate(2, 6 * MIB)
    assert min(allocator.live()) == (1 << 54, 6 * MIB)


def test_where_the_end_is_left_the_next_larger_hole_is_taken_and_none_that_is_too_small() -> None:
    allocator = filled([4, 2, 24, 2], EXPANDABLE)  # 8 MiB at the end are left
    start = min(allocator.live())[0]
    for number in (0, 2):
        allocator.release(number)
    allocator.allocate(4, 6 * MIB)
    assert (start + 6 * MIB, 6 * MIB) in allocator.live()


def test_a_hole_that_fits_exactly_is_filled_and_of_equal_ones_the_first() -> None:
    allocator = filled([40, 40, 40, 40, 40], EXPANDABLE)
    start = min(allocator.live())[0]
    for number in (3, 1):
        allocator.release(number)
    allocator.allocate(5, 40 * MIB)
    assert (start + 40 * MIB, 40 * MIB) in allocator.live()
    allocator.empty_cache()
    check_blocks(allocator)
    assert allocator.reserved_bytes == 160 * MIB
    allocator.allocate(6, 40 * MIB)
    check_blocks(allocator)
    assert (start + 120 * MIB, 40 * MIB) in allocator.live()


def test_a_hole_that_is_too_small_is_left_and_the_segment_grows_at_its_end() -> None:
    allocator = filled([40, 40, 40], EXPANDABLE)
    start = min(allocator.live())[0]
    allocator.release(1)
    allocator.empty_cache()
    allocator.allocate(3, 60 * MIB)
    assert (start + 120 * MIB, 60 * MIB) in allocator.live()
    assert allocator.reserved_bytes == 140 * MIB


def test_of_two_holes_the_smaller_is_filled_whatever_lies_behind_it() -> None:
    allocator = filled([30, 100, 40, 2], EXPANDABLE)
    start = min(allocator.live())[0]
    for number in (0, 2):
        allocator.release(number)
    allocator.allocate(4, 25 * MIB)
    assert (start, 25 * MIB) in allocator.live()


def test_a_block_before_a_hole_is_left_for_what_needs_both() -> None:
    allocator = filled([30, 50, 30, 20, 30, 60, 40], EXPANDABLE)
    start = min(allocator.live())[0]
    allocator.release(1)  # 30 to 80, of which 40 to 80 become a hole
    allocator.empty_cache()
    for number in (3, 5):
        allocator.release(number)
    allocator.allocate(7, 5 * MIB)
    assert (start + 110 * MIB, 5 * MIB) in allocator.live()


def test_what_holds_no_whole_page_is_not_given_back() -> None:
    allocator = filled([30, 20, 30], EXPANDABLE)
    allocator.release(1)  # 30 to 50, and a page ends at 40
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.segments_freed) == (80 * MIB, 0)


def test_at_the_limit_the_cache_is_given_back_before_anything_fails() -> None:
    allocator = filled([40, 50], limit_mib=100)
    allocator.release(0)
    allocator.allocate(2, 50 * MIB)
    assert (allocator.reserved_bytes, allocator.retries, allocator.segments_freed) == (100 * MIB, 1, 1)


@pytest.mark.parametrize("chosen", ALL)
def test_beyond_the_limit_the_facts_are_told_and_what_was_there_is_kept(chosen: AllocatorSettings) -> None:
    allocator = filled([40, 40], chosen, limit_mib=100)
    with pytest.raises(SimulatedOutOfMemory, match=r"3[02]\.0 MiB wanted, 100 MiB may be reserved") as failed:
        allocator.allocate(2, 30 * MIB)
    assert (failed.value.allocated_bytes, failed.value.limit_bytes) == (80 * MIB, 100 * MIB)
    allocator.release(0)
    allocator.allocate(3, 30 * MIB)
    assert allocator.reserved_bytes <= 100 * MIB


def test_a_limit_by_fraction_refuses_by_whole_segments() -> None:
    """`alloc_block` compares with the size of a segment, though an expandable one would need one page less."""
    by_driver = Allocator(EXPANDABLE, 60 * MIB)
    by_fraction = Allocator(EXPANDABLE, 60 * MIB, is_fraction=True)
    for allocator in (by_driver, by_fraction):
        allocator.allocate(0, 25 * MIB)  # 40 are mapped, 15 of them free
    by_driver.allocate(1, 30 * MIB)
    assert by_driver.reserved_bytes == 60 * MIB
    with pytest.raises(SimulatedOutOfMemory):
        by_fraction.allocate(1, 30 * MIB)


def test_a_limit_by_fraction_may_be_used_to_its_end() -> None:
    allocator = Allocator(DEFAULT, 60 * MIB, is_fraction=True)
    for number, size_mib in enumerate((5, 40)):
        allocator.allocate(number, size_mib * MIB)
    assert (allocator.reserved_bytes, allocator.retries) == (60 * MIB, 0)


def test_blocks_of_a_tape_are_new_each_time_and_negative_ones_are_shared() -> None:
    allocator = Allocator(DEFAULT)
    allocator.play(tape((-1, 5 * MIB), (0, 3 * MIB), (0, -3 * MIB), (1, 2 * MIB)))
    allocator.play(tape((0, 4 * MIB), (-1, -5 * MIB)))
    assert allocator.allocated_bytes == 6 * MIB
    assert sorted(size for _, size in allocator.live()) == [2 * MIB, 4 * MIB]
    assert allocator.peak_allocated_bytes == 11 * MIB
    allocator.play(tape((0, 1), (3, 0), (-1, 0)))  # what is empty is no block
    assert allocator.allocated_bytes == 6 * MIB + 512
    assert allocator.peak_allocated_bytes == 11 * MIB
    assert sorted(size for _, size in allocator.live()) == [512, 2 * MIB, 4 * MIB]


def test_a_block_that_is_not_there_is_not_released() -> None:
    with pytest.raises(ValueError, match="block -7 is released and not in use"):
        Allocator(DEFAULT).play(tape((-7, -512)))
    with pytest.raises(ValueError, match="block 3 is released"):
        Allocator(DEFAULT).release(3)


def test_a_block_is_not_allocated_twice() -> None:
    with pytest.raises(ValueError, match="block -7 is in use and allocated again"):
        Allocator(DEFAULT).play(tape((-7, 512), (-7, 512)))
    with pytest.raises(ValueError, match="block 0 is in use"):
        filled([1]).allocate(0, 5)


def test_an_empty_block_takes_nothing() -> None:
    allocator = Allocator(DEFAULT)
    allocator.allocate(0, 0)
    assert (allocator.reserved_bytes, list(allocator.live())) == (0, [])


@pytest.mark.parametrize(("chosen", "text"), [(DEFAULT, ""), (EXPANDABLE, "expandable_segments:True")])
def test_settings_are_written_as_torch_reads_them(chosen: AllocatorSettings, text: str) -> None:
    assert AllocatorSettings() == DEFAULT
    assert (chosen.text, chosen.name) == (text, text or "default")


def test_a_step_that_allocates_nothing_has_a_fragmentation_too() -> None:
    assert Replay(0, 5).fragmentation == 5


SIZES = st.one_of(st.integers(1, 3 * MIB), st.integers(1, 150 * MIB), st.sampled_from([512, MIB, 10 * MIB, 20 * MIB]))
EVENTS = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 1000)), max_size=60)


@given(EVENTS, st.sampled_from(ALL), st.sampled_from([None, 200, 500]), st.booleans())
@settings(max_examples=200, deadline=None)
def test_what_always_holds(
    events: list[tuple[bool, int, int]], chosen: AllocatorSettings, limit_mib: int | None, is_fraction: bool
) -> None:
    limit = None if limit_mib is None else limit_mib * MIB
    allocator = Allocator(chosen, limit, is_fraction=is_fraction)
    live: dict[int, int] = {}
    for number, (is_release, size, which) in enumerate(events):
        if is_release and live:
            released = sorted(live)[which % len(live)]
            allocator.release(released)
            del live[released]
        else:
            try:
                allocator.allocate(number, size)
                live[number] = size
            except SimulatedOutOfMemory:
                assert limit is not None
        if which % 10 == 0:
            allocator.empty_cache()
        check_blocks(allocator)
        ranges = sorted(allocator.live())
        assert len(ranges) == len(live)
        assert all(address + size <= after for (address, size), (after, _) in pairwise(ranges))
        assert sum(size for _, size in ranges) == allocator.allocated_bytes >= sum(live.values())
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= (limit or allocator.reserved_bytes)
        assert allocator.peak_allocated_bytes <= allocator.peak_reserved_bytes
    for number in live:
        allocator.release(number)
    assert allocator.allocated_bytes == 0
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


@given(EVENTS, st.sampled_from(ALL))
@settings(max_examples=50, deadline=None)
def test_a_tape_does_what_its_events_do(events: list[tuple[bool, int, int]], chosen: AllocatorSettings) -> None:
    one, other = Allocator(chosen), Allocator(chosen)
    live: dict[int, int] = {}
    played: list[tuple[int, int]] = []
    for number, (is_release, size, which) in enumerate(events):
        if is_release and live:
            released = sorted(live)[which % len(live)]
            one.release(released)
            played.append((released, -live.pop(released)))
        else:
            one.allocate(number, size)
            live[number] = size
            played.append((number, size))
    other.play(tape(*played))
    assert sorted(one.live()) == sorted(other.live())
    assert one.peak_reserved_bytes == other.peak_reserved_bytes


def test_an_epoch_is_played_in_seconds() -> None:
    """It plays 600,000 to a million events a second; a tenth of the wanted 300,000 is never a slow machine alone."""
    rng = np.random.default_rng(0)
    sizes = (2 ** rng.uniform(9, 25, 10_000)).astype(np.int64)
    numbers = np.arange(10_000)
    both = Tape(np.concatenate([numbers, numbers[::-1]]), np.concatenate([sizes, -sizes[::-1]]))
    allocator = Allocator(DEFAULT)
    begun = time.process_time()
    for _ in range(3):
        allocator.play(both)
    assert 3 * len(both.block_E) / (time.process_time() - begun) > 30_000
