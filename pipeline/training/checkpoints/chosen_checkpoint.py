"""Which checkpoint of a training is to be used, by manifests alone, without torch; and models to take away.

A model to take away is a sealed folder with the weights of one checkpoint, and everything that using them needs:

    model.safetensors    the weights under the model's own names; moving averages where the training kept them
    model.json           its manifest: training, task, plan, encoder, metrics; and the digest of the weights
    pipeline.yaml        the settings to use it with, and next to it the task's own code
    README.md            the same for people

model.json comes last: without it there is no exported model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError, DataError, JobFailed
from pipeline.files import file_digest
from pipeline.keys import content_digest
from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints.checkpoint import by_figure, checkpoints_in, open_checkpoint
from pipeline.training.checkpoints.sealed_folder import (
    ANOTHER,
    MANIFEST,
    TENSORS,
    FolderDamaged,
    read_sealed,
    write_manifest,
    write_tensors,
)
from pipeline.training.prepared import BEST, LAST, ModelFolder

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from pipeline.training.checkpoints.sealed_folder import SealedFolder

EXPORTED = "model"  # name of the weights' file, without its suffix


def write_export(folder: Path, tensors: Mapping[str, Tensor], card: Mapping[str, Any]) -> dict[str, Any]:
    """Write weights and then the card, completed by facts about the weights; return the card."""
    written = write_tensors(folder / (name := f"{EXPORTED}{TENSORS}"), tensors, Disk())
    parameters = sum(tensor.numel() for tensor in tensors.values())
    weights = {"bytes": written.bytes, "digest": written.digest, "tensors": len(tensors), "parameters": parameters}
    whole = {**card, "weights": weights}
    write_manifest(ModelFolder(folder).export, {name: written}, whole, disk=Disk())
    return whole


def write_published(folder: Path, form: str, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> Path:
    """Write tensors under another program's names: whole ones, a tied one as often as it has names.

    They are `FORM.safetensors`, or, where text files belong to them, a folder of this form. Return its path.
    """
    from safetensors.torch import save_file

    place = folder / form if texts else folder / f"{form}{TENSORS}"
    if texts:
        place.mkdir()
        for name, text in texts.items():
            (place / name).write_text(text, encoding="utf-8")
    whole = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    metadata = {"format": "pt"} if texts else None  # without it transformers refuses a folder's weights
    save_file(whole, place / f"{EXPORTED}{TENSORS}" if texts else place, metadata=metadata)
    return place


def checkpoint_weights(checkpoint: Path) -> tuple[dict[str, Tensor], frozenset[str]]:
    """Return a checkpoint's weights by the model's own names, and which of them are moving averages."""
    loaded = open_checkpoint(checkpoint)
    loaded.sealed.verify()
    kinds: dict[str, dict[str, Tensor]] = {"model": {}, "ema": {}}
    for stored_name, stored in loaded.tensors.items():
        kind, _, name = stored_name.partition(".")
        if kind in kinds:
            kinds[kind][name] = stored.whole()
    return kinds["model"] | kinds["ema"], frozenset(kinds["ema"])


def read_export(folder: Path) -> SealedFolder:
    """Open an exported model by its card, which is its data."""
    try:
        return read_sealed(
            folder, ModelFolder(folder).export.name, remedy="copy the folder again, or export the model again"
        )
    except FolderDamaged as error:
        raise DataError(error.what, where=error.where, remedy=error.next) from error


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
    known = [checkpoint for checkpoint in checkpoints_in(folder) if checkpoint.name not in without]
    if not known:
        return None
    best = by_figure(known)
    if wanted == LAST or best:
        return _chosen((known if wanted == LAST else best)[0].path)
    return _chosen(known[0].path, note="no checkpoint has a validation metric: using the last one")


def _named(folder: Path, wanted: str, without: Collection[str]) -> ChosenCheckpoint:
    path = folder / wanted if (folder / wanted).is_dir() else Path(wanted).absolute()
    if path.name in without:
        raise JobFailed("is damaged or was removed", where=str(path), remedy=ANOTHER)
    if not (path / MANIFEST).is_file():
        remedy = f"best, last, or a folder such as those of   ls {folder}"
        raise ConfigError("checkpoint not found", where=wanted, remedy=remedy)
    return _chosen(path)


def _chosen(path: Path, note: str = "") -> ChosenCheckpoint:
    checkpoint = open_checkpoint(path)
    model = str(checkpoint.sealed.identity.get("recipe", ""))
    return ChosenCheckpoint(path, checkpoint.step, model, checkpoint_digest(path), note)


def _exported(path: Path) -> ChosenCheckpoint:
    card = read_export(path).data
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
