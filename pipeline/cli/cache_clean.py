"""The verbs that say what a cache holds, and give back what nobody needs: stat, clean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.options import ConfigFile, Json, Sets, as_typed, load_config, print_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.console import RenderableType

    from pipeline.runs.cleaning import Asked, Cleaning

TOLD_EVERY_S = 5.0


def stat(config: ConfigFile = None, sets: Sets = None, as_json: Json = False) -> None:
    """Print what the cache holds, from its index alone."""
    import gc

    gc.disable()  # a short life, in which collecting would only walk through what was imported
    from pipeline.runs.holdings import holdings

    found = holdings(load_config(config, sets).config)
    if as_json:
        print_json(found.to_json())
        return
    from pipeline.report import cache, tables

    lines = _typed(cache.holdings_lines(found.to_json()))
    if not found.is_there:
        tables.show(f"cache {found.root}", *lines)
        return
    stores, recipes = cache.store_table(found.stats), cache.recipe_table(found.recipes, found.undescribed)
    tables.show(f"cache {found.root}", "", stores, "", *([recipes, ""] if recipes else []), *lines)


def clean(
    keep_recipes: Annotated[
        bool, typer.Option("--keep-recipes", help="Keep every record of every recipe that is known.")
    ] = False,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="TIME", help="Keep what is younger, such as 7d; else 1d.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all that this program made here.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; else only say what would be done.")] = False,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Give back the space of what no recipe and no data set needs any more."""
    from pipeline.errors import ConfigError
    from pipeline.report import cache, tables
    from pipeline.runs.cleaning import Asked, foresee
    from pipeline.runs.project import Project

    if keep_recipes and everything:
        raise ConfigError("either keeps recipes, or removes all", where="--all", remedy="pipeline cache clean --all")
    asked = Asked(keep_recipes, everything, None if older_than is None else _seconds(older_than))
    loaded = load_config(config, sets)
    project = Project.open(loaded.config, remember=False, beside=loaded.base_dir.absolute())
    found = foresee(project, loaded.path, asked, on=_counter())
    told = found.to_json()
    if not as_json:
        lines = list(_typed(cache.cleaning_lines(told)))
        tables.show(*lines, *([""] if lines else []), _headline(found))
    if yes and found.files:
        told["removed"] = _carry_out(found)
    if as_json:
        print_json(told)
    elif not yes and found.files:
        typer.echo(f"nothing was done yet\n  next: {_again(asked, older_than, config, sets)}")


def _typed(lines: Iterable[RenderableType]) -> Iterator[RenderableType]:
    """Give the commands in lines the configuration that was typed."""
    return (as_typed(line) if isinstance(line, str) else line for line in lines)


def _headline(found: Cleaning) -> str:
    """Say how much would be given back."""
    from pipeline.report.tables import plural, size
    from pipeline.store.sweep import Fate

    if not found.files:
        waits = found.young or found.stays(*Fate)[0]
        return f"cache {found.cache.root}: {'nothing can go now: see above' if waits else 'nothing to clean'}"
    return f"cache {found.cache.root}: {size(found.freed_bytes)} in {plural(found.files, 'file')} can be given back"


def _carry_out(found: Cleaning) -> dict[str, object]:
    """Remove what was foreseen, and say how it went."""
    import time

    from pipeline.report.tables import plural, size
    from pipeline.runs.cleaning import carry_out

    freed = files = 0
    stayed, told_s = [], time.monotonic()
    try:
        for one in carry_out(found):
            freed, files = freed + one.bytes, files + (not one.stays)
            if one.stays:
                stayed.append({"file": one.name, "why": one.stays})
                typer.echo(f"stays: {one.name}: {one.stays}", err=True)
            if time.monotonic() - told_s > TOLD_EVERY_S:
                told_s = time.monotonic()
                typer.echo(f"{plural(files, 'file')}, {size(freed)} so far ...", err=True)
    finally:
        typer.echo(f"removed {plural(files, 'file')}: {size(freed)} given back", err=True)
    return {"files": files, "bytes": freed, "stayed": stayed}


def _counter() -> Callable[[int], None]:
    """Return what says now and then how many items of the data set were looked at; a person is told at once."""
    import sys
    import time

    if sys.stderr.isatty():
        typer.echo("looking at what is needed ...", err=True)
    told_s = time.monotonic()

    def on(items: int) -> None:
        nonlocal told_s
        if time.monotonic() - told_s > TOLD_EVERY_S:
            told_s = time.monotonic()
            typer.echo(f"looked at {items:,} items of the data set ...", err=True)

    return on


def _seconds(text: str) -> float:
    """Return a time that was typed."""
    from pydantic_core import PydanticCustomError

    from pipeline.config.quantities import parse_duration
    from pipeline.errors import ConfigError

    try:
        return 0 if text == "0" else parse_duration(text)
    except PydanticCustomError:
        what = f"{text!r} is no time: it must be above zero and have a unit, or be 0 alone"
        raise ConfigError(
            what, where="--older-than", remedy="pipeline cache clean --older-than 7d   (12h, 90m)"
        ) from None


def _again(asked: Asked, older_than: str | None, config: object, sets: list[str] | None) -> str:
    """Return the command that does it."""
    import shlex

    words = ["pipeline", "cache", "clean"]
    words += ["--keep-recipes"] * asked.keep_recipes + ["--all"] * asked.all
    words += ["--older-than", older_than] if older_than is not None else []
    words += ["--config", str(config)] if config else []
    return shlex.join([*words, *(word for one in sets or () for word in ("--set", one)), "--yes"])
