"""`pipeline init`, `doctor`, `completion` and `config`: what comes before a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.completion import Shell, completing, recipes, shell_script
from pipeline.cli.help import Verbs, argument, option
from pipeline.cli.options import ConfigFile, Json, Sets, Verbose, choice, load_config, print_json
from pipeline.command_line import quoted

if TYPE_CHECKING:
    from pipeline.cluster.site import Site


def doctor_command(
    verbose: Verbose = False, config: ConfigFile = None, sets: Sets = None, as_json: Json = False
) -> None:
    """Check settings, data, disk, torch and cluster; suggest fixes."""
    from pipeline.report import tables
    from pipeline.setup.checkup import findings_lines, run_checks

    findings = run_checks(config, sets or ())
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        tables.show_parts(*findings_lines(findings, verbose=verbose))
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
    from pipeline.setup.init_files import write_init_files

    site, why_not = _look()
    written = write_init_files(folder, site, recipe)
    typer.echo(f"{written.config}: the configuration, with `cluster.executor: {'slurm' if site else 'local'}`")
    if written.profile is not None and site is not None:
        typer.echo(f"{written.profile}: profile of the cluster {site.name} (Slurm {site.version}); check it")
    for note in (f"no answer: {silent}" for silent in site.silent) if site else (why_not,):
        typer.echo(f"note: {note}", err=True)
    enter = "" if folder == Path() else f"  cd {quoted(folder)}\n"
    trial = "" if recipe is None else f"; to try it on synthetic data: pipeline demo DIR --recipe {recipe}"
    typer.echo(f"next:\n{enter}  edit pipeline.yaml     set data.path to your data{trial}\n  pipeline doctor")


_SHELLS = tuple(shell.value for shell in Shell)


def completion_command(
    shell: Annotated[Shell, argument("|".join(_SHELLS), "Your shell.", **choice(_SHELLS))],
) -> None:
    """Print a script that makes your shell complete commands.

    bash: add source <(pipeline completion bash) to ~/.bashrc.

    zsh: add source <(pipeline completion zsh) to ~/.zshrc, below compinit.

    fish: add pipeline completion fish | source to config.fish.
    """
    typer.echo(shell_script(shell), nl=False)


def _look() -> tuple[Site | None, str]:
    """Return the facts of this cluster, or None and why they are not known."""
    from pipeline.cluster import slurm_commands
    from pipeline.cluster.accounting import CommandFailed
    from pipeline.cluster.site import Site
    from pipeline.config.schema_cluster import SlurmSection

    if not slurm_commands.is_there():
        return None, "Slurm's commands are not on the PATH, so jobs will run on this machine"
    try:
        return Site(SlurmSection()).refuse_silent(), ""
    except CommandFailed as error:
        return None, f"Slurm is here but does not answer, so jobs will run on this machine: {error.message}"


config_app = Verbs("Show, check and describe the configuration.")


@config_app.command("show")
def show_command(config: ConfigFile = None, sets: Sets = None, as_json: Json = False) -> None:
    """Print every setting, its value and where it comes from."""
    from pipeline.config import load
    from pipeline.report import tables

    settings = load.settings_shown(load_config(config, sets))
    if as_json:
        print_json([asdict(setting) for setting in settings])
        return
    rows = [(setting.key, setting.origin, _plain(setting.value)) for setting in settings]
    tables.show_parts(tables.text_table(("key", "from", "value"), rows))


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
