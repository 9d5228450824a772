"""Which keys a data set wants of a kind, as of when it was last judged: so that what is missing is told in an instant.

head: a line of JSON, padded | keys, 16 bytes each, sorted
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from pipeline.errors import CacheFull, CacheUnusable
from pipeline.keys import KEY_BYTES, content_digest
from pipeline.store.draft import Draft
from pipeline.store.keysets import sorted_pairs
from pipeline.store.layout import USERS

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from pipeline.store.disk import Disk
    from pipeline.store.index import Integers

FORMAT = 1
SUFFIX = ".keys"
WANTED_NAME = re.compile(r"[0-9a-f]{32}-[a-z0-9_-]+\.keys")
_HEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a data set wants of a kind."""

    kind: str
    at: float  # seconds since 1970
    pairs: Integers  # sorted, each once


def name_of(kind: str, asked: Any) -> str:
    """Return the name of the file for what was asked, which is plain JSON data."""
    return f"{content_digest(json.dumps([kind, asked], sort_keys=True).encode()).hex()}-{kind}{SUFFIX}"


def remember(disk: Disk, root: Path, kind: str, asked: Any, keys: bytearray) -> bool:
    """Write down what is wanted, keys one after the other; return whether that was possible."""
    data = sorted_pairs(keys).reshape(-1).view(np.uint8).data
    head = {"wanted": FORMAT, "kind": kind, "at": time.time(), "digest": xxhash.xxh3_128_hexdigest(data)}
    try:
        draft = Draft(disk, root / USERS)
        draft.write(json.dumps(head).encode().ljust(_HEAD_BYTES - 1) + b"\n", 0)
        draft.write(data, _HEAD_BYTES)
        draft.publish(root / USERS / name_of(kind, asked), replace=True)
    except (CacheUnusable, CacheFull):
        return False
    return True


def recall(disk: Disk, root: Path, kind: str, asked: Any) -> Wanted | None:
    """Return what was written down; None where nothing was, or nothing that can be believed."""
    try:
        path = root / USERS / name_of(kind, asked)
        fd = disk.open_read(path)
    except OSError:
        return None
    try:
        size = disk.size_of_open(fd)
        head = json.loads(disk.read_at(fd, min(size, _HEAD_BYTES), 0))
        data = disk.read_at(fd, size - _HEAD_BYTES, _HEAD_BYTES) if size > _HEAD_BYTES else b""
        if head["wanted"] == FORMAT and head["digest"] == xxhash.xxh3_128_hexdigest(data):
            return Wanted(kind, float(head["at"]), np.frombuffer(data, "<u8").reshape(-1, KEY_BYTES // 8))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    finally:
        disk.close(fd)
    return None
