"""Moving records: an export of shards to a folder, an import from there, and a copy on a node's own disk.

An export is a cache itself, which `cache.under` can name, with two more files:

    pipeline-export.json     how many shards of each kind it holds
    MANIFEST.sha256          a line for each shard, for `sha256sum --check`; written last

A shard is verified before its copy gets a name. What is damaged is named and not copied. Run any of it again to
finish.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.command_line import UPGRADE, Command, quoted
from pipeline.errors import CacheDamaged, CacheFull, CacheUnusable, ConfigError
from pipeline.store.cache_folder import CACHE_FORMAT, CacheFolder
from pipeline.store.format.cache_layout import EXPORT, MANIFEST, PARTIAL_NAME, STAGED, KindLayout
from pipeline.store.format.disk import Draft, ask_owner, publish_file, reading, refused_as
from pipeline.store.format.record import Record
from pipeline.store.format.shard import header_fault, read_table, row_keys, whole_rows
from pipeline.store.maintenance.leftovers import refuse_links
from pipeline.store.shard_index import GONE, IndexState, shard_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from pipeline.store.format.disk import Disk
    from pipeline.store.store import Store

    Show = Callable[[int, int], object]  # bytes that were read, and bytes in all
    Keys = npt.NDArray[np.void]  # of 16 bytes each

EXPORT_FORMAT = 1
_MANIFEST_BYTES = 64 << 20  # at most: of some 400,000 shards
_CHUNK_BYTES = 1 << 20
_LINE = re.compile(r"([0-9a-f]{64})  ([a-z][a-z0-9_-]*/shards/[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors)\n")
_NEW_FOLDER = Command.of("cache export DIR", then="   (a new or empty folder that you can write to)")
_EXPORT_AGAIN = Command.of("cache export DIR", then="   (again, at its source: it exports only missing files)")


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
    bytes: int = 0  # of the copied files
    kinds: dict[str, int] = field(default_factory=dict)  # files that are there now
    dropped: int = 0  # of an export: newer ones hold all that was in them
    refused: list[RefusedFile] = field(default_factory=list)

    def add(self, file: str, *, copied_bytes: int | None = None) -> None:
        """Count a file that is there now: copied, or there before."""
        kind = _kind(file)
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self.copied, self.there = self.copied + (copied_bytes is not None), self.there + (copied_bytes is None)
        self.bytes += copied_bytes or 0

    @contextmanager
    def refusing(self, file: str, more: str = "") -> Iterator[None]:
        """Note a file as refused, with `more` about it, where the block finds it damaged or cannot read it."""
        try:
            yield
        except (CacheDamaged, OSError) as error:
            self.refused.append(RefusedFile(file, f"{_reason(error)}{more}"))


class _Shards:
    """Reads shards from front to back, verifies and copies them, and reports progress."""

    def __init__(self, disk: Disk, total_bytes: int, show: Show) -> None:
        self._disk, self._total_bytes, self._show = disk, total_bytes, show
        self._bytes = 0

    def read(self, path: Path, draft: Draft | None = None) -> str:
        """Return the SHA-256 of a shard; raise CacheDamaged if it, or its copy in a draft, is not intact."""
        sha256, position = hashlib.sha256(), 0
        with reading(self._disk, path) as fd:
            while chunk := self._disk.read_at(fd, _CHUNK_BYTES, position):
                sha256.update(chunk)
                if draft:
                    draft.write(chunk, position)
                position += len(chunk)
                self._show(self._bytes + position, self._total_bytes)
        self._bytes += position
        self._verify(draft.path if draft else path)
        return sha256.hexdigest()

    def copy(self, source: Path, target: Path, sha256: str = "") -> str:
        """Copy a shard that is intact and has that SHA-256, if one is given; return its SHA-256."""
        draft = Draft(self._disk, KindLayout(target.parent.parent).partials)
        try:
            sha256_read = self.read(source, draft)
            if sha256 and sha256_read != sha256:
                raise CacheDamaged("checksum mismatch with the manifest")
            draft.publish(target)
        finally:
            draft.discard()
        return sha256_read

    def _verify(self, path: Path) -> None:
        table = read_table(self._disk, path)
        if fault := header_fault(self._disk, path, table):
            raise CacheDamaged(fault)
        with reading(self._disk, path) as fd:
            whole_N = whole_rows(self._disk, fd, table.rows)
        if damaged := int((~whole_N).sum()):
            raise CacheDamaged(f"{damaged:,} of its {len(whole_N):,} records are damaged")


def export_cache(
    cache: CacheFolder,
    folder: Path,
    kinds: Sequence[str] = (),
    *,
    link: bool = False,
    show: Show = lambda _now, _all: None,
) -> Moved:
    """Copy (or `link`) a cache's own shards to a folder; those that are there already are verified, and stay.

    Shards that the cache no longer has stay, too, for they may be the last copy; but not those whose records are all in
    newer shards, as after a compaction.
    """
    root, place = cache.root.resolve(), folder.resolve()
    if root.is_relative_to(place) or place.is_relative_to(root):
        what = "an export cannot be inside its cache or contain it"
        raise ConfigError(what, where=str(folder), remedy="name another")
    try:
        with refused_as("the export cannot be written here", _NEW_FOLDER):
            return _export(cache, _opened(folder, cache.disk), _known_kinds(cache, kinds), link=link, show=show)
    except OSError as error:  # of a folder or a size: what fails in reading or writing a shard has its own words
        remedy = f"ls -ld {quoted(cache.root)} {quoted(folder)}"
        raise CacheUnusable(f"a folder cannot be read: {_reason(error)}", where=str(folder), remedy=remedy) from error


def _export(cache: CacheFolder, target: CacheFolder, kinds: Sequence[str], *, link: bool, show: Show) -> Moved:
    disk, moved, source, folder = cache.disk, Moved(), _files(cache, kinds), target.root
    for file in [file for file in source if not _LINE.fullmatch(f"{'0' * 64}  {file}\n")]:
        del source[file]
        what = "its name is not allowed in a manifest: use letters, digits, dots, dashes and underscores"
        moved.refused.append(RefusedFile(file, what))
    _refuse_no_room(disk, folder, {} if link else source)
    refuse_links(target)
    lines = dict[str, str]()
    with suppress(CacheDamaged):  # of an export that has not ended
        lines = {file: sha256 for file, sha256 in _read_manifest(disk, folder).items() if disk.exists(folder / file)}
    _describe(target, lines)  # marks the folder as an export
    target.prepare()
    with disk.alone_in(folder) as is_alone:
        if not is_alone:
            later = Command.of("cache export DIR", then="   (another folder, or this one after that export ends)")
            raise ConfigError("another process is exporting to this folder", where=str(folder), remedy=later)
        for place in (folder, *(KindLayout(folder / kind).partials for kind in kinds)):
            for name in filter(PARTIAL_NAME.fullmatch, disk.list_folder(place)):
                disk.unlink(place / name)
        old = {file: size for file, size in _files(target, kinds).items() if file not in source}
        shards = _Shards(disk, sum(source.values()) + sum(old.values()), show)
        for file, size in source.items():
            lines.pop(file, None)
            try:
                lines[file], is_there = _exported(shards, cache, folder, file, link=link)
            except (CacheDamaged, OSError) as error:
                if disk.exists(cache.root / file):  # otherwise it was cleaned or repaired meanwhile
                    moved.refused.append(RefusedFile(file, _reason(error)))
            else:
                moved.add(file, copied_bytes=None if is_there else size)
        for file in old:
            lines.pop(file, None)
            _keep_old(shards, target, file, old, lines, moved)
        _describe(target, lines)
        text = "".join(f"{lines[file]}  {file}\n" for file in sorted(lines))
        publish_file(disk, folder / MANIFEST, text.encode())
    return moved


def _exported(shards: _Shards, cache: CacheFolder, folder: Path, file: str, *, link: bool) -> tuple[str, bool]:
    """Export one shard; return its SHA-256, and whether it was there."""
    disk, source, target = cache.disk, cache.root / file, folder / file
    if disk.exists(target):
        with suppress(CacheDamaged, OSError):
            return shards.read(target), True
        disk.unlink(target)  # a copy that was damaged after it was made
    if not link:
        return shards.copy(source, target), False
    sha256 = shards.read(source)
    try:
        disk.make_folder(target.parent)
        disk.link(source, target)
        disk.fsync_folder(target.parent)
    except OSError as error:
        what = f"it cannot be linked here: {_reason(error)}"
        raise ConfigError(what, where=str(target), remedy="remove --link: copies work across file systems") from error
    return sha256, False


def _keep_old(
    shards: _Shards, target: CacheFolder, file: str, old: Mapping[str, int], lines: dict[str, str], moved: Moved
) -> None:
    """Verify a shard that only the export has; remove it if all its records are in newer ones, after a compaction."""
    path, store = target.root / file, target.own(_kind(file))
    newer = {name.rpartition("/")[2] for name in lines if name not in old}
    with suppress(CacheDamaged, OSError):
        copies = store.locate(row_keys(read_table(target.disk, path).rows))
        if copies and all(any(place.shard in newer for place in places) for places in copies):
            target.disk.unlink(path)
            moved.dropped += 1
            return
    with moved.refusing(file, "; the cache no longer has it: the file stays here but is not in the manifest"):
        lines[file] = shards.read(path)
        moved.add(file)


def take_in(cache: CacheFolder, folder: Path, *, show: Show = lambda _now, _all: None) -> Moved:
    """Copy the shards of an export into a cache, each verified on its way, and bring the indexes up to date."""
    disk, moved, sizes = cache.disk, Moved(), dict[str, int]()
    with ask_owner(cache.root):
        lines = _finished_lines(disk, folder)
        for file in lines:
            with moved.refusing(file):
                sizes[file] = _size_of_plain(disk, folder / file)
        _refuse_no_room(disk, cache.root, sizes)
        cache.prepare()
        shards = _Shards(disk, sum(sizes.values()), show)
        for file, size in sizes.items():
            with moved.refusing(file):
                is_there = _taken_in(shards, cache, folder, file, lines[file])
                moved.add(file, copied_bytes=None if is_there else size)
        for kind in moved.kinds:
            cache.own(kind).write_index()
    return moved


def _taken_in(shards: _Shards, cache: CacheFolder, folder: Path, file: str, sha256: str) -> bool:
    """Import one shard; return whether it was there."""
    target = cache.root / file
    if not cache.disk.exists(target):
        try:
            shards.copy(folder / file, target, sha256)
        except CacheUnusable:  # another import was quicker, or the cache cannot be written
            if not cache.disk.exists(target):
                raise
        else:
            return False
    try:
        sha256_there = shards.read(target)
    except (CacheDamaged, OSError) as error:
        raise CacheDamaged(f"the cache has it damaged ({_reason(error)}): pipeline cache repair") from error
    if sha256_there != sha256:
        raise CacheDamaged("the cache has a different file of this name and keeps it")
    return True


def _kind(file: str) -> str:
    return file.partition("/")[0]


def _files(cache: CacheFolder, kinds: Sequence[str]) -> dict[str, int]:
    """Return the shards of a cache with their sizes."""
    files: dict[str, int] = {}
    for kind in kinds:
        layout = KindLayout(cache.root / kind)
        for name in shard_names(cache.disk, layout):
            with suppress(FileNotFoundError):  # cleaned or repaired meanwhile
                files[f"{kind}/{layout.shards.name}/{name}"] = cache.disk.size_of(layout.shard(name))
    return files


def _known_kinds(cache: CacheFolder, kinds: Sequence[str]) -> list[str]:
    """Return the kinds that were named, by default all; refuse unknown ones and an empty cache."""
    known = cache.kinds()
    if not known:
        raise ConfigError("the cache is empty", where=str(cache.root), remedy=Command.submit("all"))
    if unknown := sorted({*kinds} - {*known}):
        what = f"the cache has no records of kind {unknown[0]!r}; there are {', '.join(known)}"
        raise ConfigError(what, where="--kind", remedy=Command.of("cache stat"))
    return sorted(set(kinds)) or known


def _refuse_no_room(disk: Disk, folder: Path, files: Mapping[str, int]) -> None:
    """Raise where there is no room for the files, of these sizes, that are not there yet."""
    needed_bytes = sum(size for file, size in files.items() if not disk.exists(folder / file))
    with suppress(OSError):  # if unknown, the disk itself will report it
        free_bytes = disk.free_bytes(folder)
        if needed_bytes > free_bytes:
            what = f"{needed_bytes / 1e6:,.1f} MB to copy, but {free_bytes / 1e6:,.1f} MB are free"
            raise CacheFull(what, where=str(folder), remedy="free space, or choose a folder on another disk")


def _opened(folder: Path, disk: Disk) -> CacheFolder:
    """Open the folder of an export, new or begun before."""
    if disk.exists(folder / EXPORT):
        _read_description(disk, folder)
    elif not all(PARTIAL_NAME.fullmatch(name) for name in disk.list_folder(folder)):
        raise ConfigError("the folder is neither empty nor an export", where=str(folder), remedy=_NEW_FOLDER)
    return CacheFolder(folder, disk)


def _describe(target: CacheFolder, files: Iterable[str]) -> None:
    """Write the description of an export: shards and bytes by kind."""
    kinds: dict[str, dict[str, int]] = {}
    for file in files:
        totals = kinds.setdefault(_kind(file), {"shards": 0, "bytes": 0})
        totals["shards"] += 1
        totals["bytes"] += target.disk.size_of(target.root / file)
    content = {"export": EXPORT_FORMAT, "format": CACHE_FORMAT, "made_by": "pipeline", "kinds": kinds}
    publish_file(target.disk, target.root / EXPORT, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())


def _finished_lines(disk: Disk, folder: Path) -> dict[str, str]:
    """Return the files of a finished export with their SHA-256."""
    described, lines = _read_description(disk, folder), _read_manifest(disk, folder)
    if Counter(map(_kind, lines)) != Counter(described):
        what = f"the export is incomplete or was copied only in part: its manifest lists {len(lines):,} files"
        what += f" but {sum(described.values()):,} were expected"
        raise CacheDamaged(what, where=str(folder), remedy=_EXPORT_AGAIN)
    return lines


def _read_description(disk: Disk, folder: Path) -> dict[str, int]:
    """Return how many shards of each kind an export has; raise if it is no export, or of a later version."""
    try:
        content = json.loads(_read_plain(disk, folder / EXPORT))
        versions = int(content["export"]), int(content["format"])
        kinds = {str(kind): int(counts["shards"]) for kind, counts in content["kinds"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise CacheDamaged("it cannot be read", where=str(folder / EXPORT), remedy=_EXPORT_AGAIN) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        remedy = Command.of("cache export DIR", then="   (makes one)")
        raise ConfigError("the folder is not a cache export", where=str(folder), remedy=remedy) from error
    if versions[0] > EXPORT_FORMAT or versions[1] > CACHE_FORMAT:
        what = f"the export was made by a newer pipeline (formats {versions[0]} and {versions[1]})"
        raise CacheUnusable(what, where=str(folder), remedy=UPGRADE)
    return kinds


def _read_manifest(disk: Disk, folder: Path) -> dict[str, str]:
    """Return the files of an export with their SHA-256; refuse a manifest that names anything else, or is cut."""
    path, files = folder / MANIFEST, dict[str, str]()
    try:
        text = _read_plain(disk, path).decode("ascii", "replace")
    except FileNotFoundError as error:
        what = "the export is not finished: it has no manifest"
        raise CacheDamaged(what, where=str(folder), remedy=_EXPORT_AGAIN) from error
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if not (match := _LINE.fullmatch(line)):
            what = f"line {number} is not a file of an export: {line[:120]!r}"
            raise CacheDamaged(what, where=str(path), remedy=_EXPORT_AGAIN)
        files[match[2]] = match[1]
    return files


def _read_plain(disk: Disk, path: Path) -> bytes:
    """Read a small file; refuse a link or a device."""
    try:
        if not disk.is_plain_file(path):
            raise CacheDamaged("it is not a plain file", where=str(path), remedy=_EXPORT_AGAIN)
        if (size_bytes := disk.size_of(path)) > _MANIFEST_BYTES:
            raise CacheDamaged("it is too large for a manifest", where=str(path), remedy=_EXPORT_AGAIN)
        return disk.read_start(path, size_bytes)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise CacheUnusable(_reason(error), where=str(path), remedy=f"ls -ld {quoted(path)}") from error


def _size_of_plain(disk: Disk, path: Path) -> int:
    """Return a file's size; refuse one that is, or lies behind, a symbolic link."""
    if disk.is_link(path.parent) or disk.is_link(path.parent.parent) or not disk.is_plain_file(path):
        raise CacheDamaged("it is not a plain file, or it is behind a symbolic link")
    return disk.size_of(path)


