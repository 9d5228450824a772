"""What waits is told once for each time and cause, whoever looks, and once more when it is over."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cluster.job_spec import SUPERVISE, TaskState
from pipeline.cluster.slurm_words import Queued, reason_words
from pipeline.config.load import read_config
from pipeline.config.schema import Config
from pipeline.config.schema_cluster import NotifySection
from pipeline.journal.active_runs import QueueLook, SeenRun, stuck_in
from pipeline.journal.run_status import RunState, RunStatus, StatusReader
from pipeline.records import Event, EventKind
from pipeline.report.run_tables import run_report
from pipeline.runs.engine.watch import tell, tell_of_own
from tests.journal.ledgers import Told, fold_events

TELLS = "import json, sys; open(sys.argv[1], 'a').write(json.dumps(sys.argv[2:]) + chr(10))"


@pytest.fixture
def told(tmp_path: Path) -> Told:
    """Return a run of two tasks that were submitted as job 7."""
    told = Told(tmp_path / "runs")
    told.job("7", [0, 1])
    return told


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Return a configuration that has a program write down what it is told."""
    (tmp_path / "pipeline.yaml").write_text("data: {source: glob, path: data}\n")
    config = read_config(tmp_path / "pipeline.yaml", []).config
    notify = NotifySection(command=(sys.executable, "-c", TELLS, str(tmp_path / "heard")))
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"notify": notify})})


def heard(tmp_path: Path) -> list[tuple[str, str]]:
    """Return stage and state of all that was told."""
    path = tmp_path / "heard"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return [(words[1], words[2]) for words in lines]


def queue(*waiting: tuple[str, str], state: TaskState = TaskState.PENDING) -> QueueLook:
    """Return a queue in which tasks wait for reasons."""
    return QueueLook({job: Queued(job, state, reason, reason_words(reason), None, "") for job, reason in waiting})


HELD = queue(("7_0", "JobHeldUser"), ("7_1", "JobHeldUser"))
QUEUED = queue(("7_0", "Priority"), ("7_1", "Resources"))


def read(told: Told) -> RunStatus:
    return StatusReader(told.folder).read()


def test_many_who_look_tell_once_and_once_when_it_is_over(told: Told, config: Config, tmp_path: Path) -> None:
    at_once = [read(told) for _ in range(3)]  # none of them knows what the others are about to find
    for status in at_once:
        tell(told.folder, config, status, HELD)
    tell(told.folder, config, read(told), HELD)
    assert heard(tmp_path) == [("scan", "waiting")]
    (wait,) = read(told).waits.values()
    assert (wait.reason, wait.tasks, wait.remedy, wait.is_over) == ("JobHeldUser", 2, "scontrol release 7", False)
    at_once = [read(told) for _ in range(3)]
    for status in at_once:
        tell(told.folder, config, status, QUEUED)
    assert heard(tmp_path) == [("scan", "waiting"), ("scan", "waited")]
    (wait,) = read(told).waits.values()
    assert wait.until >= wait.since > 0


def test_what_waits_again_is_told_again(told: Told, config: Config, tmp_path: Path) -> None:
    for look in (HELD, QUEUED, HELD, HELD, QUEUED):
        tell(told.folder, config, read(told), look)
    assert heard(tmp_path) == [("scan", "waiting"), ("scan", "waited")] * 2
    assert [wait.number for wait in read(told).waits.values()] == [1, 2]


def test_two_causes_are_told_apart(told: Told, config: Config, tmp_path: Path) -> None:
    look = queue(("7_0", "JobHeldUser"), ("7_1", "PartitionDown"))
    tell(told.folder, config, read(told), look)
    assert heard(tmp_path) == [("scan", "waiting")] * 2
    tell(told.folder, config, read(told), queue(("7_0", "JobHeldUser"), ("7_1", "Priority")))
    assert {wait.reason: wait.is_over for wait in read(told).waits.values()} == {
        "JobHeldUser": False,
        "PartitionDown": True,
    }


