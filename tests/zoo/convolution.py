"""Contacts of a sequence with itself: convolutions along it, then over the map of all its pairs.

Shapes: B items, C channels, L positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.blocks import present
from tests.zoo.member import Member, Synthetic
from tests.zoo.spread import lengths

if TYPE_CHECKING:
    import numpy as np

    from pipeline.protocol import Sizes

FEATURES = 32  # of a position, as they come


class Residual(nn.Module):
    """Two convolutions beside a straight way."""

    def __init__(self, kind: type[nn.Module], channels: int, dilation: int) -> None:
        super().__init__()
        self.first, self.second = (
            kind(channels, channels, 3, padding=dilation, dilation=dilation, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(x + self.norms[1](self.second(inner)))


class Map(nn.Module):
    """A value for each pair of positions."""

    def __init__(self, channels: int, depth: int, order: torch.memory_format) -> None:
        super().__init__()
        self.order = order
        self.lift = nn.Conv1d(FEATURES, channels, 5, padding=2)
        self.along = nn.ModuleList(Residual(nn.Conv1d, channels, 1) for _ in range(2))
        self.pair = nn.Conv2d(2 * channels, channels, 1)
        self.over = nn.ModuleList(Residual(nn.Conv2d, channels, 1 + place % 2) for place in range(depth))
        self.out = nn.Conv2d(channels, 1, 1)

    def forward(self, x_BCL: Tensor) -> Tensor:
        x_BCL = self.lift(x_BCL)
        for block in self.along:
            x_BCL = block(x_BCL)
        length = x_BCL.shape[-1]
        rows_BCLL, columns_BCLL = (
            x_BCL[..., None].expand(-1, -1, -1, length),
            x_BCL[:, :, None].expand(-1, -1, length, -1),
        )
        x_BCLL = self.pair(torch.cat([rows_BCLL, columns_BCLL], 1)).contiguous(memory_format=self.order)
        for block in self.over:
            x_BCLL = block(x_BCLL)
        return self.out(x_BCLL).squeeze(1)


@dataclass(frozen=True)
class Contacts(Synthetic):
    """Whether two positions touch."""

    padded: ClassVar[bool] = True
    channels: int = 24
    depth: int = 4
    channels_last: bool = True  # else the CPU's kernels copy into an order of their own, which no GPU's do

    def model(self) -> nn.Module:
        order = torch.channels_last if self.channels_last else torch.contiguous_format
        return Map(self.channels, self.depth, order)

    def example(self, sizes: Sizes) -> dict[str, Tensor]:
        items, length = sizes["items"], sizes["length"]
        return {
            "x": torch.randn(items, FEATURES, length),
            "contacts": torch.rand(items, length, length),
            "mask": present(items, length),
        }

    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
        pairs_BLL = batch["mask"][:, :, None] & batch["mask"][:, None, :]
        told_BLL = model(batch["x"])
        each_BLL = functional.binary_cross_entropy_with_logits(told_BLL, batch["contacts"], reduction="none")
        return {"contacts": ((each_BLL * pairs_BLL).sum(), pairs_BLL.sum())}


def _items(count: int, rng: np.random.Generator) -> Any:
    return lengths(count, rng, median=40)


MEMBERS = (
    Member(
        name="convolution",
        task=Contacts,
        small={},
        sizes=({"length": 48, "items": 2}, {"length": 80, "items": 3}, {"length": 112, "items": 4}),
        settings={"optimizer": "sgd", "foreach": True},
        padded=True,
        items=_items,
    ),
)
