"""The shard: an ordinary safetensors file of records, with a table of digests and a trailer behind them.

    u64 header length | header JSON, spaces | record | record | … | __table__: rows, trailer

Any safetensors reader opens it. The store reads it by the table: one row per record, and a trailer of fixed size at the
very end that vouches for the file's size, the header, the table and itself. A record has no checksum of its own; its
row has its digest.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from pipeline.command_line import UPGRADE
from pipeline.errors import SUBMIT_AGAIN, CacheDamaged
from pipeline.keys import KEY_BYTES
from pipeline.store.format.cache_layout import SHARD_SUFFIX
from pipeline.store.format.disk import Draft, reading
from pipeline.store.format.record import (
    ALIGNMENT,
    BadRecord,
    EncodedRecord,
    Record,
    Tensor,
    decode_record,
    is_record_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from pipeline.store.format.disk import Disk

SHARD_FORMAT = 1
TABLE_ROW = np.dtype([("key", f"S{KEY_BYTES}"), ("digest", "V16"), ("offset", "<u8"), ("length", "<u8")])
DEFAULT_HEADER_BYTES = 512 * 1024
TAIL_BYTES = 64 * 1024  # holds the table of most shards, so that it is read at once
BAD_HEADER = "the header is damaged"
_TABLE = "__table__"
_METADATA = f'{{"__metadata__":{{"pipeline_shard":"{SHARD_FORMAT}"}}'
_FORMAT = re.compile(rb'.{8}\{"__metadata__":\{"pipeline_shard":"([0-9]{1,9})"', re.DOTALL)
_FORMAT_BYTES = 64
_LENGTH = struct.Struct("<Q")
_PLACED = np.dtype([("end", "<u8"), ("header_end", "<u8"), ("digest", "V16")])
_PACKED = struct.Struct("<QQ16s")  # the same
_EMPTY_HEADER_BYTES = _LENGTH.size + len(_METADATA) + 128  # more than the table's own entry needs
_NONE_PLACED = _PACKED.pack(0, _EMPTY_HEADER_BYTES, b"")
_TRAILER = struct.Struct("<8sIIQQQQ16s16s")  # and 16 bytes, the digest of these
_MAGIC = b"PIPESHRD"
TRAILER_BYTES = _TRAILER.size + 16
_TIGHTEN_BYTES = 4 * 1024 * 1024
_CHUNK_BYTES = 1024 * 1024  # stays in the processor's cache between read and hash


class ShardNewer(CacheDamaged):
    """A shard that a later version wrote; it may be intact."""


@dataclass(frozen=True, slots=True)
class ShardTable:
    """A shard's own table of records: rows of TABLE_ROW in file order, offsets from the start of the file."""

    name: str
    size_bytes: int
    data_start: int
    table_start: int
    header_digest: bytes
    rows: npt.NDArray[Any]


