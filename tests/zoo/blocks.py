"""Pieces that several families share.

Shapes: B items, L positions, D features, H heads.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


def present(items: int, length: int) -> Tensor:
    """Return which positions of padded items are real: the first item is whole, others are shorter in turn."""
    shorter_B = (torch.arange(items) % 4) * (length // 8)
    return torch.arange(length)[None, :] < (length - shorter_B)[:, None]


class Block(nn.Module):
    """A pre-norm transformer layer with fused attention."""

    def __init__(self, width: int, heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x_BLD: Tensor, mask_BL: Tensor | None = None, *, causal: bool = False) -> Tensor:
        normed_BLD = self.before_attention(x_BLD)
        query, key, value = (
            part(normed_BLD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed_BHLD = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if mask_BL is None else mask_BL[:, None, None, :],
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
        )
        x_BLD = x_BLD + self.out(mixed_BHLD.transpose(1, 2).flatten(2))
        return x_BLD + self.feed(self.before_feed(x_BLD))


def layers(*widths: int, activation: type[nn.Module] = nn.SiLU) -> nn.Sequential:
    """Return linear layers of these widths with activations between."""
    parts: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        parts += [activation(), nn.Linear(inner, outer)]
    return nn.Sequential(*parts[1:])


def token_loss(logits_BLV: Tensor, labels_BL: Tensor, mask_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of the real positions, and their number."""
    each_BL = functional.cross_entropy(logits_BLV.transpose(1, 2), labels_BL, reduction="none")
    return (each_BL * mask_BL).sum(), mask_BL.sum()
