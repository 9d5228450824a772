"""Branches on values are guessed, and the guesses are told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.memory.footprint import MemoryChoice, Provenance
from pipeline.memory.tracing.tracer import CannotTrace
from tests.memory.tracing.traced import LARGE, WIDTH, Small, tracer

PLAIN = MemoryChoice()


class Branching(nn.Module):
    """Goes one way or the other, as the values are."""

    def __init__(self, yes, no):
        super().__init__()
        self.layer, self.yes, self.no = nn.Linear(WIDTH, WIDTH), yes, no

    def forward(self, x):
        y = self.layer(x)
        if (y > 0).any():
            return self.yes(y)
        return self.no(y)


def micro(yes, no):
    return tracer(Small(lambda: Branching(yes, no))).micro(PLAIN, LARGE)


def wide(y):
    return torch.cat([y, y, y, y], 1).exp().exp()


def refused(y):
    raise ValueError("not this way")


@pytest.mark.parametrize(("yes", "no", "answer"), [(wide, torch.relu, "true"), (torch.relu, wide, "false")])
def test_a_branch_is_traced_both_ways_and_the_higher_is_kept_and_told(yes, no, answer):
    taken, always = micro(yes, no), micro(wide, wide)
    assert taken.again.peak_bytes == pytest.approx(always.again.peak_bytes, rel=0.001)
    assert taken.again.peak_bytes > 2 * micro(torch.relu, torch.relu).again.peak_bytes
    (note,) = taken.notes
    assert "test_guesses.py:" in note
    assert f"`if (y > 0).any():` is {answer}" in note
    assert taken.origin is Provenance.GUESSED


def test_where_that_ends_in_an_error_it_is_taken_not_to_be():
    other = micro(refused, torch.relu)
    assert "is false" in other.notes[0]
    assert other.again.peak_bytes == pytest.approx(micro(torch.relu, refused).again.peak_bytes, abs=64)


def test_where_both_ways_end_in_an_error_it_cannot_be_traced():
    with pytest.raises(CannotTrace, match="not this way"):
        micro(refused, refused)


def test_two_branches_are_guessed_apart():
    class Twice(Branching):
        def forward(self, x):
            y = self.layer(x)
            if (y > 0).all():
                y = torch.relu(y)
            if (y > 1).all():
                return refused(y)
            return y

    found = tracer(Small(lambda: Twice(None, None))).micro(PLAIN, LARGE)
    assert ["is true" in note for note in found.notes] == [True, False]


def test_no_guess_is_needed_for_what_is_known_without_data():
    class Known(Branching):
        def forward(self, x):
            return self.layer(x) if x.shape[0] > 1 and x.requires_grad is False else refused(x)

    assert tracer(Small(lambda: Known(None, None))).micro(PLAIN, LARGE).notes == ()
