"""The folder of an export: its file names, manifest and description; read without trusting them.

MANIFEST.sha256          a line for each shard; written last, so that an export without it is not finished
pipeline-export.json     what is in it, by kind
pipeline-cache.json      an export is a cache itself: `cache.under` can name it
KIND/shards/NAME.safetensors
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.command_line import UPGRADE, Command, quoted
from pipeline.errors import CacheDamaged, CacheUnusable, ConfigError
from pipeline.store.cache_folder import CACHE_FORMAT
from pipeline.store.format.cache_layout import EXPORT, MANIFEST, KindLayout
from pipeline.store.format.disk import publish_file
from pipeline.store.snapshot import GONE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from pipeline.store.format.disk import Disk

EXPORT_FORMAT = 1
MANIFEST_BYTES = 64 << 20  # at most: of some 400,000 shards
_LINE = re.compile(r"([0-9a-f]{64})  ([a-z][a-z0-9_-]*)/shards/([A-Za-z0-9][A-Za-z0-9._-]*\.safetensors)")
_EXPORT_AGAIN = Command.of("cache export DIR", then="   (again, at its source: it exports only missing files)")


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A shard by its place in a cache or an export."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/shards/{self.name}"

    def below(self, root: Path) -> Path:
        return KindLayout(root / self.kind).shard(self.name)


def can_be_named(file: ShardFile) -> bool:
    """Say whether a file's name may stand in a manifest."""
    return bool(_LINE.fullmatch(f"{'0' * 64}  {file}"))


def export_sizes(disk: Disk, folder: Path, files: Iterable[ShardFile]) -> dict[ShardFile, int]:
    """Return the sizes of some files of an export."""
    return {file: disk.size_of(file.below(folder)) for file in files}


def size_of_plain(disk: Disk, folder: Path, file: ShardFile) -> int:
    """Return a file's size; refuse one that is, or lies behind, a symbolic link."""
    path = file.below(folder)
    if disk.is_link(path.parent) or disk.is_link(path.parent.parent) or not disk.is_plain_file(path):
        raise CacheDamaged("it is not a plain file, or it is behind a symbolic link")
    return disk.size_of(path)


def describe_export(disk: Disk, folder: Path, files: Mapping[ShardFile, int]) -> None:
    """Write the description of an export: shards and bytes by kind."""
    kinds: dict[str, dict[str, int]] = {}
    for file, size in files.items():
        totals = kinds.setdefault(file.kind, {"shards": 0, "bytes": 0})
        totals["shards"] += 1
        totals["bytes"] += size
    content = {"export": EXPORT_FORMAT, "format": CACHE_FORMAT, "made_by": "pipeline", "kinds": kinds}
    publish_file(disk, folder / EXPORT, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())


def write_export_manifest(disk: Disk, folder: Path, lines: Mapping[ShardFile, str]) -> None:
    """Write the SHA-256 of each file, last of all: an export without a manifest is not finished."""
    text = "".join(f"{lines[file]}  {file}\n" for file in sorted(lines, key=str))
    publish_file(disk, folder / MANIFEST, text.encode())


def read_description(disk: Disk, folder: Path) -> dict[str, int]:
    """Return how many shards of each kind an export has; raise if it is no export, or of a later version."""
    try:
        content = json.loads(_read_plain(disk, folder / EXPORT))
        versions = int(content["export"]), int(content["format"])
        kinds = {str(kind): int(counts["shards"]) for kind, counts in content["kinds"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise CacheDamaged("it cannot be read", where=str(folder / EXPORT), remedy=_EXPORT_AGAIN) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        what = "the folder is not a cache export"
        raise ConfigError(
            what, where=str(folder), remedy=Command.of("cache export DIR", then="   (makes one)")
        ) from error
    if versions[0] > EXPORT_FORMAT or versions[1] > CACHE_FORMAT:
        what = f"the export was made by a newer pipeline (formats {versions[0]} and {versions[1]})"
        raise CacheUnusable(what, where=str(folder), remedy=UPGRADE)
    return kinds


def read_export_manifest(disk: Disk, folder: Path) -> Iterator[tuple[ShardFile, str]]:
    """Yield the files of an export with their SHA-256; refuse a manifest that names anything else."""
    path = folder / MANIFEST
    try:
        text = _read_plain(disk, path).decode("ascii", "replace")
    except FileNotFoundError as error:
        what = "the export is not finished: it has no manifest"
        raise CacheDamaged(what, where=str(folder), remedy=_EXPORT_AGAIN) from error
    *lines, unfinished = text.split("\n")
    for number, line in enumerate([*lines, *filter(None, [unfinished])], 1):
        match = _LINE.fullmatch(line)
        if match is None or (unfinished and number > len(lines)):
            what = f"line {number} is not a file of an export: {line[:120]!r}"
            raise CacheDamaged(what, where=str(path), remedy=_EXPORT_AGAIN)
        yield ShardFile(match[2], match[3]), match[1]


def refuse_unfinished(folder: Path, about: Mapping[str, int], files: Iterable[ShardFile]) -> None:
    """Refuse an export whose manifest does not name as many shards as its description."""
    named = Counter(file.kind for file in files)
    if dict(named) != {kind: shards for kind, shards in about.items() if shards}:
        what = f"the export is incomplete or was copied only in part: its manifest lists {named.total():,} files"
        what += f" but {sum(about.values()):,} were expected"
        raise CacheDamaged(what, where=str(folder), remedy=_EXPORT_AGAIN)


def _read_plain(disk: Disk, path: Path) -> bytes:
    """Read a small file; what is a link or a device is refused."""
    try:
        if not disk.is_plain_file(path):
            raise CacheDamaged("it is not a plain file", where=str(path), remedy=_EXPORT_AGAIN)
        if (size_bytes := disk.size_of(path)) > MANIFEST_BYTES:
            raise CacheDamaged("it is too large for a manifest", where=str(path), remedy=_EXPORT_AGAIN)
        return disk.read_start(path, size_bytes)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise CacheUnusable(reason(error), where=str(path), remedy=f"ls -ld {quoted(path)}") from error


def reason(error: CacheDamaged | OSError) -> str:
    """Return in a few words why a file was not read or written."""
    if isinstance(error, CacheDamaged):
        return error.what
    return "it is missing" if error.errno in GONE else error.strerror or str(error)
