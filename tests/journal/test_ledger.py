"""The ledger: what crashes, full disks and newer versions do to it, and what a run is folded to."""

from __future__ import annotations

import errno
import os
import socket
from datetime import datetime, timezone
from pathlib import Path

import psutil
import pytest

from pipeline.errors import ConfigError, JobFailed
from pipeline.journal import ledger as ledger_module
from pipeline.journal.active_runs import status_of
from pipeline.journal.ledger import Ledger, LedgerReader
from pipeline.journal.run_folder import RunFolder, create_folder, find_run, runs_in
from pipeline.journal.run_status import RunState
from pipeline.records import EventKind

HOST = socket.gethostname()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return new_run(tmp_path)


def new_run(runs: Path, microsecond: int = 0) -> RunFolder:
    folder = create_folder(runs, "scan", datetime(2026, 1, 2, 3, 4, 5, microsecond, tzinfo=timezone.utc))
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
    later, sooner = new_run(tmp_path, 900_000), new_run(tmp_path, 100)
    create_folder(tmp_path, "scan", datetime(2027, 1, 1, tzinfo=timezone.utc))  # its maker died before it was whole
    assert runs_in(tmp_path) == [sooner, later]
    assert find_run(tmp_path, None) == later
    assert find_run(tmp_path, sooner.name[:20]) == sooner
    for wrong in ("20260102", "", "nonsense", ".."):
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
    status = status_of(folder)
    assert (status.state, status.stages["scan"].state) == (RunState.ABANDONED, RunState.ABANDONED)


def test_a_run_whose_supervisors_number_went_to_a_later_process_is_abandoned(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reboot; versions before wrote down no start of the supervisor, but when it began its work."""
    monkeypatch.setattr(ledger_module.time, "time", lambda: psutil.Process().create_time() - 3600)
    begin(folder, HOST, os.getpid())
    assert status_of(folder).state is RunState.ABANDONED


def test_of_another_host_nobody_can_say_that_it_is_gone(folder: RunFolder) -> None:
    begin(folder, "elsewhere", 1 << 22)
    assert status_of(folder).state is RunState.RUNNING


def test_a_stopped_run_has_no_running_stage_even_if_its_clock_went_back(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = begin(folder, HOST, os.getpid())
    monkeypatch.setattr(ledger_module.time, "time", lambda: 1.0)
    ledger.emit(EventKind.RUN_ENDED, state="stopped", error="stopped by a signal", exit_code=130)
    status = status_of(folder)
    assert (status.state, status.stages["scan"].state) == (RunState.STOPPED, RunState.STOPPED)


def test_what_a_task_said_of_its_failure_is_shown_with_it(folder: RunFolder) -> None:
    ledger = begin(folder, HOST, os.getpid())
    Ledger(folder, "scan-000000").emit(
        EventKind.TASK_FAILED, stage="scan", task=0, what="the disk is full", exit_code=7
    )
    ended = {"state": "FAILED", "reason": "exit code 7", "log": "x.err", "said": "the disk is full"}
    ledger.emit(EventKind.TASK_ENDED, stage="scan", task=0, **ended)
    (failure,) = status_of(folder).to_json()["stages"][0]["failures"]
    assert (failure["reason"], failure["said"]) == ("exit code 7", "the disk is full")
