"""Small files that are replaced whole or not at all, and read whatever state they are in."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any


PIECE_BYTES = 8 << 20


def file_digest(path: Path) -> str:
    """Return the digest of a file's content, which is read piece by piece."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside another to write to; it takes that one's place in the end, and goes if writing fails."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield aside
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes, *, durable: bool = False, mode: int | None = None) -> None:
    """Write a file so that readers see the old content or the new; durable: it survives a power cut, too."""
    data = content.encode() if isinstance(content, str) else content
    with replacing(path) as aside, aside.open("wb") as file:
        if mode is not None:
            aside.chmod(mode)
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def read_json(path: Path) -> Any | None:
    """Return the JSON value in a file; None where the file is missing, torn or no JSON."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
