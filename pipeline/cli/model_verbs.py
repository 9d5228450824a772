"""`pipeline weights`: fetch, check and make encoder checkpoints; `pipeline model`: list, show and export models."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.help import Verbs, argument, option
from pipeline.cli.options import (
    ConfigFile,
    Json,
    Sets,
    completing,
    load_config,
    load_config_if_any,
    models,
    print_json,
    refuse,
    show,
)
from pipeline.command_line import Command

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeline.encoder.weights import Examined
    from pipeline.errors import ConfigError
    from pipeline.planning.trained_model import TrainedModel

weights_app = Verbs("Download, import, check and create encoder checkpoints.")
Force = Annotated[bool, option("--force", "Replace an existing file.")]


@weights_app.command("fetch")
def fetch_command(
    name: Annotated[
        str | None,
        argument(
            "NAME",
            "Published model, or a repository of Hugging Face. Default: the configured one.",
            autocompletion=completing(models),
        ),
    ] = None,
    out: Annotated[
        Path | None,
        option("--out PATH", "Where to write. Default: Hugging Face's cache; with --url, next to embed.weights."),
    ] = None,
    url: Annotated[str | None, option("--url URL", "Download from this address: a mirror, or your own model.")] = None,
    force: Force = False,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Download a published checkpoint.

    Run it again after an interruption: the download continues.
    """
    from pipeline.encoder import weights
    from pipeline.encoder.checkpoint_files import published, stem

    configured = _configured(config, sets)
    name = name or stem(configured)
    if "/" not in name and published(name) is None and url is None:
        raise _unknown_model(name)
    target = _place_for(f"{name}.pt", out, configured) if url else out
    there = None if force else _existing(target or configured.with_name(name), name)
    examined = there or weights.fetch(name, target, url=url, force=force)
    _say(examined, "already there" if there else "fetched")
    _say_how_to_use(Path(examined.weights.path), configured)


