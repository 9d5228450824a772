"""The checkpoint of a run: finds it, identifies it by its content, and fetches and installs published ones.

Nothing here imports torch before a checkpoint must be read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pipeline.encoder.checkpoint_files import (
    BLOCK_BYTES,
    CONFIG,
    ESM1B,
    ESM2,
    FAMILIES,
    HUGGING_FACE,
    INDEX,
    MAIN_MODEL,
    SINGLE,
    SUFFIXES,
    CheckpointFiles,
    Published,
    files_of,
    published,
    stem,
    unreadable_checkpoint,
)
from pipeline.encoder.embedding_recipe import LETTERS
from pipeline.errors import CacheFull, CacheUnusable, ConfigError, DataError, WeightsUnusable
from pipeline.files import FileState, replacing, state_of
from pipeline.keys import is_settled, recipe_key
from pipeline.store.format.disk import written_to
from pipeline.store.store import WholeRecords

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.store.store import Store

log = logging.getLogger(__name__)

_WANTED = [CONFIG, INDEX, "*.safetensors"]  # of a repository
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


def find_checkpoint(path: Path) -> Path:
    """Return the path, or another local place of the same checkpoint, such as torch's or Hugging Face's cache."""
    others = list[Path]()
    for place in _places(path):
        try:
            files_of(place)
        except WeightsUnusable:
            if place == path:  # reading it reports the problem
                return place
        except ConfigError:
            pass
        else:
            return place
        others += [place] if place != path else []
    model = published(stem(path))
    lines = "".join(f"\n    {place}" for place in others)
    what = f"embed.weights: checkpoint not found{lines and f'. Also searched:{lines}'}"
    name, set_it = (model.name, "or set") if model else (MAIN_MODEL, "and remove")
    fetch = f"pipeline weights fetch {name}   ({set_it} embed.weights{' to your own' if model else ', or correct it'})"
    raise ConfigError(what, where=str(path), remedy=fetch)


def _places(path: Path) -> Iterator[Path]:
    """Yield where a checkpoint may be, the likeliest first; a published model also in the caches of libraries."""
    yield path
    yield path.with_suffix("") if path.suffix in SUFFIXES else path.with_name(f"{path.name}.pt")
    if (model := published(stem(path))) is not None:
        yield _torch_cache(model.name)
        yield _snapshot(model)


def _torch_cache(name: str) -> Path:
    """Return where torch.hub keeps a file of fair-esm's."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("TORCH_HOME") or f"{caches}/torch", "hub", "checkpoints", f"{name}.pt").expanduser()


