"""Nothing waits in silence: what keeps jobs of a run on the real cluster is seen, told once, and told to be over."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pipeline.journal.run_status import State
from tests.testkit.cluster import Cluster
from tests.testkit.slurm_runs import Project, Run, make_project, until

pytestmark = pytest.mark.slurm

TELL = """\
import json, sys
with open(sys.argv[1], "a") as file:
    file.write(json.dumps(sys.argv[2:]) + chr(10))
"""


def slurm(cluster: Cluster, *words: str) -> str:
    done = cluster.run(*words)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def telling(folder: Path, **settings: Any) -> Project:
    """Make a project of which people are told; a supervisor on the login node looks at its jobs every few seconds."""
    program = folder / "tell.py"
    program.write_text(TELL)
    command = [sys.executable, str(program), str(folder / "told")]
    looks = {"cluster__supervisor__where": "login", "cluster__supervisor__watch": "3s"}
    return make_project(folder / "p", 2, cluster__notify__command=command, **looks, **settings)


def told(project: Project, state: str) -> list[list[str]]:
    """Return what people were told of a state: run, stage, state, message."""
    path = project.folder.parent / "told"
    lines = path.read_text().splitlines() if path.exists() else []
    return [words for words in map(json.loads, lines) if words[2] == state]


def jobs_of(run: Run, cluster: Cluster, kind: str = "scan") -> list[str]:
    until("its jobs to be queued", lambda: run.jobs(cluster, kind), story=run.story)
    return sorted({row["array"] for row in run.jobs(cluster, kind)})


class Obstacle(NamedTuple):
    """What keeps jobs from starting: Slurm's word for it, and how it is put in the way and taken out of it."""

    reason: str
    put: Callable[[Cluster, Run], object]
    take: Callable[[Cluster, Run], object]


def hold(cluster: Cluster, run: Run) -> None:
    slurm(cluster, "scontrol", "uhold", *jobs_of(run, cluster))


def release(cluster: Cluster, run: Run) -> None:
    slurm(cluster, "scontrol", "release", *jobs_of(run, cluster))


def depend(cluster: Cluster, run: Run) -> None:
    """Let the tasks depend on the good end of a job that was cancelled."""
    first = slurm(cluster, "sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true").strip()
    for job in jobs_of(run, cluster):
        slurm(cluster, "scontrol", "update", f"JobId={job}", f"Dependency=afterok:{first}")
    slurm(cluster, "scancel", first)


def free(cluster: Cluster, run: Run) -> None:
    for job in jobs_of(run, cluster):
        slurm(cluster, "scontrol", "update", f"JobId={job}", "Dependency=")


def partition(state: str) -> Callable[[Cluster, Run], object]:
    return lambda cluster, _: slurm(cluster, "scontrol", "update", "PartitionName=urgent", f"State={state}")


def reserve(cluster: Cluster, _run: Run) -> None:
    words = (
        "ReservationName=upkeep",
        "StartTime=now",
        "Duration=60",
        "Nodes=ALL",
        "Users=root",
        "Flags=MAINT,IGNORE_JOBS",
    )
    slurm(cluster, "scontrol", "create", "reservation", *words)


def unreserve(cluster: Cluster, _run: Run) -> None:
    slurm(cluster, "scontrol", "delete", "ReservationName=upkeep")


def cores(most: str) -> Callable[[Cluster, Run], object]:
    return lambda cluster, _: slurm(cluster, "sacctmgr", "-i", "modify", "user", "root", "set", f"GrpTRES=cpu={most}")


OBSTACLES = {
    "held": Obstacle("JobHeldUser", hold, release),
    "never": Obstacle("DependencyNeverSatisfied", depend, free),
    "down": Obstacle("PartitionDown", partition("DOWN"), partition("UP")),
    "inactive": Obstacle("PartitionInactive", partition("INACTIVE"), partition("UP")),
    "reserved": Obstacle("ReqNodeNotAvail", reserve, unreserve),
    "limit": Obstacle("AssocGrpCpuLimit", cores("0"), cores("-1")),
}


@pytest.fixture
def busy(healthy: Cluster) -> Iterator[Cluster]:
    """Return the cluster with another's job on all of its nodes, until `lets_start`."""
    words = ("--parsable", f"--nodes={len(healthy.nodes)}", "--exclusive", "--time=10", "--output=/dev/null")
    slurm(healthy, "sbatch", *words, "--job-name=another", "--wrap=sleep 600")
    names = ("squeue", "-h", "--name=another", "--states=RUNNING")
    until("the nodes to be taken", lambda: slurm(healthy, *names).strip())
    yield healthy
    healthy.run("scancel", "--name=another")
    healthy.run("scontrol", "update", "PartitionName=urgent", "State=UP")
    healthy.run("scontrol", "delete", "ReservationName=upkeep")
    healthy.run("sacctmgr", "-i", "modify", "user", "root", "set", "GrpTRES=cpu=-1")


def lets_start(cluster: Cluster) -> None:
    slurm(cluster, "scancel", "--name=another")


@pytest.mark.nightly
@pytest.mark.parametrize("name", OBSTACLES)
def test_what_keeps_jobs_is_seen_told_once_and_told_to_be_over(busy: Cluster, tmp_path: Path, name: str) -> None:
    cluster, obstacle = busy, OBSTACLES[name]
    project = telling(tmp_path, cluster__scan__partition="urgent")
    run = project.submits()
    jobs_of(run, cluster)
    obstacle.put(cluster, run)
    lets_start(cluster)

    def is_told() -> bool:
        return any(obstacle.reason in words[3] for words in told(project, "waiting"))

    until(f"{obstacle.reason} to be told", is_told, story=run.story)
    shown = project.types("status", run.name).out
    assert f"({obstacle.reason})" in shown
    assert "next: " in shown
    waits = {wait["reason"]: wait for wait in run.reported()["waits"]}
    assert waits[obstacle.reason]["until"] == 0
    assert waits[obstacle.reason]["remedy"]

    obstacle.take(cluster, run)
    ended = run.ends(State.DONE)
    begun = [words for words in told(project, "waiting") if obstacle.reason in words[3] and words[1] == "scan"]
    assert len(begun) == 1, begun
    over = [words for words in told(project, "waited") if obstacle.reason in words[3] and words[1] == "scan"]
    assert len(over) == 1, over
    assert all(wait["until"] >= wait["since"] > 0 for wait in ended["waits"])
    assert f"({obstacle.reason})" in project.types("status", run.name, "-v").out, "it is kept"


@pytest.mark.nightly
def test_a_visit_that_is_held_is_shown(busy: Cluster, tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", 2)
    run = project.submits()
    (visit,) = run.now().successors
    slurm(busy, "scontrol", "uhold", visit)
    until("the hold to be shown", lambda: "JobHeldUser" in project.types("status", run.name).out, story=run.story)
    assert f"next: scontrol release {visit}" in project.types("status", run.name).out
    lets_start(busy)
    slurm(busy, "scontrol", "release", visit)
    run.ends(State.DONE)


@pytest.mark.nightly
def test_a_cancelled_run_leaves_nothing_in_the_queue(busy: Cluster, tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", 2)
    run = project.submits()
    assert {row["name"].rsplit("-", 2)[1] for row in run.jobs(busy)} == {"scan", "supervise"}
    assert project.types("cancel", run.name, "--yes").code == 0
    until("the queue to be empty of it", lambda: not run.jobs(busy), story=run.story)
