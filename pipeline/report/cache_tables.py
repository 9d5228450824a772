"""What a cache holds, and what cleaning it gives back, as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from rich.console import Group

from pipeline.report.tables import age, plural, text_table
from pipeline.store.maintenance.damage_report import damage_found
from pipeline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import RenderableType

    from pipeline.errors import CacheUnusable
    from pipeline.store.cache_folder import RecipeStat
    from pipeline.store.maintenance.damage_report import DamageReport
    from pipeline.store.maintenance.leftovers import User
    from pipeline.store.snapshot import StoreStat

DIGEST_LETTERS = (32, 64)  # of a digest, the first few of which say enough
NAMED = 5
DAY_S = 86_400
NOT_KNOWN = "pipeline submit --stage all"
TO_LOOK = "(or --dry-run: only looks)"
INDEXES = {
    "behind": "newer files are read by their own tables; the next run brings it up to date",
    "none": "every file is read by its own table; the next run makes one",
    "damaged": "every file is read by its own table; `pipeline cache repair` or the next run makes it anew",
}


def store_table(stats: Sequence[StoreStat]) -> RenderableType:
    """Show what each kind of record takes."""
    if not stats:
        return "empty: nothing was stored yet"
    now = datetime.now(tz=timezone.utc)
    rows = [
        (
            stat.kind,
            f"{stat.records:,}",
            format_bytes(stat.bytes),
            format_bytes(stat.bytes / stat.records) if stat.records else "",
            stat.shards,
            len(stat.unreadable),
            stat.index.value,
            " to ".join(dict.fromkeys(age(now, moment) for moment in (stat.newest, stat.oldest) if moment)),
        )
        for stat in stats
    ]
    columns = ("kind", "items", "size", "per item", "files", "unreadable", "index", "age")
    shown = text_table(columns, rows, right="items size per item files unreadable")
    notes = [f"index {name}: {what}" for name, what in INDEXES.items() if name in {stat.index.value for stat in stats}]
    broken = [(stat.kind, name, reason) for stat in stats for name, reason in stat.unreadable]
    tables: list[RenderableType] = ["", text_table(("kind", "unreadable file", "why"), broken)] if broken else []
    return Group(shown, *notes, *tables)


def recipe_table(recipes: Mapping[str, Sequence[RecipeStat]], undescribed: Mapping[str, int]) -> RenderableType:
    """Show by which recipes records were made; of several, only where they differ."""
    rows = []
    for kind, known in recipes.items():
        shared = {name for name in known[0].recipe if _alike(known, name)} if len(known) > 1 else set[str]()
        for made in known:
            words = (f"{name} {_short(value)}" for name, value in made.recipe.items() if name not in shared)
            rows.append((kind, f"{made.records:,}", format_bytes(made.bytes), ", ".join(words)))
        if count := undescribed.get(kind):
            rows.append((kind, f"{count:,}", "", "recipes that cannot be read: the next run describes its own anew"))
    return text_table(("recipes of", "items", "size", "made with"), rows, right="items size") if rows else ""


def _alike(known: Sequence[RecipeStat], name: str) -> bool:
    """Say whether recipes agree in one choice."""
    return all(made.recipe.get(name) == known[0].recipe[name] for made in known)


def _short(value: Any) -> str:
    """Return a choice as people read it; digests by their beginning."""
    if isinstance(value, dict):
        return "(" + ", ".join(f"{name} {_short(part)}" for name, part in value.items()) + ")"
    if isinstance(value, list):
        return ".".join(map(_short, value))
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return value[:8] if isinstance(value, str) and len(value) in DIGEST_LETTERS else str(value)


@dataclass(frozen=True, slots=True)
class Missing:
    """How much of what the data set needs of a kind was not there, by what was known of it at some time."""

    kind: str
    needed: int
    missing: int
    at: float  # when the data set was last looked at, in seconds since 1970
    changed: bool  # the data set since, as far as the times of its file or folder tell


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a cache holds."""

    root: Path
    is_there: bool
    stats: tuple[StoreStat, ...]
    recipes: Mapping[str, list[RecipeStat]]
    undescribed: Mapping[str, int]  # kind → records made by recipes of which nobody can read what they say
    missing: tuple[Missing, ...]
    unknown: tuple[str, ...]  # kinds of which nobody has looked what the data set needs
    report: DamageReport | None  # of the last validation
    users: tuple[User, ...]
    quarantine: Mapping[str, tuple[int, int]]  # kind → files, bytes
    under: tuple[Path, ...]
    left_out: tuple[CacheUnusable, ...]  # why other caches that were to be under it are not

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
        return {"path": str(report.path), **asdict(report.summary), "remedy": self.remedy()}

    @property
    def quarantined(self) -> tuple[int, int]:
        """Return how many damaged files were put aside, and their bytes."""
        return sum(files for files, _ in self.quarantine.values()), sum(size for _, size in self.quarantine.values())

    def found_last(self) -> str:
        """Say what the last validation has found."""
        summary = self.report.summary if self.report else None
        if summary is None or not summary.findings:
            return "all well"
        return f"{plural(summary.findings, 'finding')}, {plural(summary.lost, 'record')} lost"

    def remedy(self) -> str:
        """Return what to do about what the last validation has found; empty: nothing."""
        if self.report is None or not self.report.summary.findings:
            return ""
        return damage_found(self.report.summary, self.root, self.report.path).remedy


