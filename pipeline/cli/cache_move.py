"""`pipeline cache export` and `import`: a cache on its way to another disk, verified at both ends."""

from __future__ import annotations

import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.options import ConfigFile, Json, Sets, load_config, print_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.store.transfer import Moved, Told

SHOWN = 5

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the export.")]


def export(
    folder: Folder,
    kinds: Annotated[
        list[str] | None, typer.Option("--kind", metavar="KIND", help="Only such records; may be given several times.")
    ] = None,
    link: Annotated[bool, typer.Option("--link", help="Link files instead of copying them, on the same disk.")] = False,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Copy the cache to a folder, with a manifest; run it again, and it does what is missing."""
    from pipeline.store import transfer
    from pipeline.store.cache import Cache
    from pipeline.store.inside import refuse_links_out
    from pipeline.store.layout import MANIFEST

    cache = Cache(load_config(config, sets).config.cache.root)
    refuse_links_out(cache)
    moved = _showing("export", lambda tell: transfer.export(cache, folder, kinds or (), link=link, tell=tell))
    _say(moved, folder, as_json=as_json)
    if not as_json:
        named = shlex.quote(str(folder))
        typer.echo(f"  check it anywhere: cd {named} && sha256sum --check --quiet {MANIFEST}")
        typer.echo(f"  take it in: pipeline cache import {named}   (where it is wanted)")
    _refuse(moved, cache.root, "pipeline cache validate --full   (then repair it, and export again)", "exported")


def import_(folder: Folder, config: ConfigFile = None, sets: Sets = None, as_json: Json = False) -> None:
    """Take an export into the cache; every file is verified, and nothing is overwritten."""
    from pipeline.store import transfer
    from pipeline.store.cache import Cache
    from pipeline.store.inside import refuse_links_out

    cache = Cache(load_config(config, sets).config.cache.root)
    refuse_links_out(cache)
    moved = _showing("import", lambda tell: transfer.take_in(cache, folder, tell=tell))
    _say(moved, cache.root, as_json=as_json)
    _refuse(
        moved,
        folder,
        f"pipeline cache import {shlex.quote(str(folder))}   (again, once these files are copied anew)",
        "imported",
    )


def _showing(name: str, move: Callable[[Told], Moved]) -> Moved:
    """Do it, and show on stderr how far it is."""
    from pipeline.encoder.fetch import Progress
    from pipeline.report.download import Download

    begun = time.monotonic()
    with Download(name) as shown:
        return move(lambda now, total: shown.show(Progress(now, total, now / max(1e-3, time.monotonic() - begun))))


def _say(moved: Moved, folder: Path, *, as_json: bool) -> None:
    from pipeline.report.tables import plural, size

    if as_json:
        print_json({"folder": folder, **asdict(moved)})
        return
    there = f", {moved.there:,} {'was' if moved.there == 1 else 'were'} there already" if moved.there else ""
    dropped = f", {plural(moved.dropped, 'older file')} removed: newer ones hold all that was there"
    there += dropped if moved.dropped else ""
    kinds = ", ".join(f"{kind} {files:,}" for kind, files in sorted(moved.kinds.items()))
    typer.echo(f"{folder}: {plural(moved.copied, 'file')} copied ({size(moved.bytes)}){there}: {kinds or 'nothing'}")


def _refuse(moved: Moved, where: Path, remedy: str, done: str) -> None:
    """Name what was damaged, if anything."""
    from pipeline.errors import CacheDamaged
    from pipeline.report.tables import plural

    if not moved.refused:
        return
    refused = len(moved.refused)
    lines = [f"{plural(refused, 'file')} {'was' if refused == 1 else 'were'} not {done}"]
    lines += [f"  {one.file}: {one.what}" for one in moved.refused[:SHOWN]]
    lines += ["  …   (--json names all)"] * (len(moved.refused) > SHOWN)
    raise CacheDamaged("\n".join(lines), where=str(where), remedy=remedy)
