"""The index of a store: which shard holds which key, sorted by key, in a file that is read block by block.

Rows pass through as streams of sorted pieces, so that two indexes are merged in the memory of a few pieces.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from pipeline.store.format.disk import Draft
from pipeline.store.format.shard import TABLE_ROW

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from pipeline.store.format.cache_layout import KindLayout
    from pipeline.store.format.disk import Disk

    Integers = npt.NDArray[Any]
    Rows = npt.NDArray[Any]
    from collections.abc import Collection

    from pipeline.store.format.shard import ShardTable

PIECE_ROWS = 16_384


def merged(first: Iterable[Rows], second: Iterable[Rows]) -> Iterator[Rows]:
    """Yield the rows of two sorted streams as one, sorted by key."""
    streams = _whole_runs(first), _whole_runs(second)
    heads = [next(stream, None) for stream in streams]
    while heads[0] is not None and heads[1] is not None:
        last = min(rows["hi"][-1] for rows in heads if rows is not None)  # nothing up to it is still to come
        cuts = [int(rows["hi"].searchsorted(last, "right")) for rows in heads if rows is not None]
        yield sort_in_place(
            np.concatenate([rows[:cut] for rows, cut in zip(heads, cuts, strict=True) if rows is not None])
        )
        heads = [
            rows[cut:] if rows is not None and cut < len(rows) else next(stream, None)
            for rows, cut, stream in zip(heads, cuts, streams, strict=True)
        ]
    for head, stream in zip(heads, streams, strict=True):
        if head is not None:
            yield head
            yield from stream


def in_pieces(rows: Rows) -> Iterator[Rows]:
    """Yield rows in pieces of PIECE_ROWS."""
    for start in range(0, len(rows), PIECE_ROWS):
        yield rows[start : start + PIECE_ROWS]


def sort_in_place(rows: Rows) -> Rows:
    """Sort rows by key and return them; column by column, which takes a third of the memory of a sorted copy."""
    order = np.lexsort((rows["lo"], rows["hi"]))
    for name in rows.dtype.names or ():
        rows[name] = rows[name][order]
    return rows


def _whole_runs(pieces: Iterable[Rows]) -> Iterator[Rows]:
    """Yield the rows in pieces cut so that rows with the same `hi` are never in two pieces."""
    pending: Rows | None = None
    for piece in pieces:
        if len(piece):
            rows = piece if pending is None else np.concatenate([pending, piece])
            cut = int(rows["hi"].searchsorted(rows["hi"][-1], "left"))
            pending = rows[cut:].copy()
            if cut:
                yield rows[:cut]
    if pending is not None:
        yield pending


INDEX_FORMAT = 1
ROW = np.dtype([*TABLE_ROW.descr, ("shard", "<u4"), ("spare", "<u4")])
BLOCK_ROWS = 32
_BLOCK_BYTES = BLOCK_ROWS * ROW.itemsize
_HEAD = struct.Struct("<8sIIQQQ16s")  # and 16 bytes, the digest of these
_HEAD_BYTES = _HEAD.size + 16
_MAGIC = b"PIPEINDX"
_BATCH_KEYS = 65_536
_PIECE_BLOCKS = 512


class IndexDamaged(Exception):
    """The index file is damaged; the shards themselves are not affected."""


class ShardIndex:
    """An open index file; its directory is in memory, its rows are read and verified as they are needed."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._fd = disk.open_read(path)
        try:
            self._read_directory()
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; rows that were returned stay valid."""
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            self._disk.close(fd)

    def find(self, keys: Integers) -> tuple[Integers, Rows]:
        """Return the positions of the keys that were found, once for each copy, and the rows that hold them.

        Keys come as pairs of numbers, see `key_pairs`.
        """
        if len(keys) == 1:
            return self._find_one(*keys[0])
        if len(keys) <= _BATCH_KEYS:
            return self._find_batch(keys)
        order = np.lexsort((keys[:, 1], keys[:, 0]))  # sorted, each batch reads a stretch of the file of its own
        parts = [order[start : start + _BATCH_KEYS] for start in range(0, len(order), _BATCH_KEYS)]
        matches = [(part, *self._find_batch(keys[part])) for part in parts]
        positions_found = np.concatenate([part[positions] for part, positions, _ in matches])
        return positions_found, np.concatenate([rows for _, _, rows in matches])

    def __len__(self) -> int:
        return int(self._rows_bytes // ROW.itemsize)

    def rows(self) -> Rows:
        return self._read_range(0, len(self._first))

    def pieces(self) -> Iterator[Rows]:
        """Yield every row, in pieces."""
        for start in range(0, len(self._first), _PIECE_BLOCKS):
            yield self._read_range(start, min(start + _PIECE_BLOCKS, len(self._first)))

    def _find_one(self, hi: np.uint64, lo: np.uint64) -> tuple[Integers, Rows]:
        """Do as `_find_batch` does for one key, in fewer numpy calls: a record is read in less than a millisecond."""
        start = max(int(self._first.searchsorted(hi, "left")) - 1, 0)
        rows = self._read_range(start, int(self._first.searchsorted(hi, "right")))
        matching = rows[(rows["hi"] == hi) & (rows["lo"] == lo)]
        return np.zeros(len(matching), np.intp), matching

    def _find_batch(self, keys: Integers) -> tuple[Integers, Rows]:
        left = self._first.searchsorted(keys[:, 0], "left")
        right = self._first.searchsorted(keys[:, 0], "right")
        start = np.maximum(left - 1, 0)  # a key's copies may begin in the block before the one that begins with it
        blocks = joined_ranges(start, right - start)
        return match(self._read_blocks(np.unique(blocks) if len(blocks) > 1 else blocks), keys)

    def _read_range(self, start: int, stop: int) -> Rows:
        begin, end = start * _BLOCK_BYTES, min(stop * _BLOCK_BYTES, self._rows_bytes)
        data = self._disk.read_at(self._fd, max(0, end - begin), self._rows_start + begin)
        self._verify(data, range(start, stop), self._digests[start:stop].tolist())
        return np.frombuffer(data, ROW)

    def _read_blocks(self, blocks: Integers) -> Rows:
        """Read and verify these blocks, given in ascending order; neighbours are read together."""
        apart = np.ones(len(blocks) + 1, bool)  # whether a stretch begins before, or ends with, each place
        apart[1:-1] = blocks[1:] != blocks[:-1] + 1
        begins = blocks[apart[: len(blocks)]] * _BLOCK_BYTES
        ends = np.minimum((blocks[apart[1:]] + 1) * _BLOCK_BYTES, self._rows_bytes)
        read, fd, start = self._disk.read_at, self._fd, self._rows_start
        stretches = zip(begins.tolist(), ends.tolist(), strict=True)
        data = b"".join([read(fd, end - begin, start + begin) for begin, end in stretches])
        self._verify(data, blocks.tolist(), self._digests[blocks].tolist())
        return np.frombuffer(data, ROW)

    def _verify(self, data: bytes, blocks: Sequence[int], digests: list[int]) -> None:
        view = memoryview(data)
        starts = range(0, len(blocks) * _BLOCK_BYTES, _BLOCK_BYTES)
        for start, block, digest in zip(starts, blocks, digests, strict=True):
            if xxhash.xxh3_64_intdigest(view[start : start + _BLOCK_BYTES], block) != digest:
                raise IndexDamaged("a block of the index is damaged")

    def _read_directory(self) -> None:
        head = self._disk.read_at(self._fd, _HEAD_BYTES, 0)
        if xxhash.xxh3_128_digest(head[: _HEAD.size]) != head[_HEAD.size :]:
            raise IndexDamaged("the index's head is damaged")
        magic, version, _, shards, rows, names_bytes, digest = _HEAD.unpack_from(head)
        if magic != _MAGIC or version != INDEX_FORMAT:
            raise IndexDamaged("the index has another format")
        blocks = -(-rows // BLOCK_ROWS)
        sizes = [8 * shards, 8 * blocks, 8 * blocks, names_bytes]
        self._rows_start = _HEAD_BYTES + sum(sizes)
        self._rows_bytes = rows * ROW.itemsize
        if self._disk.size_of_open(self._fd) != self._rows_start + self._rows_bytes:
            raise IndexDamaged("the index has an unexpected size")
        body = self._disk.read_at(self._fd, sum(sizes), _HEAD_BYTES)
        if xxhash.xxh3_128_digest(body) != digest:
            raise IndexDamaged("the index's directory is damaged")
        self._unpack(body, shards, blocks)

    def _unpack(self, body: bytes, shards: int, blocks: int) -> None:
        numbers = np.frombuffer(body, "<u8", shards + 2 * blocks)
        self.sizes, self._first, self._digests = np.split(numbers, [shards, shards + blocks])
        text = body[numbers.nbytes :].decode(errors="replace")
        self.names = text.split("\n") if text else []
        if len(self.names) != shards or "/" in text or "\0" in text:
            raise IndexDamaged("the index's shard names are damaged")


def indexed(disk: Disk, layout: KindLayout) -> list[str]:
    """Return the names of the shards in the index; none where it cannot be read."""
    try:
        return ShardIndex(disk, layout.index).names
    except (IndexDamaged, OSError):
        return []


def write_index(
    disk: Disk, layout: KindLayout, names: Sequence[str], sizes: Integers, rows: Iterable[Rows], count: int
) -> None:
    """Publish a new index in place of the old one: `count` rows sorted by key, whose `shard` counts into `names`.

    The rows come in pieces, of which only a few are in memory at a time.
    """
    text, blocks = "\n".join(names).encode(), -(-count // BLOCK_ROWS)
    first, digests = np.zeros(blocks, "<u8"), np.zeros(blocks, "<u8")
    start = _HEAD_BYTES + sizes.astype("<u8").nbytes + first.nbytes + digests.nbytes + len(text)
    draft, block = Draft(disk, layout.partials), 0
    try:
        for piece in _in_blocks(rows):
            data = memoryview(piece.tobytes())
            draft.write(data, start + block * _BLOCK_BYTES)
            upto = block + -(-len(piece) // BLOCK_ROWS)
            first[block:upto] = piece["hi"][::BLOCK_ROWS]
            cuts = range(0, len(data), _BLOCK_BYTES)
            digests[block:upto] = [
                xxhash.xxh3_64_intdigest(data[cut : cut + _BLOCK_BYTES], number)
                for number, cut in enumerate(cuts, block)
            ]
            block = upto
    except BaseException:  # what the rows are read from may fail
        draft.discard()
        raise
    body = sizes.astype("<u8").tobytes() + first.tobytes() + digests.tobytes() + text
    head = _HEAD.pack(_MAGIC, INDEX_FORMAT, 0, len(names), count, len(text), xxhash.xxh3_128_digest(body))
    draft.write(head + xxhash.xxh3_128_digest(head) + body, 0)
    draft.publish(layout.index, replace=True)


def _in_blocks(pieces: Iterable[Rows]) -> Iterator[Rows]:
    """Yield the rows of pieces in whole blocks; only the last may be short."""
    pending = np.zeros(0, ROW)
    for piece in pieces:
        rows = np.concatenate([pending, piece])
        whole = len(rows) - len(rows) % BLOCK_ROWS
        pending = rows[whole:].copy()
        if whole:
            yield rows[:whole]
    if len(pending):
        yield pending


def match(rows: Rows, keys: Integers, hi: Integers | None = None) -> tuple[Integers, Rows]:
    """Find keys in sorted rows: for each copy of each key that is there, the key's position and the row.

    `hi` is that column of the rows, contiguous; pass it when the same rows are searched often.
    """
    hi = np.ascontiguousarray(rows["hi"]) if hi is None else hi
    left = hi.searchsorted(keys[:, 0], "left")
    counts = hi.searchsorted(keys[:, 0], "right") - left
    asked, row_numbers = np.arange(len(keys)).repeat(counts), joined_ranges(left, counts)
    is_match = rows["lo"][row_numbers] == keys[asked, 1]
    return asked[is_match], rows[row_numbers[is_match]]


def joined_ranges(starts: Integers, counts: Integers) -> Integers:
    """Return the integers start, start+1, … of each range, one range after the other."""
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    concatenated: Integers = np.arange(total) + (starts - ends + counts).repeat(counts)
    return concatenated


_FIELDS = len(TABLE_ROW.names or ()) + 1  # a digest counts as two numbers
_PRIMES = np.array([0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
                    0xD6E8FEB86659FD93], np.uint64)  # fmt: skip


@dataclass(slots=True)
class _Indexed:
    """One shard as the index has it."""

    size_bytes: int
    records: int = 0
    sum: int = 0  # of a number for each row, whatever their order


@dataclass(slots=True)
class IndexView:
    """A summary of the index for checking it: a few numbers a shard, however many records."""

    fault: str = ""
    shards: dict[str, _Indexed] = field(default_factory=dict)
    bytes: int = 0

    @classmethod
    def read(cls, disk: Disk, layout: KindLayout) -> IndexView:
        """Read and verify the whole index; a damaged one gives an empty view with its `fault`."""
        view = cls()
        try:
            view.bytes = disk.size_of(layout.index)
            index = ShardIndex(disk, layout.index)
            view.shards = {name: _Indexed(int(size)) for name, size in zip(index.names, index.sizes, strict=True)}
            known = list(view.shards.values())
            for rows in index.pieces():
                counts, sums = _sums(rows, len(known))
                for shard, count, total in zip(known, counts.tolist(), sums.tolist(), strict=True):
                    shard.records += count
                    shard.sum = (shard.sum + total) % (1 << 64)
        except FileNotFoundError:
            pass
        except IndexDamaged as error:
            return cls(str(error), bytes=view.bytes)
        except OSError as error:
            return cls(error.strerror or str(error), bytes=view.bytes)
        return view

    def contradicts(self, table: ShardTable) -> str:
        """Describe how a shard's own table differs from the index; empty if it does not, or if it is not indexed."""
        indexed = self.shards.get(table.name)
        if indexed is None:
            return ""
        if indexed.size_bytes != table.size_bytes:
            return f"its index says {indexed.size_bytes} bytes, the file has {table.size_bytes}"
        if indexed.records != len(table.rows):
            return f"its index says {indexed.records} records, the file has {len(table.rows)}"
        if indexed.sum != int(_numbers(table.rows).sum(dtype=np.uint64)):
            return "the index and the shard's table disagree on positions or digests"
        return ""


