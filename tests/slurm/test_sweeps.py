"""A sweep of 20 points on a real cluster: tasks and supervisors are killed twice, and nothing is done twice."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.slurm.killed_sweep import POINTS, STEPS, SWEEP, WORKER, finished, killed_sweep, ready_to_sweep
from tests.testkit.cluster import Cluster
from tests.testkit.slurm_runs import Project, Run, processes_of, until
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


def test_submitting_a_sweep_again_does_nothing_and_adding_a_value_does_only_that(swept: Run, project: Project) -> None:
    again = project.submits("train", *SWEEP)
    again.ends()
    assert (again.stage("train")["missing"], again.stage("train")["tasks"]) == (0, 0)
    more = project.submits("train", "--sweep", "train.seed=3:6", "--sweep", "train.learning_rate=1e-4")
    more.ends()
    assert more.now().stages["train"].names == ["seed=5 learning_rate=1e-4"]
    logs = project.types("logs", more.name, "--point", "seed=5")
    assert "train seed=5 learning_rate=1e-4, attempt 1" in logs.out


def test_a_point_is_cancelled_alone_and_is_trained_when_the_sweep_is_submitted_again(project: Project) -> None:
    (project.folder / "long.csv").write_text("train.seed,train.epochs\n70,100000\n71,4\n72,100000\n")
    long, _, longer = names = ["seed=70 epochs=100000", "seed=71 epochs=4", "seed=72 epochs=100000"]
    run = project.submits("train", "--sweep-file", "long.csv")
    until("steps of both long points", lambda: {0, 2} <= trained_in(run), 600, run.story)
    assert project.types("cancel", "--point", "seed=70", "--yes").code == 0
    until("the short one to be done", lambda: states_of(run) == ["cancelled", "done", "running"], 600, run.story)
    until("the other to be left", lambda: len(processes_of(run, WORKER)) == 1, 120, run.story)
    assert f"{long}: cancelled by " in project.types("status").out
    assert "seed=70 epochs=100000 is cancelled" in project.types("cancel", "--point", "seed=70").said
    assert project.types("cancel", "--point", "epochs=1*", "--yes").code == 0
    run.ends()
    told = run.stage("train")
    states = dict(zip(names, ("cancelled", "done", "cancelled"), strict=True))
    assert {point["name"]: point["state"] for point in told["census"]["points"]} == states
    assert told["failures"] == []
    assert f"warning: {longer} was not trained: cancelled by " in project.types("status").out
    again = project.submits("train", "--sweep-file", "long.csv")
    until("both long points", lambda: {0, 1} <= trained_in(again), 600, again.story)
    assert again.now().stages["train"].names == [long, longer]  # and not what is done
    assert project.types("cancel", "--yes").code == 0


def states_of(run: Run) -> list[str]:
    """Return the states of a training's tasks."""
    stage = run.now().stages["train"]
    return [stage.state_of(task) for _, task in sorted(stage.work.items())]


def trained_in(run: Run) -> set[int]:
    """Return the tasks of a run that have trained a step."""
    stage = run.now().stages.get("train")
    return {int(process.split("-")[1]) for process, steps in stage.done.items() if steps} if stage else set()
