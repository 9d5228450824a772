"""The records of one kind: found by key, verified on every read, in one folder or in several laid over each other."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from heapq import merge
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import numpy as np

from pipeline.command_line import Command
from pipeline.errors import SUBMIT_AGAIN, CacheDamaged, CacheFull, CacheUnusable, JobFailed, RecordMissing
from pipeline.keys import KEY_BYTES
from pipeline.store.format.disk import publish_file
from pipeline.store.format.record import BadRecord, Record, encode_record
from pipeline.store.format.shard import (
    DEFAULT_HEADER_BYTES,
    ShardTable,
    ShardWriter,
    column_keys,
    key_column,
    verified_record,
    whole_rows,
)
from pipeline.store.shard_index import (
    GONE,
    NO_KEYS,
    IndexDamaged,
    IndexState,
    StoreSnapshot,
    StoreStat,
    StoreTally,
    count_records,
    first_of_key,
    write_index,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.store.format.cache_layout import KindLayout
    from pipeline.store.format.disk import Disk
    from pipeline.store.format.record import Array
    from pipeline.store.shard_index import KeyColumn, Mask, Rows

    Room = Callable[[int], tuple[memoryview, memoryview]]  # allocates memory for a number of bytes, in two buffers
    Failure = CacheDamaged | RecordMissing

ONLY_MISSING = "processes only missing items; pipeline cache repair sets damaged files aside"
DEFAULT_SHARD_BYTES = 256 * 1024 * 1024
FLUSH_EVERY_S, FLUSH_EVERY_RECORDS = 60.0, 3000
log = logging.getLogger(__name__)

_OPEN_SHARDS = 64
_READ_THREADS = 4
_READ_AHEAD = 2 * _READ_THREADS  # chunks in memory while `read` waits for its caller
_CHUNK_RECORDS, _CHUNK_BYTES = 64, 1 << 18  # a thread reads this much at once: a small record costs less than a task
_LOCATE_BATCH = 256
_KEYS_BATCH = 65_536
_UNINDEXED_RECORDS, _UNINDEXED_SHARE = 16_384, 0.02  # a few MB; a share makes index writes rarer as the index grows

_UNREAD: Mapping[str, Any] = {}
T = TypeVar("T")


class RecordPlace(NamedTuple):
    """The position of one copy of a record, and the digest that its bytes must have."""

    shard: str
    offset: int
    length: int
    digest: bytes
    layer: int = 0  # in which of several folders that are looked through one after the other


class Layer:
    """The records of one kind in one folder, as far as looking them up goes; it reads the folder when first asked."""

    def __init__(self, disk: Disk, layout: KindLayout) -> None:
        self.disk, self.layout = disk, layout
        self.tables: dict[str, ShardTable] = {}
        self.damaged: set[RecordPlace] = set()  # copies that a read found damaged: they are not located again
        self.is_away = False  # whether a warning was logged that it cannot be read
        self.distrusts_index = False  # whether a record was found that the index does not list
        self._taken: StoreSnapshot | None = None
        self._open = lru_cache(_OPEN_SHARDS)(partial(_OpenShard, disk, layout))

    def ask(self, question: Callable[[StoreSnapshot], T]) -> T:
        """Call `question` with the snapshot; if its index fails, with a new one, then with one without an index."""
        snapshot = self._taken or self.refresh()
        for believe_index in (True, False):
            try:
                return question(snapshot)
            except (IndexDamaged, OSError):
                snapshot = self.refresh(believe_index=believe_index)
        return question(snapshot)

    def refresh(self, *, believe_index: bool = True) -> StoreSnapshot:
        """Look at the folder again."""
        self._open.cache_clear()
        believe_index = believe_index and not self.distrusts_index
        taken = StoreSnapshot(self.disk, self.layout, self.tables, believe_index=believe_index)
        self._taken, self.tables = taken, dict(taken.tables)
        return taken  # another thread may forget it meanwhile

    def forget(self, gone: Collection[str] = ()) -> None:
        """Read the folder again on the next look-up, and drop the tables of shards that are gone."""
        self._open.cache_clear()
        self.tables = {name: table for name, table in self.tables.items() if name not in gone}
        self._taken = None

    def locate(self, keys: Sequence[bytes], layer: int) -> list[list[RecordPlace]]:
        """Return for each key where its copies are."""
        places = self._locate(keys, layer)
        if self._taken and self._taken.outdated and not all(places):  # their records may have moved
            self.refresh()
            places = self._locate(keys, layer)
        return places

    def keys(self) -> Iterator[bytes]:
        """Yield every key once, sorted."""
        column = self.ask(
            lambda snapshot: np.concatenate([NO_KEYS, *(rows["key"][first_of_key(rows)] for rows in snapshot.rows())])
        )
        for start in range(0, len(column), _KEYS_BATCH):
            yield from column_keys(column[start : start + _KEYS_BATCH])

    def first_copies(self, column: KeyColumn) -> tuple[NDArray[np.intp], Rows, Sequence[str]]:
        """Return which of the keys are here, where the first copy of each is, and the names of the shards."""
        names, (asked, rows) = self.ask(lambda snapshot: (snapshot.names, snapshot.find(column)))
        asked, first = np.unique(asked, return_index=True)
        return asked, rows[first], names

    def whole_copies(self, rows: Rows, names: Sequence[str]) -> Mask:
        """Return a mask of the intact copies: they are read shard by shard in long stretches, and not parsed."""
        whole, order = np.zeros(len(rows), bool), np.lexsort((rows["offset"], rows["shard"]))
        for part in np.split(order, 1 + np.flatnonzero(np.diff(rows["shard"][order]))):
            with suppress(OSError):
                if len(part):
                    whole[part] = whole_rows(self.disk, self._open(names[rows["shard"][part[0]]]).fd, rows[part])
        return whole

    def read_place(self, key: bytes, place: RecordPlace, room: Room | None) -> Record:
        """Read and verify one copy of a record."""
        shard = self._open(place.shard)
        if place.offset + place.length > shard.size_bytes:
            raise BadRecord("the shard was truncated")
        if room is None:
            return verified_record(key, place.digest, self.disk.read_at(shard.fd, place.length, place.offset))
        first, second = room(place.length)
        self.disk.fill(shard.fd, [buffer for buffer in (first, second) if buffer], place.offset)
        return verified_record(key, place.digest, first.toreadonly(), second.toreadonly())

    def _locate(self, keys: Sequence[bytes], layer: int) -> list[list[RecordPlace]]:
        column, places = key_column(keys), list[list[RecordPlace]]([] for _ in keys)
        names, (asked, rows) = self.ask(lambda snapshot: (snapshot.names, snapshot.find(column)))
        columns = (rows[name].tolist() for name in ("shard", "offset", "length", "digest"))
        for position, shard, offset, length, digest in zip(asked.tolist(), *columns, strict=True):
            place = RecordPlace(names[shard], offset, length, digest, layer)
            if place not in self.damaged:
                places[position].append(place)
        return places


class Store:
    """Records of one kind, in its own folder and in other layers that are only read.

    A record is looked up in each layer only if no layer before has it. A layer that goes away counts as empty: it may
    be on a disk that others purge, or unmount. Writing, indexing and counting concern the own folder alone.
    """

    def __init__(self, layers: Sequence[Layer], own_layer: int, prepare: Callable[[], None]) -> None:
        self._layers, self.own_layer, self._prepare = layers, own_layer, prepare
        self.own = layers[own_layer]
        self.disk, self.layout = self.own.disk, self.own.layout
        self._reasons: dict[bytes, tuple[Path, str]] = {}  # key → shard, fault of its record there
        self._may_blame_index = True  # where a record is not found: once

    def __contains__(self, key: bytes) -> bool:
        return not self.missing([key])

    @property
    def kind(self) -> str:
        return self.layout.kind

    def writer(
        self, *, shard_bytes: int = DEFAULT_SHARD_BYTES, header_bytes: int = DEFAULT_HEADER_BYTES
    ) -> StoreWriter:
        """Return a writer, for a `with` block."""
        self._prepare()
        return StoreWriter(self.own, shard_bytes, header_bytes)

    # Looking up, in all layers

    def locate(self, keys: Sequence[bytes], first_layer: int = 0) -> list[list[RecordPlace]]:
        """Return the places of each key's copies, in the first layer that has any."""
        places_by_key: list[list[RecordPlace]] = [[] for _ in keys]
        for number, layer in enumerate(self._layers[first_layer:], first_layer):
            absent = [at for at, places in enumerate(places_by_key) if not places]
            with self._may_be_away(layer):
                located = layer.locate([keys[at] for at in absent], number) if absent else ()
                for at, places in zip(absent, located, strict=True):
                    places_by_key[at] = places
        return places_by_key

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys that no layer has, in order."""
        return [key for key, places in zip(keys, self.locate(keys), strict=True) if not places]

    def keys(self) -> Iterator[bytes]:
        """Yield every key of any layer once, sorted."""
        return (key for key, _ in groupby(merge(*map(self._keys_of, self._layers))))

    # Reading

    def get(self, key: bytes) -> Record:
        """Return the record, its bytes verified; of several copies, the first that is whole."""
        return self.get_at(key, self.locate([key])[0])

    def get_at(self, key: bytes, places: Sequence[RecordPlace], room: Room | None = None) -> Record:
        """Return the record as `get` does, trying first the places that `locate` returned.

        `room` returns memory for a number of bytes, in two buffers: the record's bytes are read into it, and its arrays
        are views of it. Until this returns, that memory may hold a damaged copy.
        """
        if record := self._first_whole(key, places, room):
            return record
        if (now := self.locate([key])[0]) != places and (record := self._first_whole(key, now, room)):
            return record  # another key made the store look again
        self.refresh()  # the snapshot may be old: shards were purged or written since
        record = self._first_whole(key, self.locate([key])[0], room)
        if record is None and self._may_blame_index:
            self._may_blame_index = False
            self.refresh(believe_index=False)
            record = self._first_whole(key, self.locate([key])[0], room)
            self.own.distrusts_index = record is not None
            self.own.forget()
        if record is None:
            raise self._noted(self._missing_error(key))
        return record

    def read(self, keys: Iterable[bytes]) -> Iterator[Record]:
        """Yield the records in the order asked, reading a few ahead."""
        located = (zip(batch, self.locate(batch), strict=True) for batch in in_chunks(keys, _LOCATE_BATCH))
        for _, record in self._read_located(chain.from_iterable(located)):
            if not isinstance(record, Record):
                raise record
            yield record

    def read_by_place(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Record | Failure]]:
        """Yield each key with its record, or why it cannot be read, in the order in which the records lie on disk."""
        located = zip(keys, self.locate(keys), strict=True)
        return self._read_located(
            sorted(located, key=lambda one: (one[1][0].layer, *one[1][0][:2]) if one[1] else (-1, "", 0))
        )

    def has_whole(self, key: bytes) -> bool:
        """Return whether a record can be read, by reading it."""
        with suppress(CacheDamaged, RecordMissing):
            return self.get(key) is not None
        return False

    def verify(self, keys: Sequence[bytes], limit_bytes: int = sys.maxsize) -> tuple[Mask, int]:
        """Return a mask of the keys that any layer has whole, and how many bytes were read to know that.

        Up to the limit records are read, shard by shard in long stretches, and not parsed; beyond, they count as whole.
        """
        column, whole, read_bytes = key_column(keys), np.zeros(len(keys), bool), 0
        left = np.arange(len(keys))
        for layer in self._layers:
            with self._may_be_away(layer):
                asked, rows, names = layer.first_copies(column[left])
                is_read = read_bytes + np.cumsum(rows["length"]) - rows["length"] < limit_bytes
                whole[left[asked]] = True
                whole[left[asked[is_read]]] = layer.whole_copies(rows[is_read], names)
                read_bytes += int(rows["length"][is_read].sum())
                left = np.delete(left, asked)
        lost = np.flatnonzero(~whole).tolist()  # there may be another copy; else it is damaged
        for at, places in zip(lost, self.locate([keys[at] for at in lost]), strict=True):
            whole[at] = bool(places) and self.has_whole(keys[at])
        return whole, read_bytes

    def whole_at(self, key: bytes, place: RecordPlace, room: Room | None = None) -> Record | None:
        """Return the copy of a record at a place, or None if it is damaged; that copy is then never located again."""
        layer = self._layers[place.layer]
        try:
            return layer.read_place(key, place, room)
        except (BadRecord, OSError) as error:
            if getattr(error, "errno", None) not in GONE:
                reason = getattr(error, "strerror", None) or str(error)
                self._reasons.setdefault(key, (layer.layout.shard(place.shard), reason))
                layer.damaged.add(place)
        return None

    def has_whole_elsewhere(self, key: bytes, shards: Container[str]) -> bool:
        """Return whether another layer, or a shard other than these, has an intact copy of a record, by reading it."""
        copies = (p for p in self._copies(key) if p.shard not in shards or self._layers[p.layer] is not self.own)
        return any(self.whole_at(key, place) for place in copies)

    def doubted(self) -> set[str]:
        """Return the shards in which a read found damage, as a repair has not yet looked at them."""
        with suppress(OSError):
            return set(self.disk.list_folder(self.layout.doubted))
        return set()

    # The own folder

    def refresh(self, *, believe_index: bool = True) -> None:
        """Read the folder again; those of the other layers on their next look-up."""
        self.forget()
        self.own.refresh(believe_index=believe_index)

    def forget(self, gone: Collection[str] = ()) -> None:
        """Read all folders again on the next look-up, and drop the tables of shards that are gone."""
        for layer in self._layers:
            layer.forget(gone if layer is self.own else ())

    def ask(self, question: Callable[[StoreSnapshot], T]) -> T:
        """Return `question` of a snapshot of the store; called again, with a new snapshot, if the index fails."""
        return self.own.ask(question)

    def stat(self) -> StoreStat:
        """Return what the store holds, from the index and the tables, without reading records."""
        return self.tally().stat

    def tally(self, tags: Sequence[bytes] = (), wanted: KeyColumn = NO_KEYS) -> StoreTally:
        """Count all records and those of each tag, and find which `wanted` keys are missing; no record is read."""
        return self.ask(lambda snapshot: count_records(self.kind, snapshot, tags, wanted))

    def is_indexed(self) -> bool:
        return self.ask(lambda snapshot: snapshot.index_state is IndexState.CURRENT)

    def write_index(self, without: Collection[str] = (), *, far_behind: bool = False) -> None:
        """Bring the index up to date; several processes may do so at once, and the last one's index stays.

        Shards that are about to be removed can be left out: until then they are read by their own tables. `far_behind`
        writes it only if it lacks many records, whose rows are in the memory of every process that has the store open.
        """
        if far_behind:
            held, lacking = self.ask(lambda snapshot: snapshot.counts)
            if lacking <= max(_UNINDEXED_RECORDS, held * _UNINDEXED_SHARE):
                return
        self.refresh()
        self._prepare()
        self.ask(lambda snapshot: write_index(self.disk, self.layout, *snapshot.to_index(frozenset(without))))
        self.own.tables = {name: table for name, table in self.own.tables.items() if name in without}
        self.own.distrusts_index = False
        self.forget()
        if self.own.refresh().names_gone:  # another process has removed a shard while this one wrote the index
            self.write_index(without)

    def _keys_of(self, layer: Layer) -> Iterator[bytes]:
        with self._may_be_away(layer):
            yield from layer.keys()

    def _copies(self, key: bytes, layer: int = 0) -> Iterator[RecordPlace]:
        """Yield the places of a record's copies, layer by layer."""
        while places := self.locate([key], layer)[0]:
            yield from places
            layer = places[-1].layer + 1

    def _first_whole(self, key: bytes, places: Sequence[RecordPlace], room: Room | None = None) -> Record | None:
        """Return the first intact copy at these places, else in the layers after them."""
        others = self._copies(key, places[-1].layer + 1) if places else ()
        return next((record for place in chain(places, others) if (record := self.whole_at(key, place, room))), None)

    def _read_located(
        self, located: Iterable[tuple[bytes, Sequence[RecordPlace]]]
    ) -> Iterator[tuple[bytes, Record | Failure]]:
        with ThreadPoolExecutor(_READ_THREADS) as pool:
            ahead: deque[Future[list[tuple[bytes, Record | Failure]]]] = deque()
            for chunk in _chunks(located):
                ahead.append(pool.submit(self._read_chunk, chunk))
                if len(ahead) == _READ_AHEAD:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()

    def _read_chunk(self, chunk: Iterable[tuple[bytes, Sequence[RecordPlace]]]) -> list[tuple[bytes, Record | Failure]]:
        records: list[tuple[bytes, Record | Failure]] = []
        for key, places in chunk:
            try:
                records.append((key, self.get_at(key, places)))
            except (CacheDamaged, RecordMissing) as error:
                records.append((key, error))
        return records

    def _missing_error(self, key: bytes) -> Failure:
        """Return the error for a record without an intact copy."""
        if key in self._reasons:
            shard, reason = self._reasons[key]
            remedy = Command.submit("all", then=f"   ({ONLY_MISSING})")
            return CacheDamaged(f"record {key.hex()}: {reason}", where=str(shard), remedy=remedy)
        what, where = f"record {key.hex()} is not in the cache", str(self.layout.folder)
        return RecordMissing(what, where=where, remedy=SUBMIT_AGAIN)

    def _noted(self, error: Failure) -> Failure:
        """Mark the shard of a damaged record for verification (best effort)."""
        note = self.layout.doubted / Path(error.where).name
        if isinstance(error, CacheDamaged) and not self.disk.exists(note):
            with suppress(CacheUnusable, CacheFull, JobFailed):
                self._prepare()
                publish_file(self.disk, note, f"{error.what}\n".encode())
        return error

    @contextmanager
    def _may_be_away(self, layer: Layer) -> Iterator[None]:
        """Treat a layer that cannot be read as empty, unless it is the own folder."""
        try:
            yield
        except (CacheUnusable, OSError) as error:
            if layer is self.own:
                raise
            layer.forget()
            if not layer.is_away:
                layer.is_away = True
                log.warning("%s cannot be read and counts as empty: %s", layer.layout.folder, error)


