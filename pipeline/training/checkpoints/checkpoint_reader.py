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
from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints import tensor_file
from pipeline.training.checkpoints.tensor_file import (
    OTHER_MODEL,
    TensorFile,
    WrittenFile,
    damaged_file,
    unreadable_file,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from pipeline.training.checkpoints.tensor_file import TensorSpec

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
    files: Mapping[str, WrittenFile]
    ranks: Sequence[Mapping[str, Any]]
    data: Mapping[str, Any]

    @property
    def world(self) -> int:
        return len(self.ranks)


def rank_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:04d}.safetensors"


def write_manifest(disk: Disk, folder: Path, told: Manifest) -> None:
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
    tensor_file.write_pieces(disk, folder / MANIFEST, [head + text])


def read_manifest(disk: Disk, folder: Path) -> Manifest:
    """Return what a checkpoint says of itself, if not a byte of that has changed."""
    path = folder / MANIFEST
    content = _content(disk, path)
    head, line, text = content.partition(b"\n")
    match = _HEAD.fullmatch(head + line)
    if match is None or _digest(int(match[1]), text) != match[2].decode():
        raise damaged_file(path, f"is damaged: its {len(content):,} bytes are not those that were written")
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


def plain_json(value: Any, where: str) -> Any:
    """Return a copy of JSON data as it will come back; anything else is a bug of whoever made it."""
    if value is None or isinstance(value, str | bool | int | float):
        if type(value) in (str, bool, int, float, type(None)):
            return value
        raise TypeError(f"{where} is a {type(value).__name__}: make it plain")  # an enum or a NumPy number
    if isinstance(value, Mapping):
        if strange := [key for key in value if type(key) is not str]:
            raise TypeError(f"{where} has a key that is no text: {strange[0]!r}")
        return {key: plain_json(one, f"{where}.{key}") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(one, f"{where}[{place}]") for place, one in enumerate(value)]
    raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot hold")


def _content(disk: Disk, path: Path) -> bytes:
    try:
        fd = disk.open_read(path)
        try:
            return disk.read_at(fd, disk.size_of_open(fd), 0)
        finally:
            disk.close(fd)
    except OSError as error:
        raise unreadable_file(path, error) from error


def _parsed(name: str, body: Mapping[str, Any]) -> Manifest:
    """Return a manifest whose digest was right, so that it is as it was written."""
    files = {file: WrittenFile(one["bytes"], one["digest"]) for file, one in body["files"].items()}
    rest = {key: body[key] for key in ("step", "serial", "identity", "figure", "lower_is_better", "ranks", "data")}
    return Manifest(name=name, files=files, **rest)


def _digest(version: int, text: bytes) -> str:
    return content_digest(b"%d\n" % version + text).hex()


def _short(identity: Mapping[str, Any], name: str) -> str:
    text = json.dumps(identity[name]) if name in identity else "nothing"
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True)
class Own:
    """What one rank had of its own."""

    tensors: Mapping[str, Tensor]
    data: Mapping[str, Any]


class LoadedCheckpoint:
    """A checkpoint that is there: its data in memory, its tensors still in their files."""

    def __init__(self, disk: Disk, path: Path, told: Manifest) -> None:
        self._disk, self.path, self._told = disk, path, told
        self.name, self.step, self.world, self.figure = path.name, told.step, told.world, told.figure
        self.data: Mapping[str, Any] = told.data
        self._state = TensorFile(disk, path / STATE, told.files[STATE])

    @property
    def is_finished(self) -> bool:
        """Say whether training ended with it: `finished` is true in its data."""
        return self.data.get("finished") is True

    @property
    def is_divided(self) -> bool:
        """Say whether ranks have written parts of tensors: `sharded_checkpoint.assembled` reads those."""
        return any("parts" in one for one in self._told.ranks)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Return the type and shape of every tensor that all ranks have alike."""
        return self._state.specs

    @property
    def same(self) -> Mapping[str, str]:
        """Return which names are other names of tensors that are stored, and of which."""
        return self._state.same

    def load_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors by name, in place; the whole file is read and digested, whatever is asked for."""
        self._state.load_into(targets)

    def own(self, rank: int) -> Own | None:
        """Return what a rank had of its own; nothing where there were fewer ranks: the loop seeds it anew."""
        if rank >= self.world:
            return None
        name = rank_file(rank)
        tensors = TensorFile(self._disk, self.path / name, self._told.files[name]).load()
        return Own(tensors, self._told.ranks[rank])


def open_checkpoint(
    path: Path, identity: Mapping[str, Any] | None = None, *, verified: bool = False, disk: Disk | None = None
) -> LoadedCheckpoint:
    """Return the checkpoint of a folder; of any model, unless an identity is given."""
    disk = disk or Disk()
    if not path.is_dir():
        there = sorted(name for name in disk.list_folder(path.parent) if name.startswith("step-"))
        what = f"there is no such checkpoint; there is: {', '.join(there[-8:]) or 'none'}"
        raise ConfigError(what, where=str(path), remedy=f"ls {path.parent}")
    told = read_manifest(disk, path)
    if identity is not None:
        refuse_stranger(told, identity, path)
    return LoadedCheckpoint(disk, path, told) if verified else verified_checkpoint(disk, path, told)


def verified_checkpoint(disk: Disk, path: Path, told: Manifest) -> LoadedCheckpoint:
    """Return a checkpoint all of whose bytes were read and found right."""
    for name, written in told.files.items():
        tensor_file.verify_file(disk, path / name, written)
    return LoadedCheckpoint(disk, path, told)
