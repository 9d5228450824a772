"""What tables say of stages that are not planned yet, and what a stage that falls short is refused for."""

from __future__ import annotations

from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from pipeline.command_line import Command
from pipeline.errors import DataError, JobFailed
from pipeline.report.plan_tables import plan_table
from pipeline.runs.workflow.stage import Judged
from pipeline.runs.workflow.table import STAGES, StageTrouble, refuse_or_warn

COUNTS = dict.fromkeys(("items", "refused", "unusable", "cached", "missing", "waiting"), 0)


def test_a_training_that_cannot_be_planned_yet_is_not_said_to_be_nothing() -> None:
    rows = [
        ("train", {**COUNTS, "tasks": 1, "unplanned": 1}, 0, 1, None),
        ("graph", {**COUNTS, "tasks": 0}, 0, 1, None),
    ]
    stream = StringIO()
    Console(file=stream, width=200).print(plan_table(rows))
    _, train, graph = stream.getvalue().splitlines()
    assert train.split() == ["train", "steps", "?", "0", "0", "?", "?", "1"]
    assert graph.split() == ["graph", "graphs", "0", "0", "0", "0", "0", "0"]


def test_work_that_is_not_done_fails_the_job_and_too_many_rejections_blame_the_data() -> None:
    def judged(stage: str, found: Judged, **more: int) -> None:
        data = SimpleNamespace(max_rejected_fraction=0.05, path="x")
        project: Any = SimpleNamespace(config=SimpleNamespace(data=data))
        folder: Any = SimpleNamespace(name="run", rejected="rejected.jsonl")
        trouble = StageTrouble([], 0, Command.submit(stage), Command.submit(stage), **more)
        refuse_or_warn(STAGES[stage], project, folder, found, trouble)

    for stage in ("train", "scan"):
        with pytest.raises(JobFailed, match="11 of 12"):
            judged(stage, Judged(items=1, undone=11, first_undone="it"))
    with pytest.raises(DataError, match="3 of 12"):  # whatever its tasks had kept by then
        judged("graph", Judged(2, {"no_contacts": 1}, undone=10), rejected=3)