@weights_app.command("import")
def import_weights_command(
    source: Annotated[Path, argument("SRC", "A .pt file or a Hugging Face folder.")],
    out: Annotated[
        Path | None, option("--out PATH", "File or folder to write. Default: next to embed.weights.")
    ] = None,
    force: Force = False,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Check your own checkpoint and copy it to where it is used."""
    from pipeline.encoder import weights
    from pipeline.encoder.checkpoint_files import files_of

    configured = _configured(config, sets)
    files, examined = files_of(source), weights.examine_checkpoint(source).accepted()
    is_file = files.form == "fair-esm"
    target = _place_for(f"{files.name}.pt" if is_file else files.name, out, configured, into_folder=is_file)
    is_there = weights.is_installed(files, target)
    if not is_there:
        weights.install_checkpoint(files, target, replace=force)
    installed = replace(examined, weights=replace(examined.weights, path=str(target)))
    _say(installed, "already there" if is_there else "copied")
    _say_how_to_use(target, configured)


@weights_app.command("check")
def check_weights_command(
    path: Annotated[Path | None, argument("PATH", "Checkpoint. Default: the configured one.")] = None,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint holds; nothing in it is executed."""
    from pipeline.encoder.weights import examine_checkpoint, find_checkpoint
    from pipeline.report.tables import text_table

    examined = examine_checkpoint(path or find_checkpoint(_configured(config, sets)))
    show(examined.to_json, lambda: [text_table(("name", examined.weights.name), _rows(examined))], as_json=as_json)
    examined.accepted()


@weights_app.command("synth")
def synth_command(
    layers: Annotated[int, option("--layers", "Number of layers.")],
    dim: Annotated[int, option("--dim", "Embedding width.")],
    heads: Annotated[int, option("--heads", "Number of attention heads, a divisor of the width.")],
    out: Annotated[Path, option("--out FILE", "File to write. The name of an ESM-2 must be like esm2….pt.")],
    seed: Annotated[int, option("--seed", "Random seed of the weights.")] = 0,
    stress: Annotated[float, option("--stress", "Sharpen attention: harder in half precision.")] = 1.0,
    family: Annotated[str, option("--family NAME", "Model family: esm2, esm1b (also ESM-1v) or esmc.")] = "esm2",
    force: Force = False,
) -> None:
    """Write a checkpoint with random weights for trials and benchmarks."""
    from pipeline.encoder import synth as maker

    with _room_for(out, replace=force) as place:
        maker.write_random_checkpoint(place, layers, dim, heads, seed=seed, stress=stress, family=family)
    typer.echo(f"{out}: {layers} layers of width {dim} with {heads} heads, random weights (seed {seed})")


def _configured(config: Path | None, sets: Sequence[str] | None) -> Path:
    """Return embed.weights of the configuration, or its default without one: weights may be fetched first."""
    from pipeline.config.load import is_configured
    from pipeline.config.schema_data import EmbedSection

    if not sets and not is_configured(config):
        return Path(EmbedSection().weights)
    return load_config(config, sets).config.embed.weights


def _place_for(name: str, out: Path | None, configured: Path, *, into_folder: bool = True) -> Path:
    """Return the path for a checkpoint: `--out`, else in the folder of the configured one."""
    if out is not None:
        return out / name if into_folder and out.is_dir() else out
    return configured.with_name(name)


def _unknown_model(name: str) -> ConfigError:
    """Return an error that lists the published models, and suggests those with similar names."""
    from difflib import get_close_matches

    from pipeline.encoder.checkpoint_files import MODELS
    from pipeline.errors import ConfigError

    names = [model.name for model in MODELS]
    family = [known for known in names if known[:4] == name[:4].lower()] or names
    near = [known for known in names if name.lower() in known.lower()][:3] or get_close_matches(name, family, n=3)
    rows = [f"    {model.name:20}  {model.layers:2} layers, width {model.dim:,}" for model in MODELS]
    meant = f": did you mean {' or '.join(near)}?" if near else ""
    problem = "\n".join((f"unknown model{meant}", *rows))
    remedy = f"pipeline weights fetch {near[0] if near else 'NAME'}   (your own model: --url URL)"
    return ConfigError(problem, where=name, remedy=remedy)


def _existing(place: Path, name: str) -> Examined | None:
    """Return a checkpoint that exists already, also in a library's cache; refuse a damaged one."""
    from pipeline.encoder.weights import examine_checkpoint, find_checkpoint
    from pipeline.errors import ConfigError, WeightsUnusable

    try:
        return examine_checkpoint(find_checkpoint(place)).accepted()
    except ConfigError:
        return None
    except WeightsUnusable as trouble:
        remedy = f"pipeline weights fetch {name} --force   (replaces it)"
        raise WeightsUnusable(trouble.what, where=str(place), remedy=remedy) from trouble


@contextmanager
def _room_for(out: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a path to write to; an existing file is replaced when the new one is complete."""
    if not replace or not out.parent.is_dir():
        yield out
        return
    with TemporaryDirectory(dir=out.parent, prefix=".synth-") as folder:
        yield Path(folder) / out.name
        for made in Path(folder).iterdir():
            made.replace(out.with_name(made.name))


def _say(examined: Examined, how: str) -> None:
    """Describe a checkpoint in a line."""
    from pipeline.encoder.checkpoint_files import FAMILIES

    weights = examined.weights
    known = {"published": "as published", "unknown": "no published digest to compare with"}[examined.verdict]
    what = f"{FAMILIES[weights.family]}, {weights.layers} layers of width {weights.dim:,}, {weights.precision}"
    typer.echo(f"{weights.path}: {how}: {what}; {known}")


def _say_how_to_use(target: Path, configured: Path) -> None:
    """Print the setting that selects this checkpoint, unless it is configured already."""
    if target.absolute() != configured.absolute():
        typer.echo(f"to use it, add this to the configuration:\nembed:\n  weights: {target.absolute()}")


def _rows(examined: Examined) -> list[tuple[str, object]]:
    """Return the properties of a checkpoint as rows of a table."""
    from pipeline.encoder.checkpoint_files import FAMILIES
    from pipeline.units import format_bytes

    weights = examined.weights
    longest = f"{weights.longest:,} residues in one piece; longer sequences use windows"
    return [
        ("family", FAMILIES[weights.family]),
        ("form", weights.form),
        ("path", weights.path),
        ("layers", weights.layers),
        ("width", f"{weights.dim:,}"),
        ("heads", weights.heads),
        *([("at most", longest)] if weights.longest else []),
        ("parameters", f"{examined.parameters:,} (of the encoder)"),
        ("stored in", weights.precision),
        ("size", format_bytes(weights.bytes)),
        *(("SHA-256", f"{digest}  {file}") for file, digest in examined.sha256),
        ("published", {"published": "yes, byte for byte", "unknown": "unknown"}.get(examined.verdict, "NO")),
        ("in keys", weights.digest),
    ]


models_app = Verbs("List, show and export trained models.")
Model = Annotated[str, argument("MODEL", "Model name, its folder, or one of its checkpoints.")]


@models_app.command("list")
def list_models_command(as_json: Json = False, config: ConfigFile = None, sets: Sets = None) -> None:
    """List the trained models of this project (train.models)."""
    from pipeline.planning.trained_model import model_names

    models = load_config_if_any(config, sets).config.train.models
    names = model_names(models)
    if as_json:
        print_json({"folder": models, "models": names})
        return
    for name in names:
        typer.echo(name)
    if not names:
        typer.echo(f"no models in {models}", err=True)


@models_app.command("show")
def show_model_command(model: Model, as_json: Json = False, config: ConfigFile = None, sets: Sets = None) -> None:
    """Show the task, checkpoint, encoder and metrics of a model."""
    from pipeline.planning.trained_model import card_lines, model_card

    named = _named(model, load_config_if_any(config, sets).config.train.models)
    with _reported_as_damage():
        card = model_card(named)
    lines = [f"{card['name']}   {named.folder.path}", *card_lines(card)]
    show(lambda: {"folder": named.folder.path, **card}, lambda: lines, as_json=as_json)


@models_app.command("export")
def export_model_command(
    model: Model,
    folder: Annotated[Path, argument("FOLDER", "New folder, self-contained.")],
    form: Annotated[
        str | None, option("--as SYSTEM", "Also write the weights under published names, such as dreams or clip.")
    ] = None,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Export a model for use on another machine.

    The folder holds its weights (safetensors), settings, code and a README.
    """
    from pipeline.planning.trained_model import export_model

    loaded = load_config_if_any(config, sets)
    with _reported_as_damage():
        card = export_model(_named(model, loaded.config.train.models), folder, loaded.base_dir.absolute(), form)
    weights = card["weights"]
    typer.echo(f"exported {card['name']}, step {card['step']:,}: {weights['parameters']:,} numbers   {folder}")
    if card["code_changed"]:
        typer.echo("note: the task's code has changed since this model was trained", err=True)
    if form is not None:
        place = folder / form
        typer.echo(f"the same weights under the names of {form}: {place if place.is_dir() else f'{place}.safetensors'}")
    typer.echo(f"use it (see its README.md): pipeline submit predict --model {folder} …")


@contextmanager
def _reported_as_damage() -> Iterator[None]:
    """Report a damaged checkpoint as damage (exit code 4) instead of a failed job."""
    from pipeline.errors import CacheDamaged
    from pipeline.training.checkpoints.sealed_folder import FolderDamaged

    try:
        yield
    except FolderDamaged as error:
        error.exit_code = CacheDamaged.exit_code  # type: ignore[misc]  # of this one alone
        raise


def _named(name: str, models: Path) -> TrainedModel:
    from pipeline.planning.trained_model import named_model

    named = named_model(models, name)
    if named is None:
        problem = "not a model: name one (best, last and a bare checkpoint belong to a training)"
        refuse(problem, name, Command.of("model list"))
    return named
