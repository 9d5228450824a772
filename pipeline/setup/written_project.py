"""Writes a small project for one command, from its options and the settings of the project.

`pipeline embed` writes one for a FASTA file; `pipeline dock` writes one for two structures and a model.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.command_line import Command, quoted
from pipeline.config.load import read_config
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.files import write_whole
from pipeline.planning.trained_model import chosen_of, named_model, portable_settings
from pipeline.project.project import local_machine
from pipeline.project.run_code import load_task
from pipeline.protocol import Publishes
from pipeline.store.format.disk import written_to
from pipeline.structures.sources.table_sources import split_suffix
from pipeline.training.checkpoints.checkpoint import weights_file

if TYPE_CHECKING:
    from pipeline.config.load import LoadedConfig

CONFIG = "pipeline.yaml"
NO_FILES: Mapping[str, str] = {}
TABLE = "complex.csv"
TASK = "pipeline.tasks.complex_docking:ComplexDocking"


def refuse_absent(*files: Path) -> None:
    """Raise if one of these files is missing."""
    for file in files:
        if not file.is_file():
            raise ConfigError("file not found", where=str(file), remedy=f"ls {quoted(file.parent)}")


def cluster_settings(project: LoadedConfig, *stages: str) -> dict[str, Any]:
    """Return the cluster settings of the project; without a project those of this machine, with its GPU if any."""
    cluster = project.config.cluster.model_dump(mode="json", exclude_unset=True)
    if project.path:
        return cluster
    gpus = min(1, len(local_machine(project.config.cluster.slots).gpus))
    own = {stage: {"gpus": gpus} | cluster.get(stage, {}) for stage in stages}
    return {"executor": "local"} | cluster | own


def write_project(
    folder: Path, head: str, settings: Mapping[str, Mapping[str, Any]], beside: Mapping[str, str] = NO_FILES
) -> Path:
    """Write the texts of some files and then a configuration into a folder; return the configuration's path."""
    first = f"# {head};"
    lines = [f"{first} finished work is kept: run the same command again to continue.\n"]
    lines += [f"{section}: {json.dumps(values)}" for section, values in settings.items()]
    with written_to(folder, "choose another folder: --out DIR"):
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / CONFIG).exists() and not (folder / CONFIG).read_bytes().startswith(first.encode()):
            what = "this command did not write this configuration, and does not overwrite it"
            raise ConfigError(what, where=str(folder / CONFIG), remedy="choose another folder: --out DIR")
        for name, text in {**beside, CONFIG: "\n".join([*lines, ""])}.items():
            write_whole(folder / name, text)
    return folder / CONFIG


def write_fasta_project(folder: Path, fasta: Path, weights: Path | None, project: LoadedConfig) -> Path:
    """Write the configuration of `pipeline embed` for a FASTA file into a folder; return its path."""
    refuse_absent(fasta)
    here = project.config
    data = {"source": "fasta", "path": str(fasta.absolute()), "max_rejected_fraction": here.data.max_rejected_fraction}
    settings: dict[str, dict[str, Any]] = {
        "data": data,
        "structures": here.structures.model_dump(mode="json", exclude_unset=True),
        "embed": here.embed.model_dump(mode="json", exclude_unset=True)
        | {"weights": str((weights or here.embed.weights).absolute())},
        "cache": here.cache.model_dump(mode="json", exclude_unset=True) | {"root": str(here.cache.root)},
        "cluster": cluster_settings(project, "embed") | {"runs": "runs"},
    }
    return write_project(folder, "Sequences to embed, written by `pipeline embed`", settings)


@dataclass(frozen=True)
class Docking:
    """Two structures to dock, and the options."""

    receptor: Path
    ligand: Path
    model: str  # a trained model, or a file of weights
    poses: int
    steps: int
    confidence: str | None = None  # a model or a file of weights that ranks the poses
    top: int = 5  # poses to write as structures
    trajectory: bool = False
    bound: bool = False  # the files show the true pose
    sets: Sequence[str] = ()  # typed settings; options override the model's

    @property
    def name(self) -> str:
        return "-".join(split_suffix(path.name)[0].replace(" ", "_") for path in (self.receptor, self.ligand))


