"""What a step is planned to take that makes two passes for a loss of all its items is what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.config.schema_train import TrainSection
from pipeline.errors import ConfigError
from pipeline.memory.footprint import MemoryChoice
from pipeline.memory.footprint import StepTapes as Tapes
from pipeline.memory.tracing.tracer import Tracer
from pipeline.planning.training_work import Work, step_settings
from pipeline.tasks.contrastive_pair import ContrastivePair, PairBatch, Rows
from pipeline.training.step.contrastive import make_step
from pipeline.training.step.optimizers import StepSettings
from tests.testkit.limited import device
from tests.testkit.limited.device import LimitedDevice
from tests.training.step.towers import Pairs

pytestmark = pytest.mark.usefixtures("one_thread")
ITEMS = 128


def planned(task: ContrastivePair, settings: StepSettings, micro: int, tokens: int) -> int:
    """Return the planned peak of a step of 128 items."""
    tracer = Tracer(Work(task, settings, "cpu").build, task.model, task.example, {"items": 1, "left": 1, "right": 1})
    standing = tracer.standing(MemoryChoice())
    one = tracer.micro(MemoryChoice(), {"items": micro, "left": tokens, "right": tokens})
    return Tapes.of(standing, [one] * (ITEMS // micro)).peak_bytes(standing.bytes)


def measured(task: ContrastivePair, settings: StepSettings, micro: int, tokens: int) -> int:
    """Return the most that was really live in the second step; its batches are in the host's memory."""
    device.need()
    with LimitedDevice() as limited:
        step = make_step(task, settings)
        for _ in range(2):
            with limited.host():
                whole = task.example({"items": ITEMS, "left": tokens, "right": tokens})
                batches = cut(whole, [micro] * (ITEMS // micro))
            limited.reset_peak()
            step.run(batches)
        return limited.peak_bytes


def cut(batch: Any, sizes: Sequence[int]) -> list[PairBatch]:
    def parts(rows: Rows) -> list[Rows]:
        masks = [None] * len(sizes) if rows.real_BL is None else rows.real_BL.split(sizes)
        return [Rows(*one) for one in zip(rows.values.split(sizes), masks, strict=True)]

    return [PairBatch(*sides) for sides in zip(parts(batch.left), parts(batch.right), strict=True)]


@pytest.mark.parametrize("micro", [16, ITEMS])
def test_128_items_are_planned_within_a_percent_in_one_batch_or_8(micro: int) -> None:
    width, layers, tokens = 64, 2, 32
    task = ContrastivePair(width=width, layers=layers, heads=4, out=64, left_most=tokens, right_most=tokens)
    settings = StepSettings(batch=ITEMS, clip=1.0)
    true = measured(task, settings, micro, tokens)
    assert planned(task, settings, micro, tokens) == pytest.approx(true, rel=0.01)


def test_what_the_loss_of_all_items_takes_is_planned() -> None:
    """Of so many items, and so little to embed, that it is the peak."""
    task = Pairs(double=False)

    def peak(items: int) -> int:
        tracer = Tracer(Work(task, StepSettings(batch=items), "cpu").build, task.model, task.example, {"items": 1})
        return tracer.micro(MemoryChoice(), {"items": 16}).first.peak_bytes

    assert peak(2048) > 4 * 2048**2
    assert peak(1024) < peak(2048) / 3


def test_a_plan_spreads_no_model_whose_loss_is_of_all_items() -> None:
    work = Work(Pairs(), StepSettings(), "cpu")
    train = TrainSection.model_validate({"effective_batch": 8})
    assert work.request(train, 2).shards == 1
    with pytest.raises(ConfigError, match="two passes"):
        work.request(train.model_copy(update={"sharding": True}), 2)


def test_a_step_knows_how_many_items_it_compares() -> None:
    train = TrainSection.model_validate({"effective_batch": 8})
    assert step_settings(train, "cpu", Pairs()).batch == 8
    assert step_settings(train, "cpu").batch is None
