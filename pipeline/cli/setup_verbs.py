"""Commands before the first run: `pipeline init`, `doctor`, `demo`, `completion` and `config`."""

from __future__ import annotations

import os
from contextlib import chdir
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.help import Verbs, argument, option
from pipeline.cli.options import (
    SHELLS,
    ConfigFile,
    Json,
    Sets,
    Verbose,
    choice,
    completing,
    load_config,
    print_json,
    recipes,
    shell_script,
    show,
)
from pipeline.command_line import Command, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator


def doctor_command(
    verbose: Verbose = False, config: ConfigFile = None, sets: Sets = None, as_json: Json = False
) -> None:
    """Check settings, data, disk, torch and cluster; suggest fixes."""
    from pipeline.setup.checkup import findings_lines, run_checks

    findings = run_checks(config, sets or ())
    show(lambda: list(map(asdict, findings)), lambda: findings_lines(findings, verbose=verbose), as_json=as_json)
    code = max((finding.exit_code for finding in findings), default=0)
    if code:
        raise typer.Exit(code)


def init_command(
    folder: Annotated[Path, argument("DIR", "Folder of the project. Default: the current one.")] = Path(),
    recipe: Annotated[
        str | None,
        option(
            "--recipe NAME",
            "Start from complex_docking, rna_ligand, spectra_finetune, denovo_recursive, contrastive_pair or"
            " encoder_finetune.",
            autocompletion=completing(recipes),
        ),
    ] = None,
) -> None:
    """Write a commented pipeline.yaml and a cluster profile.

    The profile, DIR/sites/CLUSTER.yaml, holds what sinfo, scontrol and sacctmgr report: partitions, limits, accounts
    and GPUs. Existing files are never overwritten.

    Examples:
    pipeline init                           # in the current folder
    pipeline init dock --recipe complex_docking
    """
    from pipeline.cluster import slurm_commands
    from pipeline.cluster.accounting import CommandFailed
    from pipeline.cluster.site import Site
    from pipeline.config.schema_cluster import SlurmSection
    from pipeline.setup.init_files import write_init_files

    site, why_not = None, "Slurm's commands are not on the PATH, so jobs will run on this machine"
    if slurm_commands.is_there():
        try:
            site = Site(SlurmSection()).refuse_silent()
        except CommandFailed as error:
            why_not = f"Slurm is here but does not answer, so jobs will run on this machine: {error.message}"
    written, profile = write_init_files(folder, site, recipe)
    typer.echo(f"{written}: the configuration, with `cluster.executor: {'slurm' if site else 'local'}`")
    if profile is not None and site is not None:
        typer.echo(f"{profile}: profile of the cluster {site.name} (Slurm {site.version}); check it")
    for note in (f"no answer: {silent}" for silent in site.silent) if site else (why_not,):
        typer.echo(f"note: {note}", err=True)
    enter = "" if folder == Path() else f"  cd {quoted(folder)}\n"
    trial = "" if recipe is None else f"; to try it on synthetic data: pipeline demo DIR --recipe {recipe}"
    typer.echo(f"next:\n{enter}  edit pipeline.yaml     set data.path to your data{trial}\n  pipeline doctor")


def completion_command(
    shell: Annotated[str, argument("|".join(SHELLS), "Your shell.", **choice(SHELLS))],
) -> None:
    """Print a script that makes your shell complete commands.

    bash: add source <(pipeline completion bash) to ~/.bashrc.

    zsh: add source <(pipeline completion zsh) to ~/.zshrc, below compinit.

    fish: add pipeline completion fish | source to config.fish.
    """
    typer.echo(shell_script(shell), nl=False)


config_app = Verbs("Show, check and describe the configuration.")


@config_app.command("show")
def show_command(config: ConfigFile = None, sets: Sets = None, as_json: Json = False) -> None:
    """Print every setting, its value and where it comes from."""
    from pipeline.config import load
    from pipeline.report.tables import text_table

    settings = load.settings_shown(load_config(config, sets))
    rows = [(setting.key, setting.origin, _plain(setting.value)) for setting in settings]
    table = text_table(("key", "from", "value"), rows)
    show(lambda: list(map(asdict, settings)), lambda: [table], as_json=as_json)


