"""What is taken down of an attempt that has ended."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.cluster.job_spec import Job, Limits, TaskState, TaskStatus, format_ranges
from pipeline.cluster.local import LocalExecutor
from pipeline.cluster.verdict import Cause
from pipeline.config.load import read_config
from pipeline.config.schema import Config
from pipeline.dataset.worklist import Shard, StageSurvey
from pipeline.engine import worker
from pipeline.engine.dispatch import Dispatch
from pipeline.errors import BudgetReached, SubmissionRefused
from pipeline.journal.attempts import Ask, Attempt
from pipeline.journal.ledger import Ledger, read_notes
from pipeline.journal.run_status import StageJob
from pipeline.project.project import Project, open_executor
from pipeline.records import EventKind, RankPlace
from pipeline.stages import table
from pipeline.training.ranks import RankLost
from tests.journal.ledgers import Told
from tests.testkit.project import DATA, TRAIN, write_config

MIB = 1 << 20
RANKS = {"train__task": TRAIN["train__task"], "cluster__train": {"nodes": 2, "ranks": 3}}


@pytest.fixture
def config_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """Return what writes a configuration into the current folder and reads it."""
    monkeypatch.chdir(tmp_path)
    return lambda **settings: read_config(write_config(tmp_path, **DATA, **settings)).config


def test_memory_of_ranks_is_that_of_all_on_a_node(config_of):
    config = config_of(**RANKS)
    told = Told(config.cluster.runs, "train", tasks=1)
    told.job("7", [0])
    StageSurvey({}, (Shard(0, 9, 9),)).write_shards(told.folder, "train")
    for rank, peak in enumerate((300, 400, 350, 300, 300, 300)):
        with closing(Ledger(told.folder, f"train-000000-{rank}")) as ledger:
            figures = {"host_peak_bytes": peak * MIB}
            ledger.emit(
                EventKind.PROGRESS, stage="train", task=0, attempt=1, done=9 * (rank == 0), rejected={}, figures=figures
            )
    emitted = list[dict[str, Any]]()
    ended = TaskStatus(
        "7", 0, TaskState.COMPLETED, "", "", exit_code=0, peak_rss_bytes=390 * MIB, started=1.0, ended=9.0
    )
    with open_executor(config) as executor:
        dispatch = Dispatch(told.folder, config, executor, told.status, lambda _kind, **data: emitted.append(data))
        dispatch.collect(Project.open(config), table.stage("train", config), told.status.stages["train"], [ended])
    assert [one["peak_rss_bytes"] for one in emitted] == [3 * 400 * MIB]


@pytest.mark.parametrize(("budget", "fitting"), [("3 core-hours", 2), ("100 core-hours", 4), ("1 core-hours", 0)])
def test_no_more_is_submitted_than_a_budget_holds_and_nothing_is_refused_by_the_scheduler(
    config_of, monkeypatch, budget, fitting
):  # a task may take an hour, and a minute to end
    config = config_of(cluster__budget=budget)
    told = Told(config.cluster.runs, "scan", tasks=4)
    StageSurvey({}, tuple(Shard(at, at + 1, 1) for at in range(4))).write_shards(told.folder, "scan")
    submitted = list[str]()
    with open_executor(config) as executor:
        monkeypatch.setattr(executor, "submit", lambda spec: submitted.append(format_ranges(spec.tasks)) or "8")
        dispatch = Dispatch(told.folder, config, executor, told.status, told.supervisor.emit)
        status = told.status.stages["scan"]
        status.planned = StageJob("", "scan", "0-3", 1, Ask(1 << 30, 3600))
        if fitting:
            dispatch.send(Project.open(config), table.stage("scan", config), status)
        else:
            with pytest.raises(BudgetReached) as reached:
                dispatch.send(Project.open(config), table.stage("scan", config), status)
            assert "cluster.budget=5 core-hours" in reached.value.remedy
    assert submitted == ([f"0-{fitting - 1}"] if fitting else [])
    account = dispatch.account()
    assert account is not None
    assert account.taken.total <= account.budget.hours


def test_of_two_runs_that_announce_at_once_neither_passes_the_budget_of_both(config_of):
    config = config_of(cluster__budget="5 core-hours")
    told, other = (Told(config.cluster.runs, "scan", tasks=4) for _ in range(2))
    StageSurvey({}, tuple(Shard(at, at + 1, 1) for at in range(4))).write_shards(told.folder, "scan")

    def emit(kind: EventKind, **data: Any) -> None:
        """Let the other run announce its job in the moment in which this one does."""
        if kind is EventKind.JOB_SUBMITTING:
            other.supervisor.emit(kind, **data)
        told.supervisor.emit(kind, **data)

    with open_executor(config) as executor:
        dispatch = Dispatch(told.folder, config, executor, told.status, emit)
        status = told.status.stages["scan"]
        status.planned = StageJob("", "scan", "0-3", 1, Ask(1 << 30, 3600))
        with pytest.raises(BudgetReached):
            dispatch.send(Project.open(config), table.stage("scan", config), status)
    assert told.status.stages["scan"].intents == {}


def test_a_job_that_is_refused_without_the_nodes_that_failed_is_submitted_to_all(config_of):
    """They may be the only ones that hold it."""
    told = Told(config_of().cluster.runs, "scan", tasks=1)
    told.job("7", [0])
    told.ended(Attempt(0, 1, Ask(1 << 30, 3600), Cause.NODE, job="7", node="n1"))
    told.supervisor.emit(EventKind.JOB_SUBMITTING, **StageJob("next", "scan", "0", 2, Ask(1 << 30, 3600)).to_json())
    submitted = list[tuple[str, ...]]()

    def submit(spec: Job) -> str:
        submitted.append(spec.exclude)
        if spec.exclude:
            raise SubmissionRefused("Requested node configuration is not available")
        return "8"

    executor = cast("Any", SimpleNamespace(outlives=True, submit=submit, limits_of=lambda *_: Limits()))
    run = told.status
    Dispatch(told.folder, config_of(), executor, run, told.supervisor.emit).adopt(run.stages["scan"])
    assert submitted == [("n1",), ()]


def test_a_task_that_never_started_before_its_executor_ended_has_had_no_attempt(config_of):
    """Each allocation may end before the last tasks start: they are not given up."""
    config = config_of()
    told = Told(config.cluster.runs, "scan", tasks=2)
    told.job("gone.1", [0, 1])
    told.worker(0, EventKind.TASK_STARTED, host="n1")
    run = told.status
    with LocalExecutor() as executor:
        Dispatch(told.folder, config, executor, run, told.supervisor.emit).adopt(run.stages["scan"])
    assert [task.job for task in run.stages["scan"].work.values()] == ["gone.1", None]


def test_of_ranks_only_that_which_died_is_said_to_have_been_on_anything(config_of):
    """Else the items of the others look as guilty as the one that kills, however often it is tried one at a time."""
    project = Project.open(config_of(**RANKS))
    told = Told(project.config.cluster.runs, "train", tasks=1)

    class Ended(Exception):
        """In place of a signal that kills."""

    def work(rank: int, end: Exception) -> None:
        def outcomes(*arguments: Any) -> Iterator[None]:
            arguments[-1].on([f"item {rank}"])
            raise end
            yield

        stage = cast("Any", SimpleNamespace(work=outcomes))
        arguments = Namespace(stage="train", task=0, attempt=1, mem=0, shrink=0, careful=False)
        with closing(Ledger(told.folder, f"train-000000-{rank}")) as ledger, pytest.raises(type(end)):
            worker.work_through(stage, project, told.folder, arguments, RankPlace(rank, 3), worker.News(ledger, {}))

    work(0, RankLost("rank 1 died without a word"))
    work(1, Ended())
    work(2, RankLost("rank 1 died without a word"))
    assert read_notes(told.folder, "train", 0, 1)[1] == ("item 1",)