@pytest.mark.parametrize("look", [QUEUED, QueueLook({}), QueueLook(None, "no answer")])
def test_nothing_is_told_of_what_passes_or_is_unknown(
    told: Told, config: Config, tmp_path: Path, look: QueueLook
) -> None:
    tell(told.folder, config, read(told), look)
    assert not heard(tmp_path)
    assert not list(told.folder.events.glob("watch-*"))


def test_a_queue_that_does_not_answer_ends_no_wait(told: Told, config: Config) -> None:
    tell(told.folder, config, read(told), HELD)
    tell(told.folder, config, read(told), QueueLook(None, "no answer"))
    (wait,) = read(told).waits.values()
    assert not wait.is_over


def test_running_tasks_do_not_wait(told: Told) -> None:
    assert not stuck_in(read(told), queue(("7_0", "JobHeldUser"), state=TaskState.RUNNING))


def test_a_run_without_a_supervisor_is_told_with_what_takes_it_up(told: Told, config: Config, tmp_path: Path) -> None:
    status = read(told)
    status.abandon()
    tell(told.folder, config, status, QUEUED)
    assert heard(tmp_path) == [(SUPERVISE, "waiting")]
    (wait,) = read(told).waits.values()
    assert wait.remedy == f"pipeline resume {told.folder.name}"


def test_a_run_of_anothers_or_one_that_has_ended_is_only_shown(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.runs.engine.watch.is_mine", lambda _path: False)
    tell_of_own(told.folder, read(told), HELD)
    monkeypatch.undo()
    told.over()
    tell_of_own(told.folder, read(told), HELD)
    assert not read(told).waits


def test_events_of_a_wait_lead_to_the_same_in_any_order() -> None:
    about = {"of": "scan", "reason": "JobHeldUser", "words": "held", "remedy": "scontrol release 7", "tasks": 2}
    events = [
        Event(EventKind.WAITING, 1.0, "watch-1", {**about, "number": 1, "since": 1.0, "until": 0.0}),
        Event(EventKind.WAITING, 2.0, "watch-2", {**about, "number": 1, "since": 2.0, "until": 0.0}),
        Event(EventKind.WAITED, 3.0, "watch-3", {**about, "number": 1, "since": 1.0, "until": 3.0}),
        Event(EventKind.WAITING, 4.0, "watch-4", {**about, "number": 2, "since": 4.0, "until": 0.0}),
    ]

    def waits(order: Iterable[Event]) -> dict[tuple[str, str, int], object]:
        return dict(fold_events("r", order).waits)

    known = waits(events)
    assert [wait.lasted_s(5.0) for wait in fold_events("r", events).waits.values()] == [2.0, 1.0]
    assert all(waits(order) == known for order in itertools.permutations(events))


def test_status_shows_what_waits_with_the_command_that_helps_and_keeps_what_did(told: Told, config: Config) -> None:
    tell(told.folder, config, read(told), HELD)
    status = read(told)
    (wait,) = status.waits.values()
    lines = "\n".join(map(str, run_report(SeenRun(status, at=wait.since + 480))))
    assert "WAITS: 2 tasks, for 8 min 00 s so far: held by its user (JobHeldUser)\n  next: scontrol release 7" in lines
    status.waits[wait.key] = replace(wait, until=wait.since + 600)
    status.state = RunState.DONE
    lines = "\n".join(map(str, run_report(SeenRun(status, at=wait.since + 6000))))
    assert "waited: 2 tasks for 10 min 00 s: held by its user (JobHeldUser)" in lines
    assert "WAITS" not in lines


def test_what_passes_is_shown_with_how_long_and_when_it_may_start() -> None:
    look = QueueLook({"7_0": Queued("7_0", TaskState.PENDING, "Priority", "jobs go first", 10_000.0, "")})
    assert look.delayed({"7": 100.0}, 700.0).startswith("for 10 min 00 s, the first expected to start at 1970-01-01 ")
    assert look.delayed({"7": 100.0}, 20_000.0).count("expected") == 0, "that time is over"
    assert look.delayed({"8": 100.0}, 700.0) == ""
