"""A sweep of 20 points on a real cluster: tasks and supervisors are killed twice, and nothing is done twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.slurm.killed_sweep import (
    POINTS,
    STEPS,
    TRIALS,
    WORKER,
    finished,
    killed_search,
    killed_sweep,
    ready_to_sweep,
)
from tests.testkit.cluster import Cluster
from tests.testkit.slurm_runs import Project, Run, kill, processes_of, until
from tests.testkit.trained import weights

pytestmark = [pytest.mark.slurm, pytest.mark.fault, pytest.mark.nightly, pytest.mark.timeout(1500)]

TWINS = 3


@pytest.fixture(scope="module")
def project(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Project:
    cluster.settle()
    return ready_to_sweep(tmp_path_factory.mktemp("sweeps") / "project")


@pytest.fixture(scope="module")
def swept(project: Project) -> Run:
    return killed_sweep(project)


def test_a_sweep_that_is_killed_twice_trains_every_point_once(swept: Run) -> None:
    stage = swept.stage("train")
    points = stage["census"]["points"]
    assert [point["state"] for point in points] == ["done"] * POINTS
    assert len({point["model"] for point in points}) == POINTS
    assert sorted(finished(swept)) == [*range(POINTS)]  # none a second time
    assert stage["failures"] != []
    first = [job["tasks"] for job in stage["jobs"] if job["attempt"] == 1]
    assert first == ["0-5", "6-11", "12-17", "18-19"]  # equal requests share an array, of which this cluster takes six
    for point in points:
        lines = (swept.project.folder / "models" / point["model"] / "figures.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [*range(1, STEPS + 1)], point


def test_the_points_of_a_killed_sweep_are_their_plain_twins_bit_for_bit(swept: Run, project: Project) -> None:
    twin = Project(project.folder.with_name("twin"))
    shutil.copytree(project.folder, twin.folder, ignore=shutil.ignore_patterns("models"))
    linked = sorted((swept.folder.path / "points").iterdir())
    assert len(linked) == POINTS
    failed = {failure["task"] for failure in swept.stage("train")["failures"]}
    stage = swept.now().stages["train"]
    for name in [stage.name_of(task) for task in sorted(failed)[:TWINS]]:
        words = [f"--set=train.{setting}" for setting in name.split()]
        twin.submits("train", *words).ends()
        model = (swept.folder.path / "points" / name).resolve()
        assert weights(twin.folder / "models" / model.name, STEPS) == weights(model, STEPS), name


def test_a_search_whose_supervisor_and_task_are_killed_asks_and_trains_every_trial_once(project: Project) -> None:
    run = killed_search(project)
    stage = run.stage("train")
    assert [trial["number"] for trial in stage["asked"]] == [*range(TRIALS)]
    assert {trial["state"] for trial in stage["asked"]} == {"done"}
    assert sorted(finished(run)) == [*range(TRIALS)]
    first = [job["tasks"] for job in stage["jobs"] if job["attempt"] == 1]
    assert sorted(map(int, first)) == [*range(TRIALS)]  # a job for each, once


@pytest.fixture(scope="module")
def shared(project: Project) -> Run:
    """Return the run of six points, three a job, of which one was killed while it trained."""
    other = Project(project.folder.with_name("shared"))
    shutil.copytree(project.folder, other.folder, ignore=shutil.ignore_patterns("models", "runs"))
    run = other.submits("train", "--sweep", "train.seed=10:16", "--set", "train.sweep.per_gpu=3")
    until("some in training", lambda: len(processes_of(run, WORKER)) > 3, 300, run.story)
    launchers = [pid for pid in processes_of(run, WORKER) if b"--beside" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert kill(next(pid for pid in processes_of(run, WORKER) if pid not in launchers))
    run.ends(timeout_s=900)
    return run


def test_points_share_a_job_and_one_that_is_killed_is_resumed_while_the_others_end(shared: Run) -> None:
    stage = shared.stage("train")
    points = stage["census"]["points"]
    assert [point["state"] for point in points] == ["done"] * 6
    first = [job for job in stage["jobs"] if job["attempt"] == 1]
    assert sorted((job["tasks"], job["sharing"]) for job in first) == [("0-5", 3)]
    assert sorted(finished(shared)) == [*range(6)]  # none a second time
    (failure,) = stage["failures"]
    assert (failure["number"], failure["job"]) == (1, first[0]["id"])
    (again,) = (job for job in stage["jobs"] if job["attempt"] == 2)
    assert (again["tasks"], again["sharing"]) == (str(failure["task"]), 1)
    for point in points:
        lines = (shared.project.folder / "models" / point["model"] / "figures.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [*range(1, STEPS + 1)], point
