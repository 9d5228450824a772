"""What tables say of stages that are not planned yet, of runs with nothing to do, and of machines without GPUs."""

from __future__ import annotations

from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from pipeline.command_line import Command
from pipeline.errors import DataError, JobFailed
from pipeline.journal.run_status import RunState, RunStatus
from pipeline.report.html.run_plots import pace_plots, predicted_plots
from pipeline.report.plan_tables import plan_table
from pipeline.report.run_tables import efficiency_report
from pipeline.report.screen import Screen, _training
from pipeline.report.stage_lines import counted_so_far, trained_lines
from pipeline.runs.workflow.stage import Judged
from pipeline.runs.workflow.table import STAGES, StageTrouble, refuse_or_warn
from tests.report.runs_told import _epoch

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


def judged(stage: str, found: Judged, **more: int) -> None:
    data = SimpleNamespace(max_rejected_fraction=0.05, path="x")
    project: Any = SimpleNamespace(config=SimpleNamespace(data=data))
    folder: Any = SimpleNamespace(name="run", rejected="rejected.jsonl")
    trouble = StageTrouble([], 0, Command.submit(stage), Command.submit(stage), **more)
    refuse_or_warn(STAGES[stage], project, folder, found, trouble)


def test_what_is_not_done_is_named_for_what_it_is_and_too_many_rejections_are_of_the_data() -> None:
    for stage, said in {"train": "11 of 12 steps", "scan": "11 of 12 items"}.items():
        with pytest.raises(JobFailed, match=said):
            judged(stage, Judged(items=1, undone=11, first_undone="it"))
    with pytest.raises(DataError, match=r"3 of 12 items"):  # whatever its tasks had kept by then
        judged("graph", Judged(2, {"no_contacts": 1}, undone=10), rejected=3)


SECONDS = {"forward": 6.0, "backward": 2.2, "read": 1.2, "checkpoint": 0.6}
WAITS = "12% waits for reading, 6% checkpoint"


def test_what_a_training_did_beside_its_models_work_is_told_while_it_runs_and_when_it_has_ended() -> None:
    figures = {f"phase.{name}": spent for name, spent in SECONDS.items()}
    assert ", ".join(counted_so_far({"a process": figures, "another": {"step": 1.0}})) == WAITS
    stage: Any = SimpleNamespace(name="train", figures={"a process": figures}, cached=0, items_done=3, items=9)
    assert _training(stage, (), Screen(200, 40, 0.0)) == ["epoch 1, step 3 of 9", WAITS]
    last = {"loss": {"a": 0.5}, "items_per_s": 2.0, "seconds": SECONDS}
    last |= dict.fromkeys(("allocated_bytes", "reserved_bytes", "peak_bytes"), 0)
    census = {"best": None, "monitor": "loss", "epochs": 1, "steps": 9, "ooms": 0, "cropped": 0, "folder": "models/a"}
    assert trained_lines({**census, "last": last})[1].endswith(f"2 items/s, {WAITS}")


def test_the_page_draws_phases_of_a_hundredth_of_an_epoch_and_curves_that_were_cut() -> None:
    time, training = SimpleNamespace(paces={}), SimpleNamespace(epochs=[_epoch(1), _epoch(2)])
    facts: Any = SimpleNamespace(time=time, training=training)
    drawn = pace_plots(facts)[-1]
    shown = [name in drawn for name in ("waits for reading", "copies", "forward")]
    assert shown == [True, False, False]
    lines = [{"name": "best", "points": [[0, 0], [5, 80], "… and 3 more"]}]
    stage: Any = SimpleNamespace(census={"pictures": [{"title": "near", "x": "Å", "y": "%", "lines": lines}]})
    (picture,) = predicted_plots(stage)
    assert all(word in picture for word in ("near", "Å", "%"))
    assert predicted_plots(SimpleNamespace(census={})) == []  # type: ignore[arg-type]
