"""Epochs played to the allocator's simulator, and the settings that are chosen for them."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.memory.footprint import MicroFootprint, StandingFootprint, StepTapes, Tape
from pipeline.memory.hardware.caching_allocator import DEFAULT, EXPANDABLE, replay_steps
from pipeline.memory.planning.step_estimates import SETTINGS, reserve
from tests.memory.planning.oracles import tape

EMPTY = Tape(np.zeros(0, np.int64), np.zeros(0, np.int64))
MIB = 1 << 20


def micro(tokens: int, layers: int = 8) -> Tape:
    """Return forward and backward of a transformer in fp32: width 512, 8 heads."""
    row, square = 512 * 4 * tokens, 8 * 4 * tokens**2
    events: list[tuple[int, int]] = []
    kept: list[int] = []
    for _ in range(layers):
        for size, is_kept in (
            (3 * row, True),
            (square, False),
            (square, True),
            (row, True),
            (4 * row, False),
            (row, True),
        ):
            number = len(events)
            events.append((number, size))
            if is_kept:
                kept.append(number)
            else:
                events.append((number, -size))
    sizes = dict(events)
    for number in reversed(kept):
        gradient = 10_000 + number
        events += [(gradient, sizes[number]), (number, -sizes[number]), (gradient, -sizes[number])]
    return tape(*events)


def shuffled(count: int = 40) -> list[StepTapes]:
    return [
        StepTapes((micro(tokens), EMPTY)) for tokens in np.random.default_rng(3).integers(300, 2500, count).tolist()
    ]


SETUP = tape((-1, 50 * MIB), (-2, 7 * MIB))


def footprints(tapes: list[Tape], setup: Tape) -> tuple[StandingFootprint, list[list[MicroFootprint]]]:
    """Return steps of one micro-batch each, without gradients or an optimizer."""
    micros = [[MicroFootprint({}, micro, micro, (), 0.0, 0)] for micro in tapes]
    return StandingFootprint(setup, EMPTY, EMPTY, (), 0, 0), micros


def test_a_replay_tells_both_peaks() -> None:
    played = replay_steps([StepTapes((tape((0, 30 * MIB), (0, -30 * MIB)),))] * 3, DEFAULT, SETUP)
    assert (played.allocated_bytes, played.reserved_bytes) == (87 * MIB, 100 * MIB)
    assert played.fragmentation == pytest.approx(100 / 87)


def test_shapes_that_vary_fragment_the_default_most() -> None:
    steps = shuffled()
    plain = replay_steps(steps, DEFAULT, SETUP)
    expandable = replay_steps(steps, EXPANDABLE, SETUP)
    assert plain.fragmentation > 2
    assert expandable.fragmentation < 1.1


def test_what_reserves_least_is_chosen() -> None:
    standing, steps = footprints([step.tapes[0] for step in shuffled()], SETUP)
    held = reserve(standing, steps)
    assert held.settings == "expandable_segments:True"
    each = [reserve(standing, steps, [settings]).bytes for settings in SETTINGS]
    assert held.bytes <= 1.02 * min(each)

    assert reserve(standing, steps, SETTINGS[:1]).settings == "", "no other was allowed"


def test_where_nothing_is_gained_the_plainest_is_chosen() -> None:
    standing, steps = footprints([tape((0, 64 * MIB), (0, -64 * MIB))] * 5, EMPTY)
    assert reserve(standing, steps).settings == ""
