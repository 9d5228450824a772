"""What cleaning a cache removes and keeps, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeline.command_line import Command
from pipeline.store.maintenance.leftovers import Left
from pipeline.store.maintenance.shard_plans import CLEANED, Fate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

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
    settle_s: float = 0.0  # that others' hosts have to see new files before old ones go
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
