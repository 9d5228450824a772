"""Pinned memory comes in powers of two: what it takes, and how little is lost where many things share it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.memory.hardware.host_memory import (
    ALIGNMENT,
    CHUNK_BYTES,
    SMALL_BYTES,
    chunked_bytes,
    pinned_bytes,
    pinned_layout,
    staged_bytes,
)
from pipeline.units import GIB

SIZES = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 1 << 22), st.sampled_from([1 << 20, (1 << 20) + 1])))


@pytest.mark.parametrize(("asked", "got"), [(0, 0), (1, 1), (3, 4), (GIB, GIB), (GIB + 1, 2 * GIB)])
def test_pinned_memory_comes_in_powers_of_two(asked: int, got: int) -> None:
    assert pinned_bytes(asked) == got


@given(SIZES, st.booleans())
def test_what_is_laid_out_lies_within_its_runs_and_beside_the_others(sizes: list[int], pinned: bool) -> None:
    layout = pinned_layout(sizes, pinned=pinned)
    taken = sorted(
        (place.run, place.start, place.start + size) for place, size in zip(layout.places, sizes, strict=True) if size
    )
    assert all(start % ALIGNMENT == 0 and end <= layout.runs[run] for run, start, end in taken)
    for (run, _, end), (next_run, start, _) in pairwise(taken):
        assert run < next_run or end <= start


@given(SIZES)
def test_runs_take_no_more_than_each_by_itself_and_little_more_than_what_is_in_them(sizes: list[int]) -> None:
    aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    runs = pinned_layout(sizes, pinned=True)
    assert all(pinned_bytes(run) == run for run in runs.runs)
    large, small = [size for size in aligned if size >= SMALL_BYTES], [size for size in aligned if size < SMALL_BYTES]
    assert sum(aligned) <= runs.bytes <= sum(map(pinned_bytes, large)) + pinned_bytes(sum(small))
    assert runs.bytes <= sum(large) + len(runs.runs) * max(large, default=0) + pinned_bytes(sum(small))
    assert pinned_layout(sizes, pinned=False).bytes == sum(aligned)


@given(SIZES)
def test_the_copy_of_a_state_has_room_for_counters_and_random_states(sizes: list[int]) -> None:
    with_them = [*sizes, *(4 for _ in sizes), 5056, 16]
    for pinned in (False, True):
        assert staged_bytes(sizes, pinned=pinned) >= pinned_layout(with_them, pinned=pinned).bytes


@given(st.integers(1, 1 << 40))
def test_chunks_hold_what_they_are_for_wherever_it_begins(size: int) -> None:
    assert chunked_bytes(size) % CHUNK_BYTES == 0
    assert size + CHUNK_BYTES <= chunked_bytes(size) < size + 2 * CHUNK_BYTES
