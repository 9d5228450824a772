"""Tensors in the host's memory, pinned where a card copies them: in runs and chunks that `host_memory` counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pipeline.device.accelerator import computing, on_card, release_pinned
from pipeline.device.out_of_memory import unless_out_of_memory
from pipeline.memory.hardware.host_memory import ALIGNMENT, CHUNK_BYTES, PinnedLayout, pinned_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def bytes_on_host(size_bytes: int, *, pin: bool = True) -> Tensor:
    """Return memory of the host as bytes; pinned, a card reaches it directly."""
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pin)


def layout_of(tensors: Sequence[Tensor]) -> PinnedLayout:
    """Return how copies of tensors lie in memory: in pinned runs where one is on a card."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return pinned_layout(sizes, pinned=any(map(on_card, tensors)))


class TensorRuns:
    """Copies of tensors in few runs of the host's memory, which are used again for others of the same sizes."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._places = layout_of([]).places
        self._runs: list[Tensor] = []

    @property
    def held_bytes(self) -> int:
        return sum(map(len, self._runs))

    def rooms(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors like some, valid until the next call."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        if sizes != self._sizes:
            self._make(sizes, pin=any(map(on_card, tensors)))
        rooms = []
        for tensor, size, place in zip(tensors, sizes, self._places, strict=True):
            run = self._runs[place.run] if size else bytes_on_host(0, pin=False)
            rooms.append(run[place.start : place.start + size].view(tensor.dtype).view(tensor.shape))
        return rooms

    def _make(self, sizes: list[int], *, pin: bool) -> None:
        """Make runs; unpinned ones where no more can be pinned."""
        if self._runs:
            self._sizes, self._runs = [], []  # the old ones go before the new ones come
            if pin:
                release_pinned()
        layout = pinned_layout(sizes, pinned=pin)
        runs = unless_out_of_memory(lambda: [bytes_on_host(size, pin=pin) for size in layout.runs])
        if runs is None:
            layout = pinned_layout(sizes, pinned=False)
            runs = [bytes_on_host(size, pin=False) for size in layout.runs]
        self._sizes, self._places, self._runs = sizes, layout.places, runs


@dataclass(eq=False, slots=True)
class _Chunk:
    memory: Tensor
    lent: set[int] = field(default_factory=set)  # whose bytes are in it
    reads: list[Any] = field(default_factory=list)  # copies from it that may be under way


@dataclass(slots=True)
class ChunkPiece:
    """A part of a chunk."""

    chunk: _Chunk
    start: int
    end: int


class ChunkLease:
    """Room for one tensor in chunks; they are free again when this is gone."""

    def __init__(self) -> None:
        self._pieces: list[ChunkPiece] = []

    def __del__(self) -> None:
        for piece in self._pieces:
            piece.chunk.lent.discard(id(self))

    def add(self, chunk: _Chunk, start: int, end: int) -> None:
        """Take a part of a chunk."""
        chunk.lent.add(id(self))
        self._pieces.append(ChunkPiece(chunk, start, end))

    def fill(self, flat: Tensor) -> None:
        """Copy the elements of a flat tensor into the chunks."""
        begin = 0
        for piece in self._pieces:
            values = piece.chunk.memory[piece.start : piece.end].view(flat.dtype)
            values.copy_(flat[begin : begin + len(values)])
            begin += len(values)

    def empty_into(self, flat: Tensor) -> None:
        """Copy what is in the chunks into a flat tensor, beside the host's work where that is on a card."""
        begin = 0
        for piece in self._pieces:
            values = piece.chunk.memory[piece.start : piece.end].view(flat.dtype)
            flat[begin : begin + len(values)].copy_(values, non_blocking=True)
            begin += len(values)
        if self._pieces and (read := computing(flat.device).event()) is not None:
            for piece in self._pieces:
                piece.chunk.reads.append(read)


class TensorChunks:
    """Memory of the host for tensors that come and go: each chunk is used again once all that lay in it is gone."""

    def __init__(self, *, pin: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._pin, self._chunk_bytes = pin, chunk_bytes
        self._chunks: list[_Chunk] = []
        self._at: _Chunk | None = None
        self._used = 0  # of the chunk at hand

    @property
    def held_bytes(self) -> int:
        return len(self._chunks) * self._chunk_bytes

    def lease(self, size_bytes: int) -> ChunkLease:
        """Return room for so many bytes, behind what was lent last."""
        lease = ChunkLease()
        while size_bytes:
            if self._at is None or self._used >= self._chunk_bytes or not self._at.lent:
                self._at, self._used = self._free(), 0
            end = min(self._used + size_bytes, self._chunk_bytes)
            lease.add(self._at, self._used, end)
            size_bytes -= end - self._used
            self._used = -(-end // ALIGNMENT) * ALIGNMENT
        return lease

    def _free(self) -> _Chunk:
        chunk = next((chunk for chunk in self._chunks if not chunk.lent), None)
        if chunk is None:
            chunk = _Chunk(bytes_on_host(self._chunk_bytes, pin=self._pin))
            self._chunks.append(chunk)
        for read in chunk.reads:
            read.synchronize()
        chunk.reads.clear()
        return chunk
