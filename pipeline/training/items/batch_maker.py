"""Makes a batch of items: reads their graphs and embeddings, crops them, and joins them or hands them to `collate`.

It is what threads of a loader call, and what processes are forked with. A batch of any structure goes into one run of
memory, which is pinned, or shared with the process that reads:

packed = pack_batch(batch, room)  # room(bytes) → memory to write to
batch = packed.over(memory)  # the same batch; its tensors are views of that memory
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pipeline.device.batch_transfer import map_tensors
from pipeline.device.out_of_memory import is_out_of_memory
from pipeline.errors import CacheDamaged, RecordMissing
from pipeline.records import Rejection
from pipeline.training.items.batch import BatchOrigin, ItemBatch, as_tensor, item_rng, item_tensors
from pipeline.training.items.batch_layout import ALIGNMENT, EMBEDDING, ENCODED, BatchBuilder, EmbeddingForm, held_as
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
    from pipeline.training.items.residue_embeddings import Embeddings, StoredEmbedding, Text
    from pipeline.training.sampling.sampler import MicroBatch

    Bytes = NDArray[np.uint8]
    Room: TypeAlias = Callable[[int], Bytes]  # memory of so many bytes
    Collate: TypeAlias = Callable[[Sequence[ItemTensors], np.random.Generator], Any]


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


@dataclass(frozen=True, slots=True)
class MadeBatch:
    """A batch and what it is of."""

    numbers: tuple[int, ...]
    ids: tuple[str, ...]
    origin: BatchOrigin
    rejected: tuple[Rejection, ...]
    cropped: int  # items
    value: Any = None  # None where there are no items to collate
    weights: Mapping[str, Any] | None = None
    packed: PackedBatch | None = None  # both instead, where there was room for their tensors
    bytes: int = 0
    is_made: bool = True  # else memory ended meanwhile, or it is to be made late


class WorkedOn:
    """Tells which items this process works on, in case it dies: those of a piece, and what threads read or collate."""

    def __init__(self, tell: Callable[[Sequence[str]], None]) -> None:
        self._tell, self._lock, self._pid = tell, threading.Lock(), os.getpid()
        self._piece: Sequence[str] = ()
        self._threads: dict[int, Sequence[str]] = {}  # what each is at

    def begin(self, ids: Sequence[str]) -> None:
        """Tell the items of a piece that is begun."""
        with self._lock:
            self._piece = ids
            self._say()

    def noted(self, collate: Collate) -> Collate:
        """Return a `collate` that tells its items while a thread is in it."""

        def collated(items: Sequence[Any], rng: Any) -> Any:
            with self._at([item.id for item in items]):
                return collate(items, rng)

        return collated

    def reading(self, source: ItemSource) -> ItemSource:
        """Return a source that tells its items while a thread reads them, where a user's code is what reads."""
        return replace(source, noted=self._at) if isinstance(source, ReaderItems) else source

    @contextmanager
    def _at(self, ids: Sequence[str]) -> Iterator[None]:
        """Tell items while this thread is at them."""
        if os.getpid() != self._pid:  # a process that reads ends alone
            yield
            return
        thread = threading.get_ident()
        with self._lock:
            self._threads[thread] = ids
            self._say()
        try:
            yield
        finally:
            with self._lock:
                del self._threads[thread]
                self._say()

    def _say(self) -> None:
        self._tell(list(dict.fromkeys(chain(self._piece, *self._threads.values()))))


