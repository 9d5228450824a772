"""The ledger: what crashes, full disks and newer versions do to it, and what a run is folded to."""

from __future__ import annotations

import errno
import json
import os
import socket
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cluster.verdict import Cause
from pipeline.config.load import read_config
from pipeline.dataset import worklist
from pipeline.dataset.worklist import Shard
from pipeline.errors import ConfigError, JobFailed
from pipeline.journal import ledger as ledger_module
from pipeline.journal.attempts import Ask, Attempt, leave_out, left_out_items
from pipeline.journal.ledger import Ledger, LedgerReader, Note, read_notes
from pipeline.journal.run_folder import RunFolder, create_folder, find_run, runs_in
from pipeline.journal.run_status import State
from pipeline.journal.run_view import view
from pipeline.project.project import Project
from pipeline.records import EventKind, Reason
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
    (folder.events / "a.jsonl").write_bytes(
        b'garbage\n{"kind": "teleported", "at": 1}\n[]\n{"at": 1}\n{"kind": "progress", "at": 1}}\n'
    )
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
    ended = Attempt(0, 1, Ask(1, 1), Cause.FAILED, "exit code 7", log="x.err", said="the disk is full")
    ledger.emit(EventKind.TASK_ENDED, stage="scan", **ended.to_event())
    (failure,) = view(folder).status.to_json()["stages"][0]["failures"]
    assert (failure["reason"], failure["said"]) == ("exit code 7", "the disk is full")


SAID = st.tuples(
    st.sampled_from(
        [EventKind.TASK_STARTED, *[EventKind.PROGRESS] * 2, EventKind.TASK_FINISHED, EventKind.TASK_FAILED]
    ),
    st.sampled_from([{}, {"a": 1.0}]),
)


@given(st.lists(SAID, max_size=12))
def test_a_reader_that_skips_superseded_progress_sees_the_same_run(said: list[tuple[EventKind, Any]]) -> None:
    with TemporaryDirectory() as place:
        run = new_run(Path(place))
        begin(run, HOST, os.getpid()).close()
        ledger = Ledger(run, "scan-000000")
        for done, (kind, figures) in enumerate(said):
            more = {"what": "", "exit_code": 1} if kind is EventKind.TASK_FAILED else {}
            facts = {"stage": "scan", "task": 0, "attempt": 1, "done": done, "rejected": {}, "figures": figures}
            ledger.emit(kind, **facts, **more)
        ledger.close()
        kept, whole = (list(LedgerReader(run, whole=is_whole).fresh()) for is_whole in (False, True))
    assert fold_events("run", kept) == fold_events("run", whole)
    pairs = pairwise(kind for kind, figures in said if figures)
    if any(pair == (EventKind.PROGRESS, EventKind.PROGRESS) for pair in pairs) and all(figures for _, figures in said):
        assert len(kept) < len(whole)


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
    worklist.StageSurvey({}, tuple(whole)).write_shards(folder, "scan")

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
