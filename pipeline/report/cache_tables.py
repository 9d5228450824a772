"""The contents of a cache, as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Group

from pipeline.command_line import Command
from pipeline.report.tables import age, plural, text_table
from pipeline.store.maintenance.damage_report import damage_found, ways_on
from pipeline.units import first_few, format_bytes, short_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import RenderableType

    from pipeline.errors import CacheUnusable
    from pipeline.store.cache_folder import RecipeStat
    from pipeline.store.maintenance.damage_report import DamageReport
    from pipeline.store.shard_index import StoreStat
    from pipeline.store.users import User

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


def store_table(stats: Sequence[StoreStat]) -> RenderableType:
    """Show the number and size of each kind of record."""
    if not stats:
        return "The cache is empty."
    now = datetime.now(tz=UTC)
    rows = [
        (
            stat.kind,
            f"{stat.records:,}",
            short_bytes(stat.bytes),
            short_bytes(stat.bytes / stat.records) if stat.records else "",
            stat.shards,
            len(stat.unreadable),
            stat.index.value,
            " to ".join(dict.fromkeys(age(now, moment) for moment in (stat.newest, stat.oldest) if moment)),
        )
        for stat in stats
    ]
    columns = ("KIND", "RECORDS", "SIZE", "EACH", "FILES", "UNREADABLE", "INDEX", "AGE")
    shown = text_table(columns, rows, right=columns[1:6])
    states = {stat.index.value for stat in stats}
    notes = [f"index {state}: {meaning}" for state, meaning in INDEXES.items() if state in states]
    broken = [(stat.kind, name, reason) for stat in stats for name, reason in stat.unreadable]
    tables: list[RenderableType] = ["", text_table(("KIND", "UNREADABLE FILE", "WHY"), broken)] if broken else []
    return Group(shown, *notes, *tables)


def recipe_table(recipes: Mapping[str, Sequence[RecipeStat]], undescribed: Mapping[str, int]) -> RenderableType:
    """Show the settings of records; if a kind has several, only those that differ."""
    rows = []
    for kind, known in recipes.items():
        first = known[0].recipe if len(known) > 1 else {}
        shared = {name for name in first if all(made.recipe.get(name) == first[name] for made in known)}
        for made in known:
            words = (f"{name} {short_value(value)}" for name, value in made.recipe.items() if name not in shared)
            rows.append((kind, f"{made.records:,}", short_bytes(made.bytes), ", ".join(words)))
        if count := undescribed.get(kind):
            rows.append((kind, f"{count:,}", "", "unreadable recipes: the next run writes its own again"))
    return text_table(("KIND", "RECORDS", "SIZE", "SETTINGS"), rows, right="RECORDS SIZE") if rows else ""


def short_value(value: Any) -> str:
    """Format a value of a recipe; shorten digests."""
    if isinstance(value, dict):
        return "(" + ", ".join(f"{name} {short_value(part)}" for name, part in value.items()) + ")"
    if isinstance(value, list):
        return ".".join(map(short_value, value))
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return value[:8] if isinstance(value, str) and len(value) in DIGEST_LETTERS else str(value)


@dataclass(frozen=True, slots=True)
class Missing:
    """How many needed records of a kind are missing, as of the last run."""

    kind: str
    needed: int
    missing: int
    at: float  # when the data set was last looked at, in seconds since 1970
    changed: bool  # since then the data set has changed, by the times of its file or folder


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a cache holds."""

    root: Path
    is_there: bool
    stats: tuple[StoreStat, ...]
    recipes: Mapping[str, list[RecipeStat]]
    undescribed: Mapping[str, int]  # kind → records whose recipe cannot be read
    missing: tuple[Missing, ...]
    unknown: tuple[str, ...]  # kinds for which no stage has determined yet what the data set needs
    report: DamageReport | None  # of the last validation
    repair: DamageReport | None  # of what that found
    users: tuple[User, ...]
    quarantine: Mapping[str, tuple[int, int]]  # kind → files, bytes
    under: tuple[Path, ...]
    left_out: tuple[CacheUnusable, ...]  # why caches of `cache.under` are not read

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        recipes = {kind: [asdict(entry) for entry in known] for kind, known in self.recipes.items()}
        files, kept_bytes = self.quarantined
        return {
            "root": str(self.root),
            "is_there": self.is_there,
            "kinds": [
                asdict(entry) | {"recipes": recipes[entry.kind], "undescribed": self.undescribed.get(entry.kind, 0)}
                for entry in self.stats
            ],
            "missing": [asdict(entry) for entry in self.missing],
            "not_known": list(self.unknown),
            "last_validation": self.report and self._last_validation(self.report),
            "users": [user.to_json() for user in self.users],
            "quarantine": {"files": files, "bytes": kept_bytes, "kinds": dict(self.quarantine)},
            "under": [str(path) for path in self.under],
            "left_out": [{"path": entry.where, "why": entry.what, "remedy": entry.remedy} for entry in self.left_out],
        }

    def _last_validation(self, report: DamageReport) -> dict[str, Any]:
        repaired = self.repair and self.repair.summary.begun
        return {"path": str(report.path), **asdict(report.summary), "remedy": str(self.remedy()), "repaired": repaired}

    @property
    def quarantined(self) -> tuple[int, int]:
        """Return how many damaged files were put aside, and their bytes."""
        return sum(files for files, _ in self.quarantine.values()), sum(size for _, size in self.quarantine.values())

    def found_last(self) -> str:
        """Say what the last validation found."""
        summary = self.report.summary if self.report else None
        if summary is None or not summary.findings:
            return "no damage"
        return f"{plural(summary.findings, 'finding')}, {plural(summary.lost, 'record')} lost"

    def remedy(self) -> str | Command:
        """Return what to do after the last validation; empty: nothing."""
        if self.report is None or not self.report.summary.findings:
            return ""
        if self.repair:  # which left these files alone
            return ways_on({self.root / file: why for file, why in self.report.summary.stay.items()})
        return damage_found(self.report.summary, self.root, self.report.path).next


