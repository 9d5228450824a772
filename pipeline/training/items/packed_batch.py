"""A batch of any structure in one run of memory: pinned, or shared with the process that reads.

packed = pack_batch(batch, room)  # room(bytes) → memory to write to
batch = packed.over(memory)  # the same batch; its tensors are views of that memory
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pipeline.device.batch_transfer import map_tensors
from pipeline.training.items.batch_layout import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from pipeline.training.items.batch import ItemBatch


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies in the run."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: int

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor, as a view of the run."""
        return memory[self.start : self.start + self.bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A batch with the places of its tensors instead of them."""

    outline: Any
    bytes: int

    @classmethod
    def of_run(cls, joined: ItemBatch, used: int) -> PackedBatch:
        """Return a batch that lies in the run already, and its lack of weights."""
        run: Any = TensorPlace(0, torch.uint8, (used,), used)
        return cls((replace(joined, memory=run), None), used)

    def over(self, memory: torch.Tensor) -> Any:
        """Return the batch, its tensors as views of the memory that was written to."""
        tensors: dict[int, torch.Tensor] = {}

        def placed(place: TensorPlace) -> torch.Tensor:
            if place.start not in tensors:
                tensors[place.start] = place.within(memory)
            return tensors[place.start]

        return map_tensors(placed, self.outline, kind=TensorPlace)


def batch_bytes(batch: Any) -> int:
    """Return how many bytes the tensors of a batch take."""
    sizes: dict[int, int] = {}
    map_tensors(lambda tensor: sizes.setdefault(id(tensor), tensor.nbytes), batch)
    return sum(sizes.values())


def pack_batch(batch: Any, room: Callable[[int], NDArray[Any]]) -> PackedBatch:
    """Copy the tensors of a batch into one run of memory; what has a `to` of its own stays where it is.

    A place is never given to two tensors, so that an empty one has bytes of its own, too.
    """
    places: dict[int, TensorPlace] = {}
    tensors: list[torch.Tensor] = []  # held, so that no two have the same id
    used = 0

    def place(tensor: torch.Tensor) -> Any:
        nonlocal used
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            return tensor
        if id(tensor) not in places:
            places[id(tensor)] = TensorPlace(used, tensor.dtype, tuple(tensor.shape), tensor.nbytes)
            tensors.append(tensor)
            used += max(ALIGNMENT, tensor.nbytes + -tensor.nbytes % ALIGNMENT)
        return places[id(tensor)]

    outline = map_tensors(place, batch)
    memory = torch.from_numpy(room(used)) if used else torch.empty(0, dtype=torch.uint8)
    for tensor in tensors:
        places[id(tensor)].within(memory).copy_(tensor)
    return PackedBatch(outline, used)
