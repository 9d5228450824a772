"""What a trace meets in models that people write: it is traced as it runs, or told at the user's own line."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.memory.estimating.fallback_oracle import OracleLadder
from pipeline.memory.footprint import MemoryChoice, Provenance, live_peak_bytes
from pipeline.memory.tracing.tracer import CannotTrace
from tests.memory.tracing.traced import LARGE, SIZES, WIDTH, Small, layers, play, tracer, true_peak
from tests.testkit.limited import device

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


@pytest.mark.nightly
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


@pytest.mark.nightly
@pytest.mark.parametrize("make", [GrowingTable, Queue, KeepsAttention])
def test_tapes_of_a_model_that_replaces_its_buffers_can_be_played_in_turn(make) -> None:
    traced = tracer(Small(make))
    standing, micro = traced.standing(PLAIN), traced.micro(PLAIN, LARGE)
    live: dict[int, int] = {}
    for tape in (standing.setup, micro.first, micro.again, standing.first_update, micro.first, standing.update):
        play(live, tape)
    assert sum(live.values()) == standing.bytes


class Layers(nn.Module):
    """Eight layers, of which a step runs some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def skips(self) -> bool:
        return False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.skips():
                continue
            x = layer(x).tanh().sigmoid()
        return x


class LayerDrop(Layers):
    """Leaves out a layer at random, as torch draws."""

    def skips(self) -> bool:
        return bool(torch.rand(()) < 0.3)


class DrawnElsewhere(Layers):
    """Leaves out a layer at random, as Python draws."""

    def skips(self) -> bool:
        return random.random() < 0.3


class DrawnByNumpy(Layers):
    """Leaves out a layer at random, as NumPy draws."""

    def skips(self) -> bool:
        return bool(np.random.rand() < 0.3)  # noqa: NPY002


class EarlyExit(Layers):
    """Ends when it is sure."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh().sigmoid()
            if x.std() < 1e-6:
                break
        return x


class Sinkhorn(nn.Module):
    """Normalises rows and columns until they are, or often enough."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        p = self.layer(x).exp()
        for _ in range(20):
            p = p / p.sum(0, keepdim=True)
            p = p / p.sum(1, keepdim=True)
            if (p.sum(0) - len(p) / WIDTH).abs().max() < 1e-9:
                break
        return p


class Guarded(Layers):
    """Gives up on what is not finite."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not torch.isfinite(y).all():
            return x * self.layers[0].weight.sum()
        return (y.repeat(1, 4).exp() + 1).log()


@pytest.mark.nightly
@pytest.mark.parametrize("make", [LayerDrop, DrawnElsewhere, DrawnByNumpy, EarlyExit, Sinkhorn, Guarded])
def test_what_values_decide_is_planned_for_the_dearest_way(make) -> None:
    device.need()
    task = Small(make)
    traced = tracer(task)
    standing, micro = traced.standing(PLAIN), traced.micro(PLAIN, LARGE)
    assert micro.origin is standing.origin is Provenance.GUESSED
    assert any("guessed that" in note for note in micro.notes)
    planned, all_layers = live_peak_bytes(standing, micro, accumulate=False), true_peak(Small(Layers), LARGE)
    random.seed(0)
    peaks = [true_peak(task, LARGE) for _ in range(3)]
    assert planned >= 0.99 * max(peaks)
    if make in (LayerDrop, EarlyExit):
        assert planned == pytest.approx(all_layers, rel=0.01)
    if make in (Sinkhorn, Guarded):
        assert planned == pytest.approx(max(peaks), rel=0.01)


def test_what_draws_python_numbers_for_its_batch_alone_is_traced_and_not_guessed() -> None:
    class Drawing(Small):
        def example(self, sizes):
            return super().example(sizes) * random.random() * np.random.rand()  # noqa: NPY002

    assert tracer(Drawing(layers)).micro(PLAIN, SIZES).origin is Provenance.TRACED


def test_a_trace_leaves_the_random_numbers_of_others_alone() -> None:
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    tracer(Small(DrawnElsewhere)).micro(PLAIN, SIZES)
    after = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    assert before[0] == after[0]
    assert torch.equal(before[1], after[1])
    assert before[2] == after[2]


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
    ("how", "expression", "why"),
    [
        (of_mask, "y[y > 0]", "its shape depends on values"),
        (of_value, "float(y.max())", "it needs a value"),
        (until_converged, "if y.abs().max() < 1:", "how often it is repeated depends on values"),
        (until_small, "while y.abs().max() > 1:", "how often it is repeated depends on values"),
    ],
)
def test_what_cannot_be_traced_is_told_at_the_users_own_line(how, expression, why) -> None:
    line = how.__code__.co_firstlineno + (3 if how is until_converged else 1)
    with pytest.raises(CannotTrace) as raised:
        tracer(Small(lambda: Indexed(how))).standing(PLAIN)
    told = str(raised.value)
    assert told.startswith(f"test_ladder.py:{line} `")
    assert f"`{expression}`: {why}" in told


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
