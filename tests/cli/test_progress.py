"""Progress on a terminal and without one."""

from __future__ import annotations

import sys

import pytest

from pipeline.report import live_status
from pipeline.report.tables import show_parts
from pipeline.store.maintenance.damage_report import Checked
from tests.cli.test_screens import Terminal

WIDTH = 80


def test_a_long_look_says_now_and_then_how_far_and_how_fast_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 5.0, 5.0, 11.0, 11.0, 12.0, 12.0])
    monkeypatch.setattr(live_status.time, "monotonic", lambda: next(clock))
    with live_status.WorkBar("full", 9) as progress:
        for number in range(3):
            progress.take(Checked("graph", f"{number}", read_bytes=11 << 20))
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "  full      2/9 files, 22.0M, 2.0M/s, 0 wrong\n")


def test_a_line_that_has_not_changed_is_not_printed_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, *(moment for moment in (11.0, 22.0, 33.0) for _ in range(2))])
    monkeypatch.setattr(live_status.time, "monotonic", lambda: next(clock))
    with live_status.WorkBar("full", 9) as progress:
        for name in ("", "", "0"):  # an index, another one, a shard
            progress.take(Checked("graph", name, read_bytes=0))
    lines = capsys.readouterr().err.splitlines()
    assert ["0/9 files" in lines[0], "1/9 files" in lines[1], len(lines)] == [True, True, 2]


def test_a_long_line_is_wrapped_and_indented_on_a_terminal_and_left_alone_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "  " + " ".join(["word"] * 40)
    show_parts(line)
    assert capsys.readouterr().out == f"{line}\n"
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    show_parts(line)
    first, *rest = terminal.getvalue().splitlines()
    assert first.startswith("  word")
    assert {line[:7] for line in rest} == {" " * 6 + "w"}
