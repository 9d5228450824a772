"""A model runs once for the loss and the outputs of a batch, wherever that gives what two runs give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.training.evaluating.evaluator import computed_once


class Counted(nn.Module):
    """Counts its passes; may draw, and may drop."""

    def __init__(self, *, draws: bool = False) -> None:
        super().__init__()
        self.linear, self.dropout, self.draws, self.passes = nn.Linear(3, 3), nn.Dropout(0.5), draws, 0

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.passes += 1
        value = self.dropout(self.linear(batch["x"]))
        return {"value": value + torch.rand_like(value) if self.draws else value}


Between = Callable[[Counted, dict[str, Tensor], dict[str, Tensor]], Any]
NOTHING: Between = lambda *_: None  # noqa: E731
CASES: dict[str, tuple[int, Between]] = {  # the passes that two calls take, and what is done between them
    "nothing": (1, NOTHING),
    "the result is changed in place": (2, lambda _, __, first: first["value"].clamp_(min=0)),
    "a part of the result is taken out": (2, lambda _, __, first: first.pop("value")),
    "the batch is changed in place": (2, lambda _, batch, __: batch["x"].add_(1)),
    "dropout is turned on": (2, lambda model, _, __: model.dropout.train()),
    "the model draws": (2, NOTHING),
}


def both(what: str, *, once: bool) -> tuple[Tensor, Tensor, int]:
    """Return what a loss and what outputs see, and in how many passes."""
    torch.manual_seed(0)
    model = Counted(draws=what == "the model draws")
    batch = {"x": torch.randn(4, 3)}
    model.eval()
    with torch.no_grad():
        if not once:
            return _twice(model, batch, what)
        with computed_once(model, "cpu"):
            return _twice(model, batch, what)


def _twice(model: Counted, batch: dict[str, Tensor], what: str) -> tuple[Tensor, Tensor, int]:
    first = model(batch)
    seen = first["value"].clone()
    CASES[what][1](model, batch, first)
    return seen, model(batch)["value"].clone(), model.passes


@pytest.mark.parametrize("what", CASES)
def test_both_see_what_two_passes_would_give(what: str) -> None:
    *once, passes = both(what, once=True)
    *twice, _ = both(what, once=False)
    assert all(torch.equal(one, other) for one, other in zip(once, twice, strict=True))
    assert passes == CASES[what][0]


def test_gradients_another_precision_and_another_batch_have_a_pass_of_their_own() -> None:
    model, batch = Counted(), {"x": torch.randn(4, 3)}
    model.eval()
    with computed_once(model, "cpu"):
        with torch.no_grad():
            model(batch)
        assert model(batch)["value"].requires_grad
        assert model(batch)["value"].requires_grad
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            half = model(batch)["value"]
        with torch.no_grad():
            assert model(batch)["value"].dtype != half.dtype
            model({"x": batch["x"]})
    assert model.passes == 6
    assert "forward" not in vars(model)
