"""What a run's events add up to, in whatever order its files are read, and the small files beside them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.cluster.verdict import Cause
from pipeline.config.load import read_config
from pipeline.journal import run_folder as folders
from pipeline.journal.attempts import Ask, Attempt, leave_out, left_out_items
from pipeline.journal.ledger import Note, read_notes
from pipeline.journal.run_folder import RunFolder
from pipeline.journal.run_status import RunStatus, StageJob
from pipeline.project.project import Project
from pipeline.records import Event, EventKind, Reason
from pipeline.runs.dataset import worklist
from pipeline.runs.dataset.worklist import Shard
from tests.journal.ledgers import fold_events
from tests.testkit.project import MakeProject

ASK = Ask(1 << 30, 600)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return folders.create_folder(tmp_path, "scan", datetime(2026, 1, 2, tzinfo=UTC))


def event(kind: EventKind, at: float, writer: str = "supervisor-000001", **data: object) -> Event:
    return Event(kind, at, writer, {"stage": "scan", **data})


def submitted(at: float, tasks: str, job: str, attempt: int = 1) -> Event:
    data = StageJob(f"t{job}", "scan", tasks, attempt, ASK, id=job).to_json()
    return Event(EventKind.JOB_SUBMITTED, at, "supervisor-000001", data)


def ended(at: float, task: int, job: str, cause: Cause, attempt: int = 1) -> Event:
    return event(EventKind.TASK_ENDED, at, **Attempt(task, attempt, ASK, cause, job=job).to_event())


def begun(tasks: int) -> list[Event]:
    counts = {"items": 10, "missing": 10, "tasks": tasks, "cost": 0.0}
    return [event(EventKind.STAGE_SUBMITTED, 1.0, **counts), submitted(2.0, f"0-{tasks - 1}", "7")]


def scan(events: list[Event]) -> RunStatus:
    return fold_events("r", events)


def test_words_of_several_processes_mean_the_same_in_whatever_order_their_files_are_read() -> None:
    parent, part = "scan-000000", "scan-000000-0"
    facts = {"task": 0, "attempt": 1}
    told = {"done": 4, "rejected": {}, "figures": {}}
    files = [
        [event(EventKind.TASK_STARTED, 3.0, parent, **facts, host="n1")],
        [
            event(EventKind.PROGRESS, 4.0, part, **facts, **told),
            event(EventKind.TASK_FAILED, 5.0, part, **facts, what="full", exit_code=7, trouble="disk_full"),
        ],
        begun(1),
    ]
    words = set()
    for order in itertools.permutations(files):
        status = scan([one for file in order for one in file])
        words.add(status.stages["scan"].task(0).word)
    (word,) = words
    assert (word.exit_code, word.kind, word.what) == (7, "disk_full", "full")


BY_HAND = event(EventKind.TASK_CANCELLED, 4.0, "cancel-here-9", task=0, why="cancelled by me on here")


def test_a_task_that_was_cancelled_by_hand_is_over_and_no_failure_in_whatever_order_its_file_is_read() -> None:
    told = [*begun(2), ended(6.0, 0, "7", Cause.CANCELLED)]
    for events in ([BY_HAND, *told], [*told, BY_HAND]):
        stage = scan(events).stages["scan"]
        assert (stage.state_of(stage.task(0)), stage.state_of(stage.task(1))) == ("cancelled", "waiting")
        assert (stage.task(0).open, stage.failures, stage.live) == (False, [], ["7"])


def test_what_somebody_else_cancelled_is_a_failure_and_not_by_hand() -> None:
    stage = scan([*begun(2), ended(6.0, 1, "7", Cause.CANCELLED), BY_HAND]).stages["scan"]
    assert [(attempt.task, attempt.cause) for attempt in stage.failures] == [(1, Cause.CANCELLED)]
    stage.names = ["one", "other"]
    assert stage.cancelled == {"one": "cancelled by me on here"}


def test_a_task_that_crashed_before_it_was_cancelled_by_hand_did_crash_and_is_not_tried_again() -> None:
    stage = scan([*begun(1), ended(3.0, 0, "7", Cause.CRASHED), BY_HAND]).stages["scan"]
    assert ([attempt.cause for attempt in stage.failures], stage.task(0).open) == ([Cause.CRASHED], False)


def test_a_task_that_had_finished_when_it_was_cancelled_is_done() -> None:
    finished = event(EventKind.TASK_FINISHED, 3.5, "scan-000000", task=0, attempt=1, done=1, rejected={}, figures={})
    for events in ([*begun(1), finished, BY_HAND], [*begun(1), ended(5.0, 0, "7", Cause.DONE), BY_HAND]):
        stage = scan(events).stages["scan"]
        assert stage.state_of(stage.task(0)) == "done"


def test_notes_say_what_this_attempt_was_on_and_nothing_of_another(run: RunFolder) -> None:
    for part, name in enumerate("ab"):
        note = Note(run.on("embed", 3, part), 2)
        note.write(5, [name])
        note.close()
    assert read_notes(run, "embed", 3, 2) == (10, ("a", "b"))
    assert read_notes(run, "embed", 3, 3) == read_notes(run, "embed", 4, 2) == (0, ())
    again = Note(run.on("embed", 3), 2)  # a start over is told how far the attempt had come
    assert again.done_before == 5
    again.close()
    Note(run.on("scan", 0), 2).close()  # which died before its first word
    run.on("scan", 1).mkdir()
    assert read_notes(run, "scan", 0, 2) == read_notes(run, "scan", 1, 1) == (0, ())


def test_a_torn_line_of_what_is_left_out_is_skipped(run: RunFolder) -> None:
    leave_out(run, "scan", ["a"], Reason.KILLED_ITS_TASK, "why")
    with run.left_out.open("a") as file:
        file.write('{"stage": "sc')
    assert left_out_items(run, "scan") == {"a": (Reason.KILLED_ITS_TASK, "why")}
    assert left_out_items(run, "embed") == {}


def test_splitting_twice_is_splitting_once(run: RunFolder) -> None:
    run.todo("scan").write_text("".join(json.dumps(number) + "\n" for number in range(7)))
    whole = [Shard(0, 8, 4), Shard(8, 14, 3)]
    worklist._write_shards(run, "scan", whole)

    def halve(folder: RunFolder, shard: Shard) -> tuple[Shard, Shard]:
        return worklist.halve_lines(folder.todo("scan"), shard)

    first = worklist.split_shards(run, "scan", [0, 1], halve)
    assert first == {0: [2, 3], 1: [4, 5]}
    assert worklist.split_shards(run, "scan", [0, 1], halve) == first
    shards = worklist.read_shards(run, "scan")
    assert [(one.start, one.end, one.items) for one in shards[2:]] == [(0, 4, 2), (4, 8, 2), (8, 10, 1), (10, 14, 2)]


def test_a_list_of_the_data_set_that_was_cut_short_is_not_taken_for_the_whole(make_project: MakeProject) -> None:
    folder = make_project(3)
    config = read_config(folder / "pipeline.yaml").config
    run = folders.create_folder(folder / "runs", "graph", datetime(2026, 1, 2, tzinfo=UTC))
    run.items.with_suffix(".partial").write_text('{"id": "c0"}\n')  # who wrote it died
    assert len(list(worklist.frozen_items(Project.open(config), run))) == 3


@pytest.mark.parametrize("first_spoke", [True, False])
def test_a_split_forgets_what_all_its_processes_did_also_where_the_first_died_silently(first_spoke: bool) -> None:
    events = begun(1)
    for part in range(0 if first_spoke else 1, 3):
        figures = {"done": 4, "rejected": {"parse_error": 1}, "figures": {"cost_done": 1.0}}
        writer = f"scan-000000-{part}"
        events.append(replace(event(EventKind.PROGRESS, 3.0, task=0, attempt=1, **figures), writer=writer))
    whole = scan(events).stages["scan"]
    assert whole.items_done == (12 if first_spoke else 8)
    halves = event(EventKind.TASK_SPLIT, 4.0, task=0, into=[1, 2], ask=ASK.to_json(), why="in halves")
    split = scan([*events, halves]).stages["scan"]
    assert (split.items_done, dict(split.reasons), split.figures) == (0, {}, {})
