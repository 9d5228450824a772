"""`pipeline cache`: stat, clean, export, import, and the group of its other commands."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli import cache_check
from pipeline.cli.help import Verbs, argument, option
from pipeline.cli.options import (
    ConfigFile,
    DamageList,
    Json,
    Sets,
    Verbose,
    Yes,
    as_typed,
    load_config,
    open_project,
    print_json,
    refuse,
    show,
    show_dry_run,
)
from pipeline.cli.run_verbs import run_submission
from pipeline.command_line import Command, quoted

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.store.maintenance.overview import Cleaning
    from pipeline.store.maintenance.transfer import Moved

PRINT_EVERY_S = 5.0
SHOWN = 5
EXAMPLES = """\
pipeline cache stat                     # size and content
pipeline cache validate --full          # read every byte
pipeline cache repair --yes
pipeline cache clean --older-than 7d    # a dry run: shows what --yes deletes"""

Folder = Annotated[Path, argument("DIR", "Folder of the export.")]


def export_command(
    folder: Folder,
    kinds: Annotated[list[str] | None, option("--kind KIND", "Copy only records of this kind.")] = None,
    link: Annotated[bool, option("--link", "Link files instead of copying them (same disk only).")] = False,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Copy the cache to a folder, with checksums.

    Run it again to continue: it copies only missing files.
    """
    from pipeline.report.live_status import WorkBar
    from pipeline.store.cache_folder import CacheFolder
    from pipeline.store.format.cache_layout import MANIFEST
    from pipeline.store.maintenance import transfer
    from pipeline.store.maintenance.leftovers import refuse_links

    cache = CacheFolder(load_config(config, sets).config.cache.root)
    refuse_links(cache)
    with WorkBar("export") as bar:
        moved = transfer.export_cache(cache, folder, kinds or (), link=link, show=bar.show)
    _say(moved, folder, as_json=as_json)
    if not as_json:
        named = quoted(folder)
        typer.echo(f"  check it: cd {named} && sha256sum --check --quiet {MANIFEST}")
        typer.echo(f"  import it elsewhere: pipeline cache import {named}")
    remedy = Command.of("cache validate --full", then="   (then repair it, and export again)")
    _refuse(moved, cache.root, remedy, "exported")


def import_cache_command(folder: Folder, config: ConfigFile = None, sets: Sets = None, as_json: Json = False) -> None:
    """Add an export to the cache, verified; nothing is overwritten."""
    from pipeline.report.live_status import WorkBar
    from pipeline.store.cache_folder import CacheFolder
    from pipeline.store.maintenance import transfer
    from pipeline.store.maintenance.leftovers import refuse_links

    cache = CacheFolder(load_config(config, sets).config.cache.root)
    refuse_links(cache)
    with WorkBar("import") as bar:
        moved = transfer.take_in(cache, folder, show=bar.show)
    _say(moved, cache.root, as_json=as_json)
    remedy = Command.of("cache import", folder, then="   (after you copy these files again)")
    _refuse(moved, folder, remedy, "imported")


def _say(moved: Moved, folder: Path, *, as_json: bool) -> None:
    from pipeline.report.tables import plural
    from pipeline.units import format_bytes

    if as_json:
        print_json({"folder": folder, **asdict(moved)})
        return
    there = f", {moved.there:,} already there" if moved.there else ""
    dropped = f", {plural(moved.dropped, 'older file')} removed: newer files hold their records"
    there += dropped if moved.dropped else ""
    kinds = ", ".join(f"{kind} {files:,}" for kind, files in sorted(moved.kinds.items()))
    copied = f"{plural(moved.copied, 'file')} copied ({format_bytes(moved.bytes)})"
    typer.echo(f"✓ {folder}: {copied}{there}: {kinds or 'nothing'}")


def _refuse(moved: Moved, where: Path, remedy: Command, done: str) -> None:
    """Raise CacheDamaged that names the first refused files, if there are any."""
    from pipeline.errors import CacheDamaged
    from pipeline.report.tables import plural

    if not moved.refused:
        return
    refused = len(moved.refused)
    lines = [f"{plural(refused, 'file')} {'was' if refused == 1 else 'were'} not {done}"]
    lines += [f"  {file.file}: {file.what}" for file in moved.refused[:SHOWN]]
    lines += ["  …   (--json names all)"] * (len(moved.refused) > SHOWN)
    raise CacheDamaged("\n".join(lines), where=str(where), remedy=remedy)


def regenerate_command(
    damage_list: DamageList = None, config: ConfigFile = None, sets: Sets = None, as_json: Json = False
) -> None:
    """Rebuild missing records on this machine.

    On a cluster, use: pipeline submit regenerate
    """
    from pipeline.engine.submission import Wanted, read_submission
    from pipeline.journal.run_status import RunStatus as Status
    from pipeline.journal.run_status import State

    submission = read_submission(config, sets or (), Wanted("regenerate", "local", damage_list=damage_list))
    if not submission.stages:
        nothing = f"✓ Nothing to regenerate: {damage_list} lists no lost record"
        print_json(Status("", State.DONE).to_json()) if as_json else typer.echo(nothing)
        return
    run_submission(submission, follow=True, as_json=as_json)


def stat_command(verbose: Verbose = False, config: ConfigFile = None, sets: Sets = None, as_json: Json = False) -> None:
    """Show what the cache holds, read from its index alone."""
    import gc

    gc.disable()  # a short process: a collection would only scan the imports
    from pipeline.report import cache_tables
    from pipeline.upkeep.retention import holdings

    held = holdings(load_config(config, sets).config)
    show(held.to_json, lambda: cache_tables.holdings_report(held, as_typed, verbose=verbose), as_json=as_json)


def clean_command(
    keep_recipes: Annotated[bool, option("--keep-recipes", "Keep all records of known recipes.")] = False,
    older_than: Annotated[
        str | None, option("--older-than TIME", "Keep younger files, such as 7d. Default: 1d.")
    ] = None,
    everything: Annotated[bool, option("--all", "Delete the whole cache.")] = False,
    yes: Yes = False,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Delete unused cache records (dry run without --yes).

    Examples:
    pipeline cache clean                    # shows what --yes would delete
    pipeline cache clean --older-than 7d --yes
    """
    from pipeline.report import tables
    from pipeline.report.cache_tables import cleaning_lines
    from pipeline.store.format.disk import ask_owner
    from pipeline.store.maintenance.overview import CleanRequest
    from pipeline.upkeep.clean_cache import foresee_cleaning

    if keep_recipes and everything:
        refuse("--keep-recipes and --all cannot be combined", "--all", Command.of("cache clean --all"))
    asked = CleanRequest(keep_recipes, everything, None if older_than is None else _seconds(older_than))
    loaded, project = open_project(config, sets, remember=False)
    cleaning = foresee_cleaning(project, loaded.path, asked, on=_counter())
    document = cleaning.to_json() if as_json else {}
    if not as_json:
        lines = cleaning_lines(cleaning, as_typed)
        tables.show_parts(_headline(cleaning), *([""] if lines else []), *lines)
    if yes and cleaning.files:
        with ask_owner(cleaning.cache.root):
            document["removed"] = _carry_out(cleaning)
    if as_json:
        print_json(document)
    elif not yes and cleaning.files:
        words = ["--keep-recipes"] * keep_recipes + ["--all"] * everything
        words += ["--older-than", older_than] if older_than is not None else []
        show_dry_run("removed", "cache clean", *words)


def _headline(cleaning: Cleaning) -> str:
    """Print how much space cleaning would free."""
    from pipeline.report.tables import plural
    from pipeline.store.maintenance.shard_plans import CLEANED
    from pipeline.units import format_bytes

    if not cleaning.cache.is_there:
        return f"✓ Nothing to clean: {cleaning.cache.root} does not exist yet"
    if not cleaning.files:
        waits = cleaning.young or cleaning.stays(*CLEANED)[0]
        return f"✓ Nothing to clean in {cleaning.cache.root}{' now: see below' if waits else ''}"
    freed = f"{format_bytes(cleaning.freed_bytes)} in {plural(cleaning.files, 'file')}"
    return f"{freed} can be freed in {cleaning.cache.root}"


def _carry_out(cleaning: Cleaning) -> dict[str, object]:
    """Remove the files of a planned cleaning, print the progress, and return the totals as JSON data."""
    from pipeline.report.tables import plural
    from pipeline.units import format_bytes
    from pipeline.upkeep.clean_cache import carry_out

    freed, files, stayed = 0, 0, []
    try:
        for removed in carry_out(cleaning, cache_check.saying_wait(cleaning.settle_s)):
            freed, files = freed + removed.bytes, files + (not removed.stays)
            if removed.stays:
                stayed.append({"file": removed.name, "why": removed.stays})
                typer.echo(f"kept: {removed.name}: {removed.stays}", err=True)
    finally:
        typer.echo(f"✓ Removed {plural(files, 'file')}: {format_bytes(freed)} freed", err=True)
    return {"files": files, "bytes": freed, "stayed": stayed}


def _counter() -> Callable[[int], None]:
    """Return a callback that prints the number of checked items every few seconds."""
    said_s = time.monotonic()

    def looked_at(items: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s > PRINT_EVERY_S:
            said_s = time.monotonic()
            typer.echo(f"checked {items:,} items of the data set ...", err=True)

    return looked_at


def _seconds(text: str) -> float:
    """Return the seconds of a time that was typed, such as 7d."""
    from pydantic_core import PydanticCustomError

    from pipeline.config.schema_parts import parse_duration

    try:
        return 0 if text == "0" else parse_duration(text)
    except PydanticCustomError:
        remedy = Command.of("cache clean --older-than 7d", then="   (12h, 90m)")
        refuse(f"{text!r} is not a duration: expected a number above 0 with a unit, or 0", "--older-than", remedy)


app = Verbs(f"Inspect, check, repair, clean or move the cache.\n\nExamples:\n{EXAMPLES}")
app.command("stat")(stat_command)
app.command("validate")(cache_check.validate_command)
app.command("repair")(cache_check.repair_command)
app.command("regenerate")(regenerate_command)
app.command("clean")(clean_command)
app.command("compact")(cache_check.compact_command)
app.command("export")(export_command)
app.command("import")(import_cache_command)
