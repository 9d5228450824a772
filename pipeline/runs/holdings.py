"""What a cache holds, told in an instant: from indexes and small files, without reading a record of the data set."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pipeline.keys import recipe_tag
from pipeline.runs import remembered
from pipeline.runs.entering import is_reader
from pipeline.store.cache import Cache, RecipeStat
from pipeline.store.findings import damage_found, last_report
from pipeline.store.layout import KindLayout
from pipeline.store.tally import tally
from pipeline.store.users import registered

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    from pipeline.config.schema import Config
    from pipeline.errors import CacheUnusable
    from pipeline.store.findings import Report
    from pipeline.store.store import StoreStat
    from pipeline.store.users import User


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
    report: Report | None  # of the last validation
    users: tuple[User, ...]
    quarantine: Mapping[str, tuple[int, int]]  # kind → files, bytes
    under: tuple[Path, ...]
    left_out: tuple[CacheUnusable, ...]  # why other caches that were to be under it are not

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        recipes = {kind: [asdict(one) for one in known] for kind, known in self.recipes.items()}
        files, kept_bytes = (sum(column) for column in zip((0, 0), *self.quarantine.values(), strict=True))
        return {
            "root": str(self.root),
            "is_there": self.is_there,
            "kinds": [
                asdict(one) | {"recipes": recipes[one.kind], "undescribed": self.undescribed.get(one.kind, 0)}
                for one in self.stats
            ],
            "missing": [asdict(one) for one in self.missing],
            "not_known": list(self.unknown),
            "last_validation": self._last_validation(),
            "users": [user.to_json() for user in self.users],
            "quarantine": {"files": files, "bytes": kept_bytes, "kinds": dict(self.quarantine)},
            "under": [str(path) for path in self.under],
            "left_out": [{"path": one.where, "why": one.what, "remedy": one.remedy} for one in self.left_out],
        }

    def _last_validation(self) -> dict[str, Any] | None:
        """Return what the last validation found, and what is to be done about it."""
        if self.report is None:
            return None
        summary, path = self.report.summary, self.report.path
        remedy = damage_found(summary, self.root, path).remedy if summary.findings else ""
        return {"path": str(path), **asdict(summary), "remedy": remedy}


def holdings(config: Config) -> Holdings:
    """Return what the cache of a configuration holds."""
    cache = Cache.over(config.cache.root, config.cache.under)
    described: dict[str, list[Mapping[str, Any]]] = {}
    for _, kind, recipe in cache.described():
        described.setdefault(kind, []).append(recipe)
    stats, missing, recipes, undescribed = [], [], {}, {}
    unknown = list(_needed_kinds(config))
    for kind in dict.fromkeys([*cache.kinds(), *unknown]):
        tags = {recipe_tag(kind, recipe): recipe for recipe in described.get(kind, ())}
        wanted = remembered.known(cache, config, kind) if kind in remembered.KINDS else None
        found = tally(cache.own(kind), list(tags), *([wanted.pairs] if wanted else []))
        if found.stat.shards or found.stat.unreadable:
            stats.append(found.stat)
        counted = (RecipeStat(recipe, *found.tagged[tag]) for tag, recipe in tags.items())
        recipes[kind] = sorted((one for one in counted if one.records), key=lambda one: -one.records)
        if kind in remembered.KINDS:
            undescribed[kind] = found.stat.records - sum(one.records for one in recipes[kind])
        if wanted is not None:
            unknown = [one for one in unknown if one != kind]
            absent = found.absent
            for layer in cache.under if len(absent) else ():
                absent = tally(layer.own(kind), (), absent).absent
            changed = _changed(config.data.path) > wanted.at
            missing.append(Missing(kind, len(wanted.pairs), len(absent), wanted.at, changed))
    return Holdings(
        root=cache.root,
        is_there=cache.is_there,
        stats=tuple(stats),
        recipes=recipes,
        undescribed=undescribed,
        missing=tuple(missing),
        unknown=tuple(unknown),
        report=last_report(cache.disk, cache.root),
        users=tuple(registered(cache.disk, cache.root)[0]),
        quarantine=_quarantine(cache),
        under=tuple(layer.root for layer in cache.under),
        left_out=cache.left_out,
    )


def _needed_kinds(config: Config) -> tuple[str, ...]:
    """Return the kinds that a data set needs: of sequences alone no graphs are made, of what a reader gives nothing."""
    if is_reader(config):
        return ()
    has_graphs = config.graph.cache and config.data.source != "fasta"
    return tuple(kind for kind in remembered.KINDS if kind != "graph" or has_graphs)


def _changed(path: Path) -> float:
    """Return when a file or folder was last changed; 0 where it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _quarantine(cache: Cache) -> dict[str, tuple[int, int]]:
    """Return how many damaged shards of each kind were put aside, and their bytes."""
    found = {}
    for kind in cache.kinds():
        folder = KindLayout(cache.root / kind).quarantine
        if sizes := [cache.disk.size_of(folder / name) for name in cache.disk.list_folder(folder)]:
            found[kind] = (len(sizes), sum(sizes))
    return found
