"""The allocator's simulator: torch's rules, and what always holds."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.memory.footprint import Tape
from pipeline.memory.hardware.caching_allocator import (
    CACHED,
    UNMAPPED,
    Allocator,
    AllocatorSettings,
    SimulatedOutOfMemory,
)

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


RULES: dict[str, tuple[AllocatorSettings, str, dict[str, float]]] = {
    # what is allocated (+ MiB), released (- number), and given back (empty), in turn; what holds at the end, in MiB
    "small blocks share a segment of 2": (DEFAULT, "+1 +1", {"reserved": 2}),
    "small blocks take another one": (DEFAULT, "+1 +1 +0.001", {"reserved": 4}),
    "large blocks share a segment of 20": (DEFAULT, "+9.5 +9.5", {"reserved": 20}),
    "large blocks take another one": (DEFAULT, "+9.5 +9.5 +1.5", {"reserved": 40}),
    "10 and more have a segment": (DEFAULT, "+10", {"reserved": 10}),
    "of even MiB": (DEFAULT, "+10.5", {"reserved": 12}),
    "pools are apart": (DEFAULT, "+1 +1.5", {"reserved": 22}),
    "a freed block is given out again": (DEFAULT, "+50 -0 +40", {"reserved": 50, "made": 1}),
    "the smallest that fits is taken": (DEFAULT, "+100 +60 +80 -0 -1 -2 +70 +100 +60", {"made": 3}),
    "a rest of 1 stays with its block": (DEFAULT, "+40 -0 +39", {"allocated": 40}),
    "a larger rest is split off": (DEFAULT, "+40 -0 +38.5", {"allocated": 38.5}),
    "free neighbours become one": (DEFAULT, "+9 +9 -0 -1 +20", {"made": 1}),
    "a segment in use is not given back": (DEFAULT, "+9 +9 +30 -0 -2 empty", {"reserved": 20, "freed": 1}),
    "expandable: pages of 2": (EXPANDABLE, "+1 +1 +0.001", {"reserved": 4}),
    "expandable: pages of 20": (EXPANDABLE, "+33", {"reserved": 40}),
    "expandable: the rest of a page": (EXPANDABLE, "+33 +6.5", {"reserved": 40}),
    "expandable: another page": (EXPANDABLE, "+33 +8", {"reserved": 60}),
    "expandable: any rest is split off": (EXPANDABLE, "+40 -0 +39.5", {"allocated": 39.5}),
    "expandable: whole pages are given back": (EXPANDABLE, "+30 +50 +30 -1 empty", {"reserved": 80, "freed": 1}),
    "expandable: and filled again": (EXPANDABLE, "+30 +50 +30 -1 empty +45", {"reserved": 120, "at": 30}),
    "expandable: no whole page is free": (EXPANDABLE, "+30 +20 +30 -1 empty", {"reserved": 80, "freed": 0}),
    "expandable: what is left of a page": (EXPANDABLE, "+30 +45 +25 -1 empty +15 +10", {"reserved": 80}),
    # `get_free_block` takes a block for as large as it can grow; the 8 MiB at the end would fit better
    "expandable: the end is left": (EXPANDABLE, "+30 +2 -0 +6", {"at": 0}),
    "expandable: the next larger hole": (EXPANDABLE, "+4 +2 +24 +2 -0 -2 +6", {"at": 6}),
    "expandable: of equal holes the first": (EXPANDABLE, "+40 +40 +40 +40 +40 -3 -1 +40", {"at": 40}),
    "expandable: of unmapped ones, too": (EXPANDABLE, "+40 +40 +40 +40 +40 -3 -1 +40 empty +40", {"at": 120}),
    "expandable: too small a hole": (EXPANDABLE, "+40 +40 +40 -1 empty +60", {"at": 120, "reserved": 140}),
    "expandable: of two holes the smaller": (EXPANDABLE, "+30 +100 +40 +2 -0 -2 +25", {"at": 0}),
    "expandable: before a hole": (EXPANDABLE, "+30 +50 +30 +20 +30 +60 +40 -1 empty -3 -5 +5", {"at": 110}),
}


@pytest.mark.parametrize("rule", RULES)
def test_blocks_are_laid_out_as_torch_does(rule: str) -> None:
    chosen, script, expected = RULES[rule]
    allocator, number, start = Allocator(chosen), 0, 0
    before: set[tuple[int, int]] = set()
    for word in script.split():
        if word == "empty":
            allocator.empty_cache()
        elif word.startswith("-"):
            allocator.release(int(word[1:]))
        else:
            before = set(allocator.live())
            allocator.allocate(number, int(float(word) * MIB))
            number += 1
        check_blocks(allocator)
        start = start or min(allocator.live(), default=(0, 0))[0]
    (last,) = set(allocator.live()) - before or {(0, 0)}
    found = {
        "reserved": allocator.reserved_bytes / MIB,
        "allocated": allocator.allocated_bytes / MIB,
        "made": allocator.segments_made,
        "freed": allocator.segments_freed,
        "at": (last[0] - start) / MIB,
    }
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("size", [1, 512, 513, 1 * MIB, 1 * MIB + 1])
def test_sizes_are_rounded_up_to_512_bytes(size: int) -> None:
    assert filled([size / MIB]).allocated_bytes == -(-size // 512) * 512


def test_at_the_limit_the_cache_is_given_back_before_anything_fails() -> None:
    allocator = filled([40, 50], limit_mib=100)
    allocator.release(0)
    allocator.allocate(2, 50 * MIB)
    assert (allocator.reserved_bytes, allocator.retries, allocator.segments_freed) == (100 * MIB, 1, 1)


@pytest.mark.parametrize("chosen", ALL)
def test_beyond_the_limit_the_facts_are_told_and_what_was_there_is_kept(chosen: AllocatorSettings) -> None:
    allocator = filled([40, 40], chosen, limit_mib=100)
    with pytest.raises(SimulatedOutOfMemory, match="100 MiB") as failed:
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


def test_a_block_is_neither_released_nor_allocated_twice() -> None:
    with pytest.raises(ValueError, match="block -7"):
        Allocator(DEFAULT).play(tape((-7, -512)))
    with pytest.raises(ValueError, match="block 3"):
        Allocator(DEFAULT).release(3)
    with pytest.raises(ValueError, match="block -7"):
        Allocator(DEFAULT).play(tape((-7, 512), (-7, 512)))
    with pytest.raises(ValueError, match="block 0"):
        filled([1]).allocate(0, 5)


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


def lines_of(blocks: int) -> int:
    """Return how many lines of Python run while so many blocks are allocated and released in turn."""
    rng, numbers = np.random.default_rng(0), np.arange(blocks)
    sizes = (2 ** rng.uniform(9, 25, blocks)).astype(np.int64)
    both = Tape(np.concatenate([numbers, numbers[::-1]]), np.concatenate([sizes, -sizes[::-1]]))
    allocator, lines = Allocator(DEFAULT), 0
    allocator.play(both)

    def count(*_: object) -> object:
        nonlocal lines
        lines += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        allocator.play(both)
    finally:
        sys.settrace(before)
    return lines


def test_the_work_of_a_replay_grows_with_its_events() -> None:
    assert lines_of(2000) < 15 * lines_of(200)
