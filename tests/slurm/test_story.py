"""One story on a real Slurm of three nodes: a task is killed, a node drained, the run resumed, the model trained."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from pipeline.journal.run_status import State
from tests.testkit.cluster import Cluster
from tests.testkit.slurm_runs import LINGERS, make_project, until

pytestmark = [pytest.mark.slurm, pytest.mark.fault, pytest.mark.timeout(600)]

ITEMS, EPOCHS = 6, 3
SETTINGS = {
    "embed__weights": "esm2_small.pt",
    "train__task": "pipeline.tasks.interface:Interface",
    "train__options": {"embedding_dim": 32, "width": 16, "layers": 2, "pair_width": 8},
    "train__split": None,
    "train__effective_batch": 3,
    "train__epochs": EPOCHS,
    "train__validation__split": None,
    "cluster__scan__items_per_task": 1,
    "cluster__train__nodes": 2,
    "cluster__train__ranks": 1,
}


def test_a_run_reaches_its_model_though_a_task_a_node_and_its_supervisors_are_lost(
    tmp_path: Path, healthy: Cluster
) -> None:
    project = make_project(tmp_path / "project", ITEMS, {"c1.pdb": LINGERS, "c2.pdb": LINGERS}, **SETTINGS)
    shape = ("--layers", "2", "--dim", "32", "--heads", "2", "--out", "esm2_small.pt")
    assert project.types("weights", "synth", *shape).code == 0
    run = project.submits("train")

    run.arrives_at("c1.pdb")
    os.kill(project.lingering("c1.pdb"), signal.SIGKILL)
    run.arrives_at("c2.pdb")
    assert len(run.jobs(healthy, "supervise")) == 1, "the place that a run takes in the queue besides its tasks"
    drained = next(node for node in healthy.nodes if node != run.node_of(healthy, 2))
    assert healthy.run("scontrol", "update", f"nodename={drained}", "state=drain", "reason=story").returncode == 0
    until("no other task", lambda: drained not in {job["node"] for job in run.jobs(healthy)}, story=run.story)
    before = {one["pid"] for one in project.seen()}

    healthy.run("scancel", *{job["array"] for job in run.jobs(healthy, "supervise")})
    until("no supervisor", lambda: not run.jobs(healthy, "supervise"))
    assert run.reported()["state"] == State.ABANDONED
    assert project.types("resume").code == 0
    project.lets_go()
    ended = run.ends()

    stages = {stage["name"]: stage for stage in ended["stages"]}
    assert list(stages) == ["scan", "embed", "graph", "train"]
    assert [(one["task"], one["cause"]) for one in stages["scan"]["failures"]] == [(1, "crashed")]
    assert {stage["census"]["accepted"] for name, stage in stages.items() if name != "train"} == {ITEMS}
    assert stages["train"]["census"]["steps"] == ITEMS // 3 * EPOCHS
    assert {one["SLURMD_NODENAME"] for one in project.seen() if one["pid"] not in before}.isdisjoint({drained})
    (model,) = (project.folder / "models").iterdir()
    assert any((model / "checkpoints").iterdir())
