"""A checkpoint on its way to where it is used: looked at from all sides, and copied whole or not at all.

Nothing here imports torch before a checkpoint must be read.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.encoder.checkpoints import weights
from pipeline.encoder.checkpoints.checkpoint_files import HUGGING_FACE, SINGLE, files_of
from pipeline.encoder.checkpoints.partial_download import BLOCK_BYTES, explaining_disk_errors
from pipeline.encoder.checkpoints.weights import CheckpointFacts, PublishedMatch, check_published, published, sha256_of
from pipeline.errors import ConfigError, WeightsUnusable
from pipeline.store.format.disk import Disk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.encoder.checkpoints.checkpoint_files import CheckpointFiles
    from pipeline.encoder.checkpoints.weights import Published

_DISK = Disk()


@dataclass(frozen=True, slots=True)
class Examined:
    """A checkpoint that could be read, and what the table of published models says of it."""

    weights: CheckpointFacts
    parameters: int  # of what encodes: heads are not counted
    sha256: tuple[tuple[str, str], ...]  # name and digest of each file that holds tensors
    verdict: str  # published, unknown or different
    why: WeightsUnusable | None = None  # what is different

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        why = None if self.why is None else self.why.what
        facts = {"parameters": self.parameters, "sha256": dict(self.sha256), "verdict": self.verdict, "why": why}
        return asdict(self.weights) | facts

    def accepted(self) -> Examined:
        """Return this, unless it is not what its name says."""
        if self.why is not None:
            raise self.why
        return self


def examine_checkpoint(path: Path) -> Examined:
    """Read the checkpoint at a path, every tensor and every byte of it."""
    from pipeline.encoder.checkpoints.esm_checkpoint import load_checkpoint

    found = weights.checkpoint_facts(path)
    verdict, why = _judge(path, found)
    digests = tuple((file.name, sha256_of(file)) for file in files_of(path).tensors)
    return Examined(found, sum(one.numel() for one in load_checkpoint(path).tensors.values()), digests, verdict, why)


def _judge(path: Path, found: CheckpointFacts) -> tuple[str, WeightsUnusable | None]:
    """Compare a checkpoint with what was published under its name."""
    try:
        _refuse_other_shape(published(found.name), (found.layers, found.dim, found.heads), path)
        return ("published" if check_published(path, found.name) is PublishedMatch.EQUAL else "unknown"), None
    except WeightsUnusable as difference:
        return "different", difference


def refuse_other(path: Path, model: Published | None) -> None:
    """Refuse a file that is no checkpoint of ESM-2, or not of the architecture of a published model."""
    from pipeline.encoder.checkpoints.esm_checkpoint import load_checkpoint

    shape = load_checkpoint(path).architecture
    _refuse_other_shape(model, (shape.layers, shape.dim, shape.heads), path)


def _refuse_other_shape(model: Published | None, found: tuple[int, int, int], path: Path) -> None:
    """Refuse a name that promises another architecture."""
    if model is None or found == (wanted := (model.layers, model.dim, model.heads)):
        return
    sizes = [f"{layers} layers of width {dim} with {heads} heads" for layers, dim, heads in (found, wanted)]
    remedy = f"pipeline weights fetch {model.name}   (or give your own model a name of its own)"
    raise WeightsUnusable(
        f"is not {model.name}: it has {sizes[0]}, and should have {sizes[1]}", where=str(path), remedy=remedy
    )


def is_installed(source: CheckpointFiles, target: Path) -> bool:
    """Say whether the same bytes are there already."""
    pairs = [(file, _in_folder(source, file, target)) for file in source.all]
    if not all(there.is_file() and there.stat().st_size == file.stat().st_size for file, there in pairs):
        return False
    return all(there.samefile(file) or sha256_of(there) == sha256_of(file) for file, there in pairs)


def install(source: CheckpointFiles, target: Path, *, replace: bool) -> None:
    """Copy a checkpoint's files to `target`, verify the copy, and only then give it its name."""
    if os.path.lexists(target) and not replace:
        remedy = "choose another place with --out PATH, or replace it with --force"
        raise ConfigError("something else is there already", where=str(target), remedy=remedy)
    _refuse_small_disk(source, target)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    with explaining_disk_errors(target):
        _DISK.make_folder(target.parent)
        try:
            if source.form == HUGGING_FACE:
                partial.mkdir()
            for file in source.all:
                _copy(file, _in_folder(source, file, partial))
            _publish(partial, target)
        finally:
            _remove(partial)


def _in_folder(source: CheckpointFiles, file: Path, target: Path) -> Path:
    """Return where a file of a checkpoint is in its copy."""
    if source.form != HUGGING_FACE:
        return target
    return target / (SINGLE if source.tensors == (file,) else file.name)


def _refuse_small_disk(source: CheckpointFiles, target: Path) -> None:
    """Refuse to begin what the disk cannot hold."""
    needed, free = sum(file.stat().st_size for file in source.all), _DISK.free_bytes(target.parent)
    if needed > free:
        what = f"the disk has {free:,} bytes free, and {needed:,} are needed"
        raise ConfigError(what, where=str(target.parent), remedy="make room, or --out PATH on another disk")


def _copy(source: Path, target: Path) -> None:
    """Copy a file, and read the copy back from the disk."""
    hasher = hashlib.sha256()
    with target.open("xb") as copy:
        for block in _blocks(source):
            hasher.update(block)
            copy.write(block)
        copy.flush()
        os.fsync(copy.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(copy.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else memory would vouch for the disk
    if sha256_of(target) != hasher.hexdigest():
        what = "what was written there cannot be read back as it was: the disk, or what is between, is damaged"
        raise WeightsUnusable(what, where=str(target.parent), remedy="--out PATH on another disk")


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes."""
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                yield block
    except OSError as error:
        raise WeightsUnusable(f"cannot be read: {error.strerror}", where=str(path), remedy=f"ls -lL {path}") from error


def _publish(partial: Path, target: Path) -> None:
    """Give a finished copy its name; a folder cannot be renamed over another, which steps aside first."""
    old = target.with_name(f"{partial.name}.old")
    if partial.is_dir():
        _DISK.fsync_folder(partial)
    if os.path.lexists(target) and (partial.is_dir() or target.is_dir()):
        _DISK.rename(target, old)
    _DISK.rename(partial, target)
    _DISK.fsync_folder(target.parent)
    _remove(old)


def _remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
