"""A model that was trained before, here or on another machine: named by people, and used without training anything."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.command_line import Command
from pipeline.config.load import from_resolved
from pipeline.errors import ConfigError, DataError, PipelineError
from pipeline.runs.dataset.reader_items import is_reader
from pipeline.runs.model.prepare import embeddings_used
from pipeline.training.prepared import ModelFolder, Prepared

if TYPE_CHECKING:
    from pipeline.config.schema import Config
    from pipeline.project.project import Project

DECIDED = ("task", "options", "batching")  # of section `train`: what a model's inputs and layers follow from


@dataclass(frozen=True)
class TrainedModel:
    """A model's folder, the plan of its training, and which of its checkpoints is meant."""

    folder: ModelFolder
    prepared: Prepared
    checkpoint: str  # best, last, or a path
    config: Config | None  # of its training; None where an older version wrote none

    def on(self, table: str) -> Prepared:
        """Return the plan for another data set: that of the training, whose items it does not know."""
        return replace(self.prepared, table=table, skipped=(), crop={})

    def refuse_other_settings(self, project: Project) -> None:
        """Raise where the configuration would give the model other inputs than those it was trained on."""
        here = _inputs(project.config)
        there = {f"train.{name}": self.prepared.recipe[name] for name in DECIDED if name in self.prepared.recipe}
        there |= _inputs(self.config) if self.config is not None else {}
        differ = [key for key, value in there.items() if here.get(key) != value]
        if differ:
            texts = [f"{key}: {json.dumps(there[key])} (here {json.dumps(here.get(key))})" for key in differ]
            problem = "\n  ".join(["the model was trained with other settings:", *texts])
            remedy = Command(()).with_settings(*((key, _setting(there[key])) for key in differ)).change
            raise ConfigError(problem, where=str(self.folder.path), remedy=f"the same command with {remedy}")
        theirs = self.prepared.recipe.get("embeddings")
        if theirs and not is_reader(project.config) and (mine := embeddings_used(project)) != theirs:
            names = sorted(name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name))
            texts = [f"{name}: {theirs.get(name)!r} (here {mine.get(name)!r})" for name in names]
            problem = "\n  ".join(["the model was trained on other embeddings:", *texts])
            remedy = "the same command with --set embed.weights=FILE of that encoder   (pipeline config show embed)"
            raise ConfigError(problem, where=str(self.folder.path), remedy=remedy)


def names_model(wanted: str) -> bool:
    """Tell whether a setting names a model or a checkpoint, so that nothing is to be trained for it."""
    return wanted not in ("best", "last")


def named_model(models: Path, wanted: str) -> TrainedModel | None:
    """Return the model that a setting names; None where it means the configured training, or a checkpoint of it.

    It may be a name in the folder of models, or the path of a model's folder, of an exported one, or of a checkpoint.
    """
    from pipeline.training.checkpoints.checkpoint_reader import MANIFEST

    if not names_model(wanted):
        return None
    for path in (models / wanted, Path(wanted).absolute()):
        if (path / MANIFEST).is_file():
            return _read(path.parent.parent, checkpoint=str(path))
        folder = ModelFolder(path)
        if folder.export.is_file() or folder.prepared.is_file():
            return _read(path, checkpoint="best")
    if "/" in wanted or not wanted.startswith("step-"):
        there = sorted(path.parent.name for path in models.glob("*/prepared.json"))
        listed = f"there are: {', '.join(there)}" if there else f"no model is in {models}"
        remedy = "pipeline model list   (or the path of a model's folder, an exported one, or a checkpoint)"
        raise ConfigError(f"there is no such model; {listed}", where=wanted, remedy=remedy)
    return None


def _read(path: Path, checkpoint: str) -> TrainedModel:
    folder = ModelFolder(path)
    is_export = folder.export.is_file()
    try:
        if is_export:
            from pipeline.training.checkpoints.exported_model import read_export

            card = read_export(path)
            prepared, settings = Prepared.from_json(card["prepared"]), json.dumps(card["settings"])
        else:
            prepared = Prepared.from_json(json.loads(folder.prepared.read_text()))
            settings = folder.settings.read_text() if folder.settings.is_file() else ""
    except (OSError, ValueError, TypeError, KeyError) as error:
        problem = f"this is no model's folder of this version: {type(error).__name__}: {error}"
        remedy = "pipeline model list   (names a model's folder, or a checkpoint in one)"
        raise DataError(problem, where=str(path), remedy=remedy) from error
    try:
        config = from_resolved(settings) if settings else None
    except PipelineError:  # of another version: its settings cannot be compared
        config = None
    return TrainedModel(folder, prepared, str(path) if is_export else checkpoint, config)


def _inputs(config: Config) -> dict[str, Any]:
    """Return the settings that decide what a model is given, by key."""
    train = config.train.model_dump(mode="json", include=set(DECIDED))
    decided = {f"train.{name}": value for name, value in train.items()}
    if is_reader(config):
        return decided | {"data.reader": config.data.reader}
    graph = config.graph.model_dump(mode="json", exclude={"cache", "contacts"})  # contacts are labels
    atom, of_residues = graph.pop("atom"), ("neighbours", "radius")
    if config.graph.nodes == "atom":
        graph = {name: value for name, value in graph.items() if name not in of_residues}
        graph |= {f"atom.{name}": value for name, value in atom.items()}
    return decided | {f"graph.{name}": value for name, value in graph.items()}


def _setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
