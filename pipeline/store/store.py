"""The records of one kind: found by key, verified on every read."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import compress, islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import xxhash

from pipeline.errors import SUBMIT_AGAIN, CacheDamaged, CacheUnusable, PipelineError, RecordMissing
from pipeline.store.index import IndexDamaged, write_index
from pipeline.store.layout import written_at
from pipeline.store.record import BadRecord, Record, decode
from pipeline.store.shard import DEFAULT_HEADER_BYTES, ShardTable, ShardVerdict, key_pairs, row_keys, verify_shard
from pipeline.store.snapshot import GONE, IndexState, Snapshot, shard_names
from pipeline.store.writer import DEFAULT_SHARD_BYTES, StoreWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import datetime

    import numpy.typing as npt

    from pipeline.store.disk import Disk
    from pipeline.store.index import Integers, Rows
    from pipeline.store.layout import KindLayout

    Room = Callable[[int], tuple[memoryview, memoryview]]  # memory for so many bytes, in two stretches

_OPEN_SHARDS = 64
_READ_THREADS = 4
_READ_AHEAD = 2 * _READ_THREADS  # records in memory while `read` waits for its caller
_LOCATE_BATCH = 256
_KEYS_BATCH = 65_536
_LOOK_AGAIN_S = 0.5

_Answer = TypeVar("_Answer")


class Place(NamedTuple):
    """Where a copy of a record is, and the digest that its bytes must have."""

    shard: str
    offset: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class StoreStat:
    """What a store holds."""

    kind: str
    records: int
    bytes: int
    shards: int
    unreadable: tuple[tuple[str, str], ...]  # shard name and reason
    index: IndexState
    oldest: datetime | None
    newest: datetime | None


class Store:
    """Records of one kind; it looks at the disk when it is first asked, after its own writes, and on `refresh`."""

    def __init__(self, disk: Disk, layout: KindLayout, prepare: Callable[[], None]) -> None:
        self._disk, self._layout, self._prepare = disk, layout, prepare
        self._tables: dict[str, ShardTable] = {}
        self._taken: Snapshot | None = None
        self._struck: dict[tuple[str, int], tuple[bytes, str]] = {}  # (shard, offset) found damaged: key, reason
        self._open = lru_cache(_OPEN_SHARDS)(partial(_OpenShard, disk, layout))

    def __contains__(self, key: bytes) -> bool:
        return not self.missing([key])

    @property
    def kind(self) -> str:
        """What kind of records these are."""
        return self._layout.kind

    def writer(
        self, *, shard_bytes: int = DEFAULT_SHARD_BYTES, header_bytes: int = DEFAULT_HEADER_BYTES
    ) -> StoreWriter:
        """Return a writer, for a `with` block."""
        self._prepare()
        return StoreWriter(self._disk, self._layout, self._adopt, shard_bytes=shard_bytes, header_bytes=header_bytes)

    def get(self, key: bytes) -> Record:
        """Return the record, its bytes verified; of several copies, the first that is whole."""
        return self.get_at(key, self.locate([key])[0])

    def get_at(self, key: bytes, places: Sequence[Place], room: Room | None = None) -> Record:
        """Return the record as `get` does, looking first where `locate` saw it.

        `room` gives memory for so many bytes, in two stretches: the record's bytes are read into it, and its arrays are
        views of it. Until this returns, what is in that memory means nothing.
        """
        record = self._first_whole(key, places, room)
        if record is None:  # what was known may be old: a purge, or a copy made since
            self.refresh()
            record = self._first_whole(key, self.locate([key])[0], room)
        if record is None:
            raise self._why_not(key)
        return record

    def read(self, keys: Iterable[bytes]) -> Iterator[Record]:
        """Yield the records in the order asked, reading a few ahead."""
        asked = iter(keys)
        batches = iter(lambda: list(islice(asked, _LOCATE_BATCH)), [])
        places = ((key, copies) for batch in batches for key, copies in zip(batch, self.locate(batch), strict=True))
        with ThreadPoolExecutor(_READ_THREADS) as pool:
            ahead: deque[Future[Record]] = deque()
            for key, copies in places:
                ahead.append(pool.submit(self.get_at, key, copies))
                if len(ahead) == _READ_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def has_whole(self, key: bytes) -> bool:
        """Say whether a record can be read, by reading it."""
        try:
            self.get(key)
        except (CacheDamaged, RecordMissing):
            return False
        return True

    def missing(self, keys: Sequence[bytes], *, patience_s: float = 0.0) -> list[bytes]:
        """Return the keys that are not there, in order, looking again for fresh files while patience lasts."""
        absent = list(compress(keys, ~self._present(keys)))
        deadline = self._disk.now() + patience_s
        while absent and self._disk.now() < deadline:
            self._disk.wait(min(_LOOK_AGAIN_S, patience_s))
            self.refresh()
            absent = list(compress(absent, ~self._present(absent)))
        return absent

    def locate(self, keys: Sequence[bytes]) -> list[list[Place]]:
        """Return for each key where its copies are."""
        found: list[list[Place]] = [[] for _ in keys]
        snapshot, asked, rows = self._find(keys)
        columns = (rows[name].tolist() for name in ("shard", "offset", "length", "digest"))
        for position, shard, offset, length, digest in zip(asked.tolist(), *columns, strict=True):
            found[position].append(Place(snapshot.names[shard], offset, length, digest))
        return found

    def keys(self) -> Iterator[bytes]:
        """Yield every key once, sorted."""
        _, rows = self._ask(Snapshot.rows)
        for start in range(0, len(rows), _KEYS_BATCH):
            part = rows[max(0, start - 1) : start + _KEYS_BATCH]
            yield from compress(row_keys(part), _first_of_key(part, at_start=start == 0))

    def stat(self) -> StoreStat:
        """Say what the store holds, from the index and the tables, without reading records."""
        snapshot, rows = self._ask(Snapshot.rows)
        good = snapshot.good_shards()
        times = sorted(filter(None, (written_at(snapshot.names[shard]) for shard in good)))
        return StoreStat(
            kind=self.kind,
            records=int(_first_of_key(rows, at_start=True).sum()),
            bytes=int(snapshot.sizes[good].sum()),
            shards=len(good),
            unreadable=tuple(sorted(snapshot.unreadable.items())),
            index=snapshot.index_state,
            oldest=times[0] if times else None,
            newest=times[-1] if times else None,
        )

    def tagged(self, tag: bytes) -> tuple[int, int]:
        """Return how many records there are whose keys begin with a tag, and their bytes, without reading records."""
        _, rows = self._ask(Snapshot.rows)
        first, last = (np.uint64(int.from_bytes(tag.ljust(8, fill), "big")) for fill in (b"\0", b"\xff"))
        mine = rows[rows["hi"].searchsorted(first) : rows["hi"].searchsorted(last, "right")]
        once = _first_of_key(mine, at_start=True)
        return int(once.sum()), int(mine["length"][once].sum())

    def verify(self) -> Iterator[ShardVerdict]:
        """Read every byte of every shard and judge it."""
        for name in shard_names(self._disk, self._layout):
            try:
                yield verify_shard(self._disk, self._layout.shard(name))
            except OSError as error:
                yield ShardVerdict(name, 0, error.strerror or str(error), (), ())

    def refresh(self) -> None:
        """Look at the disk anew."""
        self._open.cache_clear()
        self._take(believe_index=True)

    def write_index(self) -> None:
        """Bring the index up to date; processes that do so at once each leave a right one, and the last one's stays."""
        self.refresh()
        self._swap_index()

    def rebuild_index(self) -> None:
        """Make the index from the shards alone."""
        self._take(believe_index=False)
        self._swap_index()

    def _swap_index(self) -> None:
        self._prepare()
        snapshot, rows = self._ask(Snapshot.rows)
        good = snapshot.good_shards()
        number = np.zeros(len(snapshot.names), np.uint32)
        number[good] = np.arange(len(good))
        rows["shard"] = number[rows["shard"]]
        names = [snapshot.names[shard] for shard in good]
        write_index(self._disk, self._layout, names, snapshot.sizes[good], rows)
        self._tables.clear()
        self.refresh()

    def _adopt(self, table: ShardTable) -> None:
        """Know a shard that this process published, whatever the listing shows."""
        self._tables[table.name] = table
        self._taken = None

    def _take(self, *, believe_index: bool) -> Snapshot:
        try:
            taken = Snapshot(self._disk, self._layout, self._tables, believe_index=believe_index)
        except OSError as error:
            what = f"the cache cannot be read: {error.strerror or error}"
            raise CacheUnusable(what, where=str(self._layout.shards), remedy=f"ls -ld {self._layout.shards}") from error
        self._tables = dict(taken.tables)
        self._taken = taken
        return taken

    def _ask(self, question: Callable[[Snapshot], _Answer]) -> tuple[Snapshot, _Answer]:
        """Ask the snapshot; ask a new one where its index fails: swapped by another host at first, then damaged."""
        snapshot = self._taken or self._take(believe_index=True)
        for believe_index in (True, False):
            try:
                return snapshot, question(snapshot)
            except (IndexDamaged, OSError):
                snapshot = self._take(believe_index=believe_index)
        return snapshot, question(snapshot)

    def _find(self, keys: Sequence[bytes]) -> tuple[Snapshot, Integers, Rows]:
        pairs = key_pairs(keys)
        snapshot, (asked, rows) = self._ask(lambda snapshot: snapshot.find(pairs))
        for shard, offset in list(self._struck):  # other threads may add to it
            if shard in snapshot.names:
                kept = (rows["shard"] != snapshot.names.index(shard)) | (rows["offset"] != offset)
                asked, rows = asked[kept], rows[kept]
        return snapshot, asked, rows

    def _present(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        present = np.zeros(len(keys), bool)
        present[self._find(keys)[1]] = True
        return present

    def _first_whole(self, key: bytes, places: Sequence[Place], room: Room | None = None) -> Record | None:
        for place in places:
            try:
                return self._read_place(key, place, room)
            except BadRecord as error:
                self._struck[place.shard, place.offset] = key, str(error)
            except OSError as error:
                if error.errno not in GONE:
                    self._struck[place.shard, place.offset] = key, error.strerror or str(error)
        return None

    def _read_place(self, key: bytes, place: Place, room: Room | None) -> Record:
        shard = self._open(place.shard)
        if place.offset + place.length > shard.size_bytes:
            raise BadRecord("the shard is shorter than it was")
        blob, rest = self._read_bytes(shard.fd, place, room)
        if _digest(blob, rest) != place.digest:
            raise BadRecord("the bytes are not those that were written")
        record = decode(blob, rest)
        if record.key != key:
            raise BadRecord("another record is in its place")
        return record

    def _read_bytes(self, fd: int, place: Place, room: Room | None) -> tuple[bytes | memoryview, bytes | memoryview]:
        if room is None:
            return self._disk.read_at(fd, place.length, place.offset), b""
        blob, rest = room(place.length)
        self._disk.fill(fd, [some for some in (blob, rest) if some], place.offset)
        return blob.toreadonly(), rest.toreadonly()

    def _why_not(self, key: bytes) -> PipelineError:
        for (shard, _), (struck, reason) in list(self._struck.items()):
            if struck == key:
                where = str(self._layout.shard(shard))
                return CacheDamaged(f"record {key.hex()}: {reason}", where=where, remedy=SUBMIT_AGAIN)
        what, where = f"record {key.hex()} is not in the cache", str(self._layout.folder)
        return RecordMissing(what, where=where, remedy=SUBMIT_AGAIN)


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


def _digest(blob: bytes | memoryview, rest: bytes | memoryview) -> bytes:
    """Return the digest of bytes that lie in two stretches of memory."""
    if not rest:
        return xxhash.xxh3_128_digest(blob)
    hasher = xxhash.xxh3_128(blob)
    hasher.update(rest)
    return hasher.digest()


def _first_of_key(rows: Rows, *, at_start: bool) -> npt.NDArray[np.bool_]:
    """Mark each sorted row whose key differs from the row before; the first counts where `at_start` says so."""
    first = np.full(len(rows), at_start)
    first[1:] = (rows["hi"][1:] != rows["hi"][:-1]) | (rows["lo"][1:] != rows["lo"][:-1])
    return first
