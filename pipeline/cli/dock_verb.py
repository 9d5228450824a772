"""The verb `dock`: two structure files and a model in, ranked poses out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.options import ConfigFile, Sets, Where, load_config_if_any


def dock_command(
    receptor: Annotated[Path, typer.Argument(metavar="RECEPTOR", help="A structure file: the partner that stays.")],
    ligand: Annotated[Path, typer.Argument(metavar="LIGAND", help="A structure file: the partner that is moved.")],
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="A trained model, or DiffDock-PP's published weights.")
    ],
    poses: Annotated[int, typer.Option("--poses", metavar="<int>", min=1, help="How many poses are drawn.")] = 40,
    steps: Annotated[int, typer.Option("--steps", metavar="<int>", min=1, help="Steps from noise to a pose.")] = 40,
    confidence: Annotated[
        str | None, typer.Option("--confidence", metavar="NAME", help="A model, or weights, that ranks the poses.")
    ] = None,
    top: Annotated[int, typer.Option("--top", metavar="<int>", min=1, help="How many are written as files.")] = 5,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to; default: docked/RECEPTOR-LIGAND.")
    ] = None,
    trajectory: Annotated[bool, typer.Option("--trajectory", help="Write the way of each of them, too.")] = False,
    bound: Annotated[
        bool, typer.Option("--bound", help="The files stand as bound: tell how far poses are from that.")
    ] = False,
    executor: Where = None,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Dock two proteins: draw poses of the ligand, rank them, and write the best as structures."""
    from pipeline.cli.run_verbs import submit_command
    from pipeline.setup.dock_project import Docking, write_dock_project

    docking = Docking(receptor, ligand, model, poses, steps, confidence, top, trajectory=trajectory, bound=bound)
    folder = out or Path("docked") / docking.name
    written = write_dock_project(folder, docking, load_config_if_any(config, sets))
    place = Path(model).absolute()
    submit_command("predict", executor, model=str(place) if place.exists() else model, follow=True, config=written)
