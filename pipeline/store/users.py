"""The users of a cache and the keys that their data sets need: small files in `_users`, validated when read."""

from __future__ import annotations

import getpass
import json
import re
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from pipeline.codec import rebuilt
from pipeline.errors import CacheFull, CacheUnusable
from pipeline.keys import KEY_BYTES, content_digest
from pipeline.store.format.cache_layout import USERS
from pipeline.store.format.disk import Draft, publish_file, remove

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import Any

    from pipeline.store.format.disk import Disk
    from pipeline.store.shard_index import KeyColumn

FORMAT = 1
KEYS_FORMAT = 2  # of lists of keys, which are in any order
USER_NAME = re.compile(r"[0-9a-f]{32}\.json")
WANTED_NAME = re.compile(r"[0-9a-f]{32}-[a-z0-9_-]+\.keys")
_MOST_BYTES = 1 << 20
_HEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class User:
    """A configuration that uses a cache, and the recipes of the records that it needs."""

    config: str  # the file
    runs: str  # the folder
    tags: frozenset[tuple[str, str]]  # kind, and the beginning of its keys, in hex
    last: float = 0.0  # seconds since 1970
    who: str = ""

    @property
    def name(self) -> str:
        """The name of its file."""
        text = json.dumps([self.config, self.runs, sorted(self.tags)])
        return f"{content_digest(text.encode()).hex()}.json"

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"tags": sorted(self.tags)}


def register(disk: Disk, root: Path, user: User) -> bool:
    """Note in a cache that a configuration uses it; return whether the cache could be written."""
    try:
        publish_file(disk, root / USERS / user.name, json.dumps({"user": FORMAT, **user.to_json()}).encode())
    except (CacheUnusable, CacheFull):
        return False
    return True


def registered(disk: Disk, root: Path) -> tuple[list[User], list[str]]:
    """Return the known users of a cache, sorted, and the names of user files that cannot be read."""
    users, unreadable = [], []
    for name in sorted(filter(USER_NAME.fullmatch, disk.list_folder(root / USERS))):
        try:
            users.append(_read_user(disk, root / USERS / name))
        except FileNotFoundError:  # it was forgotten meanwhile
            continue
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            unreadable.append(name)
    return sorted(users, key=lambda user: (user.config, user.last)), unreadable


def forget(disk: Disk, root: Path, users: Iterable[User]) -> None:
    """Take users off the list."""
    for user in users:
        remove(disk, root / USERS / user.name)


def who_am_i() -> str:
    """Return this user's login name; empty in containers that know none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return ""


def _read_user(disk: Disk, path: Path) -> User:
    content = json.loads(disk.read_start(path, _MOST_BYTES))
    if content.pop("user") != FORMAT:
        raise ValueError("written by another version")
    user = rebuilt(User, content)
    if user.name != path.name:
        raise ValueError("damaged: its name does not match its checksum")
    return user


@dataclass(frozen=True, slots=True)
class WantedKeys:
    """The keys of one kind that a data set needs."""

    kind: str
    at: float  # seconds since 1970
    keys: KeyColumn  # sorted, each once


def remember_keys(disk: Disk, root: Path, kind: str, asked: Any, pieces: Iterable[Any]) -> bool:
    """Store concatenated keys under the JSON data that identifies them; return whether the cache could be written."""
    digest, end = xxhash.xxh3_128(), _HEAD_BYTES
    try:
        draft = Draft(disk, root / USERS)
        for piece in pieces:
            digest.update(piece)
            draft.write(piece, end)
            end += len(piece)
        head = {"wanted": KEYS_FORMAT, "kind": kind, "at": time.time(), "digest": digest.hexdigest()}
        draft.write(json.dumps(head).encode().ljust(_HEAD_BYTES - 1) + b"\n", 0)
        draft.publish(_key_list(root, kind, asked), replace=True)
    except (CacheUnusable, CacheFull):
        return False
    return True


def recall(disk: Disk, root: Path, kind: str, asked: Any) -> WantedKeys | None:
    """Return stored keys; None where there are none, or they are damaged."""
    path = _key_list(root, kind, asked)
    try:
        content = disk.read_start(path, disk.size_of(path))
        head, data = json.loads(content[:_HEAD_BYTES]), content[_HEAD_BYTES:]
        if head["wanted"] == KEYS_FORMAT and head["digest"] == xxhash.xxh3_128_hexdigest(data):
            return WantedKeys(kind, float(head["at"]), sorted_keys(data))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    return None


def sorted_keys(keys: bytes | bytearray) -> KeyColumn:
    """Return concatenated keys as a sorted array, each once."""
    if len(keys) % KEY_BYTES:
        raise ValueError(f"a key is {KEY_BYTES} bytes")
    column = np.frombuffer(keys, f"S{KEY_BYTES}").copy()
    column.sort()  # in place: there may be millions, and this is their only copy
    first = np.ones(len(column), bool)
    first[1:] = column[1:] != column[:-1]
    return column if first.all() else column[first]


def _key_list(root: Path, kind: str, asked: Any) -> Path:
    digest = content_digest(json.dumps([kind, asked], sort_keys=True).encode())
    return root / USERS / f"{digest.hex()}-{kind}.keys"
