"""Operators whose kernels take memory of their own, in a step: planned as the limited device counts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.memory.footprint import MemoryChoice, live_peak_bytes
from tests.memory.tracing.traced import WIDTH, Small, confirmed, true_peak
from tests.testkit.limited import device

LEAST, ROWS = {"items": 64}, {"items": 1024}


@pytest.fixture(autouse=True)
def _possible(one_thread: None) -> None:
    device.need()


@dataclass(frozen=True)
class Operator:
    """Something done with rows, and what is learnt in it."""

    run: Callable[..., Tensor]
    inner: Callable[[], nn.Module] | None = None


class Using(nn.Module):
    """A linear map, and an operator behind it."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.map, self.run = nn.Linear(WIDTH, WIDTH), operator.run
        self.inner = operator.inner() if operator.inner else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.map(x)
        return self.run(y) if self.inner is None else self.run(self.inner, y)


def words(y: Tensor) -> Tensor:
    return y.view(-1, 16, WIDTH)


def images(y: Tensor) -> Tensor:
    return y.view(-1, 16, 16, 16)


def definite(y: Tensor) -> Tensor:
    return words(y) @ words(y).mT + 10 * torch.eye(16)


def along(layer: nn.Module, y: Tensor) -> Tensor:
    return layer(words(y).transpose(1, 2))


OPERATORS = {
    "bilinear": Operator(lambda layer, y: layer(y, y), lambda: nn.Bilinear(WIDTH, WIDTH, 24)),
    "lstm": Operator(lambda layer, y: layer(words(y))[0], lambda: nn.LSTM(WIDTH, 48, 2, batch_first=True)),
    "gru": Operator(lambda layer, y: layer(words(y))[0], lambda: nn.GRU(WIDTH, 48, batch_first=True)),
    "matrix_exp": Operator(lambda y: torch.matrix_exp(0.1 * words(y)[:, :, :16])),
    "largest": Operator(lambda y: y.max(1)[0]),
    "gathered": Operator(lambda y: y.gather(1, torch.zeros(len(y), 99, dtype=torch.long))),
    "soft margin": Operator(lambda y: functional.soft_margin_loss(y, torch.ones_like(y))),
    "bce": Operator(lambda y: functional.binary_cross_entropy(y.sigmoid(), torch.ones_like(y))),
    "conv1d": Operator(along, lambda: nn.Conv1d(WIDTH, 48, 5, padding=2)),
    "conv2d": Operator(lambda layer, y: layer(images(y)), lambda: nn.Conv2d(16, 24, 3, padding=1)),
    "batch norm": Operator(lambda layer, y: layer(images(y)), lambda: nn.BatchNorm2d(16)),
    "group norm": Operator(lambda layer, y: layer(images(y)), lambda: nn.GroupNorm(4, 16)),
    "layer norm": Operator(lambda layer, y: layer(y), lambda: nn.LayerNorm(WIDTH)),
    "softmax": Operator(lambda y: y.softmax(1)),
    "logsumexp": Operator(lambda y: y.logsumexp(-1)),
    "sorted": Operator(lambda y: y.sort(0)[0]),
    "distances": Operator(lambda y: torch.cdist(y[:300], y[:100])),
    "attention": Operator(lambda y: functional.scaled_dot_product_attention(*[words(y)[:, None]] * 3)),
    "mean of squares": Operator(lambda y: functional.mse_loss(y, torch.ones_like(y))),
    "gelu": Operator(functional.gelu),
    "cholesky": Operator(lambda y: torch.linalg.cholesky(definite(y))),
    "inverse": Operator(lambda y: torch.linalg.inv(definite(y))),
    "singular values": Operator(lambda y: torch.linalg.svdvals(words(y))),
    "complex": Operator(lambda y: torch.view_as_complex(y.view(-1, 32, 2)).abs()),
    "scattered mean": Operator(
        lambda y: torch.zeros(99, WIDTH).scatter_reduce(0, torch.zeros(len(y), WIDTH, dtype=torch.long), y, "mean")
    ),
    "embedding": Operator(
        lambda table, y: table(torch.zeros(len(y), dtype=torch.long)) + y, lambda: nn.Embedding(9, 64)
    ),
}
LOSSES: list[Callable[[Tensor], Tensor]] = [
    lambda y: y.square().sum(),
    torch.Tensor.sum,  # its gradient is one number, expanded
]


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_planned_as_a_real_step_takes(name: str) -> None:
    for loss in LOSSES:
        task = Small(
            lambda: Using(OPERATORS[name]),
            terms=lambda model, x, loss=loss: {"all": (loss(model(x)), float(len(x)))},
        )
        asked, choice = confirmed(task, least=LEAST), MemoryChoice()
        planned = live_peak_bytes(asked.standing(choice), asked.micro(choice, ROWS), accumulate=False)
        assert 0.99 <= planned / true_peak(task, ROWS) <= (1.15 if name.startswith("conv") else 1.03)
