"""Checkpoints: sealed folders with a training's state, whose tensors load into any sharding of the model.

step-00001234/   state.safetensors    tensors that are the same on all ranks, written by rank 0
                 rank-0000.safetensors …   each rank's own tensors, and its shards of the others
                 manifest.json        their digests, the training's identity, all JSON data

All ranks write into `.step-00001234.partial-TOKEN/`, then rank 0 seals and renames it. The last and the best are kept.
A rank that fails to write reports the failure and continues to train; the next checkpoint is a new attempt.

An exported model is a sealed folder with the weights of one checkpoint, and everything needed to use them:

model.safetensors    the weights under the model's own names; moving averages where the training kept them
model.json           its manifest: training, task, plan, encoder, metrics; and the digest of the weights
pipeline.yaml        the settings to use it with, and next to it the task's own code
README.md            the same for people
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import ConfigError, DataError, JobFailed
from pipeline.files import file_digest
from pipeline.keys import content_digest
from pipeline.store.format.disk import FULL, Disk, room_left
from pipeline.training.checkpoints import sealed_folder
from pipeline.training.checkpoints.sealed_folder import (
    ANOTHER,
    MANIFEST,
    OTHER_MODEL,
    TENSORS,
    FolderDamaged,
    WrittenFile,
    read_sealed,
)
from pipeline.training.prepared import BEST, LAST, ModelFolder, Prepared  # plans on disk name this class
from pipeline.training.state import TRAINING
from pipeline.units import first_few

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from pipeline.training.checkpoints.sealed_folder import SealedFolder

    Receipt = Mapping[str, Any]  # JSON data: the files that a rank wrote, or the error

STATE = "state"
SHARD, SHARDS = "part.", "parts"  # prefix of shards in a rank's file; key of their shapes and offsets in its data
NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")
EXPORTED = "model"  # name of the file of an exported model's weights, without its suffix
WEIGHTS = (".pt", ".pth", ".ckpt", ".safetensors")
_UNPUBLISHED = ".step-"  # prefix of folders that are being written or removed
_MOST_NAMED = 6


@dataclass(frozen=True)
class State:
    """The content of a checkpoint, on one rank."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # same on every rank; only rank 0's are written
    data: Mapping[str, Any] = field(default_factory=dict)  # JSON data, also rank 0's
    own: Mapping[str, Tensor] = field(default_factory=dict)  # this rank's, such as its random numbers
    own_data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parted(self) -> State:
        """The same state, with this rank's shards of sharded tensors among its own."""
        whole, own, places = dict[str, Any](), dict(self.own), dict[str, Any]()
        for name, tensor in self.tensors.items():
            if not is_sharded(tensor):
                whole[name] = tensor
                continue
            own[f"{SHARD}{name}"], offset = shard_of(tensor)
            part = {"offset": offset, "shape": list(own[f"{SHARD}{name}"].shape)}
            places[name] = {"shape": list(tensor.shape), "dtype": _dtype_name(tensor), "part": part}
        return State(whole, self.data, own, {**self.own_data, **({SHARDS: places} if places else {})})


def is_sharded(tensor: Tensor) -> bool:
    """Tell whether a tensor is sharded over ranks."""
    return hasattr(tensor, "_local_tensor")


def shard_of(tensor: Any) -> tuple[Tensor, list[int]]:
    """Return this rank's part of a tensor, and its offset in the whole."""
    if not is_sharded(tensor):
        return tensor, [0] * tensor.dim()
    (chunk,) = tensor.__create_chunk_list__()  # the protocol of torch's own checkpoints
    return tensor.detach().to_local(), list(chunk.offsets)


