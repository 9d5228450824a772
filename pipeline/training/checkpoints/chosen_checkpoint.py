"""Which checkpoint of a training is to be used, by manifests alone, without torch; and models to take away.

A model to take away is a folder with the weights of one checkpoint, and everything that using them needs:

    model.safetensors    the weights under the model's own names; moving averages where the training kept them
    model.json           whose they are: training, task, plan, encoder, figures; and the digest of the weights
    pipeline.yaml        the settings to use it with, and beside it the task's own code
    README.md            the same for people

model.json comes last: without it there is no exported model. Its first line is the digest of the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError, DataError, JobFailed
from pipeline.files import file_digest
from pipeline.keys import content_digest
from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints import checkpoint_reader
from pipeline.training.checkpoints.checkpoint_folder import by_figure
from pipeline.training.checkpoints.checkpoint_reader import MANIFEST, open_checkpoint
from pipeline.training.checkpoints.tensor_file import ANOTHER, CheckpointDamaged, TensorFile, WrittenFile, write_tensors
from pipeline.training.prepared import BEST, LAST, ModelFolder

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor, nn

    from pipeline.training.checkpoints.checkpoint_reader import Manifest

EXPORTED_WEIGHTS = "model.safetensors"
EXPORT_FORMAT = 1


def write_export(folder: Path, tensors: Mapping[str, Tensor], card: Mapping[str, Any]) -> dict[str, Any]:
    """Write weights and then the card, completed by what is known of the weights; return the card."""
    written = write_tensors(Disk(), folder / EXPORTED_WEIGHTS, tensors)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    weights = {"bytes": written.bytes, "digest": written.digest, "tensors": len(tensors), "parameters": parameters}
    whole = {"format": EXPORT_FORMAT, **card, "weights": weights}
    body = json.dumps(whole, indent=1) + "\n"
    ModelFolder(folder).export.write_text(f"{content_digest(body.encode()).hex()}\n{body}")
    return whole


def write_published(folder: Path, form: str, tensors: Mapping[str, Tensor], beside: Mapping[str, str]) -> Path:
    """Write tensors under another program's names: whole ones, a tied one as often as it has names.

    They are `FORM.safetensors`, or, where files belong `beside` them, a folder of this form. Return its path.
    """
    from safetensors.torch import save_file

    place = folder / form if beside else folder / f"{form}.safetensors"
    if beside:
        place.mkdir()
        for name, text in beside.items():
            (place / name).write_text(text, encoding="utf-8")
    whole = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    told = {"format": "pt"} if beside else None  # without it transformers refuses a folder's weights
    save_file(whole, place / EXPORTED_WEIGHTS if beside else place, metadata=told)
    return place


def checkpoint_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Return a checkpoint's weights by the model's own names; of those with moving averages, these."""
    import torch

    loaded = open_checkpoint(checkpoint)
    if loaded.is_divided:
        from pipeline.training.checkpoints.sharded_checkpoint import assembled  # which is slow to import

        loaded = assembled(loaded)
    kept = {name: spec for name, spec in loaded.specs.items() if name.startswith(("model.", "ema."))}
    first = {loaded.same.get(name, name) for name in kept}  # of tied ones: the stored name
    tensors = {name: torch.empty(kept[name].shape, dtype=kept[name].dtype) for name in kept if name in first}
    loaded.load_into(tensors)
    tensors |= {alias: tensors[name] for alias, name in loaded.same.items() if alias in kept}
    plain = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    return plain | {name.removeprefix("ema."): tensor for name, tensor in tensors.items() if name.startswith("ema.")}


def read_export(folder: Path) -> dict[str, Any]:
    """Read and verify a card; raise where it is damaged or of a later version."""
    path = ModelFolder(folder).export
    digest, _, body = path.read_bytes().partition(b"\n")
    if digest != content_digest(body).hex().encode():
        problem = "checksum mismatch"
        raise DataError(problem, where=str(path), remedy="copy the folder again, or export the model again")
    card: dict[str, Any] = json.loads(body)
    if card["format"] != EXPORT_FORMAT:
        problem = f"an exported model of format {card['format']}; this version of pipeline reads {EXPORT_FORMAT}"
        raise ConfigError(problem, where=str(path), remedy="use the version of pipeline that wrote it, or a newer one")
    return card


def load_export(folder: Path, model: nn.Module) -> None:
    """Fill a model with exported weights, every byte of which is verified."""
    from pipeline.training.checkpoints.training_state import model_state

    weights = read_export(folder)["weights"]
    file = TensorFile(Disk(), folder / EXPORTED_WEIGHTS, WrittenFile(weights["bytes"], weights["digest"]))
    file.load_into(model_state(model))


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
    return _chosen(folder / newest.name, note="no checkpoint has a validation metric: using the last one")


def _named(folder: Path, wanted: str, without: Collection[str]) -> ChosenCheckpoint:
    path = folder / wanted if (folder / wanted).is_dir() else Path(wanted).absolute()
    if path.name in without:
        raise JobFailed("is damaged or was removed", where=str(path), remedy=ANOTHER)
    if not (path / MANIFEST).is_file():
        remedy = f"best, last, or a folder such as those of   ls {folder}"
        raise ConfigError("checkpoint not found", where=wanted, remedy=remedy)
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
