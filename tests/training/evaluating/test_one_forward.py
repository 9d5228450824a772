"""A model runs once for the loss and the outputs of a batch, wherever that gives what two runs give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.training.evaluating.one_forward import computed_once


class Counted(nn.Module):
    """Counts its passes; may draw, and may drop."""

    def __init__(self, *, draws: bool = False) -> None:
        super().__init__()
        self.linear, self.dropout, self.draws, self.passes = nn.Linear(3, 3), nn.Dropout(0.5), draws, 0

    def forward(self, batch: Mapping[str, Tensor], times: int = 1) -> dict[str, Tensor]:
        self.passes += 1
        value = self.dropout(self.linear(batch["x"])) * times
        return {"value": value + torch.rand_like(value) if self.draws else value}


def both(model: nn.Module, batch: Any, between: Callable[[Any], Any] = lambda _: None) -> tuple[Tensor, Tensor]:
    """Return what a loss and what outputs see, and do something between the two."""
    with torch.no_grad():
        first = model(batch)
        seen = first["value"].clone()
        between(first)
        return seen, model(batch)["value"].clone()


def made(*, draws: bool = False) -> tuple[Counted, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Counted(draws=draws)
    model.eval()
    return model, {"x": torch.randn(4, 3)}


def test_the_second_pass_over_a_batch_is_the_first() -> None:
    model, batch = made()
    with computed_once(model, "cpu"), torch.no_grad():
        first, second = both(model, batch)
        assert model.passes == 1
        both(model, batch)
        assert model.passes == 2  # a result is handed out once more, not for ever
        model(batch)
        model({"x": batch["x"]})
        assert model.passes == 4  # another batch, if of the same tensors
    assert torch.equal(first, second)
    assert "forward" not in vars(model)


def test_a_result_or_a_batch_that_was_changed_in_place_is_computed_again() -> None:
    model, batch = made()
    for change in (lambda given: given["value"].clamp_(min=0), lambda given: given.pop("value")):
        with computed_once(model, "cpu"):
            first, second = both(model, batch, change)
        assert torch.equal(first, second)
    with computed_once(model, "cpu"):
        first, second = both(model, batch, lambda _: batch["x"].add_(1))
    assert not torch.equal(first, second)
    assert model.passes == 6


def test_what_is_drawn_is_drawn_again_as_it_would_be() -> None:
    model, batch = made(draws=True)
    with computed_once(model, "cpu"):
        first, second = both(model, batch)
    assert model.passes == 2
    again, expected = both(*made(draws=True))
    assert torch.equal(first, again)
    assert torch.equal(second, expected)


def test_what_dropout_is_turned_on_for_is_computed_again() -> None:
    model, batch = made()
    with computed_once(model, "cpu"):
        first, second = both(model, batch, lambda _: model.dropout.train())
    assert model.passes == 2
    assert not torch.equal(first, second)


def test_gradients_and_another_precision_have_a_pass_of_their_own() -> None:
    model, batch = made()
    with computed_once(model, "cpu"):
        with torch.no_grad():
            model(batch)
        assert model(batch)["value"].requires_grad
        assert model(batch)["value"].requires_grad
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            half = model(batch)["value"]
        with torch.no_grad():
            assert model(batch)["value"].dtype != half.dtype
    assert model.passes == 5


def test_other_arguments_are_another_pass() -> None:
    model, batch = made()
    with computed_once(model, "cpu"), torch.no_grad():
        once, twice = model(batch)["value"], model(batch, times=2)["value"]
        assert torch.equal(2 * once, twice)
        assert torch.equal(model(batch, times=2)["value"], twice)
    assert model.passes == 2


def test_a_compiled_model_stays_compiled_and_runs_once() -> None:
    model, batch = made()
    runs: list[int] = []

    def backend(graph: Any, _: Any) -> Callable[..., Any]:
        return lambda *given: runs.append(1) or graph.forward(*given)  # type: ignore[func-returns-value]

    model.compile(backend=backend)
    before = model._compiled_call_impl
    with computed_once(model, "cpu"):
        both(model, batch)
    warm = len(runs)
    with computed_once(model, "cpu"):
        first, second = both(model, batch)
    assert torch.equal(first, second)
    assert (warm, len(runs)) == (1, 2)
    assert model._compiled_call_impl is before


def test_an_error_leaves_the_model_as_it_was() -> None:
    model, _ = made()
    with pytest.raises(KeyError), computed_once(model, "cpu"):
        model({})
    assert "forward" not in vars(model)
