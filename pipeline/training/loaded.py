"""A checkpoint that is there: found whole, then read into what it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError
from pipeline.store.disk import Disk
from pipeline.training import manifest, tensor_file
from pipeline.training.manifest import STATE, Manifest, rank_file
from pipeline.training.tensor_file import TensorFile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from pipeline.training.tensor_file import Spec


@dataclass(frozen=True)
class Own:
    """What one rank had of its own."""

    tensors: Mapping[str, Tensor]
    data: Mapping[str, Any]


class Loaded:
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
    def specs(self) -> Mapping[str, Spec]:
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
) -> Loaded:
    """Return the checkpoint of a folder; of any model, unless an identity is given."""
    disk = disk or Disk()
    if not path.is_dir():
        there = sorted(name for name in disk.list_folder(path.parent) if name.startswith("step-"))
        what = f"there is no such checkpoint; there is: {', '.join(there[-8:]) or 'none'}"
        raise ConfigError(what, where=str(path), remedy=f"ls {path.parent}")
    told = manifest.read(disk, path)
    if identity is not None:
        manifest.refuse_stranger(told, identity, path)
    return Loaded(disk, path, told) if verified else verified_checkpoint(disk, path, told)


def verified_checkpoint(disk: Disk, path: Path, told: Manifest) -> Loaded:
    """Return a checkpoint all of whose bytes were read and found right."""
    for name, written in told.files.items():
        tensor_file.check(disk, path / name, written)
    return Loaded(disk, path, told)
