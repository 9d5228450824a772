"""A multi-layer perceptron over the rows of items, concatenated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tests.zoo.blocks import layers
from tests.zoo.member import Member, Synthetic
from tests.zoo.spread import lengths

if TYPE_CHECKING:
    from pipeline.protocol import Sizes


@dataclass(frozen=True)
class Perceptron(Synthetic):
    """Regression of each row."""

    inputs: int = 64
    width: int = 256
    depth: int = 6

    def model(self) -> nn.Module:
        return layers(self.inputs, *[self.width] * self.depth, 1, activation=nn.GELU)

    def example(self, sizes: Sizes) -> dict[str, Tensor]:
        return {"x": torch.randn(sizes["rows"], self.inputs), "y": torch.randn(sizes["rows"], 1)}

    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, float]]:
        return {"squares": ((model(batch["x"]) - batch["y"]).square().sum(), float(len(batch["x"])))}


MEMBERS = (
    Member(
        "mlp",
        Perceptron,
        {},
        ({"rows": 1500, "items": 3}, {"rows": 4000, "items": 8}, {"rows": 9000, "items": 18}),
        {"optimizer": "adamw", "foreach": True},
        padded=False,
        items=partial(lengths, median=500, name="rows"),
    ),
)
