"""Moving a cache: export of its shards to a folder with a manifest, and import from there into another cache.

Every byte is read once on its way, and hashed twice: for the manifest, which `sha256sum --check` understands, and to
compare it with the shard's own digests. What is damaged is named and never published. Both can be run again to finish.
`exported` describes the folder.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pipeline.command_line import Command, quoted
from pipeline.errors import CacheDamaged, CacheFull, CacheUnusable, ConfigError
from pipeline.store.cache_folder import ELSEWHERE, CacheFolder
from pipeline.store.format.cache_layout import EXPORT, PARTIAL_NAME, KindLayout
from pipeline.store.format.disk import Draft, ask_owner, refused_as
from pipeline.store.format.shard import BAD_HEADER, TABLE_ROW, read_table, read_through, row_keys
from pipeline.store.key_lists import sorted_pairs
from pipeline.store.maintenance.exported import (
    ShardFile,
    can_be_named,
    describe_export,
    export_sizes,
    read_description,
    read_export_manifest,
    reason,
    refuse_unfinished,
    size_of_plain,
    write_export_manifest,
)
from pipeline.store.maintenance.leftovers import refuse_links_out
from pipeline.store.snapshot import are_among, shard_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeline.store.format.disk import Disk
    from pipeline.store.shard_index import Rows

    Told = Callable[[int, int], object]  # bytes that were read, and bytes in all

_NEW_FOLDER = Command.of("cache export DIR", then="   (a new or empty folder that you can write to)")


@dataclass(frozen=True, slots=True)
class RefusedFile:
    """A file that was not taken, and why."""

    file: str
    what: str


@dataclass(slots=True)
class Moved:
    """What an export or an import has done."""

    copied: int = 0
    there: int = 0  # with the same content, before
    bytes: int = 0  # of what was copied
    kinds: dict[str, int] = field(default_factory=dict)  # files that are there now
    dropped: int = 0  # of an export: newer ones hold all that was in them
    refused: list[RefusedFile] = field(default_factory=list)

    def add(self, kind: str, *, copied: bool, size_bytes: int) -> None:
        """Count a file that is there now."""
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self.copied, self.there = self.copied + copied, self.there + (not copied)
        self.bytes += size_bytes if copied else 0


class _Reading:
    """Reads shards from front to back, verifying every byte, and reports progress."""

    def __init__(self, disk: Disk, total_bytes: int, tell: Told) -> None:
        self.disk, self._total_bytes, self._tell = disk, total_bytes, tell
        self._bytes = 0

    def read(self, path: Path, draft: Draft | None = None) -> tuple[str, str]:
        """Return a shard's SHA-256, and what is wrong with it (empty if nothing is); copy its bytes to the draft."""
        sha256, position = hashlib.sha256(), 0

        def take(chunk: memoryview) -> None:
            nonlocal position
            sha256.update(chunk)
            if draft:
                draft.write(chunk, position)
            position += len(chunk)
            self._tell(self._bytes + position, self._total_bytes)

        try:
            table = read_table(self.disk, path)
            header_is_whole, whole_N = read_through(self.disk, path, table, take)
        except (CacheDamaged, OSError) as error:
            return "", reason(error)
        self._bytes += position
        if position != table.size_bytes:
            return "", "it changed while being read"
        if damaged := int((~whole_N).sum()):
            return "", f"{damaged:,} of its {len(whole_N):,} records are damaged"
        return sha256.hexdigest(), "" if header_is_whole else BAD_HEADER

    def copy(self, source: Path, target: Path, sha256: str = "") -> tuple[str, str]:
        """Copy a shard that is intact and has that SHA-256, if one is given; return what `read` does."""
        draft = Draft(self.disk, KindLayout(target.parent.parent).partials)
        try:
            sha256_read, fault = self.read(source, draft)
            if not fault and sha256 and sha256_read != sha256:
                fault = "checksum mismatch with the manifest"
            if not fault:
                read_table(self.disk, draft.path)  # the last bytes were read twice: as a table, and to be copied
                draft.publish(target)
        except (CacheDamaged, OSError) as error:
            fault = reason(error)
        finally:
            draft.discard()
        return sha256_read, fault


def export_cache(
    cache: CacheFolder,
    folder: Path,
    kinds: Sequence[str] = (),
    *,
    link: bool = False,
    tell: Told = lambda _now, _all: None,
) -> Moved:
    """Copy (or `link`) a cache's own shards to a folder; those that are there already are verified, and stay.

    Shards that the cache no longer has stay, too, for they may be the last copy; but not those whose records are all in
    newer shards, as after a compaction.
    """
    _refuse_nested(cache, folder)
    try:
        files = dict(_shards(cache, _known_kinds(cache, kinds)))
        with refused_as("the export cannot be written here", _NEW_FOLDER):
            return _exported(cache, folder, kinds, files, link=link, tell=tell)
    except OSError as error:  # of a folder or a size: what fails in reading or writing a shard has its own words
        remedy = f"ls -ld {quoted(cache.root)} {quoted(folder)}"
        raise CacheUnusable(f"a folder cannot be read: {reason(error)}", where=str(folder), remedy=remedy) from error


