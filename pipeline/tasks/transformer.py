"""What tasks over rows of different lengths share: padding them, and the layer that rows attend to each other in.

Shapes: B items, L rows of the longest item, D features, H heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


class Layer(nn.Module):
    """Attention among an item's rows, then the same network for each of them; both on normed features, both added."""

    def __init__(
        self, width: int, heads: int, inner: int, dropout: float, activation: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.heads, self.dropout, self.activation = heads, dropout, activation
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x_BLD: Tensor, real_BL: Tensor | None) -> Tensor:
        """Return the rows' features, changed; without `real_BL` all of them are real."""
        x_BLD = x_BLD + self._drop(self._attended(self.before_attention(x_BLD), real_BL))
        return x_BLD + self._drop(self.down(self.activation(self.up(self.before_feed(x_BLD)))))

    def _attended(self, x_BLD: Tensor, real_BL: Tensor | None) -> Tensor:
        query, key, value = self.mix(x_BLD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # CUDA's flash kernel takes no mask: a batch with padding runs in the memory-efficient one or cuDNN's, which
        # keep as much for backward. One item alone, and items of one length, have no mask, and flash where it can.
        mask = None if real_BL is None else real_BL[:, None, None, :]
        dropout = self.dropout if self.training else 0.0
        mixed_BHLD = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        attended_BLD: Tensor = self.out(mixed_BHLD.transpose(1, 2).flatten(2))
        return attended_BLD

    def _drop(self, x_BLD: Tensor) -> Tensor:
        return functional.dropout(x_BLD, self.dropout, self.training)


def padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the rows of items as [B, L, …], zeros behind shorter ones, and which are real, unless all are."""
    lengths = [len(one) for one in rows]
    together = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    if min(lengths) == max(lengths):
        return together, None
    return together, torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)


def example_mask(items: int, length: int) -> Tensor | None:
    """Return a mask for a batch without data, as most batches have one: not that of one item."""
    return torch.ones(items, length, dtype=torch.bool) if items > 1 else None
