"""The checkpoint of a run: finding it, identifying it by its content, remembering that, and installing it.

Nothing here imports torch before a checkpoint must be read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.encoder.checkpoint_files import (
    _SUFFIXES,
    CONFIG,
    ESM2,
    FAMILIES,
    HUGGING_FACE,
    INDEX,
    MAIN_MODEL,
    SINGLE,
    CheckpointFiles,
    files_of,
    published,
    stem,
    unreadable_checkpoint,
)
from pipeline.encoder.embedding_recipe import LETTERS
from pipeline.encoder.partial_download import BLOCK_BYTES, explaining_disk_errors, refuse_small_disk
from pipeline.errors import CacheFull, CacheUnusable, ConfigError, WeightsUnusable
from pipeline.files import FileState, state_of
from pipeline.keys import is_settled, recipe_key
from pipeline.store.format.disk import Disk
from pipeline.store.store import WholeRecords

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pipeline.encoder.checkpoint_files import Published
    from pipeline.store.store import Store

log = logging.getLogger(__name__)

WEIGHTS_VERSION = 1  # raise it when digests of the same weights change


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What is remembered about a checkpoint that was read and is usable."""

    name: str
    form: str
    path: str
    digest: str
    layers: int
    dim: int
    heads: int
    precision: str  # fp32, fp16 or bf16, as stored
    bytes: int  # of its files
    family: str = ESM2
    longest: int = 0  # residues that are encoded as one; 0: any number
    letters: str = LETTERS  # that it reads

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CheckpointFacts:
        return cls(**data)


def find_checkpoint(path: Path) -> Path:
    """Return the path, or another local place of the same checkpoint, such as torch's or Hugging Face's cache."""
    places = list(dict.fromkeys(_places(path)))
    for place in places:
        if _is_there(place) if place == path else _is_checkpoint(place):
            return place
    name = model.name if (model := published(stem(path))) else MAIN_MODEL
    lines = "".join(f"\n    {place}" for place in places if place != path)
    what = f"embed.weights: checkpoint not found{lines and f'. Also searched:{lines}'}"
    fetch = f"pipeline weights fetch {name}   (or set embed.weights to your own)"
    raise ConfigError(what, where=str(path), remedy=fetch)


def identify(path: Path, seen: Store, *, remember: bool = True) -> CheckpointFacts:
    """Return the facts about a checkpoint; it is read only if a file has changed since they were remembered."""
    place = find_checkpoint(path)
    files = files_of(place)
    before = _states(files)
    key = _key(place, before)
    if (remembered := WholeRecords(seen).metas([key])) and remembered[key]:
        return CheckpointFacts.from_json(remembered[key])
    weights = checkpoint_facts(place)
    if _states(files) != before:
        remedy = "wait until it is complete, then run the same command again"
        raise WeightsUnusable("changed while being read", where=str(place), remedy=remedy)
    if remember and all(is_settled(mtime_ns, ctime_ns) for *_, mtime_ns, ctime_ns in before):
        try:
            with seen.writer() as writer:
                writer.put(key, {}, weights.to_json())
        except (CacheUnusable, CacheFull) as error:
            log.warning("%s: %s: it is read again each time", place, error.what)
    return weights


def key_as_it_stands(place: Path) -> bytes:
    """Return the key under which the facts about a checkpoint are remembered until one of its files changes."""
    return _key(place, _states(files_of(place)))


