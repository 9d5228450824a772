"""Every nanosecond of an epoch belongs to a phase that has a name; no clock of this machine is looked at."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from pipeline.training.loop.metrics_log import read_epochs
from pipeline.training.step.optimizers import StepSettings
from pipeline.training.step.step import Step
from pipeline.training.step_clock import FORWARD, StepClock
from tests.training.loop.loops import Judged, Plot, Run

SECOND_NS = 1_000_000_000


class Hand:
    """The hand of a clock that only tests move."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns

    def moves(self, seconds: float) -> None:
        self.ns += round(seconds * SECOND_NS)


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
    run.trainer.step.learn_terms(1)  # else the first step looks for more
    return run


@pytest.mark.usefixtures("quick")
def test_each_phase_of_an_epoch_has_what_it_took_and_all_make_up_the_whole(tmp_path: Path) -> None:
    slow(tmp_path, hand := Hand()).to_end()
    epochs = read_epochs(tmp_path / "model")
    for epoch in epochs:
        assert {name: spent for name, spent in epoch.seconds.items() if spent} == {FORWARD: 2.0 * 3, "validate": 6.0}
    rehearsed_s = 2  # before the first epoch
    assert sum(sum(epoch.seconds.values()) for epoch in epochs) == hand.ns / SECOND_NS - rehearsed_s


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