@config_app.command("check")
def check_command(config: ConfigFile = None, sets: Sets = None, as_json: Json = False) -> None:
    """Check that the configuration is valid and that its paths exist."""
    from pipeline.config.load import missing_inputs
    from pipeline.setup.checkup import check_configuration

    loaded = load_config(config, sets)
    if as_json:
        print_json({"config": str(loaded.path), "missing": missing_inputs(loaded)})
    for note in check_configuration(loaded):
        typer.echo(f"note: {note.what}: {note.found}\n  next: {note.remedy}", err=True)
    if not as_json:
        typer.echo(f"{loaded.path}: valid")


@config_app.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of the configuration for your editor."""
    from pipeline.config.load import json_schema

    print_json(json_schema())


def _plain(value: object) -> str:
    """Format a value as YAML does."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{', '.join(map(_plain, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def demo_command(
    context: typer.Context,
    folder: Annotated[Path, argument("DIR", "Folder for the project. It must be empty or not exist.")] = Path("demo"),
    recipe: Annotated[
        str | None,
        option(
            "--recipe NAME",
            "Demonstrate a recipe of `pipeline init` at toy size: complex_docking, denovo_recursive, encoder_finetune, "
            "spectra_finetune, spectra_pretrain, rna_ligand (needs the extra hdf5) or contrastive_pair (needs the "
            "extra images).",
        ),
    ] = None,
) -> None:
    """Create a small project here; plan, train, survive faults, report."""
    from pipeline.config.load import ENVIRONMENT
    from pipeline.setup.demo_project import make_project, what_to_look_at

    make_project(folder, recipe)
    os.environ.pop(ENVIRONMENT, None)  # so that commands find the new project
    with chdir(folder):
        for command in _main_demo() if recipe is None else _recipe_demo():
            _run(context, command)
    typer.echo(what_to_look_at(folder, recipe))


def _main_demo() -> Iterator[Command]:
    """Run the acts of the demo and print their output; return the commands."""
    from pipeline.setup.demo_project import flip_a_byte

    _begin("1/5 Scan", "pipeline reads each structure once, and reports a broken file instead of stopping.")
    yield Command.of("submit graph --follow")
    _begin("2/5 Damage", "One byte of a cached scan is flipped on purpose. pipeline finds the record and rebuilds it.")
    typer.echo(f"flipped a byte in the middle of {flip_a_byte(Path('cache'))}\n")
    yield Command.of("cache validate --out damage.jsonl")
    yield Command.of("cache repair --list damage.jsonl --yes")
    yield Command.of("cache regenerate --list damage.jsonl")
    _begin("3/5 Plan", "pipeline predicts the memory of a training before it runs, and needs no GPU for that.")
    yield Command.of("plan train")
    _begin(
        "4/5 Train, and run out of memory on purpose",
        "In step 1, demo_task.py allocates 400 MiB under a limit of 256 MiB. pipeline repeats the step with smaller\n"
        "micro-batches, and keeps the effective batch of 4 complexes.",
    )
    yield Command.of("submit --follow")
    _begin("5/5 Report", "One HTML file shows losses, metrics, memory (planned and used), and each fault of the run.")
    yield Command.of("report --html report.html")


def _recipe_demo() -> Iterator[Command]:
    yield Command.of("submit --follow")
    yield Command.of("submit predict --follow")


def _begin(act: str, what: str) -> None:
    typer.secho(f"\n== {act}", bold=True)
    typer.echo(f"{what}\n")


def _run(context: typer.Context, command: Command) -> None:
    """Run a command in this process as if it was typed; reported damage does not end the demo."""
    from pipeline.errors import CacheDamaged

    typer.secho(f"$ {command}", bold=True)
    try:
        context.find_root().command.main(list(command.words), standalone_mode=False)
    except CacheDamaged as damage:
        typer.echo(f"error: {damage}")
    typer.echo()
