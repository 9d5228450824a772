"""`pipeline embed`: a folder with a configuration for one FASTA file, by the settings of the project here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.setup.written_project import cluster_settings, refuse_absent, write_project

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.config.load import LoadedConfig


def write_fasta_project(folder: Path, fasta: Path, weights: Path | None, project: LoadedConfig) -> Path:
    """Write a configuration for a FASTA file into a folder; return its path."""
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
