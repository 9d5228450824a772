"""Two encoders on a real cluster: each has jobs of its own, and being killed midway costs nothing of either."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from pipeline.journal.run_folder import runs_in
from pipeline.store.cache_folder import CacheFolder
from tests.testkit.cluster import Cluster
from tests.testkit.cluster.cluster import SEARCH_PATH
from tests.testkit.slurm_runs import PIPELINE, Project, has_begun, kill, make_project, processes_of, until

pytestmark = [pytest.mark.slurm, pytest.mark.fault, pytest.mark.nightly]
ITEMS = 5
SUBMIT = ("submit", "--stage", "embed", "--executor", "slurm", "--follow")


@pytest.fixture
def project(tmp_path: Path, healthy: Cluster) -> Project:
    also = {"small": {"weights": "esm2_small.pt", "storage": "fp16"}}
    settings = {"embed__weights": "esm2_large.pt", "embed__also": also, "cluster__embed__items_per_task": 4}
    made = make_project(tmp_path / "project", items=ITEMS, **settings)
    for name, dim in (("large", 256), ("small", 16)):
        shape = ("--layers", "2", "--dim", str(dim), "--heads", "2", "--out", f"esm2_{name}.pt")
        assert made.types("weights", "synth", *shape).code == 0
    return made


def test_two_encoders_that_are_killed_midway_go_on_and_do_nothing_twice(project: Project) -> None:
    known = {**os.environ, "PATH": f"{PIPELINE.parent}:{SEARCH_PATH}"}
    with subprocess.Popen([PIPELINE, *SUBMIT], cwd=project.folder, env=known, start_new_session=True) as login:
        until("a run", lambda: runs_in(project.folder / "runs"))
        run = project.newest
        until("a task that embeds", lambda: has_begun(run, "embed"), 120, run.story)
        os.killpg(login.pid, signal.SIGKILL)
        assert [pid for pid in processes_of(run) if kill(pid)]
    run.ends()

    store = CacheFolder(project.folder / "cache").kind("embed")
    made = Counter((record.meta["weights"], record.meta["text"]) for record in store.read(store.keys()))
    assert len(made) == 2 * 2 * ITEMS
    assert set(made.values()) == {1}
    stage = run.now().stages["embed"]
    assert {name: part["missing"] for name, part in stage.parts.items()} == {"main": 10, "small": 10}
    asked = {
        name: {job.ask.mem_bytes for job in stage.jobs.values() if job.recipe == plan.recipe}
        for name, plan in stage.own.items()
    }
    assert min(asked["main"]) > max(asked["small"])
    assert {part.of: len(part.work) for part in stage.by_part()} == {"main": 3, "small": 3}

    again = project.types(*SUBMIT)
    assert again.code == 0, again.err
    stage = project.newest.now().stages["embed"]
    assert {name: (part["cached"], part["missing"]) for name, part in stage.parts.items()} == {
        "main": (10, 0),
        "small": (10, 0),
    }
    assert stage.jobs == {}
    told = project.types("report", run.name)
    assert "embed main" in told.said
    assert "embed small" in told.said
