"""Whatever dies, runs out or is taken away on a real cluster: the right verdict, a complete result or the right error.

The runs that need no hand are begun together; those that meet a time limit have the first node for themselves.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.journal.run_status import State
from tests.testkit.cluster import Cluster
from tests.testkit.cluster.config import TINY_MAX_SUBMIT
from tests.testkit.slurm_runs import DEAF, DIES, EATS, LINGERS, Project, Run, at_night, make_project, until

pytestmark = [pytest.mark.slurm, pytest.mark.fault]

Make = Callable[..., Project]
MIB = 1 << 20
ONE_EACH = {"cluster__scan__items_per_task": 1}
HALF_MAY_FAIL = {"data__max_rejected_fraction": 0.5}
A_MINUTE = {"cluster__scan__time": "1m", "cluster__scan__items_per_task": 2}
BEGUN: dict[str, tuple[int, dict[str, str], dict[str, Any]]] = {
    "limit heeded": (2, {"c1.pdb": LINGERS}, A_MINUTE),
    "limit unheard": (2, {"c1.pdb": DEAF}, A_MINUTE),
    "memory": (3, {"c1.pdb": EATS}, ONE_EACH),
    "poison": (6, {"c4.pdb": DIES}, {**HALF_MAY_FAIL, "cluster__scan__items_per_task": 3}),
    "much poison": (2, {"c1.pdb": DIES}, {"cluster__scan__items_per_task": 2}),
}


@pytest.fixture(scope="module", autouse=True)
def settled(cluster: Cluster) -> None:
    """Begin with an idle cluster, once: the slow runs go on beside the other tests."""
    cluster.settle()


@pytest.fixture(scope="module", autouse=True)
def begun(
    settled: None, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Run]:
    """Begin at once all runs that go on without a hand; those that meet a time limit on a node of their own."""
    runs = {}
    for name, (items, acts, settings) in BEGUN.items():
        if name != "poison" and not at_night(request):
            continue
        place = "--nodelist" if "limit" in name else "--exclude"
        runs[name] = make_project(
            tmp_path_factory.mktemp("begun") / "project",
            items,
            acts,
            cluster__slurm__options=[f"{place}={cluster.nodes[0]}"],
            **settings,
        ).submits()
    return runs


@pytest.fixture
def make(tmp_path: Path, cluster: Cluster) -> Iterator[Make]:
    """Return a function that makes a project whose jobs stay off the node of the slow runs."""
    cluster.start()

    def made(*given: Any, **settings: Any) -> Project:
        away = {"cluster__slurm__options": [f"--exclude={cluster.nodes[0]}"]}
        return make_project(tmp_path / "project", *given, **{**away, **settings})

    yield made
    (tmp_path / "project" / "mischief" / "go").touch()


def failures(run: Run) -> list[tuple[int, str]]:
    """Return which tasks failed, and of what."""
    return [(one["task"], one["cause"]) for one in run.stage()["failures"]]


def complete(run: Run, items: int) -> None:
    """Wait for a run's end and check that every item is accepted and in the cache."""
    run.ends()
    census = run.stage()["census"]
    assert (census["items"], census["accepted"], census["undone"]) == (items, items, 0), run.story()
    assert len(run.project.records()["scan"]) == items


