"""What a cache holds, and what cleaning it would remove and keep: the values that commands show."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeline.command_line import Command
from pipeline.store.maintenance.damage_report import damage_found, ways_on
from pipeline.store.maintenance.leftovers import Left
from pipeline.store.maintenance.shard_plans import CLEANED, Fate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeline.errors import CacheUnusable
    from pipeline.store.cache_folder import CacheFolder, RecipeStat
    from pipeline.store.maintenance.damage_report import DamageReport
    from pipeline.store.maintenance.leftovers import LeftoverFile
    from pipeline.store.maintenance.shard_plans import Marked
    from pipeline.store.shard_index import StoreStat
    from pipeline.store.users import User

DAY_S = 86_400
GRACE_S = DAY_S
FORGOTTEN_S = 30 * DAY_S
EVERYTHING_GOES = "--all"
BECAUSE = {
    "files": "files changed or not in the data set",
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


Recipes: TypeAlias = "Mapping[tuple[str, bytes], Mapping[str, Any]]"  # kind and tag → its settings


@dataclass(frozen=True, slots=True)
class Cleaning:
    """What would be removed from a cache, what stays, and why."""

    cache: CacheFolder
    asked: CleanRequest
    users: Mapping[str, tuple[float, float]]  # files that register users of the cache, with their times
    others: Sequence[User] = ()
    forgotten: Sequence[User] = ()  # users that no longer exist, or registered again
    own: User | None = None  # what this project uses today
    settle_s: float = 0.0  # for other hosts to see new files before old ones are removed
    marked: Mapping[str, Marked] = field(default_factory=dict)
    recipes: Recipes = field(default_factory=dict)  # that are known
    wanted: frozenset[tuple[str, bytes]] = frozenset()  # those of this project today
    leftovers: Sequence[LeftoverFile] = ()  # that go
    young: Sequence[LeftoverFile] = ()  # that do not go yet
    foreign: Sequence[Path] = ()
    notes: Sequence[CleanNote] = ()

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

    def remedy(self) -> str | Command:
        """Return what to do after the last validation; empty: nothing."""
        if self.report is None or not self.report.summary.findings:
            return ""
        if self.repair:  # which left these files alone
            return ways_on({self.root / file: why for file, why in self.report.summary.stay.items()})
        return damage_found(self.report.summary, self.root, self.report.path).next
