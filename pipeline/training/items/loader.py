"""Batches for training: threads read the graphs and embeddings of the next ones while a step runs.

    for batch in Loader(CachedGraphs(graphs, table), Embeddings(embeddings, recipe), sampler):
        loss = model(batch.to(device))

A batch is the joined graphs of its items, or what `collate` makes of them. Pinned memory comes from torch's cache for
the host, which waits for copies under way before it gives memory out again. It has blocks of powers of two; all are as
large as the largest batch needs, so that a plan can count them: host memory is the slots times that.

Processes can read in place of threads, for tasks whose Python code would hold the GIL of the training. They are forked
from the loader, and write a batch's tensors to shared memory; only an outline of the batch goes through a pipe. If a
process fails for any reason, the thread that asked makes the batch itself, and raises any error in it.
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import signal
import threading
import warnings
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Pipe, wait
from queue import Empty, LifoQueue, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.device.accelerator import card_here, is_out_of_memory, release_pinned
from pipeline.device.batch_transfer import bytes_on_host, filled, outlined, packed
from pipeline.errors import CacheDamaged, RecordMissing
from pipeline.memory.hardware.host_memory import slot_bytes
from pipeline.records import Rejection
from pipeline.training.items.batch import EMBEDDING, ENCODED, BatchBuilder, ItemBatch, TaskBatch, copy_name
from pipeline.training.items.crop import crop_item, crop_rng
from pipeline.training.items.item_source import CachedGraphs, ReaderItems
from pipeline.training.items.residue_embeddings import EmbeddedPartner
from pipeline.training.sampling import BatchOrigin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkProcess
    from typing import TypeAlias

    from numpy.typing import NDArray

    from pipeline.training.items.batch import ItemTensors
    from pipeline.training.items.crop import Measure
    from pipeline.training.items.item_source import DamagedItems, ItemArrays, ItemSource
    from pipeline.training.items.residue_embeddings import Embeddings
    from pipeline.training.sampling import MicroBatch, Sampler

    Room: TypeAlias = Callable[[int], torch.Tensor]  # size in bytes → memory
    Collate: TypeAlias = Callable[[Sequence[ItemTensors], np.random.Generator], Any]
    Make: TypeAlias = Callable[[MicroBatch, Room], TaskBatch]
    Reader: TypeAlias = tuple[ForkProcess, Connection]

log = logging.getLogger(__name__)

THREADS, PROCESSES = "threads", "processes"
FORK = get_context("fork")
PIECE = "piece"
IGNORED = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)  # signals to the training


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
    collate: Collate | None = None  # makes the yielded value from a batch's items, in any thread
    may_collate: Callable[[Sequence[str]], bool] = lambda _: True  # ahead, or a user's reader read; else `part` does
    weigh: Callable[[Any], Mapping[str, Any]] | None = None  # returns the weights of a batch's loss terms
    reject: Callable[[Rejection], None] = lambda _: None  # called for items whose graph could not be read
    mending: DamagedItems | None = None  # of records that cannot be read; without, that is an error
    working: Callable[[Sequence[str]], AbstractContextManager[Any]] = nullcontext  # around user code on these items

    def __post_init__(self) -> None:
        if self.threads < 1 or self.slots < 2:
            what = f"{self.threads} threads, {self.slots} slots: at least 1 and 2 are needed"
            raise ValueError(f"{what} (one batch is in use while another is read)")
        if self.readers not in (THREADS, PROCESSES):
            raise ValueError(f"readers={self.readers!r}: {THREADS!r} read, or {PROCESSES!r}")
        self.batch_sampler = self.sampler
        pin = card_here() is not None if self.pin is None else self.pin
        self._pinned = BatchMemory(pin=True) if pin else None
        self._joined_in = BatchMemory(pin=False)
        self._processes: ReaderProcesses | None = None
        self._reading: Prefetch | None = None
        self._in_use: weakref.WeakSet[TaskBatch] = weakref.WeakSet()
        self._epoch = 0  # of the loop

    def __len__(self) -> int:
        """Count the batches of an epoch on this rank."""
        return self.sampler.count(self._epoch if self._reading else self.sampler.epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from the sampler's position to the end of the epoch; ends any earlier loop.

        Yields None for a step in which this rank has no items to collate.
        """
        for batch in self.read():
            held = [batch.part(0, len(batch))]
            del batch
            yield held.pop()

    def read(self) -> Iterator[TaskBatch]:
        """Yield the same batches with their items and origin."""
        self.close()
        if self.readers == PROCESSES and self._processes is None:
            graphs = replace(self.graphs, mending=None) if isinstance(self.graphs, CachedGraphs) else self.graphs
            maker = replace(self, graphs=graphs, mending=None, working=nullcontext, pin=False)
            self._processes = ReaderProcesses(maker.make, self.threads, batches=self.slots + 1)
        self._epoch = self.sampler.epoch
        reading = self._reading = Prefetch(self.sampler.drawn(), self._made_ahead, self.threads)
        try:
            while held := self._next(reading):
                yield held.pop()  # keep no reference, so that the loop can free the batch
        finally:
            reading.close()
            if self._reading is reading:
                self._reading = None

    def _next(self, reading: Prefetch) -> list[TaskBatch]:
        """Wait for the next batch, none at the end."""
        if reading is not self._reading:
            raise ValueError("this loop ended because another loop over the same loader started")
        batch = reading.next(max(1, self.slots - len(self._in_use)))
        if batch is None:
            return []
        self.sampler.use(batch.origin)
        self._in_use.add(batch)
        for rejection in batch.rejected:
            self.reject(rejection)
        return [batch]

    def at_hand(self) -> TaskBatch | None:
        """Return the batch that comes next, if it has been read; the loop still has to take it."""
        return None if self._reading is None else self._reading.at_hand()

    def close(self) -> None:
        """End the current loop, as leaving it does; the next one begins where it began."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def end(self) -> None:
        """End the current loop and the processes that read."""
        self.close()
        if self._processes is not None:
            self._processes.end()
            self._processes = None

    def set_epoch(self, epoch: int) -> None:
        self.close()
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON data: after the last batch that was yielded, not the last that was read ahead."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop begin at a saved position."""
        self.close()
        self.sampler.load_state_dict(state)

    def fetch(self, items: Sequence[int], origin: BatchOrigin, *, ahead: bool = False) -> TaskBatch:
        """Read some items of a micro-batch again; nothing is reported."""
        return replace(self._make(items, origin, None, ahead=ahead), read_again=self.fetch)

    def _made_ahead(self, micro: MicroBatch) -> TaskBatch:
        """Make a batch in any thread, by a reader process if there is one."""
        made = None if self._processes is None else self._processes.make(micro, self._pinned)
        return replace(self.make(micro, self._pinned) if made is None else made, read_again=self.fetch)

    def make(self, micro: MicroBatch, room: Room | None) -> TaskBatch:
        """Make a batch ahead of its step, its tensors in memory from `room`."""
        return self._make(micro.items.tolist(), micro, room, ahead=True)

    def _make(self, numbers: Sequence[int], micro: BatchOrigin, room: Room | None, *, ahead: bool) -> TaskBatch:
        """Make a batch of items; leave out what cannot be read, where allowed.

        `ahead`: ahead of its step. There `collate` may be forbidden, or run out of memory; the step calls it later.
        """
        origin = BatchOrigin(micro.epoch, micro.step, micro.index, micro.of, seed=self.seed)
        ids = self.graphs.ids(numbers) if isinstance(self.graphs, ReaderItems) else ()  # that user code reads
        if ahead and self.collate and ids and not self.may_collate(ids):
            return TaskBatch(tuple(numbers), ids, origin, is_made=False)
        with self.working(ids):
            read = list(self.graphs.read(numbers))
        while True:
            try:
                return self._made(read, origin, room, ahead=ahead)
            except (CacheDamaged, RecordMissing) as error:
                if self.mending is None or not error.item:
                    raise
                rejection = self.mending.leave_out(error)
                read = [rejection if item.id == rejection.id else item for item in read]

    def _made(
        self, read: Sequence[ItemArrays | Rejection], origin: BatchOrigin, room: Room | None, *, ahead: bool
    ) -> TaskBatch:
        whole = [item for item in read if not isinstance(item, Rejection)]
        items = [self._cropped(item, origin, self.crop) for item in whole] if self.crop else whole
        batch = TaskBatch(
            numbers=tuple(item.number for item in items),
            ids=tuple(item.id for item in items),
            origin=origin,
            rejected=tuple(item for item in read if isinstance(item, Rejection)),
            cropped=sum(item is not before for item, before in zip(items, whole, strict=True)),
        )
        if self.collate is None:
            return replace(batch, value=self._joined(items, batch, room or self._joined_in))
        if not items:
            return batch
        if ahead and not self.may_collate(batch.ids):
            return replace(batch, is_made=False)
        try:
            joined = self._joined(items, batch, self._joined_in)
            with self.working(batch.ids):
                value = self.collate(joined.items, joined.rng)
            del joined
            weights = None if self.weigh is None else self.weigh(value)
            if room is not None:
                value, weights = packed((value, weights), room)
        except (MemoryError, RuntimeError) as error:
            if not ahead or not is_out_of_memory(error):
                raise
            return replace(batch, is_made=False)
        return replace(batch, value=value, weights=weights)

    def _cropped(self, item: ItemArrays, origin: BatchOrigin, limits: Mapping[str, int]) -> ItemArrays:
        (copy,) = self.sampler.copies([item.number])
        return crop_item(item, limits, crop_rng(self.seed, origin.epoch, copy_name(item.id, copy)), self.measure)

    def _joined(self, items: Sequence[ItemArrays], batch: TaskBatch, room: Room) -> ItemBatch:
        """Join the arrays of items and the embeddings of their residues in one run of memory."""
        embeddings, partners, embedding = self.embeddings, list[EmbeddedPartner](), None
        if embeddings is not None:
            partners = embeddings.partners(items)
            embedding = getattr(torch, embeddings.dtype), embeddings.width
        builder = BatchBuilder(items, embedding)
        layout = builder.layout
        memory = room(layout.used)
        bytes_T = memory.numpy()
        builder.write(bytes_T)
        for place, item, role, copies in partners:
            assert embeddings is not None
            axis = layout.residues(role)
            embedding_RD, encoded_R = (
                layout.view(f"{role}.{name}", bytes_T)[layout.rows(axis, place)] for name in (EMBEDDING, ENCODED)
            )
            embeddings.join(copies, item.arrays[f"{axis}.row"], embedding_RD, encoded_R, item.id)
        return ItemBatch(memory, layout, batch.numbers, batch.ids, batch.origin, self.sampler.copies(batch.numbers))


