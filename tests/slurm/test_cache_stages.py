"""A cache is validated and made whole again by jobs of a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.journal.run_status import State
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.maintenance.damage_report import REPAIR, Fault, last_report, reports
from tests.testkit.cluster import Cluster
from tests.testkit.slurm_runs import make_project, strangers

pytestmark = pytest.mark.slurm

ITEMS = 6


@pytest.mark.nightly
def test_jobs_find_what_is_damaged_and_jobs_make_it_anew(tmp_path: Path, healthy: Cluster) -> None:
    project = make_project(
        tmp_path / "project", ITEMS, cluster__scan__items_per_task=2, cluster__validate__items_per_task=2
    )
    project.submits("graph").ends()
    before, cache = project.records(), CacheFolder(project.folder / "cache")
    assert len(before["graph"]) == ITEMS
    for kind in ("scan", "graph"):
        path = sorted((cache.root / kind / "shards").iterdir())[0]
        path.chmod(0o600)
        path.write_bytes(path.read_bytes()[:-200])

    run = project.submits("validate")
    assert strangers(run) == []
    told = run.ends(State.FAILED)
    report = last_report(cache.disk, cache.root)
    assert report is not None
    assert told["exit_code"] == 4
    assert f"next: pipeline cache repair --list {report.path}" in told["error"]
    (stage,) = told["stages"]
    assert stage["tasks"] == -(-stage["items"] // 2) > 2
    assert stage["census"]["items"] == stage["items"]
    assert {(one.kind, one.fault) for one in report.findings()} >= {("scan", Fault.TABLE), ("graph", Fault.TABLE)}

    assert project.types("cache", "repair", "--list", str(report.path), "--yes").code == 0
    listed = reports(cache.disk, cache.root)[0]
    assert listed.summary.how == REPAIR
    assert listed.summary.lost > 0
    project.submits("regenerate", "--list", str(listed.path)).ends()
    assert project.records() == before
