"""A checkpoint: a sealed folder with a training's state, whose tensors load into any sharding of the model.

step-00001234/   state.safetensors    tensors that are the same on all ranks, written by rank 0
                 rank-0000.safetensors …   each rank's own tensors, and its shards of the others
                 manifest.json        their digests, the training's identity, all JSON data
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from pipeline.command_line import quoted
from pipeline.errors import ConfigError
from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints.sealed_folder import OTHER_MODEL, FolderDamaged, read_sealed
from pipeline.training.state import TRAINING
from pipeline.units import first_few

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor

    from pipeline.training.checkpoints.sealed_folder import SealedFolder

STATE = "state"
SHARD, SHARDS = "part.", "parts"  # prefix of shards in a rank's file; key of their shapes and offsets in its data
NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")
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
        shards = {name: shard_of(tensor) for name, tensor in self.tensors.items() if is_sharded(tensor)}
        places = {
            name: {
                "shape": list(self.tensors[name].shape),
                "dtype": str(shard.dtype).removeprefix("torch."),
                "part": {"offset": offset, "shape": list(shard.shape)},
            }
            for name, (shard, offset) in shards.items()
        }
        whole = {name: tensor for name, tensor in self.tensors.items() if name not in shards}
        own = {**self.own, **{f"{SHARD}{name}": shard for name, (shard, _) in shards.items()}}
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

    @property
    def is_whole(self) -> bool:
        """Whether the parts add up to the whole."""
        return sum(math.prod(part.shape) for part in self.parts) == math.prod(self.shape)

    def whole(self) -> Tensor:
        """Return the whole tensor: mapped where it is in one part, else assembled."""
        import torch

        if len(self.parts) == 1:
            return self.parts[0].load()
        self.copy_to(tensor := torch.empty(self.shape, dtype=self.dtype))
        return tensor

    def like(self, tensor: Any) -> bool:
        """Tell whether a value is a tensor with the same shape and dtype."""
        return (getattr(tensor, "dtype", None), tuple(getattr(tensor, "shape", ()))) == (self.dtype, self.shape)

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
    figure: float | None
    lower_is_better: bool
    ranks: Sequence[Mapping[str, Any]]
    data: Mapping[str, Any]
    _files: dict[str, dict[str, Tensor]] = field(default_factory=dict, init=False, repr=False)

    @property
    def path(self) -> Path:
        return self.sealed.path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def of_all_items(self) -> bool:
        """Whether no step was made without items that could not be read."""
        return not self.data.get(TRAINING, {}).get("damaged")

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors that are no rank's own, by name."""
        import torch

        shards: dict[str, StoredTensor] = {}
        for rank, data in enumerate(self.ranks):
            for name, place in data.get(SHARDS, {}).items():
                empty = StoredTensor(tuple(place["shape"]), getattr(torch, place["dtype"]), [])
                load = partial(self._load, rank_file(rank), f"{SHARD}{name}")
                shards.setdefault(name, empty).parts.append(Part(**place["part"], load=load))
        if lacking := [name for name, tensor in shards.items() if not tensor.is_whole]:
            problem = f"is missing parts of {first_few(lacking, _MOST_NAMED)}"
            raise FolderDamaged(problem, where=str(self.path), remedy=self.sealed.remedy)
        return in_one_part(self.sealed.tensors(STATE)) | shards

    def _load(self, file: str, name: str) -> Tensor:
        if file not in self._files:
            self._files[file] = self.sealed.tensors(file)
        return self._files[file][name]

    def load_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors by name, in place, if their dtypes and shapes match; of a sharded one, this rank's shard."""
        fill(targets, self.tensors, self.path)

    def own(self, rank: int) -> State | None:
        """Return a rank's own tensors and data without its shards; None where there were fewer ranks."""
        if rank >= self.world:
            return None
        tensors = self.sealed.tensors(rank_file(rank))
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith(SHARD)}
        return State(own=own, own_data={name: value for name, value in self.ranks[rank].items() if name != SHARDS})


def in_one_part(tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """Return tensors as those of an unsharded checkpoint."""
    return {
        name: StoredTensor(tuple(tensor.shape), tensor.dtype, [Part([0] * tensor.dim(), tensor.shape, tensor.detach)])
        for name, tensor in tensors.items()
    }


def fill(targets: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], path: Path) -> None:
    """Copy stored tensors into targets of the same names; nothing is copied unless all dtypes and shapes match."""
    import torch

    wrong = [f"{name} is missing" for name in targets if name not in stored]
    for name, target in targets.items():
        if name in stored and not stored[name].like(target):
            wrong.append(f"{name} is {tensor_words(stored[name])}, not {tensor_words(target)}")
    if wrong:
        more = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        problem = f"this checkpoint belongs to another model: {'; '.join(wrong[:_MOST_NAMED])}{more}"
        raise ConfigError(problem, where=str(path), remedy=OTHER_MODEL)
    with torch.no_grad():
        for name, target in targets.items():
            stored[name].copy_to(target)


def rank_file(rank: int) -> str:
    """Return the name of a rank's own file, without its suffix."""
    return f"rank-{rank:04d}"


def by_step(name: str) -> tuple[int, int]:
    """Return the sort key of a checkpoint's name."""
    match = NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def open_checkpoint(path: Path, *, disk: Disk | None = None) -> Checkpoint:
    """Read the manifest of the checkpoint in a folder."""
    disk = disk or Disk()
    if not path.is_dir():
        others = sorted(filter(NAME.fullmatch, disk.list_folder(path.parent)))
        problem = f"checkpoint not found; available: {', '.join(others[-8:]) or 'none'}"
        raise ConfigError(problem, where=str(path), remedy=f"ls {quoted(path.parent)}")
    return _read(path, disk)


def checkpoints_in(
    folder: Path, *, skip: Callable[[Path, FolderDamaged], None] = lambda _path, _error: None, disk: Disk | None = None
) -> list[Checkpoint]:
    """Return the checkpoints in a folder whose manifests can be read, the last one saved first."""
    disk, known = disk or Disk(), list[Checkpoint]()
    for name in sorted(filter(NAME.fullmatch, disk.list_folder(folder)), key=by_step, reverse=True):
        try:
            known.append(_read(folder / name, disk))
        except FolderDamaged as error:
            skip(folder / name, error)
    return sorted(known, key=lambda checkpoint: -checkpoint.serial)


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the last checkpoint saved in a folder, by its manifest."""
    return next(iter(checkpoints_in(folder)), None)


def by_figure(known: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Sort those with a figure, best first and newer first among equals; the newest says whether lower is better."""
    rated = [(checkpoint.figure, checkpoint) for checkpoint in known if checkpoint.figure is not None]
    newest = max((checkpoint for _, checkpoint in rated), key=lambda checkpoint: checkpoint.serial, default=None)
    alike = [(figure, it) for figure, it in rated if newest and it.lower_is_better == newest.lower_is_better]
    alike.sort(key=lambda pair: (pair[0] if pair[1].lower_is_better else -pair[0], -pair[1].serial))
    return [checkpoint for _, checkpoint in alike]


def tensor_words(tensor: StoredTensor | Tensor) -> str:
    """Return dtype and shape of a tensor."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _read(path: Path, disk: Disk) -> Checkpoint:
    sealed = read_sealed(path, disk=disk)
    return Checkpoint(sealed, **sealed.data)
