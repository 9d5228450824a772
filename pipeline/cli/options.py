"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.config.load import Loaded

ConfigFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Else $PIPELINE_CONFIG, pipeline.yaml, configs/pipeline.yaml."),
]
Sets: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a configured value; may be given several times."),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Run: TypeAlias = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Name of a run; else the newest.")]


def load_config(file: Path | None, sets: Sequence[str] | None) -> Loaded:
    """Return the configuration that a command line asks for."""
    from pipeline.config.load import find_config, load

    return load(find_config(file), sets or ())


def print_json(document: object) -> None:
    """Print a document to stdout."""
    import json

    typer.echo(json.dumps(document, indent=2, default=str))
