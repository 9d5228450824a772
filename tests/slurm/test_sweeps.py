"""A sweep of 20 points on a real cluster: tasks and supervisors are killed twice, and nothing is done twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from pipeline.journal.ledger import LedgerReader
from pipeline.records import EventKind
from tests.slurm.cluster import Cluster
from tests.slurm.runs import Project, Run, kill, make_project, processes_of, until

pytestmark = [pytest.mark.slurm, pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(1500)]

EPOCHS, STEPS, POINTS, TWINS = 4, 12, 20, 3
SWEEP = ("--sweep", "train.seed=0:5", "--sweep", "train.learning_rate=1e-4,3e-4,1e-3,3e-3")
SETTINGS: dict[str, Any] = {
    "embed__weights": "esm2_small.pt",
    "train__task": "pipeline.tasks.interface:Interface",
    "train__options": {"embedding_dim": 16, "width": 8, "layers": 1, "pair_width": 4, "dropout": 0.2},
    "train__effective_batch": 4,
    "train__epochs": EPOCHS,
    "train__checkpoints": {"every": 2},
    "train__log_every": 1,
    "train__sweep__parallel": 6,
}
SUPERVISOR, WORKER = "pipeline.runs.supervisor", "pipeline.runs.worker"


@pytest.fixture(scope="module")
def project(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Return a project of which all is done that comes before training."""
    cluster.settle()
    project = make_project(tmp_path_factory.mktemp("sweeps") / "project", 12, **SETTINGS)
    shape = ("--layers", "1", "--dim", "16", "--heads", "2", "--out", "esm2_small.pt")
    assert project.types("weights", "synth", *shape).code == 0
    project.submits("graph").ends()
    return project


@pytest.fixture(scope="module")
def swept(project: Project) -> Run:
    """Return the run of the sweep, of which tasks were killed twice, and two supervisors that were to judge them."""
    run = project.submits("train", *SWEEP)
    for few in (3, 9):
        until(f"{few} trained points", lambda few=few: len(finished(run)) >= few, 900, run.story)
        until("some in training", lambda: processes_of(run, WORKER), 120, run.story)
        assert [pid for pid in processes_of(run, WORKER) if kill(pid)]
    ends_a_supervisor(run)
    tried_again = "the standby to try again what was killed"
    until(tried_again, lambda: any(job.attempt == 2 for job in run.now().stages["train"].jobs.values()), 600, run.story)
    until("its end", lambda: not processes_of(run, SUPERVISOR), 120, run.story)
    ends_a_supervisor(run)
    run.ends(timeout_s=900)
    return run


def ends_a_supervisor(run: Run) -> None:
    """Kill the next visit of a supervisor as soon as it is there."""
    until("a supervisor at work", lambda: any(kill(pid) for pid in processes_of(run, SUPERVISOR)), 900, run.story)


def finished(run: Run) -> list[int]:
    """Return the tasks that have said that they are done, once for each time."""
    events = LedgerReader(run.folder).fresh()
    return [
        event.data["task"]
        for event in events
        if event.kind is EventKind.TASK_FINISHED and event.data["stage"] == "train"
    ]


def weights(model: Path) -> dict[str, bytes]:
    """Return the bits of all tensors of a model's last checkpoint."""
    newest = max((model / "checkpoints").glob("step-*"))
    assert newest.name == f"step-{STEPS:08}"
    with safe_open(newest / "state.safetensors", "np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118 - it is no dict


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
        assert weights(twin.folder / "models" / model.name) == weights(model), name


def test_submitting_a_sweep_again_does_nothing_and_adding_a_value_does_only_that(swept: Run, project: Project) -> None:
    again = project.submits("train", *SWEEP)
    again.ends()
    assert (again.stage("train")["missing"], again.stage("train")["tasks"]) == (0, 0)
    more = project.submits("train", "--sweep", "train.seed=3:6", "--sweep", "train.learning_rate=1e-4")
    more.ends()
    assert more.now().stages["train"].names == ["seed=5 learning_rate=1e-4"]
    logs = project.types("logs", more.name, "--point", "seed=5")
    assert "train seed=5 learning_rate=1e-4, attempt 1" in logs.out