class Prefetch:
    """Batches of micro-batches in their order, made ahead by threads; an error, of any job, is raised in its place."""

    def __init__(self, micros: Iterator[MicroBatch], make: Callable[[MicroBatch], TaskBatch], threads: int) -> None:
        self._micros, self._make = micros, make
        self._drawing = ThreadPoolExecutor(1, "reader")  # one thread, so that micro-batches are drawn in order
        self._making = ThreadPoolExecutor(threads, "reader")
        self._waiting: deque[Future[TaskBatch | None]] = deque()

    def next(self, ahead: int) -> TaskBatch | None:
        """Return the next batch, None at the end; first have up to `ahead` under way."""
        while len(self._waiting) < ahead:
            drawn = self._drawing.submit(next, self._micros, None)
            self._waiting.append(self._making.submit(self._made, drawn))
        return self._waiting.popleft().result()

    def _made(self, drawn: Future[MicroBatch | None]) -> TaskBatch | None:
        micro = drawn.result()
        return None if micro is None else self._make(micro)

    def at_hand(self) -> TaskBatch | None:
        """Return the batch that comes next, if it is ready; it stays next."""
        first = self._waiting[0] if self._waiting else None
        return first.result() if first is not None and first.done() and first.exception() is None else None

    def close(self) -> None:
        """Cancel pending batches; wait for threads that are at work."""
        for pool in (self._drawing, self._making):
            pool.shutdown(cancel_futures=True)
        self._waiting.clear()


