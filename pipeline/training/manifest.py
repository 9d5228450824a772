"""What a checkpoint says of itself: its files and their digests, whose it is, and all that is no tensor.

The file is JSON. Its first line holds the format's version and the digest of both that version and all that follows, so
that any changed byte is found, and so that a later version of this program is told from damage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError
from pipeline.keys import content_digest
from pipeline.training.tensor_file import OTHER_MODEL, Written, damaged, unreadable

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.store.disk import Disk

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.safetensors"
_HEAD = re.compile(rb'\{"format": (\d+), "digest": "([0-9a-f]{32})", "checkpoint":\n')


@dataclass(frozen=True)
class Manifest:
    """One checkpoint."""

    name: str  # of its folder
    step: int
    serial: int  # counts what was saved: after a step back, a later one may be of an earlier step
    identity: Mapping[str, Any]
    figure: float | None
    lower_is_better: bool
    files: Mapping[str, Written]
    ranks: Sequence[Mapping[str, Any]]
    data: Mapping[str, Any]

    @property
    def world(self) -> int:
        """How many ranks there were."""
        return len(self.ranks)


def rank_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:04d}.safetensors"


def write(disk: Disk, folder: Path, told: Manifest) -> None:
    """Write a new manifest and wait until it is on the disk."""
    body = {
        "step": told.step,
        "serial": told.serial,
        "identity": told.identity,
        "figure": told.figure,
        "lower_is_better": told.lower_is_better,
        "files": {name: {"bytes": one.bytes, "digest": one.digest} for name, one in sorted(told.files.items())},
        "data": told.data,
        "ranks": told.ranks,
    }
    text = json.dumps(body, indent=1).encode() + b"}\n"
    head = f'{{"format": {FORMAT}, "digest": "{_digest(FORMAT, text)}", "checkpoint":\n'.encode()
    fd = disk.open_new(folder / MANIFEST)
    try:
        disk.write_at(fd, head + text, 0)
        disk.make_published(fd)
        disk.fsync(fd)
    finally:
        disk.close(fd)


def read(disk: Disk, folder: Path) -> Manifest:
    """Return what a checkpoint says of itself, if not a byte of that has changed."""
    path = folder / MANIFEST
    content = _content(disk, path)
    head, line, text = content.partition(b"\n")
    match = _HEAD.fullmatch(head + line)
    if match is None or _digest(int(match[1]), text) != match[2].decode():
        raise damaged(path, f"is damaged: its {len(content):,} bytes are not those that were written")
    if int(match[1]) > FORMAT:
        what = f"is of format {int(match[1])}; this version of pipeline reads up to {FORMAT}"
        raise ConfigError(what, where=str(path), remedy="use the version of pipeline that wrote it, or a newer one")
    return _parsed(folder.name, json.loads(content)["checkpoint"])


def refuse_stranger(told: Manifest, identity: Mapping[str, Any], path: Path) -> None:
    """Raise unless a checkpoint is of this training; say in what they differ."""
    names = sorted(set(told.identity) | set(identity))
    differing = [name for name in names if told.identity.get(name) != identity.get(name)]
    if not differing:
        return
    shown = (f"{name} is {_short(told.identity, name)} there, {_short(identity, name)} here" for name in differing)
    raise ConfigError(
        f"this checkpoint is of another training: {'; '.join(shown)}", where=str(path), remedy=OTHER_MODEL
    )


def plain(value: Any, where: str) -> Any:
    """Return a copy of JSON data as it will come back; anything else is a bug of whoever made it."""
    if value is None or isinstance(value, str | bool | int | float):
        if type(value) in (str, bool, int, float, type(None)):
            return value
        raise TypeError(f"{where} is a {type(value).__name__}: make it plain")  # an enum or a NumPy number
    if isinstance(value, Mapping):
        if strange := [key for key in value if type(key) is not str]:
            raise TypeError(f"{where} has a key that is no text: {strange[0]!r}")
        return {key: plain(one, f"{where}.{key}") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one, f"{where}[{place}]") for place, one in enumerate(value)]
    raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot hold")


def _content(disk: Disk, path: Path) -> bytes:
    try:
        fd = disk.open_read(path)
        try:
            return disk.read_at(fd, disk.size_of_open(fd), 0)
        finally:
            disk.close(fd)
    except OSError as error:
        raise unreadable(path, error) from error


def _parsed(name: str, body: Mapping[str, Any]) -> Manifest:
    """Return a manifest whose digest was right, so that it is as it was written."""
    files = {file: Written(one["bytes"], one["digest"]) for file, one in body["files"].items()}
    rest = {key: body[key] for key in ("step", "serial", "identity", "figure", "lower_is_better", "ranks", "data")}
    return Manifest(name=name, files=files, **rest)


def _digest(version: int, text: bytes) -> str:
    return content_digest(b"%d\n" % version + text).hex()


def _short(identity: Mapping[str, Any], name: str) -> str:
    text = json.dumps(identity[name]) if name in identity else "nothing"
    return text if len(text) <= 60 else f"{text[:57]}..."
