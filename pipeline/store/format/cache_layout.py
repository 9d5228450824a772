"""The names of every file and folder in a cache."""

from __future__ import annotations

import os
import re
import secrets
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


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
        return self.folder.name

    @property
    def shards(self) -> Path:
        return self.folder / "shards"

    @property
    def partials(self) -> Path:
        """The folder of files that are not published yet; on the same file system, so that they can be linked."""
        return self.folder / "tmp"

    @property
    def quarantine(self) -> Path:
        return self.folder / "quarantine"

    @property
    def doubted(self) -> Path:
        """The folder of notes, a file each, about the shards in which a read found damage; they are named like them."""
        return self.folder / "doubted"

    @property
    def index(self) -> Path:
        """The index, which can always be rebuilt from the shards."""
        return self.folder / "index.bin"

    def shard(self, name: str) -> Path:
        return self.shards / name


def unique_stem() -> str:
    """Return a file name stem that no other writer on any host will choose; it begins with the time."""
    host = re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())[:32]
    return f"{datetime.now(UTC):{_TIME}}-{host}-{os.getpid()}-{secrets.token_hex(8)}"


def written_at(shard_name: str) -> datetime | None:
    """Return when a shard was begun, as its name says."""
    try:
        return datetime.strptime(shard_name.split("-")[0], _TIME).replace(tzinfo=UTC)
    except ValueError:
        return None
