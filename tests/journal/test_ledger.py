"""The ledger: what crashes, full disks and newer versions do to it, and what a run is folded to."""

from __future__ import annotations

import errno
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.load import read_config
from pipeline.dataset import worklist
from pipeline.dataset.worklist import Shard
from pipeline.errors import ConfigError, JobFailed
from pipeline.journal import ledger as ledger_module
from pipeline.journal.attempts import leave_out, left_out_items
from pipeline.journal.ledger import Ledger, LedgerReader, Note, read_notes
from pipeline.journal.run_folder import RunFolder, create_folder, find_run, runs_in
from pipeline.journal.run_status import State
from pipeline.journal.run_view import view
from pipeline.project.project import Project
from pipeline.records import Event, EventKind, Reason
from tests.journal.ledgers import fold_events
from tests.testkit.project import make_project

HOST = socket.gethostname()
BEGUN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return new_run(tmp_path)


def new_run(runs: Path, at: datetime = BEGUN) -> RunFolder:
    folder = create_folder(runs, at)
    folder.stages.write_text('["scan"]')
    return folder


def kinds(folder: RunFolder) -> list[EventKind]:
    return [event.kind for event in LedgerReader(folder).fresh()]


def test_a_reader_sees_each_event_once_and_a_half_written_one_when_it_is_whole(folder: RunFolder) -> None:
    ledger, reader = Ledger(folder, "a"), LedgerReader(folder)
    ledger.emit(EventKind.PROGRESS, stage="scan", task=0, done=1, rejected={})
    assert len(list(reader.fresh())) == 1
    with (folder.events / "a.jsonl").open("ab") as file:
        file.write(b'{"kind": "progress", "at": 1, ')
    assert list(reader.fresh()) == []
    with (folder.events / "a.jsonl").open("ab") as file:
        file.write(b'"done": 2}\n')
    assert [event.data["done"] for event in reader.fresh()] == [2]
    assert list(reader.fresh()) == []


def test_a_writer_that_follows_a_torn_line_loses_only_that_line(folder: RunFolder) -> None:
    (folder.events / "a.jsonl").write_bytes(b'{"kind": "progr')
    Ledger(folder, "a").emit(EventKind.RUN_ENDED, state="done", error="", exit_code=0)
    assert kinds(folder) == [EventKind.RUN_ENDED]


def test_garbage_and_events_of_a_newer_version_are_passed_over(folder: RunFolder) -> None:
    (folder.events / "a.jsonl").write_bytes(b'garbage\n{"kind": "teleported", "at": 1}\n[]\n{"at": 1}\n')
    assert kinds(folder) == []


