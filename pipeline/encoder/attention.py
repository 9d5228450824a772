"""Attention within each of the sequences that stand packed one after another, and the positions it sees.

Shapes: T tokens, H heads, C columns of a head, F = C/2 frequencies, P positions, L tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Where the sequences begin, and where the last one ends."""

    starts: tuple[int, ...]
    starts_device: torch.Tensor  # int32, the same numbers where the computation is
    longest: int

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield the first token of each sequence and the one after its last."""
        return pairwise(self.starts)


# qkv_T3HC, bounds, room_THC → context_THC, in the room given or elsewhere
Attention = Callable[[torch.Tensor, Bounds, torch.Tensor], torch.Tensor]
Kernel = Callable[..., Any]


def by_sequence(qkv_T3HC: torch.Tensor, bounds: Bounds, room_THC: torch.Tensor) -> torch.Tensor:
    """Attend within one sequence after another; no kernel that torch picks here makes an L x L matrix."""
    for first, last in bounds.spans():
        q_1HLC, k_1HLC, v_1HLC = qkv_T3HC[first:last].permute(1, 2, 0, 3).unsqueeze(1).unbind()
        context_1HLC = scaled_dot_product_attention(q_1HLC, k_1HLC, v_1HLC)
        room_THC[first:last] = context_1HLC[0].transpose(0, 1)
    room_THC[bounds.starts[-1] :] = 0  # rows that only fill a tile: nobody reads them, but they are computed on
    return room_THC


def all_at_once(
    kernel: Kernel, options: dict[str, int], qkv_T3HC: torch.Tensor, bounds: Bounds, room_THC: torch.Tensor
) -> torch.Tensor:
    """Attend within all sequences by one call of torch's packed kernel."""
    del room_THC  # the kernel brings its own
    q_THC, k_THC, v_THC = qkv_T3HC.unbind(1)
    starts, longest = bounds.starts_device, bounds.longest
    context_THC: torch.Tensor = kernel(q_THC, k_THC, v_THC, starts, starts, longest, longest, **options)
    return context_THC


def varlen_kernel() -> Kernel | None:
    """Return torch's packed attention, which came with torch 2.10 and grew since; None where there is none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def choose(
    device: torch.device, dtype: torch.dtype, heads: int, columns: int, kernel: Kernel | None = None
) -> Attention:
    """Return the fastest attention that works for these shapes on this device; it is tried, not guessed."""
    kernel = kernel or (varlen_kernel() if device.type == "cuda" else None)
    if kernel is None or dtype == torch.float32:
        return by_sequence
    # One split makes a sequence's result independent of its batch; not every backend or version knows the word.
    for options in ({"num_splits": 1}, {}):
        attention: Attention = partial(all_at_once, kernel, options)
        if _works(attention, device, dtype, heads, columns):
            return attention
    return by_sequence


def _works(attention: Attention, device: torch.device, dtype: torch.dtype, heads: int, columns: int) -> bool:
    """Say whether an attention runs here and agrees with the plain one."""
    random = torch.Generator().manual_seed(0)
    qkv_T3HC = torch.randn(40, 3, heads, columns, generator=random).to(device, dtype)
    starts = (0, 7, 40)
    bounds = Bounds(starts, torch.tensor(starts, dtype=torch.int32, device=device), 33)
    try:
        found_THC = attention(qkv_T3HC, bounds, torch.empty_like(qkv_T3HC[:, 0]))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return False  # a card, a head width or a version that the kernel does not take
    wanted_THC = by_sequence(qkv_T3HC, bounds, torch.empty_like(qkv_T3HC[:, 0]))
    return bool(torch.allclose(found_THC.float(), wanted_THC.float(), atol=0.02))


class Rotary:
    """Rotary positions as unit complex numbers, in fp32 whatever the precision, made as far as they are needed."""

    def __init__(self, frequency_F: torch.Tensor, device: torch.device) -> None:
        self._frequency_F = frequency_F.float()
        self._device = device
        self._table_PF = torch.empty(0, len(frequency_F), dtype=torch.complex64, device=device)

    def at(self, position_T: torch.Tensor, longest: int) -> torch.Tensor:
        """Return the turn of each token, for every head."""
        if longest > len(self._table_PF):
            angle_PF = torch.outer(torch.arange(longest, dtype=torch.float32), self._frequency_F)
            self._table_PF = torch.polar(torch.ones_like(angle_PF), angle_PF).to(self._device)
        return self._table_PF[position_T].unsqueeze(1)


def turn(qk_THC: torch.Tensor, turn_T1F: torch.Tensor, out_THC: torch.Tensor) -> None:
    """Turn queries and keys by their positions; the pairs that turn together stand beside each other."""
    if qk_THC.dtype == torch.float32:
        torch.mul(_complex(qk_THC), turn_T1F, out=_complex(out_THC))
        return
    turned_THC = qk_THC.float()
    _complex(turned_THC).mul_(turn_T1F)
    out_THC.copy_(turned_THC)


def _complex(x_THC: torch.Tensor) -> torch.Tensor:
    """Return a view of neighbouring columns as complex numbers."""
    return torch.view_as_complex(x_THC.view(*x_THC.shape[:-1], -1, 2))


def pairs_together(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the outputs of a projection within each head, so that columns c and c + C/2 become neighbours.

    Scores do not change when queries and keys are reordered alike.
    """
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