def write_dock_project(folder: Path, docking: Docking, project: LoadedConfig) -> Path:
    """Write a configuration and a table of one complex into a folder; return the configuration's path."""
    files = docking.receptor, docking.ligand
    refuse_absent(*files)
    settings = _settings(docking, project)
    table = io.StringIO(newline="")
    columns = "id", "receptor_path", "ligand_path"
    csv.writer(table).writerows([columns, (docking.name, *(str(path.absolute()) for path in files))])
    head = "Two proteins to dock, written by `pipeline dock`"
    return write_project(folder, head, settings, {TABLE: table.getvalue()})


def _settings(docking: Docking, project: LoadedConfig) -> dict[str, dict[str, Any]]:
    """Return the settings by section: the model's, and the project's where they do not change results."""
    here = project.config
    model = _settings_of_model(docking, here, project.base_dir.absolute())
    of_model = [typed for typed in docking.sets if typed.startswith(("train.options", "train.predict.options"))]
    typed = read_config(None, ["data.path=.", *of_model]).config.train
    options = model["train"].get("options", {}) | typed.options
    drawn: dict[str, Any] = {"samples": docking.poses, "steps": docking.steps, "top": docking.top}
    drawn |= {"trajectory": True} if docking.trajectory else {}
    drawn |= _judge(docking.confidence, here) if docking.confidence else {}
    drawn |= typed.predict.options
    return {
        "data": {"source": "manifest", "path": TABLE},  # the training's data settings do not apply to two files
        "structures": model.get("structures", {}),
        "embed": {"weights": str(here.embed.weights)} | model.get("embed", {}),
        "graph": model.get("graph", {}) | {"contacts": 5.0 if docking.bound else None},
        "train": model["train"]
        | {
            "options": options,
            "split": None,
            "models": str(here.train.models),
            "predict": {"folder": ".", "options": drawn},
        },
        "cache": {"root": str(here.cache.root)},
        "cluster": cluster_settings(project, "embed", "train", "predict"),
    }


def _settings_of_model(docking: Docking, here: Config, beside: Path) -> dict[str, dict[str, Any]]:
    """Return the settings of the training that using the model needs."""
    if (file := weights_file(docking.model)) is not None:
        # settings of its embeddings
        return {"embed": {"context": "partner"}, "train": {"task": TASK, "options": _published_options(file)}}
    model = named_model(here.train.models, docking.model)
    if model is None or model.config is None:
        what = "not a trained model, and not a file of weights"
        raise ConfigError(what, where=f"--model {docking.model}", remedy=Command.of("model list"))
    train = model.config.train
    if not isinstance(load_task(train.task, train.options, beside=beside), Publishes):
        what = f"a model of {train.task}, which predicts no poses"
        remedy = Command.of("model list", then=f"   (choose one of {TASK})")
        raise ConfigError(what, where=f"--model {docking.model}", remedy=remedy)
    settings = portable_settings(model.config, there=True)
    if "also" not in settings["embed"]:  # this project may use the name for another encoder
        del settings["embed"]["weights"]
    return settings


def _published_options(weights: Path) -> dict[str, Any]:
    """Return the options of a file of weights in DiffDock-PP's format, with sizes from the shapes of tensors."""
    from pipeline.tasks.docking.score_network import FORM, trunk_options  # imports torch
    from pipeline.training.checkpoints.trained_weights import stored_weights

    try:
        sizes = trunk_options(FORM.read(stored_weights(weights)))
    except (KeyError, ValueError, IndexError) as error:
        what = "not the weights of a docking model"
        raise ConfigError(what, where=f"--model {weights}", remedy="name DiffDock-PP's score model") from error
    return {"as_published": True, **sizes}


def _judge(wanted: str, here: Config) -> dict[str, Any]:
    """Return the options that name a model of confidence: a file of weights, or a trained one."""
    if (file := weights_file(wanted)) is not None:
        return {"confidence": str(file)}
    model = named_model(here.train.models, wanted)
    if model is None or model.config is None:
        raise ConfigError("model not found", where=f"--confidence {wanted}", remedy=Command.of("model list"))
    is_as_published = bool(model.config.train.options.get("as_published", False))
    return {"confidence": str(chosen_of(model).path), "confidence_as_published": is_as_published}
