"""What a trace meets in models that people write: it follows it, or names the user's own line."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.memory.estimating.oracle import BestOracle
from pipeline.memory.footprint import MemoryChoice, Provenance
from pipeline.memory.tracing.tracer import CannotTrace
from tests.memory.tracing.traced import LARGE, SIZES, WIDTH, Small, layers, play, tracer
from tests.zoo.strangers.ways import FAMILIES as WAYS

pytestmark = pytest.mark.usefixtures("one_thread")
PLAIN = MemoryChoice()


@pytest.mark.parametrize("name", ["growing places", "momentum queue", "attention kept"])
def test_tapes_of_a_model_that_replaces_its_buffers_can_be_played_in_turn(name: str) -> None:
    traced = tracer(WAYS[name]())
    standing, micro = traced.standing(PLAIN), traced.micro(PLAIN, {"items": 64})
    live: dict[int, int] = {}
    for tape in (standing.setup, micro.first, micro.again, standing.first_update, micro.first, standing.update):
        play(live, tape)
    assert sum(live.values()) == standing.bytes


def test_random_numbers_for_the_batch_alone_are_traced_and_not_guessed() -> None:
    class Drawing(Small):
        def example(self, sizes):
            return super().example(sizes) * random.random() * np.random.rand()  # noqa: NPY002

    assert tracer(Drawing(layers)).micro(PLAIN, SIZES).origin is Provenance.TRACED


def test_a_trace_leaves_the_random_numbers_of_others_alone() -> None:
    def states() -> list[object]:
        return [random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()]  # noqa: NPY002

    before = states()
    tracer(WAYS["random depth"]()).micro(PLAIN, SIZES)
    assert states() == before


class Indexed(nn.Module):
    """Needs values, in one way or another."""

    def __init__(self, how) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.layer(x))


def of_mask(y: Tensor) -> Tensor:
    return y[y > 0]


def of_value(y: Tensor) -> Tensor:
    return y * float(y.max())


def until_converged(y: Tensor) -> Tensor:
    while True:
        y = y / 2
        if y.abs().max() < 1:
            return y


def until_small(y: Tensor) -> Tensor:
    while y.abs().max() > 1:
        y = y / 2
    return y


@pytest.mark.parametrize(
    ("how", "below", "expression"),
    [
        (of_mask, 1, "return y[y > 0]"),
        (of_value, 1, "return y * float(y.max())"),
        (until_converged, 3, "if y.abs().max() < 1:"),
        (until_small, 1, "while y.abs().max() > 1:"),
    ],
)
def test_what_cannot_be_traced_is_reported_at_the_users_own_line(how, below: int, expression: str) -> None:
    with pytest.raises(CannotTrace) as raised:
        tracer(Small(lambda: Indexed(how))).standing(PLAIN)
    place = f"test_ladder.py:{how.__code__.co_firstlineno + below} "
    assert str(raised.value).startswith(place)
    assert f"`{expression}`" in str(raised.value)


def forces(model: nn.Module, batch: Tensor):
    x = batch.requires_grad_()
    (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return {"force": (force.square().sum(), float(len(batch)))}


def test_a_loss_that_cannot_be_evaluated_without_gradients_is_planned_all_the_same() -> None:
    def trained_only(model: nn.Module, batch: Tensor):
        assert torch.is_grad_enabled()
        return forces(model, batch)

    needs = BestOracle([lambda: tracer(Small(layers, terms=forces))])
    assert needs.micro(PLAIN, LARGE).again.peak_bytes > 0
    assert needs.evaluation(PLAIN, LARGE) is not None
    ladder = BestOracle([lambda: tracer(Small(layers, terms=trained_only))])
    assert ladder.micro(PLAIN, LARGE).again.peak_bytes > 0
    assert ladder.evaluation(PLAIN, LARGE) is None
    assert "test_ladder.py:" in ladder.no_evaluation


def fussy(model: nn.Module, batch: Tensor):
    total = model(batch).square().sum()
    if total > 1e6:
        raise ConfigError("the loss is far too large")
    return {"square": (total, float(len(batch)))}


def never(model: nn.Module, batch: Tensor):
    total = model(batch).square().sum()
    if total < 1e6:
        raise ValueError("the loss is far too small")
    raise ConfigError("the loss is far too large")


def test_our_own_error_under_a_guess_is_guessed_otherwise_and_else_left_to_real_steps() -> None:
    (note,) = tracer(Small(layers, terms=fussy)).micro(PLAIN, SIZES).notes
    assert "is false" in note
    with pytest.raises(CannotTrace, match="far too large"):
        tracer(Small(layers, terms=never)).micro(PLAIN, SIZES)
