"""Transformers over padded sequences: post-norm, pre-norm, with checkpointing, with the lower half frozen.

Shapes: B items, L positions, D features, V letters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.blocks import Block, present, token_loss
from tests.zoo.member import Member, Synthetic
from tests.zoo.spread import lengths

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.protocol import Sizes

LONGEST = 2048


class PostNorm(nn.Module):
    """torch's own encoder."""

    def __init__(self, width: int, heads: int, depth: int, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, batch_first=True, norm_first=False)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        return self.encoder(x_BLD, src_key_padding_mask=~mask_BL)


class PreNorm(nn.Module):
    """Layers with fused attention, which may run again in backward."""

    def __init__(self, width: int, heads: int, depth: int, dropout: float, *, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(Block(width, heads, dropout=dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        for block in self.blocks:
            if self.checkpointed:
                x_BLD = checkpoint(block, x_BLD, mask_BL, use_reentrant=False)
            else:
                x_BLD = block(x_BLD, mask_BL)
        return self.norm(x_BLD)


class Tagger(nn.Module):
    """Letters to letters."""

    def __init__(self, encoder: nn.Module, width: int, letters: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(LONGEST, width)
        self.encoder, self.head = encoder, nn.Linear(width, letters)

    def forward(self, letters_BL: Tensor, mask_BL: Tensor) -> Tensor:
        places_L = torch.arange(letters_BL.shape[1], device=letters_BL.device)
        return self.head(self.encoder(self.letters(letters_BL) + self.places(places_L), mask_BL))


@dataclass(frozen=True)
class Tagging(Synthetic):
    """A letter for each position."""

    padded: ClassVar[bool] = True
    width: int = 128
    heads: int = 4
    depth: int = 4
    letters: int = 32
    dropout: float = 0.0
    norm: str = "pre"  # or post
    checkpointed: bool = False
    frozen: int = 0  # so many of the lower layers, and the embeddings below, are not trained

    def model(self) -> nn.Module:
        shape = self.width, self.heads, self.depth, self.dropout
        encoder = PostNorm(*shape) if self.norm == "post" else PreNorm(*shape, checkpointed=self.checkpointed)
        model = Tagger(encoder, self.width, self.letters)
        for module in self._frozen(model):
            module.requires_grad_(False)
        return model

    def _frozen(self, model: nn.Module) -> Iterator[nn.Module]:
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
    """Return a member whose batches have so many times the items that others' have."""
    shapes = (64, 4), (128, 8), (256, 8)
    smallest, middle, largest = ({"length": length, "items": items * times} for length, items in shapes)
    sizes = smallest, middle, largest
    return Member(name, Tagging, small, sizes, settings, padded=True, items=lengths)


MEMBERS = (
    _member("transformer_post", {"norm": "post", "dropout": 0.1}, {"optimizer": "adam", "foreach": True, "clip": 1.0}),
    _member("transformer_pre", {}, {"optimizer": "adamw", "foreach": True, "clip": 1.0}),
    _member("transformer_checkpointed", {"checkpointed": True}, {"optimizer": "adamw", "foreach": False}, times=4),
    _member("transformer_frozen", {"depth": 8, "frozen": 4}, {"optimizer": "adamw", "foreach": True, "ema": 0.999}),
)
