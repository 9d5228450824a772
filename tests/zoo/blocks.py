"""Pieces that several families share.

Shapes: B items, L positions, M positions attended to, D features, H heads.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


def present(items: int, length: int) -> Tensor:
    """Return which positions of padded items are there: the first item is whole, others are shorter by turns."""
    shorter_B = (torch.arange(items) % 4) * (length // 8)
    return torch.arange(length)[None, :] < (length - shorter_B)[:, None]


class Attention(nn.Module):
    """Attention of several heads, fused or written out."""

    def __init__(self, width: int, heads: int, *, fused: bool = True, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.fused, self.dropout = heads, fused, dropout
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=bias) for _ in range(4))

    def forward(self, x_BLD: Tensor, context_BMD: Tensor, mask_BM: Tensor | None, *, causal: bool = False) -> Tensor:
        query, key, value = (
            self._split(self.query(x_BLD)),
            *map(self._split, (self.key(context_BMD), self.value(context_BMD))),
        )
        mask = None if mask_BM is None else mask_BM[:, None, None, :]
        mixed_BHLD = (
            self._fused(query, key, value, mask, causal) if self.fused else self._plain(query, key, value, mask)
        )
        return self.out(mixed_BHLD.transpose(1, 2).flatten(2))

    def _split(self, x_BLD: Tensor) -> Tensor:
        return x_BLD.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal
        )

    def _plain(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores_BHLM = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        if mask is not None:
            scores_BHLM = scores_BHLM.masked_fill(~mask, float("-inf"))
        return functional.dropout(scores_BHLM.softmax(-1), self.dropout, self.training) @ value


def feed_forward(width: int, dropout: float = 0.0, activation: type[nn.Module] = nn.GELU) -> nn.Sequential:
    """Return two layers with a wide middle."""
    return nn.Sequential(
        nn.Linear(width, 4 * width), activation(), nn.Dropout(dropout), nn.Linear(4 * width, width), nn.Dropout(dropout)
    )


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        fused: bool = True,
        dropout: float = 0.0,
        activation: type[nn.Module] = nn.GELU,
    ) -> None:
        super().__init__()
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, fused=fused, dropout=dropout)
        self.feed = feed_forward(width, dropout, activation)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor | None = None, *, causal: bool = False) -> Tensor:
        normed_BLD = self.before_attention(x_BLD)
        x_BLD = x_BLD + self.attention(normed_BLD, normed_BLD, mask_BL, causal=causal)
        return x_BLD + self.feed(self.before_feed(x_BLD))


def layers(*widths: int, activation: type[nn.Module] = nn.SiLU) -> nn.Sequential:
    """Return linear layers of these widths with activations between."""
    parts: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        parts += [activation(), nn.Linear(inner, outer)]
    return nn.Sequential(*parts[1:])


def summed(values_ED: Tensor, index_E: Tensor, count: int) -> Tensor:
    """Return sums of rows by index."""
    return values_ED.new_zeros(count, *values_ED.shape[1:]).index_add_(0, index_E, values_ED)


def token_loss(logits_BLV: Tensor, labels_BL: Tensor, mask_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of the positions that are there, and how many they are."""
    each_BL = functional.cross_entropy(logits_BLV.transpose(1, 2), labels_BL, reduction="none")
    return (each_BL * mask_BL).sum(), mask_BL.sum()
