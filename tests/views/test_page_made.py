"""The HTML report of a run is of bounded size and tells the time of each stage."""

from __future__ import annotations

import re

import pytest

from pipeline.journal.run_view import view
from pipeline.records import Event, EventKind
from pipeline.report.html_page import render
from pipeline.views.page_charts import planning_times
from pipeline.views.run_page import page_data, page_now
from tests.journal.ledgers import fold_events
from tests.report.runs_told import many, trained
from tests.testkit.counted import calls_of

TASKS = 10_000
MOST_BYTES, MOST_CALLS = 1_000_000, 2_000_000


def test_the_page_of_a_run_shows_nothing_of_a_later_one_that_trained_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = trained(tmp_path, epochs=6, later=2)
    training = page_data(told.folder, view(told.folder, deep=True))["training"]
    assert [epoch.epoch for epoch in training.newest] == [1, 2, 3, 4, 5, 6]
    assert {curve[-1][0] for curve in training.curves.values()} == {60}


def test_long_texts_are_cut_and_long_curves_are_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = trained(tmp_path, epochs=30)
    told.supervisor.emit(EventKind.RUN_ENDED, state="failed", error=f"x: {'y' * 900}", exit_code=1)
    page, _ = page_now(told.folder)
    verdict = page.partition('<p class="verdict">')[2].partition("</p>")[0]
    assert "more characters" in verdict
    assert max(page.count("L", *match.span()) for match in re.finditer('<path class="line[^>]*>', page)) == 299


def test_time_between_stages_is_planning():
    def event(at: float, kind: EventKind, **data: object) -> Event:
        return Event(kind, at, "supervisor-000001", data)

    begins = event(10.0, EventKind.RUN_STARTED, stages=["scan", "train"], host="elsewhere", pid=1)
    ends = event(14.0, EventKind.STAGE_ENDED, stage="scan", state="done", census={}, warnings=[], error="")
    status = fold_events("run", [begins, event(11.0, EventKind.STAGE_SUBMITTED, stage="scan"), ends])
    assert planning_times(status, 10.0, 19.0) == {"scan": (10.0, 11.0), "train": (14.0, 19.0)}
    status.apply(event(18.0, EventKind.STAGE_SUBMITTED, stage="train"))
    assert planning_times(status, 10.0, 19.0) == {"scan": (10.0, 11.0), "train": (14.0, 18.0)}


class TestBounds:
    @pytest.mark.nightly
    def test_ten_thousand_tasks_make_a_page_that_a_phone_can_open(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        told = many(tmp_path, TASKS)
        text, run = page_now(told.folder)
        assert calls_of(lambda: render("page.html", **page_data(told.folder, run))) < MOST_CALLS
        assert len(text.encode()) < MOST_BYTES
