"""The records of one kind: found by key, verified on every read."""

from __future__ import annotations

import logging
import sys
from bisect import bisect_right
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from itertools import compress, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import xxhash

from pipeline.command_line import Command
from pipeline.errors import SUBMIT_AGAIN, CacheDamaged, CacheUnusable, JobFailed, RecordMissing
from pipeline.store.format.disk import publish_file
from pipeline.store.format.record import BadRecord, Record, descriptor_bytes, is_descriptor_of
from pipeline.store.format.shard import DEFAULT_HEADER_BYTES, ShardTable, key_pairs, row_keys, verified_record
from pipeline.store.shard_index import IndexDamaged, write_index
from pipeline.store.snapshot import (
    GONE,
    NO_KEYS,
    IndexState,
    StoreSnapshot,
    StoreStat,
    StoreTally,
    count_records,
    first_of_key,
)
from pipeline.store.writer import DEFAULT_SHARD_BYTES, StoreWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from pipeline.store.format.cache_layout import KindLayout
    from pipeline.store.format.disk import Disk
    from pipeline.store.shard_index import Integers, Rows

    Room = Callable[[int], tuple[memoryview, memoryview]]  # memory for so many bytes, in two stretches

ONLY_MISSING = "processes only missing items; pipeline cache repair sets damaged files aside"
log = logging.getLogger(__name__)

_OPEN_SHARDS = 64
_READ_THREADS = 4
_READ_AHEAD = 2 * _READ_THREADS  # records in memory while `read` waits for its caller
_LOCATE_BATCH = 256
_KEYS_BATCH = 65_536
_LOOK_AGAIN_S = 0.5
_STRETCH_BYTES = 1 << 22
_UNINDEXED_RECORDS, _UNINDEXED_SHARE = 16_384, 0.05  # a few MB; that an index is written ever more rarely as it grows

_UNREAD: Mapping[str, Any] = {}
_Answer = TypeVar("_Answer")


class RecordPlace(NamedTuple):
    """The position of one copy of a record, and the digest that its bytes must have."""

    shard: str
    offset: int
    length: int
    digest: bytes
    layer: int = 0  # in which of several stores that are looked through one after the other


