"""The allocator's simulator: torch's rules, and what always holds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.memory.footprint import Tape
from pipeline.memory.hardware.caching_allocator import DEFAULT, EXPANDABLE, Allocator
from tests.memory.planning.oracles import tape
from tests.testkit.counted import calls_of

MIB = 1 << 20
ALL = (DEFAULT, EXPANDABLE)


def play(allocator: Allocator, number: int, size: int) -> None:
    """Allocate a block that other tapes know, or release it (below 0)."""
    allocator.play(tape((-1 - number, size)))


RULES: dict[str, tuple[str, str, dict[str, float]]] = {
    # what is allocated (+ MiB) and released (- number), in turn; what holds at the end, in MiB
    "small blocks share a segment of 2": (DEFAULT, "+1 +1", {"reserved": 2}),
    "small blocks take another one": (DEFAULT, "+1 +1 +0.001", {"reserved": 4}),
    "large blocks share a segment of 20": (DEFAULT, "+9.5 +9.5", {"reserved": 20}),
    "large blocks take another one": (DEFAULT, "+9.5 +9.5 +1.5", {"reserved": 40}),
    "10 and more have a segment": (DEFAULT, "+10", {"reserved": 10}),
    "of even MiB": (DEFAULT, "+10.5", {"reserved": 12}),
    "pools are apart": (DEFAULT, "+1 +1.5", {"reserved": 22}),
    "a freed block is given out again": (DEFAULT, "+50 -0 +40", {"reserved": 50}),
    "the smallest that fits is taken": (DEFAULT, "+100 +60 +80 -0 -1 -2 +70 +100 +60", {"reserved": 240}),
    "a rest of 1 stays with its block": (DEFAULT, "+40 -0 +39", {"allocated": 40}),
    "a larger rest is split off": (DEFAULT, "+40 -0 +38.5", {"allocated": 38.5}),
    "free neighbours become one": (DEFAULT, "+9 +9 -0 -1 +20", {"reserved": 20}),
    "expandable: pages of 2": (EXPANDABLE, "+1 +1 +0.001", {"reserved": 4}),
    "expandable: pages of 20": (EXPANDABLE, "+33", {"reserved": 40}),
    "expandable: the rest of a page": (EXPANDABLE, "+33 +6.5", {"reserved": 40}),
    "expandable: another page": (EXPANDABLE, "+33 +8", {"reserved": 60}),
    "expandable: any rest is split off": (EXPANDABLE, "+40 -0 +39.5", {"allocated": 39.5}),
    # `get_free_block` takes a block for as large as it can grow; the 8 MiB at the end would fit better
    "expandable: the end is left": (EXPANDABLE, "+30 +2 -0 +6", {"at": 0}),
    "expandable: the next larger hole": (EXPANDABLE, "+4 +2 +24 +2 -0 -2 +6", {"at": 6}),
    "expandable: of equal holes the first": (EXPANDABLE, "+40 +40 +40 +40 +40 -3 -1 +40", {"at": 40}),
    "expandable: of two holes the smaller": (EXPANDABLE, "+30 +100 +40 +2 -0 -2 +25", {"at": 0}),
}


@pytest.mark.parametrize("rule", RULES)
def test_blocks_are_laid_out_as_torch_does(rule: str) -> None:
    chosen, script, expected = RULES[rule]
    allocator, start = Allocator(chosen), 0
    before: set[tuple[int, int]] = set()
    sizes: list[int] = []
    for word in script.split():
        if word.startswith("-"):
            play(allocator, int(word[1:]), -sizes[int(word[1:])])
        else:
            before = set(allocator.live())
            sizes.append(int(float(word) * MIB))
            play(allocator, len(sizes) - 1, sizes[-1])
        start = start or min(allocator.live(), default=(0, 0))[0]
    (last,) = set(allocator.live()) - before or {(0, 0)}
    found = {
        "reserved": allocator.reserved_bytes / MIB,
        "allocated": allocator.allocated_bytes / MIB,
        "at": (last[0] - start) / MIB,
    }
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("size", [1, 512, 513, 1 * MIB, 1 * MIB + 1])
def test_sizes_are_rounded_up_to_512_bytes(size: int) -> None:
    allocator = Allocator(DEFAULT)
    play(allocator, 0, size)
    assert allocator.allocated_bytes == -(-size // 512) * 512


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
    with pytest.raises(ValueError, match="block -7"):
        Allocator(DEFAULT).play(tape((-7, 512), (-7, 512)))


SIZES = st.one_of(st.integers(1, 3 * MIB), st.integers(1, 150 * MIB), st.sampled_from([512, MIB, 10 * MIB, 20 * MIB]))
EVENTS = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 1000)), max_size=60)


@given(EVENTS, st.sampled_from(ALL))
@settings(max_examples=200, deadline=None)
def test_what_always_holds(events: list[tuple[bool, int, int]], chosen: str) -> None:
    allocator = Allocator(chosen)
    live: dict[int, int] = {}
    for number, (is_release, size, which) in enumerate(events):
        if is_release and live:
            released = sorted(live)[which % len(live)]
            play(allocator, released, -live.pop(released))
        else:
            play(allocator, number, size)
            live[number] = size
        ranges = sorted(allocator.live())
        assert len(ranges) == len(live)
        assert all(address + size <= after for (address, size), (after, _) in pairwise(ranges))
        assert sum(size for _, size in ranges) == allocator.allocated_bytes >= sum(live.values())
        assert allocator.allocated_bytes <= allocator.peak_allocated_bytes <= allocator.reserved_bytes
    for number, size in live.items():
        play(allocator, number, -size)
    assert allocator.allocated_bytes == 0


def work_of(blocks: int) -> int:
    """Return how many calls a replay makes of so many blocks that are allocated and released in turn."""
    rng, numbers = np.random.default_rng(0), np.arange(blocks)
    sizes = (2 ** rng.uniform(9, 25, blocks)).astype(np.int64)
    both = Tape(np.concatenate([numbers, numbers[::-1]]), np.concatenate([sizes, -sizes[::-1]]))
    (allocator := Allocator(DEFAULT)).play(both)
    return calls_of(lambda: allocator.play(both))


def test_the_work_of_a_replay_grows_with_its_events() -> None:
    assert 2000 < work_of(2000) < 15 * work_of(200)
