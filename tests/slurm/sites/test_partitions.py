"""Several partitions to go to, and what accounts and QOS allow, on a real cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.job_spec import parse_ranges
from pipeline.journal.ledger import LedgerReader
from pipeline.journal.run_status import State
from pipeline.records import EventKind
from tests.testkit.cluster import Cluster
from tests.testkit.cluster.config import ACCOUNT
from tests.testkit.slurm_runs import EATS, LINGERS, Project, Run, make_project

pytestmark = pytest.mark.slurm

Make = Callable[..., Project]
ONE_EACH = {"cluster__scan__items_per_task": 1}
SMALL_MEM_MB = 1000  # of which the 576 MiB that are planned fit once, and not twice
TWO = {"cluster__slurm__partitions": ["small", "main"]}


@pytest.fixture
def make(tmp_path: Path, healthy: Cluster) -> Iterator[Make]:
    """Return a function that makes a project."""

    def made(*given: Any, **settings: Any) -> Project:
        return make_project(tmp_path / "project", *given, **settings)

    yield made
    (tmp_path / "project" / "mischief" / "go").touch()


@pytest.fixture
def small(healthy: Cluster) -> Iterator[Cluster]:
    """Return the cluster with a partition of a minute and little memory; it goes with the test."""
    nodes = ",".join(healthy.nodes)
    words = ["PartitionName=small", f"Nodes={nodes}", "MaxTime=1", f"MaxMemPerNode={SMALL_MEM_MB}", "State=UP"]
    assert healthy.run("scontrol", "create", *words).returncode == 0
    yield healthy
    healthy.settle()
    assert healthy.run("scontrol", "delete", "PartitionName=small").returncode == 0


@pytest.fixture
def walled(healthy: Cluster) -> Iterator[Cluster]:
    """Return the cluster with a QOS of few minutes and little memory."""
    limits = ["MaxWall=00:05:00", "GrpTRES=mem=900M"]
    managed(healthy, "add", "qos", "walled", *limits)
    managed(healthy, "modify", "user", "root", "set", "qos+=walled")
    yield healthy
    healthy.settle()
    managed(healthy, "modify", "user", "root", "set", "qos-=walled")
    managed(healthy, "delete", "qos", "walled")


@pytest.fixture
def narrow(healthy: Cluster) -> Iterator[Cluster]:
    """Return the cluster with an association that has two places in the queue."""
    managed(healthy, "modify", "user", "root", "where", f"account={ACCOUNT}", "set", "MaxSubmitJobs=2")
    yield healthy
    healthy.settle()
    managed(healthy, "modify", "user", "root", "where", f"account={ACCOUNT}", "set", "MaxSubmitJobs=-1")


def managed(cluster: Cluster, *words: str) -> None:
    """Change the accounting database."""
    done = cluster.run("sacctmgr", "-i", *words)
    assert done.returncode == 0, done.stdout + done.stderr


def asks(run: Run) -> list[tuple[str, str, int]]:
    """Return the tasks, the partition and the MiB of each job of a run."""
    return [(job["tasks"], job["ask"]["partition"], job["ask"]["mem_bytes"] >> 20) for job in run.stage()["jobs"]]


def refused(run: Run) -> list[dict[str, Any]]:
    """Return the submissions that the scheduler has refused."""
    return [event.data for event in LedgerReader(run.folder).fresh() if event.kind is EventKind.JOB_REFUSED]


@pytest.mark.nightly
def test_what_outgrows_the_memory_or_the_time_of_its_partition_ends_in_the_next(make: Make, small: Cluster) -> None:
    acts = {"c1.pdb": EATS, "c2.pdb": LINGERS}
    project = make(4, acts, cluster__scan__time="1m", **TWO, **ONE_EACH)
    run = project.submits()
    run.ends()
    assert run.stage()["census"]["accepted"] == 4
    causes = {failed["task"]: (failed["cause"], failed["then"]) for failed in run.stage()["failures"]}
    assert causes == {
        1: ("host_oom", "retry with 1152MiB of memory, in main, not small"),
        2: ("interrupted", "continues with 2m, in main, not small"),
    }
    assert asks(run)[0] == ("0-3", "small", 576)
    assert sorted(asks(run)[1:]) == [("1", "main", 1152), ("2", "main", 576)]
    placed = small.run("sacct", "-nPX", "--format=JobID,Partition", "-j", ",".join(jobs_of(run))).stdout.split()
    assert Counter(line.partition("|")[2] for line in placed) == {"small": 4, "main": 2}


def jobs_of(run: Run) -> list[str]:
    return [job["id"] for job in run.stage()["jobs"]]


@pytest.mark.nightly
def test_the_plan_says_which_partition_and_why(make: Make, small: Cluster) -> None:
    project = make(2, cluster__scan__time="1m", **TWO)
    planned = project.types("plan", "scan", "-v", "--set", "cluster.executor=slurm").said
    assert "small: the first in the list that fits" in planned, planned
    larger = project.types("plan", "scan", "-v", "--set=cluster.executor=slurm", "--set=cluster.scan.mem=2GiB").said
    assert "main: the first in the list that fits; small gives at most 1000MiB" in larger, larger
    dear = ["--set", "cluster.slurm.prices={small: 3}", "--dry-run"]
    script = project.types("submit", "--stage", "scan", "--executor", "slurm", *dear)
    assert "scan: partition main: the cheapest that fits, price 1" in script.said, script.said
    assert script.out.count("#SBATCH --partition=main") == 2


@pytest.mark.nightly
def test_an_ask_beyond_the_wall_or_the_memory_of_a_qos_is_refused_by_the_limits_name(
    make: Make, walled: Cluster
) -> None:
    project = make(2, cluster__slurm__qos="walled", cluster__supervisor__time="5m", cluster__supervisor__mem="200MiB")
    submit = ("submit", "--stage", "scan", "--executor", "slurm")
    long = project.types(*submit)
    assert long.code == 6
    assert "each task asks for 01:00:00; MaxWall of QOS walled allows 00:05:00" in long.said
    assert "--set cluster.scan.time=00:05:00" in long.said
    large = project.types(*submit, "--set", "cluster.scan.time=4m", "--set", "cluster.scan.mem=2GiB")
    assert large.code == 6
    assert "each task asks for 2GiB of memory; GrpTRES(mem) of QOS walled allows 900MiB" in large.said


@pytest.mark.nightly
def test_memory_and_time_grow_up_to_what_a_qos_allows_and_no_further(make: Make, walled: Cluster) -> None:
    settings = {
        "cluster__slurm__qos": "walled",
        "cluster__supervisor__time": "5m",
        "cluster__supervisor__mem": "200MiB",
    }
    project = make(2, {"c1.pdb": EATS}, cluster__scan__time="4m", **settings, **ONE_EACH)
    run = project.submits()
    run.ends()
    assert [(job["tasks"], job["ask"]["mem_bytes"] >> 20) for job in run.stage()["jobs"]] == [("0-1", 576), ("1", 900)]
    assert run.stage()["census"]["accepted"] == 2


@pytest.mark.nightly
def test_two_places_in_the_queue_are_never_asked_for_a_third_and_all_tasks_end(make: Make, narrow: Cluster) -> None:
    project = make(5, cluster__supervisor__where="login", **ONE_EACH)
    run = project.submits()
    run.ends()
    assert refused(run) == []
    assert "wait for queue slots" not in run.story()
    assert {len(parse_ranges(job["tasks"])) for job in run.stage()["jobs"]} <= {1, 2}
    assert run.stage()["census"]["accepted"] == 5


def test_a_queue_without_a_place_for_supervisors_is_refused_with_what_to_change(make: Make, narrow: Cluster) -> None:
    done = make(1).types("submit", "--stage", "scan", "--executor", "slurm")
    assert done.code == 6
    assert f"MaxSubmitJobs of the association {ACCOUNT}/root allows 2 jobs in the queue" in done.said, done.said
    assert "--set cluster.supervisor.where=login" in done.said


@pytest.mark.nightly
def test_a_run_stops_before_its_budget_is_passed_and_what_it_finished_is_kept(make: Make, healthy: Cluster) -> None:
    """A task may take two minutes of a core; beside the first there are two seconds, which it uses up."""
    few = {"cluster__budget": "0.034 core-hours", "cluster__scan__time": "1m", "cluster__scan__gpus": 1}
    project = make(5, cluster__supervisor__where="login", **few, **ONE_EACH)
    run = project.submits()
    ended = run.ends(State.FAILED)
    assert "could pass the budget; budget: 0.0" in ended["error"], ended["error"]
    assert "--set 'cluster.budget=1 core-hours'" in ended["error"]
    assert refused(run) == []
    assert {len(parse_ranges(job["tasks"])) for job in run.stage()["jobs"]} == {1}
    assert 1 <= len(run.project.records()["scan"]) < 5
    took = healthy.run("sacct", "-nPX", "--format=ElapsedRaw,AllocCPUS", "-j", ",".join(jobs_of(run))).stdout.split()
    assert sum(int(line.split("|")[0]) * int(line.split("|")[1]) for line in took) <= 0.034 * 3600
    assert "budget: 0.0" in project.types("status").said
    assert "of 0.034 core-hours used" in project.types("report").said

    more = project.submits("scan", "--set", "cluster.budget=1 core-hours")
    more.ends()
    assert len(project.records()["scan"]) == 5
    assert more.reported()["budget"]["used"] >= run.reported()["budget"]["used"]