@dataclass(frozen=True)
class Part:
    """A part of a stored tensor; `load` verifies its file and maps it."""

    offset: Sequence[int]
    shape: Sequence[int]
    load: Callable[[], Tensor]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint in one part, or in the shards of several ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[Part]

    def whole(self) -> Tensor:
        """Return the whole tensor: mapped where it is in one part, else assembled."""
        import torch

        if len(self.parts) == 1:
            return self.parts[0].load()
        self.copy_to(tensor := torch.empty(self.shape, dtype=self.dtype))
        return tensor

    def copy_to(self, target: Tensor) -> None:
        """Fill a tensor, or this rank's shard of it, with the parts that overlap it."""
        local, begin = shard_of(target.detach())
        for part in self.parts:
            sides = zip(begin, local.shape, part.offset, part.shape, strict=True)
            spans = [(max(here, there), min(here + size, there + length)) for here, size, there, length in sides]
            if all(start < stop for start, stop in spans):
                into, loaded = local, part.load()
                for dim, (start, stop) in enumerate(spans):
                    into = into.narrow(dim, start - begin[dim], stop - start)
                    loaded = loaded.narrow(dim, start - part.offset[dim], stop - start)
                into.copy_(loaded)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest was read; a file is verified before its tensors are used."""

    sealed: SealedFolder
    step: int
    serial: int  # counts checkpoints: after a rollback, a later one may be of an earlier step
    metric: float | None
    lower_is_better: bool
    ranks: Sequence[Mapping[str, Any]]
    data: Mapping[str, Any]

    @property
    def path(self) -> Path:
        return self.sealed.path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def of_all_items(self) -> bool:
        """Whether no step was made without items that could not be read."""
        return not self.data.get(TRAINING, {}).get("damaged")

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors that are no rank's own, by name."""
        import torch

        opened = cache(self.sealed.tensors)  # a rank's file is read once one of its shards is needed

        def shard(rank: int, name: str) -> Tensor:
            return opened(rank_file(rank))[f"{SHARD}{name}"]

        stored = {
            name: StoredTensor(tuple(whole.shape), whole.dtype, [Part([0] * whole.dim(), whole.shape, whole.detach)])
            for name, whole in opened(STATE).items()
        }
        for rank, data in enumerate(self.ranks):
            for name, place in data.get(SHARDS, {}).items():
                empty = StoredTensor(tuple(place["shape"]), getattr(torch, place["dtype"]), [])
                stored.setdefault(name, empty).parts.append(Part(**place["part"], load=partial(shard, rank, name)))
        return stored

    def load_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors by name, in place; of a sharded one, this rank's shard.

        Nothing is changed unless all dtypes and shapes match.
        """
        import torch

        wrong, stored = list[str](), self.tensors
        for name, target in targets.items():
            there = tensor_words(stored[name]) if name in stored else "missing"
            if there != tensor_words(target):
                wrong.append(f"{name} is {there}, not {tensor_words(target)}")
        if wrong:
            problem = f"this checkpoint belongs to another model: {first_few(wrong, _MOST_NAMED)}"
            raise ConfigError(problem, where=str(self.path), remedy=OTHER_MODEL)
        with torch.no_grad():
            for name, target in targets.items():
                stored[name].copy_to(target)

    def own(self, rank: int) -> State | None:
        """Return a rank's own tensors and data without its shards; None where there were fewer ranks."""
        if rank >= len(self.ranks):
            return None
        tensors = self.sealed.tensors(rank_file(rank))
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith(SHARD)}
        return State(own=own, own_data={name: value for name, value in self.ranks[rank].items() if name != SHARDS})


def open_checkpoint(path: Path, *, disk: Disk | None = None) -> Checkpoint:
    """Read the manifest of the checkpoint in a folder."""
    sealed = read_sealed(path, disk=disk)
    content = dict(sealed.data)
    return Checkpoint(sealed, metric=content.pop("figure"), **content)


