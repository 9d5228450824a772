"""Two towers, images and texts, whose pairs must find each other: every other item of the batch is a negative.

Shapes: B items, L positions, D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.blocks import Block
from tests.zoo.member import Member, Synthetic
from tests.zoo.spread import lengths

if TYPE_CHECKING:
    from pipeline.protocol import Sizes

PIXELS, PATCH, WORDS, LONGEST = 64, 8, 1000, 77


class Images(nn.Module):
    """A vision transformer."""

    def __init__(self, width: int, depth: int, shared: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, PATCH, bias=False)
        self.first = nn.Parameter(torch.randn(width))
        self.places = nn.Embedding((PIXELS // PATCH) ** 2 + 1, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, shared, bias=False)

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        x_BLD = self.patches(pixels_BCHW).flatten(2).transpose(1, 2)
        x_BLD = torch.cat([self.first.expand(len(x_BLD), 1, -1), x_BLD], 1) + self.places.weight
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return functional.normalize(self.out(self.norm(x_BLD[:, 0])), dim=-1)


class Texts(nn.Module):
    """A causal transformer, read at its last position."""

    def __init__(self, width: int, depth: int, shared: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LONGEST, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, shared, bias=False)

    def forward(self, words_BL: Tensor) -> Tensor:
        x_BLD = self.words(words_BL) + self.places.weight[: words_BL.shape[1]]
        for block in self.blocks:
            x_BLD = block(x_BLD, causal=True)
        return functional.normalize(self.out(self.norm(x_BLD)[:, -1]), dim=-1)


@dataclass(frozen=True)
class TwoTowers(Synthetic):
    """Find the text that belongs to each image."""

    padded = True
    depth: int = 3
    shared: int = 64

    def model(self) -> nn.Module:
        towers = {"images": Images(128, self.depth, self.shared), "texts": Texts(96, self.depth, self.shared)}
        return nn.ModuleDict(towers)

    def example(self, sizes: Sizes) -> dict[str, Tensor]:
        items = sizes["items"]
        words = torch.randint(WORDS, (items, sizes["length"]))
        return {"pixels": torch.randn(items, 3, PIXELS, PIXELS), "words": words}

    def loss(self, model: Any, batch: Any) -> dict[str, tuple[Tensor, float]]:
        likeness_BB = 14.3 * model["images"](batch["pixels"]) @ model["texts"](batch["words"]).T
        own_B = torch.arange(len(likeness_BB), device=likeness_BB.device)
        ways = [functional.cross_entropy(one, own_B, reduction="sum") for one in (likeness_BB, likeness_BB.T)]
        return {"pairs": (sum(ways) / 2, float(len(own_B)))}


MEMBERS = (
    Member(
        "contrastive",
        TwoTowers,
        {},
        ({"length": 24, "items": 6}, {"length": 48, "items": 12}, {"length": 77, "items": 24}),
        {"optimizer": "adamw", "foreach": True, "clip": 1.0},
        padded=True,
        items=partial(lengths, median=24, most=LONGEST),
    ),
)
