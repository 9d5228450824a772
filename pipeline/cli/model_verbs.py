"""`pipeline model`: what was trained here, and how it is taken elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.options import ConfigFile, Json, Sets, load_config, print_json

if TYPE_CHECKING:
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
