"""The page of a run is of bounded size, made while the run goes on, and never a reason for it to fail."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cluster.verdict import Cause
from pipeline.journal.active_runs import SeenRun
from pipeline.journal.run_folder import RunFolder
from pipeline.journal.run_status import RunState
from pipeline.project.project import open_executor
from pipeline.records import Event, EventKind
from pipeline.report.tables import clip
from pipeline.runs.engine.lifecycle import Cancellation, cancel
from pipeline.runs.views import run_page as pages
from pipeline.runs.views.page_facts import (
    MOST_SLOTS,
    SPANS,
    TimeSlots,
    WorkOverTime,
    bounded,
    first_start,
    running_over_time,
    span_of,
)
from pipeline.runs.views.run_page import _BUNDLE, POINTS, Page, of_run, page_now, thinned, training_facts
from pipeline.training.forensics import step_bundle
from tests.journal.ledgers import Told
from tests.report.runs_told import begun, failed, many, trained
from tests.testkit.command import Command
from tests.testkit.counted import calls_of
from tests.testkit.project import MakeProject

TASKS = 10_000
MOST_BYTES, MOST_CALLS = 3_000_000, 2_500_000


def the_run(project: Path) -> RunFolder:
    """Return the only run of a project."""
    (run,) = (path for path in (project / "runs").iterdir() if (path / "stages.json").exists())
    return RunFolder(run)


class TestWhileARunGoesOn:
    def test_its_supervisor_refreshes_the_page(
        self, make_project: MakeProject, pipeline: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, seen = make_project(3), list[str]()
        monkeypatch.setattr(pages, "EVERY_S", 0.0)
        monkeypatch.setattr(pages, "COST_SHARE", 0)
        write = pages.write_page

        def noticed(path: Path, text: str, *mode: int) -> None:
            write(path, text, *mode)
            assert path.read_text() == text
            seen.append(text)

        monkeypatch.setattr(pages, "write_page", noticed)
        assert pipeline("submit", "--stage", "scan", "--executor", "local", "--follow").code == 0
        titles = list(dict.fromkeys(text.partition("<title>")[2].partition("</title>")[0] for text in seen))
        name = the_run(folder).name
        assert titles[-2:] == [f"{name}: running", f"{name}: done"]
        assert "This run goes on" in next(text for text in seen if ": running</title>" in text)
        assert "This run goes on" not in seen[-1]

    def test_it_is_made_no_oftener_than_is_worth_while(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        told, clock, made = begun(tmp_path), [0.0], list[float]()
        monkeypatch.setattr(pages.time, "monotonic", lambda: clock[0])
        page = of_run(told.folder)

        def slow(_run: SeenRun) -> str:
            made.append(clock[0])
            clock[0] += 4.0
            return ""

        monkeypatch.setattr(page, "html", slow)
        while clock[0] < 300.0:
            page.refresh(told.status)
            clock[0] += 1.0
        assert made == [30.0, 114.0, 198.0, 282.0]  # 4 s to make, and then 20 times that

    def test_a_page_that_cannot_be_made_fails_no_run(
        self,
        make_project: MakeProject,
        pipeline: Command,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        folder = make_project(1)
        monkeypatch.setattr(Page, "facts", lambda *_: 1 / 0)
        with caplog.at_level(logging.WARNING):
            assert pipeline("submit", "--stage", "scan", "--executor", "local", "--follow").code == 0
        run = the_run(folder)
        assert page_now(run)[1].status.state is RunState.DONE
        assert not run.report.exists()
        assert f"{run.report} is not up to date: ZeroDivisionError" in caplog.text

    def test_what_cannot_be_told_is_a_note_on_the_page(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        told = trained(tmp_path)
        (tmp_path / "cache").write_text("no folder")
        facts = of_run(told.folder).facts(SeenRun(told.status))
        assert facts.cache is None
        assert [note.partition(":")[0] for note in facts.notes] == ["cache"]
        assert "not on this page: cache" in of_run(told.folder).html(SeenRun(told.status))


def test_a_run_that_is_cancelled_says_so_on_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = begun(tmp_path)
    page = of_run(told.folder)
    page.refresh(told.status, at_once=True)
    assert ": running</title>" in told.folder.report.read_text()
    with open_executor(page.config) as executor:
        cancel(told.folder, told.status, executor, Cancellation((), 0, (), 0), None)
    assert ": stopped</title>" in told.folder.report.read_text()


class TestBounds:
    @pytest.mark.nightly
    def test_ten_thousand_tasks_make_a_page_that_a_phone_can_open(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        told = many(tmp_path, TASKS)
        page, seen = page_now(told.folder)
        text = page.html(seen)
        assert calls_of(lambda: page.html(seen)) < MOST_CALLS
        assert len(text.encode()) < MOST_BYTES
        assert "1,000 attempts did not end well" in text
        assert "and 800 more attempts that this page leaves out" in text
        assert "and 800 more items that this page leaves out" in text

    def test_when_failures_are_too_many_each_cause_is_still_among_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        told = many(tmp_path, 3000)
        told.ended(replace(failed(tmp_path / "other").status.stages["embed"].task(3).ended[0], job="8"))
        troubles = of_run(told.folder).facts(SeenRun(told.status)).troubles
        assert {trouble.attempt.cause for trouble in troubles.attempts} == {Cause.HOST_OOM, Cause.FAILED}

    def test_a_long_training_is_thinned_out_between_its_first_and_last_step(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        told = trained(tmp_path, epochs=600)
        facts = training_facts(told.folder, of_run(told.folder).config, told.status.stages["train"])
        assert facts is not None
        curve = facts.curves["loss.distance"]
        assert (len(curve), curve[0][0], curve[-1][0]) == (POINTS, 1, 6000)
        assert (len(facts.epochs), facts.known_epochs, facts.newest[-1].epoch) == (POINTS, 600, 600)

    def test_thinning_keeps_order_and_ends(self) -> None:
        assert thinned(range(3), 5) == [0, 1, 2]
        assert thinned(range(1001), 3) == [0, 500, 1000]

    def test_text_and_lists_say_what_they_leave_out(self) -> None:
        assert clip("a" * 10, 4) == "aaaa … (6 more characters)"
        assert bounded(list(range(50)))[-1] == "… and 10 more"
        assert json.loads(json.dumps(bounded({"a": {"b": (Path("c"), None, 1.5)}}))) == {"a": {"b": ["c", None, 1.5]}}


class TestTime:
    def test_work_is_counted_in_slots_that_become_wider_and_lose_nothing(self) -> None:
        slots = TimeSlots()
        for at in range(100_000, 100_000 + 50 * MOST_SLOTS, 7):
            slots.add(at, 2)
        points = slots.points(100_000.0 + 50 * MOST_SLOTS)
        assert len(points) <= MOST_SLOTS
        assert sum(slots.counts.values()) == 2 * len(range(0, 50 * MOST_SLOTS, 7))
        assert sorted(value for _, value in points)[len(points) // 2] == pytest.approx(2 / 7, rel=0.3)

    def test_a_second_attempt_counts_from_its_own_beginning(self) -> None:
        pace = WorkOverTime()
        for kind, done in ((EventKind.TASK_STARTED, 0), (EventKind.PROGRESS, 5), (EventKind.TASK_STARTED, 0),
                           (EventKind.PROGRESS, 3), (EventKind.TASK_FINISHED, 10)):  # fmt: skip
            pace.take(Event(kind, 50.0, "scan-000000", {"stage": "scan", "done": done}))
        assert sum(pace.stages["scan"].counts.values()) == 15

    def test_tasks_that_ran_at_once_are_counted_in_their_spans(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        status = many(tmp_path, 40).status
        status.started_at, status.ended_at = 1000.0, 1048.0
        begin, end = span_of(status, 5000.0)
        counts = [count for _, count in running_over_time(status, begin, end)["scan"]]
        assert len(counts) == SPANS
        assert max(counts) in (9, 10)
        assert counts[0] == 1


def test_a_task_that_ended_while_nobody_looked_began_when_it_did_and_not_when_it_ended(tmp_path: Path) -> None:
    told = Told(tmp_path, tasks=1)
    told.job("7", [0])
    told.worker(0, EventKind.TASK_STARTED)
    began = time.time()
    time.sleep(0.2)
    told.worker(0, EventKind.TASK_FAILED, what="stopped by a signal", exit_code=143)
    told.over("stopped", 130)
    status = told.status
    assert abs((first_start(status.stages["scan"]) or 0.0) - began) < 0.1
    ran = [at for at, count in running_over_time(status, began - 1, began + 9)["scan"] if count]
    assert max(ran) - began < 1  # nor does it still run


def test_recorded_steps_are_found_by_the_names_that_bundles_have() -> None:
    for kind in step_bundle.BundleKind:
        name = f"step-00000023-{kind.value}-rank-1"
        ours, theirs = _BUNDLE.fullmatch(name), step_bundle._NAME.fullmatch(name)
        assert ours
        assert theirs
        assert (ours["step"], ours["kind"], ours["rank"]) == theirs.groups()[:3]
