"""Who wanted to know is told, and a telling that fails is no failure of the run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pipeline.config.schema_cluster import NotifySection
from pipeline.engine.handover import notify
from pipeline.journal.run_folder import RunFolder
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
