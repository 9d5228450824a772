"""Batches for training: threads read the graphs and embeddings of the next ones into a fixed ring of memory.

    for batch in Loader(CachedGraphs(graphs, table), Embeddings(embeddings, recipe), sampler):
        loss = model(batch.to(device))

Without `collate` the arrays of the items are joined where they are to lie. With it, the threads that read hand it each
item by itself, over the memory that was read; what it makes is the only batch there is, and is copied once more where
it must be pinned. Host memory is the slots times the largest batch. A batch stays what it is while it is used.
"""

from __future__ import annotations

import time
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.device.accelerator import card_here
from pipeline.records import Rejection
from pipeline.training.items.batch import TaskBatch
from pipeline.training.items.batch_maker import BatchMaker
from pipeline.training.items.read_ahead import ReadAhead, Ring
from pipeline.training.items.reader_processes import ReaderProcesses, SharedRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from pipeline.training.items.batch import BatchOrigin
    from pipeline.training.items.batch_maker import Collate, MadeBatch, Room
    from pipeline.training.items.crop import Measure
    from pipeline.training.items.item_source import DamagedItems, ItemSource
    from pipeline.training.items.read_ahead import Lease, ReadBatch
    from pipeline.training.items.residue_embeddings import Embeddings
    from pipeline.training.sampling.sampler import MicroBatch, Sampler

THREADS, PROCESSES = "threads", "processes"


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
    slots_bytes: int = 0
    grown: int = 0  # how often the slots became larger


