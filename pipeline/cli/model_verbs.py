"""`pipeline model` and `compare`: what was trained here, how it compares, and how it is taken elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.completion import completing, runs
from pipeline.cli.options import ConfigFile, Json, Sets, load_config, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.report.compared import ComparedModel
    from pipeline.runs.model.trained_model import TrainedModel

app = typer.Typer(help="List, show and export trained models.", no_args_is_help=True)
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Its name, its folder, or one of its checkpoints.")]


@app.command("list")
def list_models_command(as_json: Json = False, config: ConfigFile = None, sets: Sets = None) -> None:
    """List the models that were trained with this configuration's folder of models."""
    from pipeline.runs.model.trained_model import model_names

    models = load_config(config, sets).config.train.models
    names = model_names(models)
    if as_json:
        print_json({"folder": models, "models": names})
        return
    for name in names:
        typer.echo(name)
    if not names:
        typer.echo(f"no model is in {models}", err=True)


@app.command("show")
def show_model_command(model: Model, as_json: Json = False, config: ConfigFile = None, sets: Sets = None) -> None:
    """Show what a model is: task, checkpoint, encoder, and its figures."""
    from pipeline.runs.model.trained_model import card_lines, model_card

    named = _named(model, load_config(config, sets).config.train.models)
    card = model_card(named)
    if as_json:
        print_json({"folder": named.folder.path, **card})
        return
    typer.echo("\n".join([f"{card['name']}   {named.folder.path}", *card_lines(card)]))


@app.command("export")
def export_model_command(
    model: Model,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder, which can be taken anywhere.")],
    form: Annotated[
        str | None, typer.Option("--as", metavar="SYSTEM", help="Also write the weights as SYSTEM names them: dreams.")
    ] = None,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Write a model's weights (safetensors), settings, code and card into a folder, to use on another machine."""
    from pipeline.runs.model.trained_model import export_model

    loaded = load_config(config, sets)
    card = export_model(_named(model, loaded.config.train.models), folder, loaded.base_dir.absolute(), form)
    weights = card["weights"]
    typer.echo(f"exported {card['name']}, step {card['step']:,}: {weights['parameters']:,} numbers   {folder}")
    if card["code_changed"]:
        typer.echo("note: the task's code has changed since this model was trained", err=True)
    if form is not None:
        place = folder / form
        typer.echo(f"the same weights as {form} names them: {place if place.is_dir() else f'{place}.safetensors'}")
    typer.echo(f"its README.md says how to use it: pipeline submit --stage predict --model {folder} …")


def _named(name: str, models: Path) -> TrainedModel:
    from pipeline.errors import ConfigError
    from pipeline.runs.model.trained_model import named_model

    named = named_model(models, name)
    if named is None:
        problem = "no model is named by this: best, last and a bare checkpoint are of some training"
        raise ConfigError(problem, where=name, remedy="pipeline model list")
    return named


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
    found = [model for name in named for model in _compared(name, config, sets)]
    return list({model.folder: model for model in found}.values())


def _compared(name: str, config: Path | None, sets: Sequence[str] | None) -> list[ComparedModel]:
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
