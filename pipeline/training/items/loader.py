"""Batches for training: threads read the graphs and embeddings of the next ones into a fixed ring of memory.

    for batch in Loader(CachedGraphs(graphs, table), Embeddings(embeddings, recipe), sampler):
        loss = model(batch.to(device))

Without `collate` the arrays of the items are joined where they are to lie. With it, the threads that read hand it each
item by itself, over the memory that was read; what it makes is the only batch there is, and is copied once more where
it must be pinned. Host memory is the slots times the largest batch. A batch stays what it is while it is used.
"""

from __future__ import annotations

import threading
import time
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from pipeline.device.accelerator import card_here
from pipeline.errors import CacheDamaged, RecordMissing
from pipeline.records import Rejection
from pipeline.training.items.batch import BatchOrigin, ItemBatch, TaskBatch, as_tensor, item_rng, item_tensors
from pipeline.training.items.batch_layout import EMBEDDING, ENCODED, BatchBuilder, EmbeddingForm, held_as
from pipeline.training.items.crop import crop_item, crop_rng
from pipeline.training.items.packed_batch import pack, tensor_bytes
from pipeline.training.items.read_ahead import ReadAhead, Ring
from pipeline.training.items.residue_embeddings import proteins

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.training.items.batch import ItemTensors
    from pipeline.training.items.batch_layout import ItemArrays
    from pipeline.training.items.crop import Measure
    from pipeline.training.items.item_source import DamagedItems, ItemSource
    from pipeline.training.items.read_ahead import Lease, ReadBatch
    from pipeline.training.items.residue_embeddings import Embeddings, StoredEmbedding
    from pipeline.training.sampling.sampler import MicroBatch, Sampler

    Bytes = NDArray[np.uint8]
    Collate: TypeAlias = Callable[[Sequence[ItemTensors], np.random.Generator], Any]


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
    threads: int = 2
    pin: bool | None = None  # for copies to a GPU; None: where there is one
    seed: int = 0
    crop: Mapping[str, int] | None = None  # the largest an item may have of each size, or of what `measure` makes of it
    measure: Measure = dict
    collate: Collate | None = None  # makes what is yielded of a batch's items, in any thread
    weigh: Callable[[Any], Mapping[str, Any]] | None = None  # tells the weights of a batch that was made
    reject: Callable[[Rejection], None] = lambda _: None  # called for items that have no graph after all
    mending: DamagedItems | None = None  # of embeddings that cannot be read; without, that is an error

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"{self.threads} threads: one at least reads")
        self.batch_sampler = self.sampler
        self.stats = LoaderStats()
        self._pins = card_here() is not None if self.pin is None else self.pin
        self._ring = Ring(self.slots, pin=self._pins)
        self._memory = _Memory()
        self._reading: ReadAhead[MicroBatch, TaskBatch] | None = None
        self._start: Mapping[str, Any] = {}  # where the present loop began
        self._moves = 0  # of the sampler, then
        self._last: MicroBatch | None = None  # what it yielded last

    def __len__(self) -> int:
        """Count the batches of an epoch on this rank."""
        return self.sampler.count(self._start["epoch"] if self._reading else self.sampler.epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from the sampler's position to the end of the epoch; ends any earlier loop."""
        return map(self._value, self.read())

    def _value(self, batch: TaskBatch) -> Any:
        if self.collate is not None and not len(batch):  # a rank without items in a step
            return self.collate([], item_rng(batch.origin, ""))
        return batch.value

    def read(self) -> Iterator[TaskBatch]:
        """Yield the same with what it is of."""
        self.close()
        self._start, self._last, self._moves = self.sampler.state_dict(), None, self.sampler.moves
        reading = self._reading = ReadAhead(iter(self.sampler), self._fill, self._ring, self.threads)
        try:
            while read := self._next(reading):
                self._last, held = read.micro, [read.filled]
                del read  # nothing here keeps a batch that the loop has let go of
                self._count(held[0])
                yield held.pop()
            self._reading = self._last = None
        finally:
            reading.close()
            if self._reading is reading:
                self.close()

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
        what = "a Loader has no dataset of single items: it knows its rank, and goes on where loader.load_state_dict(…)"
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
            raise ValueError("another loop over this loader began, which ended this one")
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

    def fetch(self, items: Sequence[int], micro: MicroBatch) -> TaskBatch:
        """Read some items of a micro-batch again, into memory of their own; nothing is counted or reported."""
        return self._read(items, micro, None)

    def fetch_again(self, items: Sequence[int], origin: BatchOrigin) -> TaskBatch:
        """Read some items of a batch again, by where it came from."""
        from pipeline.training.sampling.sampler import MicroBatch

        numbers = np.array(items, dtype=np.int64)
        return self._read(items, MicroBatch(origin.epoch, origin.step, origin.index, origin.of, numbers), None)

    def _fill(self, micro: MicroBatch, lease: Lease) -> TaskBatch:
        """Read a micro-batch into a slot; called by any thread."""
        return self._read(micro.items.tolist(), micro, lease)

    def _read(self, items: Sequence[int], micro: MicroBatch, lease: Lease | None) -> TaskBatch:
        """Read items; what cannot be read is left out, where that is allowed."""
        read = list(self.graphs.read(items))
        while True:
            try:
                return self._built(read, micro, lease)
            except (CacheDamaged, RecordMissing) as error:
                if self.mending is None or not error.item:
                    raise
                rejection = self.mending.leave_out(error)
                read = [rejection if item.id == rejection.id else item for item in read]

    def _built(self, read: Sequence[ItemArrays | Rejection], micro: MicroBatch, lease: Lease | None) -> TaskBatch:
        """Make a batch of items that were read, and of their embeddings."""
        whole = [item for item in read if not isinstance(item, Rejection)]
        arrays = whole
        if self.crop:
            rngs = [crop_rng(self.seed, micro.epoch, item.id) for item in whole]
            arrays = [crop_item(item, self.crop, rng, self.measure) for item, rng in zip(whole, rngs, strict=True)]
        batch = _Unmade(
            numbers=tuple(item.number for item in arrays),
            ids=tuple(item.id for item in arrays),
            origin=BatchOrigin(micro.epoch, micro.step, micro.index, micro.of, self.seed),
            rejected=tuple(item for item in read if isinstance(item, Rejection)),
            cropped=sum(item is not before for item, before in zip(arrays, whole, strict=True)),
        )
        return self._joined(arrays, batch, lease) if self.collate is None else self._collated(arrays, batch, lease)

    def _joined(self, arrays: Sequence[ItemArrays], batch: _Unmade, lease: Lease | None) -> TaskBatch:
        """Join the arrays of items into one run of memory."""
        builder, stored = self._builder(arrays)
        layout, used = builder.layout, builder.layout.used
        memory = torch.empty(used, dtype=torch.uint8).numpy() if lease is None else lease.room(used)
        builder.write(memory)
        for partner in self._partners(arrays):
            rows = layout.rows(layout.residues(partner.role), partner.place)
            embedding_RD = layout.view(f"{partner.role}.{EMBEDDING}", memory)[rows]
            encoded_R = layout.view(f"{partner.role}.{ENCODED}", memory)[rows]
            self._embed(builder, partner, stored, embedding_RD, encoded_R)
        tensor = torch.from_numpy(memory) if lease is None else lease.tensor(used)
        joined = ItemBatch(tensor, layout, batch.numbers, batch.ids, batch.origin, batch.rejected)
        return batch.made(joined, self.fetch_again, bytes=used)

    def _collated(self, arrays: Sequence[ItemArrays], batch: _Unmade, lease: Lease | None) -> TaskBatch:
        """Have `collate` make a batch of single items, and copy that to pinned memory where there is to be some."""
        assert self.collate is not None
        items = self._items(arrays, batch)
        value = self.collate(items, item_rng(batch.origin, "\n".join(batch.ids))) if items else None
        weights = self.weigh(value) if self.weigh is not None and items else None
        if lease is None or not self._pins:
            return batch.made(value, self.fetch_again, weights=weights, bytes=tensor_bytes(value), lease=lease)
        packed = pack(value, lease.room)
        value = packed.over(lease.tensor(packed.bytes))
        return batch.made(value, self.fetch_again, weights=weights, bytes=packed.bytes)

    def _items(self, arrays: Sequence[ItemArrays], batch: _Unmade) -> list[ItemTensors]:
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

    def _builder(self, arrays: Sequence[ItemArrays]) -> tuple[BatchBuilder, dict[str, StoredEmbedding]]:
        """Lay out some items, and look up the embeddings of their partners."""
        if self.embeddings is None:
            return BatchBuilder(arrays), {}
        texts = {text: partner.item.id for partner in self._partners(arrays) for text in partner.texts}
        stored = self.embeddings.find(texts)
        return BatchBuilder(
            arrays, EmbeddingForm(self.embeddings.dtype, self.embeddings.width(stored.values()))
        ), stored

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
        stored: Mapping[str, StoredEmbedding],
        embedding_RD: NDArray[Any],
        encoded_R: NDArray[np.bool_],
    ) -> None:
        """Read the embedding of a partner."""
        assert self.embeddings is not None
        copies = [(text, stored[text]) for text in partner.texts]
        row_R = builder.row_map(partner.item, partner.role)
        self.embeddings.join(copies, row_R, embedding_RD, encoded_R, partner.item.id, self._memory.scratch)


@dataclass(frozen=True, slots=True)
class _Unmade:
    """What a batch is of, before it is made."""

    numbers: tuple[int, ...]
    ids: tuple[str, ...]
    origin: BatchOrigin
    rejected: tuple[Rejection, ...]
    cropped: int

    def made(self, value: Any, read_again: Callable[[Sequence[int], BatchOrigin], TaskBatch], **what: Any) -> TaskBatch:
        """Return the batch."""
        return TaskBatch(
            value, self.numbers, self.ids, self.origin, read_again, self.rejected, cropped=self.cropped, **what
        )


class _PartnerTexts(NamedTuple):
    """A partner of an item, and the sequences of it that are embedded."""

    place: int  # of the item in the batch
    item: ItemArrays
    role: str
    texts: tuple[str, ...]


class _Memory(threading.local):
    """Scratch memory of each thread, for one embedding at a time."""

    bytes_T: NDArray[np.uint8] = np.empty(0, np.uint8)

    def scratch(self, length: int) -> memoryview:
        """Return scratch memory of so many bytes."""
        if length > len(self.bytes_T):
            self.bytes_T = np.empty(length * 5 // 4, np.uint8)
        return self.bytes_T[:length].data