class ShardWriter:
    """Writes a new shard, record by record; holds one record in memory, whatever the shard's size.

    The header comes first in the file but is known last, so room is reserved for it.
    """

    def __init__(self, disk: Disk, partials: Path, header_bytes: int = DEFAULT_HEADER_BYTES) -> None:
        self._draft = Draft(disk, partials)
        self._reserved = _aligned(header_bytes)
        self._placed: dict[bytes, bytes] = {}  # of each record, its end and that of its header entries, and its digest
        self._entries = bytearray()
        self._sealed = False
        self._small: bytes | None = None

    def __contains__(self, key: bytes) -> bool:
        return key in self._placed

    @property
    def keys(self) -> list[bytes]:
        return list(self._placed)

    @property
    def open(self) -> bool:
        return self._draft.open

    def add(self, record: EncodedRecord, shard_bytes: int) -> bool:
        """Append a record, if it fits the reserved header and the target size; the first always does.

        Interrupted before the last line, this leaves bytes that the next record overwrites.
        """
        prefix, (data_start, header_start) = f"{record.key.hex()}/", self._ends
        entries = "".join(_entry(prefix, tensor, data_start) for tensor in record.tensors).encode()
        data_end, header_end = data_start + len(record.blob), header_start + len(entries)
        fits = header_end <= self._reserved and data_end <= shard_bytes
        if self._placed and (self._sealed or not fits):
            return False
        if not self._placed:
            self._reserved = max(self._reserved, _aligned(header_end))
        self._draft.write(record.blob, self._reserved + data_start)
        self._entries[header_start - _EMPTY_HEADER_BYTES :] = entries
        self._placed[record.key] = _PACKED.pack(data_end, header_end, xxhash.xxh3_128_digest(record.blob))
        return True

    def publish(self, shards: Path) -> ShardTable:
        """Finish the file and publish it. Interrupted, it can be called again, and writes the same bytes."""
        self._sealed = True
        data_start = self._tightened()
        table_start = data_start + self._ends[0]
        rows = self._rows(data_start)
        size = table_start + rows.nbytes + TRAILER_BYTES
        header = self._header(data_start, size)
        self._draft.write(header, 0)
        table = _swapped(rows).tobytes()
        self._draft.write(table + _trailer(header, table, table_start, size), table_start)
        self._draft.truncate(size)
        name = self._draft.stem + SHARD_SUFFIX
        self._draft.publish(shards / name)
        return ShardTable(name, size, data_start, table_start, xxhash.xxh3_128_digest(header), rows)

    def discard(self) -> None:
        self._draft.discard()

    @property
    def _ends(self) -> tuple[int, int]:
        """The end of the data, and of the header entries, of the records placed so far."""
        data_end, header_end, _ = _PACKED.unpack(next(reversed(self._placed.values()), _NONE_PLACED))
        return data_end, header_end

    def _tightened(self) -> int:
        """Return where the data begins, having moved a small shard's data down over header room it did not need."""
        data_end, header_end = self._ends
        needed = _aligned(header_end)
        if data_end > _TIGHTEN_BYTES or needed >= self._reserved:
            return self._reserved
        if self._small is None:  # read only once: after an interruption the bytes may have been written over
            self._small = self._draft.read(data_end, self._reserved)
        self._draft.write(self._small, needed)
        return needed

    def _rows(self, data_start: int) -> npt.NDArray[Any]:
        rows = np.empty(len(self._placed), TABLE_ROW)
        placed = np.frombuffer(b"".join(self._placed.values()), _PLACED)
        starts = np.concatenate([np.zeros(1, np.uint64), placed["end"][:-1]])
        rows["key"], rows["digest"] = key_column(self.keys), placed["digest"]
        rows["offset"], rows["length"] = starts + np.uint64(data_start), placed["end"] - starts
        return rows

    def _header(self, data_start: int, size: int) -> bytes:
        data_end, header_end = self._ends
        table = Tensor(_TABLE, "U8", (size - data_start - data_end,), data_end, size - data_start)
        entries, length = self._entries[: header_end - _EMPTY_HEADER_BYTES], data_start - _LENGTH.size
        text = b"".join([_METADATA.encode(), entries, _entry("", table, 0).encode(), b"}"])
        return _LENGTH.pack(length) + text.ljust(length)


def read_table(disk: Disk, path: Path, tail_bytes: int = TAIL_BYTES) -> ShardTable:
    """Read what a shard holds, from its end, and verify the trailer and the table."""
    with reading(disk, path) as fd:
        try:
            return _read_table(disk, fd, path, tail_bytes)
        except OSError:  # of a bad place before the table, perhaps: then of no more than is needed
            return _read_table(disk, fd, path, TRAILER_BYTES)


def header_fault(disk: Disk, path: Path, table: ShardTable) -> str:
    """Verify a shard's header; return its fault, or an empty text."""
    header = disk.read_start(path, table.data_start)
    return "" if xxhash.xxh3_128_digest(header) == table.header_digest else BAD_HEADER


def verified_record(key: bytes, digest: bytes, blob: bytes | memoryview, rest: bytes | memoryview = b"") -> Record:
    """Return the record in bytes that may lie in two stretches of memory; BadRecord where it is not as written."""
    hasher = xxhash.xxh3_128(blob)
    hasher.update(rest)
    if hasher.digest() != digest:
        raise BadRecord("checksum mismatch")
    record = decode_record(blob, rest)
    if record.key != key:
        raise BadRecord("it contains another record")
    return record


