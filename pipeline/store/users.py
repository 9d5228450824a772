"""Who uses a cache, and what of it: a small file for each configuration and what it once asked for.

A file is never changed: who asks for something else leaves another file, so nobody has to read before they write.
"""

from __future__ import annotations

import getpass
import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pipeline.errors import CacheFull, CacheUnusable
from pipeline.keys import content_digest
from pipeline.store.draft import Draft, remove
from pipeline.store.layout import USERS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pipeline.store.disk import Disk

FORMAT = 1
SUFFIX = ".json"
USER_NAME = re.compile(r"[0-9a-f]{32}\.json")
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class User:
    """A configuration that uses a cache, and by which recipes what it needs was made."""

    config: str  # the file
    runs: str  # the folder
    tags: frozenset[tuple[str, str]]  # kind, and the beginning of its keys, in hex
    last: float = 0.0  # seconds since 1970
    who: str = ""

    @property
    def name(self) -> str:
        """The name of its file."""
        text = json.dumps([self.config, self.runs, sorted(self.tags)])
        return content_digest(text.encode()).hex() + SUFFIX

    def to_json(self) -> dict[str, object]:
        """Return plain JSON data."""
        return asdict(self) | {"tags": sorted(self.tags)}


def register(disk: Disk, root: Path, user: User) -> bool:
    """Write down who uses a cache; return whether that was possible: a cache that is only read keeps no such list."""
    try:
        draft = Draft(disk, root / USERS)
        draft.write(json.dumps({"user": FORMAT, **user.to_json()}).encode(), 0)
        draft.publish(root / USERS / user.name, replace=True)
    except (CacheUnusable, CacheFull):
        return False
    return True


def registered(disk: Disk, root: Path) -> tuple[list[User], list[str]]:
    """Return who is known to use a cache, by name, and the files of which nobody can tell whose they are."""
    users, unreadable = [], []
    for name in sorted(disk.list_folder(root / USERS)):
        if USER_NAME.fullmatch(name):
            try:
                users.append(_read(disk, root / USERS / name))
            except FileNotFoundError:  # it was forgotten meanwhile
                continue
            except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
                unreadable.append(name)
    return sorted(users, key=lambda one: (one.config, one.last)), unreadable


def forget(disk: Disk, root: Path, users: Iterable[User]) -> None:
    """Take users off the list."""
    for user in users:
        remove(disk, root / USERS / user.name)


def who_am_i() -> str:
    """Return the name of this user; some containers know none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return ""


def _read(disk: Disk, path: Path) -> User:
    fd = disk.open_read(path)
    try:
        told = json.loads(disk.read_at(fd, _MOST_BYTES, 0))
    finally:
        disk.close(fd)
    if told.pop("user") != FORMAT:
        raise ValueError("of another version")
    known = {name: told[name] for name in ("config", "runs", "last", "who")}
    user = User(tags=frozenset((str(kind), str(tag)) for kind, tag in told["tags"]), **known)
    if user.name != path.name:
        raise ValueError("damaged: its name is a digest of what it says")
    return user
