"""A project with records of every kind; each test damages its own copy of the cache."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.journal.ledger import LedgerReader
from pipeline.records import EventKind
from pipeline.setup import demo_project
from pipeline.store.format.cache_layout import REPORTS
from pipeline.store.maintenance.damage_report import DamageFinding, DamageReport, ReportWriter, Summary, last_report
from tests.testkit.once import Shelf
from tests.testkit.project import Project, copied, settle


class Cached(Project):
    """A project whose cache holds records of every kind."""

    def report(self) -> DamageReport:
        """Return the newest report in the cache."""
        found = last_report(self.cache.disk, self.cache.root)
        assert found is not None
        return found

    def outcomes(self) -> Counter[str]:
        """Count what the tasks of the newest run have worked through, by stage."""
        done: dict[tuple[str, str], int] = {}
        for event in LedgerReader(self.run).fresh():
            if event.kind in (EventKind.PROGRESS, EventKind.TASK_FINISHED):
                done[event.data["stage"], event.writer] = event.data["done"]
        counted = Counter[str]()
        for (stage, _), count in done.items():
            counted[stage] += count
        return counted

    def census(self, stage: str) -> dict[str, Any]:
        """Return what the newest run says of a stage."""
        ended = [event for event in LedgerReader(self.run).fresh() if event.kind is EventKind.STAGE_ENDED]
        return dict(next(event.data["census"] for event in ended if event.data["stage"] == stage))

    def writes_list(self, *findings: DamageFinding) -> Path:
        """Write a damage list by hand."""
        writer, summary = ReportWriter(self.cache.disk, self.cache.root / REPORTS), Summary("full")
        for one in findings:
            writer.add(one)
            summary.count(one)
        return writer.publish(summary)


def fill(folder: Path) -> None:
    """Make the demo's project and fill a cache with all it leads to."""
    demo_project.make_project(folder)
    settle(folder / "data")
    settle(folder / "weights")
    made = Cached(folder)
    small = {"visibility_s": 0, "shard_bytes": "32KiB"}
    made.sets(train__task=None, cache=small, cluster__scan__items_per_task=5)
    made.finishes("all")
    shutil.rmtree(folder / "runs")


@pytest.fixture
def cached(shelf: Shelf, tmp_path: Path) -> Cached:
    """Return a copy that the test may damage, in its own folder."""
    return Cached(copied(shelf, "filled-cache", fill, tmp_path))


def flip(path: Path, rng: random.Random) -> None:
    """Change some bytes in the middle of a file, where its records are."""
    path.chmod(0o600)
    size = path.stat().st_size
    with path.open("r+b") as file:
        for _ in range(3):
            at = rng.randrange(size // 4, size - size // 8)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0x5A]))


def cut(path: Path, rng: random.Random) -> None:
    """Let a file end early, without its table."""
    path.chmod(0o600)
    os.truncate(path, rng.randrange(1, path.stat().st_size - 1))


def remove(path: Path, _rng: random.Random) -> None:
    """Let a file be gone."""
    path.unlink()
