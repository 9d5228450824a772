"""A run's status again and again: a screen of a terminal, and elsewhere a report whenever it has changed."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pipeline.report.run import run_report
from pipeline.report.screen import Screen, screen
from pipeline.report.tables import show

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

EVERY_S = 2.0
GLANCE_S = 0.2  # how soon a terminal's new size is seen
CHANGES = 30  # by which a pace is told


class Pace:
    """How fast stages go: by their last changes, so that it follows, and falls when nothing comes any more."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def take(self, run: Mapping[str, Any], now: float) -> dict[str, float]:
        """Take in how far stages are, and return what each works through in a second."""
        return {stage["name"]: self._of(stage, now) for stage in run["stages"]}

    def _of(self, stage: Mapping[str, Any], now: float) -> float:
        begun = (stage["started_at"], 0)  # all that is known at first is how it went so far
        seen = self._seen.setdefault(stage["name"], deque([begun], maxlen=CHANGES))
        done = stage["items_done"]
        if done < seen[-1][1]:  # a task was split, or begins again
            seen.clear()
            seen.append((now, done))
        elif done > seen[-1][1]:
            seen.append((now, done))
        (since, before), took = seen[0], now - seen[0][0]
        return (done - before) / took if took > 0 and since else 0.0


def watched(now: Callable[[], Mapping[str, Any]], goes_on: Callable[[], bool]) -> None:
    """Show what `now` tells until nothing goes on any more, or Ctrl-C; the last report stays."""
    last: dict[str, Mapping[str, Any]] = {}

    def look() -> Mapping[str, Any] | None:
        last["report"] = now()
        return last["report"] if goes_on() else None

    console = Console(highlight=False)
    on_screen = sys.stdout.isatty() and not console.is_dumb_terminal
    try:
        if on_screen:
            _on_screen(console, look)
        else:
            _as_lines(look)
    except KeyboardInterrupt:  # to leave is no failure, and what was seen last is what stays
        pass
    if last:
        show(*run_report(last["report"]))


def _on_screen(console: Console, look: Callable[[], Mapping[str, Any] | None]) -> None:
    """Fill the terminal; it is written to only when there is something else to see."""
    pace, drawn, glanced = Pace(), list[Text](), None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while run := look():
            paces, due = pace.take(run, time.time()), time.monotonic() + EVERY_S
            while (moment := time.monotonic()) < due:
                if (seen := (console.size, int(moment))) != glanced:  # the clock goes on, or the window has changed
                    lines, glanced = screen(run, Screen(*console.size, time.time(), paces)), seen
                    if lines != drawn:
                        live.update(Text("\n").join(lines), refresh=True)
                        drawn = lines
                time.sleep(GLANCE_S)


def _as_lines(look: Callable[[], Mapping[str, Any] | None]) -> None:
    """Print a report whenever it has changed."""
    before: Mapping[str, Any] = {}
    while report := look():
        told = {**report, "stages": [{**stage, "left_s": None} for stage in report["stages"]]}  # a clock is no change
        if told != before:
            show(*run_report(report), "")
            sys.stdout.flush()
        before = told
        time.sleep(EVERY_S)