def equals_published(path: Path, name: str) -> bool:
    """Say whether a file is the model published under that name; refuse one that differs. False: nobody can tell."""
    files, model = files_of(path), published(name)
    if model is None or len(files.tensors) != 1:
        return False
    (file,) = files.tensors
    is_pt = file.suffix == ".pt"
    expected, size = (model.pt_sha256, model.pt_bytes) if is_pt else (model.safetensors_sha256, None)
    if expected is None:
        return False
    remedy = f"pipeline weights fetch {name}   (or rename your own model)"
    if size is not None and (size_there := file.stat().st_size) != size:
        what = f"has {size_there:,} bytes; {name} should have {size:,}"
        raise WeightsUnusable(what, where=str(file), remedy=remedy)
    if (sha256 := sha256_of(file)) != expected:
        what = f"is not {name}: checksum mismatch, expected SHA-256 {expected}, got {sha256}"
        raise WeightsUnusable(what, where=str(file), remedy=remedy)
    return True


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    hasher = hashlib.sha256()
    for block in _blocks(path):
        hasher.update(block)
    return hasher.hexdigest()


def checkpoint_facts(path: Path) -> CheckpointFacts:
    """Read every tensor of a checkpoint and return the facts about it; refuse an unusable one."""
    from pipeline.encoder.esm_checkpoint import (
        digest_weights,
        dtype_name,
        load_esm_checkpoint,
        refuse_not_finite,
    )
    from pipeline.encoder.published_weights import refuse_flipped_bits

    checkpoint = load_esm_checkpoint(path)
    for file in files_of(path).tensors:
        refuse_flipped_bits(file)
    refuse_not_finite(checkpoint)
    shape, size_bytes = checkpoint.architecture, sum(file.stat().st_size for file in files_of(path).all)
    facts = (digest_weights(checkpoint), shape.layers, shape.dim, shape.heads, dtype_name(checkpoint.dtype), size_bytes)
    return CheckpointFacts(checkpoint.name, checkpoint.form, str(path), *facts, shape.family, shape.longest)


def _states(files: CheckpointFiles) -> list[FileState]:
    """Return the state of every file of a checkpoint."""
    states = []
    for path in files.all:
        try:
            states.append(state_of(path.absolute(), path.stat()))
        except OSError as error:
            raise unreadable_checkpoint(path, error) from error
    return states


def _key(place: Path, states: list[FileState]) -> bytes:
    return recipe_key("weights", {"version": WEIGHTS_VERSION, "path": str(place.absolute()), "files": states})


def _places(path: Path) -> Iterator[Path]:
    """Yield where a checkpoint may be, the likeliest first; a published model also in the caches of libraries."""
    yield path
    if path.suffix in _SUFFIXES:
        yield path.with_suffix("")
    else:
        yield path.parent / f"{path.name}.pt"
    model = published(stem(path))
    if model is not None:
        yield _home("TORCH_HOME", "torch") / "hub" / "checkpoints" / f"{model.name}.pt"
        yield from _snapshots(model.name)


def _home(variable: str, name: str) -> Path:
    """Return the folder in which a library keeps what it downloaded."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get(variable) or f"{caches}/{name}").expanduser()


def _snapshots(name: str) -> Iterator[Path]:
    """Yield the folders of Hugging Face's cache for a model: the revision last seen as main, then the others."""
    hub = os.environ.get("HF_HUB_CACHE")
    folder = (Path(hub).expanduser() if hub else _home("HF_HOME", "huggingface") / "hub") / f"models--facebook--{name}"
    try:
        yield folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        yield folder / "snapshots"
    try:
        yield from sorted((folder / "snapshots").iterdir())
    except OSError:
        return


def _is_there(path: Path) -> bool:
    """Say whether there is anything at a path, even if its state cannot be read."""
    try:
        path.stat()
    except OSError as error:
        return not isinstance(error, FileNotFoundError | NotADirectoryError)
    return True


def _is_checkpoint(path: Path) -> bool:
    """Say whether a place that the user did not name looks like a checkpoint."""
    try:
        if path.suffix == ".pt":
            return path.is_file()
        return (path / CONFIG).is_file() and any((path / name).is_file() for name in (INDEX, SINGLE))
    except OSError:  # the caches of others may be closed
        return False


_DISK = Disk()


