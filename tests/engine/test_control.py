"""Runs that go on, stop, and are taken up again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import source_from_cache
from pathlib import Path
from typing import Any, cast

import pytest

from pipeline.cluster.job_spec import SUPERVISE, Job, Limits
from pipeline.cluster.slurm import SlurmExecutor
from pipeline.config.load import read_config
from pipeline.config.schema_cluster import SlurmSection
from pipeline.engine.handover import claim_visit
from pipeline.engine.lifecycle import joins_double, new_run, refuse_double
from pipeline.engine.supervisor import Supervisor
from pipeline.engine.supervisor import main as supervise
from pipeline.errors import ClusterSilent, ConfigError, JobFailed, QueueFull, SubmissionRefused
from pipeline.files import last_claim
from pipeline.journal.ledger import Ledger
from pipeline.journal.run_folder import RunFolder, runs_in
from pipeline.journal.run_status import State, StatusReader
from pipeline.journal.run_view import view
from pipeline.project.run_code import freeze
from pipeline.records import EventKind
from tests.engine.test_submit import newest_status
from tests.testkit.project import PIPELINE, to_do, until
from tests.testkit.stubs import program, silent_slurm

SUBMIT = ("submit", "--stage", "scan")
ONE_BY_ONE = ("--set", "cluster.scan.items_per_task=20", "--set", "cluster.slots.cpus=1")


def begin(folder: Path) -> RunFolder:
    """Start a run of many tasks in the background, and wait until the first of them has published something."""
    subprocess.run([PIPELINE, *SUBMIT, *ONE_BY_ONE], cwd=folder, check=True, capture_output=True)
    until("a first shard", lambda: any((folder / "cache/scan").glob("shards/*")))
    return runs_in(folder / "runs")[-1]


def pid_of(folder: Path) -> int:
    return int(newest_status(folder)["pid"])


@pytest.mark.nightly
def test_a_run_whose_supervisor_was_killed_is_named_and_resumed(pipeline, make_project):
    folder = make_project(400)
    begin(folder)
    os.kill(pid_of(folder), signal.SIGKILL)
    until("the run to be abandoned", lambda: newest_status(folder)["state"] == "abandoned")
    assert pipeline("resume", "--follow").code == 0
    assert newest_status(folder)["state"] == "done"
    assert newest_status(folder)["stages"][0]["census"]["accepted"] == 400
    assert len(runs_in(folder / "runs")) == 1


@pytest.mark.nightly
def test_a_run_that_is_looked_after_or_has_ended_is_not_resumed(pipeline, make_project):
    folder = make_project(300)
    begin(folder)
    assert pipeline("resume", "--follow").code == 0
    assert len(runs_in(folder / "runs")) == 1
    assert newest_status(folder)["state"] == "done"
    assert pipeline("resume").code == 2


@pytest.mark.nightly
def test_cancel_says_what_it_would_end_and_ends_it_when_told(pipeline, make_project):
    folder = make_project(400)
    run = begin(folder)
    shown = pipeline("cancel")
    assert shown.code == 0
    assert f"to apply: pipeline cancel {run.name} --yes" in shown.out
    assert newest_status(folder)["state"] == "running"
    assert pipeline("cancel", "--yes").code == 0
    until("the run to stop", lambda: newest_status(folder)["state"] == "stopped")
    again = subprocess.run([PIPELINE, *SUBMIT, "--follow"], cwd=folder, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert newest_status(folder)["stages"][0]["census"]["accepted"] == 400
    assert to_do(folder)["scan"][0] > 0


def test_cancelling_a_stage_that_is_not_there_names_those_that_are(pipeline, make_project):
    make_project(2)
    pipeline(*SUBMIT, "--follow")
    done = pipeline("cancel", "--stage", "embed")
    assert done.code == 2
    assert "'embed'" in done.err


@pytest.mark.nightly
def test_beside_a_run_the_same_joins_it_the_same_in_another_way_is_refused_and_other_work_goes_on(
    pipeline, make_project
):
    folder = make_project(400)
    run = begin(folder)
    second = pipeline(*SUBMIT, *ONE_BY_ONE)
    assert (second.code, run.name in second.out) == (0, True)
    refused = pipeline(*SUBMIT, "--set", "cluster.scan.items_per_task=50")
    assert (refused.code, f"pipeline cancel {run.name}" in refused.err) == (6, True)
    assert len(runs_in(folder / "runs")) == 1
    assert pipeline(*SUBMIT, "--follow", "--set", "structures.max_residues=100").code == 0
    until("the first run to end", lambda: all(newest(one) for one in runs_in(folder / "runs")))


def newest(run: RunFolder) -> bool:
    """Tell whether a run has ended."""
    return any("run_ended" in path.read_text() for path in run.events.glob("supervisor-*"))


def test_a_visit_is_paid_once(make_project):
    run = new_run(read_config(make_project(1) / "pipeline.yaml").config, ["scan"])
    assert [claim_visit(run, 1), claim_visit(run, 1), claim_visit(run, 2)] == [1, 2, 3]
    assert last_claim(run.claims) == 3


def test_a_run_keeps_the_code_it_was_submitted_with(make_project):
    run = new_run(read_config(make_project(1) / "pipeline.yaml").config, ["scan"])
    copy = Path(run.code.read_text())
    assert (copy / "pipeline" / "engine" / "worker.py").is_file()
    assert (copy / "sbatch" / "scan.sbatch").is_file()
    assert freeze(run.path.parent) == copy
    assert not list(copy.parent.glob("*.partial"))
    for compiled in copy.rglob("*.pyc"):  # Python takes it only for the source that it was made of
        assert Path(source_from_cache(str(compiled))).is_file()


class Silent:
    """An executor whose cluster does not answer."""

    outlives, cluster, ends_at = True, "", None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*_: object, **__: object) -> Any:
            if name in ("step", "status", "adopt", "recognize"):
                return []
            raise ClusterSilent(f"{name}: no answer")

        return ask


def test_a_run_of_another_cluster_is_shown_as_that_and_no_verb_acts_on_it(pipeline, make_project, monkeypatch):
    folder = make_project(1)
    run = new_run(read_config(folder / "pipeline.yaml", ["cluster.executor=slurm"]).config, ["scan"])
    ledger = Ledger(run, f"supervisor-{claim_visit(run, 1):06d}")
    ledger.emit(EventKind.RUN_STARTED, stages=["scan"], host="elsewhere", pid=1, uid=7, cluster="theirs")
    ledger.emit(EventKind.HANDED_OVER, jobs=["7"], names=["next"])
    monkeypatch.setenv("PATH", f"{silent_slurm(folder / 'bin')}:{os.environ['PATH']}")
    program(folder / "bin", "scontrol", 'echo "ClusterName = ours"')
    program(folder / "bin", "squeue", f'echo "$@" >>{folder}/asked')
    shown = pipeline("status", "--json").json()
    assert (shown["state"], shown["cluster"], "cluster ours" in shown["trouble"]) == ("running", "theirs", True)
    assert "--user=7 --jobs=7 --name=next" in (folder / "asked").read_text(), "the job of the run's owner"
    for words in (("resume",), ("cancel", "--yes")):
        refused = pipeline(*words)
        assert (refused.code, "login node of theirs" in refused.said) == (2, True)
        assert f"if that cluster no longer exists: rm -r {run.path}" in refused.said
    with pytest.raises(ConfigError):
        Supervisor(run, SlurmExecutor(SlurmSection()))
    assert len([*run.claims.iterdir()]) == 1


class Answering(Silent):
    """One that answers about visits; no job of a task can be submitted."""

    def __init__(self, refusal: type[SubmissionRefused] = ClusterSilent, queue: Iterable[str] = ()) -> None:
        self.refusal, self.jobs, self.asked = refusal, set(queue), list[tuple[str, object]]()

    def submit(self, spec: Job) -> str:
        if spec.name != SUPERVISE:
            raise self.refusal("no answer")
        self.jobs.add(job := f"{10 + len(self.asked)}")
        self.asked.append((spec.tag.rpartition("-")[2], spec.after_any or spec.begin_s))
        return job

    def queued(self, jobs: Iterable[str]) -> set[str]:
        return {*jobs} & self.jobs

    def reschedule(self, job: str, spec: Job) -> None:
        self.asked.append((job, spec.after_any or spec.begin_s))

    def cancel(self, jobs: Iterable[str], tasks: object = None) -> None:
        self.jobs -= {*jobs}

    def limits_of(self, *_: object, **__: object) -> Limits:
        return Limits()

    def room(self) -> int | None:
        return None


def waiting_for(make_project: Callable[[int], Path], *jobs: str, visits: int = 1) -> RunFolder:
    """Return a run whose next visit is the last of these jobs; of its visits only the first handed over."""
    run = new_run(read_config(make_project(1) / "pipeline.yaml", ["cluster.executor=slurm"]).config, ["scan"])
    first = Ledger(run, f"supervisor-{claim_visit(run, 1):06d}")
    first.emit(EventKind.RUN_STARTED, stages=["scan"], host="elsewhere", pid=1)
    first.emit(EventKind.HANDED_OVER, jobs=jobs, names=["n" * len(job) for job in jobs])
    for number in range(2, visits + 1):
        Ledger(run, f"supervisor-{claim_visit(run, number):06d}").emit(
            EventKind.VISIT, number=number, host="elsewhere", pid=1, job=jobs[0]
        )
    return run


def in_job(patch: pytest.MonkeyPatch, job: str, name: str = "run-supervise-2") -> None:
    patch.setenv("SLURM_JOB_ID", job)
    patch.setenv("SLURM_JOB_NAME", name)


def test_a_visit_submits_the_next_before_anything_and_leaves_the_run_to_it_if_the_cluster_falls_silent(
    make_project, monkeypatch
):
    run, executor = waiting_for(make_project, "7"), Answering()
    in_job(monkeypatch, "7")
    with pytest.raises(ClusterSilent):
        Supervisor(run, cast("Any", executor)).visit()
    status = StatusReader(run).read()
    assert (status.state, status.successors) == (State.RUNNING, ("7", "10"))
    assert executor.asked == [("3", ("7",))]
    assert executor.jobs == {"10"}


@pytest.mark.parametrize(("job", "state"), [("7", State.RUNNING), ("", State.FAILED)])
def test_a_visit_that_gets_no_successor_has_done_nothing(make_project, monkeypatch, job, state):
    run = waiting_for(make_project, "7")
    in_job(monkeypatch, job)
    with pytest.raises(ClusterSilent):
        Supervisor(run, cast("Any", Silent())).visit()
    status = StatusReader(run).read()
    assert (status.state, status.visits == 0, "scan" in status.stages) == (state, bool(job), not job)


def test_a_visit_in_a_full_queue_leaves_its_tasks_to_one_in_ten_minutes(make_project, monkeypatch):
    run, executor = waiting_for(make_project, "7"), Answering(QueueFull)
    in_job(monkeypatch, "7")
    assert not Supervisor(run, cast("Any", executor)).visit()
    assert executor.asked == [("3", ("7",)), ("10", 600)]
    status = StatusReader(run).read()
    assert (status.state, status.successors, status.unfinished) == (State.RUNNING, ("10",), 0)
    in_job(monkeypatch, "8", "interactive")  # a user's own job is no visit: somebody waits for the answer
    with pytest.raises(QueueFull):
        Supervisor(run, cast("Any", executor)).visit()
    assert (StatusReader(run).read().state, executor.jobs) == (State.FAILED, set())


def test_a_visit_that_begins_again_keeps_the_successor_that_waits_for_it(make_project, monkeypatch):
    run, executor = waiting_for(make_project, "7", "8"), Answering(QueueFull, ["7", "8"])
    in_job(monkeypatch, "7")
    assert not Supervisor(run, cast("Any", executor)).visit()
    assert executor.asked == [("8", 600)]


class Unchanging(Answering):
    """One whose site forbids changes of jobs."""

    def reschedule(self, job: str, spec: Job) -> None:
        raise SubmissionRefused("scontrol: error: Access/permission denied")


@pytest.mark.parametrize(("executor", "cancelled"), [(Answering(), ["10"]), (Unchanging(), [])])
def test_a_next_visit_that_was_cancelled_or_cannot_be_changed_is_replaced(
    make_project, monkeypatch, executor, cancelled
):
    run = waiting_for(make_project, "7")
    in_job(monkeypatch, "7")
    monkeypatch.setattr(Supervisor, "_advance", lambda *_: executor.cancel(cancelled))
    assert not Supervisor(run, cast("Any", executor)).visit()
    assert executor.asked == [("3", ("7",)), ("3.again", 600)]
    status = StatusReader(run).read()
    assert (status.state, status.successors, executor.jobs) == (State.RUNNING, ("11",), {"11"})
    assert status.names["11"].endswith("-supervise-3.again")


def test_after_five_visits_that_died_the_next_is_submitted_only_once_something_was_done(make_project, monkeypatch):
    run, executor = waiting_for(make_project, "7", visits=6), Answering()
    in_job(monkeypatch, "7")
    monkeypatch.setattr(Supervisor, "_advance", lambda *_: executor.asked.append(("works", 0)))
    assert not Supervisor(run, cast("Any", executor)).visit()
    assert [name for name, _ in executor.asked] == ["works", "8", "11"]


def test_of_two_visits_at_once_the_earlier_submits_nothing_more(make_project, monkeypatch):
    run, executor = waiting_for(make_project, "7"), Answering()
    in_job(monkeypatch, "7")
    early = Supervisor(run, cast("Any", executor))
    claim_visit(run, 1)
    assert not early.visit()
    monkeypatch.setattr(early, "_advance", lambda *_: early._fail(JobFailed("what the later one did")))
    assert not early.visit()
    assert (StatusReader(run).read().state, executor.asked) == (State.RUNNING, [("3", ("7",))])


def test_a_run_that_is_over_needs_no_next_visit_and_a_late_one_does_nothing(make_project, monkeypatch):
    run, executor = waiting_for(make_project, "7"), Answering()
    in_job(monkeypatch, "7")
    monkeypatch.setattr(Supervisor, "_advance", lambda *_: True)
    assert Supervisor(run, cast("Any", executor)).visit()
    assert (StatusReader(run).read().state, executor.jobs) == (State.DONE, set())
    files = sorted(run.path.rglob("*"))
    in_job(monkeypatch, "10", "run-supervise-3")
    assert supervise([str(run.path), "--visit"]) == 0
    assert sorted(run.path.rglob("*")) == files
    assert Supervisor(run, cast("Any", Silent())).visit()


def test_a_run_whose_folder_was_removed_names_the_command_that_it_was_submitted_with(make_project):
    run = new_run(read_config(make_project(1) / "pipeline.yaml", ["cluster.executor=slurm"]).config, ["scan"])
    run.again.write_text("pipeline submit scan --set scan.max_length=9")
    supervisor = Supervisor(run, cast("Any", Answering()))

    def work() -> bool:
        shutil.rmtree(run.path)
        return bool(run.stages.read_text())

    with pytest.raises(JobFailed, match="moved or removed") as failed:
        supervisor._guarded(work)
    said = "pipeline submit scan --set scan.max_length=9   (in the project's folder)"
    assert failed.value.remedy == said


@pytest.mark.parametrize(("private", "mode"), [(True, 0o700), (False, 0o755)])
def test_run_folders_are_private_unless_they_are_not_meant_to_be(make_project, private, mode):
    config = read_config(make_project(1) / "pipeline.yaml", [f"cluster.private={json.dumps(private)}"]).config
    assert new_run(config, ["scan"]).path.stat().st_mode & 0o777 == mode


def ends(run: RunFolder, state: str = "done") -> RunFolder:
    """Let a run end, as its supervisor would tell it."""
    ledger = Ledger(run, f"supervisor-{claim_visit(run, 1):06d}")
    ledger.emit(EventKind.RUN_STARTED, stages=["scan"], host="elsewhere", pid=1)
    ledger.emit(EventKind.RUN_ENDED, state=state, error="", exit_code=7 * (state == "failed"))
    ledger.close()
    return run


@pytest.mark.nightly
def test_following_a_run_ends_when_nobody_looks_after_it_any_more(make_project):
    folder = make_project(400)
    run = begin(folder)
    said = folder / "said"
    with said.open("w") as output:
        words = [PIPELINE, *SUBMIT, *ONE_BY_ONE, "--follow"]
        follower = subprocess.Popen(words, cwd=folder, stdout=output, stderr=output)
    try:
        until("it to follow", lambda: run.name in said.read_text())
        os.kill(pid_of(folder), signal.SIGKILL)
        assert follower.wait(timeout=300) == 7
    finally:
        follower.kill()
    assert f"next: pipeline resume {run.name}" in said.read_text()


def test_a_second_submission_joins_a_run_whose_supervisor_has_not_begun(make_project):
    config = read_config(make_project(1) / "pipeline.yaml").config
    run = new_run(config, ["scan", "embed"])
    assert refuse_double(config, ["scan"]) == run
    with pytest.raises(SubmissionRefused):
        refuse_double(config, ["scan", "graph"])


def test_of_runs_submitted_at_once_one_begins_and_all_others_join_it(make_project):
    config = read_config(make_project(1) / "pipeline.yaml").config
    for _ in range(10):
        together = threading.Barrier(4)

        def submit(together: threading.Barrier = together) -> tuple[RunFolder, RunFolder | None]:
            together.wait()
            run = new_run(config, ["scan"])
            same = joins_double(run, config, ["scan"])
            if same is None:
                claim_visit(run, 1)
            return run, same

        with ThreadPoolExecutor(4) as people:
            done = [person.result() for person in [people.submit(submit) for _ in range(4)]]
        (begun,) = (run for run, same in done if same is None)
        assert [run.name for run in runs_in(config.cluster.runs)] == [begun.name]
        shutil.rmtree(begun.path)


def test_a_new_run_gives_way_to_one_that_begins_or_goes_as_that_decides(make_project):
    config = read_config(make_project(1) / "pipeline.yaml").config
    early, late = sorted((new_run(config, ["scan"]), new_run(config, ["scan"])), key=lambda run: run.name)
    claim_visit(late, 1)
    assert joins_double(early, config, ["scan"]) == late
    assert not early.path.exists()
    with pytest.raises(SubmissionRefused):
        joins_double(refused := new_run(config, ["scan", "graph"]), config, ["scan", "graph"])
    assert not refused.path.exists()


def test_a_run_that_never_began_stands_in_nobodys_way(pipeline, make_project):
    config = read_config(make_project(1) / "pipeline.yaml").config
    run = new_run(config, ["scan"])
    long_ago = time.time() - 3600
    os.utime(run.stages, (long_ago, long_ago))
    assert refuse_double(config, ["scan"]) is None
    assert view(run).status.state is State.ABANDONED
    assert [pipeline("status", *words).code for words in ((), ("--exit-code",))] == [0, 7]
    assert pipeline("status", ends(run, "failed").name, "--exit-code").code == 7


@pytest.mark.nightly
@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_a_run_that_was_ended_before_it_was_done_is_taken_up(pipeline, make_project, state):
    folder = make_project(3)
    run = ends(new_run(read_config(folder / "pipeline.yaml").config, ["scan"]), state)
    done = pipeline("resume", run.name, "--follow")
    assert done.code == 0, done.err
    assert newest_status(folder)["state"] == "done"
    again = runs_in(folder / "runs")[-1]
    assert again.name != run.name
    assert (again.config.read_text(), again.stages.read_text()) == (run.config.read_text(), run.stages.read_text())
    assert newest_status(folder)["stages"][0]["census"]["accepted"] == 3
