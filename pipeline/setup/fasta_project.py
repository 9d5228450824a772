"""`pipeline embed`: a folder with a configuration for one FASTA file, by the settings of the project here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError
from pipeline.files import write_whole
from pipeline.project.project import local_machine

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.config.load import LoadedConfig

CONFIG = "pipeline.yaml"
HEAD = "# Sequences to embed, written by `pipeline embed`; what is done is kept: the same command goes on.\n"


def write_fasta_project(folder: Path, fasta: Path, weights: Path | None, project: LoadedConfig) -> Path:
    """Write a configuration for a FASTA file into a folder; return its path."""
    if not fasta.is_file():
        raise ConfigError("there is no such file", where=str(fasta), remedy=f"ls {fasta.parent}")
    here = project.config
    embed = here.embed.model_dump(mode="json", exclude_unset=True)
    settings: dict[str, dict[str, Any]] = {
        "data": {
            "source": "fasta",
            "path": str(fasta.absolute()),
            "max_rejected_fraction": here.data.max_rejected_fraction,
        },
        "structures": here.structures.model_dump(mode="json", exclude_unset=True),
        "embed": embed | {"weights": str((weights or here.embed.weights).absolute())},
        "cache": here.cache.model_dump(mode="json", exclude_unset=True) | {"root": str(here.cache.root.absolute())},
        "cluster": here.cluster.model_dump(mode="json", exclude_unset=True) | {"runs": "runs"},
    }
    if not project.path:  # no project is here: this machine, with a card where it has one
        gpus = min(1, len(local_machine(here.cluster.slots).gpus))
        settings["cluster"] |= {"executor": "local", "embed": {"gpus": gpus}}
    lines = [f"{section}: {json.dumps(values)}" for section, values in settings.items()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / CONFIG, "\n".join([HEAD, *lines, ""]))
    except OSError as error:
        what = f"cannot write: {error.strerror}"
        raise ConfigError(what, where=str(folder), remedy="name another by --out") from error
    return folder / CONFIG
