"""Damage done to files on purpose, and disks on which it shows."""

from __future__ import annotations

import errno
import struct
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from pipeline.store.format.record import encode_record
from pipeline.store.format.shard import TRAILER_BYTES, ShardWriter, read_table, row_keys
from tests.store.content import arrays_of, key_of, put
from tests.store.faulty_disks import os_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pipeline.store.format.record import EncodedRecord
    from pipeline.store.store import Store


def overwrite(path: Path, content: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(content)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << place % 8
    overwrite(path, bytes(content))


def spoil(root: Path, number: int, kind: str = "scan") -> Path:
    """Change a byte in the middle of every copy of a record; return the file of the last."""
    store = CacheFolder(root).kind(kind)
    for place in store.locate([key_of(number)])[0]:
        flip(store.layout.shard(place.shard), place.offset + place.length // 3)
    return store.layout.shard(place.shard)


def fill(store: Store, *shards: Sequence[int]) -> list[str]:
    """Publish a shard for each group of numbers; return their names, oldest first."""
    names = []
    for numbers in shards:
        before = set(listed(store))
        with store.writer() as writer:
            put(writer, *numbers)
        names += sorted(set(listed(store)) - before)
    return names


def listed(store: Store) -> list[str]:
    return sorted(store.disk.list_folder(store.layout.shards))


def record_place(store: Store, shard: str, number: int) -> tuple[int, int]:
    """Return where a record begins and ends in a shard."""
    rows = read_table(Disk(), store.layout.shard(shard)).rows
    row = rows[row_keys(rows).index(key_of(number))]
    return int(row["offset"]), int(row["offset"] + row["length"])


def published(store: Store, *records: EncodedRecord) -> str:
    """Publish records that nobody has looked at."""
    writer = ShardWriter(Disk(), store.layout.partials)
    for record in records:
        writer.add(record, 1 << 30)
    return writer.publish(store.layout.shards).name


def another(number: int) -> EncodedRecord:
    """Return a record that says it is another one."""
    key = key_of(number)
    inside = encode_record(key_of(number + 1000), arrays_of(key), {"name": key.hex()})
    return type(inside)(key, inside.blob, inside.tensors)


def no_record(number: int) -> EncodedRecord:
    """Return bytes that are no record, under a key."""
    right = encode_record(key_of(number), {"noise": np.zeros(100)}, {})
    return type(right)(right.key, b"\0" * len(right.blob), right.tensors)


def of_megabytes(number: int) -> EncodedRecord:
    """Return a record larger than any buffer that says it is another one."""
    large = encode_record(key_of(number + 1000), {"x": np.zeros((1 << 20) - 3, np.uint8)}, {"text": "x" * 70_000})
    return type(large)(key_of(number), large.blob, large.tensors)


def of_later_version(path: Path) -> bytes:
    """Return a shard's bytes with a trailer that says another format."""
    content = path.read_bytes()
    trailer = bytearray(content[-TRAILER_BYTES:-16])
    trailer[8:12] = struct.pack("<I", 99)
    return content[:-TRAILER_BYTES] + bytes(trailer) + xxhash.xxh3_128_digest(bytes(trailer))


class CountingDisk(Disk):
    """Counts the reads of each file."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        self.names: dict[int, str] = {}

    def open_read(self, path: Path) -> int:
        fd = super().open_read(path)
        self.names[fd] = path.name
        return fd

    def open_new(self, path: Path) -> int:
        fd = super().open_new(path)
        self.names[fd] = path.name
        return fd

    def read_at(self, fd: int, length: int, offset: int) -> bytes:
        self.reads[self.names[fd]] += 1
        return super().read_at(fd, length, offset)

    def fill(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.reads[self.names[fd]] += 1
        return super().fill(fd, buffers, offset)


class BadSectorDisk(CountingDisk):
    """A disk that refuses to read some bytes of one file."""

    def __init__(self, name: str, start: int, end: int, number: int = errno.EIO) -> None:
        super().__init__()
        self.bad, self.start, self.end, self.number = name, start, end, number

    def _refuse(self, fd: int, length: int, offset: int) -> None:
        if self.names.get(fd) == self.bad and offset < self.end and offset + length > self.start:
            raise os_error(self.number)

    def read_at(self, fd: int, length: int, offset: int) -> bytes:
        self._refuse(fd, length, offset)
        return super().read_at(fd, length, offset)

    def fill(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._refuse(fd, sum(map(len, buffers)), offset)
        return super().fill(fd, buffers, offset)


class RefusingDisk(Disk):
    """A disk that refuses to open one file, some times or for good."""

    def __init__(self, name: str, number: int, times: int = 1 << 30) -> None:
        self.name, self.number, self.left = name, number, times

    def open_read(self, path: Path) -> int:
        if path.name == self.name and self.left:
            self.left -= 1
            raise os_error(self.number)
        return super().open_read(path)


class MeddlingDisk(Disk):
    """Lets something happen just before the n-th time that one step is taken."""

    def __init__(self, step: str, meddle: Callable[[], None], after: int = 0) -> None:
        self.left = after
        inner = getattr(self, step)

        def meddled(*arguments: Any) -> Any:
            self.left -= 1
            if self.left == -1:
                meddle()
            return inner(*arguments)

        setattr(self, step, meddled)
