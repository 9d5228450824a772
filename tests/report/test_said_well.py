"""What tables say of stages that are not planned yet, of runs with nothing to do, and of machines without GPUs."""

from __future__ import annotations

from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from pipeline.command_line import Command
from pipeline.errors import JobFailed
from pipeline.journal.run_status import RunState, RunStatus
from pipeline.report.plan_tables import plan_table
from pipeline.report.run_tables import efficiency_report
from pipeline.runs.workflow.stage import Judged
from pipeline.runs.workflow.table import STAGES, StageTrouble, refuse_or_warn

COUNTS = dict.fromkeys(("items", "refused", "unusable", "cached", "missing", "waiting"), 0)


def printed(*parts: Any) -> str:
    stream = StringIO()
    console = Console(file=stream, width=200)
    for part in parts:
        console.print(part)
    return stream.getvalue()


def test_a_training_that_cannot_be_planned_yet_is_not_said_to_be_nothing() -> None:
    rows = [
        ("train", {**COUNTS, "tasks": 1, "unplanned": 1}, 0, 1, None),
        ("graph", {**COUNTS, "tasks": 0}, 0, 1, None),
    ]
    head, train, graph = printed(plan_table(rows)).splitlines()
    assert head.split()[:3] == ["stage", "of", "items"]
    assert train.split() == ["train", "steps", "?", "0", "0", "?", "?", "1"]
    assert graph.split() == ["graph", "graphs", "0", "0", "0", "0", "0", "0"]


def test_a_run_that_had_nothing_to_do_says_so() -> None:
    done = efficiency_report(RunStatus("r", RunState.DONE), [])
    assert done[-1] == "nothing was left to do: no task was needed"
    for state in (RunState.RUNNING, RunState.FAILED):
        assert "no task has ended" in str(efficiency_report(RunStatus("r", state), [])[-1])


@pytest.mark.parametrize(("stage", "said"), [("train", "11 of 12 steps are not"), ("scan", "11 of 12 items are not")])
def test_what_is_not_done_is_named_for_what_it_is(stage: str, said: str) -> None:
    data = SimpleNamespace(max_rejected_fraction=0.05, path="x")
    project: Any = SimpleNamespace(config=SimpleNamespace(data=data))
    folder: Any = SimpleNamespace(name="run", rejected="rejected.jsonl")
    trouble = StageTrouble([], 0, Command.submit(stage), Command.submit(stage))
    with pytest.raises(JobFailed, match=said):
        refuse_or_warn(STAGES[stage], project, folder, Judged(items=1, undone=11, first_undone="it"), trouble)
