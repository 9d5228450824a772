"""Batches for training: threads read the graphs and embeddings of the next ones while a step runs.

    for batch in Loader(CachedGraphs(graphs, table), Embeddings(embeddings, recipe), sampler):
        loss = model(batch.to(device))

Without `collate`, a batch is the joined graphs of its items. Pinned memory comes from torch's cache for the host, which
waits for copies under way before it gives memory out again. It has blocks of powers of two; all are as large as the
largest batch needs, so that a plan can count them: host memory is the slots times that.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

import numpy as np

from pipeline.device.accelerator import card_here, release_pinned
from pipeline.memory.hardware.host_memory import slot_bytes
from pipeline.memory.runtime.pinned_tensors import bytes_on_host
from pipeline.records import Rejection
from pipeline.training.items.batch_maker import BatchMaker
from pipeline.training.items.reader_processes import ReaderProcesses
from pipeline.training.sampling.sampler import MicroBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from pipeline.training.items.batch import BatchOrigin, TaskBatch
    from pipeline.training.items.batch_maker import Collate, Room
    from pipeline.training.items.crop import Measure
    from pipeline.training.items.item_source import DamagedItems, ItemSource
    from pipeline.training.items.residue_embeddings import Embeddings
    from pipeline.training.sampling.sampler import Sampler

Job = TypeVar("Job")
Result = TypeVar("Result")

THREADS, PROCESSES = "threads", "processes"


class Prefetch(Generic[Job, Result]):
    """Results of jobs in their order, made ahead by threads; an error, also of `jobs`, is raised in its place."""

    def __init__(self, jobs: Iterator[Job], make: Callable[[Job], Result], threads: int) -> None:
        self._jobs, self._make = jobs, make
        self._drawing = ThreadPoolExecutor(1, "reader")  # one thread, so that jobs are drawn in order
        self._making = ThreadPoolExecutor(threads, "reader")
        self._waiting: deque[Future[tuple[Job, Result] | None]] = deque()

    def next(self, ahead: int) -> tuple[Job, Result] | None:
        """Return the next job and its result, None at the end; first have up to `ahead` under way."""
        while len(self._waiting) < ahead:
            job = self._drawing.submit(next, self._jobs, None)
            self._waiting.append(self._making.submit(self._made, job))
        return self._waiting.popleft().result()

    def _made(self, drawn: Future[Job | None]) -> tuple[Job, Result] | None:
        job = drawn.result()
        return None if job is None else (job, self._make(job))

    def at_hand(self) -> Result | None:
        """Return the result that comes next, if it is ready; it stays next."""
        first = self._waiting[0] if self._waiting else None
        if first is None or not first.done() or first.exception() is not None:
            return None
        made = first.result()
        return None if made is None else made[1]

    def close(self) -> None:
        """Drop what is under way; wait for threads that are at work."""
        for wait in (False, True):
            self._making.shutdown(wait, cancel_futures=True)
            self._drawing.shutdown(wait, cancel_futures=True)
        self._waiting.clear()


class PinnedMemory:
    """Pinned memory for batches: blocks that are all as large as the largest batch needs."""

    def __init__(self) -> None:
        self._block_bytes = 0

    def __call__(self, used: int) -> torch.Tensor:
        if used > self._block_bytes:
            self._block_bytes = slot_bytes(used, pin=True)
            release_pinned()  # smaller blocks that are free would never be used again
        return bytes_on_host(self._block_bytes, pin=True)[:used]

    def copy(self, memory: torch.Tensor) -> torch.Tensor:
        return self(len(memory)).copy_(memory)


@dataclass(slots=True)
class LoaderStats:
    """Counts of what a loader did so far."""

    batches: int = 0
    items: int = 0
    rejected: int = 0
    cropped: int = 0
    bytes: int = 0  # of all batches
    wait_s: float = 0.0  # of the loop, for batches
    largest_bytes: int = 0


@dataclass(eq=False)
class Loader:
    """Yields the batches of an epoch each time it is iterated over; only one loop at a time.

    It can stand in for a `DataLoader`: it has a length, a `sampler` with `set_epoch`, and a state.
    """

    graphs: ItemSource
    embeddings: Embeddings | None
    sampler: Sampler
    _: KW_ONLY
    slots: int = 4  # batches in memory: those that the loop holds, and those that are read ahead
    threads: int = 2  # that read, or as many processes
    readers: str = THREADS
    pin: bool | None = None  # for copies to a GPU; None: where there is one
    seed: int = 0
    crop: Mapping[str, int] | None = None  # the largest an item may have of each size, or of what `measure` makes of it
    measure: Measure = dict
    collate: Collate | None = None  # makes what is yielded of a batch's items, in any thread
    may_collate: Callable[[Sequence[str]], bool] = lambda _: True  # ahead, or a user's reader read; else `part` does
    weigh: Callable[[Any], Mapping[str, Any]] | None = None  # returns the weights of a batch's loss terms
    reject: Callable[[Rejection], None] = lambda _: None  # called for items that have no graph after all
    mending: DamagedItems | None = None  # of embeddings that cannot be read; without, that is an error

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"{self.threads} threads: at least 1 is needed")
        if self.slots < 2:
            raise ValueError(f"{self.slots} slots: at least 2 are needed, one in use and one being read")
        if self.readers not in (THREADS, PROCESSES):
            raise ValueError(f"readers={self.readers!r}: {THREADS!r} read, or {PROCESSES!r}")
        self.batch_sampler = self.sampler
        self.stats = LoaderStats()
        pin = card_here() is not None if self.pin is None else self.pin
        self._pinned = PinnedMemory() if pin else None
        self._maker = BatchMaker(**{field.name: getattr(self, field.name) for field in fields(BatchMaker)})
        self._processes: ReaderProcesses | None = None
        self._reading: Prefetch[MicroBatch, TaskBatch] | None = None
        self._in_use: WeakSet[TaskBatch] = WeakSet()
        self._start: Mapping[str, Any] = {}  # where the present loop began
        self._moves = 0  # of the sampler, then
        self._last: MicroBatch | None = None  # what was yielded last

    def __len__(self) -> int:
        """Count the batches of an epoch on this rank."""
        return self.sampler.count(self._start["epoch"] if self._reading else self.sampler.epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from the sampler's position to the end of the epoch; ends any earlier loop.

        None stands for a step in which this rank has no items, so that there is nothing to collate.
        """
        for batch in self.read():
            held = [batch.part(0, len(batch))]
            del batch
            yield held.pop()

    def read(self) -> Iterator[TaskBatch]:
        """Yield the same batches with their items and origin."""
        self.close()
        if self.readers == PROCESSES and self._processes is None:
            self._fork()
        self._start, self._last, self._moves = self.sampler.state_dict(), None, self.sampler.moves
        reading = self._reading = Prefetch(iter(self.sampler), self._make, self.threads)
        try:
            while held := self._next(reading):
                yield held.pop()  # nothing here keeps what the loop lets go of
            self._reading = self._last = None
        finally:
            reading.close()
            if self._reading is reading:
                self.close()

    def _next(self, reading: Prefetch[MicroBatch, TaskBatch]) -> list[TaskBatch]:
        """Wait for the next batch, none at the end; measure the wait, and count the batch."""
        if reading is not self._reading:
            raise ValueError("this loop ended because another loop over the same loader started")
        begun = time.perf_counter()
        made = reading.next(max(1, self.slots - len(self._in_use)))
        self.stats.wait_s += time.perf_counter() - begun
        if made is None:
            return []
        self._last, batch = made
        self._in_use.add(batch)
        stats = self.stats
        stats.batches += 1
        stats.items += len(batch)
        stats.rejected += len(batch.rejected)
        stats.cropped += batch.cropped
        stats.bytes += batch.bytes
        stats.largest_bytes = max(stats.largest_bytes, batch.bytes)
        for rejection in batch.rejected:
            self.reject(rejection)
        return [batch]

    def at_hand(self) -> TaskBatch | None:
        """Return the batch that comes next, if it has been read; the loop still has to take it."""
        return None if self._reading is None else self._reading.at_hand()

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Return the memory that is shared with reader processes, as large as it is now."""
        return [] if self._processes is None else [run.room(0) for run in self._processes.runs]

    def close(self) -> None:
        """End the current loop, as leaving it does; the next one begins where it began."""
        if self._reading is not None:
            reading, self._reading = self._reading, None
            reading.close()
            if self.sampler.moves == self._moves:  # else the sampler was moved meanwhile
                self.sampler.load_state_dict(self._start)

    def end(self) -> None:
        """End the current loop and the processes that read."""
        self.close()
        if self._processes is not None:
            self._processes.end()
            self._processes = None

    @property
    def dataset(self) -> Any:
        """Refuse code that takes a `DataLoader` apart: it would read batches and throw them away."""
        what = (
            "a Loader has no dataset of single items: it knows its rank and continues where loader.load_state_dict(…)"
        )
        raise AttributeError(
            f"{what} says; give it to the loop as it is, not to skip_first_batches or prepare_data_loader"
        )

    def set_epoch(self, epoch: int) -> None:
        self.close()
        self._last = None
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return, as JSON data, where to go on: after the last batch that was yielded, not the last that was read."""
        if self._last is not None:
            return self.sampler.state_dict(after=self._last)
        return dict(self._start) if self._reading else self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next loop begin at a saved position."""
        self.close()
        self._last = None
        self.sampler.load_state_dict(state)

    def fetch(self, items: Sequence[int], micro: MicroBatch, *, ahead: bool = False) -> TaskBatch:
        """Read some items of a micro-batch again; nothing is counted or reported."""
        return replace(self._maker.make(items, micro, ahead=ahead), read_again=self.fetch_again)

    def fetch_again(self, items: Sequence[int], origin: BatchOrigin, *, ahead: bool = False) -> TaskBatch:
        """Read some items of a batch again, by where it came from."""
        numbers = np.array(items, dtype=np.int64)
        return self.fetch(items, MicroBatch(origin.epoch, origin.step, origin.index, origin.of, numbers), ahead=ahead)

    def _make(self, micro: MicroBatch) -> TaskBatch:
        """Make a batch, in any thread: by a process, where one can."""
        copied = None if self._pinned is None else self._pinned.copy
        made = None if self._processes is None else self._processes.make(micro, copied)
        if made is None:
            made = self._maker.make(micro.items.tolist(), micro, self._pinned, ahead=True)
        return replace(made, read_again=self.fetch_again)

    def _fork(self) -> None:
        """Fork the processes that read: while no thread of this loader does."""
        maker = self._maker.without_mending()

        def make(micro: MicroBatch, room: Room) -> TaskBatch:
            return maker.make(micro.items.tolist(), micro, room, ahead=True)

        self._processes = ReaderProcesses(make, self.threads, batches=self.slots + 1)