class WholeRecords:
    """Reads every byte of what a store has of some keys, up to a limit: a damaged copy counts as missing.

    What is `named`, or in a shard in which a read found damage, is read beyond the limit, too.
    """

    def __init__(self, store: Store, limit_bytes: int = sys.maxsize, named: Container[bytes] = ()) -> None:
        self._store, self._left_bytes, self._named = store, limit_bytes, named

    def mask(self, keys: Sequence[bytes]) -> Mask:
        """Return a mask of the records that are there, reading as much as `metas` does; none if a shard is suspect."""
        if self._store.doubted():
            return np.zeros(len(keys), bool)
        whole, read_bytes = self._store.verify(keys, self._left_bytes)
        self._left_bytes -= read_bytes
        return whole

    def metas(self, keys: Sequence[bytes]) -> dict[bytes, Mapping[str, Any]]:
        """Return the metadata of each record that is there, by key; empty beyond the limit."""
        metas = dict.fromkeys(keys, _UNREAD)
        for key in self._store.missing(keys):
            metas.pop(key, None)
        unread = dict.fromkeys(metas)
        if self._left_bytes > 0:
            for key, record in self._store.read_by_place(list(metas)):
                del unread[key]
                self._take(metas, key, record)
                if self._left_bytes <= 0:
                    break
        for key, record in self._store.read_by_place(self._in_doubt(list(unread))):
            self._take(metas, key, record)
        return metas

    def _take(self, metas: dict[bytes, Mapping[str, Any]], key: bytes, record: Record | Failure) -> None:
        if isinstance(record, Record):
            metas[key] = record.meta
            self._left_bytes -= sum(array.nbytes for array in record.arrays.values())
        else:
            log.warning("%s: %s: rebuilt", record.where, record.what)
            del metas[key]

    def _in_doubt(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys of records that a read may have found damaged."""
        doubted = self._store.doubted() if keys else set()
        places = self._store.locate(keys) if doubted else [[] for _ in keys]
        return [
            key
            for key, copies in zip(keys, places, strict=True)
            if key in self._named or any(place.shard in doubted for place in copies)
        ]


class StoreWriter:
    """Takes records and publishes them in shards; a record is safe once `flush` has returned its key.

    Leaving the `with` block publishes too, also on an exception, so that finished work is kept. Any number of writers
    in any number of processes may write at once; each has files of its own.
    """

    def __init__(self, layer: Layer, shard_bytes: int, header_bytes: int) -> None:
        self._layer, self._shard_bytes, self._header_bytes = layer, shard_bytes, header_bytes
        self._shard: ShardWriter | None = None
        self._safe = bytearray()  # keys, one after the other: half the memory of a list
        self._waiting, self._flushed_s = 0, time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether to flush: a minute has passed since the last time, or many small records were added."""
        return self._waiting >= FLUSH_EVERY_RECORDS or time.monotonic() - self._flushed_s > FLUSH_EVERY_S

    def __contains__(self, key: bytes) -> bool:
        """Return whether a record was added to the open shard, so that it may not be found in the store yet."""
        return self._shard is not None and self._shard.open and key in self._shard

    def put(
        self,
        key: bytes,
        arrays: Mapping[str, Array],
        meta: Mapping[str, Any] | None = None,
        *,
        bfloat16: Collection[str] = (),
    ) -> None:
        """Add a record, not yet safe. A key that the open shard holds is the same record and not kept twice.

        `bfloat16` names the uint16 arrays whose bits are bfloat16, so that other readers see them as such.
        """
        record, shard = encode_record(key, arrays, meta or {}, bfloat16), self._open_shard()
        self._waiting += 1
        if key not in shard and not shard.add(record, self._shard_bytes):
            self._publish(shard)
            self._open_shard().add(record, self._shard_bytes)

    def flush(self) -> list[bytes]:
        """Publish all records, and return the keys that became safe since the last flush."""
        if self._shard and self._shard.open and self._shard.keys:
            self._publish(self._shard)
        safe, self._safe = self._safe, bytearray()
        self._waiting, self._flushed_s = 0, time.monotonic()
        return [bytes(safe[at : at + KEY_BYTES]) for at in range(0, len(safe), KEY_BYTES)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        if self._shard:
            self._shard.discard()

    def _open_shard(self) -> ShardWriter:
        if self._shard is None or not self._shard.open:
            self._shard = ShardWriter(self._layer.disk, self._layer.layout.partials, self._header_bytes)
        return self._shard

    def _publish(self, shard: ShardWriter) -> None:
        table = shard.publish(self._layer.layout.shards)
        self._safe += b"".join(shard.keys)
        self._layer.forget()
        self._layer.tables[table.name] = table  # a directory listing may not show it yet


class _OpenShard:
    """A shard open for reading; it closes with its last reference, so no reader ever holds a closed file."""

    def __init__(self, disk: Disk, layout: KindLayout, name: str) -> None:
        self._disk = disk
        self.fd = -1
        self.fd = disk.open_read(layout.shard(name))
        self.size_bytes = disk.size_of_open(self.fd)

    def __del__(self) -> None:
        if self.fd >= 0:
            self._disk.close(self.fd)


def _chunks(
    located: Iterable[tuple[bytes, Sequence[RecordPlace]]],
) -> Iterator[list[tuple[bytes, Sequence[RecordPlace]]]]:
    """Yield what one thread reads at once: some tens of small records, or a large one."""
    chunk: list[tuple[bytes, Sequence[RecordPlace]]] = []
    size_bytes = 0
    for key, places in located:
        chunk.append((key, places))
        size_bytes += places[0].length if places else 0
        if len(chunk) == _CHUNK_RECORDS or size_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, size_bytes = [], 0
    if chunk:
        yield chunk


def in_chunks(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of at most `size` values."""
    iterator = iter(values)
    while chunk := list(islice(iterator, size)):
        yield chunk
