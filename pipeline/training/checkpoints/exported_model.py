"""A model to take away: a folder with the weights of one checkpoint, and everything that using them needs.

    model.safetensors    the weights under the model's own names; moving averages where the training kept them
    model.json           whose they are: training, task, plan, encoder, figures; and the digest of the weights
    pipeline.yaml        the settings to use it with, and beside it the task's own code
    README.md            the same for people

model.json comes last: without it there is no exported model. Its first line is the digest of the rest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError, DataError
from pipeline.keys import content_digest
from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints.checkpoint_reader import open_checkpoint
from pipeline.training.checkpoints.tensor_file import TensorFile, WrittenFile, write_tensors
from pipeline.training.prepared import ModelFolder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

WEIGHTS = "model.safetensors"
EXPORT_FORMAT = 1


def write_export(folder: Path, tensors: Mapping[str, Tensor], card: Mapping[str, Any]) -> dict[str, Any]:
    """Write weights and then the card, completed by what is known of the weights; return the card."""
    written = write_tensors(Disk(), folder / WEIGHTS, tensors)
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
    save_file(whole, place / WEIGHTS if beside else place, metadata=told)
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
        problem = "its bytes are not those that were written"
        raise DataError(problem, where=str(path), remedy="copy the folder again, or export the model anew")
    card: dict[str, Any] = json.loads(body)
    if card["format"] != EXPORT_FORMAT:
        problem = f"an exported model of format {card['format']}; this version of pipeline reads {EXPORT_FORMAT}"
        raise ConfigError(problem, where=str(path), remedy="use the version of pipeline that wrote it, or a newer one")
    return card


def load_export(folder: Path, model: nn.Module) -> None:
    """Fill a model with exported weights, every byte of which is verified."""
    from pipeline.training.checkpoints.training_state import model_state

    weights = read_export(folder)["weights"]
    file = TensorFile(Disk(), folder / WEIGHTS, WrittenFile(weights["bytes"], weights["digest"]))
    file.load_into(model_state(model))
