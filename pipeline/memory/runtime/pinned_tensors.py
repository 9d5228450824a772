"""Tensors in the host's memory, pinned where a card copies them: in runs and chunks that `host_memory` counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipeline.device.accelerator import is_card, release_pinned
from pipeline.device.out_of_memory import unless_out_of_memory
from pipeline.memory.hardware.host_memory import PinnedLayout, pinned_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def bytes_on_host(size_bytes: int, *, pin: bool = True) -> Tensor:
    """Return memory of the host as bytes; pinned, a card reaches it directly."""
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pin)


def layout_of(tensors: Sequence[Tensor]) -> PinnedLayout:
    """Return how copies of tensors lie in memory: in pinned runs where one is on a card."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return pinned_layout(sizes, pinned=any(is_card(tensor.device) for tensor in tensors))


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
            self._make(sizes, pin=any(is_card(tensor.device) for tensor in tensors))
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