def _reason(error: CacheDamaged | OSError) -> str:
    """Return in a few words why a file was not read or written."""
    if isinstance(error, CacheDamaged):
        return error.what
    return "it is missing" if error.errno in GONE else error.strerror or str(error)


# Staging: an ordinary cache on a node's own disk, looked up ahead of the shared one. Its folder is named by its
# contents, so that the next job goes on with what a killed one has left.

_BATCH = 32_768  # keys, of which all places are in memory
_KEPT_FREE = 0.02  # of the copied bytes, for the parts of shards other than records
_MARKER_BYTES = 1 << 16


class Unfit(Exception):
    """Records cannot be staged in this folder; the message says why."""


def open_scratch(place: Path, name: str, disk: Disk) -> CacheFolder:
    """Open the cache of that name on a node's own disk; raise Unfit if it is in memory, or not private."""
    folder = place / f"pipeline-{name}"
    try:
        is_private = disk.make_private_folder(folder)
        if disk.in_memory(folder):
            raise Unfit(f"{place} is in memory and would count toward the job's memory")
        if not is_private:  # else others could write there, and their records would be read
            raise Unfit(f"{folder} is accessible to other users")
    except OSError as error:
        raise Unfit(f"{folder}: {error.strerror or error}") from error
    return CacheFolder(folder, disk)


