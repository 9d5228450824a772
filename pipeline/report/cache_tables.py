"""The contents of a cache, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Group

from pipeline.command_line import Command
from pipeline.report.tables import age, plural, table_of
from pipeline.units import first_few, format_bytes, short_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from pipeline.report.tables import Column
    from pipeline.store.cache_folder import RecipeStat
    from pipeline.store.maintenance.damage_report import DamageReport
    from pipeline.store.maintenance.overview import Holdings, Missing
    from pipeline.store.shard_index import StoreStat

AsTyped: TypeAlias = "Callable[[Command], object]"
DIGEST_LETTERS = (32, 64)  # of a digest, the first few of which say enough
NAMED = 5
NOT_KNOWN = Command.submit("all")
TO_LOOK = "(or with --dry-run)"
INDEXES = {
    "behind": "newer files are read by their own tables; the next run updates it",
    "none": "every file is read by its own table; the next run creates one",
    "damaged": "every file is read by its own table; `pipeline cache repair` or the next run rebuilds it",
}


STORES: tuple[Column, ...] = (
    ("KIND", "kind"), ("RECORDS", "records", "count"), ("SIZE", "bytes", "bytes"),
    ("EACH", lambda stat: stat.bytes / stat.records if stat.records else None, "bytes"), ("FILES", "shards", "count"),
    ("UNREADABLE", lambda stat: len(stat.unreadable), "count"), ("INDEX", lambda stat: stat.index.value),
    ("AGE", lambda stat: " to ".join(dict.fromkeys(age(time) for time in (stat.newest, stat.oldest) if time))),
)  # fmt: skip
RECIPES: tuple[Column, ...] = (("KIND", 0), ("RECORDS", 1, "count"), ("SIZE", 2, "bytes"), ("SETTINGS", 3))
UNREADABLE: tuple[Column, ...] = (("KIND", 0), ("UNREADABLE FILE", 1), ("WHY", 2))


def store_table(stats: Sequence[StoreStat]) -> RenderableType:
    """Show the number and size of each kind of record."""
    if not stats:
        return "The cache is empty."
    states = {stat.index.value for stat in stats}
    notes = [f"index {state}: {meaning}" for state, meaning in INDEXES.items() if state in states]
    broken = [(stat.kind, name, reason) for stat in stats for name, reason in stat.unreadable]
    shown: list[RenderableType] = [table_of(STORES, stats), *notes]
    return Group(*shown, *(("", table_of(UNREADABLE, broken)) if broken else ()))


def recipe_table(recipes: Mapping[str, Sequence[RecipeStat]], undescribed: Mapping[str, int]) -> RenderableType:
    """Show the settings of records; if a kind has several, only those that differ."""
    rows: list[tuple[str, int, int | None, str]] = []
    for kind, known in recipes.items():
        first = known[0].recipe if len(known) > 1 else {}
        shared = {name for name in first if all(made.recipe.get(name) == first[name] for made in known)}
        for made in known:
            own = {name: value for name, value in made.recipe.items() if name not in shared}
            rows.append((kind, made.records, made.bytes, settings_text(own)))
        if count := undescribed.get(kind):
            rows.append((kind, count, None, "unreadable recipes: the next run writes its own again"))
    return table_of(RECIPES, rows) if rows else ""


def settings_text(recipe: Mapping[str, Any]) -> str:
    """Return the settings of a recipe in a line."""
    return ", ".join(f"{name} {_short(value)}" for name, value in recipe.items())


def _short(value: Any) -> str:
    """Format a value of a recipe; shorten digests."""
    if isinstance(value, dict):
        return f"({settings_text(value)})"
    if isinstance(value, list):
        return ".".join(map(_short, value))
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return value[:8] if isinstance(value, str) and len(value) in DIGEST_LETTERS else str(value)


def holdings_lines(held: Holdings, as_typed: AsTyped = str) -> list[RenderableType]:
    """Return lines on missing records, the last validation, the users of the cache and its quarantine.

    `as_typed` completes the commands in them.
    """
    if not held.is_there:
        return [f"{held.root} does not exist yet. To create it: {as_typed(NOT_KNOWN)}", *_layer_lines(held, as_typed)]
    shown: list[RenderableType] = [_missing_line(missing, as_typed) for missing in held.missing]
    if held.missing:
        shown += [
            f"{kind}: missing records unknown: {as_typed(Command.submit(kind))}   {TO_LOOK}" for kind in held.unknown
        ]
    elif held.unknown:  # what a reader gives needs nothing
        shown.append(f"missing records unknown: {as_typed(NOT_KNOWN)}   {TO_LOOK}")
    if held.report:
        shown += _validation_lines(held, held.report, as_typed)
    elif held.stats:
        shown.append(f"never validated: {as_typed(Command.of('cache validate --full'))}")
    if held.users:
        shown.append(f"used by {first_few(dict.fromkeys(user.config or user.runs for user in held.users), NAMED)}")
    files, kept_bytes = held.quarantined
    if files:
        kept = f"{plural(files, 'damaged file')}, {format_bytes(kept_bytes)}"
        shown.append(f"quarantine: {kept}: {as_typed(Command.of('cache clean'))}")
    return [*shown, *_layer_lines(held, as_typed)]


def holdings_answer(held: Holdings) -> list[str]:
    """Say how much a cache holds, and whether any of it is damaged."""
    size, files = sum(stat.bytes for stat in held.stats), sum(stat.shards for stat in held.stats)
    records = plural(sum(stat.records for stat in held.stats), "record")
    bad = sum(len(stat.unreadable) for stat in held.stats) or (held.report.summary.findings if held.report else 0)
    return [f"{'!' if bad else '✓'} {records} · {short_bytes(size)} in {plural(files, 'file')} · {held.root}"]


def _layer_lines(held: Holdings, as_typed: AsTyped) -> Iterator[str]:
    """Yield which caches below are read, and which are left out and why."""
    if held.under:
        yield f"also reads {first_few(map(str, held.under), NAMED)}"
    for refused in held.left_out:
        yield f"! not read (cache.under): {refused.where}: {refused.what}"
        yield f"  next: {said(refused.next, as_typed)}"


def _missing_line(missing: Missing, as_typed: AsTyped) -> str:
    """Say how many records of a kind are missing, and when that was counted."""
    changed = "; the data set has changed since" if missing.changed else ""
    needed = f"{missing.needed:,}"
    state = f"{missing.missing:,} of {needed} missing" if missing.missing else f"all {needed} present"
    again = f": {as_typed(Command.submit(missing.kind))}" if missing.missing or changed else ""
    return f"{missing.kind}: {state}, counted {age(missing.at)} ago{changed}{again}"


def _validation_lines(held: Holdings, report: DamageReport, as_typed: AsTyped) -> Iterator[str]:
    """Yield when and how a cache was last validated, the findings, and what to do about them."""
    last = report.summary
    part = f", of kind {first_few(last.only, NAMED)}" if last.only else ""
    part += "" if last.subset == "1/1" else f", part {last.subset}"
    repaired = f"; repaired {age(held.repair.summary.begun)} ago" if held.repair else ""
    lost = f"{plural(last.findings, 'finding')}, {plural(last.lost, 'record')} lost" if last.findings else "no damage"
    yield f"last validated {age(last.begun)} ago ({last.how}{part}): {lost}{repaired}   ({report.path})"
    if remedy := held.remedy():
        yield f"  next: {said(remedy, as_typed)}"


def said(remedy: str | Command, as_typed: AsTyped) -> object:
    """Return what to do next as it is printed; complete a command with the typed options."""
    return as_typed(remedy) if isinstance(remedy, Command) else remedy
