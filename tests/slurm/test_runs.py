"""Runs on a real cluster, typed as people type them: what comes of them, what each task is given, what is refused."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.journal.run_folder import runs_in
from pipeline.journal.run_status import State
from tests.conftest import ROOT
from tests.testkit.cluster import Cluster
from tests.testkit.cluster.config import MAX_ARRAY_SIZE, TINY_MAX_SUBMIT
from tests.testkit.command import Typed
from tests.testkit.slurm_runs import (
    LINGERS,
    PIPELINE,
    Project,
    Run,
    has_begun,
    kill,
    make_project,
    processes_of,
    strangers,
    until,
)

pytestmark = pytest.mark.slurm

Make = Callable[..., Project]
ONE_EACH = {"cluster__scan__items_per_task": 1}
SUBMIT = ("submit", "--stage", "scan", "--executor", "slurm")
COMPLEXES = 3


@pytest.fixture(scope="module")
def real(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, structures: Path) -> Project:
    """A project of real complexes, with a small random encoder."""
    cluster.settle()
    project = make_project(
        tmp_path_factory.mktemp("real") / "project",
        items=0,
        data__path=str(structures / "complexes"),
        data__pattern=["*.pdb"],
        embed__weights="esm2_small.pt",
        structures__max_file_bytes="8MiB",
        cluster__scan__items_per_task=1,
        cluster__embed__items_per_task=2,
    )
    shape = ("--layers", "2", "--dim", "32", "--heads", "2", "--out", "esm2_small.pt")
    assert project.types("weights", "synth", *shape).code == 0
    return project


@pytest.fixture(scope="module")
def undisturbed(real: Project) -> Run:
    """All stages of the real complexes, by one submission that returns and leaves nothing behind but jobs."""
    run = real.submits("all")
    assert strangers(run) == []
    run.ends()
    return run


def censuses(run: Run) -> dict[str, Any]:
    """Return what every stage counted in the end, but for where the run has its lists."""
    return {stage["name"]: {**stage["census"], "lists": ""} for stage in run.reported()["stages"]}


@pytest.mark.nightly
def test_one_submission_brings_all_stages_of_real_complexes_to_their_end(undisturbed: Run, real: Project) -> None:
    found = censuses(undisturbed)
    assert list(found) == ["scan", "embed", "graph"]
    assert all(census["accepted"] == census["items"] for census in found.values())
    assert found["scan"]["items"] == COMPLEXES
    records = real.records()
    assert (len(records["scan"]), len(records["graph"])) == (COMPLEXES, COMPLEXES)
    assert len(records["embed"]) == found["scan"]["sequences"]
    tasks = {stage["name"]: stage["tasks"] for stage in undisturbed.reported()["stages"]}
    assert tasks["scan"] == 3
    assert tasks["embed"] > 1


@pytest.mark.fault
def test_killing_everything_but_slurm_midway_changes_nothing_in_the_result(
    undisturbed: Run, real: Project, healthy: Cluster
) -> None:
    words = ("submit", "--stage", "all", "--executor", "slurm", "--follow", "--set", "cache.root=again")
    with real.begins(*words) as login:
        until("a second run", lambda: real.newest.name != undisturbed.name)
        run = real.newest
        until("a task that embeds", lambda: has_begun(run, "embed"), 120, run.story)
        os.killpg(login.pid, signal.SIGKILL)
        killed = [pid for pid in processes_of(run) if kill(pid)]
    assert killed
    assert strangers(run) == []
    run.ends()
    assert [one["cause"] for one in run.stage("embed")["failures"]] != []
    assert censuses(run) == censuses(undisturbed)
    assert real.records("again") == real.records()


@pytest.mark.nightly
def test_a_stage_of_more_tasks_than_an_array_takes_does_every_item_once(make: Make) -> None:
    items = 2 * MAX_ARRAY_SIZE + 2
    project = make(items, **ONE_EACH)
    run = project.submits()
    run.ends()
    jobs = [job["tasks"] for job in run.stage()["jobs"]]
    assert jobs == ["0-5", "6-11", "12-13"]
    assert Counter(one["file"] for one in project.seen()) == {f"c{number}.pdb": 1 for number in range(items)}
    assert run.stage()["census"]["accepted"] == items


@pytest.mark.nightly
def test_a_stage_of_more_tasks_than_may_be_queued_goes_in_waves(make: Make, healthy: Cluster) -> None:
    items = TINY_MAX_SUBMIT
    project = make(items, cluster__slurm__qos="tiny", **ONE_EACH)
    run = project.submits()
    run.ends()
    assert len(run.stage()["jobs"]) > 1
    assert run.stage()["failures"] == []
    assert Counter(one["file"] for one in project.seen()) == {f"c{number}.pdb": 1 for number in range(items)}


@pytest.mark.nightly
def test_two_tasks_on_each_of_three_nodes_have_a_gpu_and_two_cores_of_their_own(make: Make, healthy: Cluster) -> None:
    names = [f"c{number}.pdb" for number in range(6)]
    project = make(6, dict.fromkeys(names, LINGERS), cluster__scan__gpus=1, cluster__scan__cpus=2, **ONE_EACH)
    run = project.submits()
    for name in names:
        run.arrives_at(name)
    seen = project.seen()
    places = [(one["SLURMD_NODENAME"], one["CUDA_VISIBLE_DEVICES"]) for one in seen]
    assert sorted(places) == [(node, gpu) for node in healthy.nodes for gpu in ("0", "1")]
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "OMP_NUM_THREADS"):
        assert {one[name] for one in seen} == {"2"}, name
    project.lets_go()
    run.ends()


@pytest.mark.nightly
def test_what_slurm_has_of_a_job_is_what_emit_and_dry_run_show(make: Make, healthy: Cluster) -> None:
    project = make(3, {"c1.pdb": LINGERS}, **ONE_EACH)
    assert project.types(*SUBMIT, "--emit", "scripts").code == 0
    printed = project.types(*SUBMIT, "--dry-run").out
    assert runs_in(project.folder / "runs") == []
    run = project.submits()
    run.arrives_at("c1.pdb")
    stage_job, visit = run.jobs(healthy, "scan")[0]["array"], run.jobs(healthy, "supervise")[0]["array"]
    for job, name in ((stage_job, "scan-0-2.sbatch"), (visit, "supervise.sbatch")):
        emitted = (project.folder / "scripts" / name).read_text()
        assert emitted in printed
        submitted = healthy.run("scontrol", "write", "batch_script", job, "-").stdout
        assert without_the_run(submitted, run) == without_the_run(emitted, run), name
    project.lets_go()
    run.ends()


def without_the_run(script: str, run: Run) -> str:
    """Return a script without what a run's name decides: its folder, logs and code, and when a visit begins."""
    for words in (run.folder.logs, run.project.folder / "logs", run.folder.path, run.name):
        script = script.replace(str(words), "RUN")
    script = re.sub(r"sys\.path\[:\] = \[\*\[[^]]*\]", "sys.path[:] = [*[CODE]", script)
    script = re.sub(r"RUN(-[0-9a-f]{6})?-(scan|supervise)-\d+", r"RUN-\2-N", script)
    return re.sub(r"^#SBATCH --(dependency|begin)=.*\n", "", script, flags=re.MULTILINE).strip()


