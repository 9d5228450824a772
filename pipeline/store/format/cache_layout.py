"""The names of every file and folder in a cache."""

from __future__ import annotations

import os
import re
import secrets
import socket
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from pipeline.errors import CacheUnusable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pipeline.store.cache_folder import Cache

MARKER = "pipeline-cache.json"
SHARD_SUFFIX = ".safetensors"
PARTIAL_SUFFIX = ".partial"
# Folders of the whole cache; no kind of records begins with an underscore.
REPORTS = "_reports"  # what validations found
USERS = "_users"  # who uses this cache, and what of it
STAGED = "staged.json"  # of a cache on a node's own disk: all is there that was to be; published by a rename
# Files of a cache that was exported.
MANIFEST = "MANIFEST.sha256"
EXPORT = "pipeline-export.json"
_TIME = "%Y%m%dT%H%M%SZ"
_STEM = r"\d{8}T\d{6}Z-[A-Za-z0-9_]{0,32}-\d+-[0-9a-f]{16}"  # as `unique_stem` makes them
SHARD_NAME = re.compile(_STEM + re.escape(SHARD_SUFFIX))
PARTIAL_NAME = re.compile(_STEM + re.escape(PARTIAL_SUFFIX))
_OF_RUN = r"\d{8}T\d{6}Z-[0-9a-f]{1,8}-validate"  # of a validation by tasks: as its run is named
REPORT_NAME = re.compile(f"(?:{_STEM}|{_OF_RUN})" + re.escape(".jsonl"))
BESIDE = {"README.md", ".gitignore", "lost+found"}  # what may lie in a cache besides what we make


@dataclass(frozen=True, slots=True)
class KindLayout:
    """Where the records of one kind live."""

    folder: Path

    @property
    def kind(self) -> str:
        """The kind's name."""
        return self.folder.name

    @property
    def shards(self) -> Path:
        """The folder of published shards."""
        return self.folder / "shards"

    @property
    def partials(self) -> Path:
        """The folder of files that are not published yet; on the same file system, so that they can be linked."""
        return self.folder / "tmp"

    @property
    def quarantine(self) -> Path:
        """The folder of damaged shards that a repair has put aside."""
        return self.folder / "quarantine"

    @property
    def index(self) -> Path:
        """The index, which can always be rebuilt from the shards."""
        return self.folder / "index.bin"

    def shard(self, name: str) -> Path:
        """Return the path of the shard with this file name."""
        return self.shards / name


def unique_stem() -> str:
    """Return a file name stem that no other writer on any host will choose; it begins with the time."""
    host = re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())[:32]
    return f"{datetime.now(timezone.utc):{_TIME}}-{host}-{os.getpid()}-{secrets.token_hex(8)}"


def written_at(shard_name: str) -> datetime | None:
    """Return when a shard was begun, as its name says."""
    try:
        return datetime.strptime(shard_name.split("-")[0], _TIME).replace(tzinfo=timezone.utc)
    except ValueError:
        return None


SHOWN = 20


def refuse_unusable(cache: Cache) -> None:
    """Raise where no cache is, or one that is not all in one folder."""
    if not cache.is_there:
        remedy = "pipeline submit --stage all   (makes one), or --set cache.root=FOLDER"
        raise CacheUnusable("no cache is there", where=str(cache.root), remedy=remedy)
    refuse_links_out(cache)


def refuse_links_out(cache: Cache) -> None:
    """Raise where a symbolic link in the cache leads out of it; the cache's own folder may be one."""
    try:
        root = cache.root.resolve()
        out = [(link, target) for link in _links(cache) if _leads_out(target := _target(link), root)]
    except OSError as error:
        what, remedy = f"the cache cannot be read: {error.strerror or error}", f"ls -ld {error.filename or cache.root}"
        raise CacheUnusable(what, where=str(error.filename or cache.root), remedy=remedy) from error
    if out:
        shown = [f"{link}: {_said_of(target)}" for link, target in out[:SHOWN]]
        more = [f"… and {len(out) - SHOWN:,} more"] * (len(out) > SHOWN)
        what = "\n  ".join((f"{len(out):,} symbolic links lead out of the cache", *shown, *more))
        where, what = (cache.root, what) if out[1:] else (out[0][0], _said_of(out[0][1]))
        raise CacheUnusable(what, where=str(where), remedy=_remedy(*out[0]))


def _leads_out(target: Path, root: Path) -> bool:
    return target.is_symlink() or not target.is_relative_to(root)


def _said_of(target: Path) -> str:
    leads = "round in a circle" if target.is_symlink() else f"out of the cache, to {target}"
    return f"a symbolic link leads {leads}"


def _remedy(link: Path, target: Path) -> str:
    """Return what to do about a link."""
    if target.is_dir():
        return f"ls -l {link}   (replace the link by the folder itself, or set cache.root to {target.parent})"
    return f"ls -l {link}   (put the file itself there, or remove the link)"


def _target(link: Path) -> Path:
    """Return where a link leads; to a link, if that is round in a circle."""
    try:
        return link.resolve()
    except RuntimeError:  # of Python up to 3.12
        return link


def _links(cache: Cache) -> Iterator[Path]:
    """Yield the symbolic links among what belongs to a cache; a folder that is one is not looked into."""
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