@dataclass(eq=False)
class BatchMaker:
    """Makes batches, in any thread; see `Loader` for what the fields are."""

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
        self._memory = _Memory()

    def without_mending(self) -> BatchMaker:
        """Return one that leaves it to others to do something about what cannot be read."""
        graphs = replace(self.graphs, mending=None) if isinstance(self.graphs, CachedGraphs) else self.graphs
        return replace(self, graphs=graphs, mending=None)

    def make(
        self, items: Sequence[int], micro: MicroBatch, room: Room | None = None, *, ahead: bool = False
    ) -> MadeBatch:
        """Make a batch of items, packed where there is room; what cannot be read is left out, where that is allowed.

        Where memory ends in a `collate` that is `ahead` of the step, the step finds it out for itself.
        """
        if ahead and (unmade := self._unread(items, micro)):
            return unmade
        read = list(self.graphs.read(items))
        while True:
            try:
                return self._made(read, micro, room, ahead=ahead)
            except (CacheDamaged, RecordMissing) as error:
                if self.mending is None or not error.item:
                    raise
                rejection = self.mending.leave_out(error)
                read = [rejection if item.id == rejection.id else item for item in read]

    def _unread(self, items: Sequence[int], micro: MicroBatch) -> MadeBatch | None:
        """Return a batch that is still to be made, of items that a user's code may not read ahead; None: it may."""
        if self.collate is None or not items or not isinstance(self.graphs, ReaderItems):
            return None
        ids = self.graphs.ids(items)
        if self.may_collate(ids):
            return None
        return MadeBatch(tuple(items), ids, self._origin(micro), (), 0, is_made=False)

    def _origin(self, micro: MicroBatch) -> BatchOrigin:
        return BatchOrigin(micro.epoch, micro.step, micro.index, micro.of, self.seed)

    def _made(
        self, read: Sequence[ItemArrays | Rejection], micro: MicroBatch, room: Room | None, *, ahead: bool
    ) -> MadeBatch:
        """Make a batch of items that were read, and of their embeddings."""
        whole = [item for item in read if not isinstance(item, Rejection)]
        arrays = whole
        if self.crop:
            rngs = [crop_rng(self.seed, micro.epoch, item.id) for item in whole]
            arrays = [crop_item(item, self.crop, rng, self.measure) for item, rng in zip(whole, rngs, strict=True)]
        batch = MadeBatch(
            numbers=tuple(item.number for item in arrays),
            ids=tuple(item.id for item in arrays),
            origin=self._origin(micro),
            rejected=tuple(item for item in read if isinstance(item, Rejection)),
            cropped=sum(item is not before for item, before in zip(arrays, whole, strict=True)),
        )
        if self.collate is None:
            return self._joined(arrays, batch, room)
        if ahead and arrays and not self.may_collate(batch.ids):
            return replace(batch, is_made=False)
        try:
            return self._collated(arrays, batch, room)
        except (MemoryError, RuntimeError) as error:
            if not ahead or not is_out_of_memory(error):
                raise
            return replace(batch, is_made=False)

    def _joined(self, arrays: Sequence[ItemArrays], batch: MadeBatch, room: Room | None) -> MadeBatch:
        """Join the arrays of items into one run of memory."""
        builder, stored = self._builder(arrays)
        layout, used = builder.layout, builder.layout.used
        memory = np.empty(used, np.uint8) if room is None else room(used)
        builder.write(memory)
        for partner in self._partners(arrays):
            rows = layout.rows(layout.residues(partner.role), partner.place)
            embedding_RD = layout.view(f"{partner.role}.{EMBEDDING}", memory)[rows]
            encoded_R = layout.view(f"{partner.role}.{ENCODED}", memory)[rows]
            self._embed(builder, partner, stored, embedding_RD, encoded_R)
        joined = ItemBatch(torch.from_numpy(memory), layout, batch.numbers, batch.ids, batch.origin, batch.rejected)
        if room is None:
            return replace(batch, value=joined, bytes=used)
        return replace(batch, packed=PackedBatch.of_run(joined, used), bytes=used)

    def _collated(self, arrays: Sequence[ItemArrays], batch: MadeBatch, room: Room | None) -> MadeBatch:
        """Have `collate` make a batch of single items."""
        assert self.collate is not None
        if not arrays:
            return batch
        value = self.collate(self._items(arrays, batch), item_rng(batch.origin, "\n".join(batch.ids)))
        weights = None if self.weigh is None else self.weigh(value)
        if room is None:
            return replace(batch, value=value, weights=weights, bytes=batch_bytes(value))
        packed = pack_batch((value, weights), room)
        return replace(batch, packed=packed, bytes=packed.bytes)

    def _items(self, arrays: Sequence[ItemArrays], batch: MadeBatch) -> list[ItemTensors]:
        """Return each item by itself, over the memory that was read."""
        builder, stored = self._builder(arrays)
        layout, apart = builder.layout, builder.apart()
        for partner in self._partners(arrays):
            fields, rows = apart[partner.place], layout.rows(layout.residues(partner.role), partner.place)
            place = layout.places[f"{partner.role}.{EMBEDDING}"]
            embedding_RD = np.empty((rows.stop - rows.start, place.shape[1]), held_as(place.dtype))
            encoded_R = np.empty(len(embedding_RD), np.bool_)
            self._embed(builder, partner, stored, embedding_RD, encoded_R)
            fields |= {f"{partner.role}.{EMBEDDING}": embedding_RD, f"{partner.role}.{ENCODED}": encoded_R}
        return [
            item_tensors(
                layout,
                place,
                {name: as_tensor(array, layout.places[name].dtype) for name, array in fields.items()},
                item.id,
                item.number,
                batch.origin,
            )
            for place, (item, fields) in enumerate(zip(arrays, apart, strict=True))
        ]

    def _builder(self, arrays: Sequence[ItemArrays]) -> tuple[BatchBuilder, dict[Text, StoredEmbedding]]:
        """Lay out some items, and look up the embeddings of their partners."""
        if self.embeddings is None:
            return BatchBuilder(arrays), {}
        texts = {text: partner.item.id for partner in self._partners(arrays) for text in partner.texts}
        stored = self.embeddings.find(texts)
        return BatchBuilder(arrays, EmbeddingForm(self.embeddings.dtype, self.embeddings.width(stored))), stored

    def _partners(self, items: Sequence[ItemArrays]) -> list[_PartnerTexts]:
        """Return the partners of all items that may have embeddings."""
        if self.embeddings is None:
            return []
        return [
            _PartnerTexts(place, item, partner["role"], self.embeddings.texts(proteins(partner["chains"])))
            for place, item in enumerate(items)
            for partner in item.meta["partners"]
        ]

    def _embed(
        self,
        builder: BatchBuilder,
        partner: _PartnerTexts,
        stored: Mapping[Text, StoredEmbedding],
        embedding_RD: NDArray[Any],
        encoded_R: NDArray[np.bool_],
    ) -> None:
        """Read the embedding of a partner."""
        assert self.embeddings is not None
        copies = [(text, stored[text]) for text in partner.texts]
        row_R = builder.row_map(partner.item, partner.role)
        self.embeddings.join(copies, row_R, embedding_RD, encoded_R, partner.item.id, self._memory.scratch)


class _PartnerTexts(NamedTuple):
    """A partner of an item, and the sequences of it that are embedded."""

    place: int  # of the item in the batch
    item: ItemArrays
    role: str
    texts: tuple[Text, ...]


class _Memory(threading.local):
    """Scratch memory of each thread, for one embedding at a time."""

    bytes_T: NDArray[np.uint8] = np.empty(0, np.uint8)

    def scratch(self, length: int) -> memoryview:
        """Return scratch memory of so many bytes."""
        if length > len(self.bytes_T):
            self.bytes_T = np.empty(length * 5 // 4, np.uint8)
        return self.bytes_T[:length].data


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
