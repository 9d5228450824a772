"""Verbs on files alone: `embed`, a FASTA file in; `dock`, two structures in; `embeddings export`, one file out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.options import ConfigFile, Json, Sets, Where, load_config, load_config_if_any, one_of, print_json
from pipeline.command_line import Command

FORMATS = ("h5", "safetensors", "parquet", "npy")
POOLINGS = ("none", "mean", "cls", "max")

embeddings_app = typer.Typer(help="Write cached embeddings as files for other programs.", no_args_is_help=True)


def embed_command(
    fasta: Annotated[Path, typer.Argument(metavar="FASTA", help="Sequences; an id is the first word of a header.")],
    weights: Annotated[
        Path | None, typer.Option("--weights", metavar="PATH", help="The checkpoint; default: as embed.weights says.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where to; default: embedded/FASTA.")] = None,
    executor: Where = None,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Embed the sequences of a FASTA file; what is embedded already is not done again."""
    from pipeline.cli.run_verbs import submit_command
    from pipeline.setup.written_project import write_fasta_project

    folder, here = out or Path("embedded") / fasta.stem, load_config_if_any(config, sets)
    written = write_fasta_project(folder, fasta, weights, here)
    submit_command("embed", executor, follow=True, config=written)
    pool = ("--pool", "cls") if here.config.embed.cls else ()
    export = Command.of("embeddings export --out", f"{fasta.stem}.h5", "--config", written, *pool)
    typer.echo(f"next: {export}")


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
    from pipeline.setup.written_project import Docking, write_dock_project

    docking = Docking(receptor, ligand, model, poses, steps, confidence, top, trajectory, bound, sets or ())
    folder = out or Path("docked") / docking.name
    written = write_dock_project(folder, docking, load_config_if_any(config, sets))
    place = Path(model).absolute()
    submit_command("predict", executor, model=str(place) if place.exists() else model, follow=True, config=written)


@embeddings_app.command("export")
def export_embeddings_command(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write.")],
    format_: Annotated[
        str | None, one_of(FORMATS, "--format", "What to write; by default as the name of the file ends.")
    ] = None,
    pool: Annotated[
        str, one_of(POOLINGS, "--pool", "A row for each residue (none), or one for each chain; cls: its CLS token's.")
    ] = "none",
    split: Annotated[str | None, typer.Option("--split", metavar="NAME", help="Only the items of this split.")] = None,
    encoder: Annotated[
        str | None, typer.Option("--encoder", metavar="NAME", help="Whose; default: main, not those of embed.also.")
    ] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Leave out, and count, what has no embedding.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    as_json: Json = False,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Write the embeddings of a data set's proteins into one file, each under its own id.

    A sequence has the id of its item, a chain of a structure is ITEM:CHAIN. The file appears whole or not at all.
    """
    from pipeline.config.schema_data import MAIN
    from pipeline.project.project import Project
    from pipeline.runs.workflow.embedding_export import WantedExport, export_embeddings

    wanted = WantedExport(format_ or _told_by(out), pool, encoder or MAIN, split, replace=force, partial=partial)
    loaded = load_config(config, sets)
    project = Project.open(loaded.config, beside=loaded.base_dir.absolute(), strict=True)
    exported = export_embeddings(project, out, wanted)
    size = out.stat().st_size
    if as_json:
        print_json({"file": out, "format": wanted.format, "pool": pool, "bytes": size, **exported.to_json()})
        return
    from pipeline.units import format_bytes

    of = f"{exported.residues:,} residues" if pool == "none" else f"one row each ({pool})"
    typer.echo(f"{out}: {exported.ids:,} embeddings of {exported.items:,} items, {of}, {format_bytes(size)}")
    left_out = {
        "rejected": exported.rejected,
        "not scanned": exported.unscanned,
        "without an embedding": exported.missing,
    }
    told = [f"{count:,} {what}" for what, count in left_out.items() if count]
    if exported.joined:
        shared = "chains embedded as one text have one CLS token (embed.context: partner)"
        typer.echo(f"note: {shared}: {exported.joined:,} share the row of theirs", err=True)
    if told:
        typer.echo(f"note: left out: {', '.join(told)}", err=True)


def _told_by(out: Path) -> str:
    """Return the format that a file's name ends with."""
    from pipeline.errors import ConfigError
    from pipeline.training.evaluating.embedding_files import SUFFIXES

    for name, suffixes in SUFFIXES.items():
        if out.suffix.lower() in suffixes:
            return name
    raise ConfigError("its name does not tell the format", where=str(out), remedy=f"--format {'|'.join(FORMATS)}")