def test_a_full_disk_under_the_run_is_said_in_words(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(folder, "a")

    def full(*_arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ledger_module.os, "write", full)
    with pytest.raises(JobFailed, match="No space left") as caught:
        ledger.emit(EventKind.RUN_ENDED)
    assert "cluster.runs" in caught.value.remedy


def test_runs_of_one_second_keep_their_order_and_half_made_ones_do_not_count(tmp_path: Path) -> None:
    sooner, later, evening = new_run(tmp_path), new_run(tmp_path), BEGUN.replace(hour=23, minute=59, second=59)
    last, midnight = new_run(tmp_path, evening), new_run(tmp_path, evening)  # the last name of that day is taken
    create_folder(tmp_path, datetime(2027, 1, 1, tzinfo=UTC))  # its maker died before it was whole
    assert runs_in(tmp_path) == [sooner, later, last, midnight]
    names = ["20260102-20b9", "20260102-20ba", "20260102-ffff", "20260103-0000"]
    assert [run.name for run in runs_in(tmp_path)] == names
    assert find_run(tmp_path, None) == midnight
    assert find_run(tmp_path, sooner.name) == find_run(tmp_path, "20b9") == sooner
    assert find_run(tmp_path, "20260103") == find_run(tmp_path, "0000") == midnight
    for wrong in ("20260102", "20b", "", "nonsense", ".."):
        with pytest.raises(ConfigError):
            find_run(tmp_path, wrong)


def begin(folder: RunFolder, host: str, pid: int) -> Ledger:
    ledger = Ledger(folder, "supervisor")
    ledger.emit(EventKind.RUN_STARTED, stages=["scan"], host=host, pid=pid)
    ledger.emit(EventKind.STAGE_SUBMITTED, stage="scan", items=3, cached=1, missing=2, tasks=1)
    return ledger


def test_a_run_whose_supervisor_is_gone_is_abandoned_with_its_stage(folder: RunFolder) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    begin(folder, HOST, child)
    status = view(folder).status
    assert (status.state, status.stages["scan"].state) == (State.ABANDONED, State.ABANDONED)
    elsewhere = new_run(folder.path.parent)
    begin(elsewhere, "elsewhere", 1 << 22)  # of another host nobody can say that it is gone
    assert view(elsewhere).status.state is State.RUNNING


def test_a_run_whose_supervisors_number_went_to_a_later_process_is_abandoned(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reboot."""
    monkeypatch.setattr(ledger_module.time, "time", lambda: psutil.Process().create_time() - 3600)
    begin(folder, HOST, os.getpid())
    assert view(folder).status.state is State.ABANDONED


def test_a_stopped_run_has_no_running_stage_even_if_its_clock_went_back(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = begin(folder, HOST, os.getpid())
    monkeypatch.setattr(ledger_module.time, "time", lambda: 1.0)
    ledger.emit(EventKind.RUN_ENDED, state="stopped", error="stopped by a signal", exit_code=130)
    status = view(folder).status
    assert (status.state, status.stages["scan"].state) == (State.STOPPED, State.STOPPED)


def test_what_a_task_said_of_its_failure_is_shown_with_it(folder: RunFolder) -> None:
    ledger = begin(folder, HOST, os.getpid())
    Ledger(folder, "scan-000000").emit(
        EventKind.TASK_FAILED, stage="scan", task=0, what="the disk is full", exit_code=7
    )
    ended = {"state": "FAILED", "reason": "exit code 7", "log": "x.err", "said": "the disk is full"}
    ledger.emit(EventKind.TASK_ENDED, stage="scan", task=0, **ended)
    (failure,) = view(folder).status.to_json()["stages"][0]["failures"]
    assert (failure["reason"], failure["said"]) == ("exit code 7", "the disk is full")


def line_of(kind: EventKind, place: int, figures: dict[str, float] | None = None) -> bytes:
    """Return what a worker writes."""
    data = {"stage": "scan", "task": 0, "attempt": 1, "done": place, "rejected": {}, "figures": figures or {}}
    said = {"what": "", "exit_code": 1} if kind is EventKind.TASK_FAILED else {}
    text = json.dumps({"at": float(place), "kind": kind.value, **data, **said}, separators=(",", ":"))
    return text.encode()


STARTED, PROGRESS = EventKind.TASK_STARTED, EventKind.PROGRESS
FINISHED, FAILED = EventKind.TASK_FINISHED, EventKind.TASK_FAILED
SAID = st.tuples(st.sampled_from([STARTED, PROGRESS, PROGRESS, FINISHED, FAILED]), st.sampled_from(["", "a"]))


@given(st.lists(SAID, max_size=12))
def test_what_a_worker_wrote_means_the_same_without_what_later_lines_supersede(
    said: list[tuple[EventKind, str]],
) -> None:
    lines = [line_of(kind, place, {name: 1.0} if name else None) for place, (kind, name) in enumerate(said)]
    kept = list(ledger_module._telling(lines))
    assert [line for line in lines if line in kept] == kept
    begun = Event(EventKind.STAGE_SUBMITTED, 0.0, "supervisor-000001", {"stage": "scan", "tasks": 1})
    told, whole = (
        fold_events("r", [*filter(None, (ledger_module._event(line, "scan-000000") for line in some)), begun])
        for some in (kept, lines)
    )
    assert told == whole


def test_progress_is_superseded_by_newer_progress_with_figures_of_its_own() -> None:
    for said, kept in (
        ([], []),
        ([(STARTED, "")], [0]),
        ([(STARTED, ""), (PROGRESS, "a"), (PROGRESS, "a"), (FINISHED, "a")], [0, 3]),
        ([(STARTED, ""), (PROGRESS, "a"), (PROGRESS, "a"), (FINISHED, "")], [0, 2, 3]),
        ([(STARTED, ""), (PROGRESS, ""), (PROGRESS, ""), (FINISHED, "")], [0, 3]),
        ([(STARTED, ""), (PROGRESS, "a"), (FAILED, ""), (STARTED, ""), (FINISHED, "a")], [0, 1, 2, 3, 4]),
        ([(STARTED, ""), (FAILED, ""), (FINISHED, "a")], [0, 1, 2]),
        ([(STARTED, ""), (PROGRESS, "a"), (FAILED, ""), (FINISHED, "a")], [0, 1, 2, 3]),
        ([(PROGRESS, "a"), (PROGRESS, "a"), (FINISHED, "a")], [2]),
        ([(PROGRESS, "a"), (PROGRESS, ""), (PROGRESS, "a")], [0, 2]),
        ([(PROGRESS, "a"), (PROGRESS, "")], [0, 1]),
        ([(PROGRESS, "a"), (FAILED, "")], [0, 1]),
        ([(STARTED, ""), *[(PROGRESS, "a")] * 6, (FINISHED, "a")], [0, 7]),
    ):  # fmt: skip
        lines = [line_of(kind, place, {name: 1.0} if name else None) for place, (kind, name) in enumerate(said)]
        assert [lines.index(line) for line in ledger_module._telling(lines)] == kept, said


def test_a_line_with_something_behind_its_event_is_torn() -> None:
    line = line_of(PROGRESS, 1)
    assert ledger_module._event(line, "w") is not None
    assert ledger_module._event(line + b"}", "w") is None


def test_notes_say_what_this_attempt_was_on_and_nothing_of_another(folder: RunFolder) -> None:
    for part, name in enumerate("ab"):
        note = Note(folder.on("embed", 3, part), 2)
        note.write(5, [name])
        note.close()
    assert read_notes(folder, "embed", 3, 2) == (10, ("a", "b"))
    assert read_notes(folder, "embed", 3, 3) == read_notes(folder, "embed", 4, 2) == (0, ())
    again = Note(folder.on("embed", 3), 2)  # a start over is told how far the attempt had come
    assert again.done_before == 5
    again.close()
    Note(folder.on("scan", 0), 2).close()  # which died before its first word
    folder.on("scan", 1).mkdir()
    assert read_notes(folder, "scan", 0, 2) == read_notes(folder, "scan", 1, 1) == (0, ())


def test_a_torn_line_of_what_is_left_out_is_skipped(folder: RunFolder) -> None:
    leave_out(folder, "scan", ["a"], Reason.KILLED_ITS_TASK, "why")
    with folder.left_out.open("a") as file:
        file.write('{"stage": "sc')
    assert left_out_items(folder, "scan") == {"a": (Reason.KILLED_ITS_TASK, "why")}
    assert left_out_items(folder, "embed") == {}


def test_splitting_twice_is_splitting_once(folder: RunFolder) -> None:
    folder.todo("scan").write_text("".join(json.dumps(number) + "\n" for number in range(7)))
    whole = [Shard(0, 8, 4), Shard(8, 14, 3)]
    worklist._write_shards(folder, "scan", whole)

    def halve(folder: RunFolder, shard: Shard) -> tuple[Shard, Shard]:
        return worklist.halve_lines(folder.todo("scan"), shard)

    first = worklist.split_shards(folder, "scan", [0, 1], halve)
    assert first == {0: [2, 3], 1: [4, 5]}
    assert worklist.split_shards(folder, "scan", [0, 1], halve) == first
    shards = worklist.read_shards(folder, "scan")
    assert [(one.start, one.end, one.items) for one in shards[2:]] == [(0, 4, 2), (4, 8, 2), (8, 10, 1), (10, 14, 2)]


def test_a_list_of_the_data_set_is_whole_though_one_process_died_and_two_write_it_at_once(tmp_path: Path) -> None:
    config = read_config(make_project(tmp_path, 3).folder / "pipeline.yaml").config
    run = new_run(tmp_path / "runs")
    dies, first, second = (worklist.frozen_items(Project.open(config), run) for _ in range(3))
    assert next(dies) == next(first)
    dies.close()  # type: ignore[attr-defined]  # a generator
    assert not run.items.exists()
    assert (len(list(second)), len(list(first))) == (3, 2)
    assert len(list(worklist.read_items(run.items))) == 3
