"""Makes a batch of items: reads their graphs and embeddings, crops them, joins them, and has `collate` make of them.

Threads of a loader call it, and processes that they fork. The tensors of what `collate` returned, of any structure, are
copied side by side into one run of memory where they must be pinned, or where processes share it.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.device.batch_transfer import map_tensors
from pipeline.device.out_of_memory import is_out_of_memory
from pipeline.errors import CacheDamaged, RecordMissing
from pipeline.memory.hardware.host_memory import slot_bytes
from pipeline.records import Rejection
from pipeline.training.items.batch import BatchOrigin, ItemBatch, TaskBatch
from pipeline.training.items.batch_layout import ALIGNMENT, EMBEDDING, ENCODED, BatchBuilder, EmbeddingForm
from pipeline.training.items.crop import crop_item, crop_rng
from pipeline.training.items.item_source import CachedGraphs, ReaderItems
from pipeline.training.items.residue_embeddings import proteins

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    from pipeline.training.items.batch import ItemTensors
    from pipeline.training.items.batch_layout import ItemArrays
    from pipeline.training.items.crop import Measure
    from pipeline.training.items.item_source import DamagedItems, ItemSource
    from pipeline.training.items.residue_embeddings import Embeddings
    from pipeline.training.sampling.sampler import MicroBatch

    Room: TypeAlias = Callable[[int], torch.Tensor]  # size in bytes → memory
    Collate: TypeAlias = Callable[[Sequence[ItemTensors], np.random.Generator], Any]


class ReusedMemory:
    """Memory that batches are joined in, used again once nothing refers to it: new memory costs as much as reading."""

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []

    def __call__(self, used: int) -> torch.Tensor:
        memory = np.empty(0, np.uint8)
        with suppress(IndexError):
            memory = self._free.pop()
        if len(memory) < used:
            memory = np.empty(slot_bytes(used, pin=False), np.uint8)
        owner = memory[:used]  # which the tensor keeps, and all that shares its memory
        weakref.finalize(owner, self._free.append, memory)
        return torch.from_numpy(owner)


@dataclass(eq=False)
class BatchMaker:
    """Makes batches, in any thread; see `Loader` for the fields."""

    graphs: ItemSource
    embeddings: Embeddings | None
    seed: int
    crop: Mapping[str, int] | None
    measure: Measure
    collate: Collate | None
    weigh: Callable[[Any], Mapping[str, Any]] | None
    mending: DamagedItems | None
    may_collate: Callable[[Sequence[str]], bool]

    def __post_init__(self) -> None:
        self._joined_in, self._scratch = ReusedMemory(), _Scratch()

    def without_mending(self) -> BatchMaker:
        """Return one that raises for records that cannot be read."""
        graphs = replace(self.graphs, mending=None) if isinstance(self.graphs, CachedGraphs) else self.graphs
        return replace(self, graphs=graphs, mending=None)

    def make(
        self, items: Sequence[int], micro: MicroBatch, room: Room | None = None, *, ahead: bool = False
    ) -> TaskBatch:
        """Make a batch of items, its tensors in memory from `room`; leave out what cannot be read, where allowed.

        `ahead`: ahead of its step. There `collate` may be forbidden, or run out of memory; the step calls it later.
        """
        origin = BatchOrigin(micro.epoch, micro.step, micro.index, micro.of, self.seed)
        if ahead and self.collate and len(items) and isinstance(self.graphs, ReaderItems):
            ids = self.graphs.ids(items)
            if not self.may_collate(ids):  # nor may the user's reader run
                return TaskBatch(tuple(items), ids, origin, is_made=False)
        read = list(self.graphs.read(items))
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
        items = [self._cropped(item, origin) for item in whole]
        batch = TaskBatch(
            numbers=tuple(item.number for item in items),
            ids=tuple(item.id for item in items),
            origin=origin,
            rejected=tuple(item for item in read if isinstance(item, Rejection)),
            cropped=sum(item is not before for item, before in zip(items, whole, strict=True)),
        )
        if self.collate is None:
            joined = self._joined(items, batch, room or self._joined_in)
            return replace(batch, value=joined, bytes=joined.memory.nbytes)
        if not items:
            return batch
        if ahead and not self.may_collate(batch.ids):
            return replace(batch, is_made=False)
        try:
            joined = self._joined(items, batch, self._joined_in)
            value = self.collate(joined.items, joined.rng)
            del joined
            weights = None if self.weigh is None else self.weigh(value)
            if room is not None:
                value, weights = packed((value, weights), room)
        except (MemoryError, RuntimeError) as error:
            if not ahead or not is_out_of_memory(error):
                raise
            return replace(batch, is_made=False)
        return replace(batch, value=value, weights=weights, bytes=batch_bytes(value))

    def _cropped(self, item: ItemArrays, origin: BatchOrigin) -> ItemArrays:
        if not self.crop:
            return item
        return crop_item(item, self.crop, crop_rng(self.seed, origin.epoch, item.id), self.measure)

    def _joined(self, items: Sequence[ItemArrays], batch: TaskBatch, room: Room) -> ItemBatch:
        """Join the arrays of items and the embeddings of their residues in one run of memory."""
        partners, stored, form = [], {}, None
        if self.embeddings is not None:
            partners = [
                (place, item, partner["role"], self.embeddings.texts(proteins(partner["chains"])))
                for place, item in enumerate(items)
                for partner in item.meta["partners"]
            ]
            stored = self.embeddings.find({text: item.id for _, item, _, texts in partners for text in texts})
            form = EmbeddingForm(self.embeddings.dtype, self.embeddings.width(stored))
        builder = BatchBuilder(items, form)
        layout = builder.layout
        memory = room(layout.used)
        bytes_T = memory.numpy()
        builder.write(bytes_T)
        for place, item, role, texts in partners:
            assert self.embeddings is not None
            rows = layout.rows(layout.residues(role), place)
            embedding_RD = layout.view(f"{role}.{EMBEDDING}", bytes_T)[rows]
            encoded_R = layout.view(f"{role}.{ENCODED}", bytes_T)[rows]
            copies, row_R = [(text, stored[text]) for text in texts], builder.row_map(item, role)
            self.embeddings.join(copies, row_R, embedding_RD, encoded_R, item.id, self._scratch.memory)
        return ItemBatch(memory, layout, batch.numbers, batch.ids, batch.origin, batch.rejected)


class _Scratch(threading.local):
    """Memory of each thread for one embedding at a time."""

    bytes_T: NDArray[np.uint8] = np.empty(0, np.uint8)

    def memory(self, length: int) -> memoryview:
        if length > len(self.bytes_T):
            self.bytes_T = np.empty(length * 5 // 4, np.uint8)
        return self.bytes_T[:length].data


def batch_bytes(batch: Any) -> int:
    """Return how many bytes the tensors of a batch take."""
    return sum(tensor.nbytes for tensor in _tensors(batch))


def _tensors(batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch, each once."""
    found: dict[int, torch.Tensor] = {}
    map_tensors(lambda tensor: found.setdefault(id(tensor), tensor), batch)
    return list(found.values())


