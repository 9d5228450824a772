"""What is taken down of an attempt that has ended."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.job_spec import Limits, TaskState, TaskStatus
from pipeline.cluster.verdict import Cause
from pipeline.config.load import read_config
from pipeline.errors import SubmissionRefused
from pipeline.journal.attempts import Ask, Attempt
from pipeline.journal.ledger import Ledger
from pipeline.project.project import Project, open_executor
from pipeline.records import EventKind
from pipeline.runs.dataset.worklist import Shard, StageSurvey
from pipeline.runs.engine.dispatch import Dispatch
from pipeline.runs.workflow import table
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
