"""What cleaning a cache removes and keeps, and why, as data and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.command_line import Command
from pipeline.report.cache_tables import NAMED, said, short_value
from pipeline.report.tables import plural, text_table
from pipeline.store.maintenance.leftovers import Left
from pipeline.store.maintenance.shard_plans import CLEANED, Fate, Live
from pipeline.units import first_few, format_bytes, format_seconds, short_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from rich.console import RenderableType

    from pipeline.report.cache_tables import AsTyped
    from pipeline.store.cache_folder import CacheFolder
    from pipeline.store.maintenance.leftovers import LeftoverFile
    from pipeline.store.maintenance.shard_plans import Marked
    from pipeline.store.users import User

DAY_S = 86_400
GRACE_S = DAY_S
FORGOTTEN_S = 30 * DAY_S
EVERYTHING_GOES = "--all"
BECAUSE = {
    "files": "files changed or not in the data set",
    "limits": "older than a week",
    "sets": "of removed runs",
    "recipes": "no record uses them",
}


@dataclass(frozen=True, slots=True)
class CleanNote:
    """Why something is kept, and what the user can do about it."""

    what: str
    remedy: str | Command = ""


@dataclass(frozen=True, slots=True)
class CleanRequest:
    """The options of `cache clean`."""

    keep_recipes: bool = False
    all: bool = False
    older_than_s: float | None = None

    @property
    def grace_s(self) -> float:
        """The age in seconds below which nothing is removed."""
        if self.older_than_s is not None:
            return self.older_than_s
        return 0 if self.all else GRACE_S

    def grace_of(self, what: Left) -> float:
        """Return the age in seconds below which a file that holds no records stays."""
        if self.all:
            return self.grace_s
        longer_s = {Left.MEMORY: FORGOTTEN_S, Left.TEMPORARY: GRACE_S}  # a writer may still have it open
        return max(self.grace_s, longer_s.get(what, 0))


@dataclass(slots=True)
class Cleaning:
    """What would be removed from a cache, what stays, and why."""

    cache: CacheFolder
    asked: CleanRequest
    now: float
    users: dict[str, tuple[float, float]]  # files that register users of the cache, with their times
    others: tuple[User, ...] = ()
    forgotten: tuple[User, ...] = ()  # users that no longer exist, or registered again
    own: User | None = None  # what this project uses today
    settle_s: float = 0.0  # that others' hosts have to see new files before old ones go
    live: dict[str, Live] = field(default_factory=dict)
    marked: dict[str, Marked] = field(default_factory=dict)
    recipes: Mapping[tuple[str, bytes], Mapping[str, Any]] = field(default_factory=dict)  # that are known
    wanted: frozenset[tuple[str, bytes]] = frozenset()  # those of this project today
    leftovers: tuple[LeftoverFile, ...] = ()  # that go
    young: tuple[LeftoverFile, ...] = ()  # that do not go yet
    foreign: tuple[Path, ...] = ()
    notes: list[CleanNote] = field(default_factory=list)

    @property
    def freed_bytes(self) -> int:
        return sum(marked.freed_bytes for marked in self.marked.values()) + sum(file.bytes for file in self.leftovers)

    @property
    def files(self) -> int:
        return len(self.leftovers) + sum(len(marked.of(Fate.GOES, Fate.REWRITTEN)) for marked in self.marked.values())

    def dead(self) -> Iterator[Dead]:
        """Yield the records that are not needed, by kind and recipe."""
        for kind, marked in self.marked.items():
            items, size_bytes = marked.dead(*CLEANED)
            for tag, (tag_items, tag_bytes) in marked.tags.items():
                items, size_bytes = items - tag_items, size_bytes - tag_bytes
                if tag_items:
                    why = "not in the data set" if (kind, tag) in self.wanted else "settings not in use"
                    why = EVERYTHING_GOES if self.asked.all else why
                    yield Dead(kind, why, self.recipes.get((kind, tag)), tag_items, tag_bytes)
            if items:
                why = BECAUSE.get(kind, "unknown settings")
                yield Dead(kind, EVERYTHING_GOES if self.asked.all else why, None, items, size_bytes)

    def stays(self, *fates: Fate) -> tuple[int, int]:
        """Return how many unneeded records stay for the given reasons, and their bytes."""
        dead = [marked.dead(*fates) for marked in self.marked.values()]
        return sum(items for items, _ in dead), sum(size_bytes for _, size_bytes in dead)

    def damaged(self) -> list[tuple[str, str, str]]:
        """Return the shards that cannot be read: kind, name and why."""
        return [(kind, *damage) for kind, marked in self.marked.items() for damage in marked.damaged]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "root": str(self.cache.root),
            "all": self.asked.all,
            "older_than_s": self.asked.grace_s,
            "bytes": self.freed_bytes,
            "files": self.files,
            "kinds": [_plain(marked) for marked in self.marked.values()],
            "dead": [asdict(dead) for dead in self.dead()],
            "leftovers": [_plain_leftover(file) for file in self.leftovers],
            "young": [_plain_leftover(file) | {"older_than_s": self.asked.grace_of(file.what)} for file in self.young],
            "left_alone": [str(path) for path in self.foreign],
            "damaged": [{"kind": kind, "shard": shard, "why": why} for kind, shard, why in self.damaged()],
            "used_by": [user.config or user.runs for user in self.others],
            "notes": [{"what": note.what, "remedy": str(note.remedy)} for note in self.notes],
        }


@dataclass(frozen=True, slots=True)
class Dead:
    """Records of one kind and recipe that are not needed."""

    kind: str
    why: str
    recipe: Mapping[str, Any] | None
    items: int
    bytes: int

    @property
    def made_with(self) -> str:
        """Its recipe, in words."""
        return ", ".join(f"{name} {short_value(value)}" for name, value in (self.recipe or {}).items())


def _plain(marked: Marked) -> dict[str, Any]:
    shards = {fate.value: dict(zip(("items", "bytes"), marked.dead(fate), strict=True)) for fate in CLEANED}
    files = {fate.value: len(marked.of(fate)) for fate in CLEANED}
    return {
        "kind": marked.kind,
        "items": marked.records,
        "bytes": marked.total_bytes,
        "freed_bytes": marked.freed_bytes,
        "dead": {fate: counts | {"files": files[fate]} for fate, counts in shards.items()},
    }


def _plain_leftover(leftover: LeftoverFile) -> dict[str, Any]:
    return {"path": str(leftover.path), "what": leftover.what.value, "kind": leftover.kind, "bytes": leftover.bytes}


def cleaning_lines(cleaning: Cleaning, as_typed: AsTyped = str) -> list[RenderableType]:
    """Show what cleaning would remove, and which unneeded files stay and why."""
    shown: list[RenderableType] = []
    if dead := list(cleaning.dead()):
        rows = [
            (group.kind, f"{group.items:,}", short_bytes(group.bytes), group.why, group.made_with) for group in dead
        ]
        shown += [text_table(("UNNEEDED", "RECORDS", "SIZE", "WHY", "SETTINGS"), rows, right="RECORDS SIZE"), ""]
    if cleaning.leftovers:
        leftovers = _by_what(cleaning.leftovers).items()
        left = [(label, f"{files:,}", short_bytes(taken)) for label, (files, taken) in leftovers]
        shown += [text_table(("LEFTOVER", "FILES", "SIZE"), left, right="FILES SIZE"), ""]
    shown += _staying(cleaning, as_typed)
    for note in cleaning.notes:
        shown += [f"note: {note.what}", *([f"  next: {said(note.remedy, as_typed)}"] if note.remedy else [])]
    return shown[:-1] if shown and shown[-1] == "" else shown


def _staying(cleaning: Cleaning, as_typed: AsTyped) -> Iterator[str]:
    """Yield which unneeded records and files stay, and why."""
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