def holdings_lines(held: Holdings) -> list[RenderableType]:
    """Say what the data set misses, what the last validation found, who uses the cache, and what was put aside."""
    if not held.is_there:
        return [f"no cache is there yet: {NOT_KNOWN}   (makes it)", *_layer_lines(held)]
    now = datetime.now(tz=timezone.utc)
    shown: list[RenderableType] = [_missing_line(missing, now) for missing in held.missing]
    if held.missing:
        shown += [f"{kind}: not known yet: pipeline submit --stage {kind}   {TO_LOOK}" for kind in held.unknown]
    elif held.unknown:  # what a reader gives needs nothing
        shown.append(f"what this data set needs is not known yet: {NOT_KNOWN}   {TO_LOOK}")
    if held.report:
        shown += _validation_lines(held, held.report, now)
    elif held.stats:
        shown.append("never validated: pipeline cache validate --full")
    if held.users:
        shown.append(f"used by {_named(dict.fromkeys(user.config or user.runs for user in held.users))}")
    files, kept_bytes = held.quarantined
    if files:
        shown.append(f"quarantine: {plural(files, 'damaged file')}, {format_bytes(kept_bytes)}: pipeline cache clean")
    return [*shown, *_layer_lines(held)]


def _layer_lines(held: Holdings) -> Iterator[str]:
    """Say from which other caches this one reads, and why not from others."""
    if held.under:
        yield f"reads also from {_named(map(str, held.under))}"
    for refused in held.left_out:
        yield f"left out of cache.under: {refused.where}: {refused.what}"
        yield f"  next: {refused.remedy}"


def _missing_line(missing: Missing, now: datetime) -> str:
    """Say how much of a kind is missing, and as of when that is known."""
    when = age(now, datetime.fromtimestamp(missing.at, timezone.utc))
    changed = "; it has changed since" if missing.changed else ""
    needed = f"{missing.needed:,}"
    found = f"{missing.missing:,} of {needed} missing" if missing.missing else f"all {needed} are there"
    again = f": pipeline submit --stage {missing.kind}" if missing.missing or changed else ""
    return f"{missing.kind}: {found}, by the data set of {when} ago{changed}{again}"


def _validation_lines(held: Holdings, report: DamageReport, now: datetime) -> Iterator[str]:
    """Say when a cache was last validated, how, what was found, and what is to be done about it."""
    last = report.summary
    when = age(now, datetime.fromtimestamp(last.begun, timezone.utc))
    part = f", of kind {_named(last.only)}" if last.only else ""
    part += "" if last.subset == "1/1" else f", part {last.subset}"
    yield f"last validated {when} ago ({last.how}{part}): {held.found_last()}   ({report.path})"
    if remedy := held.remedy():
        yield f"  next: {remedy}"


