"""What waits is told once for each time and cause, whoever looks, and once more when it is over."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from pipeline.cluster.job_spec import SUPERVISE, TaskState
from pipeline.cluster.slurm_words import Queued, reason_words
from pipeline.config.load import read_config
from pipeline.config.schema import Config
from pipeline.config.schema_cluster import NotifySection
from pipeline.engine.watch import tell, tell_of_own
from pipeline.journal.run_status import RunStatus, StatusReader
from pipeline.journal.run_view import QueueLook, RunView
from pipeline.records import Event, EventKind
from tests.journal.ledgers import Told, fold_events
from tests.testkit.project import DATA, write_config

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
    config = read_config(write_config(tmp_path, **DATA)).config
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


def test_many_who_look_tell_once_and_once_when_it_is_over(told, config, tmp_path):
    at_once = [read(told) for _ in range(3)]  # none of them knows what the others are about to find
    for status in at_once:
        tell(RunView(told.folder, status, HELD), config)
    tell(RunView(told.folder, read(told), HELD), config)
    assert heard(tmp_path) == [("scan", "waiting")]
    (wait,) = read(told).waits.values()
    assert (wait.reason, wait.tasks, wait.remedy, wait.is_over) == ("JobHeldUser", 2, "scontrol release 7", False)
    at_once = [read(told) for _ in range(3)]
    for status in at_once:
        tell(RunView(told.folder, status, QUEUED), config)
    assert heard(tmp_path) == [("scan", "waiting"), ("scan", "waited")]
    (wait,) = read(told).waits.values()
    assert wait.until >= wait.since > 0


def test_what_waits_again_is_told_again(told, config, tmp_path):
    for look in (HELD, QUEUED, HELD, HELD, QUEUED):
        tell(RunView(told.folder, read(told), look), config)
    assert heard(tmp_path) == [("scan", "waiting"), ("scan", "waited")] * 2
    assert [wait.number for wait in read(told).waits.values()] == [1, 2]


def test_two_causes_are_told_apart(told, config, tmp_path):
    look = queue(("7_0", "JobHeldUser"), ("7_1", "PartitionDown"))
    tell(RunView(told.folder, read(told), look), config)
    assert heard(tmp_path) == [("scan", "waiting")] * 2
    tell(RunView(told.folder, read(told), queue(("7_0", "JobHeldUser"), ("7_1", "Priority"))), config)
    assert {wait.reason: wait.is_over for wait in read(told).waits.values()} == {
        "JobHeldUser": False,
        "PartitionDown": True,
    }


@pytest.mark.parametrize("look", [QUEUED, QueueLook({}), QueueLook(None, "no answer")])
def test_nothing_is_told_of_what_passes_or_is_unknown(told, config, tmp_path, look):
    tell(RunView(told.folder, read(told), look), config)
    assert not heard(tmp_path)
    assert not list(told.folder.events.glob("watch-*"))


def test_a_queue_that_does_not_answer_ends_no_wait(told, config):
    tell(RunView(told.folder, read(told), HELD), config)
    tell(RunView(told.folder, read(told), QueueLook(None, "no answer")), config)
    (wait,) = read(told).waits.values()
    assert not wait.is_over


def test_a_run_without_a_supervisor_is_told_with_what_takes_it_up(told, config, tmp_path):
    status = read(told)
    status.abandon()
    tell(RunView(told.folder, status, QUEUED), config)
    assert heard(tmp_path) == [(SUPERVISE, "waiting")]
    (wait,) = read(told).waits.values()
    assert wait.remedy == f"pipeline resume {told.folder.name}"


def test_a_run_of_anothers_or_one_that_has_ended_is_only_shown(told, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.engine.watch.is_mine", lambda _path: False)
    tell_of_own(RunView(told.folder, read(told), HELD))
    monkeypatch.undo()
    told.over()
    tell_of_own(RunView(told.folder, read(told), HELD))
    assert not read(told).waits


def test_events_of_a_wait_lead_to_the_same_in_any_order():
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