def _exported(
    cache: CacheFolder, folder: Path, kinds: Sequence[str], files: dict[ShardFile, int], *, link: bool, tell: Told
) -> Moved:
    """Copy the shards, then write description and manifest of what is in the folder."""
    disk, moved = cache.disk, Moved()
    for file in [file for file in files if not can_be_named(file)]:
        del files[file]
        what = "its name is not allowed in a manifest: use letters, digits, dots, dashes and underscores"
        moved.refused.append(RefusedFile(str(file), what))
    target, lines = _opened(folder, disk)
    refuse_links_out(target)
    absent = sum(size for file, size in files.items() if not disk.exists(file.below(folder)))
    _refuse_no_room(disk, folder, 0 if link else absent)
    describe_export(disk, folder, {**export_sizes(disk, folder, lines), **files})
    target.prepare()
    with disk.alone_in(folder) as is_alone:
        if not is_alone:
            later = Command.of("cache export DIR", then="   (another folder, or this one after that export ends)")
            raise ConfigError("another process is exporting to this folder", where=str(folder), remedy=later)
        return _filled(disk, cache, folder, files, _old(target, kinds, files), lines, moved, link=link, tell=tell)


def _filled(
    disk: Disk,
    cache: CacheFolder,
    folder: Path,
    files: Mapping[ShardFile, int],
    old: Mapping[ShardFile, int],
    lines: dict[ShardFile, str],
    moved: Moved,
    *,
    link: bool,
    tell: Told,
) -> Moved:
    """Copy the shards to an export that this process alone writes, and describe it."""
    reading = _Reading(disk, sum(files.values()) + sum(old.values()), tell)
    for place in (folder, *(KindLayout(folder / kind).partials for kind in {file.kind for file in files})):
        _sweep(disk, place)
    for file, size in files.items():
        there, sha256, fault = _export(reading, disk, file.below(cache.root), file.below(folder), link=link)
        if not fault:
            lines[file] = sha256
            moved.add(file.kind, copied=not there, size_bytes=size)
        elif disk.exists(file.below(cache.root)):  # else it was swept or repaired meanwhile
            moved.refused.append(RefusedFile(str(file), fault))
        if fault:
            lines.pop(file, None)
    _keep_old(reading, folder, old, lines, moved)
    describe_export(disk, folder, export_sizes(disk, folder, lines))
    write_export_manifest(disk, folder, lines)
    return moved


def take_in(cache: CacheFolder, folder: Path, *, tell: Told = lambda _now, _all: None) -> Moved:
    """Copy the shards of an export into a cache, each verified on its way, and bring the indexes up to date."""
    disk = cache.disk
    with ask_owner(cache.root):
        about, lines = read_description(disk, folder), dict(read_export_manifest(disk, folder))
        refuse_unfinished(folder, about, lines)
        moved, sizes = Moved(), dict[ShardFile, int]()
        for file in lines:
            try:
                sizes[file] = size_of_plain(disk, folder, file)
            except (CacheDamaged, OSError) as error:
                moved.refused.append(RefusedFile(str(file), reason(error)))
        _refuse_no_room(disk, cache.root, sum(size for file, size in sizes.items() if not _is_in(cache, file)))
        cache.prepare()
        reading = _Reading(disk, sum(sizes.values()), tell)
        for file, size in sizes.items():
            is_in, fault = _take_in(reading, cache, folder, file, lines[file])
            if fault:
                moved.refused.append(RefusedFile(str(file), fault))
            else:
                moved.add(file.kind, copied=not is_in, size_bytes=size)
        for kind in moved.kinds:
            cache.own(kind).write_index()
    return moved


def _export(reading: _Reading, disk: Disk, source: Path, target: Path, *, link: bool) -> tuple[bool, str, str]:
    """Export one shard; return whether it was there, its SHA-256, and what is wrong with it."""
    if disk.exists(target):
        sha256, fault = reading.read(target)
        if not fault:
            return True, sha256, ""
        disk.unlink(target)  # a copy that was damaged after it was made
    if not link:
        return False, *reading.copy(source, target)
    sha256, fault = reading.read(source)
    if not fault:
        _link(disk, source, target)
    return False, sha256, fault


def _take_in(reading: _Reading, cache: CacheFolder, folder: Path, file: ShardFile, sha256: str) -> tuple[bool, str]:
    """Import one shard; return whether it was there, and what is wrong with it."""
    target = file.below(cache.root)
    if not _is_in(cache, file):
        try:
            _, fault = reading.copy(file.below(folder), target, sha256)
        except CacheUnusable:  # another import was quicker, or the cache cannot be written
            if not _is_in(cache, file):
                raise
        else:
            return False, fault
    sha256_there, fault = reading.read(target)
    if fault:
        return True, f"the cache has it damaged ({fault}): pipeline cache repair"
    return True, "" if sha256_there == sha256 else "the cache has a different file of this name and keeps it"


def _shards(cache: CacheFolder, kinds: Sequence[str]) -> Iterator[tuple[ShardFile, int]]:
    """Yield the shards of a cache with their sizes."""
    for kind in kinds:
        layout = KindLayout(cache.root / kind)
        for name in shard_names(cache.disk, layout):
            with suppress(FileNotFoundError):  # swept or repaired meanwhile
                yield ShardFile(kind, name), cache.disk.size_of(layout.shard(name))


