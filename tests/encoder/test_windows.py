"""Windows cover everything, and every residue has the row from where it stands farthest from a cut."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.encoder.embedding_recipe import window_shares, windows

relaxed = settings(deadline=None)  # other work may share the machine
CASES = st.integers(1, 60).flatmap(
    lambda window: st.tuples(st.integers(1, 400), st.just(window), st.integers(0, window - 1))
)


def test_windows_of_a_sequence_by_hand():
    assert windows(25, 10, 4) == [(0, 10), (6, 16), (12, 22), (15, 25)]
    assert window_shares([(0, 10), (6, 16), (12, 22), (15, 25)]) == [(0, 8), (8, 14), (14, 19), (19, 25)]


@pytest.mark.parametrize(("length", "spans"), [(10, [(0, 10)]), (3, [(0, 3)]), (11, [(0, 10), (1, 11)])])
def test_a_sequence_about_as_long_as_a_window(length, spans):
    assert windows(length, 10, 4) == spans


@pytest.mark.parametrize(("window", "overlap"), [(10, 10), (10, 11), (10, -1), (0, 0)])
def test_windows_that_would_not_move_are_refused(window, overlap):
    with pytest.raises(ValueError, match="overlap"):
        windows(100, window, overlap)


@relaxed
@given(CASES)
def test_windows_are_whole_and_overlap_by_at_least_what_was_asked(case):
    length, window, overlap = case
    spans = windows(*case)
    assert spans[0][0] == 0
    assert spans[-1][1] == length
    assert {end - start for start, end in spans} == {min(length, window)}
    assert all(one[1] - other[0] >= overlap and other[0] > one[0] for one, other in pairwise(spans))


@relaxed
@given(CASES)
def test_every_residue_comes_from_the_window_where_it_is_farthest_from_a_cut(case):
    length = case[0]
    spans = windows(*case)
    parts = [np.array([[number, place] for place in range(start, end)]) for number, (start, end) in enumerate(spans)]
    given = zip(parts, spans, window_shares(spans), strict=True)
    merged = np.concatenate([part[start - begin : stop - begin] for part, (begin, _), (start, stop) in given])
    assert merged[:, 1].tolist() == list(range(length))
    assert merged[:, 0].tolist() == [_best(place, spans, length) for place in range(length)]


def _best(place: int, spans: list[tuple[int, int]], length: int) -> int:
    """Find by comparing all windows which one has a place farthest from its cuts."""
    room = [
        min(place - start if start else length, end - 1 - place if end < length else length)
        if start <= place < end
        else -1
        for start, end in spans
    ]
    return room.index(max(room))
