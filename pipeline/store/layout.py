"""The names of every file and folder in a cache."""

from __future__ import annotations

import os
import re
import secrets
import socket
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MARKER = "pipeline-cache.json"
SHARD_SUFFIX = ".safetensors"
PARTIAL_SUFFIX = ".partial"
_TIME = "%Y%m%dT%H%M%SZ"


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
