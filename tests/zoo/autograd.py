"""A layer with a backward of its own, which keeps less than torch would and computes the rest again.

Shapes: R rows, D features, W features of the middle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.member import Member, Synthetic
from tests.zoo.spread import lengths

if TYPE_CHECKING:
    import numpy as np

    from pipeline.protocol import Sizes


class Gated(torch.autograd.Function):
    """silu(a) · b, of which only a and b are kept."""

    @staticmethod
    def forward(ctx: Any, a_RW: Tensor, b_RW: Tensor) -> Tensor:
        ctx.save_for_backward(a_RW, b_RW)
        return functional.silu(a_RW) * b_RW

    @staticmethod
    def backward(ctx: Any, grad_RW: Tensor) -> tuple[Tensor, Tensor]:
        a_RW, b_RW = ctx.saved_tensors
        gate_RW = torch.sigmoid(a_RW)
        slope_RW = gate_RW * (1 + a_RW * (1 - gate_RW))
        return grad_RW * b_RW * slope_RW, grad_RW * a_RW * gate_RW


class Layer(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x_RD: Tensor) -> Tensor:
        return x_RD + self.down(Gated.apply(*self.up(self.norm(x_RD)).chunk(2, -1)))


@dataclass(frozen=True)
class CustomAutograd(Synthetic):
    """Regression of each row."""

    width: int = 128
    depth: int = 5

    def model(self) -> nn.Module:
        return nn.Sequential(*(Layer(self.width) for _ in range(self.depth)), nn.Linear(self.width, 1))

    def example(self, sizes: Sizes) -> dict[str, Tensor]:
        return {"x": torch.randn(sizes["rows"], self.width), "y": torch.randn(sizes["rows"], 1)}

    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, float]]:
        return {
            "distance": (
                functional.smooth_l1_loss(model(batch["x"]), batch["y"], reduction="sum"),
                float(len(batch["x"])),
            )
        }


def _items(count: int, rng: np.random.Generator) -> Any:
    return lengths(count, rng, median=300, name="rows")


MEMBERS = (
    Member(
        name="custom_autograd",
        task=CustomAutograd,
        small={},
        sizes=({"rows": 800, "items": 3}, {"rows": 2500, "items": 8}, {"rows": 6000, "items": 20}),
        settings={"optimizer": "adamw", "foreach": False, "ema": 0.99},
        padded=False,
        items=_items,
    ),
)
