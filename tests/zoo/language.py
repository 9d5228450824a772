"""A causal language model whose output layer is its embedding.

Shapes: B items, L positions, D features, V words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from tests.zoo.blocks import Block, present, token_loss
from tests.zoo.member import Member, Synthetic
from tests.zoo.spread import lengths

if TYPE_CHECKING:
    from pipeline.protocol import Sizes


class Tied(nn.Module):
    """Words to next words."""

    def __init__(self, words: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, words_BL: Tensor) -> Tensor:
        x_BLD = self.embedding(words_BL)
        for block in self.blocks:
            x_BLD = block(x_BLD, causal=True)
        return self.out(self.norm(x_BLD))


@dataclass(frozen=True)
class Language(Synthetic):
    """The next word at each position."""

    padded: ClassVar[bool] = True
    words: int = 4000
    width: int = 128
    heads: int = 4
    depth: int = 3

    def model(self) -> nn.Module:
        return Tied(self.words, self.width, self.heads, self.depth)

    def example(self, sizes: Sizes) -> dict[str, Tensor]:
        shape = sizes["items"], sizes["length"]
        words, following = (torch.randint(self.words, shape) for _ in range(2))
        return {"words": words, "following": following, "mask": present(*shape)}

    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
        return {"words": token_loss(model(batch["words"]), batch["following"], batch["mask"])}


MEMBERS = (
    Member(
        name="tied",
        task=Language,
        small={},
        sizes=({"length": 64, "items": 4}, {"length": 128, "items": 6}, {"length": 200, "items": 10}),
        settings={"optimizer": "adamw", "foreach": True, "checkpointing": True, "clip": 1.0},
        padded=True,
        items=lengths,
    ),
)
