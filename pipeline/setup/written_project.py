"""A folder with a configuration that a verb writes for what is typed, by the settings of the project here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError
from pipeline.files import write_whole
from pipeline.project.project import local_machine

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.config.load import LoadedConfig

CONFIG = "pipeline.yaml"
NO_FILES: Mapping[str, str] = {}


def refuse_absent(*files: Path) -> None:
    """Raise where one of these files is not there."""
    for file in files:
        if not file.is_file():
            raise ConfigError("there is no such file", where=str(file), remedy=f"ls {file.parent}")


def cluster_settings(project: LoadedConfig, *stages: str) -> dict[str, Any]:
    """Return where things are computed: as here; without a project on this machine, with a card where it has one."""
    cluster = project.config.cluster.model_dump(mode="json", exclude_unset=True)
    if project.path:
        return cluster
    gpus = min(1, len(local_machine(project.config.cluster.slots).gpus))
    own = {stage: {"gpus": gpus} | cluster.get(stage, {}) for stage in stages}
    return {"executor": "local"} | cluster | own


def write_project(
    folder: Path, head: str, settings: Mapping[str, Mapping[str, Any]], beside: Mapping[str, str] = NO_FILES
) -> Path:
    """Write a configuration, and first the texts of files beside it, into a folder; return its path."""
    lines = [f"# {head}; what is done is kept: the same command goes on.\n"]
    lines += [f"{section}: {json.dumps(values)}" for section, values in settings.items()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {**beside, CONFIG: "\n".join([*lines, ""])}.items():
            write_whole(folder / name, text)
    except OSError as error:
        what = f"cannot write: {error.strerror}"
        raise ConfigError(what, where=str(folder), remedy="name another by --out") from error
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
