"""Sets of keys as sorted pairs of numbers, 16 bytes a key: in memory, and as the key lists of data sets on disk."""

from __future__ import annotations

import json
import re
import tempfile
import time
import weakref
from array import array
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import xxhash

from pipeline.errors import CacheFull, CacheUnusable
from pipeline.keys import KEY_BYTES, content_digest
from pipeline.store.format.cache_layout import USERS
from pipeline.store.format.disk import Draft

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import Any

    from numpy.typing import NDArray

    from pipeline.store.format.disk import Disk
    from pipeline.store.shard_index import Integers


def sorted_pairs(keys: bytes | bytearray) -> Integers:
    """Return concatenated keys as sorted pairs of numbers, each once."""
    if len(keys) % KEY_BYTES:
        raise ValueError(f"a key is {KEY_BYTES} bytes")
    rows = np.frombuffer(keys, f"S{KEY_BYTES}").copy()
    rows.sort()  # as bytes and in place: there may be millions, and this is their only copy
    pairs: Integers = rows.view(">u8").byteswap(inplace=True).view("<u8").reshape(-1, 2)
    first = np.ones(len(pairs), bool)
    first[1:] = (pairs[1:] != pairs[:-1]).any(axis=1)
    return pairs if first.all() else pairs[first]


FORMAT = 1
SUFFIX = ".keys"
WANTED_NAME = re.compile(r"[0-9a-f]{32}-[a-z0-9_-]+\.keys")
_HEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class WantedKeys:
    """The keys of one kind that a data set needs."""

    kind: str
    at: float  # seconds since 1970
    pairs: Integers  # sorted, each once


def key_list_name(kind: str, asked: Any) -> str:
    """Return the file name of a key list; `asked` is the JSON data that identifies it."""
    return f"{content_digest(json.dumps([kind, asked], sort_keys=True).encode()).hex()}-{kind}{SUFFIX}"


def remember_keys(disk: Disk, root: Path, kind: str, asked: Any, keys: bytearray) -> bool:
    """Store concatenated keys as a key list; return whether the cache could be written."""
    data = sorted_pairs(keys).reshape(-1).view(np.uint8).data
    head = {"wanted": FORMAT, "kind": kind, "at": time.time(), "digest": xxhash.xxh3_128_hexdigest(data)}
    try:
        draft = Draft(disk, root / USERS)
        draft.write(json.dumps(head).encode().ljust(_HEAD_BYTES - 1) + b"\n", 0)
        draft.write(data, _HEAD_BYTES)
        draft.publish(root / USERS / key_list_name(kind, asked), replace=True)
    except (CacheUnusable, CacheFull):
        return False
    return True


def recall(disk: Disk, root: Path, kind: str, asked: Any) -> WantedKeys | None:
    """Return a stored key list; None where there is none, or it is damaged."""
    try:
        path = root / USERS / key_list_name(kind, asked)
        fd = disk.open_read(path)
    except OSError:
        return None
    try:
        size = disk.size_of_open(fd)
        head = json.loads(disk.read_at(fd, min(size, _HEAD_BYTES), 0))
        data = disk.read_at(fd, size - _HEAD_BYTES, _HEAD_BYTES) if size > _HEAD_BYTES else b""
        if head["wanted"] == FORMAT and head["digest"] == xxhash.xxh3_128_hexdigest(data):
            return WantedKeys(kind, float(head["at"]), np.frombuffer(data, "<u8").reshape(-1, KEY_BYTES // 8))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    finally:
        disk.close(fd)
    return None


class KeyedLines:
    """Takes keys with a line of text each, then gives the text of a key."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it goes when this does
        weakref.finalize(self, self._file.close)
        self._keys, self._offsets = bytearray(), array("Q")
        self._sorted: tuple[NDArray[np.bytes_], NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, key: bytes, text: str) -> None:
        """Keep the text of a key; of a key that is added again, any one of its texts."""
        self._keys += key
        self._offsets.append(self._file.seek(0, 2))
        self._file.write(text.encode() + b"\n")
        self._sorted = None

    def get(self, key: bytes) -> str | None:
        """Return the text of a key."""
        if not len(self):
            return None
        keys, order = self._in_order()
        at = int(np.searchsorted(keys, np.frombuffer(key, f"S{KEY_BYTES}")[0]))
        if at == len(keys) or keys[at].ljust(KEY_BYTES, b"\0") != key:  # numpy drops zeros at the end
            return None
        self._file.seek(self._offsets[int(order[at])])
        return self._file.readline()[:-1].decode()

    def _in_order(self) -> tuple[NDArray[np.bytes_], NDArray[np.int64]]:
        if self._sorted is None:
            keys = np.frombuffer(bytes(self._keys), f"S{KEY_BYTES}")
            order = np.argsort(keys, kind="stable")
            self._sorted = keys[order], order
        return self._sorted


T = TypeVar("T")


def in_chunks(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of at most `size` values."""
    iterator = iter(values)
    while chunk := list(islice(iterator, size)):
        yield chunk