class Store:
    """Records of one kind; it reads the folder on the first look-up, after its own writes, and on `refresh`."""

    def __init__(self, disk: Disk, layout: KindLayout, prepare: Callable[[], None]) -> None:
        self.disk, self.layout, self._prepare = disk, layout, prepare
        self._tables: dict[str, ShardTable] = {}
        self._taken: StoreSnapshot | None = None
        self._struck: dict[str, set[int]] = {}  # shard → offsets of what was found damaged in it
        self._reasons: dict[bytes, tuple[str, str]] = {}  # key → shard, what is wrong with the record there
        self._open = lru_cache(_OPEN_SHARDS)(partial(_OpenShard, disk, layout))

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
        return StoreWriter(self.disk, self.layout, self._adopt, shard_bytes=shard_bytes, header_bytes=header_bytes)

    def get(self, key: bytes) -> Record:
        """Return the record, its bytes verified; of several copies, the first that is whole."""
        return self.get_at(key, self.locate([key])[0])

    def get_at(self, key: bytes, places: Sequence[RecordPlace], room: Room | None = None) -> Record:
        """Return the record as `get` does, trying first the places that `locate` returned.

        `room` returns memory for a number of bytes, in two buffers: the record's bytes are read into it, and its arrays
        are views of it. Until this returns, that memory may hold a damaged copy.
        """
        record = self._first_whole(key, places, room)
        if record is None and (now := self.locate([key])[0]) != places:  # for another key it was looked again
            record = self._first_whole(key, now, room)
        if record is None:  # what was known may be old: a purge, or a copy made since
            self.refresh()
            record = self._first_whole(key, self.locate([key])[0], room)
        if record is None:
            raise self._noted(self.why_not(key))
        return record

    def read(self, keys: Iterable[bytes]) -> Iterator[Record]:
        """Yield the records in the order asked, reading a few ahead."""
        asked = iter(keys)
        batches = iter(lambda: list(islice(asked, _LOCATE_BATCH)), [])
        return self._read_located(
            (key, copies) for batch in batches for key, copies in zip(batch, self.locate(batch), strict=True)
        )

    def read_by_place(self, keys: Sequence[bytes]) -> Iterator[Record]:
        """Yield the records in the order in which they lie on disk, so that each shard is opened once."""
        located = zip(keys, self.locate(keys), strict=True)
        return self._read_located(sorted(located, key=lambda one: one[1][0][:2] if one[1] else ("", 0)))

    def _read_located(self, places: Iterable[tuple[bytes, Sequence[RecordPlace]]]) -> Iterator[Record]:
        with ThreadPoolExecutor(_READ_THREADS) as pool:
            ahead: deque[Future[Record]] = deque()
            for key, copies in places:
                ahead.append(pool.submit(self.get_at, key, copies))
                if len(ahead) == _READ_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def doubted(self) -> set[str]:
        """Return the shards in which a read found damage, as a repair has not yet looked at them."""
        with suppress(OSError):
            return set(self.disk.list_folder(self.layout.doubted))
        return set()

    def has_whole(self, key: bytes) -> bool:
        """Say whether a record can be read, by reading it."""
        try:
            self.get(key)
        except (CacheDamaged, RecordMissing):
            return False
        return True

    def is_whole_beside(self, key: bytes, shards: Container[str]) -> bool:
        """Say whether a shard other than these has an intact copy of a record, by reading it."""
        places = [place for place in self.locate([key])[0] if place.shard not in shards]
        return self._first_whole(key, places) is not None

    def missing(self, keys: Sequence[bytes], *, patience_s: float = 0.0) -> list[bytes]:
        """Return the keys that are not in the store, in order; look again for new files for up to `patience_s`."""
        absent = list(compress(keys, ~self.present(keys)))
        deadline = self.disk.now() + patience_s
        while absent and self.disk.now() < deadline:
            self.disk.wait(min(_LOOK_AGAIN_S, patience_s))
            self.refresh()
            absent = list(compress(absent, ~self.present(absent)))
        return absent

    def locate(self, keys: Sequence[bytes]) -> list[list[RecordPlace]]:
        """Return for each key where its copies are."""
        places: list[list[RecordPlace]] = [[] for _ in keys]
        snapshot, asked, rows = self._find(keys)
        columns = (rows[name].tolist() for name in ("shard", "offset", "length", "digest"))
        for position, shard, offset, length, digest in zip(asked.tolist(), *columns, strict=True):
            places[position].append(RecordPlace(snapshot.names[shard], offset, length, digest))
        return places

    def keys(self) -> Iterator[bytes]:
        """Yield every key once, sorted."""
        _, rows = self._ask(StoreSnapshot.rows)
        for start in range(0, len(rows), _KEYS_BATCH):
            part = rows[max(0, start - 1) : start + _KEYS_BATCH]
            yield from compress(row_keys(part), first_of_key(part, at_start=start == 0))

    def stat(self) -> StoreStat:
        """Return what the store holds, from the index and the tables, without reading records."""
        return self.tally().stat

    def tally(self, tags: Sequence[bytes] = (), wanted: Integers = NO_KEYS) -> StoreTally:
        """Count all records and those of each tag, and find which `wanted` keys are missing; no record is read."""
        return self.ask(lambda snapshot: count_records(self.kind, snapshot, tags, wanted))

    def ask(self, question: Callable[[StoreSnapshot], _Answer]) -> _Answer:
        """Return `question` of a snapshot of the store; called again, with a new snapshot, if the index fails."""
        return self._ask(question)[1]

    def refresh(self) -> None:
        """Look at the disk anew."""
        self._open.cache_clear()
        self._take(believe_index=True)

    def forget(self, gone: Collection[str] = ()) -> None:
        """Read the folder again on the next look-up, and drop the tables of shards that are gone."""
        self._open.cache_clear()
        for shard in gone:
            self._tables.pop(shard, None)
        self._taken = None

    def whole_at(self, key: bytes, place: RecordPlace, room: Room | None = None) -> Record | None:
        """Return the copy of a record at a place, or None if it is damaged; that copy is then never located again."""
        try:
            return self._read_place(key, place, room)
        except BadRecord as error:
            self._strike(key, place, str(error))
        except OSError as error:
            if error.errno not in GONE:
                self._strike(key, place, error.strerror or str(error))
        return None

    def present(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return a mask of the keys that are in the store."""
        present = np.zeros(len(keys), bool)
        present[self._find(keys)[1]] = True
        if not present.all() and self._taken and self._taken.outdated:  # shards went, and others have their records?
            self.refresh()
            present[self._find(keys)[1]] = True
        return present

    def whole(self, keys: Sequence[bytes], limit_bytes: int = sys.maxsize) -> tuple[npt.NDArray[np.bool_], int]:
        """Return a mask of the keys that are there and whole, and how many bytes were read to know that.

        Up to the limit records are read, shard by shard in long stretches, and not parsed.
        """
        snapshot, asked, rows = self._find(keys)
        asked, first = np.unique(asked, return_index=True)
        whole, rows = np.zeros(len(keys), bool), rows[first]
        whole[asked] = True
        read = np.flatnonzero(rows["length"].cumsum() - rows["length"] < limit_bytes)
        read = read[np.lexsort((rows["offset"][read], rows["shard"][read]))]
        for part in np.split(read, np.flatnonzero(np.diff(rows["shard"][read])) + 1):
            if len(part):
                asked_of = [keys[at] for at in asked[part].tolist()]
                whole[asked[part]] = self._whole_in(snapshot.names[rows["shard"][part[0]]], rows[part], asked_of)
        for at in asked[~whole[asked]].tolist():
            whole[at] = self.has_whole(keys[at])  # there may be another copy; else it is struck out
        return whole, int(rows["length"][read].sum())

    def _whole_in(self, name: str, rows: Rows, keys: Sequence[bytes]) -> list[bool]:
        """Say which rows of one shard, in file order, are the records of these keys as they were written."""
        offsets, ends = rows["offset"].tolist(), (rows["offset"] + rows["length"]).tolist()
        expected, whole, begin, data = rows["digest"].tolist(), list[bool](), 0, memoryview(b"")
        try:
            fd = self._open(name).fd
            for offset, end, digest, key in zip(offsets, ends, expected, keys, strict=True):
                if end > begin + len(data):
                    last = bisect_right(ends, max(end, offset + _STRETCH_BYTES)) - 1
                    begin, data = offset, memoryview(self.disk.read_at(fd, ends[last] - offset, offset))
                blob = data[offset - begin : end - begin]
                descriptor = blob[-descriptor_bytes(blob) :]
                whole.append(xxhash.xxh3_128_digest(blob) == digest and is_descriptor_of(key, descriptor))
        except OSError:  # what cannot be read so is looked at one by one
            pass
        return whole + [False] * (len(keys) - len(whole))

    def why_not(self, key: bytes) -> CacheDamaged | RecordMissing:
        """Return the error for a record of which no whole copy was found."""
        if key in self._reasons:
            shard, reason = self._reasons[key]
            where = str(self.layout.shard(shard))
            return CacheDamaged(
                f"record {key.hex()}: {reason}", where=where, remedy=Command.submit("all", then=f"   ({ONLY_MISSING})")
            )
        what, where = f"record {key.hex()} is not in the cache", str(self.layout.folder)
        return RecordMissing(what, where=where, remedy=SUBMIT_AGAIN)

    def write_index(self, without: Collection[str] = ()) -> None:
        """Bring the index up to date; several processes may do so at once, and the last one's index stays.

        Shards that are about to be removed can be left out: until then they are read by their own tables.
        """
        self.refresh()
        self._swap_index(without)

    def is_indexed(self) -> bool:
        return self.ask(lambda snapshot: snapshot.index_state is IndexState.CURRENT)

    def index_if_behind(self) -> None:
        """Bring the index up to date if it lacks many records.

        The rows of unindexed records are in the memory of every process that has the store open.
        """
        indexed, others = self.ask(StoreSnapshot.counts)
        if others > max(_UNINDEXED_RECORDS, indexed * _UNINDEXED_SHARE):
            self.write_index()

    def rebuild_index(self) -> None:
        """Make the index from the shards alone."""
        self._take(believe_index=False)
        self._swap_index()

    def _swap_index(self, without: Collection[str] = ()) -> None:
        """Publish a new index; it keeps the old one's rows of shards that cannot be read now."""
        self._prepare()
        doomed = frozenset(without)
        self._ask(lambda snapshot: self._publish_index(snapshot, doomed))
        self._tables = {name: table for name, table in self._tables.items() if name in doomed}
        self.refresh()

    def _publish_index(self, snapshot: StoreSnapshot, doomed: frozenset[str]) -> None:
        kept, count, rows = snapshot.to_index(doomed)
        names = [snapshot.names[shard] for shard in kept]
        write_index(self.disk, self.layout, names, snapshot.sizes[kept], rows, count)

    def _adopt(self, table: ShardTable) -> None:
        """Remember a shard that this process published: a directory listing may not show it yet."""
        self._tables[table.name] = table
        self._taken = None

    def _take(self, *, believe_index: bool) -> StoreSnapshot:
        taken = StoreSnapshot(self.disk, self.layout, self._tables, believe_index=believe_index)
        self._tables = dict(taken.tables)
        self._taken = taken
        return taken

    def _ask(self, question: Callable[[StoreSnapshot], _Answer]) -> tuple[StoreSnapshot, _Answer]:
        """Put a question to the snapshot; if its index fails, to one with a new index, then to one without any."""
        snapshot = self._taken or self._take(believe_index=True)
        for believe_index in (True, False):
            try:
                return snapshot, question(snapshot)
            except (IndexDamaged, OSError):
                snapshot = self._take(believe_index=believe_index)
        return snapshot, question(snapshot)

    def _find(self, keys: Sequence[bytes]) -> tuple[StoreSnapshot, Integers, Rows]:
        pairs = key_pairs(keys)
        snapshot, (asked, rows) = self._ask(lambda snapshot: snapshot.find(pairs))
        kept = self._not_struck(snapshot, rows)
        return snapshot, asked[kept], rows[kept]

    def _noted(self, error: CacheDamaged | RecordMissing) -> CacheDamaged | RecordMissing:
        """Have whoever looks next read what is in a damaged shard; where nothing can be written, nobody will know."""
        note = self.layout.doubted / Path(error.where).name
        if isinstance(error, CacheDamaged) and not self.disk.exists(note):
            with suppress(CacheUnusable, JobFailed):
                self._prepare()
                publish_file(self.disk, note, f"{error.what}\n".encode())
        return error

    def _strike(self, key: bytes, place: RecordPlace, reason: str) -> None:
        self._reasons.setdefault(key, (place.shard, reason))
        self._struck.setdefault(place.shard, set()).add(place.offset)

    def _not_struck(self, snapshot: StoreSnapshot, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows that no read has found damaged."""
        kept = np.ones(len(rows), bool)
        if self._struck:
            damaged = [shard for shard in np.unique(rows["shard"]).tolist() if snapshot.names[shard] in self._struck]
            for at in np.flatnonzero(np.isin(rows["shard"], damaged)).tolist():
                shard, offset = rows[["shard", "offset"]][at].item()
                kept[at] = offset not in self._struck[snapshot.names[shard]]
        return kept

    def _first_whole(self, key: bytes, places: Sequence[RecordPlace], room: Room | None = None) -> Record | None:
        return next((record for place in places if (record := self.whole_at(key, place, room))), None)

    def _read_place(self, key: bytes, place: RecordPlace, room: Room | None) -> Record:
        shard = self._open(place.shard)
        if place.offset + place.length > shard.size_bytes:
            raise BadRecord("the shard was truncated")
        blob, rest = self._read_bytes(shard.fd, place, room)
        return verified_record(key, place.digest, blob, rest)

    def _read_bytes(
        self, fd: int, place: RecordPlace, room: Room | None
    ) -> tuple[bytes | memoryview, bytes | memoryview]:
        if room is None:
            return self.disk.read_at(fd, place.length, place.offset), b""
        first, second = room(place.length)
        self.disk.fill(fd, [buffer for buffer in (first, second) if buffer], place.offset)
        return first.toreadonly(), second.toreadonly()


class WholeRecords:
    """Reads every byte of what a store has of some keys, up to a limit: a damaged copy counts as missing.

    What is `named`, or in a shard in which a read found damage, is read beyond the limit, too.
    """

    def __init__(self, store: Store, limit_bytes: int = sys.maxsize, named: Container[bytes] = ()) -> None:
        self._store, self._left_bytes, self._named = store, limit_bytes, named

    def have(self, keys: Iterable[bytes]) -> bool:
        """Say whether all records are there, by reading as much of them as `metas` would; in doubt they are not."""
        if self._store.doubted():
            return False
        asked = iter(keys)
        while batch := list(islice(asked, _KEYS_BATCH)):
            whole, read_bytes = self._store.whole(batch, self._left_bytes)
            if not whole.all():
                return False
            self._left_bytes -= read_bytes
        return True

    def metas(self, keys: Sequence[bytes]) -> dict[bytes, Mapping[str, Any]]:
        """Return the metadata of each record that is there, by key; empty beyond the limit."""
        while True:
            absent = set(self._store.missing(keys))
            there = [key for key in dict.fromkeys(keys) if key not in absent]
            try:
                return dict.fromkeys(there, _UNREAD) | self._read(there)
            except (CacheDamaged, RecordMissing) as error:  # the store has struck it out, and will not name it again
                log.warning("%s: %s: rebuilt", error.where, error.what)

    def _read(self, keys: Sequence[bytes]) -> dict[bytes, Mapping[str, Any]]:
        """Return the metadata of records by key, read while the limit lasts, and of those in doubt."""
        metas: dict[bytes, Mapping[str, Any]] = {}
        for record in self._store.read_by_place(keys if self._left_bytes > 0 else ()):
            metas[record.key] = record.meta
            self._left_bytes -= sum(array.nbytes for array in record.arrays.values())
            if self._left_bytes <= 0:
                break
        in_doubt = self._in_doubt([key for key in keys if key not in metas])
        return metas | {record.key: record.meta for record in self._store.read(in_doubt)}

    def _in_doubt(self, keys: Sequence[bytes]) -> Iterator[bytes]:
        """Yield the keys of records that somebody may have found damaged."""
        doubted = self._store.doubted() if keys else set()
        places = self._store.locate(keys) if doubted else [[] for _ in keys]
        for key, copies in zip(keys, places, strict=True):
            if key in self._named or any(place.shard in doubted for place in copies):
                yield key


class _OpenShard:
    """A shard open for reading; it closes when its last user lets go, so no reader ever holds a closed file."""

    def __init__(self, disk: Disk, layout: KindLayout, name: str) -> None:
        self._disk = disk
        self.fd = -1
        self.fd = disk.open_read(layout.shard(name))
        self.size_bytes = disk.size_of_open(self.fd)

    def __del__(self) -> None:
        if self.fd >= 0:
            self._disk.close(self.fd)
