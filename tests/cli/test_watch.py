"""What `status --watch` shows in a real terminal, and what a refresh costs."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.command_line import Command
from pipeline.journal.run_status import RunStatus, StageStatus
from pipeline.journal.run_view import RunView, ViewReader
from pipeline.records import EventKind
from pipeline.report import live_status
from pipeline.report.live_status import PaceMeter, watched
from pipeline.report.run_text import status_report
from tests.cli.told import RUNS, beginning, seen, training
from tests.journal.ledgers import Told

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PIPELINE = Path(sys.executable).with_name("pipeline")
LONG_S = 300  # a machine may be busy; this only ends what would never end


def at(done: int) -> RunStatus:
    return RunStatus("a run", stages={"scan": StageStatus("scan", started_at=100.0, done={"scan-000000": done})})


def test_a_pace_is_that_of_the_last_changes_and_falls_when_nothing_comes_any_more() -> None:
    pace = PaceMeter()
    assert pace.take(at(50), 110.0) == {"scan": 5.0}  # since the beginning
    for second in range(live_status.CHANGES):
        latest = pace.take(at(50 + 20 * (second + 1)), 111.0 + second)
    assert latest == {"scan": pytest.approx(20.0)}
    pace = PaceMeter()
    pace.take(at(100), 110.0)
    assert pace.take(at(100), 1100.0)["scan"] == pytest.approx(0.1)
    assert pace.take(at(10), 1101.0) == {"scan": 0.0}  # it began again
    assert pace.take(at(30), 1111.0) == {"scan": 2.0}


def report(run: RunView, paces: Mapping[str, float]) -> list[Any]:
    return status_report(run, Command.of("status"), paces=paces)


def test_where_there_is_no_terminal_a_report_is_printed_whenever_something_has_changed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_status, "EVERY_S", 0.0)
    first, second = seen(beginning()), seen(training())
    later = replace(first, at=first.at + 60)  # only the clock went on
    looks = iter([first, later, first, second, second, seen(RUNS["done"][0])])
    watched(lambda: next(looks), report)
    out = capsys.readouterr().out
    assert out.count("Run 20261122-8000 · running") == 2
    assert out.count("Run 20261122-8000 · done") == 1  # the last one stays
    assert "\x1b" not in out


def test_a_refresh_opens_only_files_that_grew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(tmp_path / "runs", tasks=50)
    for task in range(50):
        told.worker(task, EventKind.TASK_STARTED)
    now = ViewReader(told.folder).view
    now()
    opened = list[str]()
    really = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: opened.append(str(path)) or really(path, *rest))
    now()
    assert opened == []
    told.worker(7, EventKind.PROGRESS, done=3, rejected={}, figures={})
    opened.clear()
    assert now().status.stages["scan"].items_done == 3
    assert [Path(path).name for path in opened] == ["scan-000007.jsonl"]


def resize(terminal: int, width: int, height: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))


def read_until(terminal: int, wanted: str) -> str:
    """Return what a terminal was sent up to some text; a terminal that ends is an end, too."""
    got = b""
    while wanted.encode() not in got:
        try:
            piece = os.read(terminal, 1 << 16)
        except OSError:
            break
        if not piece:
            break
        got += piece
    return got.decode()


@contextmanager
def watching(told: Told, **more: str) -> Iterator[tuple[subprocess.Popen[bytes], int, str]]:
    """Have a run watched in a terminal of 100 × 24, and give what it shows at first."""
    told.worker(0, EventKind.TASK_STARTED)
    terminal, inside = pty.openpty()
    resize(terminal, 100, 24)
    words = [PIPELINE, "status", "--watch", told.folder.path]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color"} | more
    with subprocess.Popen(words, stdin=inside, stdout=inside, stderr=inside, env=environment) as running:
        os.close(inside)
        try:
            yield running, terminal, read_until(terminal, "Ctrl-C leaves")
        finally:
            running.kill()
    os.close(terminal)


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_is_filled_resized_and_given_back(tmp_path: Path, no_color: bool) -> None:
    told, more = Told(tmp_path / "runs"), {"NO_COLOR": "1"} if no_color else {}
    with watching(told, **more) as (running, terminal, first):
        assert "\x1b[?1049h" in first  # another screen, so that what was there comes back
        assert ("\x1b[36m" in first) is not no_color
        for rows in (20, 3):  # drawn anew, though nothing has happened; where there is little room, the last lines stay
            resize(terminal, 60, rows)
            again = read_until(terminal, "Ctrl-C leaves")
            assert f"Run {told.folder.name}" in again
            assert "Ctrl-C leaves" in again
        running.send_signal(signal.SIGINT)
        rest = read_until(terminal, "reported no")
        assert running.wait(LONG_S) == 0
    assert rest.index("\x1b[?1049l") < rest.rindex(f"Run {told.folder.name} · ")  # it stays on the usual screen
    assert "interrupted" not in rest


def test_a_terminal_is_given_back_by_what_is_told_to_end(tmp_path: Path) -> None:
    with watching(Told(tmp_path / "runs")) as (running, terminal, first):
        assert first.index("\x1b[?1049h") < first.index("\x1b[?25l")
        running.send_signal(signal.SIGTERM)
        rest = read_until(terminal, "reported no")
        assert running.wait(LONG_S) == -signal.SIGTERM  # who waits for it is told of what it ended
    assert "\x1b[?1049l" in rest
    assert "\x1b[?25h" in rest  # the cursor
    assert "Traceback" not in rest
