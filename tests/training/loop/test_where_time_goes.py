"""Every nanosecond of an epoch belongs to a phase that has a name; no clock of this machine is looked at."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from pipeline.training.loop.metrics_log import EPOCHS, read_epochs
from pipeline.training.loop.observer import TrainingObserver
from pipeline.training.step.optimizers import StepSettings
from pipeline.training.step.step import Step
from pipeline.training.step_clock import CHECKPOINT, COPY, FORWARD, OBSERVE, OTHER, READ, StepClock, told_shares
from tests.training.loop.loops import Judged, Plot, Run
from tests.training.loop.test_figures import EPOCH

SECOND_NS = 1_000_000_000


class Hand:
    """The hand of a clock that only tests move."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns

    def moves(self, seconds: float) -> None:
        self.ns += round(seconds * SECOND_NS)


def test_time_counts_for_the_innermost_phase_and_what_was_before_goes_on() -> None:
    hand = Hand()
    clock = StepClock(hand)
    hand.moves(1)
    with clock.within(READ):
        hand.moves(2)
        with clock.within(COPY):
            hand.moves(4)
        hand.moves(8)
    hand.moves(16)
    assert clock.seconds() == {OTHER: 17.0, READ: 10.0, COPY: 4.0}


def test_a_phase_that_raises_ends_and_one_of_a_step_ends_with_what_surrounds_it() -> None:
    hand = Hand()
    clock = StepClock(hand)
    with pytest.raises(ZeroDivisionError), clock.within(READ):
        hand.moves(1 / hand.ns)
    with clock.within(OTHER):
        clock.phase("backward")
        hand.moves(2)
    hand.moves(4)
    assert clock.seconds() == {OTHER: 4.0, READ: 0.0, "backward": 2.0}


def test_nothing_within_a_whole_phase_counts_by_itself() -> None:
    hand = Hand()
    clock = StepClock(hand)
    with clock.whole("validate"):
        clock.phase("forward")
        with clock.whole(READ), clock.within(COPY):
            hand.moves(1)
        clock.phase("idle")
        hand.moves(2)
        assert clock.seconds() == {OTHER: 0.0, "validate": 3.0}
    hand.moves(4)
    assert clock.restart({READ: 5.0}) == {OTHER: 4.0, "validate": 3.0}
    assert clock.seconds() == {OTHER: 0.0, "validate": 0.0, READ: 5.0}


def test_waiting_for_what_an_iterator_gives_is_a_phase_and_nothing_of_it_is_kept() -> None:
    hand, given = Hand(), [1, 2]
    clock = StepClock(hand)

    def batches():
        for number in given:
            hand.moves(3)
            yield number

    for _ in clock.each(READ, batches()):
        hand.moves(1)
    assert clock.seconds() == {OTHER: 2.0, READ: 6.0}


class Slow(Judged):
    """Takes two seconds to compute a loss, four to say what it sees of a batch; collating is the readers' time."""

    hand: Hand

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        self.hand.moves(2)
        return super().loss(model, batch)

    def outputs(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        self.hand.moves(4)
        return super().outputs(model, batch)


def slow(folder: Path, hand: Hand, **train: Any) -> Run:
    """Return a training of two epochs of three steps, whose time a test moves by hand."""
    plot = Plot(train=train, budget=1000, validated=4)
    task = Slow(plot)
    task.hand = hand

    def make(task: Any, settings: StepSettings) -> Step:
        step = Step(task, settings)
        step.clock = step.watch = StepClock(hand)
        return step

    run = Run(plot, folder, task=task, make=make)
    run.trainer.stepper.learn_terms(1)  # else the first step looks for more
    return run


@pytest.mark.usefixtures("quick")
def test_each_phase_of_an_epoch_has_what_it_took_and_all_make_up_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = Hand()
    run = slow(tmp_path, hand)
    begun_ns, save = list[int](), run.trainer.keeper.save

    def saved(*words: Any, **named: Any) -> bool:
        hand.moves(32)
        return save(*words, **named)

    def logged(observer: TrainingObserver, *words: Any) -> None:
        hand.moves(0.5)

    monkeypatch.setattr(run.trainer.keeper, "save", saved)
    monkeypatch.setattr(TrainingObserver, "step", logged)
    verify = run.trainer._verify
    monkeypatch.setattr(run.trainer, "_verify", lambda course: (verify(course), begun_ns.append(hand.ns)))
    run.to_end()
    first, second = read_epochs(tmp_path / "model")
    steps = -(-14 // 6)
    computed = {FORWARD: 2.0 * steps, OBSERVE: 0.5 * steps, "validate": 6.0}
    assert {name: spent for name, spent in first.seconds.items() if spent} == computed
    assert {name: spent for name, spent in second.seconds.items() if spent} == computed | {CHECKPOINT: 32.0}
    whole_ns = hand.ns - begun_ns[0] - 32 * SECOND_NS  # the last checkpoint comes after the last epoch
    assert sum(first.seconds.values()) + sum(second.seconds.values()) == whole_ns / SECOND_NS


@pytest.mark.usefixtures("quick")
def test_an_epoch_that_was_interrupted_has_the_time_of_both_processes(tmp_path: Path) -> None:
    hand = Hand()
    every = {"checkpoints": {"every": 1, "minutes": 1000.0, "asynchronous": False}}
    slow(tmp_path, hand, **every).to_end(stop=2)
    hand.moves(1000)  # nobody trains
    slow(tmp_path, hand, **every).to_end()
    for epoch in read_epochs(tmp_path / "model"):
        assert epoch.seconds[FORWARD] == 6.0
        assert sum(epoch.seconds.values()) == 3 * 2 + 6


def test_what_takes_more_than_a_twentieth_beside_the_model_is_told_the_most_first() -> None:
    seconds = {"forward": 60.0, "backward": 10.0, CHECKPOINT: 5.0, READ: 12.0, COPY: 6.0, OTHER: 7.0}
    assert told_shares(seconds) == ["12% waits for reading", "7% other", "6% copies to the device"]
    assert told_shares({}) == []
    told = replace(EPOCH, seconds=seconds)
    assert "12.1 items/s  12% waits for reading, 7% other, 6% copies to the device" in told.words()
    assert told.scalars()["seconds/read"] == 12.0


def test_an_epoch_is_read_back(tmp_path: Path) -> None:
    epoch = replace(EPOCH, seconds={READ: 1.0})
    (tmp_path / EPOCHS).write_text(json.dumps(epoch.to_json()) + "\n")
    assert read_epochs(tmp_path) == [epoch]
    assert epoch.waits == ["100% waits for reading"]
