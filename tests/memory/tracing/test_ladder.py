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
    tracer(WAYS["random recycles"]()).micro(PLAIN, SIZES)
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


# Branches on values are guessed


class Branching(nn.Module):
    """Goes one way or the other, as the values are."""

    def __init__(self, yes, no):
        super().__init__()
        self.layer, self.yes, self.no = nn.Linear(WIDTH, WIDTH), yes, no

    def forward(self, x):
        y = self.layer(x)
        if (y > 0).any():
            return self.yes(y)
        return self.no(y)


def micro(yes, no):
    return tracer(Small(lambda: Branching(yes, no))).micro(PLAIN, LARGE)


def wide(y):
    return torch.cat([y, y, y, y], 1).exp().exp()


def refused(y):
    raise ValueError("not this way")


@pytest.mark.parametrize(("yes", "no", "answer"), [(wide, torch.relu, "true"), (torch.relu, wide, "false")])
def test_a_branch_is_traced_both_ways_and_the_higher_is_kept_and_told(yes, no, answer):
    taken, always = micro(yes, no), micro(wide, wide)
    assert taken.again.peak_bytes == pytest.approx(always.again.peak_bytes, rel=0.001)
    assert taken.again.peak_bytes > 2 * micro(torch.relu, torch.relu).again.peak_bytes
    (note,) = taken.notes
    assert "test_ladder.py:" in note
    assert f"`if (y > 0).any():` is {answer}" in note
    assert taken.origin is Provenance.GUESSED


def test_where_that_ends_in_an_error_it_is_taken_not_to_be():
    other = micro(refused, torch.relu)
    assert "is false" in other.notes[0]
    assert other.again.peak_bytes == pytest.approx(micro(torch.relu, refused).again.peak_bytes, abs=64)


def test_where_both_ways_end_in_an_error_it_cannot_be_traced():
    with pytest.raises(CannotTrace, match="not this way"):
        micro(refused, refused)


def test_two_branches_are_guessed_apart():
    class Twice(Branching):
        def forward(self, x):
            y = self.layer(x)
            if (y > 0).all():
                y = torch.relu(y)
            if (y > 1).all():
                return refused(y)
            return y

    found = tracer(Small(lambda: Twice(None, None))).micro(PLAIN, LARGE)
    assert ["is true" in note for note in found.notes] == [True, False]


def test_no_guess_is_needed_for_what_is_known_without_data():
    class Known(Branching):
        def forward(self, x):
            return self.layer(x) if x.shape[0] > 1 and x.requires_grad is False else refused(x)

    assert tracer(Small(lambda: Known(None, None))).micro(PLAIN, LARGE).notes == ()
