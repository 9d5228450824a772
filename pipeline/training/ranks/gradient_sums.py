"""Gradients are added up over ranks after a step's last backward, packed into pieces.

What is in which piece follows from shapes, types and the piece's size alone. The memory for that is allocated before
anything is exchanged: a buffer to pack in, and zeros where a rank has no gradient. A rank without room for a buffer of
the planned size says how large it can be; in that step, and no other, all ranks pack in pieces of the smallest.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from pipeline.device.out_of_memory import after_freeing_caches, unless_out_of_memory
from pipeline.errors import ConfigError, PlanInfeasible
from pipeline.training.ranks.rank_protocol import PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from pipeline.training.ranks.rank_protocol import Ranks

Place: TypeAlias = tuple[int, int]  # which tensor, and which part of it

LEAST_PIECE_BYTES = 64 << 10  # smaller ones would take longer than any step


class GradientSums:
    """Adds up the gradients of a model's parameters over ranks."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: Ranks, device: str) -> None:
        self.parameters, self._ranks, self._device = parameters, ranks, device
        self._piece_bytes = min(PIECE_BYTES, max(1, sum(parameter.nbytes for parameter in parameters)))
        self._buffer: Tensor | None = None

    def reserve(self) -> int:
        """Make the gradients that are missing and the buffer; return the piece's size for which there is room."""
        self._fill()
        size = self._piece_bytes
        while self._buffer is None or len(self._buffer) < size:
            self._buffer = None  # room for the other
            empty = partial(torch.empty, size, dtype=torch.uint8, device=self._device)
            self._buffer = unless_out_of_memory(partial(after_freeing_caches, empty, self._device))
            if self._buffer is None:
                size //= 2
                if size < LEAST_PIECE_BYTES:
                    problem = "out of memory while packing gradients for all-reduce"
                    raise PlanInfeasible(
                        problem, where="training", remedy="pipeline plan train   (or use a larger GPU)"
                    )
        return size

    def _fill(self) -> None:
        """Make zeros where this rank has no gradient."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = after_freeing_caches(partial(torch.zeros_like, parameter), self._device)
            elif parameter.grad.is_sparse:
                problem = f"a gradient of shape {list(parameter.shape)} is sparse: ranks can sum only dense ones"
                raise ConfigError(problem, where="training", remedy="nn.Embedding(…, sparse=False)")

    def add_up(self, piece_bytes: int) -> None:
        """Add up the gradients of all ranks, in pieces of the size for which all of them have room."""
        gradients = [cast("Tensor", parameter.grad) for parameter in self.parameters]
        self._ranks.add_up(gradients, piece_bytes, self._buffer)


# Pieces


def reduce_in_pieces(
    tensors: Iterable[Tensor],
    reduce: Callable[[Tensor], Any],
    piece_bytes: int = PIECE_BYTES,
    buffer: Tensor | None = None,
) -> None:
    """Reduce tensors in place, packed into flat tensors of one type and at most `piece_bytes`, in a buffer if given.

    The packing depends on shapes and types alone: it must be the same on every rank.
    """
    for parts in tensor_pieces(list(tensors), piece_bytes):
        if len(parts) == 1 and parts[0].is_contiguous():
            reduce(parts[0].view(-1))
            continue
        values = sum(part.numel() for part in parts)
        if buffer is None:
            flat = parts[0].new_empty(values)
        else:
            flat = buffer[: values * parts[0].element_size()].view(parts[0].dtype)
        places = packed(parts, flat)
        reduce(flat)
        torch._foreach_copy_(parts, places)
        del flat, places  # one piece at a time


def packed(parts: list[Tensor], flat: Tensor) -> list[Tensor]:
    """Copy tensors into a flat one; return their places in it."""
    split = torch.split(flat, [part.numel() for part in parts])
    places = [place.view(part.shape) for place, part in zip(split, parts, strict=True)]
    torch._foreach_copy_(places, parts)  # one call for all, as in torch's own FSDP
    return places


def tensor_pieces(tensors: Sequence[Tensor], piece_bytes: int) -> Iterator[list[Tensor]]:
    """Yield groups of tensors of one type, or of parts of them, of at most `piece_bytes` together."""
    for piece in pieces_of(tensors, piece_bytes):
        yield [parts_of(tensors[number], piece_bytes)[part] for number, part in piece]


def pieces_of(tensors: Sequence[Tensor], piece_bytes: int) -> list[list[Place]]:
    """Group tensors of one type, or parts of them, into pieces of at most `piece_bytes`; by shapes and types alone."""
    pieces: list[list[Place]] = []
    for numbers in _by_type(tensors).values():
        piece: list[Place] = []
        room = piece_bytes
        for number in numbers:
            for place, part in enumerate(parts_of(tensors[number], piece_bytes)):
                if part.nbytes > room and piece:
                    pieces.append(piece)
                    piece, room = [], piece_bytes
                piece.append((number, place))
                room -= part.nbytes
        if piece:
            pieces.append(piece)
    return pieces


def parts_of(tensor: Tensor, piece_bytes: int) -> list[Tensor]:
    """Return views of a tensor of at most `piece_bytes` each; none of an empty one."""
    real = _real(tensor)
    return list(_parts(real, max(1, piece_bytes // real.element_size()))) if real.numel() else []


def _by_type(tensors: Sequence[Tensor]) -> Mapping[tuple[torch.device, torch.dtype], list[int]]:
    """Group the numbers of tensors by device and type, in order of first appearance."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, _real(tensor).dtype), []).append(number)
    return groups


def _real(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    return torch.view_as_real(plain) if plain.is_complex() else plain


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
