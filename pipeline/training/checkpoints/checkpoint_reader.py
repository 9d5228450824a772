"""Reading checkpoints, and their manifest: files with digests, the training's identity, and all JSON data.

The manifest is JSON. Its first line holds the format's version and a digest of that version and all that follows, so
that any changed byte is noticed, and a file of a later version of this program is not taken for a damaged one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pipeline.command_line import quoted
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
from pipeline.training.state import TRAINING

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from pipeline.training.checkpoints.tensor_file import TensorSpec

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.safetensors"
_HEAD = re.compile(rb'\{"format": (\d+), "digest": "([0-9a-f]{32})", "checkpoint":\n')


@dataclass(frozen=True)
class Manifest:
    """The description of one checkpoint."""

    name: str  # of its folder
    step: int
    serial: int  # counts checkpoints: after a rollback, a later one may be of an earlier step
    identity: Mapping[str, Any]
    figure: float | None
    lower_is_better: bool
    files: Mapping[str, WrittenFile]
    ranks: Sequence[Mapping[str, Any]]
    data: Mapping[str, Any]

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def of_all_items(self) -> bool:
        """Whether no step was made without items that could not be read."""
        return not self.data.get(TRAINING, {}).get("damaged")


def rank_file(rank: int) -> str:
    """Return the name of a rank's own file."""
    return f"rank-{rank:04d}.safetensors"


def write_manifest(disk: Disk, folder: Path, manifest: Manifest) -> None:
    """Write a new manifest and wait until it is on the disk."""
    body = asdict(manifest)
    del body["name"]
    text = json.dumps(body, indent=1).encode() + b"}\n"
    head = f'{{"format": {FORMAT}, "digest": "{_digest(FORMAT, text)}", "checkpoint":\n'.encode()
    tensor_file.write_pieces(disk, folder / MANIFEST, [head + text])


def read_manifest(disk: Disk, folder: Path) -> Manifest:
    """Read a checkpoint's manifest; raise CheckpointDamaged if any byte of it has changed."""
    path = folder / MANIFEST
    content = _content(disk, path)
    head, line, text = content.partition(b"\n")
    match = _HEAD.fullmatch(head + line)
    if match is None or _digest(int(match[1]), text) != match[2].decode():
        raise damaged_file(path, f"is damaged: its {len(content):,} bytes differ from those written")
    if int(match[1]) > FORMAT:
        problem = f"is of format {int(match[1])}; this version of pipeline reads up to {FORMAT}"
        raise ConfigError(problem, where=str(path), remedy="use the version of pipeline that wrote it, or a newer one")
    return _parsed(folder.name, json.loads(content)["checkpoint"])


def refuse_stranger(manifest: Manifest, identity: Mapping[str, Any], path: Path) -> None:
    """Raise unless a checkpoint is of this training; the error lists the differences."""
    names = sorted(set(manifest.identity) | set(identity))
    differing = [name for name in names if manifest.identity.get(name) != identity.get(name)]
    if not differing:
        return
    shown = (f"{name} is {_short(manifest.identity, name)} there, {_short(identity, name)} here" for name in differing)
    raise ConfigError(
        f"this checkpoint belongs to another training: {'; '.join(shown)}", where=str(path), remedy=OTHER_MODEL
    )


def plain_json(value: Any, where: str) -> Any:
    """Return a copy of JSON data as reading it back gives it; raise TypeError for anything else, a bug."""
    if value is None or isinstance(value, str | bool | int | float):
        if type(value) in (str, bool, int, float, type(None)):
            return value
        # An enum or a NumPy number
        raise TypeError(f"{where} is a {type(value).__name__}: convert it to a plain Python value")
    if isinstance(value, Mapping):
        if strange := [key for key in value if type(key) is not str]:
            raise TypeError(f"{where} has a key that is not a string: {strange[0]!r}")
        return {key: plain_json(entry, f"{where}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(entry, f"{where}[{place}]") for place, entry in enumerate(value)]
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
    files = {file: WrittenFile(**entry) for file, entry in body["files"].items()}
    return Manifest(**{**body, "name": name, "files": files})


def _digest(version: int, text: bytes) -> str:
    return content_digest(b"%d\n" % version + text).hex()


def _short(identity: Mapping[str, Any], name: str) -> str:
    text = json.dumps(identity[name]) if name in identity else "nothing"
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True)
class Packed:
    """Tensors by name, not copied, and JSON data."""

    tensors: Mapping[str, Tensor]
    data: Mapping[str, Any]


class LoadedCheckpoint:
    """An opened checkpoint: its data in memory, its tensors still in their files."""

    def __init__(self, disk: Disk, path: Path, manifest: Manifest) -> None:
        self._disk, self.path, self._manifest = disk, path, manifest
        self.name, self.step, self.world, self.figure = path.name, manifest.step, manifest.world, manifest.figure
        self.data: Mapping[str, Any] = manifest.data
        self._state = TensorFile(disk, path / STATE, manifest.files[STATE])

    @property
    def is_divided(self) -> bool:
        """Whether ranks have written shards of tensors, which `sharded_checkpoint.assembled` reads."""
        return any("parts" in data for data in self._manifest.ranks)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The dtype and shape of every tensor that is the same on all ranks."""
        return self._state.specs

    @property
    def same(self) -> Mapping[str, str]:
        """The stored name of every tensor that has another name too (tied parameters), by the other name."""
        return self._state.same

    def load_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors by name, in place; the whole file is read and digested in any case."""
        self._state.load_into(targets)

    def own(self, rank: int) -> Packed | None:
        """Return a rank's own tensors and data; None where there were fewer ranks."""
        if rank >= self.world:
            return None
        name = rank_file(rank)
        tensors = TensorFile(self._disk, self.path / name, self._manifest.files[name]).load()
        return Packed(tensors, self._manifest.ranks[rank])


def open_checkpoint(
    path: Path, identity: Mapping[str, Any] | None = None, *, verified: bool = False, disk: Disk | None = None
) -> LoadedCheckpoint:
    """Open the checkpoint in a folder; `identity` refuses those of other trainings, `verified` skips the check."""
    disk = disk or Disk()
    if not path.is_dir():
        others = sorted(name for name in disk.list_folder(path.parent) if name.startswith("step-"))
        problem = f"checkpoint not found; available: {', '.join(others[-8:]) or 'none'}"
        raise ConfigError(problem, where=str(path), remedy=f"ls {quoted(path.parent)}")
    manifest = read_manifest(disk, path)
    if identity is not None:
        refuse_stranger(manifest, identity, path)
    return LoadedCheckpoint(disk, path, manifest) if verified else verified_checkpoint(disk, path, manifest)


def verified_checkpoint(disk: Disk, path: Path, manifest: Manifest) -> LoadedCheckpoint:
    """Open a checkpoint after reading and checking all its bytes."""
    for name, written in manifest.files.items():
        tensor_file.verify_file(disk, path / name, written)
    return LoadedCheckpoint(disk, path, manifest)
