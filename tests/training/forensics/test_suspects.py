"""What is not finite is traced to its item, term, module and operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.device.accelerator import RngState
from pipeline.memory.runtime.meters import meter_of
from pipeline.training.forensics.rerun import PartOutcome, Rerun, RerunPart, Suspect, rerun, suspects
from pipeline.training.step.contrastive import make_step
from pipeline.training.step.exact_step import Piece
from pipeline.training.step.optimizers import StepSettings
from pipeline.training.step.step import Step
from tests.tasks.items import batch_of, made
from tests.training.items.content import collated_by
from tests.training.step.towers import Pairs

pytestmark = pytest.mark.nightly
IDS = ("good", "bad", "fair")


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.root = nn.Linear(1, 1, bias=False), Root()
        self.register_buffer("seen", torch.zeros(1))
        nn.init.ones_(self.enter.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.root(self.enter(x))
        self.get_buffer("seen").add_(y.detach().sum())  # a statistic that what is not finite would spoil for good
        return y + 0 * self.get_buffer("seen")


class Task:
    """Of the bad item the input is as given."""

    def __init__(self, bad: float, *, in_loss: bool = False) -> None:
        self.bad, self.in_loss = bad, in_loss

    def model(self) -> nn.Module:
        return Net()

    def cost(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"nodes": item["nodes"]}

    def collate(self, items: Sequence[Any], rng: np.random.Generator) -> dict[str, Tensor]:
        return {"x": torch.tensor([[self.bad if item.id == "bad" else 4.0] for item in items])}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, float]]:
        y = model(batch["x"])
        return {"mean": ((y / (0.0 if self.in_loss else 1.0)).sum(), float(len(y)))}


def look(task: Task) -> tuple[Rerun, list[Suspect], Step]:
    """Run a share of one micro-batch, then look for what is not finite."""
    step = Step(task, StepSettings(), device="cpu")
    piece = Piece(collated_by(task, batch_of([made(1, 6, 5)] * 3, None, IDS)), 0, 3)
    part = RerunPart(0, IDS, piece.numbers)
    found = rerun(step, [part], lambda _: piece, RngState.capture(), meter_of("cpu"))
    bad = found.of(PartOutcome.NOT_FINITE)
    return found, suspects(step, bad or found.results, lambda _: piece, backward=not bad), step


def test_a_module_whose_output_is_not_finite_is_named_with_its_item() -> None:
    found, (suspect,), _ = look(Task(-1.0))
    assert found.results[0].outcome is PartOutcome.NOT_FINITE
    assert (suspect.ids, suspect.terms, suspect.module, suspect.kind) == (("bad",), ("mean",), "root", "Root")
    assert not suspect.was_given


def test_a_batch_that_is_not_finite_already_is_said_and_no_module_is_blamed_for_it() -> None:
    _, (suspect,), _ = look(Task(float("inf")))
    assert suspect.fields == ("x",)
    assert suspect.was_given


def test_a_loss_that_is_no_number_where_every_module_is_well_is_the_losss_own() -> None:
    _, found, _ = look(Task(1.0, in_loss=True))
    assert [one.ids for one in found] == [("good",), ("bad",), ("fair",)]
    assert "starts in loss() itself" in found[0].words()


def test_gradients_that_are_not_finite_of_a_finite_loss_are_traced_to_their_operation() -> None:
    found, (suspect,), _ = look(Task(0.0))
    assert found.results[0].outcome is PartOutcome.FITS
    assert found.gradients == ["enter.weight"]
    assert suspect.ids == ("bad",)
    assert suspect.parameters == ("enter.weight",)
    assert suspect.operation == "Mul" or suspect.operation == "Mm" or suspect.operation == "Sqrt"


@pytest.mark.parametrize("bad", [-1.0, 0.0])
def test_nothing_is_left_of_it(bad: float) -> None:
    _, _, step = look(Task(bad))
    assert step.model.get_buffer("seen").item() == 0.0
    assert all(one.grad is None for one in step.model.parameters())
    assert step.totals == {}


def replayed(task: Pairs, sizes: Sequence[int]) -> tuple[Rerun, list[Suspect]]:
    """Run a share of some micro-batches, whose loss compares all items of a step, again."""
    torch.manual_seed(0)
    step = make_step(task, StepSettings(batch=sum(sizes)), device="cpu")
    ids = tuple(f"item{number}" for number in range(sum(sizes)))
    batch = batch_of([made(seed, 12, 12) for seed in range(len(ids))], None, ids)
    ends = np.cumsum(sizes).tolist()
    parts = [
        RerunPart(at, ids[end - size : end], tuple(range(end - size, end)))
        for at, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]

    def read(part: RerunPart) -> Piece:
        return Piece(collated_by(task, batch), part.numbers[0], part.numbers[-1] + 1)

    found = rerun(step, parts, read, RngState.capture(), meter_of("cpu"))
    return found, suspects(step, found.of(PartOutcome.NOT_FINITE), read)


def test_a_replay_compares_all_items_of_the_share() -> None:
    whole, parts = (replayed(Pairs(), sizes)[0] for sizes in ([9], [4, 3, 2]))
    assert whole.norm is not None
    assert whole.norm > 0
    assert parts.norm == pytest.approx(whole.norm, rel=1e-9)
    assert parts.results[0].terms["pairs"] == pytest.approx(whole.results[0].terms["pairs"], rel=1e-9)
    assert [one.outcome for one in parts.results] == [PartOutcome.FITS] * 3


def test_a_replay_names_the_item_that_is_embedded_to_no_number() -> None:
    found, named = replayed(Pairs(nan=(5,)), [4, 3, 2])
    assert [one.outcome for one in found.results] == [PartOutcome.FITS, PartOutcome.NOT_FINITE, PartOutcome.FITS]
    assert [one.ids for one in named] == [("item5",)]
