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


class Tower(nn.Module):
    """A transformer read at its first position, or at its last if it is causal."""

    def __init__(self, width: int, depth: int, shared: int, places: int, *, causal: bool) -> None:
        super().__init__()
        self.causal, self.places = causal, nn.Embedding(places, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, shared, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.places.weight[: x_BLD.shape[1]]
        for block in self.blocks:
            x_BLD = block(x_BLD, causal=self.causal)
        return functional.normalize(self.out(self.norm(x_BLD[:, -1 if self.causal else 0])), dim=-1)


class Towers(nn.Module):
    """A vision transformer, and a causal one of words."""

    def __init__(self, depth: int, shared: int) -> None:
        super().__init__()
        self.patches, self.first = nn.Conv2d(3, 128, PATCH, PATCH, bias=False), nn.Parameter(torch.randn(1, 1, 128))
        self.images = Tower(128, depth, shared, (PIXELS // PATCH) ** 2 + 1, causal=False)
        self.words, self.texts = nn.Embedding(WORDS, 96), Tower(96, depth, shared, LONGEST, causal=True)

    def forward(self, pixels_BCHW: Tensor, words_BL: Tensor) -> Tensor:
        patches_BLD = self.patches(pixels_BCHW).flatten(2).transpose(1, 2)
        images_BD = self.images(torch.cat([self.first.expand(len(patches_BLD), -1, -1), patches_BLD], 1))
        return 14.3 * images_BD @ self.texts(self.words(words_BL)).T


@dataclass(frozen=True)
class TwoTowers(Synthetic):
    """Find the text that belongs to each image."""

    padded = True
    depth: int = 3
    shared: int = 64

    def model(self) -> nn.Module:
        return Towers(self.depth, self.shared)

    def example(self, sizes: Sizes) -> dict[str, Tensor]:
        items = sizes["items"]
        words = torch.randint(WORDS, (items, sizes["length"]))
        return {"pixels": torch.randn(items, 3, PIXELS, PIXELS), "words": words}

    def loss(self, model: Any, batch: Any) -> dict[str, tuple[Tensor, float]]:
        likeness_BB = model(batch["pixels"], batch["words"])
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