@pytest.mark.nightly
def test_an_edit_of_code_or_configuration_after_submitting_changes_nothing(make: Make, tmp_path: Path) -> None:
    project = make(3, {"c1.pdb": LINGERS}, **ONE_EACH)
    checkout = tmp_path / "checkout"
    for name in ("pipeline", "sbatch", "configs"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", checkout)
    own = [sys.executable, "-m", "pipeline.cli.main", "submit", "--stage", "graph", "--executor", "slurm"]
    subprocess.run(own, cwd=project.folder, env={**os.environ, "PYTHONPATH": str(checkout)}, check=True, timeout=60)
    run = project.newest
    run.arrives_at("c1.pdb")
    for path in checkout.rglob("*.py"):
        path.write_text("raise SystemExit('edited')\n")
    (project.folder / "pipeline.yaml").write_text("data: {source: glob, path: nowhere}\n")
    project.lets_go()
    run.ends()
    codes = {Path(one["code"]) for one in project.seen()}
    assert len(codes) == 1
    assert codes.pop().is_relative_to(project.folder / "runs" / ".code")


@pytest.mark.nightly
def test_a_second_submission_joins_the_run_that_does_it_already_and_never_doubles_it(make: Make) -> None:
    project = make(3, {"c1.pdb": LINGERS}, **ONE_EACH)
    run = project.submits()
    run.arrives_at("c1.pdb")
    joined = project.types(*SUBMIT)
    assert (joined.code, run.name in joined.out) == (0, True), joined
    other = project.types(*SUBMIT, "--set", "cluster.scan.items_per_task=2")
    assert other.code == 6, other
    assert f"pipeline cancel {run.name}" in other.err
    assert len(runs_in(project.folder / "runs")) == 1
    project.lets_go()
    run.ends()
    assert Counter(one["file"] for one in project.seen()) == {f"c{number}.pdb": 1 for number in range(3)}


@pytest.mark.nightly
def test_cancel_ends_a_run_with_its_supervisors_and_keeps_what_is_done(make: Make, healthy: Cluster) -> None:
    project = make(3, {"c2.pdb": LINGERS}, **ONE_EACH)
    run = project.submits()
    run.arrives_at("c2.pdb")
    shown = project.types("cancel", run.name)
    assert shown.code == 0, shown
    assert run.reported()["state"] == "running"
    assert project.types("cancel", run.name, "--yes").code == 0
    until("no job of the run", lambda: not run.jobs(healthy), story=run.story)
    assert run.now().state in (State.STOPPED, State.FAILED)
    again = project.submits()
    again.ends()
    assert again.stage()["cached"] == 2


@pytest.mark.nightly
def test_following_ends_without_a_supervisor_and_resume_takes_up_what_was_then_cancelled(
    make: Make, healthy: Cluster
) -> None:
    project = make(3, {"c2.pdb": LINGERS}, **ONE_EACH)
    run = project.submits()
    run.arrives_at("c2.pdb")
    said = project.folder / "said"
    with said.open("w") as output:
        words = [PIPELINE, *SUBMIT, "--follow"]
        follower = subprocess.Popen(words, cwd=project.folder, stdout=output, stderr=output)
    try:
        until("it to follow", lambda: "already does this" in said.read_text(), story=said.read_text)
        healthy.run("scancel", *{job["array"] for job in run.jobs(healthy, "supervise")})
        assert follower.wait(timeout=60.0) == 7, said.read_text()
    finally:
        follower.kill()
    assert f"pipeline resume {run.name}" in said.read_text()
    assert project.types("cancel", run.name, "--yes").code == 0
    until("no job of the run", lambda: not run.jobs(healthy), story=run.story)
    assert run.now().state is State.STOPPED
    resumed = project.types("resume", run.name)
    assert resumed.code == 0, resumed
    again = project.newest
    assert again.name != run.name
    again.ends()
    assert (again.stage()["cached"], again.stage()["census"]["accepted"]) == (2, 3)


REFUSED: tuple[tuple[dict[str, str], int, str], ...] = (
    ({"cluster.slurm.partition": "nowhere"}, 6, "cluster.slurm.partition"),
    ({"cluster.slurm.account": "strangers"}, 6, "cluster.slurm.account"),
    ({"cluster.slurm.qos": "golden"}, 6, "cluster.slurm.qos"),
    ({"cluster.slurm.constraint": "purple"}, 6, "cluster.slurm.constraint"),
    ({"cluster.scan.mem": "64GiB"}, 6, "cluster.scan.mem"),
    ({"cluster.scan.gpus": "3"}, 6, "cluster.scan.gpus"),
    ({"cluster.slurm.partition": "short", "cluster.scan.time": "1h"}, 6, "cluster.scan.time"),
    ({"cluster.runs": "pipeline.yaml/runs"}, 2, "cluster.runs"),
    ({"cluster.supervisor.partition": "nowhere"}, 6, "cluster.supervisor.partition"),
)


@pytest.mark.nightly
def test_what_a_cluster_would_not_take_is_refused_before_anything_begins(make: Make, healthy: Cluster) -> None:
    project = make(1)
    for settings, code, change in REFUSED:
        done = project.types(
            *SUBMIT, *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))
        )
        assert_refused(done, code, change)
    assert healthy.run("squeue", "-h").stdout == ""
    assert runs_in(project.folder / "runs") == []


def assert_refused(done: Typed, code: int, change: str) -> None:
    """Check that a command does nothing, and names what to change."""
    assert done.code == code, done
    assert change in done.err.partition("next: ")[2], done.err
    assert "Traceback" not in done.err


@pytest.mark.nightly
def test_a_full_disk_for_logs_refuses_before_anything_is_queued(make: Make, healthy: Cluster) -> None:
    project = make(1)
    full = project.folder / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", full], check=True)
    try:
        done = project.types(*SUBMIT, "--set", f"cluster.runs={full}/runs")
        left = list((full / "runs").rglob("*"))
    finally:
        subprocess.run(["umount", full], check=True)
    assert_refused(done, 6, "cluster.runs")
    assert left == []
    assert healthy.run("squeue", "-h").stdout == ""


@pytest.mark.nightly
def test_a_full_queue_refuses_before_anything_is_begun(make: Make, healthy: Cluster) -> None:
    for _ in range(TINY_MAX_SUBMIT):
        assert healthy.run("sbatch", "--qos=tiny", "--hold", "--output=/dev/null", "--wrap=true").returncode == 0
    project = make(1, cluster__slurm__qos="tiny")
    done = project.types(*SUBMIT)
    assert_refused(done, 6, "cluster.slurm.max_submit")