def holdings_lines(held: Holdings, as_typed: AsTyped = str) -> list[RenderableType]:
    """Return lines on missing records, the last validation, the users of the cache and its quarantine.

    `as_typed` completes the commands in them.
    """
    if not held.is_there:
        return [f"{held.root} does not exist yet. To create it: {as_typed(NOT_KNOWN)}", *_layer_lines(held, as_typed)]
    now = datetime.now(tz=UTC)
    shown: list[RenderableType] = [_missing_line(missing, now, as_typed) for missing in held.missing]
    if held.missing:
        shown += [
            f"{kind}: missing records unknown: {as_typed(Command.submit(kind))}   {TO_LOOK}" for kind in held.unknown
        ]
    elif held.unknown:  # what a reader gives needs nothing
        shown.append(f"missing records unknown: {as_typed(NOT_KNOWN)}   {TO_LOOK}")
    if held.report:
        shown += _validation_lines(held, held.report, now, as_typed)
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


def _missing_line(missing: Missing, now: datetime, as_typed: AsTyped) -> str:
    """Say how many records of a kind are missing, and when that was counted."""
    when = age(now, datetime.fromtimestamp(missing.at, UTC))
    changed = "; the data set has changed since" if missing.changed else ""
    needed = f"{missing.needed:,}"
    state = f"{missing.missing:,} of {needed} missing" if missing.missing else f"all {needed} present"
    again = f": {as_typed(Command.submit(missing.kind))}" if missing.missing or changed else ""
    return f"{missing.kind}: {state}, counted {when} ago{changed}{again}"


def _validation_lines(held: Holdings, report: DamageReport, now: datetime, as_typed: AsTyped) -> Iterator[str]:
    """Yield when and how a cache was last validated, the findings, and what to do about them."""
    last = report.summary
    when = age(now, datetime.fromtimestamp(last.begun, UTC))
    part = f", of kind {first_few(last.only, NAMED)}" if last.only else ""
    part += "" if last.subset == "1/1" else f", part {last.subset}"
    repair = held.repair and datetime.fromtimestamp(held.repair.summary.begun, UTC)
    repaired = f"; repaired {age(now, repair)} ago" if repair else ""
    yield f"last validated {when} ago ({last.how}{part}): {held.found_last()}{repaired}   ({report.path})"
    if remedy := held.remedy():
        yield f"  next: {said(remedy, as_typed)}"


def said(remedy: str | Command, as_typed: AsTyped) -> object:
    """Return what to do next as it is printed; complete a command with the typed options."""
    return as_typed(remedy) if isinstance(remedy, Command) else remedy
