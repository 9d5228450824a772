"""The HTML report of a run is of bounded size, renewed while the run goes on, and never fails the run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pipeline.engine.lifecycle import Cancellation, cancel
from pipeline.journal.run_folder import RunFolder
from pipeline.journal.run_status import RunState
from pipeline.project.project import open_executor
from pipeline.records import Event, EventKind
from pipeline.views import run_page as pages
from pipeline.views.page_facts import planning_over_time
from pipeline.views.run_page import Page, of_run, page_now
from tests.journal.ledgers import fold_events
from tests.report.runs_told import begun, many, trained
from tests.testkit.counted import calls_of

TASKS = 10_000
MOST_BYTES, MOST_CALLS = 3_000_000, 2_500_000


def the_run(project: Path) -> RunFolder:
    """Return the only run of a project."""
    (run,) = (path for path in (project / "runs").iterdir() if (path / "stages.json").exists())
    return RunFolder(run)


class TestWhileARunGoesOn:
    def test_its_supervisor_refreshes_the_page(self, make_project, pipeline, monkeypatch):
        folder, seen = make_project(3), list[str]()
        monkeypatch.setattr(pages, "EVERY_S", 0.0)
        monkeypatch.setattr(pages, "COST_SHARE", 0)
        write = pages.write_page

        def noticed(path: Path, text: str) -> None:
            write(path, text)
            assert path.read_text() == text
            seen.append(text)

        monkeypatch.setattr(pages, "write_page", noticed)
        assert pipeline("submit", "--stage", "scan", "--executor", "local", "--follow").code == 0
        titles = list(dict.fromkeys(text.partition("<title>")[2].partition("</title>")[0] for text in seen))
        name = the_run(folder).name
        assert titles[-2:] == [f"{name}: running", f"{name}: done"]

    def test_a_page_that_cannot_be_made_fails_no_run(self, make_project, pipeline, monkeypatch, caplog):
        folder = make_project(1)
        monkeypatch.setattr(Page, "facts", lambda *_: 1 / 0)
        with caplog.at_level(logging.WARNING):
            assert pipeline("submit", "--stage", "scan", "--executor", "local", "--follow").code == 0
        run = the_run(folder)
        assert page_now(run)[1].status.state is RunState.DONE
        assert not run.report.exists()
        assert "ZeroDivisionError" in caplog.text


def test_the_page_of_a_run_shows_nothing_of_a_later_one_that_trained_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = trained(tmp_path, epochs=6, later=2)
    page, seen = page_now(told.folder)
    training = page.facts(seen).training
    assert [epoch.epoch for epoch in training.newest] == [1, 2, 3, 4, 5, 6]
    assert {curve[-1][0] for curve in training.curves.values()} == {60}


def test_a_run_that_is_cancelled_says_so_on_its_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = begun(tmp_path)
    page = of_run(told.folder)
    page.refresh(told.status, at_once=True)
    assert ": running</title>" in told.folder.report.read_text()
    with open_executor(page.config) as executor:
        cancel(told.folder, told.status, executor, Cancellation((), 0, (), 0), None)
    assert ": stopped</title>" in told.folder.report.read_text()


def test_time_between_stages_is_planning():
    def event(at: float, kind: EventKind, **data: object) -> Event:
        return Event(kind, at, "supervisor-000001", data)

    begins = event(10.0, EventKind.RUN_STARTED, stages=["scan", "train"], host="elsewhere", pid=1)
    ends = event(14.0, EventKind.STAGE_ENDED, stage="scan", state="done", census={}, warnings=[], error="")
    status = fold_events("run", [begins, event(11.0, EventKind.STAGE_SUBMITTED, stage="scan"), ends])
    assert planning_over_time(status, 10.0, 19.0) == {"scan": (10.0, 11.0), "train": (14.0, 19.0)}
    status.apply(event(18.0, EventKind.STAGE_SUBMITTED, stage="train"))
    assert planning_over_time(status, 10.0, 19.0) == {"scan": (10.0, 11.0), "train": (14.0, 18.0)}


class TestBounds:
    @pytest.mark.nightly
    def test_ten_thousand_tasks_make_a_page_that_a_phone_can_open(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        told = many(tmp_path, TASKS)
        page, seen = page_now(told.folder)
        text = page.html(seen)
        assert calls_of(lambda: page.html(seen)) < MOST_CALLS
        assert len(text.encode()) < MOST_BYTES
