"""A run while it goes on: a bar on a terminal, a line now and then where there is none."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from pipeline.report.run_tables import run_report
from pipeline.report.screen import Screen, screen
from pipeline.report.stage_lines import UNIT, read_so_far, speed
from pipeline.report.tables import show_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.progress import Task

LINE_EVERY_S = 10.0
WIDE, BAR_COLUMNS = 160, 75  # columns


class Stage(Protocol):
    """What is shown of a stage."""

    name: str
    missing: int
    figures: dict[str, Mapping[str, float]]  # process → what it measured

    @property
    def items_done(self) -> int:
        """Items that tasks have worked through."""

    @property
    def reasons(self) -> Mapping[str, int]:
        """Rejections so far, by reason."""

    def measured(self) -> Mapping[str, float]:
        """Return what its processes measured, where they did."""


class _Rate(ProgressColumn):
    """Items a second."""

    def render(self, task: Task) -> Text:
        """Show the rate once it is known."""
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} items/s" if speed else "")


class LiveLines:
    """Shows stages on stderr, so that stdout stays a document."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
        self._bars = Progress(*columns, TextColumn("{task.fields[note]}"), console=self._console, transient=False)
        self._tasks: dict[str, TaskID] = {}
        self._told: dict[str, tuple[float, int]] = {}

    def __enter__(self) -> LiveLines:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the bars as they are."""
        if self._console.is_terminal:
            self._bars.stop()

    def show(self, stage: Stage) -> None:
        """Show how far a stage is."""
        if stage.missing == 0:
            return
        rejected = sum(stage.reasons.values())
        figures = [*speed(stage.measured()), *read_so_far(stage.figures)]
        left_out = [f"{rejected:,} rejected"] if rejected else []
        note = ", ".join([*figures, *left_out])
        if self._console.is_terminal:
            if self._console.width < WIDE:  # the bar and the count matter more
                note = ", ".join([*left_out, *figures[:1]])[: max(0, self._console.width - BAR_COLUMNS)]
            if stage.name not in self._tasks:
                self._tasks[stage.name] = self._bars.add_task(stage.name, total=stage.missing, note="")
            self._bars.update(self._tasks[stage.name], completed=stage.items_done, note=note)
        else:
            self._line(stage, note)

    def _line(self, stage: Stage, note: str) -> None:
        """Print a line when there is something new to say and it was not said just now."""
        at, done = self._told.get(stage.name, (0.0, 0))
        finished = stage.items_done >= stage.missing
        if stage.items_done > done and (finished or time.monotonic() - at > LINE_EVERY_S):
            self._told[stage.name] = (time.monotonic(), stage.items_done)
            self._console.print(
                f"{stage.name}: {stage.items_done:,} of {stage.missing:,} {UNIT[stage.name]}s {note}".rstrip(),
                soft_wrap=True,
            )


EVERY_S = 2.0
GLANCE_S = 0.2  # how soon a terminal's new size is seen
CHANGES = 30  # by which a pace is told


class PaceMeter:
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
        show_parts(*run_report(last["report"]))


def _on_screen(console: Console, look: Callable[[], Mapping[str, Any] | None]) -> None:
    """Fill the terminal; it is written to only when there is something else to see."""
    pace, drawn, glanced = PaceMeter(), list[Text](), None
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
            show_parts(*run_report(report), "")
            sys.stdout.flush()
        before = told
        time.sleep(EVERY_S)