def cleaning_lines(told: Mapping[str, Any]) -> list[RenderableType]:
    """Show what cleaning would remove, what stays although nobody needs it, and why."""
    shown: list[RenderableType] = []
    if told["dead"]:
        rows = [
            (dead["kind"], f"{dead['items']:,}", format_bytes(dead["bytes"]), dead["why"], _made(dead))
            for dead in told["dead"]
        ]
        shown += [text_table(("dead", "items", "size", "because", "made with"), rows, right="items size"), ""]
    if told["leftovers"]:
        left = [
            (what, f"{files:,}", format_bytes(taken)) for what, (files, taken) in _by_what(told["leftovers"]).items()
        ]
        shown += [text_table(("left over", "files", "size"), left, right="files size"), ""]
    shown += [*_staying(told), *(line for note in told["notes"] for line in _note(note))]
    return shown[:-1] if shown and shown[-1] == "" else shown


def _staying(told: Mapping[str, Any]) -> Iterator[str]:
    """Say what stays although nobody needs it."""
    dead: dict[str, tuple[int, int]] = {}
    for kind in told["kinds"]:
        for fate, entry in kind["dead"].items():
            items, taken = dead.get(fate, (0, 0))
            dead[fate] = items + entry["items"], taken + entry["bytes"]
    span = _span(told["older_than_s"])
    reasons = {
        "young": f"in files that are younger than {span} (--older-than)",
        "sparse": "in files that hold much more of what is needed: pipeline cache compact",
        "foreign": "in files that are not as this program makes them",
    }
    for fate, why in reasons.items():
        items, taken = dead.get(fate, (0, 0))
        if items:
            yield f"stays: {plural(items, 'dead item')}, {format_bytes(taken)}, {why}"
    for seconds in sorted({entry["older_than_s"] for entry in told["young"]}):
        option = " (--older-than)" if seconds == told["older_than_s"] else ""
        young = [entry for entry in told["young"] if entry["older_than_s"] == seconds]
        for what, (files, taken) in _by_what(young).items():
            held = f"{plural(files, 'file')}, {format_bytes(taken)}"
            yield f"stays: {what}: {held}, younger than {_span(seconds)}{option}"
    if told["damaged"]:
        names = [f"{entry['kind']}/{entry['shard']}" for entry in told["damaged"]]
        yield f"stays: cannot be read: {_named(names)}: pipeline cache repair"
    if told["left_alone"]:
        yield f"left alone, not made by this program: {_named(told['left_alone'])}"
    if told["used_by"]:
        then = "what they need goes, too" if told["all"] else "all that is made by their recipes stays"
        yield f"used also by {_named(dict.fromkeys(told['used_by']))}: {then}"


def _span(seconds: float) -> str:
    """Return a time as people say it."""
    return plural(round(seconds / DAY_S), "day") if seconds % DAY_S == 0 else format_seconds(seconds)


def _note(note: Mapping[str, Any]) -> list[str]:
    return [f"note: {note['what']}", *([f"  next: {note['remedy']}"] if note["remedy"] else [])]


def _by_what(files: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Count files and bytes by what they are."""
    found: dict[str, tuple[int, int]] = {}
    for file in files:
        name = f"{file['what']} of {file['kind']}" if file["kind"] else file["what"]
        count, taken = found.get(name, (0, 0))
        found[name] = count + 1, taken + file["bytes"]
    return found


def _made(dead: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in (dead["recipe"] or {}).items())


def _named(names: Iterable[str]) -> str:
    """Return the first few of some names, and how many more there are."""
    known = list(names)
    more = f" and {len(known) - NAMED:,} more" if len(known) > NAMED else ""
    return ", ".join(known[:NAMED]) + more
