"""What is taken down of an attempt that has ended."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.cluster.job_spec import Limits, TaskState, TaskStatus, format_ranges
from pipeline.cluster.verdict import Cause
from pipeline.config.load import read_config
from pipeline.errors import BudgetReached, SubmissionRefused
from pipeline.journal.attempts import Ask, Attempt
from pipeline.journal.ledger import Ledger, read_notes
from pipeline.journal.run_status import StageJob
from pipeline.project.project import Project, open_executor
from pipeline.records import EventKind
from pipeline.runs.dataset.worklist import Shard, StageSurvey
from pipeline.runs.engine import run_task
from pipeline.runs.engine.dispatch import Dispatch
from pipeline.runs.workflow import table
from pipeline.training.ranks.rank_protocol import RankLost
from tests.journal.ledgers import Told

MIB = 1 << 20
CONFIG = """\
data: {source: glob, path: data}
train: {task: "pipeline.tasks.interface:Interface"}
cluster: {train: {nodes: 2, ranks: 3}}
"""


def test_memory_of_ranks_is_that_of_all_on_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipeline.yaml").write_text(CONFIG)
    config = read_config(tmp_path / "pipeline.yaml").config
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
        dispatch = Dispatch(told.folder, config, executor, lambda _kind, **data: emitted.append(data))
        dispatch.collect(Project.open(config), table.stage("train", config), told.status.stages["train"], [ended])
    assert [one["peak_rss_bytes"] for one in emitted] == [3 * 400 * MIB]


def test_of_ranks_only_that_which_died_is_said_to_have_been_on_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the items of the others look as guilty as the one that kills, however often it is tried one at a time."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipeline.yaml").write_text(CONFIG)
    project = Project.open(read_config(tmp_path / "pipeline.yaml").config)
    told = Told(project.config.cluster.runs, "train", tasks=1)

    class Ended(Exception):
        """In place of a signal that kills."""

    def work(rank: int, end: Exception) -> None:
        def outcomes(*arguments: Any) -> Iterator[None]:
            arguments[-1].on([f"item {rank}"])
            raise end
            yield

        stage = SimpleNamespace(work=outcomes)
        monkeypatch.setattr(run_task.table, "stage", lambda *_: stage)
        arguments = Namespace(stage="train", task=0, attempt=1, mem=0, shrink=0, careful=False)
        with closing(Ledger(told.folder, f"train-000000-{rank}")) as ledger, pytest.raises(type(end)):
            run_task.work_through(project, told.folder, arguments, (rank, 3), run_task.News(ledger, {}))

    work(0, RankLost("rank 1 died without a word"))
    work(1, Ended())
    work(2, RankLost("rank 1 died without a word"))
    assert read_notes(told.folder, "train", 0, 1)[1] == ("item 1",)


@pytest.mark.parametrize(("budget", "fitting"), [("3 core-hours", 2), ("100 core-hours", 4), ("1 core-hours", 0)])
def test_no_more_is_submitted_than_a_budget_holds_and_nothing_is_refused_by_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: str, fitting: int
) -> None:
    """A task may take an hour, and a minute to end."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipeline.yaml").write_text(f"data: {{source: glob, path: data}}\ncluster: {{budget: {budget}}}\n")
    config = read_config(tmp_path / "pipeline.yaml").config
    told = Told(config.cluster.runs, "scan", tasks=4)
    StageSurvey({}, tuple(Shard(at, at + 1, 1) for at in range(4))).write_shards(told.folder, "scan")
    submitted = list[str]()
    with open_executor(config) as executor:
        monkeypatch.setattr(executor, "submit", lambda spec: submitted.append(format_ranges(spec.tasks)) or "8")
        dispatch = Dispatch(told.folder, config, executor, told.supervisor.emit)
        status = told.status.stages["scan"]
        status.planned = StageJob("", "scan", "0-3", 1, Ask(1 << 30, 3600))
        if fitting:
            dispatch.send(Project.open(config), table.stage("scan", config), status)
        else:
            with pytest.raises(BudgetReached, match=r"may take 1\.02 core-hours .* 1\.00 left") as reached:
                dispatch.send(Project.open(config), table.stage("scan", config), status)
            assert "cluster.budget=5 core-hours" in reached.value.remedy
    assert submitted == ([f"0-{fitting - 1}"] if fitting else [])
    account = dispatch.account()
    assert account is not None
    assert account.taken.total <= account.budget.hours


def test_of_two_runs_that_announce_at_once_neither_passes_the_budget_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipeline.yaml").write_text("data: {source: glob, path: data}\ncluster: {budget: 5 core-hours}\n")
    config = read_config(tmp_path / "pipeline.yaml").config
    told, other = (Told(config.cluster.runs, "scan", tasks=4) for _ in range(2))
    StageSurvey({}, tuple(Shard(at, at + 1, 1) for at in range(4))).write_shards(told.folder, "scan")

    def emit(kind: EventKind, **data: Any) -> None:
        """Let the other run announce its job in the moment in which this one does."""
        if kind is EventKind.JOB_SUBMITTING:
            other.supervisor.emit(kind, **data)
        told.supervisor.emit(kind, **data)

    with open_executor(config) as executor:
        dispatch = Dispatch(told.folder, config, executor, emit)
        status = told.status.stages["scan"]
        status.planned = StageJob("", "scan", "0-3", 1, Ask(1 << 30, 3600))
        with pytest.raises(BudgetReached):
            dispatch.send(Project.open(config), table.stage("scan", config), status)
    assert told.status.stages["scan"].intents == {}


def test_what_ranks_share_is_judged_by_how_many_items_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A split is one task, listed as one thing that cannot be halved; its items are those between start and end."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipeline.yaml").write_text(CONFIG)
    config = read_config(tmp_path / "pipeline.yaml").config
    told = Told(config.cluster.runs, "predict", tasks=1)
    told.job("7", [0], ask=Ask(1 << 50, 3600))
    StageSurvey({}, (Shard(0, 300, 1),)).write_shards(told.folder, "predict")
    told.ended(Attempt(0, 1, Ask(1 << 50, 3600), Cause.HOST_OOM, job="7", on=tuple("abcdefgh")))
    emitted = list[tuple[EventKind, dict[str, Any]]]()
    with open_executor(config) as executor:
        dispatch = Dispatch(told.folder, config, executor, lambda kind, **data: emitted.append((kind, data)))
        status = told.status.stages["predict"]
        status.planned, status.limits = next(iter(status.jobs.values())), Limits(mem_bytes=1 << 50)
        with suppress(SubmissionRefused):
            dispatch.send(Project.open(config), table.stage("predict", config), status)
    assert not [data for kind, data in emitted if kind is EventKind.LEFT_OUT]
    (again,) = [data for kind, data in emitted if kind is EventKind.JOB_SUBMITTING]
    assert again["ask"]["careful"]
