"""What a trace meets in models that people write: it is traced as it runs, or told at the user's own line."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.memory.estimating.fallback_oracle import OracleLadder
from pipeline.memory.footprint import MemoryChoice, live_peak_bytes
from pipeline.memory.tracing.tracer import CannotTrace
from tests.limited import device
from tests.memory.tracing.traced import LARGE, SIZES, WIDTH, Small, layers, play, tracer, true_peak

pytestmark = pytest.mark.usefixtures("one_thread")
PLAIN = MemoryChoice()


class GrowingTable(nn.Module):
    """Makes its table of positions anew, larger, whenever a batch is longer than it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.zeros(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.table):
            self.table = torch.zeros(len(x), WIDTH)
        return self.layer(x) + self.table[: len(x)]


class Queue(nn.Module):
    """Keeps the newest of what it has seen, in a buffer that every step replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("queue", torch.zeros(4096, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.queue = torch.cat([y.detach(), self.queue])[: len(self.queue)].contiguous()
        return y.relu()


class KeepsAttention(nn.Module):
    """Keeps what it computed last, for whoever wants to look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.seen = torch.softmax(y.repeat(1, 4), 1).detach().clone()
        return y.tanh()


@pytest.mark.parametrize("make", [GrowingTable, Queue, KeepsAttention])
def test_what_a_model_keeps_or_replaces_between_steps_is_in_its_peak(make) -> None:
    device.need()
    task = Small(make)
    traced = tracer(task)
    for sizes in (LARGE, {"items": 6000}):
        standing, micro = traced.standing(PLAIN), traced.micro(PLAIN, sizes)
        for times in (1, 2):
            planned = live_peak_bytes(standing, micro, accumulate=times > 1)
            assert planned == pytest.approx(true_peak(task, sizes, times), rel=0.01)


@pytest.mark.parametrize("make", [GrowingTable, Queue, KeepsAttention])
def test_tapes_of_a_model_that_replaces_its_buffers_can_be_played_in_turn(make) -> None:
    traced = tracer(Small(make))
    standing, micro = traced.standing(PLAIN), traced.micro(PLAIN, LARGE)
    live: dict[int, int] = {}
    for tape in (standing.setup, micro.first, micro.again, standing.first_update, micro.first, standing.update):
        play(live, tape)
    assert sum(live.values()) == standing.bytes


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


def until_small(y: Tensor) -> Tensor:
    while y.abs().max() > 1:
        y = y / 2
    return y


@pytest.mark.parametrize(
    ("how", "expression", "why"),
    [
        (of_mask, "y[y > 0]", "its shape depends on values"),
        (of_value, "float(y.max())", "it needs a value"),
        (until_small, "while y.abs().max() > 1:", "how often it is repeated depends on values"),
    ],
)
def test_what_cannot_be_traced_is_told_at_the_users_own_line(how, expression, why) -> None:
    line = how.__code__.co_firstlineno + 1
    with pytest.raises(CannotTrace) as raised:
        tracer(Small(lambda: Indexed(how))).standing(PLAIN)
    told = str(raised.value)
    assert told.startswith(f"test_ladder.py:{line} `")
    assert expression in told  # the whole line before Python 3.11
    assert f"`: {why}" in told


def forces(model: nn.Module, batch: Tensor):
    x = batch.requires_grad_()
    (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return {"force": (force.square().sum(), float(len(batch)))}


def test_a_loss_that_cannot_be_evaluated_without_gradients_is_planned_all_the_same() -> None:
    ladder = OracleLadder([lambda: tracer(Small(layers, terms=forces))])
    assert ladder.micro(PLAIN, LARGE).again.peak_bytes > 0
    assert ladder.evaluation(PLAIN, LARGE) is None
    assert "test_ladder.py:" in ladder.no_evaluation
    assert "autograd.grad" in ladder.no_evaluation


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
    with pytest.raises(CannotTrace, match=r"far too large.*guessed"):
        tracer(Small(layers, terms=never)).micro(PLAIN, SIZES)
