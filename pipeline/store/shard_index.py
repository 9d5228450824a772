"""Which shard holds which key: the index file, and a snapshot of it with the shards that it does not name yet.

    rows sorted by key | sizes of the shards | the first key of each block of rows | names of the shards | trailer

No row has a checksum: its digest is compared with the record when that is read. So a damaged index costs a miss or a
retry, never a wrong byte. It can always be rebuilt from the shards.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from pipeline.command_line import quoted
from pipeline.errors import CacheDamaged, CacheUnusable
from pipeline.keys import KEY_BYTES
from pipeline.store.format.cache_layout import SHARD_SUFFIX, written_at
from pipeline.store.format.disk import Draft
from pipeline.store.format.shard import TABLE_ROW, ShardTable, read_table

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

    import numpy.typing as npt

    from pipeline.store.format.cache_layout import KindLayout
    from pipeline.store.format.disk import Disk

    Integers = npt.NDArray[Any]
    Rows = npt.NDArray[Any]
    Mask = npt.NDArray[np.bool_]
    KeyColumn = npt.NDArray[np.bytes_]  # sorted where it is `wanted` or `known`

INDEX_FORMAT = 2
ROW = np.dtype([*TABLE_ROW.descr, ("shard", "<i8")])
NO_ROWS, NO_KEYS = np.zeros(0, ROW), np.zeros(0, f"S{KEY_BYTES}")
GONE = {errno.ENOENT, errno.ESTALE}
WENT = "purged or deleted"
_BLOCK_ROWS = 32
_PIECE_ROWS = 4096
_BATCH_KEYS = 4096  # each may be in a block of its own
_TRAILER = struct.Struct("<8sIIQQ")  # and 16 bytes, the digest of the directory and these
_TRAILER_BYTES = _TRAILER.size + 16
_MAGIC = b"PIPEINDX"
_PRIMES = np.array([0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
                    0xD6E8FEB86659FD93], np.uint64)  # fmt: skip
_UNCHECKED, _GOOD, _BAD, _GONE = range(4)


class IndexDamaged(Exception):
    """The index file is damaged; the shards themselves are not affected."""


class IndexState(StrEnum):
    """How far the index can be used."""

    NONE = "none"
    DAMAGED = "damaged"
    BEHIND = "behind"  # shards were published since; they are read by their tables
    CURRENT = "current"


class ShardIndex:
    """An open index file; its directory is in memory, its rows are read as they are needed."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._fd = disk.open_read(path)
        try:
            self._read_directory()
        except BaseException:
            self.__del__()
            raise

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            self._disk.close(fd)

    def __len__(self) -> int:
        return int(self._count)

    def find(self, keys: KeyColumn) -> tuple[Integers, Rows]:
        """Return the positions of the keys that were found, once for each copy, and the rows that hold them."""
        order = np.argsort(keys, kind="stable")  # sorted, each batch reads a stretch of the file of its own
        found, rows = [np.zeros(0, np.intp)], [NO_ROWS]
        for start in range(0, len(keys), _BATCH_KEYS):
            part = order[start : start + _BATCH_KEYS]
            asked, matching = match(self._rows_near(keys[part]), keys[part])
            found.append(part[asked])
            rows.append(matching)
        return np.concatenate(found), np.concatenate(rows)

    def pieces(self) -> Iterator[Rows]:
        """Yield every row, in pieces; all copies of a key are in one piece."""
        held = NO_ROWS
        for start in range(0, self._count, _PIECE_ROWS):
            rows = np.concatenate([held, self._read([start], [min(start + _PIECE_ROWS, self._count)])])
            _refuse_unlisted(rows["shard"], len(self.names))
            whole = len(rows) - int((rows["key"] == rows["key"][-1]).sum())
            held = rows[whole:]
            yield rows[:whole]
        yield held

    def _rows_near(self, keys: KeyColumn) -> Rows:
        """Return the rows of every block that may hold one of these keys."""
        start = np.maximum(self._first.searchsorted(keys, "left") - 1, 0)  # copies may begin in the block before
        blocks = np.unique(_joined_ranges(start, self._first.searchsorted(keys, "right") - start))
        is_next = np.diff(blocks) == 1  # neighbours are read together
        begins = blocks[np.append(True, ~is_next)[: len(blocks)]]
        ends = blocks[np.append(~is_next, True)[: len(blocks)]]
        return self._read((begins * _BLOCK_ROWS).tolist(), ((ends + 1) * _BLOCK_ROWS).tolist())

    def _read(self, begins: Sequence[int], ends: Sequence[int]) -> Rows:
        read, fd, size = self._disk.read_at, self._fd, ROW.itemsize
        stretches = zip(begins, ends, strict=True)
        data = [read(fd, (min(end, self._count) - begin) * size, begin * size) for begin, end in stretches]
        return np.frombuffer(b"".join(data), ROW)

    def _read_directory(self) -> None:
        size = self._disk.size_of_open(self._fd)
        trailer = self._disk.read_at(self._fd, _TRAILER_BYTES, max(0, size - _TRAILER_BYTES))
        if len(trailer) < _TRAILER_BYTES or not trailer.startswith(_MAGIC):
            raise IndexDamaged("the index is damaged or has another format")
        _, version, shards, self._count, directory_bytes = _TRAILER.unpack_from(trailer)
        start = self._count * ROW.itemsize
        if version != INDEX_FORMAT or start + directory_bytes + _TRAILER_BYTES != size:
            raise IndexDamaged("the index has another format or an unexpected size")
        body = self._disk.read_at(self._fd, directory_bytes, start)
        if xxhash.xxh3_128_digest(body + trailer[: _TRAILER.size]) != trailer[_TRAILER.size :]:
            raise IndexDamaged("the index's directory is damaged")
        blocks = -(-self._count // _BLOCK_ROWS)
        self.sizes = np.frombuffer(body, "<u8", shards)
        self._first = np.frombuffer(body, NO_KEYS.dtype, blocks, self.sizes.nbytes)
        text = body[self.sizes.nbytes + self._first.nbytes :].decode()
        self.names = text.split("\n") if text else []


def write_index(disk: Disk, layout: KindLayout, names: Sequence[str], sizes: Integers, pieces: Iterable[Rows]) -> None:
    """Publish a new index in place of the old one, of rows sorted by key, whose `shard` counts into `names`."""
    draft, count, first = Draft(disk, layout.partials), 0, list[bytes]()
    try:
        for rows in pieces:
            draft.write(rows.tobytes(), count * ROW.itemsize)
            first.append(rows["key"][-count % _BLOCK_ROWS :: _BLOCK_ROWS].tobytes())
            count += len(rows)
    except BaseException:  # reading the rows may fail
        draft.discard()
        raise
    body = b"".join([sizes.astype("<u8").tobytes(), *first, "\n".join(names).encode()])
    trailer = _TRAILER.pack(_MAGIC, INDEX_FORMAT, len(names), count, len(body))
    draft.write(body + trailer + xxhash.xxh3_128_digest(body + trailer), count * ROW.itemsize)
    draft.publish(layout.index, replace=True)


def indexed(disk: Disk, layout: KindLayout) -> list[str]:
    """Return the names of the shards in the index; none where it cannot be read."""
    try:
        return ShardIndex(disk, layout.index).names
    except (IndexDamaged, OSError):
        return []


def index_rows(disk: Disk, layout: KindLayout, shards: Collection[str]) -> dict[str, Rows]:
    """Return the rows of these shards in file order as the index has them; only of shards that it names."""
    if not shards:
        return {}
    try:
        index = ShardIndex(disk, layout.index)
        numbers = [number for number, name in enumerate(index.names) if name in shards]
        rows = np.concatenate([NO_ROWS, *(piece[np.isin(piece["shard"], numbers)] for piece in index.pieces())])
    except (IndexDamaged, OSError):
        return {}
    rows = rows[np.argsort(rows["offset"])]
    return {index.names[number]: rows[rows["shard"] == number] for number in numbers}


@dataclass(slots=True)
class IndexSummary:
    """A few numbers a shard, by which the index is compared with the tables of the shards."""

    fault: str = ""
    shards: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # size, records, a sum over their rows
    bytes: int = 0

    @classmethod
    def read(cls, disk: Disk, layout: KindLayout) -> IndexSummary:
        """Read the whole index; where that fails, the summary is empty but for its `fault`."""
        size_bytes = 0
        try:
            size_bytes = disk.size_of(layout.index)
            index = ShardIndex(disk, layout.index)
            counts, sums = np.zeros(len(index.names), np.int64), np.zeros(len(index.names), np.uint64)
            for rows in index.pieces():
                np.add.at(counts, rows["shard"], 1)
                np.add.at(sums, rows["shard"], _row_numbers(rows))
        except FileNotFoundError:
            return cls()
        except (IndexDamaged, OSError) as error:
            return cls(getattr(error, "strerror", None) or str(error), bytes=size_bytes)
        numbers = zip(index.sizes.tolist(), counts.tolist(), sums.tolist(), strict=True)
        return cls("", dict(zip(index.names, numbers, strict=True)), size_bytes)

    def contradicts(self, table: ShardTable) -> bool:
        """Return whether the index names a shard with other records or another size than the shard's own table."""
        numbers = table.size_bytes, len(table.rows), int(_row_numbers(table.rows).sum(dtype=np.uint64))
        return self.shards.get(table.name, numbers) != numbers


def _refuse_unlisted(shards: Integers, count: int) -> None:
    if len(shards) and not 0 <= int(shards.min()) <= int(shards.max()) < count:
        raise IndexDamaged("the index refers to an unlisted shard")


def _row_numbers(rows: Rows) -> npt.NDArray[np.uint64]:
    """Return a 64-bit checksum of each row."""
    words = np.ascontiguousarray(rows).view("<u8").reshape(-1, rows.itemsize // 8)[:, : len(_PRIMES)]
    numbers: npt.NDArray[np.uint64] = np.bitwise_xor.reduce(words * _PRIMES, axis=1)
    return numbers


class StoreSnapshot:
    """Finds keys among the shards that existed when it was taken.

    A shard counts only while a file of its name and size exists, which is checked by a stat of each: attribute caches
    hide new files from a directory listing, and the index names files that were purged since.
    """

    def __init__(self, disk: Disk, layout: KindLayout, known: Mapping[str, ShardTable], *, believe_index: bool) -> None:
        self._disk, self._layout = disk, layout
        self.unreadable: dict[str, str] = {}
        self.index_state = IndexState.DAMAGED
        self._index = self._open_index() if believe_index else None
        listed, indexed = set(shard_names(disk, layout)), self._index.names if self._index else []
        self.tables = self._read_tables((listed | known.keys()).difference(indexed), known)
        if self._index and self.tables:
            self.index_state = IndexState.BEHIND
        self.names = [*indexed, *self.tables]
        sizes = [table.size_bytes for table in self.tables.values()]
        self.sizes = np.array([*(self._index.sizes if self._index else ()), *sizes], np.uint64)
        self._state = np.full(len(self.names), _UNCHECKED, np.int8)
        self._delta = _delta_rows(self.tables.values(), len(indexed))
        self._delta_keys = np.ascontiguousarray(self._delta["key"])  # or every look-up would copy it
        self.outdated = False
        self._check(position for position, name in enumerate(self.names) if name not in listed)
        self.outdated = False  # whether a shard went away since: compacted, repaired or purged

    @property
    def names_gone(self) -> bool:
        """Whether the index names a shard that is not there any more."""
        return self._index is not None and any(self.unreadable.get(name) == WENT for name in self._index.names)

    @property
    def counts(self) -> tuple[int, int]:
        """How many rows the index has, and how many are only in tables."""
        return len(self._index) if self._index else 0, len(self._delta)

    def find(self, keys: KeyColumn) -> tuple[Integers, Rows]:
        """Return the positions of the keys that are there, once for each copy, and the rows that hold them."""
        matches = [self._index.find(keys)] if self._index else []
        if len(self._delta) or not matches:  # mostly the index has every row
            matches.append(match(self._delta, keys, self._delta_keys))
        asked, rows = map(np.concatenate, zip(*matches, strict=True))
        good = self._in_good_shards(rows)
        return asked[good], rows[good]

    def to_index(self, without: Collection[str] = ()) -> tuple[list[str], Integers, Iterator[Rows]]:
        """Return what a new index should hold: the names and sizes of its shards, and the rows sorted by key.

        A shard that exists but is unreadable or of another length is included: it serves no record, but its index rows
        may be all that a repair can go by.
        """
        self._check(range(len(self.names)))
        keep = (self._state != _GONE) & ~np.array([name in without for name in self.names], bool)
        number = np.cumsum(keep) - 1

        def renumbered() -> Iterator[Rows]:
            for piece in self._all_rows():
                rows = piece[keep[piece["shard"]]]
                rows["shard"] = number[rows["shard"]]
                yield rows

        return [name for name, kept in zip(self.names, keep, strict=True) if kept], self.sizes[keep], renumbered()

    def rows(self) -> Iterator[Rows]:
        """Yield every row of every good shard, sorted by key, in pieces; all copies of a key are in one piece."""
        for rows in self._all_rows():
            yield rows[self._in_good_shards(rows)]

    def good_shards(self) -> Integers:
        """Return the positions of the shards that are there."""
        self._check(range(len(self.names)))
        return np.flatnonzero(self._state == _GOOD)

    def _all_rows(self) -> Iterator[Rows]:
        delta, begin = self._delta, 0
        for rows in self._index.pieces() if self._index else ():
            if len(rows):
                upto = int(self._delta_keys.searchsorted(rows["key"][-1], "right"))
                yield _sorted(np.concatenate([rows, delta[begin:upto]])) if upto > begin else rows
                begin = max(begin, upto)
        yield delta[begin:]

    def _open_index(self) -> ShardIndex | None:
        try:
            index = ShardIndex(self._disk, self._layout.index)
        except FileNotFoundError:
            self.index_state = IndexState.NONE
            return None
        except (IndexDamaged, OSError):
            return None
        self.index_state = IndexState.CURRENT
        return index

    def _read_tables(self, names: Iterable[str], known: Mapping[str, ShardTable]) -> dict[str, ShardTable]:
        tables = {}
        for name in sorted(names):
            try:
                tables[name] = known[name] if name in known else read_table(self._disk, self._layout.shard(name))
            except CacheDamaged as error:
                self.unreadable[name] = error.what
            except OSError as error:
                self.unreadable[name] = error.strerror or str(error)
        return tables

    def _in_good_shards(self, rows: Rows) -> Mask:
        shards = rows["shard"]
        _refuse_unlisted(shards, len(self.names))
        if np.any(self._state[shards] == _UNCHECKED):
            self._check(np.unique(shards).tolist())
        good: Mask = self._state[shards] == _GOOD
        return good

    def _check(self, positions: Iterable[int]) -> None:
        """Check that these shards exist and have their recorded size."""
        for position in positions:
            if self._state[position] == _UNCHECKED:
                fault = self._fault(self.names[position], int(self.sizes[position]))
                self._state[position] = _GONE if fault == WENT else _BAD if fault else _GOOD
                if fault:
                    self.unreadable[self.names[position]] = fault
                    self.outdated = fault == WENT or self.outdated

    def _fault(self, name: str, size: int) -> str:
        try:
            size_now = self._disk.size_of(self._layout.shard(name))
        except OSError as error:
            return WENT if error.errno in GONE else error.strerror or str(error)
        return "" if size_now == size else f"has {size_now} bytes, expected {size} were written"


def shard_names(disk: Disk, layout: KindLayout) -> list[str]:
    """Return the names of the published shards that the folder shows."""
    try:
        return sorted(name for name in disk.list_folder(layout.shards) if name.endswith(SHARD_SUFFIX))
    except OSError as error:
        what = f"the cache cannot be read: {error.strerror or error}"
        raise CacheUnusable(what, where=str(layout.shards), remedy=f"ls -ld {quoted(layout.shards)}") from error


def _delta_rows(tables: Collection[ShardTable], first_shard: int) -> Rows:
    """Return the rows of some tables, sorted; each is copied once, to its place."""
    keys = np.concatenate([NO_KEYS, *(table.rows["key"] for table in tables)])
    places, rows, end = np.empty(len(keys), np.intp), np.empty(len(keys), ROW), 0
    places[np.argsort(keys, kind="stable")] = np.arange(len(keys))
    for shard, table in enumerate(tables, first_shard):
        part = places[end : end + len(table.rows)]
        for name in TABLE_ROW.names or ():
            rows[name][part] = table.rows[name]
        rows["shard"][part] = shard
        end += len(part)
    return rows


def _sorted(rows: Rows) -> Rows:
    return rows[np.argsort(rows["key"], kind="stable")]


def match(rows: Rows, keys: KeyColumn, column: KeyColumn | None = None) -> tuple[Integers, Rows]:
    """Find keys in sorted rows: for each copy of each key that is there, the key's position and the row.

    `column` is the keys of the rows, contiguous; pass it when the same rows are searched often.
    """
    column = np.ascontiguousarray(rows["key"]) if column is None else column
    left = column.searchsorted(keys, "left")
    counts = np.maximum(column.searchsorted(keys, "right") - left, 0)
    asked, found = np.arange(len(keys)).repeat(counts), rows[_joined_ranges(left, counts)]
    same = found["key"] == keys[asked]  # of a damaged index the rows may not be sorted
    return asked[same], found[same]


def _joined_ranges(starts: Integers, counts: Integers) -> Integers:
    """Return the integers start, start+1, … of each range, one range after the other."""
    ends = counts.cumsum()
    joined: Integers = np.arange(counts.sum()) + (starts - ends + counts).repeat(counts)
    return joined


def are_among(keys: KeyColumn, known: KeyColumn) -> Mask:
    """Return a mask of the keys that are among the sorted known ones."""
    if not len(known):
        return np.zeros(len(keys), bool)
    among: Mask = known[np.minimum(known.searchsorted(keys), len(known) - 1)] == keys
    return among


def first_of_key(rows: Rows) -> Mask:
    """Mark each of some sorted rows whose key differs from the row before."""
    first = np.ones(len(rows), bool)
    first[1:] = rows["key"][1:] != rows["key"][:-1]
    return first


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


@dataclass(frozen=True, slots=True)
class StoreTally:
    """What a store holds, also by tag, and which wanted keys it lacks."""

    stat: StoreStat
    tagged: Mapping[bytes, tuple[int, int]]  # how a key begins → records, bytes
    absent: KeyColumn  # of the keys that were asked for


def count_records(kind: str, snapshot: StoreSnapshot, tags: Sequence[bytes], wanted: KeyColumn) -> StoreTally:
    """Count distinct records, in all and by tag (how a key begins), and find which `wanted` keys are missing."""
    ends = np.array([tag.ljust(KEY_BYTES, b"\xff") for tag in tags], NO_KEYS.dtype)
    begins, totals = np.array(tags, NO_KEYS.dtype), np.zeros((len(tags), 2), np.int64)
    is_there, records = np.zeros(len(wanted), bool), 0
    for rows in filter(len, snapshot.rows()):
        rows = rows[first_of_key(rows)]
        keys, upto = np.ascontiguousarray(rows["key"]), np.append(0, rows["length"].cumsum())
        records += len(rows)
        first, last = keys.searchsorted(begins, "left"), keys.searchsorted(ends, "right")
        totals += np.stack([last - first, upto[last] - upto[first]], axis=1).astype(np.int64)
        asked = slice(wanted.searchsorted(keys[0], "left"), wanted.searchsorted(keys[-1], "right"))
        is_there[asked] |= are_among(wanted[asked], keys)
    good = snapshot.good_shards().tolist()
    times = sorted(filter(None, (written_at(snapshot.names[shard]) for shard in good)))
    stat = StoreStat(
        kind=kind,
        records=records,
        bytes=int(snapshot.sizes[good].sum()),
        shards=len(good),
        unreadable=tuple(sorted(snapshot.unreadable.items())),
        index=snapshot.index_state,
        oldest=times[0] if times else None,
        newest=times[-1] if times else None,
    )
    tagged = {tag: (count, size_bytes) for tag, (count, size_bytes) in zip(tags, totals.tolist(), strict=True)}
    return StoreTally(stat, tagged, wanted[~is_there])