@dataclass(eq=False)
class Loader:
    """Yields the batches of an epoch each time it is iterated over; only one loop at a time.

    It can stand in for a `DataLoader`: it has a length, a `sampler` with `set_epoch`, and a state.
    """

    graphs: ItemSource
    embeddings: Embeddings | None
    sampler: Sampler
    _: KW_ONLY
    slots: int = 4
    threads: int = 2  # that read, or as many processes
    readers: str = THREADS
    pin: bool | None = None  # for copies to a GPU; None: where there is one
    seed: int = 0
    crop: Mapping[str, int] | None = None  # the largest an item may have of each size, or of what `measure` makes of it
    measure: Measure = dict
    collate: Collate | None = None  # makes what is yielded of a batch's items, in any thread
    may_collate: Callable[[Sequence[str]], bool] = lambda _: True  # ahead, or a user's reader read; else when asked for
    weigh: Callable[[Any], Mapping[str, Any]] | None = None  # tells the weights of a batch that was made
    reject: Callable[[Rejection], None] = lambda _: None  # called for items that have no graph after all
    mending: DamagedItems | None = None  # of embeddings that cannot be read; without, that is an error

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"{self.threads} threads: at least 1 is needed")
        if self.readers not in (THREADS, PROCESSES):
            raise ValueError(f"readers={self.readers!r}: {THREADS!r} read, or {PROCESSES!r}")
        self.batch_sampler = self.sampler
        self.stats = LoaderStats()
        self._ring = Ring(self.slots, pin=card_here() is not None if self.pin is None else self.pin)
        self._maker = BatchMaker(
            self.graphs,
            self.embeddings,
            self.seed,
            self.crop,
            self.measure,
            self.collate,
            self.weigh,
            self.mending,
            self.may_collate,
        )
        self._runs: list[SharedRun] = []  # of the slots, where processes write to them
        self._processes: ReaderProcesses | None = None
        self._reading: ReadAhead[MicroBatch, TaskBatch] | None = None
        self._start: Mapping[str, Any] = {}  # where the present loop began
        self._moves = 0  # of the sampler, then
        self._last: MicroBatch | None = None  # what it yielded last

    def __len__(self) -> int:
        """Count the batches of an epoch on this rank."""
        return self.sampler.count(self._start["epoch"] if self._reading else self.sampler.epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from the sampler's position to the end of the epoch; ends any earlier loop.

        Of a step in which this rank has no items there is nothing to collate: that is None.
        """
        for batch in self.read():
            held = [batch.part(0, len(batch))]
            del batch  # nothing here keeps what the loop has let go of
            yield held.pop()

    def read(self) -> Iterator[TaskBatch]:
        """Yield the same with what it is of."""
        self.close()
        if self.readers == PROCESSES and self._processes is None:
            self._fork()
        self._start, self._last, self._moves = self.sampler.state_dict(), None, self.sampler.moves
        reading = self._reading = ReadAhead(iter(self.sampler), self._fill, self._ring, self.threads)
        try:
            while read := self._next(reading):
                self._last, held = read.micro, [read.filled]
                del read
                self._count(held[0])
                yield held.pop()
            self._reading = self._last = None
        finally:
            reading.close()
            if self._reading is reading:
                self.close()

    def at_hand(self) -> TaskBatch | None:
        """Return the batch that comes next, if it has been read; it is still to be taken."""
        read = None if self._reading is None else self._reading.at_hand()
        return None if read is None else read.filled

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Return the memory of all slots as it is now."""
        return [slot.memory for slot in self._ring.slots]

    def close(self) -> None:
        """End the current loop, as leaving it does; the next one begins where it began."""
        if self._reading is not None:
            reading, self._reading = self._reading, None
            reading.close()
            if self.sampler.moves == self._moves:  # else the sampler was moved meanwhile
                self.sampler.load_state_dict(self._start)

    @property
    def dataset(self) -> Any:
        """Refuse what a `DataLoader` is asked for to be taken apart: batches would be read, and thrown away."""
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

    def _next(self, reading: ReadAhead[MicroBatch, TaskBatch]) -> ReadBatch[MicroBatch, TaskBatch] | None:
        """Wait for the next batch, and measure the wait."""
        if reading is not self._reading:
            raise ValueError("this loop ended because another loop over the same loader started")
        begun = time.perf_counter()
        read = reading.next()
        self.stats.wait_s += time.perf_counter() - begun
        return read

    def _count(self, batch: TaskBatch) -> None:
        """Count a batch that was read."""
        stats = self.stats
        stats.batches += 1
        stats.items += len(batch)
        stats.rejected += len(batch.rejected)
        stats.cropped += batch.cropped
        stats.bytes += batch.bytes
        stats.largest_bytes = max(stats.largest_bytes, batch.bytes)
        stats.slots_bytes, stats.grown = self._ring.bytes, self._ring.grown
        for rejection in batch.rejected:
            self.reject(rejection)

    def fetch(self, items: Sequence[int], micro: MicroBatch, *, ahead: bool = False) -> TaskBatch:
        """Read some items of a micro-batch again, into memory of their own; nothing is counted or reported."""
        made = self._maker.make(items, micro, ahead=ahead)
        return self._task_batch(made, made.value, made.weights)

    def fetch_again(self, items: Sequence[int], origin: BatchOrigin, *, ahead: bool = False) -> TaskBatch:
        """Read some items of a batch again, by where it came from."""
        from pipeline.training.sampling.sampler import MicroBatch

        numbers = np.array(items, dtype=np.int64)
        return self.fetch(items, MicroBatch(origin.epoch, origin.step, origin.index, origin.of, numbers), ahead=ahead)

    def _fill(self, micro: MicroBatch, lease: Lease) -> TaskBatch:
        """Read a micro-batch into a slot; called by any thread."""
        made = self._from_process(micro, lease)
        if made is None:
            packs = self.collate is None or self._ring.pins
            made = self._maker.make(micro.items.tolist(), micro, lease.room if packs else None, ahead=True)
        if made.packed is None:
            return self._task_batch(made, made.value, made.weights, lease=lease)
        return self._task_batch(made, *made.packed.over(lease.tensor(made.packed.bytes)))

    def _task_batch(self, made: MadeBatch, value: Any, weights: Any, *, lease: Lease | None = None) -> TaskBatch:
        return TaskBatch(
            value,
            made.numbers,
            made.ids,
            made.origin,
            self.fetch_again,
            made.rejected,
            weights=weights,
            cropped=made.cropped,
            bytes=made.bytes,
            is_made=made.is_made,
            lease=lease,
        )

    # Processes

    def _fork(self) -> None:
        """Fork the processes that read: while no thread of this loader does."""
        self._runs = [SharedRun() for _ in range(self.slots)]
        maker = self._maker.without_mending()

        def make(micro: MicroBatch, room: Room) -> MadeBatch:
            return maker.make(micro.items.tolist(), micro, room, ahead=True)

        self._processes = ReaderProcesses(make, self._runs, self.threads)

    def _from_process(self, micro: MicroBatch, lease: Lease) -> MadeBatch | None:
        """Have a process make a micro-batch; None: a thread has to."""
        if self._processes is None:
            return None
        made: MadeBatch | None = self._processes.ask(micro, lease.number)
        if made is not None and made.packed is not None:
            lease.fill(self._runs[lease.number].room(made.packed.bytes))
        return made

    def end(self) -> None:
        """End the current loop and the processes that read."""
        self.close()
        if self._processes is not None:
            self._processes.end()
            self._processes = None