def index_rows(disk: Disk, layout: KindLayout, shards: Collection[str]) -> dict[str, Rows]:
    """Return the tables of these shards as the index has them, in file order; only of shards that it names."""
    try:
        index = ShardIndex(disk, layout.index) if shards else None
        numbers = {number: name for number, name in enumerate(index.names if index else ()) if name in shards}
        asked = np.array(list(numbers), "<u4")
        pieces = (piece[np.isin(piece["shard"], asked)] for piece in (index.pieces() if index and numbers else ()))
        rows = np.concatenate([np.zeros(0, ROW), *pieces])
    except (IndexDamaged, OSError):
        return {}
    rows = rows[np.lexsort((rows["offset"], rows["shard"]))]
    edges = rows["shard"].searchsorted(asked, "left"), rows["shard"].searchsorted(asked, "right")
    tables = rows[list(TABLE_ROW.names or ())].astype(TABLE_ROW)
    return {name: tables[start:end] for name, start, end in zip(numbers.values(), *edges, strict=True)}


def _sums(rows: Rows, shards: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Return for each shard the count of its rows and the sum of their checksums."""
    numbers = _numbers(rows)
    sums = np.zeros(shards, np.uint64)
    if len(rows) and int(rows["shard"].max()) >= shards:
        raise IndexDamaged("the index refers to an unlisted shard")
    np.add.at(sums, rows["shard"], numbers)
    return np.bincount(rows["shard"], minlength=shards), sums


def _numbers(rows: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    """Return a 64-bit checksum of each row."""
    columns = np.ascontiguousarray(rows[list(TABLE_ROW.names or ())].astype(TABLE_ROW)).view(np.uint64)
    mixed = columns.reshape(-1, _FIELDS) * _PRIMES
    mixed ^= mixed >> np.uint64(29)
    mixed *= _PRIMES[::-1]
    numbers: npt.NDArray[np.uint64] = mixed.sum(axis=1, dtype=np.uint64)
    return numbers
