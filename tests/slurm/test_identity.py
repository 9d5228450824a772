"""A job is known by its cluster, number and name: a stranger's job is never shown, cancelled or waited for as ours."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.testkit.cluster import Cluster
from tests.testkit.slurm_runs import LINGERS, Project, until

pytestmark = [pytest.mark.slurm, pytest.mark.nightly]

Make = Callable[..., Project]
STRANGERS = 40


@pytest.fixture
def second(cluster: Cluster) -> Iterator[Cluster]:
    """Return a second cluster on this machine."""
    second = Cluster(cluster.folder.with_name(f"{cluster.folder.name}-second"))
    second.start()
    yield second
    second.stop()


@pytest.mark.fault
def test_a_controller_that_numbers_again_from_1_makes_no_strangers_job_ours(make: Make, healthy: Cluster) -> None:
    healthy.lose_state()
    project = make(3, {"c1.pdb": LINGERS}, cluster__scan__items_per_task=1)
    run = project.submits()
    run.arrives_at("c1.pdb")
    healthy.lose_state()
    for _ in range(STRANGERS):
        assert healthy.run("sbatch", "--hold", "--array=0-2", "--output=/dev/null", "--wrap=true").returncode == 0
    assert {*run.now().queued_as} <= {str(number) for number in range(1, STRANGERS + 1)}

    told = run.reported()
    assert (told["state"], [wait["reason"] for wait in told["waits"]]) == ("abandoned", ["NoSupervisor"])
    assert project.types("cancel", "--yes").code == 0
    assert project.types("resume").code == 0
    project.lets_go()
    run.ends()
    assert run.stage()["census"]["accepted"] == 3
    left = healthy.run("squeue", "--noheader", "--array", "--name=wrap").stdout.splitlines()
    assert len(left) == 3 * STRANGERS


def test_a_run_of_another_cluster_over_the_same_folder_is_shown_as_that_and_left_alone(
    make: Make, healthy: Cluster, second: Cluster
) -> None:
    project = make(3, {"c1.pdb": LINGERS}, cluster__scan__items_per_task=1)
    run = project.submits()
    run.arrives_at("c1.pdb")
    there = second.env()
    told = project.types("status", **there)
    assert "running" in told.out
    for name in (healthy.folder.name, second.folder.name):
        assert name in told.said
    for words in (("resume",), ("cancel", "--yes")):
        refused = project.types(*words, **there)
        assert refused.code == 2, refused
        assert f"pipeline {words[0]} {run.name} (on a login node of {healthy.folder.name})" in refused.said
    visit = [sys.executable, "-m", "pipeline.engine.supervisor", str(run.folder.path), "--visit", "--now"]
    assert subprocess.run(visit, env={**there, "PATH": project.programs}, check=False).returncode == 2
    joined = project.types("submit", "--stage", "scan", "--executor", "slurm", **there)
    assert (joined.code, run.name in joined.out) == (0, True), joined
    assert second.run("squeue", "--noheader", "--states=all").stdout == ""
    project.lets_go()
    run.ends()
    until("no job of the run", lambda: not run.jobs(healthy))
    assert [path.name for path in sorted(run.folder.claims.iterdir())] == ["000001", "000002"]
