"""`pipeline demo`: makes a small project, and types the commands in it that show what they are for."""

from __future__ import annotations

import os
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.help import argument, option
from pipeline.command_line import Command

if TYPE_CHECKING:
    from collections.abc import Iterator


def demo_command(
    context: typer.Context,
    folder: Annotated[Path, argument("DIR", "Folder for the project. It must be empty or not exist.")] = Path("demo"),
    recipe: Annotated[
        str | None,
        option(
            "--recipe NAME",
            "Demonstrate a recipe of `pipeline init` at toy size: complex_docking, denovo_recursive, encoder_finetune, "
            "spectra_finetune, rna_ligand (needs the extra hdf5) or contrastive_pair (needs the extra images).",
        ),
    ] = None,
) -> None:
    """Create a small project here; plan, train, survive faults, report."""
    from pipeline.config.load import ENVIRONMENT
    from pipeline.setup.demo_project import make_project, what_to_look_at

    make_project(folder, recipe)
    os.environ.pop(ENVIRONMENT, None)  # commands find the project that is made here
    with chdir(folder):
        for command in _main_demo() if recipe is None else _recipe_demo():
            _run(context, command)
    typer.echo(what_to_look_at(folder, recipe))


def _main_demo() -> Iterator[Command]:
    """Print what each act shows, and return its commands."""
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
    """Run a command in this process as if it was typed; damage that it reports does not end the demo."""
    from pipeline.errors import CacheDamaged

    typer.secho(f"$ {command}", bold=True)
    try:
        context.find_root().command.main(list(command.words), standalone_mode=False)
    except CacheDamaged as damage:
        typer.echo(f"error: {damage}")
    typer.echo()
