"""All stages in one job of three nodes, by the script that people submit; the next job continues a training."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.journal.run_status import State, StatusReader
from tests.slurm.test_by_hand import ROOT
from tests.testkit.cluster import Cluster
from tests.testkit.project import TRAIN, Project, make_project
from tests.testkit.slurm_runs import until
from tests.testkit.trained import weights

pytestmark = [pytest.mark.slurm, pytest.mark.nightly, pytest.mark.timeout(1500)]

STEPS = 60
TASK = '''\
"""The reference task, whose steps are slow while a file is there; the planner calls it, too."""

import os
import sys
import time

from pipeline.tasks.interface import Interface


class Slow(Interface):
    def loss(self, model, batch):
        is_worker = any("pipeline.engine.worker" in word for word in sys.orig_argv)
        if is_worker and os.path.exists("{slow}"):
            time.sleep(8)
        return super().loss(model, batch)
'''
SETTINGS: dict[str, Any] = {
    "embed__weights": "esm2_small.pt",
    "train__task": "slow:Slow",
    **{name: value for name, value in TRAIN.items() if name != "train__task"},
    "train__effective_batch": 4,
    "train__epochs": 20,
    "cluster__train__ranks": 1,
    "cluster__allocation__grace": "40s",
}


def submits(cluster: Cluster, project: Project, minutes: int, *words: str) -> tuple[int, str]:
    """Submit the script as it is, wait for its end, and return its exit code and what it printed."""
    log = project.folder / "job.out"
    log.unlink(missing_ok=True)
    size = ["--cpus-per-task=2", "--mem=4G", f"--time={minutes}", f"--output={log}", f"--chdir={project.folder}"]
    job = cluster.run("sbatch", "--parsable", *size, str(ROOT / "sbatch/allocation.sbatch"), *words).stdout.strip()

    assert job

    def state() -> str:
        return cluster.run("sacct", "-XnPj", job, "-o", "State,ExitCode").stdout.strip()

    until("the job to end", lambda: state().partition("|")[0] in ("COMPLETED", "FAILED", "TIMEOUT"), 900)
    return int(state().partition("|")[2].partition(":")[0]), log.read_text()


def test_the_next_job_continues_a_training_that_the_end_of_the_first_has_stopped(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    cluster.settle()
    project = make_project(tmp_path / "project", 12, **SETTINGS, cluster__train__nodes=2)
    (project.folder / "slow.py").write_text(TASK.format(slow=project.folder / "SLOW"))
    shape = ("--layers", "2", "--dim", "16", "--heads", "2", "--out", "esm2_small.pt")
    assert project.types("weights", "synth", *shape).code == 0
    whole = Project(shutil.copytree(project.folder, tmp_path / "whole"))

    (project.folder / "SLOW").touch()
    code, said = submits(cluster, project, 4)
    assert code == 75, said
    assert StatusReader(project.run).read().state is State.STOPPED
    (project.folder / "SLOW").unlink()
    before = {path.name for path in project.folder.glob("models/*/checkpoints/step-*")}
    assert before, said
    code, said = submits(cluster, project, 15, "resume")
    assert code == 0, said
    assert StatusReader(project.run).read().state is State.DONE

    assert whole.submits("train", "--set=cluster.train.nodes=1", "--set=cluster.train.ranks=2").code == 0
    assert model(project) == model(whole)


def model(project: Project) -> dict[str, bytes]:
    (folder,) = (project.folder / "models").iterdir()
    return weights(folder, STEPS)
