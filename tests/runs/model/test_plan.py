"""A plan says what each stage would take and where each number is from, without Slurm and without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.testkit.project import MakeProject

PIPELINE = Path(sys.executable).with_name("pipeline")


def run(*words: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a verb."""
    environment = {**os.environ, **(env or {})}
    return subprocess.run(
        [str(PIPELINE), *words], capture_output=True, text=True, check=False, cwd=cwd, env=environment
    )


def planned(*words: str, cwd: Path) -> dict[str, dict[str, Any]]:
    """Return the plan of each stage."""
    done = run("plan", "--json", *words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return {one["stage"]: one for one in json.loads(done.stdout)}


def test_what_was_set_is_told_with_its_place(make_project: MakeProject) -> None:
    folder = make_project(6, cluster__scan__cpus=1, cluster__scan__items_per_task=2)
    scan = planned("--stage", "scan", "--set", "cluster.scan.mem=3GiB", cwd=folder)["scan"]
    assert (scan["tasks"], scan["mem_bytes"], scan["cpus"]) == (3, 3 << 30, 1)
    assert scan["sources"]["mem"] == "cluster.scan.mem (--set)"
    assert scan["sources"]["cpus"] == "cluster.scan.cpus (pipeline.yaml:8)"
    assert scan["sources"]["tasks"] == "by cluster.scan.items_per_task: 2 (pipeline.yaml:9)"
    assert scan["sources"]["limit"] == "cluster.scan.time (default)"


def test_nothing_is_submitted_or_made(make_project: MakeProject) -> None:
    folder = make_project(2)
    before = sorted(folder.rglob("*"))
    planned("--stage", "graph", cwd=folder)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.nightly
def test_the_duration_is_unknown_until_tasks_were_measured(make_project: MakeProject) -> None:
    folder = make_project(3)
    before = planned("--stage", "scan", cwd=folder)["scan"]
    assert (before["task_s"], before["all_s"]) == (None, None)
    assert "no task" in before["sources"]["about"]
    assert run("submit", "--stage", "scan", "--executor", "local", "--follow", cwd=folder).returncode == 0
    after = planned("--stage", "scan", "--set", "cache.root=another", cwd=folder)["scan"]
    assert after["all_s"] > 0
    assert after["sources"]["about"].startswith("measured here: ")
    assert after["sources"]["mem"].startswith("from 1 task")
    assert planned("--stage", "scan", cwd=folder)["scan"]["tasks"] == 0


def test_a_cluster_that_is_not_there_is_said_and_planned_for_all_the_same(
    make_project: MakeProject, tmp_path: Path
) -> None:
    folder = make_project(4)
    empty = tmp_path / "empty"
    empty.mkdir()
    done = run("plan", "--stage", "scan", "--set", "cluster.executor=slurm", cwd=folder, env={"PATH": str(empty)})
    assert done.returncode == 0
    assert "does not tell its limits" in done.stderr
    assert done.stdout.startswith("stage")


def test_a_wrong_stage_is_refused_with_the_right_ones(make_project: MakeProject) -> None:
    done = run("plan", "--stage", "grahp", cwd=make_project(1))
    assert done.returncode == 2
    assert "there is no 'grahp': did you mean graph?" in done.stderr
