"""A plain transformer over the rows of one side of a pair: bytes of a text or sequence, or vectors of any kind.

Shapes: B items, L rows of the longest item and its class token, D features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from pipeline.tasks.task_parts import AttentionLayer, at_least_single

if TYPE_CHECKING:
    from torch import Tensor

BYTES = 256
SPREAD = 0.02  # of what is learned for places, to begin with


class Rows(NamedTuple):
    """One side of a batch's items, padded."""

    values: Tensor  # [B, L] bytes, or vectors [B, L, D]
    real_BL: Tensor | None  # which are real, the class token first; None: all are


class RowTower(nn.Module):
    """A transformer that embeds one side of an item as a vector of length 1."""

    def __init__(
        self, dim: int, most: int, width: int, layers: int, heads: int, inner: int, out: int, *, dropout: float
    ) -> None:
        """Take the numbers of a vector, 0 for bytes, and the sizes of the transformer."""
        super().__init__()
        self.embed = nn.Linear(dim, width) if dim else nn.Embedding(BYTES, width)
        self.whole_D = nn.Parameter(SPREAD * torch.randn(width))  # the class token, whose output embeds the item
        self.place_LD = nn.Parameter(SPREAD * torch.randn(most, width))
        self.layers = nn.ModuleList(
            AttentionLayer(width, heads, inner, dropout, functional.gelu) for _ in range(layers)
        )
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, out, bias=False)

    def forward(self, rows: Rows) -> Tensor:
        """Return the vector of each item [B, D]."""
        x_BLD = self.embed(rows.values) + self.place_LD[: rows.values.shape[1]]
        x_BLD = torch.cat([self.whole_D.expand(len(x_BLD), 1, -1), x_BLD], 1)
        for layer in self.layers:
            x_BLD = layer(x_BLD, rows.real_BL)
        vector_BD = self.out(self.norm(x_BLD[:, 0]))
        return functional.normalize(at_least_single(vector_BD), dim=-1)
