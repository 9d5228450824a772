"""A fixed ring of memory that batches are read into, again and again.

A slot that was handed out comes back when nothing refers to its memory any more: no batch, no tensor, no view of one.
So what a loop keeps stays what it was; a loop that keeps as many batches as there are slots is told so.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

GROWTH = 9 / 8  # batches of one budget differ a little: room for the next one too
UNIT = 1 << 20


@dataclass(eq=False, slots=True)
class Slot:
    """Memory for one batch, and the copies of it to a device that may not have ended."""

    memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    copies: list[torch.cuda.Event] = field(default_factory=list)


class Ring:
    """All the slots there are; readers take them from `free`, where None sends one home."""

    def __init__(self, slots: int, *, pin: bool, slot_bytes: int = 0) -> None:
        if slots < 2:
            raise ValueError(f"{slots} slots: one batch is used while the next is read, so 2 at least")
        self.slots = tuple(Slot() for _ in range(slots))
        self.free: SimpleQueue[Slot | None] = SimpleQueue()
        self.grown = 0  # how often a batch was larger than all before it
        self._pin, self._slot_bytes = pin, slot_bytes
        self._lent: set[Slot] = set()
        for slot in self.slots:
            self.free.put(slot)

    @property
    def bytes(self) -> int:
        """Return the memory of all slots."""
        return sum(len(slot.memory) for slot in self.slots)

    def room(self, slot: Slot, used: int) -> Bytes:
        """Return so many bytes of a free slot, to write to."""
        for copy in slot.copies:
            copy.synchronize()
        slot.copies.clear()
        if used > len(slot.memory) or len(slot.memory) == 0:
            slot.memory = torch.empty(0, dtype=torch.uint8)  # the old memory goes before the new one comes
            slot.memory = torch.empty(self._larger(used), dtype=torch.uint8, pin_memory=self._pin)
        memory: Bytes = slot.memory.numpy()[:used]
        return memory

    def _larger(self, used: int) -> int:
        """Return the bytes of a new slot: no fewer than any has so far, so that all are of one size in the end."""
        if used > self._slot_bytes:
            self.grown += 1
            self._slot_bytes = -(-int(used * GROWTH) // UNIT) * UNIT
        return max(self._slot_bytes, UNIT)

    def hand_out(self, slot: Slot, used: int) -> torch.Tensor:
        """Return what was written; when nothing refers to it any more, the slot is free again."""
        self._lent.add(slot)
        return torch.from_numpy(np.asarray(_Lease(self, slot, used)))

    def take_back(self, slot: Slot) -> None:
        """Free a slot; called wherever the last reference to its memory ends, in any thread."""
        self._lent.discard(slot)
        self.free.put(slot)

    def all_lent(self) -> bool:
        """Say whether no slot can come free unless the loop lets go of a batch."""
        if len(self._lent) < len(self.slots):
            return False
        gc.collect()  # what only refers to itself is let go of
        return len(self._lent) == len(self.slots)


class _Lease:
    """The memory of a slot while it is handed out, as numpy asks for it; arrays over it keep this alive."""

    def __init__(self, ring: Ring, slot: Slot, used: int) -> None:
        self._ring, self._slot = ring, slot
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (slot.memory.data_ptr(), False),
            "shape": (used,),
            "typestr": "|u1",
        }

    def __del__(self) -> None:
        self._ring.take_back(self._slot)
