"""The files of a cache that hold no records: leftovers that may be cleaned, foreign files, and links that are refused.

Only a file named by our patterns, in a folder that we make, counts as ours; links are neither followed nor removed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from pipeline.command_line import Command, quoted
from pipeline.errors import CacheUnusable
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
from pipeline.store.maintenance.damage_report import last_report, repair_of
from pipeline.store.maintenance.shard_plans import youngest
from pipeline.store.users import USER_NAME, WANTED_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pipeline.store.cache_folder import CacheFolder

SHOWN = 20  # links that a refusal names


class Left(StrEnum):
    """The role of a file that holds no records."""

    TEMPORARY = "temporary files"  # of writers that died, unless they are young
    QUARANTINE = "quarantine"  # damaged shards that a repair has put aside
    REPORT = "reports"  # what validations found
    MEMORY = "lists of keys"  # that a data set wanted when it was judged
    IN_USE = "in use"  # by other parts of the store


@dataclass(frozen=True, slots=True)
class LeftoverFile:
    """A file that may be removed, and when it last changed."""

    path: Path
    what: Left
    kind: str  # empty: of the whole cache
    bytes: int
    since: float  # seconds since 1970


def find_leftovers(cache: CacheFolder) -> tuple[list[LeftoverFile], list[Path]]:
    """Return the leftover files of a cache, and unknown ones, which are left alone.

    The newest report, and that of its repair, are neither.
    """
    leftovers: list[LeftoverFile] = []
    foreign: list[Path] = []
    disk, last = cache.disk, last_report(cache.disk, cache.root)
    repaired = last and repair_of(disk, cache.root, last)
    known = {report.path for report in (last, repaired) if report}
    for folder, kind, patterns in _places(cache):
        for name in sorted(disk.list_folder(folder)):
            path = folder / name
            role = next((role for pattern, role in patterns.items() if pattern.fullmatch(name)), None)
            try:
                if role is None or (role is not Left.IN_USE and not disk.is_plain_file(path)):
                    foreign.append(path)
                elif role is not Left.IN_USE and path not in known:
                    since = youngest(disk, path, changed=role is Left.QUARANTINE)
                    leftovers.append(LeftoverFile(path, role, kind, disk.size_of(path), since))
            except FileNotFoundError:  # it was published or removed meanwhile
                continue
    return leftovers, foreign


def _places(cache: CacheFolder) -> Iterator[tuple[Path, str, Mapping[re.Pattern[str], Left]]]:
    """Yield every folder, the kind of its records, and the name patterns of what may be in it."""
    root, kinds = cache.root, cache.kinds()
    own = _named(MARKER, REPORTS, USERS, MANIFEST, EXPORT, STAGED, *BESIDE, *kinds)
    yield root, "", {own: Left.IN_USE, PARTIAL_NAME: Left.TEMPORARY}
    yield root / REPORTS, "", {REPORT_NAME: Left.REPORT, PARTIAL_NAME: Left.TEMPORARY}
    yield root / USERS, "", {USER_NAME: Left.IN_USE, WANTED_NAME: Left.MEMORY, PARTIAL_NAME: Left.TEMPORARY}
    for kind in kinds:
        layout = KindLayout(root / kind)
        folders = (layout.shards, layout.partials, layout.doubted, layout.quarantine)
        parts = _named(*(folder.name for folder in folders), layout.index.name)
        yield layout.folder, kind, {parts: Left.IN_USE}
        yield layout.shards, kind, {SHARD_NAME: Left.IN_USE}
        yield layout.partials, kind, {PARTIAL_NAME: Left.TEMPORARY}
        yield layout.doubted, kind, {SHARD_NAME: Left.REPORT, PARTIAL_NAME: Left.TEMPORARY}
        yield layout.quarantine, kind, {SHARD_NAME: Left.QUARANTINE}


def _named(*names: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, names)))


def refuse_unusable(cache: CacheFolder) -> None:
    """Raise where there is no cache, or where a part of it is a symbolic link."""
    if not cache.is_there:
        remedy = Command.submit("all", then="   (makes one), or --set cache.root=FOLDER")
        raise CacheUnusable("no cache found", where=str(cache.root), remedy=remedy)
    refuse_links(cache)


def refuse_links(cache: CacheFolder) -> None:
    """Raise where a part of the cache is a symbolic link: it may lead out of it, or to records of another kind.

    The cache's own folder may be a link.
    """
    try:
        links = _links(cache)
    except OSError as error:
        what, place = f"the cache cannot be read: {error.strerror or error}", error.filename or cache.root
        raise CacheUnusable(what, where=str(place), remedy=f"ls -ld {quoted(place)}") from error
    if links:
        shown = [f"{link} leads to {link.readlink()}" for link in links[:SHOWN]]
        more = [f"… and {len(links) - SHOWN:,} more"] * (len(links) > SHOWN)
        what = "\n  ".join(("the cache contains symbolic links, which pipeline does not follow", *shown, *more))
        remedy = f"ls -l {quoted(links[0])}   (replace it with what it leads to, or set cache.root to that cache)"
        raise CacheUnusable(what, where=str(links[0]), remedy=remedy)


def _links(cache: CacheFolder) -> list[Path]:
    """Return the symbolic links among a cache's own files and folders; linked folders are not entered."""
    links: list[Path] = []
    own = {MARKER, REPORTS, USERS, *cache.kinds()}
    for folder, kind, _ in _places(cache):
        if (kind or folder == cache.root) and not {folder, folder.parent} & {*links}:
            names = cache.disk.links_in(folder)
            links += sorted(folder / name for name in names if kind or name in own)
    return links
