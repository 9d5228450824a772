"""Threads that read ahead: each takes a free slot, then the next micro-batch, and fills the one with the other.

Slots are taken before micro-batches, so whoever is next in order has its slot already: nothing can wait in a circle.
Results come in the sampler's order, whichever thread is done first; so do errors.
"""

from __future__ import annotations

import atexit
import threading
from dataclasses import dataclass
from queue import Empty
from typing import TYPE_CHECKING, Generic, TypeVar

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pipeline.training.slots import Ring, Slot

Micro = TypeVar("Micro")
Filled = TypeVar("Filled")


@dataclass(frozen=True, slots=True)
class Read(Generic[Micro, Filled]):
    """A micro-batch that was read."""

    slot: Slot
    micro: Micro
    filled: Filled


class Reading(Generic[Micro, Filled]):
    """One pass over some micro-batches. What `fill` made is asked for with `next`; `close` ends the threads."""

    def __init__(
        self, micros: Iterator[Micro], fill: Callable[[Micro, Slot], Filled], ring: Ring, threads: int
    ) -> None:
        self._micros, self._fill, self._ring = micros, fill, ring
        self._changed = threading.Condition()  # guards what follows
        self._done: dict[int, Read[Micro, Filled] | BaseException] = {}
        self._drawn = 0  # micro-batches that threads have taken
        self._given = 0  # those that `next` has returned
        self._ended: BaseException | None = None  # why no more are drawn
        self._threads = [threading.Thread(target=self._work, name=f"reader-{n}", daemon=True) for n in range(threads)]
        atexit.register(self.close)  # threads that are still at work when the interpreter goes would take it down
        for thread in self._threads:
            thread.start()

    def next(self) -> Read[Micro, Filled] | None:
        """Return what was made of the next micro-batch, or None at the end; raise what went wrong with it."""
        if self._ring.all_lent():
            self._expect_end()
        with self._changed:
            self._changed.wait_for(lambda: self._given in self._done or (self._ended and self._given >= self._drawn))
            read = self._done.pop(self._given, self._ended)
            self._given += read is not self._ended
        if isinstance(read, StopIteration):
            return None
        if isinstance(read, BaseException):
            raise read
        return read

    def close(self) -> None:
        """End the threads, and free the slots of what nobody asked for."""
        atexit.unregister(self.close)
        with self._changed:
            self._ended = self._ended or StopIteration()
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for _ in others:
            self._ring.free.put(None)
        for thread in others:
            thread.join()
        unused = [read.slot for read in self._done.values() if not isinstance(read, BaseException)]
        self._done.clear()
        try:
            while True:
                if slot := self._ring.free.get_nowait():
                    unused.append(slot)
        except Empty:
            pass
        for slot in unused:
            self._ring.free.put(slot)

    def _work(self) -> None:
        while (slot := self._ring.free.get()) and self._fill_next(slot):
            pass

    def _fill_next(self, slot: Slot) -> bool:
        """Fill a slot with what comes next; say whether anything did."""
        with self._changed:
            number = self._drawn
            try:
                micro = self._draw()
            except BaseException as error:  # noqa: BLE001 - the loop is told, after what comes before: StopIteration, or worse
                self._ended = self._ended or error
                self._ring.free.put(slot)
                self._changed.notify_all()
                return False
        read: Read[Micro, Filled] | BaseException
        try:
            read = Read(slot, micro, self._fill(micro, slot))
        except BaseException as error:  # noqa: BLE001 - the loop is told, in this one's place
            self._ring.free.put(slot)
            read = error
        with self._changed:
            self._done[number] = read
            self._changed.notify_all()
        return True

    def _draw(self) -> Micro:
        """Take the next micro-batch; nothing comes after an end."""
        if self._ended:
            raise self._ended
        micro = next(self._micros)
        self._drawn += 1
        return micro

    def _expect_end(self) -> None:
        """See that nothing is left to read, when there is no slot left to read it into."""
        with self._changed:
            if self._ended:
                return
            try:
                self._draw()
            except StopIteration as error:
                self._ended = error
                return
        what = f"the loop still holds the last {len(self._ring.slots)} batches, and the loader has no more slots"
        raise ConfigError(what, remedy="keep batch.clone() instead of the batch, or give the loader more slots")
