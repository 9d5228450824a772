"""Reads batches ahead in threads, into a fixed ring of memory slots.

A slot that was handed out comes back when nothing refers to its memory any more: no batch, no tensor, no view of one.
So batches that a loop keeps stay intact; a loop that keeps as many batches as there are slots gets an error.
"""

from __future__ import annotations

import atexit
import gc
import threading
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from pipeline.device.accelerator import release_pinned
from pipeline.device.batch_transfer import CopiesUnderWay
from pipeline.errors import ConfigError
from pipeline.memory.hardware.host_memory import slot_bytes
from pipeline.memory.runtime.pinned_tensors import bytes_on_host

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    from collections.abc import Callable, Iterator


@dataclass(eq=False, slots=True)
class Slot:
    """The memory of one batch, and its copies to a device that may be under way."""

    number: int
    memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    copies: CopiesUnderWay = field(default_factory=CopiesUnderWay)


class Ring:
    """All slots; reading threads take them from the queue `free`, where None ends a thread."""

    def __init__(self, slots: int, *, pin: bool) -> None:
        if slots < 2:
            raise ValueError(f"{slots} slots: at least 2 are needed, one in use and one being read")
        self.slots = tuple(map(Slot, range(slots)))
        self.free: SimpleQueue[Slot | None] = SimpleQueue()
        self.grown = 0  # how often a batch was larger than all before it
        self.pins, self._slot_bytes = pin, 0
        self._lent: set[Slot] = set()
        for slot in self.slots:
            self.free.put(slot)

    @property
    def bytes(self) -> int:
        return sum(len(slot.memory) for slot in self.slots)

    def room(self, slot: Slot, used: int) -> Bytes:
        """Return so many bytes of a free slot to write to, once copies from it have ended; grows it if needed."""
        slot.copies.wait()
        if used > len(slot.memory) or len(slot.memory) == 0:
            has_grown = used > self._slot_bytes or self._slot_bytes == 0
            # No less than any other has: all are of one size in the end.
            size = slot_bytes(used, pin=self.pins) if has_grown else self._slot_bytes
            slot.memory = torch.empty(0, dtype=torch.uint8)  # the old memory goes before the new one comes
            if self.pins:
                release_pinned()
            slot.memory = bytes_on_host(size, pin=self.pins)
            self.grown += has_grown
            self._slot_bytes = max(self._slot_bytes, size)  # only now: smaller batches need no room that there is not
        memory: Bytes = slot.memory.numpy()[:used]
        return memory

    def lend(self, slot: Slot) -> None:
        """Note that the loop has what is in a slot."""
        self._lent.add(slot)
        slot.copies.is_lent = self.pins

    def take_back(self, slot: Slot) -> None:
        """Free a slot."""
        self._lent.discard(slot)
        slot.copies.is_lent = False
        self.free.put(slot)

    def all_lent(self) -> bool:
        """Tell whether no slot can become free unless the loop lets go of a batch."""
        if len(self._lent) < len(self.slots):
            return False
        gc.collect()  # what only refers to itself is let go of
        return len(self._lent) == len(self.slots)


class Lease:
    """A slot for one batch, from before that is read until nothing refers to it any more."""

    def __init__(self, ring: Ring, slot: Slot) -> None:
        self._ring, self._slot = ring, slot
        self._is_over = False

    def room(self, used: int) -> Bytes:
        """Return so many bytes to write a batch to."""
        return self._ring.room(self._slot, used)

    @property
    def number(self) -> int:
        return self._slot.number

    def fill(self, written: Bytes) -> None:
        """Take the bytes of a batch that was written elsewhere: as they lie, or a copy where they must be pinned."""
        if self._ring.pins:
            torch.from_numpy(self.room(len(written))).copy_(torch.from_numpy(written))
        else:
            self._slot.memory = torch.from_numpy(written)

    def tensor(self, used: int) -> torch.Tensor:
        """Return the written bytes; they and all views of them keep the slot."""
        memory = self._slot.memory
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (memory.data_ptr(), False),
            "shape": (used,),
            "typestr": "|u1",
        }
        return torch.from_numpy(np.asarray(self))

    def lend(self) -> None:
        """Note that the loop has the batch."""
        self._ring.lend(self._slot)

    def give_back(self) -> None:
        """Free the slot; called from any thread when the last reference to its batch goes."""
        if not self._is_over:
            self._is_over = True
            self._ring.take_back(self._slot)

    __del__ = give_back


