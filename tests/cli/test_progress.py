"""Progress on a terminal and without one."""

from __future__ import annotations

import io
import re
import sys

import pytest

from pipeline.cli.run_verbs import shown
from pipeline.report import live_status
from pipeline.report.tables import show_parts
from pipeline.store.maintenance.damage_report import Checked
from tests.cli.told import seen, training

WIDTH = 80


def test_a_long_look_says_now_and_then_how_far_and_how_fast_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 5.0, 5.0, 11.0, 11.0, 12.0, 12.0])
    monkeypatch.setattr(live_status.time, "monotonic", lambda: next(clock))
    with live_status.CheckBars("full", 9) as progress:
        for number in range(3):
            progress.take(Checked("graph", f"{number}", read_bytes=11 << 20))
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "full: 2 of 9 files, 22.0 MiB, 2.0 MiB/s, 0 wrong\n")


def screen_of(output: str) -> list[str]:
    """Return the lines that a terminal of unlimited height shows after it received some output."""
    lines, at = [""], 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r?\n|\r|[^\x1b\r\n]+", output):
        if piece == "\x1b[2K":
            lines[at] = ""
        elif up := re.fullmatch(r"\x1b\[(\d+)A", piece):
            at -= int(up[1])
        elif piece.endswith("\n"):
            at += 1
            lines += [""] * (at == len(lines))
        elif piece[0] not in "\x1b\r":
            lines[at] += piece
    return lines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_run_of_several_stages_shows_each_bar_once_and_glues_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    for name, value in (("COLUMNS", str(WIDTH)), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    events = training()
    with live_status.StageBars() as bars:
        show = shown(bars)
        for count in range(1, len(events) + 1):
            show(seen(events[:count]).status)
    lines = screen_of(terminal.getvalue())
    for stage in ("scan", "graph", "train"):
        assert [line.startswith(f"{stage}: ") for line in lines if f"{stage}: " in line] == [True], lines
        assert [line.startswith(f"{stage} ") for line in lines if re.search(rf"{stage} +[━╸]", line)] == [True], lines
    assert any("11 rejected" in line for line in lines)
    assert all(len(line) <= WIDTH for line in lines)


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
