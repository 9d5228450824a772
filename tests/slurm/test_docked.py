"""Docking on a real cluster: two files in, ranked poses out, through the jobs that draw them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.testkit.cluster import Cluster
from tests.testkit.command import Command
from tests.testkit.trained import Docking

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


@pytest.mark.nightly
def test_two_files_are_docked_by_jobs_and_the_poses_are_those_of_this_machine(
    healthy: Cluster, docking: Docking, pipeline: Command
) -> None:
    assert healthy
    text = (docking.folder / "data" / "c1.pdb").read_text().splitlines(keepends=True)
    for name, chain in (("left", "A"), ("right", "B")):
        Path(f"{name}.pdb").write_text("".join(line for line in text if line[21:22] == chain))
    words = ("dock", "left.pdb", "right.pdb", "--model", docking.model, "--poses", "3", "--steps", "2")
    for place, executor in (("here", "local"), ("there", "slurm")):
        done = pipeline(*words, "--out", place, "--executor", executor, "--set", "cluster.slurm.poll=1s")
        assert done.code == 0, done.err
    tables = [next(Path(place).glob("*/poses.csv")) for place in ("here", "there")]
    found = [list(csv.DictReader(table.read_text().splitlines())) for table in tables]
    assert len(found[0]) == 3
    assert found[0] == found[1]
    assert [(table.parent / row["file"]).is_file() for table, rows in zip(tables, found, strict=True) for row in rows]


@pytest.mark.nightly
def test_an_array_of_tasks_draws_the_poses_that_one_task_draws(
    healthy: Cluster, docking: Docking, pipeline: Command
) -> None:
    assert healthy
    words = ("submit", "--stage", "predict", "--only", "--follow", "--set", "cluster.slurm.poll=1s")
    alone = pipeline(*words)
    assert alone.code == 0, alone.err
    several = ("cluster.predict.tasks=3", "train.predict.folder=again", "cluster.executor=slurm")
    done = pipeline(*words, *(word for one in several for word in ("--set", one)))
    assert done.code == 0, done.err
    (stage,) = json.loads(pipeline("status", "--json").out)["stages"]
    assert (stage["missing"], stage["tasks"]) == (15, 3)
    tables = [(docking.poses(where) / "predictions.csv").read_text() for where in ("predictions", "again")]
    assert tables[0] == tables[1]