@dataclass(frozen=True, slots=True)
class Examined:
    """A readable checkpoint, compared with the table of published models."""

    weights: CheckpointFacts
    parameters: int  # of what encodes: heads are not counted
    sha256: tuple[tuple[str, str], ...]  # name and digest of each file that holds tensors
    verdict: str  # published, unknown or different
    why: WeightsUnusable | None = None  # what is different

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        why = None if self.why is None else self.why.what
        facts = {"parameters": self.parameters, "sha256": dict(self.sha256), "verdict": self.verdict, "why": why}
        return self.weights.to_json() | facts

    def accepted(self) -> Examined:
        """Return this; raise if it differs from the model published under its name."""
        if self.why is not None:
            raise self.why
        return self


def examine_checkpoint(path: Path) -> Examined:
    """Read every tensor and every byte of the checkpoint at a path, and return what it is."""
    from pipeline.encoder.esm_checkpoint import load_esm_checkpoint

    facts = checkpoint_facts(path)
    verdict, why = _judge(path, facts)
    digests = tuple((file.name, sha256_of(file)) for file in files_of(path).tensors)
    return Examined(
        facts, sum(tensor.numel() for tensor in load_esm_checkpoint(path).tensors.values()), digests, verdict, why
    )


def _judge(path: Path, facts: CheckpointFacts) -> tuple[str, WeightsUnusable | None]:
    """Compare a checkpoint with the model published under its name; return the verdict and the difference."""
    try:
        _refuse_other_shape(published(facts.name), (facts.family, facts.layers, facts.dim, facts.heads), path)
        return ("published" if equals_published(path, facts.name) else "unknown"), None
    except WeightsUnusable as difference:
        return "different", difference


def refuse_other(path: Path, model: Published | None) -> None:
    """Refuse a file that is no checkpoint, or not of the published model's architecture."""
    from pipeline.encoder.esm_checkpoint import load_esm_checkpoint

    shape = load_esm_checkpoint(path).architecture
    _refuse_other_shape(model, (shape.family, shape.layers, shape.dim, shape.heads), path)


def _refuse_other_shape(model: Published | None, shape: tuple[str, int, int, int], path: Path) -> None:
    """Refuse a checkpoint of another architecture than the published model of its name."""
    if model is None or shape == model.shape:
        return
    is_other = shape[0] != model.shape[0]
    sizes = [
        f"{layers} layers of width {dim} with {heads} heads{f', as {FAMILIES[family]} is' if is_other else ''}"
        for family, layers, dim, heads in (shape, model.shape)
    ]
    remedy = f"pipeline weights fetch {model.name}   (or rename your own model)"
    what = f"is not {model.name}: it has {sizes[0]}, expected {sizes[1]}"
    raise WeightsUnusable(what, where=str(path), remedy=remedy)


def is_installed(source: CheckpointFiles, target: Path) -> bool:
    """Say whether the same bytes are there already."""
    pairs = [(file, _in_folder(source, file, target)) for file in source.all]
    if not all(copy.is_file() and copy.stat().st_size == file.stat().st_size for file, copy in pairs):
        return False
    return all(copy.samefile(file) or sha256_of(copy) == sha256_of(file) for file, copy in pairs)


def install_checkpoint(source: CheckpointFiles, target: Path, *, replace: bool) -> None:
    """Copy a checkpoint's files to `target`, verify the copy, and only then give it its name."""
    if os.path.lexists(target) and not replace:
        remedy = "use --out PATH, or replace it with --force"
        raise ConfigError("a different file already exists", where=str(target), remedy=remedy)
    refuse_small_disk(target.parent, sum(file.stat().st_size for file in source.all))
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
    if source.form != HUGGING_FACE:
        return target
    return target / (SINGLE if source.tensors == (file,) else file.name)


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
        what = "the written file reads back differently: the disk or the connection to it is damaged"
        raise WeightsUnusable(what, where=str(target.parent), remedy="use --out PATH on another disk")


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes."""
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                yield block
    except OSError as error:
        raise unreadable_checkpoint(path, error) from error


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
