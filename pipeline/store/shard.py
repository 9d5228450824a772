"""The shard: an ordinary safetensors file of records, with a table of digests and a trailer behind them.

    u64 header length | header JSON, spaces | record | record | … | __table__: rows, trailer

Any safetensors reader opens it. The store reads it by the table: one row per record, and a trailer of fixed size at the
very end that vouches for the file's size, the header, the table and itself. A record vouches for nothing: its row does.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from pipeline.errors import SUBMIT_AGAIN, CacheDamaged
from pipeline.keys import KEY_BYTES
from pipeline.store.draft import Draft
from pipeline.store.layout import SHARD_SUFFIX
from pipeline.store.record import ALIGNMENT, EncodedRecord, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from pipeline.store.disk import Disk

SHARD_FORMAT = 1
# A key is two numbers that sort as its bytes do. One byte order throughout: numpy changes others behind one's back.
TABLE_ROW = np.dtype([("hi", "<u8"), ("lo", "<u8"), ("digest", "V16"), ("offset", "<u8"), ("length", "<u8")])
DEFAULT_HEADER_BYTES = 512 * 1024
_TABLE = "__table__"
_METADATA = f'{{"__metadata__":{{"pipeline_shard":"{SHARD_FORMAT}"}}'
_LENGTH = struct.Struct("<Q")
_EMPTY_HEADER_BYTES = _LENGTH.size + len(_METADATA) + 128  # more than the table's own entry needs
_TRAILER = struct.Struct("<8sIIQQQQ16s16s")  # and 16 bytes, the digest of these
_MAGIC = b"PIPESHRD"
TRAILER_BYTES = _TRAILER.size + 16
_TIGHTEN_BYTES = 4 * 1024 * 1024
_CHUNK_BYTES = 1024 * 1024  # stays in the processor's cache between read and hash


@dataclass(frozen=True, slots=True)
class ShardTable:
    """What a shard says it holds: rows of TABLE_ROW in file order, offsets from the start of the file."""

    name: str
    size_bytes: int
    data_start: int
    table_start: int
    header_digest: bytes
    rows: npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ShardVerdict:
    """What a full read of a shard found."""

    name: str
    size_bytes: int
    fault: str  # what is wrong with the file around the records; empty when nothing is
    good: tuple[bytes, ...]
    damaged: tuple[bytes, ...]

    @property
    def whole(self) -> bool:
        """Whether every byte is as it was written."""
        return not self.fault and not self.damaged


class _Placed(NamedTuple):
    """A record that was written into the shard."""

    digest: bytes
    end: int  # from the start of the data
    header_end: int  # header bytes used up to here
    entries: str


class ShardWriter:
    """Appends records to a shard in the making; its memory is one record, whatever the shard's size.

    The header comes first in the file but is known last, so room is reserved for it.
    """

    def __init__(self, disk: Disk, partials: Path, header_bytes: int = DEFAULT_HEADER_BYTES) -> None:
        self._draft = Draft(disk, partials)
        self._reserved = _aligned(header_bytes)
        self._placed: dict[bytes, _Placed] = {}
        self._sealed = False
        self._small: bytes | None = None

    def __contains__(self, key: bytes) -> bool:
        """Say whether the shard holds the key."""
        return key in self._placed

    @property
    def keys(self) -> list[bytes]:
        """The keys in it, in the order they came."""
        return list(self._placed)

    @property
    def open(self) -> bool:
        """Whether it can still be added to and published."""
        return self._draft.open

    def add(self, record: EncodedRecord, shard_bytes: int) -> bool:
        """Append a record, if it fits the reserved header and the target size; the first always does.

        Interrupted before the last line, this leaves bytes that the next record overwrites.
        """
        entries = _entries(record, self._data_end)
        header_end = self._header_end + len(entries)
        fits = header_end <= self._reserved and self._data_end + len(record.blob) <= shard_bytes
        if self._placed and (self._sealed or not fits):
            return False
        if not self._placed:
            self._reserved = max(self._reserved, _aligned(header_end))
        self._draft.write(record.blob, self._reserved + self._data_end)
        digest = xxhash.xxh3_128_digest(record.blob)
        self._placed[record.key] = _Placed(digest, self._data_end + len(record.blob), header_end, entries)
        return True

    def publish(self, shards: Path) -> ShardTable:
        """Finish the file and publish it. Interrupted, it can be called again, and writes the same bytes."""
        self._sealed = True
        data_start = self._tightened()
        table_start = data_start + self._data_end
        rows = self._rows(data_start)
        size = table_start + rows.nbytes + TRAILER_BYTES
        header = self._header(data_start, size)
        self._draft.write(header, 0)
        self._draft.write(rows.tobytes() + _trailer(header, rows, table_start, size), table_start)
        self._draft.truncate(size)
        name = self._draft.stem + SHARD_SUFFIX
        self._draft.publish(shards / name)
        return ShardTable(name, size, data_start, table_start, xxhash.xxh3_128_digest(header), rows)

    def discard(self) -> None:
        """Leave nothing behind."""
        self._draft.discard()

    @property
    def _data_end(self) -> int:
        return next(reversed(self._placed.values())).end if self._placed else 0

    @property
    def _header_end(self) -> int:
        return next(reversed(self._placed.values())).header_end if self._placed else _EMPTY_HEADER_BYTES

    def _tightened(self) -> int:
        """Return where the data begins, having moved a small shard's data down over header room it did not need."""
        needed = _aligned(self._header_end)
        if self._data_end > _TIGHTEN_BYTES or needed >= self._reserved:
            return self._reserved
        if self._small is None:  # read only once: after an interruption the bytes may have been written over
            self._small = self._draft.read(self._data_end, self._reserved)
        self._draft.write(self._small, needed)
        return needed

    def _rows(self, data_start: int) -> npt.NDArray[Any]:
        rows = np.empty(len(self._placed), TABLE_ROW)
        placed = self._placed.values()
        ends = np.array([record.end for record in placed], np.uint64)
        starts = np.concatenate([np.zeros(1, np.uint64), ends[:-1]])
        rows["hi"], rows["lo"] = key_pairs(self.keys).T
        rows["digest"] = np.frombuffer(b"".join(record.digest for record in placed), "V16")
        rows["offset"], rows["length"] = starts + np.uint64(data_start), ends - starts
        return rows

    def _header(self, data_start: int, size: int) -> bytes:
        table = Tensor(_TABLE, "U8", (size - data_start - self._data_end,), self._data_end, size - data_start)
        text = "".join([_METADATA, *(record.entries for record in self._placed.values()), _entry("", table, 0), "}"])
        length = data_start - _LENGTH.size
        return _LENGTH.pack(length) + text.encode().ljust(length)