Micro = TypeVar("Micro")
Filled = TypeVar("Filled")


@dataclass(frozen=True, slots=True)
class ReadBatch(Generic[Micro, Filled]):
    """A micro-batch that was read."""

    micro: Micro
    filled: Filled
    lease: Lease


class ReadAhead(Generic[Micro, Filled]):
    """One pass over some micro-batches: threads call `fill`, `next` returns the results in order."""

    def __init__(
        self, micros: Iterator[Micro], fill: Callable[[Micro, Lease], Filled], ring: Ring, threads: int
    ) -> None:
        self._micros, self._fill, self._ring = micros, fill, ring
        self._changed = threading.Condition()  # guards what follows
        self._done: dict[int, ReadBatch[Micro, Filled] | BaseException] = {}
        self._drawn = 0  # micro-batches that threads have taken
        self._given = 0  # those that `next` has returned
        self._ended: BaseException | None = None  # why no more are drawn
        self._threads = [threading.Thread(target=self._work, name=f"reader-{n}", daemon=True) for n in range(threads)]
        atexit.register(self.close)  # threads that are still at work when the interpreter goes would take it down
        for thread in self._threads:
            thread.start()

    def next(self) -> ReadBatch[Micro, Filled] | None:
        """Return the next batch, or None at the end; raises what went wrong while reading it."""
        if self._given not in self._done and self._ring.all_lent():
            self._expect_end()
        with self._changed:
            self._changed.wait_for(lambda: self._given in self._done or (self._ended and self._given >= self._drawn))
            read = self._done.pop(self._given, self._ended)
            is_over = read is self._ended
            self._given += not is_over
        if is_over and isinstance(read, StopIteration):  # else it is an error of `fill`
            return None
        if isinstance(read, BaseException):
            raise read
        if read is not None:
            read.lease.lend()
        return read

    def at_hand(self) -> ReadBatch[Micro, Filled] | None:
        """Return what `next` is to return, if it has been read; it may be copied."""
        with self._changed:
            read = self._done.get(self._given)
        if not isinstance(read, ReadBatch):
            return None
        read.lease.lend()
        return read

    def close(self) -> None:
        """End the threads, and free the slots of unused batches; afterwards they may be those of another pass."""
        if not self._threads:
            return
        atexit.unregister(self.close)
        with self._changed:
            self._ended = self._ended or StopIteration()
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for _ in others:
            self._ring.free.put(None)
        for thread in others:
            thread.join()
        for read in self._done.values():
            if isinstance(read, ReadBatch):
                read.lease.give_back()
        self._done.clear()
        unused: list[Slot] = []
        try:
            while True:
                if slot := self._ring.free.get_nowait():
                    unused.append(slot)
        except Empty:
            pass
        for slot in unused:
            self._ring.free.put(slot)
        self._threads.clear()

    def _work(self) -> None:
        while (slot := self._ring.free.get()) and self._fill_next(slot):
            pass

    def _fill_next(self, slot: Slot) -> bool:
        """Read the next micro-batch into a slot; tell whether there was one."""
        with self._changed:
            number = self._drawn
            try:
                micro = self._draw()
            except BaseException as error:  # noqa: BLE001 - the loop is told, after what comes before: StopIteration, or worse
                self._ended = self._ended or error
                self._ring.free.put(slot)
                self._changed.notify_all()
                return False
        read: ReadBatch[Micro, Filled] | BaseException
        lease = Lease(self._ring, slot)
        try:
            read = ReadBatch(micro, self._fill(micro, lease), lease)
        except BaseException as error:  # noqa: BLE001 - the loop is told, in this one's place
            lease.give_back()
            read = error
        with self._changed:
            self._done[number] = read
            self._changed.notify_all()
        return True

    def _draw(self) -> Micro:
        """Take the next micro-batch; raises once there are no more."""
        if self._ended:
            raise self._ended
        micro = next(self._micros)
        self._drawn += 1
        return micro

    def _expect_end(self) -> None:
        """Refuse to go on if there is more to read but the loop holds all slots."""
        with self._changed:
            if self._ended:
                return
            try:
                self._draw()
            except StopIteration as error:
                self._ended = error
                return
        what = f"the loop still holds the last {len(self._ring.slots)} batches, and the loader has no free slot"
        raise ConfigError(what, remedy="keep batch.clone() instead of the batch, or raise slots")
