"""Checkpoints of a sharded model: each rank writes its own shards, and any number of ranks can load them.

torch.distributed.checkpoint plans which shard of a tensor is whose, and which shards another sharding needs. Its own
files are pickled; ours are those of every checkpoint, safetensors with digests under one JSON manifest: a rank's shards
are in its own file, and their offsets in its data.

    State(tensors=whole, own=rng | parts, own_data=own | data)        whole, parts, data = divided(packed.tensors)
    unpack(assembled(loaded), …)                                      in place of unpack(loaded, …)
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints import checkpoint_reader
from pipeline.training.checkpoints.checkpoint_reader import STATE, LoadedCheckpoint, Manifest, Packed, rank_file
from pipeline.training.checkpoints.tensor_file import TensorFile, TensorSpec, damaged_file, refuse_misfits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

PART = "part."  # prefix of a shard's name in the file of a rank
PARTS = "parts"  # key of the shards' shapes and offsets in the data of a rank


def is_spread(tensor: Tensor) -> bool:
    """Say whether a tensor is sharded over ranks."""
    return hasattr(tensor, "_local_tensor")


def divided(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Split tensors into whole ones and this rank's shards of the others; also return these shards' rank data."""
    whole = {name: tensor for name, tensor in tensors.items() if not is_spread(tensor)}
    spread: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if is_spread(tensor)}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(spread, is_coordinator=True)
    parts: dict[str, Tensor] = {}
    places: dict[str, Any] = {}
    for item in planner.create_local_plan().items:
        part = planner.resolve_data(item)
        assert isinstance(part, torch.Tensor)
        assert item.tensor_data is not None
        parts[f"{PART}{item.index.fqn}"] = part.detach()
        shape, offset = item.tensor_data.size, item.tensor_data.chunk.offsets
        places[item.index.fqn] = {"shape": list(shape), "offset": list(offset)}
    return whole, parts, {PARTS: places} if places else {}


def assembled(loaded: LoadedCheckpoint) -> Assembled:
    """Reopen a checkpoint so that its tensors are read from all ranks' files, for any sharding of the targets."""
    disk = Disk()
    return Assembled(disk, loaded.path, checkpoint_reader.read_manifest(disk, loaded.path))


class Assembled(LoadedCheckpoint):
    """A checkpoint, sharded or not, that can be loaded into sharded and into whole tensors."""

    def __init__(self, disk: Disk, path: Path, manifest: Manifest) -> None:
        super().__init__(disk, path, manifest)
        names = [STATE, *(rank_file(rank) for rank in range(manifest.world))]
        self._files = {name: _Parts(disk, path / name, manifest.files[name]) for name in names}
        self._places = dict(self._all_places())
        self._specs = {name: _whole(places) for name, places in self._places.items()}
        _refuse_gaps(path, self._places)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The dtype and whole shape of every tensor that is not a rank's own; without offsets in a file."""
        return self._specs

    def load_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors by name, in place; of a sharded one, this rank's shard.

        Only the files that are needed are read, each to its end and digested.
        """
        refuse_misfits(self.specs, targets, self.path)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner({name: target.detach() for name, target in targets.items()}, self._metadata(targets))
        takers: dict[str, dict[str, list[Callable[[Tensor], None]]]] = defaultdict(lambda: defaultdict(list))
        for item in planner.create_local_plan().items:
            offset = item.storage_index.offset
            assert offset is not None
            places = self._places[item.storage_index.fqn]
            place = next(place for place in places if place.offset == tuple(offset))
            takers[place.file][place.name].append(_PartTaker(planner, item))
        with torch.no_grad():
            for file, wanted in takers.items():
                self._files[file].visit(wanted)

    def own(self, rank: int) -> Packed | None:
        """Return a rank's own tensors and data without its shards; None where there were fewer ranks."""
        if rank >= self.world:
            return None
        file = self._files[rank_file(rank)]
        specs = {name: spec for name, spec in file.specs.items() if not name.startswith(PART)}
        tensors = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
        file.load_into(tensors)
        return Packed(tensors, {name: value for name, value in self._manifest.ranks[rank].items() if name != PARTS})

    def _all_places(self) -> Iterator[tuple[str, list[_PartPlace]]]:
        """Yield every tensor's name and the places of its parts; a whole tensor is one part."""
        for name, spec in self._files[STATE].specs.items():
            yield name, [_PartPlace(STATE, name, spec, spec.shape, (0,) * len(spec.shape))]
        parts: dict[str, list[_PartPlace]] = defaultdict(list)
        for rank, data in enumerate(self._manifest.ranks):
            specs = self._files[file := rank_file(rank)].specs
            for name, part in data.get(PARTS, {}).items():
                key, shape, offset = f"{PART}{name}", tuple(part["shape"]), tuple(part["offset"])
                parts[name].append(_PartPlace(file, key, specs[key], shape, offset))
        yield from parts.items()

    def _metadata(self, targets: Mapping[str, Tensor]) -> Metadata:
        """Describe the stored tensors for torch.distributed.checkpoint."""
        stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name in targets:
            places = [place for place in self._places[name] if place.numel or not place.whole_numel]
            chunks = [ChunkStorageMetadata(torch.Size(place.offset), torch.Size(place.spec.shape)) for place in places]
            properties = TensorProperties(dtype=places[0].spec.dtype)
            stored[name] = TensorStorageMetadata(properties, torch.Size(places[0].shape), chunks)
        return Metadata(stored)


