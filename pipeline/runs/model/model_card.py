"""What is known of a trained model, for people and for the machine that it is taken to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import __version__
from pipeline.command_line import Command
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, DataError
from pipeline.project.run_code import load_reader, load_task, source_digest, sources
from pipeline.store.format.disk import Disk

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pipeline.runs.model.trained_model import TrainedModel
    from pipeline.training.checkpoints.trained_weights import ChosenCheckpoint

OF_TRAINING = tuple(
    f"data.{name}"
    for name in ("path", "splits", "structures_dir", "limit", "labels", "on_leak", "max_rejected_fraction")
)
KEPT = {"data": None, "structures": None, "graph": None, "embed": None, "train": ("task", "options", "batching")}
NOTHING_SET = Config.model_validate({"data": {"path": Path()}})


def model_names(models: Path) -> list[str]:
    """Return the names of the models in a folder, the newest last."""
    plans = sorted(models.glob("*/prepared.json"), key=lambda path: path.stat().st_mtime)
    return [path.parent.name for path in plans]


def model_card(model: TrainedModel) -> dict[str, Any]:
    """Return the card of a model: its training, its checkpoint, what it takes, and its figures, as JSON data."""
    if model.folder.export.is_file():
        from pipeline.training.checkpoints.exported_model import read_export

        card = read_export(model.folder.path)
        return {name: value for name, value in card.items() if name not in ("format", "settings")}
    from pipeline.training.checkpoints.checkpoint_reader import read_manifest

    chosen, recipe = _chosen(model), model.prepared.recipe
    manifest = read_manifest(Disk(), chosen.path)
    own = ("embeddings", "code", "table", "task", "options")
    return {
        "name": model.prepared.name,
        "task": recipe.get("task"),
        "options": recipe.get("options", {}),
        "code": recipe.get("code"),
        "checkpoint": chosen.path.name,
        "step": chosen.step,
        "figure": manifest.figure,
        "monitor": model.config.train.validation.monitor if model.config else None,
        "data": str(model.config.data.path) if model.config else None,
        "encoder": _encoder(model),
        "recipe": {name: value for name, value in recipe.items() if name not in own},
        "precision": model.prepared.precision,
        "evaluations": list(_evaluations(model.folder.evaluations)),
        "pipeline": __version__,
        "prepared": model.prepared.to_json(),
    }


def _encoder(model: TrainedModel) -> dict[str, Any] | None:
    """Return what tells the encoder and its embeddings apart; None for a model that takes none."""
    recipe = model.prepared.recipe.get("embeddings")
    file = {"file": Path(str(model.config.embed.weights)).name} if model.config else {}
    return file | dict(recipe) if recipe else None


def _chosen(model: TrainedModel) -> ChosenCheckpoint:
    from pipeline.training.checkpoints.trained_weights import choose_checkpoint

    chosen = choose_checkpoint(model.folder.checkpoints, model.checkpoint)
    if chosen is None:
        where = str(model.folder.checkpoints)
        raise DataError("no checkpoint was kept yet", where=where, remedy="pipeline status   (is it trained?)")
    return chosen


def _evaluations(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the figures of each evaluation: of which split and data, at which step."""
    for path in sorted(folder.glob("*.json")):
        kept = json.loads(path.read_text())["evaluation"]
        yield {name: kept.get(name) for name in ("split", "items", "step", "data", "figures")}


def export_model(model: TrainedModel, folder: Path, beside: Path | None) -> dict[str, Any]:
    """Write everything that using a model needs into a new folder; return its card."""
    from pipeline.training.checkpoints.exported_model import write_export

    if model.folder.export.is_file():
        copy = f"cp -r {model.folder.path} {folder}"
        raise ConfigError("this is an exported model: copy its folder", where=str(model.folder.path), remedy=copy)
    if model.config is None:
        problem = "the model was trained by a version that kept no settings with it"
        remedy = Command.submit("train", then="   (its next step writes them)")
        raise ConfigError(problem, where=str(model.folder.path), remedy=remedy)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError("something is there already", where=str(folder), remedy="name a folder that does not exist")
    chosen, card = _chosen(model), model_card(model)
    settings = portable_settings(model.config)
    task = load_task(model.config.train.task, model.config.train.options, beside=beside)
    code = dict(sources(task))
    data = model.config.data
    if data.reader is not None:
        code |= sources(load_reader(data.reader, data.path, data.options, beside=beside))
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in sorted(code.items()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
    head = "# The settings that this model was trained with, as far as using it needs them."
    sections = [f"{section}: {json.dumps(values)}" for section, values in settings.items()]
    (folder / "pipeline.yaml").write_text("\n".join([head, *sections, ""]))
    (folder / "README.md").write_text(card_text(card, settings))
    is_changed = source_digest(task) != card["code"]
    card |= {"code_changed": is_changed, "settings": json.loads(model.folder.settings.read_text())}
    return write_export(folder, chosen.path, card)


def portable_settings(config: Config) -> dict[str, Any]:
    """Return the settings that using a model on other data needs: those that are not the defaults, without paths."""
    plain, usual = config.model_dump(mode="json"), NOTHING_SET.model_dump(mode="json")
    kept: dict[str, Any] = {}
    for section, names in KEPT.items():
        values = {name: plain[section][name] for name in (names or plain[section])}
        differing = {
            name: value
            for name, value in values.items()
            if value != usual[section][name] and f"{section}.{name}" not in OF_TRAINING
        }
        kept |= {section: differing} if differing else {}
    if weights := kept.get("embed", {}).get("weights"):
        kept["embed"]["weights"] = f"weights/{Path(weights).name}"
    return kept


def card_text(card: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return a model's card as text for people, in Markdown."""
    reader = settings.get("data", {}).get("source") == "reader"
    data = "--set data.path=FILE" if reader else "--set data.source=glob --set data.path=FOLDER"
    weights = settings.get("embed", {}).get("weights")
    lines = [f"# {card['name']}", "", *card_lines(card), "", "## Use it", ""]
    if card["encoder"]:
        lines += [f"Put the encoder's checkpoint at `{weights}` (`pipeline weights import FILE`), then", ""]
    lines += ["```sh", "cd THIS_FOLDER", f"pipeline submit --stage predict --model . {data} --follow", "```", ""]
    lines += ["Nothing is trained, and no labels are needed. In Python, without pipeline:", ""]
    load = ["from safetensors.torch import load_file", 'state = load_file("model.safetensors")']
    return "\n".join([*lines, "```python", *load, "```", ""])


def card_lines(card: Mapping[str, Any]) -> list[str]:
    """Return the facts of a card, a line each."""
    options = ", ".join(f"{name} {value}" for name, value in card["options"].items())
    best = f", {card['monitor'] or 'figure'} {card['figure']:.4g}" if card["figure"] is not None else ""
    lines = [
        f"- task: {card['task']}" + (f" ({options})" if options else ""),
        f"- checkpoint: {card['checkpoint']}, step {card['step']:,}{best}",
        f"- trained on: {card['data'] or 'unknown'}, in {card['precision']}",
    ]
    if weights := card.get("weights"):
        lines.append(f"- weights: {weights['parameters']:,} numbers, digest {weights['digest']}")
    if card["encoder"]:
        lines.append("- encoder: " + ", ".join(f"{name} {value}" for name, value in card["encoder"].items()))
    for made in card["evaluations"]:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in made["figures"].items() if value is not None)
        lines.append(f"- {made['split'] or 'all items'} ({made['items']:,} items, step {made['step']:,}): {figures}")
    return lines