def read_table(disk: Disk, path: Path) -> ShardTable:
    """Read what a shard holds, from its end, and verify the trailer and the table."""
    fd = disk.open_read(path)
    try:
        return _read_table(disk, fd, path)
    finally:
        disk.close(fd)


def verify_shard(disk: Disk, path: Path) -> ShardVerdict:
    """Read a shard once from front to back and judge each of its records and what is around them."""
    fd = disk.open_read(path)
    try:
        table = _read_table(disk, fd, path)
        ends = [table.data_start, *(table.rows["offset"] + table.rows["length"]).tolist()]
        header_digest, *found = _digests(disk, fd, ends)
    except CacheDamaged as error:
        return ShardVerdict(path.name, disk.size_of_open(fd), error.what, (), ())
    finally:
        disk.close(fd)
    good: list[bytes] = []
    damaged: list[bytes] = []
    for key, digest, wanted in zip(row_keys(table.rows), found, table.rows["digest"].tolist(), strict=True):
        (good if digest == wanted else damaged).append(key)
    fault = "" if header_digest == table.header_digest else "the header is damaged"
    return ShardVerdict(path.name, table.size_bytes, fault, tuple(good), tuple(damaged))


def key_pairs(keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Return keys as pairs of numbers that sort as the keys do."""
    if set(map(len, keys)) - {KEY_BYTES}:
        raise ValueError(f"a key is {KEY_BYTES} bytes")
    return np.frombuffer(b"".join(keys), ">u8").reshape(-1, 2).astype(np.uint64)


def row_keys(rows: npt.NDArray[Any]) -> list[bytes]:
    """Return the keys of table or index rows."""
    pairs = np.stack([rows["hi"], rows["lo"]], axis=1).astype(">u8")
    keys: list[bytes] = pairs.view(f"V{KEY_BYTES}").reshape(-1).tolist()
    return keys


def _aligned(length: int) -> int:
    return length + -length % ALIGNMENT


def _entries(record: EncodedRecord, base: int) -> str:
    prefix = f"{record.key.hex()}/"
    return "".join(_entry(prefix, tensor, base) for tensor in record.tensors)


def _entry(prefix: str, tensor: Tensor, base: int) -> str:
    """Return a tensor's part of the header; no name in it needs escaping."""
    offsets = f'"data_offsets":[{base + tensor.start},{base + tensor.end}]'
    return f',"{prefix}{tensor.name}":{{"dtype":"{tensor.tag}","shape":{_sides(tensor.shape)},{offsets}}}'


def _sides(shape: tuple[int, ...]) -> str:
    """Return a shape as JSON; to write it so takes a quarter of the time of `json.dumps`."""
    return f"[{','.join(map(str, shape))}]"


def _trailer(header: bytes, rows: npt.NDArray[Any], table_start: int, size: int) -> bytes:
    digests = xxhash.xxh3_128_digest(header), xxhash.xxh3_128_digest(rows.tobytes())
    body = _TRAILER.pack(_MAGIC, SHARD_FORMAT, 0, len(rows), len(header), table_start, size, *digests)
    return body + xxhash.xxh3_128_digest(body)


def _read_table(disk: Disk, fd: int, path: Path) -> ShardTable:
    def damaged(what: str) -> CacheDamaged:
        return CacheDamaged(what, where=str(path), remedy=SUBMIT_AGAIN)

    size = disk.size_of_open(fd)
    trailer = disk.read_at(fd, TRAILER_BYTES, max(0, size - TRAILER_BYTES))
    if xxhash.xxh3_128_digest(trailer[: _TRAILER.size]) != trailer[_TRAILER.size :]:
        raise damaged("the shard's end is damaged or missing")
    magic, version, _, count, data_start, table_start, true_size, header_digest, digest = _TRAILER.unpack_from(trailer)
    if magic != _MAGIC or version > SHARD_FORMAT:
        raise damaged(f"the shard is of a format that this version does not know ({version})")
    if true_size != size or table_start + count * TABLE_ROW.itemsize + TRAILER_BYTES != size:
        raise damaged(f"the shard has {size} bytes where {true_size} were written")
    table = disk.read_at(fd, count * TABLE_ROW.itemsize, table_start)
    if xxhash.xxh3_128_digest(table) != digest:
        raise damaged("the shard's table is damaged")
    rows = np.frombuffer(table, TABLE_ROW)
    if not _tiles(rows, data_start, table_start):
        raise damaged("the shard's table contradicts itself")
    return ShardTable(path.name, size, data_start, table_start, header_digest, rows)


def _tiles(rows: npt.NDArray[Any], start: int, end: int) -> bool:
    """Say whether the rows cover the data from start to end without gap or overlap."""
    edges = np.append(rows["offset"], np.uint64(end))
    return bool(edges[0] == start and np.all(edges[1:] - edges[:-1] == rows["length"]) and np.all(edges <= end))


def _digests(disk: Disk, fd: int, ends: list[int]) -> Iterator[bytes]:
    """Return the digest of each stretch of the file that ends at one of `ends`, reading front to back in one buffer."""
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    hasher = xxhash.xxh3_128()
    start = stop = 0  # of the file's bytes that are in the buffer
    position = 0
    for end in ends:
        while position < end:
            if position == stop:
                start, stop = stop, stop + disk.read_into(fd, buffer, stop)
                if start == stop:
                    return
            upto = min(end, stop)
            hasher.update(view[position - start : upto - start])
            position = upto
        yield hasher.digest()
        hasher.reset()
