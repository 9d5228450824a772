"""Transformers over padded sequences: post-norm, pre-norm, checkpointed, with frozen layers, with tied weights.

Shapes: B items, L positions, D features, V letters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.blocks import Block, present, token_loss
from tests.zoo.member import Member, Synthetic
from tests.zoo.spread import lengths

if TYPE_CHECKING:
    from pipeline.protocol import Sizes

LONGEST = 2048


class PostNorm(nn.Module):
    """torch's own encoder."""

    def __init__(self, task: Tagging) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(task.width, 4, 4 * task.width, task.dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, task.depth, enable_nested_tensor=False)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        return self.encoder(x_BLD, src_key_padding_mask=~mask_BL)


class PreNorm(nn.Module):
    """Layers with fused attention, which may run again in backward."""

    def __init__(self, task: Tagging) -> None:
        super().__init__()
        self.task, self.norm = task, nn.LayerNorm(task.width)
        self.blocks = nn.ModuleList(Block(task.width, 4, dropout=task.dropout) for _ in range(task.depth))

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        for block in self.blocks:
            if self.task.checkpointed:
                x_BLD = checkpoint(block, x_BLD, mask_BL, use_reentrant=False)
            elif self.task.tied:
                x_BLD = block(x_BLD, causal=True)
            else:
                x_BLD = block(x_BLD, mask_BL)
        return self.norm(x_BLD)


class Tagger(nn.Module):
    """Letters to letters."""

    def __init__(self, task: Tagging) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(task.letters, task.width), nn.Embedding(LONGEST, task.width)
        self.encoder = PostNorm(task) if task.norm == "post" else PreNorm(task)
        self.head = nn.Linear(task.width, task.letters, bias=not task.tied)
        if task.tied:
            self.head.weight = self.letters.weight

    def forward(self, letters_BL: Tensor, mask_BL: Tensor) -> Tensor:
        places_L = torch.arange(letters_BL.shape[1], device=letters_BL.device)
        return self.head(self.encoder(self.letters(letters_BL) + self.places(places_L), mask_BL))


@dataclass(frozen=True)
class Tagging(Synthetic):
    """A letter for each position."""

    padded = True
    width: int = 128
    depth: int = 4
    letters: int = 32
    dropout: float = 0.0
    norm: str = "pre"  # or post
    checkpointed: bool = False
    tied: bool = False  # a causal language model, whose output layer is its embedding
    frozen: int = 0  # so many of the lower layers, and the embeddings below, are not trained

    def model(self) -> nn.Module:
        model = Tagger(self)
        for module in self._frozen(model):
            module.requires_grad_(requires_grad=False)
        return model

    def _frozen(self, model: Any) -> Iterator[nn.Module]:
        if self.frozen:
            yield from (model.letters, model.places, *model.encoder.blocks[: self.frozen])

    def example(self, sizes: Sizes) -> dict[str, Tensor]:
        shape = sizes["items"], sizes["length"]
        letters, labels = (torch.randint(self.letters, shape) for _ in range(2))
        return {"letters": letters, "labels": labels, "mask": present(*shape)}

    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
        return {"letters": token_loss(model(batch["letters"], batch["mask"]), batch["labels"], batch["mask"])}

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Decay matrices only, as transformers are trained."""
        trained = [one for one in model.parameters() if one.requires_grad]
        return [
            {"params": [one for one in trained if one.ndim > 1]},
            {"params": [one for one in trained if one.ndim <= 1], "weight_decay": 0.0},
        ]


def _member(name: str, small: dict[str, Any], settings: dict[str, Any], times: int = 1) -> Member:
    """Return a member whose batches have so many times the items that others have."""
    small_, middle, large = ({"length": 64 << size, "items": items * times} for size, items in enumerate((4, 8, 8)))
    return Member(name, Tagging, small, (small_, middle, large), settings, padded=True, items=lengths)


MEMBERS = (
    _member("transformer_post", {"norm": "post", "dropout": 0.1}, {"optimizer": "adam", "foreach": True, "clip": 1.0}),
    _member("transformer_pre", {}, {"optimizer": "adamw", "foreach": True, "clip": 1.0}),
    _member("transformer_checkpointed", {"checkpointed": True}, {"optimizer": "adamw", "foreach": False}, times=4),
    _member("transformer_frozen", {"depth": 8, "frozen": 4}, {"optimizer": "adamw", "foreach": True, "ema": 0.999}),
    _member(
        "tied",
        {"letters": 4000, "depth": 3, "tied": True},
        {"optimizer": "adamw", "foreach": True, "checkpointing": 3, "clip": 1.0},
    ),
)
