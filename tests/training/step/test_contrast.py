"""A loss that compares all items of a step has its gradient, however the step is cut, over whatever ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError, DataError, PlanInfeasible
from pipeline.training.step.contrastive import ContrastiveStep, joined_rows
from pipeline.training.step.optimizers import StepSettings
from tests.training.loop.loops import Plot, batch_of, furthest
from tests.training.step.kinds import Always, training, weights_of
from tests.training.step.towers import Pairs, cut, drawn, of

pytestmark = pytest.mark.usefixtures("quick")
EXACT = 1e-10
ONE_STEP = {"effective_batch": 14, "epochs": 1, "learning_rate": 1.0}
PLOT = Plot(train=ONE_STEP, budget=90)


class Caught(ContrastiveStep):
    """Keeps what the optimizer is given."""

    def apply(self) -> None:
        """Keep the gradients."""
        self.caught = {name: one.grad.clone() for name, one in self.model.named_parameters() if one.grad is not None}
        super().apply()


def gradients(
    sizes: list[int], task: Pairs | None = None, *, scaled: bool = False, **settings: Any
) -> tuple[dict[str, Tensor], dict[str, float], Caught]:
    """Return the gradients of a step of some micro-batches, and the values of its terms."""
    torch.manual_seed(0)
    task = task or Pairs()
    step = Caught(task, StepSettings(optimizer="sgd", **settings), scaled=scaled)
    told = step.run(cut(drawn(sum(sizes), task.dtype), sizes))
    return step.caught, {name: float(value) for name, value in told.items()}, step


def error(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the largest error of a gradient beside its norm."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in other)


# A step


@pytest.mark.parametrize("rung", [2, 3])
def test_a_remedy_for_a_part_or_for_the_loss_changes_no_gradient(rung: int) -> None:
    expected, _, _ = gradients([10, 14])
    torch.manual_seed(0)
    step = Caught(Pairs(), StepSettings(optimizer="sgd"))
    first, second = cut(drawn(24), [10, 14])
    rows = [step.embed(first)]
    with step.remedied(rung):
        rows.append(step.embed(second))
        cached = step.contrast(joined_rows(rows))
    step.go_back(first, {name: row[:10] for name, row in cached.rows.items()})
    with step.remedied(rung):
        step.go_back(second, {name: row[10:] for name, row in cached.rows.items()})
    cached.finish(step.model)
    step.update()
    assert error(step.caught, expected) < EXACT


def test_both_passes_draw_the_same_random_numbers() -> None:
    task = Pairs(dropout=0.5)
    torch.manual_seed(0)
    model = task.model()
    torch.manual_seed(1)
    rows = joined_rows([task.embed(model, batch) for batch in cut(drawn(24), [10, 14])])
    ((total, weight),) = task.contrast(model, rows).values()
    (total / weight).backward()
    true = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    after = torch.get_rng_state()
    torch.manual_seed(0)
    step = Caught(task, StepSettings(optimizer="sgd"))
    torch.manual_seed(1)
    step.run(cut(drawn(24), [10, 14]))
    assert error(step.caught, true) < EXACT
    assert torch.equal(torch.get_rng_state(), after), "as many are used up as by one pass"


def test_a_loss_that_draws_does_not_shift_the_second_pass() -> None:
    rows: list[Tensor] = []

    class Noisy(Pairs):
        def embed(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
            told = super().embed(model, batch)
            rows.append(told["left"].detach().clone())
            return told

        def contrast(self, model: nn.Module, embedded: Mapping[str, Tensor]) -> Any:
            torch.rand(7)
            return super().contrast(model, embedded)

    gradients([10, 14], Noisy(dropout=0.5))
    assert all(torch.equal(rows[place], rows[place + 2]) for place in range(2))


def test_running_means_move_once_for_each_micro_batch() -> None:
    task = Pairs(norm=True)
    _, _, step = gradients([10, 14], task)
    torch.manual_seed(0)
    model = task.model()
    for batch in cut(drawn(24), [10, 14]):
        task.embed(model, batch)
    assert all(torch.equal(one, dict(model.named_buffers())[name]) for name, one in step.model.named_buffers())


def test_losses_of_half_precision_are_scaled_before_they_go_back() -> None:
    task = Pairs(double=False)
    true = gradients([24], task)[0]
    found, _, step = gradients([5, 19], task, scaled=True, precision="fp16")
    assert step.scaler.get_scale() > 1
    scale = step.scaler.get_scale()
    assert error({name: one / scale for name, one in found.items()}, true) < 0.02


@pytest.mark.parametrize("frozen", [("left",), ("left", "right", "unused")])
def test_what_is_not_frozen_has_its_gradient(frozen: tuple[str, ...]) -> None:
    """Also where only a temperature is trained."""
    whole, parts = (gradients(sizes, frozen=frozen)[0] for sizes in ([24], [5, 19]))
    assert not any(name.startswith(frozen) for name in parts)
    assert error(parts, whole) < EXACT


def test_embeddings_that_are_no_rows_of_items_are_refused() -> None:
    five, four, single = torch.zeros(5, 2), torch.zeros(4, 2), torch.zeros(())
    for told in ({}, five, {"left": 1.0}, {"left": single}, {"left": five, "right": four}):

        class Wrong(Pairs):
            def embed(self, model: nn.Module, batch: Any, told: Any = told) -> Any:
                return told

        with pytest.raises(ConfigError):
            gradients([5, 5], Wrong())


def test_a_loss_of_nothing_embedded_is_refused() -> None:
    class Detached(Pairs):
        def contrast(self, model: nn.Module, embedded: Mapping[str, Tensor]) -> Any:
            return super().contrast(model, {name: one.detach() for name, one in embedded.items()})

    with pytest.raises(ConfigError, match="depends on no embedding"):
        gradients([5, 5], Detached())


# A training


@dataclass(frozen=True)
class Noted(Pairs):
    """Notes which items are embedded together, and whether with a trace."""

    calls: list[tuple[bool, tuple[str, ...]]] = field(default_factory=list, compare=False)

    def embed(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        self.calls.append((torch.is_grad_enabled(), batch["ids"]))
        return super().embed(model, batch)


def test_a_step_of_one_micro_batch_is_made_in_one_pass(tmp_path: Path) -> None:
    whole = training("contrastive", replace(PLOT, budget=10_000), tmp_path / "whole", task=(task := Noted())).to_end()
    calls = task.calls[2:]  # the rehearsal embeds without a trace first
    assert calls
    assert all(had_trace for had_trace, _ in calls)
    cut = training("contrastive", PLOT, tmp_path / "cut").to_end()
    assert furthest(weights_of(whole), weights_of(cut)) < EXACT


def test_a_loss_that_fits_nowhere_says_that_the_effective_batch_is_too_large(tmp_path: Path) -> None:
    task, trouble = Pairs(), Always("contrast")
    run = training("contrastive", replace(PLOT, train={**ONE_STEP, "epochs": 2}), tmp_path, task=trouble.within(task))
    with pytest.raises(PlanInfeasible) as raised:
        run.to_end(each=trouble.arm)
    assert raised.value.where == "train.effective_batch"


def test_a_step_of_which_no_item_alone_is_to_blame_says_so(tmp_path: Path) -> None:
    class Overflowing(Pairs):
        def contrast(self, model: nn.Module, embedded: Mapping[str, Tensor]) -> Any:
            ((total, weight),) = super().contrast(model, embedded).values()
            return {"pairs": (total * (math.inf if len(embedded["left"]) > 1 else 1.0), weight)}

    with pytest.raises(DataError, match="no single item"):
        training("contrastive", PLOT, tmp_path, task=Overflowing()).to_end()


# Evaluation


@pytest.mark.parametrize("budget", [30, 60, 10_000])
def test_a_validation_is_the_same_however_it_is_cut(tmp_path: Path, budget: int) -> None:
    settings = {**ONE_STEP, "validation": {"split": "val"}, "effective_batch": 5}
    plot = Plot(train=settings, items=5, validated=12, budget=budget)
    run = training("contrastive", plot, tmp_path)
    assert run.trainer.validation is not None
    found = run.trainer.validation.figures()
    task, numbers = of(plot), range(5, 17)
    model, totals = run.trainer.step.model.eval(), []
    rows = [batch_of(replace(plot, items=17), task, [one], 0) for one in numbers]
    with torch.no_grad():
        for group in (rows[:5], rows[5:10], rows[10:]):
            embedded = joined_rows([task.embed(model, one) for one in group])
            totals.append(float(task.contrast(model, embedded)["pairs"][0]))
    assert isinstance(found, dict)
    assert found["loss"] == pytest.approx(math.fsum(totals) / 12, rel=1e-9)
