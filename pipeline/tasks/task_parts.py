"""What options of tasks may be: numbers, and not too low."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from pipeline.training.items.batch import ItemTensors

WHERE = "train.options"


def at_least(task: object, least: Mapping[str, float]) -> None:
    """Refuse an option that is below the least it may be, or no finite number."""
    for name, lowest in least.items():
        _refuse_unless(_number(task, name) >= lowest, task, name, f"{lowest} or more")


def above_zero(task: object, names: Iterable[str]) -> None:
    """Refuse an option that is 0 or below, or no finite number."""
    for name in names:
        _refuse_unless(_number(task, name) > 0, task, name, "more than 0")


def dropout_of(task: object) -> None:
    """Refuse a dropout of all, or of less than nothing."""
    _refuse_unless(0 <= _number(task, "dropout") < 1, task, "dropout", "from 0 to below 1")


def _number(task: object, name: str) -> float:
    """Return an option's value; what is not finite is below everything."""
    value: float = getattr(task, name)
    return value if math.isfinite(value) else -math.inf


def _refuse_unless(is_good: bool, task: object, name: str, must: str) -> None:  # noqa: FBT001 - it is what it is about
    if not is_good:
        raise ConfigError(f"{name} is {getattr(task, name)}: it must be {must}", where=f"{WHERE}.{name}")


MZ, INTENSITY = "peaks.mz", "peaks.intensity"


def most_intense(item: ItemTensors, most: int) -> tuple[Tensor, Tensor]:
    """Return m/z and intensity of the most intense peaks in their order, the first of those that are alike."""
    if MZ not in item.values or INTENSITY not in item.values:
        what = f"the task reads {MZ} and {INTENSITY}; {item.id} has {', '.join(sorted(item.values)) or 'no arrays'}"
        raise ConfigError(what, where="data.reader", remedy="name a reader of spectra")
    mz_P, intensity_P = item.values[MZ].float(), item.values[INTENSITY].float()
    if len(mz_P) > most:
        kept = intensity_P.argsort(descending=True, stable=True)[:most].sort().values
        mz_P, intensity_P = mz_P[kept], intensity_P[kept]
    return mz_P, intensity_P


def at_least_single(values: Tensor) -> Tensor:
    """Return numbers in single precision, or in their own where that is higher."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class AttentionLayer(nn.Module):
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


def padded_rows(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the rows of items as [B, L, …], zeros behind shorter ones, and which are real, unless all are."""
    lengths = [len(one) for one in rows]
    together = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    if min(lengths) == max(lengths):
        return together, None
    return together, torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)


def example_mask(items: int, length: int) -> Tensor | None:
    """Return a mask for a batch without data, as most batches have one: not that of one item."""
    return torch.ones(items, length, dtype=torch.bool) if items > 1 else None