def checkpoints_in(
    folder: Path, *, skip: Callable[[Path, FolderDamaged], None] = lambda _path, _error: None, disk: Disk | None = None
) -> list[Checkpoint]:
    """Return the checkpoints in a folder whose manifests can be read, the last one saved first."""
    disk, known = disk or Disk(), list[Checkpoint]()
    for name in sorted(filter(NAME.fullmatch, disk.list_folder(folder)), reverse=True):
        try:
            known.append(open_checkpoint(folder / name, disk=disk))
        except FolderDamaged as error:
            skip(folder / name, error)
    return sorted(known, key=lambda checkpoint: -checkpoint.serial)


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the last checkpoint saved in a folder, by its manifest."""
    return next(iter(checkpoints_in(folder)), None)


def by_metric(known: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Sort checkpoints, newest first, by their metric: best first. The newest says whether lower is better."""
    rated = [(checkpoint.metric, checkpoint) for checkpoint in known if checkpoint.metric is not None]
    alike = [(metric, it) for metric, it in rated if it.lower_is_better == rated[0][1].lower_is_better]
    alike.sort(key=lambda pair: pair[0] if pair[1].lower_is_better else -pair[0])
    return [checkpoint for _, checkpoint in alike]


def rank_file(rank: int) -> str:
    """Return the name of a rank's own file, without its suffix."""
    return f"rank-{rank:04d}"


def tensor_words(tensor: StoredTensor | Tensor) -> str:
    """Return dtype and shape of a tensor."""
    return f"{_dtype_name(tensor)}{list(tensor.shape)}"


