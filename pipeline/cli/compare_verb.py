"""`pipeline compare`: trainings beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.completion import completing, runs
from pipeline.cli.options import ConfigFile, Json, Sets, load_config, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.report.compared import ComparedModel

Compared = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN|MODEL",
        autocompletion=completing(runs),
        help="Runs, with all points of a sweep, and models (default: every model here).",
    ),
]


def compare_command(
    what: Compared = None,
    metric: Annotated[
        str | None, typer.Option("--metric", metavar="NAME", help="By this figure; by default the monitored one.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with their curves, in one file.")
    ] = None,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Compare trainings: settings that differ, figures over seeds, memory, hours."""
    from pipeline.report import tables
    from pipeline.report.compared import comparison_lines
    from pipeline.runs.views.compared_models import comparison

    shown = comparison(_models(what or (), config, sets), metric)
    if html is not None:
        from pipeline.report.html.html_page import compared_page
        from pipeline.runs.views.run_page import write_page_where_asked

        write_page_where_asked(html, compared_page(shown))
    if as_json:
        print_json(shown.to_json())
        return
    tables.show_parts(*comparison_lines(shown))
    if html is not None:
        typer.echo(f"page: {html.parent.resolve() / html.name}")


def _models(named: Sequence[str], config: Path | None, sets: Sequence[str] | None) -> list[ComparedModel]:
    """Return the trainings that are named, each once; without names all in the folder of models."""
    from pipeline.runs.model.trained_model import model_names
    from pipeline.runs.views.compared_models import read_model

    if not named:
        models = load_config(config, sets).config.train.models
        return [read_model(models / name) for name in model_names(models)]
    found = [model for name in named for model in _named(name, config, sets)]
    return list({model.folder: model for model in found}.values())


def _named(name: str, config: Path | None, sets: Sequence[str] | None) -> list[ComparedModel]:
    """Return the trainings of a run, or the model of that name or in that folder."""
    from pipeline.errors import ConfigError
    from pipeline.journal.run_folder import by_path, find_run
    from pipeline.runs.views.compared_models import models_of_run, read_model

    if (run := by_path(name)) is None and (Path(name) / "prepared.json").is_file():
        return [read_model(Path(name).resolve())]
    if run is None:
        here = load_config(config, sets).config
        if (here.train.models / name / "prepared.json").is_file():
            return [read_model(here.train.models / name)]
        try:
            run = find_run(here.cluster.runs, name)
        except ConfigError as error:
            what = f"{name!r} is neither a run nor a model here ({error.what})"
            raise ConfigError(what, where="pipeline compare", remedy="pipeline model list") from error
    if not (models := models_of_run(run)):
        raise ConfigError("this run has trained nothing yet", where=run.name, remedy=f"pipeline status {run.name}")
    return models
