"""A loader's own buffers are no leak, a look costs a training little, and a leak is told wherever people look."""

from __future__ import annotations

import ctypes
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from pipeline.journal.active_runs import SeenRun
from pipeline.journal.ledger import Ledger
from pipeline.memory.leaks.inspection import InspectionWindow
from pipeline.memory.leaks.leak_detector import MemoryLeak
from pipeline.memory.leaks.memory_growth import malloc_counter
from pipeline.records import EventKind, TaskReport
from pipeline.report.live_status import StageBars
from pipeline.report.run_tables import run_report
from pipeline.report.screen import Screen, screen
from pipeline.runs.engine.run_task import News
from pipeline.runs.views.run_page import of_run
from pipeline.training.items import read_ahead
from pipeline.training.items.read_ahead import Ring
from tests.report.runs_told import begun
from tests.training.loop.loops import Plot, Run, Tiny

STEPS = 3  # of an epoch of 14 items
MEBIBYTE = 1 << 20
LIBC = ctypes.CDLL(None)
LIBC.malloc.restype, LIBC.malloc.argtypes, LIBC.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]


@pytest.fixture
def inspected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the steps at which Python is slowed down."""
    if malloc_counter() is None:
        pytest.skip("no malloc that tells what is in use: glibc before 2.33, or another one")
    steps: list[int] = []
    real = InspectionWindow.boundary

    def boundary(window: InspectionWindow) -> bool:
        steps.append(1)
        return real(window)

    monkeypatch.setattr(InspectionWindow, "boundary", boundary)
    return steps


def told_of(run: Run) -> list[str]:
    return [line for line in run.said if "memory leaks" in line]


def test_slots_that_grow_for_larger_batches_are_neither_told_nor_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inspected: list[int]
) -> None:
    real, batches = Ring.room, iter(range(1, 1 << 20))
    monkeypatch.setattr(Ring, "room", lambda ring, slot, used: real(ring, slot, next(batches) * MEBIBYTE)[:used])
    monkeypatch.setattr(read_ahead, "bytes_on_host", lambda size, pin: torch.empty(size, dtype=torch.uint8))
    run = Run(Plot(train={"epochs": 12, "pin": True}), tmp_path).to_end()
    assert run.trainer.loaders[0].stats.grown > STEPS
    assert told_of(run) == inspected == []


class Grabbing(Tiny):
    """Takes memory in a library, where no operator and no line of Python shows it."""

    taken: list[int]

    def loss(self, model: Any, batch: Any) -> Any:
        self.taken.append(LIBC.malloc(MEBIBYTE))
        return super().loss(model, batch)


@pytest.mark.nightly
def test_what_no_look_finds_is_looked_for_once_and_told_without_blaming_a_log(
    tmp_path: Path, inspected: list[int]
) -> None:
    plot = Plot(train={"epochs": 40})
    task = Grabbing(plot)
    task.taken = []
    try:
        run = Run(plot, tmp_path, task=task).to_end()
    finally:
        for place in task.taken:
            LIBC.free(place)
    assert len(inspected) <= 7  # the only look that a short training is given: 4 steps, and 3 to see what stays
    told = told_of(run)
    assert told
    assert all("was not found" in line and "kept by" not in line for line in told)
    assert any("host memory grows" in warning for warning in run.tell.report.warnings.values())


LEAK = MemoryLeak(
    "tensors", 1 << 20, 6 << 20, 40 << 20, ("4 x Tensor float32 [64, 128]",), ("mine.py:31 in loss",), "list `kept`"
)


def test_a_leak_is_shown_by_status_report_the_page_and_who_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = begun(tmp_path, "train", tasks=1)
    told.job("7", [0], why="planned")
    words = f"memory leaks: {LEAK.words()}"
    ledger, facts = Ledger(told.folder, "train-000000"), {"stage": "train", "task": 0, "attempt": 1}
    news = News(ledger, facts)
    news.tell(EventKind.PROGRESS, TaskReport({}, {LEAK.key: "older words"}))
    news.tell(EventKind.PROGRESS, TaskReport({}, {LEAK.key: words}))
    ledger.emit(EventKind.TASK_STARTED, **facts | {"attempt": 2})  # another process takes over: what was told stays
    news.tell(EventKind.PROGRESS, TaskReport())
    ledger.close()
    status = told.status
    stage = status.stages["train"]
    assert stage.warnings == stage.to_json()["warnings"] == [words]
    run = SeenRun(status, 2000.0)
    assert f"warning: {words}" in shown(run)
    assert any("mine.py:31 in loss" in line.plain for line in screen(run, Screen(300, 40, 2000.0, {})))
    assert "mine.py:31 in loss" in of_run(told.folder).html(run)
    with StageBars() as bars:
        bars.show(stage)
        bars.show(stage)
    assert capsys.readouterr().err.count("mine.py:31 in loss") == 1
    told.supervisor.emit(
        EventKind.STAGE_ENDED, stage="train", state="failed", census=None, warnings=["of its end"], error="x"
    )
    assert told.status.stages["train"].warnings == [words, "of its end"]


def shown(run: SeenRun) -> str:
    console = Console(file=StringIO(), width=1000)
    for part in run_report(run):
        console.print(part)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()