def whole_rows(disk: Disk, fd: int, rows: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return a mask of the rows, given in file order, whose bytes are the right record of their key; none is parsed.

    They are read in stretches of whole records. One that the disk refuses to read counts as damaged.
    """
    whole_N, size = np.zeros(len(rows), bool), disk.size_of_open(fd)
    within_N = (rows["length"] <= size) & (rows["offset"] <= size - np.minimum(rows["length"], size))
    rows, numbers = rows[within_N], np.flatnonzero(within_N).tolist()
    keys, digests = row_keys(rows), rows["digest"].tolist()
    starts, ends = rows["offset"].tolist(), (rows["offset"] + rows["length"]).tolist()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    at = 0
    while at < len(rows):
        after = max(bisect_right(ends, starts[at] + _CHUNK_BYTES, at), at + 1)
        begin, length = starts[at], ends[after - 1] - starts[at]
        data = buffer if length <= len(buffer) else memoryview(bytearray(length))  # of a large record
        with suppress(OSError):
            came = disk.fill(fd, [data[:length]], begin)
            for row in range(at, after if came == length else at):
                blob = data[starts[row] - begin : ends[row] - begin]
                whole_N[numbers[row]] = xxhash.xxh3_128_digest(blob) == digests[row] and is_record_of(keys[row], blob)
        at = after
    return whole_N


def key_column(keys: Sequence[bytes]) -> npt.NDArray[np.bytes_]:
    """Return keys as an array, whose items compare as the keys do (but lack the zeros at their ends)."""
    if set(map(len, keys)) - {KEY_BYTES}:
        raise ValueError(f"a key is {KEY_BYTES} bytes")
    return np.frombuffer(b"".join(keys), f"S{KEY_BYTES}")


def row_keys(rows: npt.NDArray[Any]) -> list[bytes]:
    """Return the keys of table or index rows."""
    return column_keys(rows["key"])


def column_keys(column: npt.NDArray[np.bytes_]) -> list[bytes]:
    """Return the keys in an array, with the zeros at their ends."""
    keys: list[bytes] = np.ascontiguousarray(column).view(f"V{KEY_BYTES}").tolist()
    return keys


def _swapped(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return table rows with the halves of their keys in the other byte order: on disk they are two numbers."""
    words = rows.view("<u8").reshape(-1, TABLE_ROW.itemsize // 8).copy()
    words[:, :2] = words[:, :2].byteswap()
    return words.view(TABLE_ROW).reshape(-1)


def _aligned(length: int) -> int:
    return length + -length % ALIGNMENT


def _entry(prefix: str, tensor: Tensor, base: int) -> str:
    """Return a tensor's entry of the JSON header; by hand, for it takes a quarter of the time of `json.dumps`."""
    shape = ",".join(map(str, tensor.shape))
    offsets = f'"data_offsets":[{base + tensor.start},{base + tensor.end}]'
    return f',"{prefix}{tensor.name}":{{"dtype":"{tensor.tag}","shape":[{shape}],{offsets}}}'


def _trailer(header: bytes, table: bytes, table_start: int, size: int) -> bytes:
    digests, count = map(xxhash.xxh3_128_digest, (header, table)), len(table) // TABLE_ROW.itemsize
    body = _TRAILER.pack(_MAGIC, SHARD_FORMAT, 0, count, len(header), table_start, size, *digests)
    return body + xxhash.xxh3_128_digest(body)


def _read_table(disk: Disk, fd: int, path: Path, tail_bytes: int) -> ShardTable:
    def damaged(what: str) -> CacheDamaged:
        return CacheDamaged(what, where=str(path), remedy=SUBMIT_AGAIN)

    size = disk.size_of_open(fd)
    tail_start = max(0, size - max(tail_bytes, TRAILER_BYTES))
    tail = disk.read_at(fd, size - tail_start, tail_start)
    trailer = tail[-TRAILER_BYTES:]
    if xxhash.xxh3_128_digest(trailer[: _TRAILER.size]) != trailer[_TRAILER.size :]:
        match = _FORMAT.match(disk.read_at(fd, _FORMAT_BYTES, 0))
        if match and int(match[1]) > SHARD_FORMAT:  # a newer format may end in another trailer
            raise _newer(path, int(match[1]))
        raise damaged("the shard's end is damaged or missing")
    magic, version, _, count, data_start, table_start, true_size, header_digest, digest = _TRAILER.unpack_from(trailer)
    if magic != _MAGIC or version > SHARD_FORMAT:
        raise _newer(path, version)
    if true_size != size or table_start + count * TABLE_ROW.itemsize + TRAILER_BYTES != size:
        raise damaged(f"the shard has {size} bytes, expected {true_size} were written")
    if table_start >= tail_start:
        table = tail[table_start - tail_start : -TRAILER_BYTES]
    else:
        table = disk.read_at(fd, count * TABLE_ROW.itemsize, table_start)
    if xxhash.xxh3_128_digest(table) != digest:
        raise damaged("the shard's table is damaged")
    rows = _swapped(np.frombuffer(table, TABLE_ROW))
    if not _tiles(rows, data_start, table_start):
        raise damaged("the shard's table is inconsistent")
    return ShardTable(path.name, size, data_start, table_start, header_digest, rows)


def _newer(path: Path, version: int) -> ShardNewer:
    problem = f"the shard has a format that this version does not know ({version})"
    return ShardNewer(problem, where=str(path), remedy=UPGRADE)


def _tiles(rows: npt.NDArray[Any], start: int, end: int) -> bool:
    """Return whether the rows cover the data from start to end without gap or overlap."""
    edges = np.append(rows["offset"], np.uint64(end))
    return bool(edges[0] == start and np.all(edges[1:] - edges[:-1] == rows["length"]) and np.all(edges <= end))