def _dtype_name(tensor: StoredTensor | Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# Which checkpoint is to be used, by manifests alone, without torch


@dataclass(frozen=True, slots=True)
class ChosenCheckpoint:
    """A checkpoint that is to be used."""

    path: Path
    step: int
    model: str  # name of its training
    digest: str  # of its manifest, which has the digests of its files
    note: str = ""  # why it is not the one that was asked for


def choose_checkpoint(folder: Path, wanted: str, without: Collection[str] = ()) -> ChosenCheckpoint | None:
    """Choose a checkpoint of a training from the manifests, without reading tensors; None: there is none.

    `wanted` is best, last, a folder's name or path, or a file of weights; `without` has the names of those that proved
    unusable.
    """
    if (file := weights_file(wanted)) is not None:
        return ChosenCheckpoint(file, 0, file.name.split(".")[0], checkpoint_digest(file))
    if wanted not in (BEST, LAST):
        return _named(folder, wanted, without)
    known = [checkpoint for checkpoint in checkpoints_in(folder) if checkpoint.name not in without]
    if not known:
        return None
    best = by_metric(known)
    if wanted == LAST or best:
        return _chosen((known if wanted == LAST else best)[0])
    return _chosen(known[0], note="no checkpoint has a validation metric: using the last one")


def _named(folder: Path, wanted: str, without: Collection[str]) -> ChosenCheckpoint:
    path = folder / wanted if (folder / wanted).is_dir() else Path(wanted).absolute()
    if ModelFolder(path).export.is_file():
        card = read_export(path).data
        return ChosenCheckpoint(path, card["step"], card["name"], checkpoint_digest(path))
    if path.name in without:
        raise JobFailed("is damaged or was removed", where=str(path), remedy=ANOTHER)
    if not (path / MANIFEST).is_file():
        remedy = f"best, last, or a folder such as those of   ls {folder}"
        raise ConfigError("checkpoint not found", where=wanted, remedy=remedy)
    return _chosen(open_checkpoint(path))


def _chosen(checkpoint: Checkpoint, note: str = "") -> ChosenCheckpoint:
    model = str(checkpoint.sealed.identity.get("recipe", ""))
    return ChosenCheckpoint(checkpoint.path, checkpoint.step, model, checkpoint_digest(checkpoint.path), note)


def weights_file(wanted: str) -> Path | None:
    """Return the file of weights that is named in place of a checkpoint, or None."""
    path = Path(wanted).absolute()
    return path if path.suffix in WEIGHTS and path.is_file() else None


def checkpoint_digest(path: Path) -> str:
    """Return a digest of a whole checkpoint: of its manifest, of a model's card, or of a file of weights."""
    if path.is_file():
        return file_digest(path)
    card = ModelFolder(path).export
    return content_digest((card if card.is_file() else path / MANIFEST).read_bytes()).hex()


def read_export(folder: Path) -> SealedFolder:
    """Open an exported model by its card, which is its data."""
    remedy = "copy the folder again, or export the model again"
    try:
        return read_sealed(folder, ModelFolder(folder).export.name, remedy=remedy)
    except FolderDamaged as error:
        raise DataError(error.what, where=error.where, remedy=error.next) from error


class NotSaved(JobFailed):
    """A checkpoint could not be written; training can continue, and the last good one is still there."""


@dataclass(eq=False)
class CheckpointFolder:
    """The folder of a training's checkpoints.

    Every rank has an instance with the same `token`, which no other attempt of the training has. Only rank 0 publishes,
    removes and sweeps. Its `check` raises where another process writes the folder now.
    """

    folder: Path
    last: int  # kept
    best: int
    identity: Mapping[str, Any]
    say: Callable[[str], None]
    check: Callable[[], None] = lambda: None
    token: str = field(default_factory=lambda: secrets.token_hex(4))
    disk: Disk = field(default_factory=Disk)
    _damaged: dict[str, str] = field(default_factory=dict, init=False)  # by name: how

    def write(self, state: State, step: int, *, rank: int = 0) -> Receipt:
        """Write this rank's part of a checkpoint; return a receipt, which every rank must pass to rank 0.

        A disk error is not raised here: the receipt has it, and `publish` raises NotSaved.
        """
        self.check()
        groups = {rank_file(rank): state.own} | ({STATE: state.tensors} if rank == 0 else {})
        try:
            self.disk.make_folder(partial := self._partial(step))
            files = {
                f"{name}{TENSORS}": sealed_folder.write_tensors(partial / f"{name}{TENSORS}", tensors, self.disk)
                for name, tensors in groups.items()
            }
        except OSError as error:
            size = sum(tensor.nbytes for tensors in groups.values() for tensor in tensors.values())
            why = f"rank {rank}: {error.strerror or error} ({size / 1e6:,.1f} MB to write)"
            return {"not_saved": why, "errno": error.errno}
        return {"files": files, "data": state.own_data}

    def publish(
        self,
        receipts: Sequence[Receipt],
        data: Mapping[str, Any],
        step: int,
        *,
        metric: float | None = None,
        lower_is_better: bool = True,
    ) -> Path:
        """Publish what all ranks have written as a checkpoint and remove older ones; raise NotSaved."""
        partial = self._partial(step)
        try:
            self.check()
            if failed := [receipt for receipt in receipts if "not_saved" in receipt]:
                raise OSError(failed[0]["errno"], "; ".join(receipt["not_saved"] for receipt in failed))
            content = {
                "step": step,
                "serial": 1 + max((checkpoint.serial for checkpoint in self._known()), default=0),
                "figure": metric,
                "lower_is_better": lower_is_better,
                "ranks": [receipt["data"] for receipt in receipts],
                "data": data,
            }
            files = {name: WrittenFile(*file) for receipt in receipts for name, file in receipt["files"].items()}
            path = self._free_path(step)
            sealed_folder.write_manifest(partial / MANIFEST, files, content, self.identity, self.disk)
            sealed_folder.publish(partial, path, self.disk)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise self._not_saved(step, error) from error
            raise
        self._rotate(path.name)
        return path

    def sweep(self) -> None:
        """Remove what dead processes have left; to be called by rank 0 before any rank writes."""
        for name in self.disk.list_folder(self.folder):
            if name.startswith(_UNPUBLISHED):
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def newest(self, *, of_all: bool = False) -> Checkpoint | None:
        """Return the newest intact checkpoint, all its bytes verified; None only where none was ever saved.

        `of_all`: the newest that all items made, if there is one.
        Damaged ones are reported and skipped; one of another model is an error.
        """
        known = self._known()
        for checkpoint in [it for it in known if of_all and it.of_all_items] or known:
            checkpoint.sealed.refuse_stranger(self.identity)
            try:
                checkpoint.sealed.verify()
            except FolderDamaged as error:
                self._skip(checkpoint.path, error)
                continue
            if self._damaged:
                self.say(f"checkpoint {checkpoint.name} is used instead: step {checkpoint.step}")
            return checkpoint
        if self._damaged:
            newest = self._damaged[max(self._damaged)]
            problem = f"none of the {len(self._damaged)} checkpoints is intact; the newest: {newest}"
            remedy = f"to start over: mv {self.folder} {self.folder}.damaged"
            raise JobFailed(problem, where=str(self.folder), remedy=remedy)
        return None

    def open(self, name: str) -> Checkpoint:
        """Return a checkpoint by the name of its folder; each file is verified before it is used."""
        checkpoint = open_checkpoint(self.folder / name, disk=self.disk)
        checkpoint.sealed.refuse_stranger(self.identity)
        return checkpoint

    def _known(self) -> list[Checkpoint]:
        return checkpoints_in(self.folder, skip=self._skip, disk=self.disk)

    def _skip(self, path: Path, error: FolderDamaged) -> None:
        """Report a damaged checkpoint once; it no longer counts among those to keep."""
        message = f"checkpoint {path.name} is skipped: {os.path.basename(error.where)} {error.what}"  # noqa: PTH119 - text
        if path.name not in self._damaged:
            self.say(message)
        self._damaged[path.name] = message

    def _partial(self, step: int) -> Path:
        return self.folder / f"{_UNPUBLISHED}{step:08d}.partial-{self.token}"

    def _free_path(self, step: int) -> Path:
        """Return a free path: after a rollback a step repeats, and its old checkpoint must stay."""
        path, copy = self.folder / f"step-{step:08d}", 1
        while self.disk.exists(path):
            copy += 1
            path = self.folder / f"step-{step:08d}-{copy}"
        return path

    def _rotate(self, published: str) -> None:
        """Remove all but the last and the best; a failure is only reported.

        Damaged ones stay where they are, uncounted: a disk that cannot be read now may be readable later.
        """
        try:
            known = [checkpoint for checkpoint in self._known() if checkpoint.sealed.identity == self.identity]
            known = [checkpoint for checkpoint in known if checkpoint.name not in self._damaged]
            of_all = [checkpoint for checkpoint in known if checkpoint.of_all_items]
            needed = (*known[: self.last], *by_metric(known)[: self.best], *of_all[:1])
            kept = {published, *(checkpoint.name for checkpoint in needed)}
            for name in {checkpoint.name for checkpoint in known} - kept:
                self.disk.rename(self.folder / name, aside := self.folder / f".{name}.removed-{self.token}")
                shutil.rmtree(aside, ignore_errors=True)
        except OSError as error:
            self.say(f"old checkpoints cannot be removed: {error.strerror or error}")

    def _not_saved(self, step: int, error: OSError) -> NotSaved:
        saved = max(filter(NAME.fullmatch, self.disk.list_folder(self.folder)), default="")
        last = f"the newest saved one: {saved}" if saved else "there is no earlier one"
        why = f"{error.strerror or error}{room_left(self.disk, self.folder)}"
        look = (
            f"make room: df -h {self.folder}" if error.errno in FULL else f"make it writable: findmnt -T {self.folder}"
        )
        problem = f"the checkpoint of step {step} could not be saved: {why}; {last}"
        return NotSaved(problem, where=str(self.folder), remedy=look)


@dataclass(frozen=True, slots=True)
class Application:
    """A checkpoint and the items to apply it to, as decided when the stage began."""

    prepared: Prepared
    chosen: ChosenCheckpoint
    split: str | None  # None: all items
    made: str  # a digest of the items, and of the user's code that reads them
    items: int
    data: str  # the path of the data set
    done: list[tuple[int, int]] = field(default_factory=list)  # items that were done before, as first and stop
    model: str = ""  # the model's folder
    each: int = 1  # rows of an item, such as poses

    @property
    def folder(self) -> ModelFolder:
        return ModelFolder(Path(self.model))

    @property
    def done_N(self) -> NDArray[np.int64]:
        return np.concatenate([np.zeros(0, np.int64), *(np.arange(first, stop) for first, stop in self.done)])