def packed(batch: Any, room: Room) -> Any:
    """Return a batch with copies of its tensors side by side in memory from `room`; sparse ones stay what they are.

    Each copy has an address of its own, also an empty one.
    """
    copied = [tensor for tensor in _tensors(batch) if tensor.layout == torch.strided and tensor.device.type == "cpu"]
    sizes = [max(ALIGNMENT, tensor.nbytes + -tensor.nbytes % ALIGNMENT) for tensor in copied]
    memory = room(sum(sizes))
    copies = {
        id(tensor): _view(run[: tensor.nbytes], tensor.dtype, tensor.shape).copy_(tensor)
        for tensor, run in zip(copied, torch.split_with_sizes(memory, sizes), strict=True)
    }
    return map_tensors(lambda tensor: copies.get(id(tensor), tensor), batch)


def _view(run: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    return run.view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies in a run of memory that processes share."""

    start: int
    bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def outline(batch: Any, memory: torch.Tensor) -> Any:
    """Return a batch with the places of those tensors that lie in some memory, to be sent to another process."""
    places: dict[int, TensorPlace] = {}

    def placed(tensor: torch.Tensor) -> Any:
        start = tensor.data_ptr() - memory.data_ptr()
        if not 0 <= start < len(memory):
            return tensor
        return places.setdefault(start, TensorPlace(start, tensor.nbytes, tensor.dtype, tuple(tensor.shape)))

    return map_tensors(placed, batch)


def filled(batch: Any, memory: torch.Tensor) -> Any:
    """Return a batch from its outline and the memory that was written to."""
    tensors: dict[int, torch.Tensor] = {}

    def tensor(place: TensorPlace) -> torch.Tensor:
        run = memory[place.start : place.start + place.bytes]
        return tensors.setdefault(place.start, _view(run, place.dtype, place.shape))

    return map_tensors(tensor, batch, kind=TensorPlace)


class WorkedOn:
    """Reports the items that this process works on, in case it dies: those of a piece, and those of reading threads."""

    def __init__(self, report: Callable[[Sequence[str]], None]) -> None:
        self._report, self._lock, self._pid = report, threading.Lock(), os.getpid()
        self._piece: Sequence[str] = ()
        self._threads: dict[int, Sequence[str]] = {}  # the items of each

    def begin(self, ids: Sequence[str]) -> None:
        """Report the items of a piece that starts."""
        with self._lock:
            self._piece = ids
            self._send()

    def noted(self, collate: Collate) -> Collate:
        """Return a `collate` that reports its items while it runs."""

        def collated(items: Sequence[Any], rng: Any) -> Any:
            with self._at([item.id for item in items]):
                return collate(items, rng)

        return collated

    def reading(self, source: ItemSource) -> ItemSource:
        """Return a source that reports its items while a user's reader reads them."""
        return replace(source, noted=self._at) if isinstance(source, ReaderItems) else source

    @contextmanager
    def _at(self, ids: Sequence[str]) -> Iterator[None]:
        """Report items while this thread works on them."""
        if os.getpid() != self._pid:  # a reader process that dies does not end this one
            yield
            return
        thread = threading.get_ident()
        with self._lock:
            self._threads[thread] = ids
            self._send()
        try:
            yield
        finally:
            with self._lock:
                del self._threads[thread]
                self._send()

    def _send(self) -> None:
        self._report(list(dict.fromkeys(chain(self._piece, *self._threads.values()))))
