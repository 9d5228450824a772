"""The files of a cache that hold no records that anybody reads: what is left over, and what is not ours.

Only what is named as we name things, in a folder that we make, is ever ours; links are neither followed nor removed.
"""

from __future__ import annotations

import getpass
import json
import re
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING

from pipeline.errors import CacheFull, CacheUnusable
from pipeline.keys import content_digest
from pipeline.store.format.cache_layout import (
    BESIDE,
    EXPORT,
    MANIFEST,
    MARKER,
    PARTIAL_NAME,
    REPORT_NAME,
    REPORTS,
    SHARD_NAME,
    STAGED,
    USERS,
    KindLayout,
)
from pipeline.store.format.disk import Draft, remove
from pipeline.store.key_lists import WANTED_NAME
from pipeline.store.maintenance.damage_report import last_report
from pipeline.store.maintenance.sweep import youngest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from pipeline.store.cache_folder import Cache
    from pipeline.store.format.disk import Disk


class Left(str, Enum):
    """What a file is that holds no records."""

    TEMPORARY = "temporary files"  # of writers that died, unless they are young
    QUARANTINE = "quarantine"  # damaged shards that a repair has put aside
    REPORT = "reports"  # what validations found
    MEMORY = "lists of keys"  # that a data set wanted when it was judged
    IN_USE = "in use"  # by other parts of the store


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that may go, and since when it is as it is."""

    path: Path
    what: Left
    kind: str  # empty: of the whole cache
    bytes: int
    since: float  # seconds since 1970


@dataclass(frozen=True, slots=True)
class Beside:
    """What there is beside the records."""

    leftovers: tuple[Leftover, ...]
    foreign: tuple[Path, ...]  # what nobody knows here: it is left alone


def beside(cache: Cache) -> Beside:
    """Look through the folders of a cache; the last report is none of those that may go."""
    leftovers: list[Leftover] = []
    foreign: list[Path] = []
    disk, last = cache.disk, last_report(cache.disk, cache.root)
    for folder, kind, patterns in _places(cache):
        for name in sorted(disk.list_folder(folder)):
            path = folder / name
            what = next((what for pattern, what in patterns.items() if pattern.fullmatch(name)), None)
            try:
                if what is None or (what is not Left.IN_USE and not disk.is_plain_file(path)):
                    foreign.append(path)
                elif what is not Left.IN_USE and not (last and path == last.path):
                    since = youngest(disk, path, changed=what is Left.QUARANTINE)
                    leftovers.append(Leftover(path, what, kind, disk.size_of(path), since))
            except FileNotFoundError:  # it was published or removed meanwhile
                continue
    return Beside(tuple(leftovers), tuple(foreign))


def refuse_links(cache: Cache) -> None:
    """Raise where a folder of the cache is a link, to one in it, too: nothing must be swept as something else."""
    for folder, *_ in _places(cache):
        for path in (folder, *([folder.parent] if folder.parent != cache.root else [])):
            if path != cache.root and cache.disk.is_link(path):
                what = f"a symbolic link stands in the cache where a folder should be: it leads to {path.readlink()}"
                remedy = f"ls -l {path}   (cleaning follows no links; put the folder itself there)"
                raise CacheUnusable(what, where=str(path), remedy=remedy)


def _places(cache: Cache) -> Iterator[tuple[Path, str, Mapping[re.Pattern[str], Left]]]:
    """Yield every folder, of which kind it is, and what may be in it."""
    root, kinds = cache.root, cache.kinds()
    own = _named(MARKER, REPORTS, USERS, MANIFEST, EXPORT, STAGED, *BESIDE, *kinds)
    yield root, "", {own: Left.IN_USE, PARTIAL_NAME: Left.TEMPORARY}
    yield root / REPORTS, "", {REPORT_NAME: Left.REPORT, PARTIAL_NAME: Left.TEMPORARY}
    users = {USER_NAME: Left.IN_USE, WANTED_NAME: Left.MEMORY, PARTIAL_NAME: Left.TEMPORARY}
    yield root / USERS, "", users
    for kind in kinds:
        layout = KindLayout(root / kind)
        parts = _named(layout.shards.name, layout.partials.name, layout.quarantine.name, layout.index.name)
        yield layout.folder, kind, {parts: Left.IN_USE}
        yield layout.shards, kind, {SHARD_NAME: Left.IN_USE}
        yield layout.partials, kind, {PARTIAL_NAME: Left.TEMPORARY}
        yield layout.quarantine, kind, {SHARD_NAME: Left.QUARANTINE}


def _named(*names: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, names)))


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
