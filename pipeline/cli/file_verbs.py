"""Verbs on files alone: `embed`, a FASTA file in; `dock`, two structures in; `embeddings export`, one file out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.help import Verbs, argument, option
from pipeline.cli.options import (
    ConfigFile,
    Json,
    Sets,
    Where,
    load_config_if_any,
    one_of,
    open_project,
    print_json,
    refuse,
)
from pipeline.command_line import Command

FORMATS = ("h5", "safetensors", "parquet", "npy")
POOLINGS = ("none", "mean", "cls", "max")

embeddings_app = Verbs("Write cached embeddings to files for other programs.")
old_export_app = Verbs("Old name of `pipeline embeddings`.")


def embed_command(
    fasta: Annotated[Path, argument("FASTA", "FASTA file. The first word of a header is the id.")],
    weights: Annotated[Path | None, option("--weights PATH", "Encoder checkpoint. Default: embed.weights.")] = None,
    out: Annotated[Path | None, option("--out DIR", "Project folder. Default: embedded/FASTA.")] = None,
    executor: Where = None,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Embed the sequences of a FASTA file without a project.

    Sequences that are already in the cache are not embedded again.
    """
    from pipeline.cli.run_verbs import submit_command
    from pipeline.setup.written_project import write_fasta_project

    folder, here = out or Path("embedded") / fasta.stem, load_config_if_any(config, sets)
    written = write_fasta_project(folder, fasta, weights, here)
    submit_command("embed", executor, follow=True, config=written)
    pool = ("--pool", "cls") if here.config.embed.cls else ()
    export = Command.of("embeddings export --out", f"{fasta.stem}.h5", "--config", written, *pool)
    typer.echo(f"next: {export}")


def dock_command(
    receptor: Annotated[Path, argument("RECEPTOR", "Structure file of the partner that stays.")],
    ligand: Annotated[Path, argument("LIGAND", "Structure file of the partner that moves.")],
    model: Annotated[str, option("--model NAME", "Trained model, or the published weights of DiffDock-PP.")],
    poses: Annotated[int, option("--poses", "Number of poses to sample.", min=1)] = 40,
    steps: Annotated[int, option("--steps", "Diffusion steps per pose.", min=1)] = 40,
    confidence: Annotated[str | None, option("--confidence NAME", "Model or weights that rank the poses.")] = None,
    top: Annotated[int, option("--top", "Number of poses to write as files.", min=1)] = 5,
    out: Annotated[Path | None, option("--out DIR", "Project folder. Default: docked/RECEPTOR-LIGAND.")] = None,
    trajectory: Annotated[bool, option("--trajectory", "Also write the trajectories of these poses.")] = False,
    bound: Annotated[bool, option("--bound", "Treat the input as the bound complex and report RMSDs to it.")] = False,
    executor: Where = None,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Dock two proteins: sample poses, rank them, write the best."""
    from pipeline.cli.run_verbs import submit_command
    from pipeline.setup.written_project import Docking, write_dock_project

    docking = Docking(receptor, ligand, model, poses, steps, confidence, top, trajectory, bound, sets or ())
    written = write_dock_project(out or Path("docked") / docking.name, docking, load_config_if_any(config, sets))
    place = Path(model).absolute()
    submit_command("predict", executor, model=str(place) if place.exists() else model, follow=True, config=written)


@old_export_app.command("embeddings")
@embeddings_app.command("export")
def export_embeddings_command(
    out: Annotated[Path, option("--out FILE", "File to write.")],
    format_: Annotated[str | None, one_of(FORMATS, "--format", "File format. Default: by the suffix of FILE.")] = None,
    pool: Annotated[
        str, one_of(POOLINGS, "--pool", "One row per residue (none) or per chain. cls: the CLS token.")
    ] = "none",
    split: Annotated[str | None, option("--split NAME", "Export only the items of this split.")] = None,
    encoder: Annotated[
        str | None, option("--encoder NAME", "Encoder: main, or one of embed.also. Default: main.")
    ] = None,
    partial: Annotated[bool, option("--partial", "Skip and count items without an embedding.")] = False,
    force: Annotated[bool, option("--force", "Replace an existing file.")] = False,
    as_json: Json = False,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Write the embeddings of a data set into one file.

    A sequence has the id of its item; a chain of a structure is ITEM:CHAIN. The file appears whole or not at all.
    """
    from pipeline.config.schema_data import MAIN
    from pipeline.stages.embedding_export import WantedExport, export_embeddings

    wanted = WantedExport(format_ or _format_of(out), pool, encoder or MAIN, split, replace=force, partial=partial)
    _, project = open_project(config, sets, strict=True)
    exported = export_embeddings(project, out, wanted)
    size = out.stat().st_size
    if as_json:
        print_json({"file": out, "format": wanted.format, "pool": pool, "bytes": size, **exported.to_json()})
        return
    from pipeline.units import format_bytes

    of = f"{exported.residues:,} residues" if pool == "none" else f"one row each ({pool})"
    typer.echo(f"{out}: {exported.ids:,} embeddings of {exported.items:,} items, {of}, {format_bytes(size)}")
    left_out = (exported.rejected, "rejected"), (exported.unscanned, "not scanned")
    skipped = [f"{count:,} {what}" for count, what in (*left_out, (exported.missing, "without an embedding")) if count]
    if exported.joined:
        shared = "chains embedded as one text have one CLS token (embed.context: partner)"
        typer.echo(f"note: {shared}: {exported.joined:,} share the row of theirs", err=True)
    if skipped:
        typer.echo(f"note: skipped: {', '.join(skipped)}", err=True)


def _format_of(out: Path) -> str:
    """Return the format that a file name ends with."""
    from pipeline.training.evaluating.embedding_files import SUFFIXES

    for name, suffixes in SUFFIXES.items():
        if out.suffix.lower() in suffixes:
            return name
    return refuse("the format is not clear from the suffix", out, f"--format {'|'.join(FORMATS)}")
