"""`pipeline doctor`: one row per check, each with its remedy."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.completion import SCRIPTS, Shell, completing, recipes
from pipeline.cli.options import ConfigFile, Json, Sets, choice, print_json

if TYPE_CHECKING:
    from pipeline.setup.site_facts import Site


def doctor_command(config: ConfigFile = None, sets: Sets = None, as_json: Json = False) -> None:
    """Check configuration, data, disk and packages, and say what to do."""
    from dataclasses import asdict

    from pipeline.report import tables
    from pipeline.setup.checkup import run_checks

    findings = run_checks(config, sets or ())
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        rows = [(one.verdict.value, one.what, one.found, one.remedy) for one in findings]
        tables.show_parts(tables.text_table(("", "check", "found", "what to do"), rows))
    code = max((one.exit_code for one in findings), default=0)
    if code:
        raise typer.Exit(code)


def init_command(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to write.")] = Path(),
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            autocompletion=completing(recipes),
            help="Begin with complex_docking, rna_ligand, spectra_finetune, denovo_recursive or contrastive_pair.",
        ),
    ] = None,
) -> None:
    """Write a commented pipeline.yaml, and a profile of this cluster.

    The profile, DIR/sites/CLUSTER.yaml, holds what sinfo, scontrol and sacctmgr tell: partitions, limits, accounts,
    kinds of GPU. Nothing is ever written over.
    """
    from pipeline.config.site_profiles import shipped
    from pipeline.setup.init_files import write_init_files

    site, why_not = _look()
    written = write_init_files(folder, site, recipe)
    typer.echo(f"{written.config}: the configuration, with `cluster.executor: {'slurm' if site else 'local'}`")
    if written.profile is not None and site is not None:
        typer.echo(f"{written.profile}: what was found of the cluster {site.name} (Slurm {site.version}); check it")
    for said in (f"could not be asked: {silent}" for silent in site.silent) if site else (why_not,):
        typer.echo(f"note: {said}", err=True)
    enter = "" if folder == Path() else f"  cd {shlex.quote(os.fspath(folder))}\n"
    guides = shipped("docs/guides.md")
    what = "your complexes are" if recipe is None else f"your data are; {guides} tells how to make some for a trial"
    typer.echo(f"next:\n{enter}  edit pipeline.yaml     say in data.path where {what}\n  pipeline doctor")


_SHELLS = tuple(shell.value for shell in Shell)


def completion_command(
    shell: Annotated[Shell, typer.Argument(metavar="|".join(_SHELLS), help="Your shell.", **choice(_SHELLS))],
) -> None:
    """Print what lets your shell complete commands: source <(pipeline completion bash), in ~/.bashrc.

    zsh: the same in ~/.zshrc, below compinit. fish: pipeline completion fish | source
    """
    typer.echo(SCRIPTS[shell], nl=False)


def _look() -> tuple[Site | None, str]:
    """Return what this cluster is like; else why that is not known."""
    from pipeline.cluster import slurm_commands
    from pipeline.cluster.accounting import CommandFailed
    from pipeline.setup.site_facts import last_line, look_at_site
    from pipeline.setup.slurm_checks import whoami

    if not slurm_commands.is_there():
        return None, "Slurm's commands are not on the PATH, so jobs will run on this machine"
    try:
        return look_at_site(slurm_commands.run_command, whoami()), ""
    except CommandFailed as error:
        return None, f"Slurm is here but does not answer, so jobs will run on this machine: {last_line(error.what)}"
