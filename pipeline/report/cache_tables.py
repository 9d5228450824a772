"""A cache as text: its content, and the results of validation, repair, compaction and cleaning."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Group

from pipeline.command_line import Command
from pipeline.report.tables import age, plural, table_of
from pipeline.store.maintenance.overview import DAY_S
from pipeline.store.maintenance.shard_plans import Compacted, Fate, Repaired, ShardPlan
from pipeline.units import first_few, format_bytes, format_seconds, short_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from pipeline.report.tables import Column
    from pipeline.store.cache_folder import RecipeStat
    from pipeline.store.maintenance.damage_report import DamageReport, Summary
    from pipeline.store.maintenance.leftovers import LeftoverFile
    from pipeline.store.maintenance.overview import Cleaning, Holdings, Missing
    from pipeline.store.shard_index import StoreStat

AsTyped: TypeAlias = "Callable[[Command], object]"
DIGEST_LETTERS = (32, 64)  # lengths of hexadecimal digests, which are shortened
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
FILES_SHOWN = 20  # shards with a line of their own
FAULTS = {  # fault → noun, damage
    "index": ("fault", "of the index"),
    "header": ("header", "damaged"),
    "table": ("table", "damaged"),
    "record": ("record", "damaged"),
    "gone": ("record", "missing"),
    "newer": ("file", "of a newer version"),
    "foreign": ("file", "not written by pipeline"),
    "unreadable": ("path", "unreadable"),
    "meaning": ("record", "inconsistent"),
}
LEFTOVERS: tuple[Column, ...] = (("LEFTOVER", 0), ("FILES", 1, "count"), ("SIZE", 2, "bytes"))


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
    elif held.unknown:  # stages that a reader's data set does not need are missing
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


def holdings_report(held: Holdings, as_typed: AsTyped, *, verbose: bool) -> list[RenderableType]:
    """Describe a cache: size, damage, kinds of records, missing records."""
    lines = holdings_lines(held, as_typed)
    if not held.is_there:
        return lines
    size, files = sum(stat.bytes for stat in held.stats), sum(stat.shards for stat in held.stats)
    records = plural(sum(stat.records for stat in held.stats), "record")
    bad = sum(len(stat.unreadable) for stat in held.stats) or (held.report.summary.findings if held.report else 0)
    answer = f"{'!' if bad else '✓'} {records} · {short_bytes(size)} in {plural(files, 'file')} · {held.root}"
    recipes = recipe_table(held.recipes, held.undescribed) if verbose else ""
    return [answer, "", store_table(held.stats), "", *([recipes, ""] if recipes else []), *lines]


def _layer_lines(held: Holdings, as_typed: AsTyped) -> Iterator[str]:
    """Yield the caches of `cache.under` that are read, and the skipped ones with reasons."""
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
    """Format a remedy; complete a command with the typed options."""
    return as_typed(remedy) if isinstance(remedy, Command) else remedy


def checked_lines(kinds: Mapping[str, Summary], summary: Summary, place: str) -> list[RenderableType]:
    """Describe a validation: its result, the findings of each kind, and their list."""
    tallies = kinds.values()
    records, files = sum(tally.records for tally in tallies), sum(tally.shards for tally in tallies)
    has_unread = any(tally.listed for tally in tallies)  # these records do not count as intact
    unread = "   (--full also reads the records)" if has_unread else ""
    answer = f"✓ No damage: {plural(records, 'record')} in {plural(files, 'file')}{unread}"
    if summary.findings:
        answer = f"✗ {plural(summary.findings, 'problem')} found, {plural(summary.lost, 'record')} lost"
    columns: tuple[Column, ...] = (
        ("KIND", 0), ("FILES", lambda row: row[1].shards, "count"), ("READ", lambda row: row[1].bytes, "bytes"),
        ("RECORDS", lambda row: row[1].records, "count"),
        ("LISTED" if has_unread else "INTACT", lambda row: row[1].listed if has_unread else row[1].whole, "count"),
        ("LOST", lambda row: row[1].lost, "count"),
        ("DAMAGE", lambda row: ", ".join(_fault(*fault) for fault in sorted(row[1].faults.items())) or "-"),
    )  # fmt: skip
    table = table_of(columns, kinds.items()) if kinds else "The cache is empty."
    notes = [f"{note}: {count:,}" for note, count in summary.notes.items()]
    return [answer, "", table, *notes, *([place] if summary.findings else [])]


def _fault(fault: str, count: int) -> str:
    noun, wrong = FAULTS[fault]
    return f"{plural(count, noun)} {wrong}"


def mend_table(plans: Sequence[ShardPlan], more: int) -> list[RenderableType]:
    """Show the planned repair of each of the first shards."""
    columns: tuple[Column, ...] = (
        ("KIND", lambda plan: plan.store.kind), ("FILE", lambda plan: plan.shard or "(index)"), ("DAMAGE", "why"),
        ("SALVAGED", "kept", "count"), ("LOST", lambda plan: None if plan.unknown else len(plan.lost), "count"),
        ("ACTION", _fate),
    )  # fmt: skip
    shown: list[RenderableType] = [table_of(columns, plans, unknown="?")] if plans else []
    return [*shown, f"… and {plural(more, 'file')} more (--json lists all)"] if more else shown


def mended_table(kinds: Mapping[str, Repaired]) -> list[RenderableType]:
    """Show the repairs of each kind."""
    columns: tuple[Column, ...] = (
        ("KIND", 0), ("QUARANTINED", lambda row: row[1].quarantined, "count"),
        ("LEFT ALONE", lambda row: row[1].stay, "count"), ("SALVAGED", lambda row: row[1].salvaged, "count"),
        ("LOST", lambda row: row[1].lost, "count"),
    )  # fmt: skip
    return [table_of(columns, kinds.items())] if kinds else []


def _fate(plan: ShardPlan) -> str:
    """Return the action of a repair on a shard or an index."""
    if plan.fate is Fate.LEFT:
        return f"leave alone: {plan.stays}"
    if plan.fate is Fate.INDEXED:
        return "rebuild from the shards"
    return "remove from the index" if plan.fate is Fate.GONE else "quarantine"


def repaired_lines(repaired: Repaired, *, did: bool) -> list[str]:
    """Return the totals of a repair or its dry run."""
    if not (repaired.quarantined or repaired.indexes or repaired.stay or repaired.lost):
        return ["✓ Nothing is damaged"]
    would = "" if did else "to be "
    size = format_bytes(repaired.salvaged_bytes)
    lines = [
        f"{plural(repaired.salvaged, 'record')} ({size}) {would}copied to new shards, "
        f"{plural(repaired.quarantined, 'shard')} {would}quarantined, "
        f"{repaired.indexes:,} {'index' if repaired.indexes == 1 else 'indexes'} {would}rebuilt"
    ]
    if repaired.lost:
        lines.append(f"! {plural(repaired.lost, 'record')} lost, to be computed again")
    if repaired.unknown:
        shards = plural(repaired.unknown, "shard")
        lines.append(f"! {shards} with unknown records: `pipeline submit` computes missing records")
    if repaired.stay:
        lines.append(f"! {plural(repaired.stay, 'file')} left alone")
    return lines


def compacted_lines(kinds: Sequence[Compacted], *, did: bool) -> list[RenderableType]:
    """Return the totals of a compaction or its dry run; then that of each kind."""
    if not kinds:
        return ["The cache is empty."]
    small, is_merged = sum(len(kind.small) for kind in kinds), any(kind.of(Fate.REWRITTEN) for kind in kinds)
    answer = "✓ Nothing to merge"
    if did and is_merged:
        before, after = sum(kind.shards for kind in kinds), sum(kind.after for kind in kinds)
        answer = f"✓ {plural(before, 'file')} merged into {after:,}"
    elif not did and small:
        answer = f"{plural(small, 'small file')} to merge"
    columns: tuple[Column, ...] = (
        ("KIND", "kind"), ("FILES", "shards", "count"), ("SMALL", lambda kind: len(kind.small), "count"),
        ("RECORDS IN SMALL", "records", "count"), ("SIZE", "size_bytes", "bytes"),
        ("AFTER" if did else "ACTION", partial(_after, did=did)),
    )  # fmt: skip
    return [answer, "", table_of(columns, kinds)]


def _after(kind: Compacted, *, did: bool) -> str:
    """Return the effect of a compaction on a kind."""
    if not kind.small:
        return "-"
    left, gone = kind.of(Fate.LEFT), kind.of(Fate.GONE)
    damaged = f"; {plural(len(left), 'damaged file')} left alone" if left else ""
    taken = f"; {plural(len(gone), 'file')} removed meanwhile" if gone else ""
    return f"{plural(kind.after, 'file')}{damaged}{taken}" if did else "merge small files"


UNNEEDED: tuple[Column, ...] = (
    ("UNNEEDED", "kind"), ("RECORDS", "items", "count"), ("SIZE", "bytes", "bytes"), ("WHY", "why"),
    ("SETTINGS", lambda dead: settings_text(dead.recipe or {})),
)  # fmt: skip


def cleaning_lines(cleaning: Cleaning, as_typed: AsTyped = str) -> list[RenderableType]:
    """Show the files that cleaning would remove, and the unneeded files that stay with reasons."""
    dead, leftovers = list(cleaning.dead()), [(name, *counts) for name, counts in _by_what(cleaning.leftovers).items()]
    shown: list[RenderableType] = []
    for columns, rows in ((UNNEEDED, dead), (LEFTOVERS, leftovers)):
        shown += [table_of(columns, rows), ""] if rows else []
    shown += _staying(cleaning, as_typed)
    for note in cleaning.notes:
        shown += [f"note: {note.what}", *([f"  next: {said(note.remedy, as_typed)}"] if note.remedy else [])]
    return shown[:-1] if shown and shown[-1] == "" else shown


def _staying(cleaning: Cleaning, as_typed: AsTyped) -> Iterator[str]:
    """Yield the unneeded records and files that stay, with reasons."""
    grace_s = cleaning.asked.grace_s
    reasons = {
        Fate.YOUNG: f"in files younger than {_span(grace_s)} (--older-than)",
        Fate.SPARSE: f"in files of mostly needed records: {as_typed(Command.of('cache compact'))}",
        Fate.FOREIGN: "in files of an unknown form",
    }
    for fate, why in reasons.items():
        items, taken = cleaning.stays(fate)
        if items:
            yield f"kept: {plural(items, 'unneeded record')}, {format_bytes(taken)}, {why}"
    for seconds in sorted({cleaning.asked.grace_of(file.what) for file in cleaning.young}):
        option = " (--older-than)" if seconds == grace_s else ""
        young = [file for file in cleaning.young if cleaning.asked.grace_of(file.what) == seconds]
        for label, (files, taken) in _by_what(young).items():
            held = f"{plural(files, 'file')}, {format_bytes(taken)}"
            yield f"kept: {label}: {held}, younger than {_span(seconds)}{option}"
    if damaged := [f"{kind}/{shard}" for kind, shard, _ in cleaning.damaged()]:
        yield f"kept: unreadable: {first_few(damaged, NAMED)}: {as_typed(Command.of('cache repair'))}"
    if cleaning.foreign:
        yield f"left alone, not written by pipeline: {first_few(map(str, cleaning.foreign), NAMED)}"
    if others := dict.fromkeys(user.config or user.runs for user in cleaning.others):
        consequence = (
            "--all removes their records, too" if cleaning.asked.all else "records made with their settings are kept"
        )
        yield f"also used by {first_few(others, NAMED)}: {consequence}"


def _span(seconds: float) -> str:
    """Format a time in whole days where possible."""
    return plural(round(seconds / DAY_S), "day") if seconds % DAY_S == 0 else format_seconds(seconds)


def _by_what(files: Iterable[LeftoverFile]) -> dict[str, tuple[int, int]]:
    """Return the number of files and their bytes by what they are."""
    totals: dict[str, tuple[int, int]] = {}
    for file in files:
        name = f"{file.what.value} of {file.kind}" if file.kind else file.what.value
        count, taken = totals.get(name, (0, 0))
        totals[name] = count + 1, taken + file.bytes
    return totals
