"""`pipeline tune`: the largest micro-batch with which a script of one's own runs."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.options import Json, print_json

if TYPE_CHECKING:
    from pipeline.script.batch_finding import Try


def tune_command(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="What starts the script, with {micro_batch} in it.")
    ],
    most: Annotated[int, typer.Option("--max", metavar="<int>", min=1, help="The largest micro-batch to try.")],
    divides: Annotated[
        int | None,
        typer.Option("--divides", metavar="<int>", min=1, help="Try only what this is a multiple of: a rank's share."),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="<int>", min=1, help="After how many steps a script that says so ends.")
    ] = 3,
    again: Annotated[bool, typer.Option("--again", help="Try again though the answer is remembered.")] = False,
    as_json: Json = False,
) -> None:
    """Find the largest micro-batch with which a script of your own runs, on all of its ranks.

    pipeline tune --max 256 -- torchrun --nproc-per-node 2 train.py --batch {micro_batch} --steps 3
    """
    from pipeline.errors import ConfigError
    from pipeline.records import RankPlace
    from pipeline.script.batch_finding import find_batch

    if RankPlace.by_slurm(os.environ):
        problem = "every rank of this srun would try for itself"
        raise ConfigError(problem, where="pipeline tune", remedy="pipeline tune --max … -- srun … {micro_batch}")
    text = command[0] if len(command) == 1 else shlex.join(command)
    every = range(1, min(most, divides or most) + 1)
    sizes = every if divides is None else [size for size in every if divides % size == 0]

    def told(tried: Try) -> None:
        typer.echo(f"{tried.micro_batch:>8,}  {'fits' if tried.fits else tried.reason}", err=as_json)

    found, is_remembered = find_batch(text, sizes, steps=steps, again=again, told=told)
    words = [word.replace("{micro_batch}", str(found)) for word in command]
    use = words[0] if len(words) == 1 else shlex.join(words)
    if as_json:
        print_json({"micro_batch": found, "remembered": is_remembered, "command": use})
        return
    typer.echo(
        f"largest micro-batch that fits: {found}{'   (remembered: --again tries again)' if is_remembered else ''}"
    )
    typer.echo(f"  next: {use}\n  or in pipeline.yaml: train: {{micro_batch: {found}}}")
