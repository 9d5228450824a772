"""Checkpoints of a model that is spread over ranks: each writes its own parts, any number of ranks takes them up again.

Which part of a tensor is whose, and which parts another division needs, is planned by torch.distributed.checkpoint. Its
own files are pickled; ours are those of every checkpoint, safetensors with digests under one JSON manifest: parts lie
in the file that a rank has anyway, and where they belong is said in the rank's data.

    State(tensors=whole, own=rng | parts, own_data=own | told)        whole, parts, told = divided(packed.tensors)
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
from pipeline.training.checkpoints.checkpoint_reader import STATE, LoadedCheckpoint, Manifest, Own, rank_file
from pipeline.training.checkpoints.tensor_file import TensorFile, TensorSpec, damaged_file, refuse_misfits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

PART = "part."  # how the name of a part begins, in the file of a rank
PARTS = "parts"  # what is told of them, in the data of a rank


def is_spread(tensor: Tensor) -> bool:
    """Say whether ranks have parts of a tensor."""
    return hasattr(tensor, "_local_tensor")


def divided(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Return tensors that all ranks have alike, this rank's parts of the others, and what to tell of these."""
    whole = {name: one for name, one in tensors.items() if not is_spread(one)}
    spread: dict[str, Any] = {name: one for name, one in tensors.items() if is_spread(one)}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(spread, is_coordinator=True)
    parts: dict[str, Tensor] = {}
    told: dict[str, Any] = {}
    for item in planner.create_local_plan().items:
        part = planner.resolve_data(item)
        assert isinstance(part, torch.Tensor)
        assert item.tensor_data is not None
        parts[f"{PART}{item.index.fqn}"] = part.detach()
        told[item.index.fqn] = {
            "shape": list(item.tensor_data.size),
            "offset": list(item.tensor_data.chunk.offsets),
        }
    return whole, parts, {PARTS: told} if told else {}


def assembled(loaded: LoadedCheckpoint, disk: Disk | None = None) -> Assembled:
    """Return a checkpoint whose tensors are read from all its files, by whichever division they are needed."""
    disk = disk or Disk()
    return Assembled(disk, loaded.path, checkpoint_reader.read_manifest(disk, loaded.path))


class Assembled(LoadedCheckpoint):
    """A checkpoint, whether ranks wrote parts of it or not; what it is loaded into may be spread, or whole."""

    def __init__(self, disk: Disk, path: Path, told: Manifest) -> None:
        super().__init__(disk, path, told)
        names = [STATE, *(rank_file(rank) for rank in range(told.world))]
        self._files = {name: _Parts(disk, path / name, told.files[name]) for name in names}
        self._places = dict(self._found())
        self._specs = {name: _whole(places) for name, places in self._places.items()}
        _refuse_gaps(path, self._places)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Return the type and shape of every tensor that is the training's, not a rank's own; they lie nowhere."""
        return self._specs

    def load_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors by name, in place: of one that is spread, this rank's part.

        Only files that are needed are read, each to its end and digested.
        """
        refuse_misfits(self.specs, targets, self.path)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner({name: one.detach() for name, one in targets.items()}, self._metadata(targets))
        takers: dict[str, dict[str, list[Callable[[Tensor], None]]]] = defaultdict(lambda: defaultdict(list))
        for item in planner.create_local_plan().items:
            offset = item.storage_index.offset
            assert offset is not None
            place = next(one for one in self._places[item.storage_index.fqn] if one.offset == tuple(offset))
            takers[place.file][place.name].append(_PartTaker(planner, item))
        with torch.no_grad():
            for file, wanted in takers.items():
                self._files[file].visit(wanted)

    def own(self, rank: int) -> Own | None:
        """Return what a rank had of its own, but its parts; nothing where there were fewer ranks."""
        if rank >= self.world:
            return None
        file = self._files[rank_file(rank)]
        specs = {name: spec for name, spec in file.specs.items() if not name.startswith(PART)}
        tensors = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
        file.load_into(tensors)
        return Own(tensors, {name: one for name, one in self._told.ranks[rank].items() if name != PARTS})

    def _found(self) -> Iterator[tuple[str, list[_PartPlace]]]:
        """Yield every tensor and where it lies: whole, or in parts."""
        for name, spec in self._files[STATE].specs.items():
            yield name, [_PartPlace(STATE, name, spec, spec.shape, (0,) * len(spec.shape))]
        parts: dict[str, list[_PartPlace]] = defaultdict(list)
        for rank, data in enumerate(self._told.ranks):
            specs = self._files[file := rank_file(rank)].specs
            for name, one in data.get(PARTS, {}).items():
                place = _PartPlace(
                    file, f"{PART}{name}", specs[f"{PART}{name}"], tuple(one["shape"]), tuple(one["offset"])
                )
                parts[name].append(place)
        yield from parts.items()

    def _metadata(self, targets: Mapping[str, Tensor]) -> Metadata:
        """Return what is there, in the words of torch.distributed.checkpoint."""
        told: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name in targets:
            places = [one for one in self._places[name] if one.numel or not one.whole_numel]
            chunks = [ChunkStorageMetadata(torch.Size(one.offset), torch.Size(one.spec.shape)) for one in places]
            properties = TensorProperties(dtype=places[0].spec.dtype)
            told[name] = TensorStorageMetadata(properties, torch.Size(places[0].shape), chunks)
        return Metadata(told)


@dataclass(frozen=True, slots=True)
class _PartPlace:
    """Where a part of a tensor lies."""

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
    """Copies what is needed of a part to where it belongs."""

    def __init__(self, planner: DefaultLoadPlanner, item: Any) -> None:
        self._planner, self._item = planner, item

    def __call__(self, part: Tensor) -> None:
        for dim, (start, length) in enumerate(zip(self._item.storage_offsets, self._item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        self._planner.resolve_tensor(self._item).detach().copy_(part)


class _Parts(TensorFile):
    """A file whose tensors are shown one at a time, so that no more than one is in memory."""

    _takers: Mapping[TensorSpec, list[Callable[[Tensor], None]]] = {}

    def visit(self, takers: Mapping[str, list[Callable[[Tensor], None]]]) -> None:
        """Show tensors by name to those who take them; the whole file is read and digested."""
        by_spec: dict[TensorSpec, list[Callable[[Tensor], None]]] = defaultdict(list)
        for name, those in takers.items():
            by_spec[self.specs[name]] += those
        self._takers = by_spec
        shapes = {name: self.specs[name] for name in takers}
        self.load_into({name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in shapes.items()})
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
    """Return the type and shape of a tensor that lies in parts."""
    first = places[0]
    return TensorSpec(first.spec.dtype, first.shape, 0, 0)


def _refuse_gaps(path: Path, places: Mapping[str, list[_PartPlace]]) -> None:
    """Raise where parts do not make a whole: no checkpoint that was written like this is whole."""
    for name, parts in places.items():
        is_one = len({(one.shape, one.spec.dtype) for one in parts}) == 1
        if not is_one or sum(one.numel for one in parts) != parts[0].whole_numel:
            raise damaged_file(path, f"has not all parts of {name}")
