"""Epochs played to the allocator's simulator, and what is recommended for them."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.memory.footprint import EMPTY, StepTapes, Tape
from pipeline.memory.hardware.allocator_replay import VARIANTS, AllocatorVariant, recommend, replay_steps, worst_first
from pipeline.memory.hardware.caching_allocator import AllocatorSettings, SimulatedOutOfMemory

MIB = 1 << 20
DEFAULT = AllocatorSettings()


def tape(*events: tuple[int, int]) -> Tape:
    return Tape(np.array([one for one, _ in events], np.int64), np.array([size for _, size in events], np.int64))


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


def test_a_replay_tells_peaks_and_what_the_driver_did() -> None:
    played = replay_steps([StepTapes((tape((0, 30 * MIB), (0, -30 * MIB)),))] * 3, DEFAULT, SETUP)
    assert (played.allocated_bytes, played.reserved_bytes) == (87 * MIB, 100 * MIB)
    assert (played.driver_calls, played.retries, played.steps) == (3, 0, 3)
    assert played.fragmentation == pytest.approx(100 / 87)


def test_a_limit_that_is_too_small_fails() -> None:
    with pytest.raises(SimulatedOutOfMemory):
        replay_steps(shuffled(3), DEFAULT, SETUP, limit_bytes=100 * MIB)


def test_shapes_that_vary_fragment_the_default_most() -> None:
    steps = shuffled()
    plain = replay_steps(steps, DEFAULT, SETUP)
    expandable = replay_steps(steps, AllocatorSettings(expandable=True), SETUP)
    ordered = replay_steps(worst_first(steps), DEFAULT, SETUP)
    assert plain.fragmentation > 2
    assert expandable.fragmentation < 1.1
    assert ordered.fragmentation < 1.1
    assert plain.driver_calls > 1.5 * ordered.driver_calls


def test_the_worst_step_comes_first_and_updates_keep_their_places() -> None:
    first, later = tape((-5, 512)), tape((-6, 512), (-6, -512))
    steps = [StepTapes((micro(3), first)), StepTapes((micro(9), micro(2), later)), StepTapes((micro(4), later))]
    ordered = worst_first(steps)
    assert ordered[0].tapes[-1] is first
    assert ordered[0].tapes[:-1] == steps[1].tapes[:-1]
    assert ordered[1].tapes == (steps[0].tapes[0], later)
    assert ordered[2] == steps[2]


def test_where_the_worst_step_is_first_or_none_is_there_nothing_changes() -> None:
    steps = [StepTapes((micro(9), EMPTY)), StepTapes((micro(3), EMPTY))]
    assert worst_first(steps) == steps
    assert worst_first([]) == []


def test_what_reserves_least_is_recommended_with_all_that_were_tried() -> None:
    found = recommend(SETUP, shuffled())
    assert found.chosen is not None
    assert found.chosen.alternative.settings.expandable
    assert [trial.alternative for trial in found.trials] == list(VARIANTS)
    least = min(trial.replay.reserved_bytes for trial in found.trials if trial.replay)
    assert found.chosen.replay is not None
    assert found.chosen.replay.reserved_bytes <= 1.02 * least
    assert "times what is live" in found.reason
    assert "default: " in found.reason


def test_where_nothing_is_gained_the_plainest_is_recommended() -> None:
    same = [StepTapes((tape((0, 64 * MIB), (0, -64 * MIB)), EMPTY))] * 5
    found = recommend(EMPTY, same)
    assert found.chosen is not None
    assert found.chosen.alternative.name == "default"


def test_what_runs_out_of_memory_is_not_recommended() -> None:
    steps = shuffled()
    most = replay_steps(steps, AllocatorSettings(expandable=True), SETUP).reserved_bytes
    plain, expandable = AllocatorVariant(DEFAULT), AllocatorVariant(AllocatorSettings(expandable=True))
    never = AllocatorVariant(AllocatorSettings(roundup_power2_divisions=1))
    found = recommend(SETUP, steps, (never, expandable), limit_bytes=most)
    assert found.chosen is not None
    assert found.chosen.replay is not None
    assert found.chosen.replay.reserved_bytes <= most
    none = recommend(SETUP, steps, (plain, expandable), limit_bytes=100 * MIB)
    assert none.chosen is None
    assert [trial.replay for trial in none.trials] == [None, None]
    assert "100 MiB may be reserved" in none.reason


def test_alternatives_are_named_for_tables() -> None:
    assert [one.name for one in VARIANTS] == [
        "default",
        "expandable_segments:True",
        "default, worst shape first",
    ]