class CacheStaging:
    """Copies records to a node's own disk; stops when `goes_on`, called after each, says there is no time left."""

    def __init__(
        self, source: CacheFolder, scratch: CacheFolder, *, shard_bytes: int, goes_on: Callable[[], bool]
    ) -> None:
        self.source, self.scratch = source, scratch
        self.bytes = 0  # copied
        self.records: dict[str, int] = {}  # that are there, by kind
        self.is_whole = True  # whether all that was asked for is
        self._shard_bytes, self._goes_on = shard_bytes, goes_on

    def is_done(self) -> bool:
        """Return whether an earlier job has copied everything, and all of it is still there."""
        try:
            marker = json.loads(self.scratch.disk.read_start(self.scratch.root / STAGED, _MARKER_BYTES))
        except (OSError, ValueError, RecursionError):
            return False
        return bool(marker) and marker == self._stat()

    def take(self, kind: str, keys: Keys, header_bytes: int) -> Iterator[Record]:
        """Copy records, and yield each that can be read; raise Unfit at the start if they do not fit the disk."""
        own, both = self.scratch.own(kind), self.source.behind(self.scratch).kind(kind)
        before, self.is_whole, self.records[kind] = self.is_whole, False, 0
        batches = [keys[start : start + _BATCH] for start in range(0, len(keys), _BATCH)]
        self._refuse_no_room(sum(sum(_absent(own, both, batch.tolist()).values()) for batch in batches))
        with own.writer(shard_bytes=self._shard_bytes, header_bytes=header_bytes) as writer:
            for batch in batches:
                absent = _absent(own, both, batch.tolist())
                for key, record in both.read_by_place(batch.tolist()):
                    if not isinstance(record, Record):  # the job will get the error when it reads the record
                        continue
                    if not self._goes_on():
                        return
                    if key in absent:
                        writer.put(key, record.arrays, record.meta, bfloat16=record.bfloat16)
                        self.bytes += absent[key]
                    self.records[kind] += 1
                    yield record
        self.is_whole = before and self.records[kind] == len(keys)

    def finish(self) -> None:
        """Bring the indexes up to date; if everything was copied, write the marker that says so."""
        for kind in self.scratch.kinds():
            if (own := self.scratch.own(kind)).stat().index is not IndexState.CURRENT:
                own.write_index()
        if self.is_whole:
            publish_file(self.scratch.disk, self.scratch.root / STAGED, json.dumps(self._stat()).encode())

    def _stat(self) -> dict[str, Any]:
        """Return the staged records and bytes by kind."""
        stats = {kind: self.scratch.own(kind).stat() for kind in self.scratch.kinds()}
        return {kind: [stat.records, stat.bytes] for kind, stat in stats.items()}

    def _refuse_no_room(self, needed_bytes: int) -> None:
        free_bytes = self.scratch.disk.free_bytes(self.scratch.root)
        if needed_bytes * (1 + _KEPT_FREE) > free_bytes:
            free = f"where {free_bytes / 1e6:,.1f} are free"
            raise Unfit(f"{needed_bytes / 1e6:,.1f} MB do not fit in {self.scratch.root}, {free}")


def _absent(own: Store, both: Store, keys: Sequence[bytes]) -> dict[bytes, int]:
    """Return the sizes of the records that are still to be copied, by key."""
    absent = own.missing(keys)
    return {key: copies[0].length for key, copies in zip(absent, both.locate(absent), strict=True) if copies}