class BatchMemory:
    """Memory for batches, in blocks that are all as large as the largest batch needs.

    A block is reused once nothing refers to it, because fresh memory costs as much time as reading. A new block is
    written to at once: else the process would grow for epochs, as larger batches reach more of its pages.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin, self._block_bytes = pin, 0
        self._free: list[NDArray[np.uint8]] = []  # torch reuses pinned ones itself

    def __call__(self, used: int) -> torch.Tensor:
        if used > self._block_bytes:
            self._block_bytes = slot_bytes(used, pin=self._pin)
            if self._pin:
                release_pinned()  # smaller blocks that are free would never be used again
        if self._pin:
            return bytes_on_host(self._block_bytes, pin=True)[:used]
        block = np.empty(0, np.uint8)
        with suppress(IndexError):
            block = self._free.pop()
        if len(block) < self._block_bytes:
            block = np.full(self._block_bytes, 0, np.uint8)
        owner = block[:used]  # which the tensor keeps, and all that shares its memory
        weakref.finalize(owner, self._free.append, block)
        return torch.from_numpy(owner)


class SharedRun:
    """Memory that a process shares with those that it forks: a file without a name, which grows."""

    def __init__(self) -> None:
        self._file = os.memfd_create("batch", os.MFD_CLOEXEC)
        self._mapped = np.empty(0, np.uint8)
        self.used = 0  # bytes, of the batch that is in it

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self._file)

    def __call__(self, used: int) -> torch.Tensor:
        """Return memory of this size, of the file as it is or grown."""
        self.used, size = used, os.fstat(self._file).st_size
        if used > size:
            size = slot_bytes(used, pin=False)
            os.ftruncate(self._file, size)
        if size > len(self._mapped):
            self._mapped = np.frombuffer(mmap.mmap(self._file, size), np.uint8)
        return torch.from_numpy(self._mapped[:used])


class ReaderProcesses:
    """Processes that call `make` as it was when they were forked, each for one micro-batch at a time."""

    def __init__(self, make: Make, count: int, *, batches: int) -> None:
        """Fork; `batches` may be in use at once."""
        self._runs = [SharedRun() for _ in range(batches)]
        self._free: LifoQueue[int] = LifoQueue()  # a stack: rarely used runs take no memory
        for run in range(batches):
            self._free.put(run)
        self._readers = [_forked(make, self._runs) for _ in range(count)]
        self._idle: SimpleQueue[Reader | None] = SimpleQueue()  # None in place of one that died
        for reader in self._readers:
            self._idle.put(reader)

    def make(self, micro: MicroBatch, room: Room | None) -> TaskBatch | None:
        """Let a process make a batch, over shared memory or copied to `room`; return None if no process can."""
        try:
            run = self._free.get_nowait()
        except Empty:  # the loop keeps many batches
            return None
        if (answer := self._ask(micro, run)) is None:
            self._free.put(run)
            return None
        outline, used = answer
        memory = self._runs[run](used)
        if room is None:
            owner = memory.numpy()  # which the tensors of the batch keep
            weakref.finalize(owner, self._free.put, run)
            memory = torch.from_numpy(owner)
        else:
            memory = room(used).copy_(memory)
            self._free.put(run)
        batch: TaskBatch = filled(outline, memory)
        return batch

    def _ask(self, micro: MicroBatch, run: int) -> Any:
        """Return the outline of a batch and the size of its memory; None where there is no process, or it failed."""
        reader = self._idle.get()
        try:
            if reader is None:
                return None
            reader[1].send((micro, run))
            return reader[1].recv()
        except (EOFError, OSError):
            assert reader is not None
            reader[0].join()
            log.warning("a reader process ended with exit code %s: a thread replaces it", reader[0].exitcode)
            reader = None
            return None
        finally:
            self._idle.put(reader)

    def end(self) -> None:
        """Kill all processes, which hold no state; none may be at work."""
        while self._readers:
            process, pipe = self._readers.pop()
            process.kill()
            process.join()
            pipe.close()

    __del__ = end


def _forked(make: Make, runs: Sequence[SharedRun]) -> Reader:
    ours, theirs = Pipe()
    process = FORK.Process(target=_serve, args=(make, runs, theirs), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it only reads, on one core, and takes no thread's lock
        process.start()
    theirs.close()
    return process, ours


def _serve(make: Make, runs: Sequence[SharedRun], pipe: Connection) -> None:
    """Answer until the process that forked this one ends, or kills it."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the training may have replaced it
    torch.set_num_threads(1)  # torch's threads were not forked
    gc.freeze()  # keeps inherited memory shared, and runs no finalizers of the parent
    parent: Any = parent_process()
    with suppress(EOFError, OSError):
        while parent.sentinel not in wait([pipe, parent.sentinel]):
            micro, run = pipe.recv()
            memory = runs[run]
            try:
                batch = make(micro, memory)
                pipe.send((outlined(batch, memory(memory.used)), memory.used))
            except (EOFError, OSError):
                raise
            except Exception:  # noqa: BLE001 - the thread that asked makes the batch, and meets the error
                pipe.send(None)


class WorkedOn:
    """Reports the items that this process works on, in case it dies: those of a piece, and those of reading threads."""

    def __init__(self, report: Callable[[Sequence[str]], None]) -> None:
        self._report, self._lock = report, threading.Lock()
        self._of: dict[Any, Sequence[str]] = {PIECE: ()}  # the items of the piece, and of each thread that reads

    def begin(self, ids: Sequence[str]) -> None:
        """Report the items of a piece that starts."""
        self._note(PIECE, ids)

    @contextmanager
    def reading(self, ids: Sequence[str]) -> Iterator[None]:
        """Report items while this thread has user code read or collate them."""
        if ids:
            self._note(threading.get_ident(), ids)
        try:
            yield
        finally:
            if ids:
                self._note(threading.get_ident(), ())

    def _note(self, who: Any, ids: Sequence[str]) -> None:
        with self._lock:
            self._of[who] = ids
            self._report(list(dict.fromkeys(chain(*self._of.values()))))
