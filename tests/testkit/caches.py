"""A project with records of every kind, made once; each test damages a copy of its cache."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.journal.ledger import LedgerReader
from pipeline.journal.run_folder import RunFolder, runs_in
from pipeline.records import EventKind
from pipeline.setup.demo_project import make_project
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.cache_layout import REPORTS
from pipeline.store.maintenance.damage_report import DamageFinding, DamageReport, ReportWriter, Summary, last_report
from tests.testkit.command import Outcome
from tests.testkit.projects import settle
from tests.testkit.slurm_runs import content

PIPELINE = Path(sys.executable).with_name("pipeline")
STAGES = ("scan", "embed", "graph")
SMALL = ("train.task=null", "cache.visibility_s=0", "cache.shard_bytes=32KiB", "cluster.scan.items_per_task=5")
Records = dict[str, dict[bytes, bytes]]


@dataclass(frozen=True)
class Cached:
    """A project beside a cache that it has filled."""

    project: Path
    home: Path  # of the cache and the runs

    def types(self, *words: str, sets: tuple[str, ...] = ()) -> Outcome:
        """Type a command in the project."""
        given = (*SMALL, f"cache.root={self.home / 'cache'}", f"cluster.runs={self.home / 'runs'}", *sets)
        command = [str(PIPELINE), *words, *(word for one in given for word in ("--set", one))]
        done = subprocess.run(command, cwd=self.project, capture_output=True, text=True, check=False, timeout=300)
        return Outcome(done.returncode, done.stdout, done.stderr)

    def submits(self, stage: str, *words: str, sets: tuple[str, ...] = ()) -> Outcome:
        """Run a stage here, to its end."""
        return self.types("submit", "--stage", stage, "--executor", "local", "--follow", *words, sets=sets)

    @property
    def cache(self) -> CacheFolder:
        """The cache as it is now."""
        return CacheFolder(self.home / "cache")

    @property
    def run(self) -> RunFolder:
        """The newest run."""
        return runs_in(self.home / "runs")[-1]

    def report(self) -> DamageReport:
        """Return the newest report in the cache."""
        found = last_report(self.cache.disk, self.cache.root)
        assert found is not None
        return found

    def records(self) -> Records:
        """Return the content of every record that can be read, by kind and key."""
        cache = self.cache
        return {
            kind: {one.key: content(one) for one in cache.kind(kind).read(cache.kind(kind).keys())}
            for kind in cache.kinds()
        }

    def keys(self) -> dict[str, set[bytes]]:
        """Return what each kind has, without reading it."""
        cache = self.cache
        return {kind: set(cache.kind(kind).keys()) for kind in cache.kinds()}

    def shards(self, kind: str) -> list[Path]:
        """Return the files of a kind."""
        return sorted((self.home / "cache" / kind / "shards").iterdir())

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


def fill(folder: Path) -> Cached:
    """Make the demo's project and fill a cache with all it leads to."""
    project = folder / "project"
    make_project(project)
    settle(project / "data")
    settle(project / "weights")
    made = Cached(project, folder)
    done = made.submits("all")
    assert done.code == 0, done.err
    return made


def copy_of(made: Cached, home: Path) -> Cached:
    """Return the same project beside a copy of its cache."""
    shutil.copytree(made.home / "cache", home / "cache")
    return Cached(made.project, home)


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


def found_in(report: DamageReport) -> list[str]:
    """Return what a report has found, in an order of its own."""
    return sorted(json.dumps(one.to_json(), sort_keys=True) for one in report.findings())
