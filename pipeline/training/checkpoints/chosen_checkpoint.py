"""Which checkpoint of a training is to be used: by its manifest alone, no tensor is read and torch not imported."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError, JobFailed
from pipeline.files import file_digest
from pipeline.keys import content_digest
from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints import checkpoint_reader
from pipeline.training.checkpoints.checkpoint_folder import by_figure
from pipeline.training.checkpoints.checkpoint_reader import MANIFEST
from pipeline.training.checkpoints.exported_model import read_export
from pipeline.training.checkpoints.tensor_file import ANOTHER, CheckpointDamaged
from pipeline.training.prepared import BEST, LAST, ModelFolder

if TYPE_CHECKING:
    from collections.abc import Collection

    from pipeline.training.checkpoints.checkpoint_reader import Manifest


WEIGHTS = (".pt", ".pth", ".ckpt", ".safetensors")


@dataclass(frozen=True, slots=True)
class ChosenCheckpoint:
    """A checkpoint that is to be used."""

    path: Path
    step: int
    model: str  # name of its training
    digest: str  # of its manifest, which has the digests of its files
    note: str = ""  # why it is not the one that was asked for

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ChosenCheckpoint:
        return cls(**{**data, "path": Path(data["path"])})


def choose_checkpoint(folder: Path, wanted: str, without: Collection[str] = ()) -> ChosenCheckpoint | None:
    """Choose a checkpoint of a training from the manifests, without reading tensors; None: there is none.

    `wanted` is best, last, a folder's name or path, or a file of weights; `without` has the names of those that proved
    unusable.
    """
    if (file := weights_file(wanted)) is not None:
        return ChosenCheckpoint(file, 0, file.name.split(".")[0], checkpoint_digest(file))
    if wanted not in (BEST, LAST):
        path = Path(wanted)
        return _exported(path) if ModelFolder(path).export.is_file() else _named(folder, wanted, without)
    known = [manifest for manifest in _all(folder) if manifest.name not in without]
    newest = max(known, key=lambda manifest: manifest.serial, default=None)
    if newest is None:
        return None
    best = by_figure(known)
    if wanted == LAST or best:
        return _chosen(folder / (newest if wanted == LAST else best[0]).name)
    return _chosen(folder / newest.name, note="no checkpoint has a figure of a validation: the last one is used")


def _named(folder: Path, wanted: str, without: Collection[str]) -> ChosenCheckpoint:
    path = folder / wanted if (folder / wanted).is_dir() else Path(wanted).absolute()
    if path.name in without:
        raise JobFailed("is damaged, or no longer there", where=str(path), remedy=ANOTHER)
    if not (path / MANIFEST).is_file():
        remedy = f"best, last, or a folder such as those of   ls {folder}"
        raise ConfigError("there is no such checkpoint", where=wanted, remedy=remedy)
    return _chosen(path)


def _all(folder: Path) -> list[Manifest]:
    """Return the manifest of each checkpoint that can be read."""
    disk, known = Disk(), list[checkpoint_reader.Manifest]()
    for name in disk.list_folder(folder):
        if name.startswith("step-"):
            with suppress(CheckpointDamaged):  # or removed meanwhile, for newer ones
                known.append(checkpoint_reader.read_manifest(disk, folder / name))
    return known


def _chosen(path: Path, note: str = "") -> ChosenCheckpoint:
    manifest = checkpoint_reader.read_manifest(Disk(), path)
    return ChosenCheckpoint(
        path, manifest.step, str(manifest.identity.get("recipe", "")), checkpoint_digest(path), note
    )


def _exported(path: Path) -> ChosenCheckpoint:
    card = read_export(path)
    return ChosenCheckpoint(path, card["step"], card["name"], checkpoint_digest(path))


def weights_file(wanted: str) -> Path | None:
    """Return the file of weights that is named instead of a checkpoint; None where none is."""
    path = Path(wanted).absolute()
    return path if path.suffix in WEIGHTS and path.is_file() else None


def checkpoint_digest(path: Path) -> str:
    """Return the digest of what names all of a checkpoint's bytes: its manifest, a model's card, or itself, a file."""
    if path.is_file():
        return file_digest(path)
    card = ModelFolder(path).export
    return content_digest((card if card.is_file() else path / MANIFEST).read_bytes()).hex()
