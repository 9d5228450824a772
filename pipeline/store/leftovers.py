"""The files of a cache that hold no records that anybody reads: what is left over, and what is not ours.

Only what is named as we name things, in a folder that we make, is ever ours; links are neither followed nor removed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from pipeline.errors import CacheUnusable
from pipeline.store.findings import last_report
from pipeline.store.layout import (
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
from pipeline.store.sweep import youngest
from pipeline.store.users import USER_NAME
from pipeline.store.wanted import WANTED_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pipeline.store.cache import Cache


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
