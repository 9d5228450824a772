"""People are notified as they wish, of each wait once and of its end; a notification that fails fails no run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pipeline.cluster.job_spec import SUPERVISE, TaskState
from pipeline.cluster.slurm_words import Queued, reason_words
from pipeline.config.schema_cluster import NotifySection
from pipeline.engine.notices import notify, notify_of_waits
from pipeline.journal.run_folder import RunFolder
from pipeline.journal.run_view import QueueLook, RunView
from tests.journal.ledgers import Told
from tests.testkit.command import Command
from tests.testkit.project import MakeProject

TELLS = "import json, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(json.dumps(sys.argv[2:]))"
HOSTILE = "it's $(id) `id` \n; rm -rf /"


def test_a_command_is_run_with_what_happened_and_no_shell_reads_it(tmp_path: Path) -> None:
    told = tmp_path / "told"
    wanted = NotifySection(command=(sys.executable, "-c", TELLS, str(told)))
    notify(wanted, RunFolder(tmp_path / "r"), "scan", "failed", HOSTILE)
    assert json.loads(told.read_text()) == ["r", "scan", "failed", HOSTILE]


@pytest.mark.parametrize("command", ["/no/such/program", "false"])
def test_a_command_that_fails_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, command: str) -> None:
    notify(NotifySection(command=(command,)), RunFolder(tmp_path / "r"), "scan", "done", "")
    assert command in caplog.text


def test_a_mail_says_what_happened_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sendmail = tmp_path / "sendmail"
    sendmail.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/to\ncat > {tmp_path}/mail\n')
    sendmail.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    notify(NotifySection(mail="lab@example.org"), RunFolder(tmp_path / "r"), "scan", "done", "")
    assert (tmp_path / "to").read_text() == "lab@example.org\n"
    lines = (tmp_path / "mail").read_text().splitlines()
    assert lines[0] == "Subject: pipeline: scan done (r)"
    assert str(tmp_path / "r") in lines


def test_every_stage_is_told_of_once(pipeline: Command, make_project: MakeProject, tmp_path: Path) -> None:
    program = tmp_path / "tell.py"
    program.write_text(f"import sys\nopen({str(tmp_path / 'told')!r}, 'a').write(' '.join(sys.argv[2:4]) + chr(10))\n")
    make_project(2, cluster__notify__command=[sys.executable, str(program)])
    assert pipeline("submit", "--stage", "scan", "--follow").code == 0
    assert (tmp_path / "told").read_text() == "scan done\n"


@pytest.fixture
def told(tmp_path: Path) -> Told:
    """Return a run of two tasks that were submitted as job 7."""
    told = Told(tmp_path / "runs")
    told.job("7", [0, 1])
    return told


def queue(*waiting: tuple[str, str]) -> QueueLook:
    """Return a queue in which tasks wait for reasons."""
    pending = TaskState.PENDING
    return QueueLook({job: Queued(job, pending, reason, reason_words(reason), None, "") for job, reason in waiting})


HELD = queue(("7_0", "JobHeldUser"), ("7_1", "JobHeldUser"))
QUEUED = queue(("7_0", "Priority"), ("7_1", "Resources"))
TWO, ONE = (queue(("7_0", "JobHeldUser"), ("7_1", reason)) for reason in ("PartitionDown", "Priority"))
SILENT = QueueLook(None, "no answer")


@pytest.mark.parametrize(
    ("looks", "heard", "over"),
    [
        ([HELD, HELD], ["waiting"], [False]),
        ([HELD, QUEUED, QUEUED], ["waiting", "waited"], [True]),
        ([HELD, QUEUED, HELD, HELD, QUEUED], ["waiting", "waited"] * 2, [True, True]),
        ([TWO, ONE], ["waiting", "waiting", "waited"], [False, True]),
        ([QUEUED, QueueLook({}), SILENT], [], []),
        ([HELD, SILENT], ["waiting"], [False]),
    ],
)
def test_each_wait_is_reported_once_and_once_when_it_is_over(
    tmp_path: Path, told: Told, looks: list[QueueLook], heard: list[str], over: list[bool]
) -> None:
    appends = TELLS.replace("write_text(json.dumps(sys.argv[2:]))", "open('a').write(sys.argv[4] + chr(10))")
    wanted = NotifySection(command=(sys.executable, "-c", appends, str(tmp_path / "heard")))
    for look in looks:
        notify_of_waits(RunView(told.folder, told.status, look), wanted, told.supervisor.emit)
    found = (tmp_path / "heard").read_text().split() if heard else []
    assert found == heard
    assert [wait.is_over for wait in told.status.waits] == over
    assert not (tmp_path / "heard").exists() or heard


def test_a_wait_names_what_helps(tmp_path: Path, told: Told) -> None:
    notify_of_waits(RunView(told.folder, told.status, HELD), NotifySection(), told.supervisor.emit)
    (wait,) = told.status.waits
    assert (wait.reason, wait.tasks, wait.remedy, wait.since > 0) == ("JobHeldUser", 2, "scontrol release 7", True)
    status = told.status
    status.abandon()
    notify_of_waits(RunView(told.folder, status, QUEUED), NotifySection(), told.supervisor.emit)
    assert (told.status.waits[1].of, told.status.waits[1].remedy) == (SUPERVISE, f"pipeline resume {told.folder.name}")