def _snapshot(model: Published) -> Path:
    """Return the folder in Hugging Face's cache where a model is, or would be."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model.repository, local_files_only=True, allow_patterns=_WANTED))
    except LocalEntryNotFoundError:
        return Path(constants.HF_HUB_CACHE, f"models--{model.repository.replace('/', '--')}", "snapshots")


def identify(path: Path, seen: Store, *, remember: bool = True) -> CheckpointFacts:
    """Return the facts about a checkpoint; it is read only if a file has changed since they were remembered."""
    place = find_checkpoint(path)
    files = files_of(place)
    before = _states(files)
    key = _key(place, before)
    if (remembered := WholeRecords(seen).metas([key])) and remembered[key]:
        return CheckpointFacts(**remembered[key])
    weights = checkpoint_facts(place)
    if _states(files) != before:
        remedy = "wait until it is complete, then run the same command again"
        raise WeightsUnusable("changed while being read", where=str(place), remedy=remedy)
    if remember and all(is_settled(mtime_ns, ctime_ns) for *_, mtime_ns, ctime_ns in before):
        try:
            with seen.writer() as writer:
                writer.put(key, {}, asdict(weights))
        except (CacheUnusable, CacheFull) as error:
            log.warning("%s: %s: it is read again each time", place, error.what)
    return weights


def key_as_it_stands(place: Path) -> bytes:
    """Return the key under which the facts about a checkpoint are remembered until one of its files changes."""
    return _key(place, _states(files_of(place)))


def checkpoint_facts(path: Path) -> CheckpointFacts:
    """Read every tensor of a checkpoint and return the facts about it; refuse an unusable one."""
    from pipeline.encoder.esm_checkpoint import digest_weights, dtype_name, load_esm_checkpoint, refuse_not_finite
    from pipeline.encoder.published_weights import refuse_flipped_bits

    checkpoint, files = load_esm_checkpoint(path), files_of(path)
    for file in files.tensors:
        refuse_flipped_bits(file)
    refuse_not_finite(checkpoint)
    shape, size_bytes = checkpoint.architecture, sum(file.stat().st_size for file in files.all)
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


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    hasher = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                hasher.update(block)
    except OSError as error:
        raise unreadable_checkpoint(path, error) from error
    return hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class Examined:
    """A readable checkpoint, compared with the table of published models."""

    weights: CheckpointFacts
    parameters: int  # of what encodes: heads are not counted
    sha256: tuple[tuple[str, str], ...]  # name and digest of each file that holds tensors
    verdict: str  # published, unknown or different
    why: str | None = None  # the difference

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        facts = {"parameters": self.parameters, "sha256": dict(self.sha256), "verdict": self.verdict, "why": self.why}
        return asdict(self.weights) | facts

    def accepted(self) -> Examined:
        """Return this; raise if it differs from the model published under its name."""
        if self.why is not None:
            remedy = f"pipeline weights fetch {self.weights.name}   (or rename your own model)"
            raise WeightsUnusable(f"is not {self.weights.name}: {self.why}", where=self.weights.path, remedy=remedy)
        return self


def examine_checkpoint(path: Path, name: str | None = None) -> Examined:
    """Read every tensor and every byte of a checkpoint, and compare it with the model published under its name."""
    from pipeline.encoder.esm_checkpoint import load_esm_checkpoint

    facts = checkpoint_facts(path)
    if name is not None:
        facts = replace(facts, name=name)
    digests = tuple((file.name, sha256_of(file)) for file in files_of(path).tensors)
    verdict, why = _compared(facts, published(facts.name), [digest for _, digest in digests])
    parameters = sum(tensor.numel() for tensor in load_esm_checkpoint(path).tensors.values())
    return Examined(facts, parameters, digests, verdict, why)


def _compared(facts: CheckpointFacts, model: Published | None, digests: list[str]) -> tuple[str, str | None]:
    """Compare a checkpoint with a published model; return the verdict and the difference."""
    if model is None:
        return "unknown", None
    shape = facts.family, facts.layers, facts.dim, facts.heads
    if shape != model.shape:
        found, expected = (
            f"{FAMILIES[family]} of {layers} layers of width {dim} with {heads} heads"
            for family, layers, dim, heads in (shape, model.shape)
        )
        return "different", f"it is {found}, expected {expected}"
    sha256 = model.safetensors_sha256 if facts.form == HUGGING_FACE else model.pt_sha256
    if sha256 is None or len(digests) > 1:
        return "unknown", None
    if digests != [sha256]:
        return "different", f"checksum mismatch: expected SHA-256 {sha256}, got {digests[0]}"
    return "published", None


def fetch(name: str, target: Path | None, *, url: str | None = None, force: bool = False) -> Examined:
    """Download a model of Hugging Face to its cache, or `target`; or a file by its address; and examine it.

    `name` is a published model or a repository. ESM-1b and ESM-1v are fair-esm's files, in torch's cache.
    """
    model = published(name)
    if model is not None and model.family == ESM1B:
        url, target = url or model.url, target or _torch_cache(name)
    repository = name if "/" in name else model.repository if model is not None and url is None else ""
    if repository:
        place = _snapshot_of(repository, target, force=force)
        examined = examine_checkpoint(place, name.rpartition("/")[2])
        if examined.why is not None:
            for file in files_of(place).tensors:  # another program could use it as the model
                file.resolve().unlink(missing_ok=True)
        return examined.accepted()
    assert url is not None, f"{name} is no model that is published"
    assert target is not None, f"{url} has no place to go to"
    with written_to(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as aside:
            _download(url, aside)
            examined = examine_checkpoint(aside, name).accepted()
    return replace(examined, weights=replace(examined.weights, path=str(target)))


def _snapshot_of(repository: str, folder: Path | None, *, force: bool) -> Path:
    """Download the files of an encoder; an interrupted download continues."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, local_dir=folder, allow_patterns=_WANTED, force_download=force))
    except Exception as error:  # the network libraries below that one differ between its versions, as do their errors
        name = repository.rpartition("/")[2]
        lines = (
            "try again (it continues), through a mirror (export HF_ENDPOINT=URL) or a proxy (export https_proxy=URL);",
            f"  or where there is internet access, run   hf download {repository} --local-dir {name}",
            f"  then copy that folder to this machine, and run   pipeline weights import {name}",
        )
        raise _no_download(repository, error, "\n".join(lines)) from error


def _download(url: str, out: Path) -> None:
    from torch.hub import download_url_to_file

    try:
        download_url_to_file(url, str(out))
    except (OSError, ValueError) as error:
        lines = (
            f"try again, through a proxy (export https_proxy=URL), or where there is internet access   curl -LO {url}",
            "  then copy the file to this machine, and run   pipeline weights import FILE",
        )
        raise _no_download(url, error, "\n".join(lines)) from error


def _no_download(where: str, error: Exception, remedy: str) -> DataError:
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    return DataError(f"cannot be downloaded: {line}", where=where, remedy=remedy)


def is_installed(source: CheckpointFiles, target: Path) -> bool:
    """Say whether the same bytes are there already."""
    pairs = [(file, _in_folder(source, file, target)) for file in source.all]
    if not all(copy.is_file() and copy.stat().st_size == file.stat().st_size for file, copy in pairs):
        return False
    return all(copy.samefile(file) or sha256_of(copy) == sha256_of(file) for file, copy in pairs)


def install_checkpoint(source: CheckpointFiles, target: Path, *, replace: bool) -> None:
    """Copy a checkpoint's files next to `target`, verify the copy, and rename it to `target`."""
    if os.path.lexists(target) and not replace:
        remedy = "use --out PATH, or replace it with --force"
        raise ConfigError("a different file already exists", where=str(target), remedy=remedy)
    with written_to(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
            copy = Path(folder, target.name)
            if source.form == HUGGING_FACE:
                copy.mkdir()
            for file in source.all:
                written = shutil.copyfile(file, _in_folder(source, file, copy))
                if sha256_of(written) != sha256_of(file):
                    what = "the written file reads back differently: the disk or the connection to it is damaged"
                    raise WeightsUnusable(what, where=str(target.parent), remedy="use --out PATH on another disk")
            if os.path.lexists(target):
                target.rename(Path(folder, "old"))
            copy.rename(target)


def _in_folder(source: CheckpointFiles, file: Path, target: Path) -> Path:
    if source.form != HUGGING_FACE:
        return target
    return target / (SINGLE if source.tensors == (file,) else file.name)