@pytest.mark.nightly
def test_a_task_above_its_memory_alone_gets_more_and_the_next_run_asks_for_enough(begun: dict[str, Run]) -> None:
    run, project = begun["memory"], begun["memory"].project
    complete(run, 3)
    assert failures(run) == [(1, "host_oom")]
    (failed,) = run.stage()["failures"]
    jobs = [(job["tasks"], job["ask"]["mem_bytes"] // MIB) for job in run.stage()["jobs"]]
    assert jobs == [("0-2", 576), ("1", 1152)]
    assert "1152MiB" in failed["then"]

    fresh = ("--set", "cache.root=fresh")
    second = project.submits("scan", *fresh)
    second.ends()
    assert failures(second) == []
    assert second.stage()["jobs"][0]["ask"]["mem_bytes"] // MIB in range(750, 1152)
    assert project.records("fresh") == project.records()


VISITS_END: dict[str, Callable[[Cluster, dict[str, str], int], object]] = {
    "its process is killed": lambda _cluster, _job, pid: os.kill(pid, signal.SIGKILL),
    "all of its job is killed": lambda cluster, job, _: cluster.run("scancel", "--full", "--signal=KILL", job["array"]),
    "it is cancelled": lambda cluster, job, _: cluster.run("scancel", job["array"]),
    "it is requeued": lambda cluster, job, _: cluster.run("scontrol", "requeue", job["array"]),
    "its node is lost": lambda cluster, job, _: cluster.kill_node(job["node"]),
}


@pytest.mark.nightly
@pytest.mark.parametrize("how", VISITS_END)
def test_however_a_visit_ends_in_mid_work_the_next_one_goes_on(make: Make, cluster: Cluster, how: str) -> None:
    project = make(3, {"scan.shards.json": LINGERS, "c1.pdb": DIES}, **HALF_MAY_FAIL, **ONE_EACH)
    run = project.submits()
    run.arrives_at("scan.shards.json")  # it has written down some of what it saw, and has repaired nothing yet
    following, visit = sorted(run.jobs(cluster), key=lambda job: job["state"])
    assert (visit["state"], following["state"]) == ("RUNNING", "PENDING")
    VISITS_END[how](cluster, visit, project.lingering("scan.shards.json"))
    run.ends()
    if how == "its node is lost":
        cluster.revive_node(visit["node"])
    assert run.stage()["census"]["accepted"] == 2
    assert run.stage()["census"]["rejected"] == {"killed_its_task": 1}
    assert failures(run) == [(1, "crashed"), (1, "crashed")]
    until("no job of the run", lambda: not run.jobs(cluster), story=run.story)


@pytest.mark.nightly
def test_a_visit_for_whose_successor_the_queue_has_no_place_waits_for_one(make: Make, cluster: Cluster) -> None:
    project = make(2, {"c1.pdb": LINGERS}, cluster__supervisor__qos="tiny", **ONE_EACH)
    run = project.submits()
    run.arrives_at("c1.pdb")
    (visit,) = run.jobs(cluster, "supervise")
    for _ in range(TINY_MAX_SUBMIT - 1):
        assert cluster.run("sbatch", "--qos=tiny", "--hold", "--job-name=others", "--wrap=true").returncode == 0
    project.lets_go()
    asked = ("squeue", "--noheader", f"--jobs={visit['array']}", "--states=PENDING", "--format=%r")
    until("it to begin again", lambda: "BeginTime" in cluster.run(*asked).stdout, story=run.story)
    assert run.reported()["state"] == "running"
    cluster.run("scancel", "--name=others")
    complete(run, 2)
    assert failures(run) == []


@pytest.mark.nightly
def test_resume_does_not_undo_that_somebody_cancelled_the_tasks_too(make: Make, cluster: Cluster) -> None:
    project = make(3, {"c1.pdb": LINGERS}, **ONE_EACH)
    run = project.submits()
    run.arrives_at("c1.pdb")
    for kind in ("supervise", "scan"):
        cluster.run("scancel", *{job["array"] for job in run.jobs(cluster, kind)})
    until("no job of the run", lambda: not run.jobs(cluster))
    assert run.reported()["state"] == "abandoned"
    resumed = project.types("resume")  # which fails at once where the scheduler tells how they ended, else goes on
    assert resumed.code in (0, 7), resumed
    state = run.ends(State.FAILED)  # somebody cancelled a task: that is not undone behind their back
    assert state["exit_code"] == 7
    assert "cancelled" in state["error"]


@pytest.mark.nightly
def test_a_submission_killed_before_it_heard_the_number_of_its_job_is_taken_up_and_not_doubled(make: Make) -> None:
    project = make(3, {"submitted": LINGERS}, **ONE_EACH)
    with project.begins("submit", "--stage", "scan", "--executor", "slurm"):
        until("a job in the queue", lambda: project.has_arrived("submitted"))
        os.kill(project.lingering("submitted"), signal.SIGKILL)
    run = project.newest
    assert run.reported()["state"] == "abandoned"
    assert project.types("resume").code == 0
    complete(run, 3)
    assert [job["tasks"] for job in run.stage()["jobs"]] == ["0-2"]
    assert Counter(one["file"] for one in project.seen()) == {f"c{number}.pdb": 1 for number in range(3)}


def test_a_poison_file_is_found_and_left_out_and_everything_else_is_done(begun: dict[str, Run]) -> None:
    run = begun["poison"]
    ended = run.ends()
    assert ended["exit_code"] == 0
    census = run.stage()["census"]
    assert (census["accepted"], census["rejected"]) == (5, {"killed_its_task": 1})
    assert [one["names"] for one in run.stage()["left_out"]] == [["c4"]]
    assert census["examples"]["killed_its_task"].startswith("c4")


@pytest.mark.nightly
def test_too_much_poison_is_an_error_of_the_data(begun: dict[str, Run]) -> None:
    run = begun["much poison"]
    ended = run.ends(State.FAILED)
    assert ended["exit_code"] == 3
    assert "max_rejected_fraction" in ended["error"]


@pytest.mark.nightly
def test_a_cancelled_task_ends_the_run_and_the_command_it_names_completes_it(make: Make, cluster: Cluster) -> None:
    project = make(4, {"c1.pdb": LINGERS}, **ONE_EACH)
    run = project.submits()
    run.arrives_at("c1.pdb")
    (job,) = {row["array"] for row in run.jobs(cluster, "scan")}
    assert cluster.run("scancel", f"{job}_1").returncode == 0
    ended = run.ends(State.FAILED)
    assert ended["exit_code"] == 7
    assert "CANCELLED" in ended["error"]
    command = re.search(r"next: (pipeline submit [^(]*)", ended["error"])
    assert command, ended["error"]
    again = project.types(*shlex.split(command[1])[1:])
    assert again.code == 0, again.err
    assert project.newest.name != run.name
    complete(project.newest, 4)
    assert (project.newest.stage()["cached"], project.newest.stage()["missing"]) == (3, 1)


@pytest.mark.nightly
def test_a_preempted_task_is_begun_again(make: Make, cluster: Cluster) -> None:
    project = make(2, {"c1.pdb": LINGERS}, cluster__scan__partition="preempt", **ONE_EACH)
    run = project.submits()
    run.arrives_at("c1.pdb")
    node = run.node_of(cluster, 1)
    urgent = ["--partition=urgent", "--exclusive", f"--nodelist={node}", "--output=/dev/null", "--wrap=true"]
    assert cluster.run("sbatch", *urgent).returncode == 0
    complete(run, 2)
    assert len([one for one in project.seen() if one["file"] == "c1.pdb"]) == 2


@pytest.mark.nightly
def test_a_controller_that_is_away_while_tasks_end_changes_nothing(make: Make, cluster: Cluster) -> None:
    project = make(3, {"c1.pdb": LINGERS}, **ONE_EACH)
    run = project.submits()
    run.arrives_at("c1.pdb")
    cluster.stop_controller()
    project.lets_go()
    cluster.start_controller()
    complete(run, 3)
    assert failures(run) == []


@pytest.mark.nightly
def test_a_worker_that_heeds_the_warning_of_its_time_limit_goes_on_where_it_stopped(begun: dict[str, Run]) -> None:
    run = begun["limit heeded"]
    complete(run, 2)
    first, second = sorted((one for one in run.project.seen() if one["file"] == "c1.pdb"), key=lambda one: one["pid"])
    assert first["words"][:3] == second["words"][:3]
    assert failures(run) == []


@pytest.mark.nightly
def test_a_task_killed_at_its_time_limit_gets_more_time(begun: dict[str, Run]) -> None:
    run = begun["limit unheard"]
    complete(run, 2)
    assert failures(run) == [(0, "timeout")]
    assert [job["ask"]["time_s"] for job in run.stage()["jobs"]] == [60, 120]


@pytest.mark.nightly
def test_a_node_that_dies_with_a_task_on_it_changes_nothing(make: Make, cluster: Cluster) -> None:
    project = make(3, {"c1.pdb": LINGERS}, **ONE_EACH)
    run = project.submits()
    run.arrives_at("c1.pdb")
    node = run.node_of(cluster, 1)
    cluster.kill_node(node)
    complete(run, 3)
    cluster.revive_node(node)
    assert {cause for _, cause in failures(run)} <= {"node"}


@pytest.mark.nightly
def test_a_run_without_accounting_has_the_same_verdicts_and_result(make: Make, cluster: Cluster) -> None:
    cluster.stop_accounting()
    assert cluster.run("sacct").returncode != 0
    run = make(3, {"c1.pdb": EATS}, **ONE_EACH).submits()
    complete(run, 3)
    assert failures(run) == [(1, "host_oom")]
    assert [job["tasks"] for job in run.stage()["jobs"]] == ["0-2", "1"]
    cluster.start_accounting()


WORKERS = '[ "${{SLURM_JOB_NAME##*-supervise-*}}" = "" ] || '
BREAKS: dict[str, tuple[str, str]] = {
    "setup": ('[ "$SLURMD_NODENAME" != {0} ] || module load nowhere', "module: command not found"),
    "two nodes": (WORKERS + "case $SLURMD_NODENAME in {0}) module load nowhere;; {1}) exit 1;; esac", "exit code 1"),
    "a minute": (WORKERS + "[ $(date +%s) -gt {until} ] || exit 2", "exit code 2"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("broken", BREAKS)
def test_nodes_on_which_no_worker_starts_cost_a_run_nothing(tmp_path: Path, healthy: Cluster, broken: str) -> None:
    """Where `setup` fails, that holds for supervisors, too."""
    setup, said = BREAKS[broken]
    lines = [setup.format(*healthy.nodes, until=int(time.time()) + 60)]
    run = make_project(tmp_path / "project", 12, cluster__slurm__setup=lines, **ONE_EACH).submits()
    complete(run, 12)
    assert {cause for _, cause in failures(run)} == {"node"}
    assert any(said in one["reason"] for one in run.stage()["failures"])


@pytest.mark.nightly
def test_a_worker_that_starts_nowhere_fails_its_run_with_what_it_printed(tmp_path: Path, healthy: Cluster) -> None:
    setup = [WORKERS.format() + "module load nowhere"]
    run = make_project(tmp_path / "project", 3, cluster__slurm__setup=setup, **ONE_EACH).submits()
    assert "module: command not found" in run.ends(State.FAILED)["error"]
    assert len(failures(run)) == 9
