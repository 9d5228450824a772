"""Batches for training: threads read the graphs and embeddings of the next ones into a fixed ring of memory.

    for batch in Loader(CachedGraphs(graphs, table), Embeddings(embeddings, recipe), sampler):
        loss = model(batch.to(device))

Host memory is the slots times the largest batch. A batch stays what it is while anything refers to it.
"""

from __future__ import annotations

import threading
import time
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from pipeline.device.accelerator import card_here
from pipeline.errors import CacheDamaged, RecordMissing
from pipeline.records import Rejection
from pipeline.training.items.batch import BatchItems, BatchOrigin, ItemBatch
from pipeline.training.items.batch_layout import EMBEDDING, ENCODED, BatchBuilder, EmbeddingForm
from pipeline.training.items.crop import crop_item, crop_rng
from pipeline.training.items.read_ahead import ReadAhead, Ring
from pipeline.training.items.residue_embeddings import proteins

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.training.items.batch_layout import ItemArrays
    from pipeline.training.items.crop import Measure
    from pipeline.training.items.item_source import DamagedItems, ItemSource
    from pipeline.training.items.read_ahead import ReadBatch, Slot
    from pipeline.training.items.residue_embeddings import Embeddings, StoredEmbedding
    from pipeline.training.sampling.sampler import MicroBatch, Sampler

    Bytes = NDArray[np.uint8]
    _Filled: TypeAlias = tuple[ItemBatch, int]  # a batch over a slot's memory, and how many of its items were cropped


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
    collate: Callable[[BatchItems, np.random.Generator], Any] | None = (
        None  # turns a batch's items into what is yielded
    )
    reject: Callable[[Rejection], None] = lambda _: None  # called for items that have no graph after all
    mending: DamagedItems | None = None  # of embeddings that cannot be read; without, that is an error

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"{self.threads} threads: one at least reads")
        self.batch_sampler = self.sampler
        self.stats = LoaderStats()
        pin = card_here() is not None if self.pin is None else self.pin
        self._ring = Ring(self.slots, pin=pin)
        self._memory = _Memory()
        self._reading: ReadAhead[MicroBatch, _Filled] | None = None
        self._start: Mapping[str, Any] = {}  # where the present loop began
        self._moves = 0  # of the sampler, then
        self._last: MicroBatch | None = None  # what it yielded last

    def __len__(self) -> int:
        """Count the batches of an epoch on this rank."""
        return self.sampler.count(self._start["epoch"] if self._reading else self.sampler.epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from the sampler's position to the end of the epoch; ends any earlier loop."""
        self.close()
        self._start, self._last, self._moves = self.sampler.state_dict(), None, self.sampler.moves
        reading = self._reading = ReadAhead(iter(self.sampler), self._fill, self._ring, self.threads)
        try:
            while read := self._next(reading):
                yield self._yielded(read)
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

    def _next(self, reading: ReadAhead[MicroBatch, _Filled]) -> ReadBatch[MicroBatch, _Filled] | None:
        """Wait for the next batch, and measure the wait."""
        if reading is not self._reading:
            raise ValueError("another loop over this loader began, which ended this one")
        begun = time.perf_counter()
        read = reading.next()
        self.stats.wait_s += time.perf_counter() - begun
        return read

    def _yielded(self, read: ReadBatch[MicroBatch, _Filled]) -> Any:
        """Count a batch that was read, and return what the loop gets of it."""
        self._last = read.micro
        batch, cropped = read.filled
        used = batch.layout.used
        batch = replace(batch, memory=self._ring.hand_out(read.slot, used))
        stats = self.stats
        stats.batches += 1
        stats.items += len(batch)
        stats.rejected += len(batch.rejected)
        stats.cropped += cropped
        stats.bytes += used
        stats.largest_bytes = max(stats.largest_bytes, used)
        stats.slots_bytes, stats.grown = self._ring.bytes, self._ring.grown
        for rejection in batch.rejected:
            self.reject(rejection)
        return batch if self.collate is None else self.collate(batch.items, batch.rng)

    def fetch(self, items: Sequence[int], micro: MicroBatch) -> ItemBatch:
        """Read some items of a micro-batch again, into memory of their own; nothing is counted or reported."""
        return self._read(items, micro, lambda used: torch.empty(used, dtype=torch.uint8).numpy())[0]

    def _fill(self, micro: MicroBatch, slot: Slot) -> _Filled:
        """Read a micro-batch into a slot; called by any thread."""
        return self._read(micro.items.tolist(), micro, lambda used: self._ring.room(slot, used))

    def _read(self, items: Sequence[int], micro: MicroBatch, room: Callable[[int], Bytes]) -> _Filled:
        """Read items into memory that `room` provides once the size is known; count the cropped ones."""
        read = list(self.graphs.read(items))
        while True:
            try:
                return self._built(read, micro, room)
            except (CacheDamaged, RecordMissing) as error:
                if self.mending is None or not error.item:
                    raise
                rejection = self.mending.leave_out(error)
                read = [rejection if item.id == rejection.id else item for item in read]

    def _built(
        self, read: Sequence[ItemArrays | Rejection], micro: MicroBatch, room: Callable[[int], Bytes]
    ) -> _Filled:
        """Join items that were read, and their embeddings."""
        whole = [item for item in read if not isinstance(item, Rejection)]
        arrays = whole
        if self.crop:
            rngs = [crop_rng(self.seed, micro.epoch, item.id) for item in whole]
            arrays = [crop_item(item, self.crop, rng, self.measure) for item, rng in zip(whole, rngs, strict=True)]
        partners = self._partners(arrays)
        stored: dict[str, StoredEmbedding] = {}
        encoding = None
        if self.embeddings is not None:
            stored = self.embeddings.find({text: partner.item.id for partner in partners for text in partner.texts})
            encoding = EmbeddingForm(self.embeddings.dtype, self.embeddings.width(stored.values()))
        builder = BatchBuilder(arrays, encoding)
        memory = room(builder.layout.used)
        builder.write(memory)
        self._join(builder, partners, stored, memory)
        batch = ItemBatch(
            memory=torch.from_numpy(memory),
            layout=builder.layout,
            numbers=tuple(item.number for item in arrays),
            ids=tuple(item.id for item in arrays),
            origin=BatchOrigin(micro.epoch, micro.step, micro.index, micro.of, self.seed),
            rejected=tuple(item for item in read if isinstance(item, Rejection)),
        )
        return batch, sum(item is not before for item, before in zip(arrays, whole, strict=True))

    def _partners(self, items: Sequence[ItemArrays]) -> list[_PartnerTexts]:
        """Return the partners of all items that may have embeddings."""
        if self.embeddings is None:
            return []
        return [
            _PartnerTexts(place, item, partner["role"], self.embeddings.texts(proteins(partner["chains"])))
            for place, item in enumerate(items)
            for partner in item.meta["partners"]
        ]

    def _join(
        self,
        builder: BatchBuilder,
        partners: Sequence[_PartnerTexts],
        stored: Mapping[str, StoredEmbedding],
        memory: Bytes,
    ) -> None:
        """Read the embeddings of all partners into the batch."""
        layout = builder.layout
        for partner in partners:
            assert self.embeddings is not None
            rows = layout.rows(layout.residues(partner.role), partner.place)
            self.embeddings.join(
                [(text, stored[text]) for text in partner.texts],
                builder.row_map(partner.item, partner.role),
                layout.view(f"{partner.role}.{EMBEDDING}", memory)[rows],
                layout.view(f"{partner.role}.{ENCODED}", memory)[rows],
                partner.item.id,
                self._memory.scratch,
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
