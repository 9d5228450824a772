"""Gradients are summed over ranks after a step's last backward, packed into flat pieces.

What is in which piece follows from shapes, types and the piece's size alone. The memory for that is allocated before
the ranks exchange anything: a buffer to pack in, and zeros where a rank has no gradient. A rank without room for a
buffer of the planned size reports how large it can be; in that step, and no other, all ranks use the smallest.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from pipeline.device.out_of_memory import after_freeing_caches, unless_out_of_memory
from pipeline.errors import ConfigError, PlanInfeasible
from pipeline.training.ranks import PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor, nn

    from pipeline.training.ranks import Ranks

LEAST_PIECE_BYTES = 64 << 10  # smaller ones would take longer than any step


class GradientSums:
    """Sums the gradients of a model's parameters over ranks."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: Ranks, device: str) -> None:
        self.parameters, self._ranks, self._device = parameters, ranks, device
        self._piece_bytes = min(PIECE_BYTES, max(1, sum(parameter.nbytes for parameter in parameters)))
        self._buffer: Tensor | None = None

    def reserve(self) -> int:
        """Allocate missing gradients and the buffer; return the piece size for which there is room."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = after_freeing_caches(partial(torch.zeros_like, parameter), self._device)
            elif parameter.grad.is_sparse:
                problem = f"a gradient of shape {list(parameter.shape)} is sparse: ranks can sum only dense ones"
                raise ConfigError(problem, where="training", remedy="nn.Embedding(…, sparse=False)")
        size = self._piece_bytes
        while self._buffer is None or len(self._buffer) < size:
            self._buffer = None  # room for the other
            empty = partial(torch.empty, size, dtype=torch.uint8, device=self._device)
            self._buffer = unless_out_of_memory(partial(after_freeing_caches, empty, self._device))
            if self._buffer is None and (size := size // 2) < LEAST_PIECE_BYTES:
                problem = "out of memory while packing gradients for all-reduce"
                raise PlanInfeasible(problem, where="training", remedy="pipeline plan train   (or use a larger GPU)")
        return size

    def add_up(self, piece_bytes: int) -> None:
        """Sum the gradients of all ranks, in pieces of the size for which all of them have room."""
        self._ranks.add_up([cast("Tensor", parameter.grad) for parameter in self.parameters], piece_bytes, self._buffer)


def reduce_in_pieces(
    tensors: Iterable[Tensor],
    reduce: Callable[[Tensor], Any],
    piece_bytes: int = PIECE_BYTES,
    buffer: Tensor | None = None,
) -> None:
    """Reduce tensors in place, packed into flat tensors of one type and at most `piece_bytes`, in a buffer if given.

    The packing depends on shapes and types alone: it must be the same on every rank.
    """
    for parts in _pieces(tensors, piece_bytes):
        if len(parts) == 1 and parts[0].is_contiguous():
            reduce(parts[0].view(-1))
            continue
        sizes = [part.numel() for part in parts]
        if buffer is None:
            flat = parts[0].new_empty(sum(sizes))
        else:
            flat = buffer[: sum(sizes) * parts[0].element_size()].view(parts[0].dtype)
        places = [place.view(part.shape) for place, part in zip(torch.split(flat, sizes), parts, strict=True)]
        torch._foreach_copy_(places, parts)  # one call for all, as in torch's own FSDP
        reduce(flat)
        torch._foreach_copy_(parts, places)
        del flat, places  # one piece at a time


def _pieces(tensors: Iterable[Tensor], piece_bytes: int) -> Iterator[list[Tensor]]:
    """Yield groups of tensors of one device and type, or of parts of them, of at most `piece_bytes` together."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        plain = tensor.detach()
        real = torch.view_as_real(plain) if plain.is_complex() else plain
        most = max(1, piece_bytes // real.element_size())
        groups.setdefault((real.device, real.dtype), []).extend(_parts(real, most) if real.numel() else ())
    for parts in groups.values():
        piece: list[Tensor] = []
        room = piece_bytes
        for part in parts:
            if part.nbytes > room and piece:
                yield piece
                piece, room = [], piece_bytes
            piece.append(part)
            room -= part.nbytes
        if piece:
            yield piece


def _parts(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """Yield views of a tensor with at most `most` values each."""
    if tensor.numel() <= most:
        yield tensor
        return
    rows = most // (tensor.numel() // tensor.shape[0])
    if rows:
        yield from torch.split(tensor, rows)
    else:
        for row in tensor:
            yield from _parts(row, most)
