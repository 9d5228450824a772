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


@dataclass(frozen=True, slots=True)
class Beside:
    """The files beside the records."""

    leftovers: tuple[LeftoverFile, ...]
    foreign: tuple[Path, ...]  # what nobody knows here: it is left alone


def find_leftovers(cache: CacheFolder) -> Beside:
    """Return the leftover and foreign files of a cache; the newest report, and its repair, are none."""
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
    return Beside(tuple(leftovers), tuple(foreign))


def refuse_links(cache: CacheFolder) -> None:
    """Raise where a folder of the cache is a link, even to one inside: its files would be swept as another kind's."""
    for folder, *_ in _places(cache):
        for path in (folder, *([folder.parent] if folder.parent != cache.root else [])):
            if path != cache.root and cache.disk.is_link(path):
                what = f"the cache has a symbolic link instead of a folder; its target is {path.readlink()}"
                remedy = f"ls -l {quoted(path)}   (cleaning follows no links; replace it with the folder itself)"
                raise CacheUnusable(what, where=str(path), remedy=remedy)


def _places(cache: CacheFolder) -> Iterator[tuple[Path, str, Mapping[re.Pattern[str], Left]]]:
    """Yield every folder, the kind of its records, and the name patterns of what may be in it."""
    root, kinds = cache.root, cache.kinds()
    own = _named(MARKER, REPORTS, USERS, MANIFEST, EXPORT, STAGED, *BESIDE, *kinds)
    yield root, "", {own: Left.IN_USE, PARTIAL_NAME: Left.TEMPORARY}
    yield root / REPORTS, "", {REPORT_NAME: Left.REPORT, PARTIAL_NAME: Left.TEMPORARY}
    users = {USER_NAME: Left.IN_USE, WANTED_NAME: Left.MEMORY, PARTIAL_NAME: Left.TEMPORARY}
    yield root / USERS, "", users
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


SHOWN = 20


def refuse_unusable(cache: CacheFolder) -> None:
    """Raise where there is no cache, or where links lead out of its folder."""
    if not cache.is_there:
        remedy = Command.submit("all", then="   (makes one), or --set cache.root=FOLDER")
        raise CacheUnusable("no cache found", where=str(cache.root), remedy=remedy)
    refuse_links_out(cache)


def refuse_links_out(cache: CacheFolder) -> None:
    """Raise where a symbolic link in the cache leads out of it; the cache's own folder may be one."""
    try:
        root = cache.root.resolve()
        targets = ((link, _target(link)) for link in _links(cache))
        links_out = [pair for pair in targets if pair[1].is_symlink() or not pair[1].is_relative_to(root)]
    except OSError as error:
        what, place = f"the cache cannot be read: {error.strerror or error}", error.filename or cache.root
        raise CacheUnusable(what, where=str(place), remedy=f"ls -ld {quoted(place)}") from error
    if links_out:
        shown = [f"{link}: {_describe_target(target)}" for link, target in links_out[:SHOWN]]
        more = [f"… and {len(links_out) - SHOWN:,} more"] * (len(links_out) > SHOWN)
        what = "\n  ".join((f"{len(links_out):,} symbolic links lead out of the cache", *shown, *more))
        where, what = (cache.root, what) if links_out[1:] else (links_out[0][0], _describe_target(links_out[0][1]))
        raise CacheUnusable(what, where=str(where), remedy=_remedy(*links_out[0]))


def _describe_target(target: Path) -> str:
    leads = "in a circle" if target.is_symlink() else f"out of the cache, to {target}"
    return f"a symbolic link leads {leads}"


def _remedy(link: Path, target: Path) -> str:
    if target.is_dir():
        return f"ls -l {quoted(link)}   (replace it with the folder itself, or set cache.root to {target.parent})"
    return f"ls -l {quoted(link)}   (replace it with the file itself, or remove it)"


def _target(link: Path) -> Path:
    """Return the target of a link; the link itself if it leads in a circle."""
    try:
        return link.resolve()
    except RuntimeError:  # of Python up to 3.12
        return link


def _links(cache: CacheFolder) -> Iterator[Path]:
    """Yield the symbolic links among a cache's own files and folders; linked folders are not entered."""
    links = set(cache.disk.links_in(cache.root))
    kinds = cache.kinds()
    yield from (cache.root / name for name in sorted(links & {MARKER, REPORTS, USERS, *kinds}))
    for kind in kinds:
        folder = cache.kind(kind).layout.folder
        if kind not in links:
            inner = sorted(cache.disk.links_in(folder))
            yield from (folder / name for name in inner)
            parts = ("shards", "tmp", "quarantine")
            for part in (folder / name for name in parts if name not in inner):
                yield from (part / name for name in sorted(cache.disk.links_in(part)))
