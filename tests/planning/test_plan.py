"""A plan says what each stage would take and where each number is from, without Slurm and without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.testkit.command import Command


def planned(pipeline: Command, stage: str, *words: str) -> dict[str, Any]:
    """Return the plan of a stage."""
    done = pipeline("plan", "--json", "--stage", stage, *words)
    assert done.code == 0, done.err
    return next(plan for plan in done.json() if plan["stage"] == stage)


def test_what_was_set_is_named_with_its_place(make_project, pipeline):
    make_project(6, cluster__scan__cpus=1, cluster__scan__items_per_task=2)
    scan = planned(pipeline, "scan", "--set", "cluster.scan.mem=3GiB")
    assert (scan["tasks"], scan["mem_bytes"], scan["cpus"]) == (3, 3 << 30, 1)
    assert scan["sources"]["mem"] == "cluster.scan.mem (--set)"
    assert scan["sources"]["cpus"] == "cluster.scan.cpus (pipeline.yaml:6)"
    assert "pipeline.yaml:7" in scan["sources"]["tasks"]
    assert scan["sources"]["limit"] == "cluster.scan.time (default)"


def test_nothing_is_submitted_or_made(make_project, pipeline):
    folder = make_project(2)
    before = sorted(folder.rglob("*"))
    planned(pipeline, "graph")
    assert sorted(folder.rglob("*")) == before


@pytest.mark.nightly
def test_the_duration_is_unknown_until_tasks_were_measured(make_project, pipeline):
    make_project(3)
    before = planned(pipeline, "scan")
    assert (before["task_s"], before["all_s"]) == (None, None)
    rows = {line.partition(" ")[0]: line for line in pipeline("plan", "--stage", "graph").out.splitlines()}
    scan, graph = (rows[name].partition(" CPU · ") for name in ("scan", "graph"))
    assert ("?" in graph[0], "?" in scan[0]) == (True, False)
    assert graph[2] == scan[2]  # its memory is known before its items are
    assert pipeline("submit", "--stage", "scan", "--executor", "local", "--follow").code == 0
    assert planned(pipeline, "scan", "--set", "cache.root=another")["all_s"] > 0
    assert planned(pipeline, "scan")["tasks"] == 0


def test_a_cluster_that_is_not_there_is_named_and_planned_for_all_the_same(make_project, pipeline, monkeypatch):
    monkeypatch.setenv("PATH", str(make_project(4) / "empty"))
    done = pipeline("plan", "--stage", "scan", "--set", "cluster.executor=slurm")
    assert (done.code, done.err != "") == (0, True)
    assert "scan" in done.out


def test_a_wrong_stage_is_refused_with_the_right_one(make_project, pipeline):
    make_project(1)
    done = pipeline("plan", "--stage", "grahp")
    assert (done.code, "graph" in done.err) == (2, True)
