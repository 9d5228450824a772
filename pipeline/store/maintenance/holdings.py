"""What a cache holds, as `pipeline cache stat` shows it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pipeline.store.maintenance.damage_report import damage_found, ways_on

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pipeline.command_line import Command
    from pipeline.errors import CacheUnusable
    from pipeline.store.cache_folder import RecipeStat
    from pipeline.store.maintenance.damage_report import DamageReport
    from pipeline.store.shard_index import StoreStat
    from pipeline.store.users import User


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