def _known_kinds(cache: CacheFolder, kinds: Sequence[str]) -> list[str]:
    """Return the kinds that were named, by default all; refuse unknown ones and an empty cache."""
    known = cache.kinds()
    if not known:
        raise ConfigError("the cache is empty", where=str(cache.root), remedy=Command.submit("all"))
    for kind in kinds:
        if kind not in known:
            what = f"the cache has no records of kind {kind!r}; there are {', '.join(known)}"
            raise ConfigError(what, where="--kind", remedy=Command.of("cache stat"))
    return sorted(set(kinds)) or known


def _refuse_nested(cache: CacheFolder, folder: Path) -> None:
    """Refuse a folder in the cache, or around it."""
    root, place = cache.root.resolve(), folder.resolve()
    if root.is_relative_to(place) or place.is_relative_to(root):
        raise ConfigError(
            "an export cannot be inside its cache or contain it", where=str(folder), remedy="name another"
        )


def _refuse_no_room(disk: Disk, folder: Path, needed_bytes: int) -> None:
    try:
        free_bytes = disk.free_bytes(folder)
    except OSError:  # nobody can tell, so the disk itself will
        return
    if needed_bytes > free_bytes:
        what = f"{needed_bytes / 1e6:,.1f} MB to copy, but {free_bytes / 1e6:,.1f} MB are free"
        raise CacheFull(what, where=str(folder), remedy="free space, or choose a folder on another disk")


def _opened(folder: Path, disk: Disk) -> tuple[CacheFolder, dict[ShardFile, str]]:
    """Open the folder of an export, new or begun before; return it, and the manifest's lines for files that exist."""
    try:
        target = CacheFolder(folder, disk)
    except CacheUnusable as error:
        if error.next != ELSEWHERE:
            raise
        what = "the folder is neither empty nor an export"
        raise CacheUnusable(what, where=str(folder), remedy=_NEW_FOLDER) from error
    if disk.exists(folder / EXPORT):
        read_description(disk, folder)
        with suppress(CacheDamaged):  # there is no manifest yet, or it is made anew
            return target, {
                file: sha for file, sha in read_export_manifest(disk, folder) if disk.exists(file.below(folder))
            }
    elif not all(PARTIAL_NAME.fullmatch(name) for name in disk.list_folder(folder)):
        raise ConfigError("the folder is neither empty nor an export", where=str(folder), remedy=_NEW_FOLDER)
    return target, {}


def _old(target: CacheFolder, kinds: Sequence[str], files: Mapping[ShardFile, int]) -> dict[ShardFile, int]:
    """Return the shards of an export that the cache no longer has, with their sizes."""
    there = _shards(target, [kind for kind in target.kinds() if not kinds or kind in kinds])
    return {file: size for file, size in there if file not in files and can_be_named(file)}


def _keep_old(
    reading: _Reading, folder: Path, old: Mapping[ShardFile, int], lines: dict[ShardFile, str], moved: Moved
) -> None:
    """Verify shards that only the export has; remove one whose records are all in newer ones, as after a compaction."""
    for kind in sorted({file.kind for file in old}):
        newer = [file for file in lines if file.kind == kind and file not in old]
        known = sorted_pairs(b"".join(key for file in newer for key in row_keys(_rows(reading, folder, file))))
        for file in (file for file in old if file.kind == kind):
            sha256, fault = reading.read(file.below(folder))
            rows = _rows(reading, folder, file)
            lines.pop(file, None)
            if len(rows) and are_among(rows["hi"], rows["lo"], known[:, 0], known[:, 1]).all():
                reading.disk.unlink(file.below(folder))
                moved.dropped += 1
            elif fault:
                what = f"{fault}; the cache no longer has it: the file stays here but is not in the manifest"
                moved.refused.append(RefusedFile(str(file), what))
            else:
                lines[file] = sha256
                moved.add(kind, copied=False, size_bytes=old[file])


def _rows(reading: _Reading, folder: Path, file: ShardFile) -> Rows:
    """Return the rows of a shard of an export; none where its table is damaged."""
    try:
        return read_table(reading.disk, file.below(folder)).rows
    except (CacheDamaged, OSError):
        return np.zeros(0, TABLE_ROW)


def _sweep(disk: Disk, folder: Path) -> None:
    for name in disk.list_folder(folder):
        if PARTIAL_NAME.fullmatch(name):
            disk.unlink(folder / name)


def _link(disk: Disk, source: Path, target: Path) -> None:
    """Give a shard a second name in the export."""
    try:
        disk.make_folder(target.parent)
        disk.link(source, target)
        disk.fsync_folder(target.parent)
    except OSError as error:
        what = f"it cannot be linked here: {reason(error)}"
        raise ConfigError(what, where=str(target), remedy="remove --link: copies work across file systems") from error


def _is_in(cache: CacheFolder, file: ShardFile) -> bool:
    return cache.disk.exists(file.below(cache.root))