@dataclass(frozen=True, slots=True)
class _PartPlace:
    """Where a part of a tensor is stored."""

    file: str
    name: str
    spec: TensorSpec
    shape: tuple[int, ...]  # of the whole
    offset: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.spec.shape).numel()

    @property
    def whole_numel(self) -> int:
        return torch.Size(self.shape).numel()


class _PartTaker:
    """Copies the needed slice of a stored part into its target."""

    def __init__(self, planner: DefaultLoadPlanner, item: Any) -> None:
        self._planner, self._item = planner, item

    def __call__(self, part: Tensor) -> None:
        for dim, (start, length) in enumerate(zip(self._item.storage_offsets, self._item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        self._planner.resolve_tensor(self._item).detach().copy_(part)


class _Parts(TensorFile):
    """A file whose tensors are passed to callables one at a time, so that only one is in memory."""

    _takers: Mapping[TensorSpec, list[Callable[[Tensor], None]]] = {}

    def visit(self, takers: Mapping[str, list[Callable[[Tensor], None]]]) -> None:
        """Call the takers of each tensor with it; the whole file is read and digested."""
        by_spec: dict[TensorSpec, list[Callable[[Tensor], None]]] = defaultdict(list)
        for name, name_takers in takers.items():
            by_spec[self.specs[name]] += name_takers
        self._takers = by_spec
        specs = {name: self.specs[name] for name in takers}
        self.load_into({name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()})
        self._takers = {}

    def _fill(self, fd: int, spec: TensorSpec, targets: list[Tensor], digest: Callable[[Any], None]) -> None:
        if not self._takers:
            super()._fill(fd, spec, targets, digest)
            return
        read = torch.empty(spec.shape, dtype=spec.dtype)
        super()._fill(fd, spec, [read], digest)
        for take in self._takers[spec]:
            take(read)


def _whole(places: list[_PartPlace]) -> TensorSpec:
    """Return the dtype and shape of the whole tensor of some parts."""
    first = places[0]
    return TensorSpec(first.spec.kind, first.shape, 0, 0)


def _refuse_gaps(path: Path, places: Mapping[str, list[_PartPlace]]) -> None:
    """Raise where the parts of a tensor do not add up to the whole."""
    for name, parts in places.items():
        is_same_tensor = len({(part.shape, part.spec.dtype) for part in parts}) == 1
        if not is_same_tensor or sum(part.numel for part in parts) != parts[0].whole_numel:
            raise damaged_file(path, f"is missing parts of {name}")
