"""What terminals and a pipe show of a run, frozen in `screens`.

`python -m tests.cli.test_screens` writes the frozen screens again.
"""

from __future__ import annotations

import io
import re
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from pipeline.cli.run_verbs import _show_end
from pipeline.cluster.job_spec import JobId, TaskState, TaskStatus
from pipeline.cluster.slurm_words import Queued, reason_words
from pipeline.cluster.verdict import Word, judge_attempt
from pipeline.command_line import Command
from pipeline.journal.run_status import ENDED, State
from pipeline.journal.run_view import QueueLook
from pipeline.report import live_status
from pipeline.report.live_status import RunProgress
from pipeline.report.run_text import status_report
from pipeline.report.tables import columns, show_parts
from tests.cli.told import NOON, PACE, QUEUED, RUNS, ended, job, seen, training

SCREENS = Path(__file__).parent / "screens"
WIDTHS = {"40": 40, "80": 80, "120": 120, "200": 200, "pipe": 0}
SIX = tuple(RUNS)[:6]
SHOWN = [(name, width) for name in SIX for width in WIDTHS if width != "40" or name in ("done", "running")]
SHOWN += [(name, "80") for name in tuple(RUNS)[6:]]
TYPED = Command.submit("all")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
    return [line.rstrip() for line in lines]


def followed(name: str, stream: io.StringIO) -> str:
    """Return what `submit --follow` wrote of a run, to which it was shown event after event."""
    events, more = RUNS[name]
    run = seen(events, **more)
    with redirect_stdout(stream), redirect_stderr(stream), RunProgress() as progress:
        for count in range(1, len(events) + 1):
            early = seen(events[:count])
            progress.show(early.status, lambda early=early: early)  # type: ignore[misc]
        if run.status.state in (*ENDED, State.ABANDONED):
            _show_end(SimpleNamespace(command=lambda: TYPED), run.status, progress)  # type: ignore[arg-type]
        else:
            progress.show(run.status, lambda: run)
            print("a line that the user's own code prints", file=sys.stderr)  # noqa: T201
            progress._live.refresh()
        return stream.getvalue()


def reported(name: str, stream: io.StringIO, *below: str, **more: Any) -> str:
    """Return what `status` wrote of a run."""
    events, seen_by = RUNS[name]
    with redirect_stdout(stream):
        show_parts(*status_report(seen(events, **seen_by), Command.of("status"), columns(), **more), *below)
    return stream.getvalue()


def shown(name: str, width: int) -> str:
    """Return all that is shown of a run on a terminal, or in a pipe where it has no width."""
    make = Terminal if width else io.StringIO
    with mock.patch.dict("os.environ", {"COLUMNS": str(width or 80), "TERM": "xterm", "TZ": "UTC"}, clear=True):
        time.tzset()
        with (
            mock.patch.object(live_status, "LOOK_EVERY_S", 0.0),
            mock.patch.object(time, "time", return_value=NOON + 500),
        ):
            parts = {"submit --follow": followed(name, make()), "status": reported(name, make())}
            if width and seen(RUNS[name][0], **RUNS[name][1]).goes_on:
                parts["status --watch"] = reported(name, make(), "", live_status.LEAVES, paces=PACE)
    time.tzset()
    if not width:
        assert "\x1b" not in "".join(parts.values())
    blocks = {typed: screen_of(text) for typed, text in parts.items()}
    assert not width or all(len(line) <= width for lines in blocks.values() for line in lines), blocks
    return "\n".join(f"$ pipeline {typed}\n" + "\n".join(lines).rstrip() + "\n" for typed, lines in blocks.items())


@pytest.mark.parametrize(("name", "width"), SHOWN)
def test_a_screen_is_as_frozen(name: str, width: str) -> None:
    frozen = SCREENS / f"{name}-{width}.txt"
    assert shown(name, WIDTHS[width]) == frozen.read_text(), "if meant: python -m tests.cli.test_screens"


def test_every_frozen_screen_is_one_that_is_shown() -> None:
    assert {path.stem for path in SCREENS.iterdir()} == {f"{name}-{width}" for name, width in SHOWN}


OF_TWO = "srun: error: n2: task 1: Killed\nsrun: error: n2: task 0: Exited with exit code 76\n"
KILLED = "killed by signal 9 (SIGKILL) from outside"


@pytest.mark.parametrize(
    ("ending", "log", "said"),
    [
        ({"signal": 9, "peak_rss_bytes": 1 << 30}, "", f"{KILLED}, far below its memory limit"),
        ({"signal": 9}, "", KILLED),
        ({"exit_code": 76}, OF_TWO, f"rank 1 on n2: {KILLED}"),
        ({"signal": 11}, "", "crashed by signal 11 (SIGSEGV)"),
    ],
)
def test_status_names_the_signal_that_ended_a_training(ending: dict[str, int], log: str, said: str) -> None:
    status = TaskStatus(JobId("8003"), 0, TaskState.FAILED, "", "", **ending)  # type: ignore[arg-type]
    verdict = judge_attempt(status, Word(started=True), log, asked_bytes=2 << 30)
    events = [*training(), ended(480, "train", 0, 1, verdict.cause, verdict.reason), job(481, "train", "0", 8004, 2)]
    with redirect_stdout(stream := io.StringIO()):
        show_parts(*status_report(seen(events), Command.of("status"), 200))
    assert f"! train: task 0: {said}; retried" in stream.getvalue().splitlines()


def test_a_held_task_is_shown_with_what_helps() -> None:
    queued = Queued("8001_0", TaskState.PENDING, "JobHeldUser", reason_words("JobHeldUser"), None, "")
    run = replace(seen(QUEUED), queue=QueueLook({"8001_0": queued}))
    with redirect_stderr(stream := Terminal()), RunProgress() as progress:
        progress.show(run.status, lambda: run)
        progress._live.refresh()
        followed_lines = screen_of(stream.getvalue())
    with redirect_stdout(stream := Terminal()):
        show_parts(*status_report(run, Command.of("status"), 80))
    held = ["! graph: 1 task held: held by its user (JobHeldUser)", "  next: scontrol release 8001"]
    for lines in (followed_lines, screen_of(stream.getvalue())):
        assert lines[lines.index(held[0]) :][:2] == held


def test_a_stream_that_cannot_encode_symbols_gets_ascii() -> None:
    stream = io.TextIOWrapper(raw := io.BytesIO(), encoding="ascii")
    with redirect_stdout(stream):
        show_parts("✓ Done in 3.1s · ⠹ → …")
    stream.flush()
    assert raw.getvalue() == b"ok Done in 3.1s - * -> ...\n"


if __name__ == "__main__":
    SCREENS.mkdir(exist_ok=True)
    for each, wide in SHOWN:
        (SCREENS / f"{each}-{wide}.txt").write_text(shown(each, WIDTHS[wide]))
