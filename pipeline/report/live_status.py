"""What goes on, shown while it does: bars on a terminal or lines now and then, and `status --watch`."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from pipeline.report.run_tables import run_report
from pipeline.report.screen import Screen, screen
from pipeline.report.stage_lines import UNIT, counted_so_far, speed, unit_of
from pipeline.report.tables import show_parts, the_console
from pipeline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.progress import Task

    from pipeline.encoder.checkpoints.download import DownloadProgress
    from pipeline.journal.active_runs import SeenRun
    from pipeline.journal.run_status import RunStatus, StageStatus
    from pipeline.store.maintenance.damage_report import Checked

LINE_EVERY_S = 10.0
WIDE = 160  # columns
BAR, BESIDE_NOTE = 20, 60  # columns of a bar, and of all that stands before its note
EVERY_S = 2.0
GLANCE_S = 0.2  # how soon a terminal's new size is seen
CHANGES = 30  # of a stage, from which its pace is computed


class _Rate(ProgressColumn):
    """Items, steps or files a second."""

    def render(self, task: Task) -> Text:
        """Show the rate once it is known."""
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} {UNIT.get(task.description, 'item')}s/s" if speed else "")


class LiveBars:
    """Shows progress on stderr (stdout is for the document): bars on a terminal, else a line now and then."""

    def __init__(self, *columns: ProgressColumn) -> None:
        self._console = the_console(to_stderr=True)
        shown = (TextColumn("{task.description}"), BarColumn(BAR), *columns, TextColumn("{task.fields[note]}"))
        self._bars = Progress(*shown, console=self._console)
        self._tasks: dict[str, TaskID] = {}
        self._begun = time.monotonic()
        self._told: dict[str, tuple[float, int]] = {}  # when a line was printed, and how far it was then
        self._warned: set[tuple[str, str]] = set()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop drawing; the bars stay on the screen."""
        if self._console.is_terminal:
            self._bars.stop()

    def _warn(self, name: str, warning: str) -> None:
        """Print a warning, once."""
        if (name, warning) not in self._warned:
            self._warned.add((name, warning))
            self._console.print(Text(f"{name}: warning: {warning}"), soft_wrap=True)

    def _update(self, name: str, done: int, total: int | None, line: str, note: str = "", *, now: bool = False) -> None:
        """Show progress; without a terminal print a line if there is some, `now` or if the last is long ago."""
        if self._console.is_terminal:
            if name not in self._tasks:  # it begins where it is first seen: what came before must not count as speed
                self._tasks[name] = self._bars.add_task(name, total=total, completed=done, note="")
            self._bars.update(self._tasks[name], completed=done, total=total, note=note)
            return
        at, before = self._told.get(name, (self._begun, 0))
        moment = time.monotonic()
        if done > before and (now or moment - at > LINE_EVERY_S):
            self._told[name] = (moment, done)
            self._console.print(f"{name}: {line}".rstrip(), soft_wrap=True)


class StageBars(LiveBars):
    """Progress of the stages of a run."""

    def __init__(self) -> None:
        super().__init__(MofNCompleteColumn(), _Rate(), TimeRemainingColumn())

    def show(self, stage: StageStatus) -> None:
        """Show the progress of a stage."""
        for warning in stage.warnings:
            self._warn(stage.name, warning)
        if stage.missing == 0:
            return
        rejected = sum(stage.reasons.values())
        figures = [*speed(stage.measured()), *([] if stage.is_swept else counted_so_far(stage.figures))]
        left_out = [f"{rejected:,} rejected"] if rejected else []
        note = ", ".join([*figures, *left_out])
        line = f"{stage.items_done:,} of {stage.missing:,} {unit_of(stage.name, stage.counts())}s {note}"
        if self._console.is_terminal and self._console.width < WIDE:  # the bar and the count matter more
            shorter = (", ".join([*left_out, *figures[:1]]), *left_out)
            note = next((text for text in shorter if len(text) <= self._console.width - BESIDE_NOTE), "")
        is_news = stage.items_done >= stage.missing or stage.name not in self._told
        self._update(stage.name, stage.items_done, stage.missing, line, note, now=is_news)


class CheckBars(LiveBars):
    """Progress of a look at the files of a cache."""

    def __init__(self, name: str, total: int | None) -> None:
        super().__init__(MofNCompleteColumn(), TextColumn("files"), TimeRemainingColumn())
        self._name, self._total, self._files, self._bytes, self._wrong = name, total, 0, 0, 0

    def take(self, checked: Checked) -> None:
        """Show that one more file was looked at."""
        self._bytes += checked.read_bytes
        self._wrong += len(checked.findings)
        self._files += bool(checked.shard)
        rate = self._bytes / max(1e-3, time.monotonic() - self._begun)
        note = f"{format_bytes(self._bytes)}, {format_bytes(rate)}/s, {self._wrong:,} wrong"
        of = "" if self._total is None else f" of {self._total:,}"
        self._update(self._name, self._files, self._total, f"{self._files:,}{of} files, {note}", note)


class DownloadBars(LiveBars):
    """Progress of a download."""

    def __init__(self, name: str) -> None:
        super().__init__(DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
        self._name = name

    def show(self, progress: DownloadProgress) -> None:
        """Show the progress so far."""
        is_whole = progress.bytes == progress.total
        self._update(self._name, progress.bytes, progress.total, download_words(progress), now=is_whole)


def download_words(progress: DownloadProgress) -> str:
    """Say how far a download is, and how long it will take."""
    if progress.total is None:
        return f"{format_bytes(progress.bytes)}, {format_bytes(progress.rate)}/s"
    left_s = (progress.total - progress.bytes) / max(progress.rate, 1e-9)
    ends = f", {format_seconds(left_s)} left" if left_s else ""
    return f"{format_bytes(progress.bytes)} of {format_bytes(progress.total)}, {format_bytes(progress.rate)}/s{ends}"


class PaceMeter:
    """Speed of stages over their last changes: it adapts, and falls while no item is finished."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def take(self, status: RunStatus, now: float) -> dict[str, float]:
        """Record the progress of stages, and return the items per second of each."""
        return {stage.name: self._of(stage, now) for stage in status.stages.values()}

    def _of(self, stage: StageStatus, now: float) -> float:
        begun = (stage.started_at, 0)  # at first only the mean so far is known
        changes = self._seen.setdefault(stage.name, deque([begun], maxlen=CHANGES))
        done = stage.items_done
        if done < changes[-1][1]:  # a task was split, or begins again
            changes.clear()
            changes.append((now, done))
        elif done > changes[-1][1]:
            changes.append((now, done))
        (since, before), took = changes[0], now - changes[0][0]
        return (done - before) / took if took > 0 and since else 0.0


def watched(now: Callable[[], SeenRun], goes_on: Callable[[], bool]) -> None:
    """Show the run that `now` returns until it has ended, or until Ctrl-C; the last report stays on the screen."""
    last: list[SeenRun] = []

    def look() -> SeenRun | None:
        last[:] = [now()]
        return last[0] if goes_on() else None

    console = the_console()
    try:
        if sys.stdout.isatty() and not console.is_dumb_terminal:
            _on_screen(console, look)
        else:
            _as_lines(look)
    except KeyboardInterrupt:  # leaving is no failure
        pass
    for run in last:
        show_parts(*run_report(run))


def _on_screen(console: Console, look: Callable[[], SeenRun | None]) -> None:
    """Show a run on the whole terminal, which is written to only when a line has changed."""
    meter, drawn, drawn_at = PaceMeter(), list[Text](), None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while run := look():
            paces, due = meter.take(run.status, time.time()), time.monotonic() + EVERY_S
            while (moment := time.monotonic()) < due:
                size_and_second = (console.size, int(moment))
                if size_and_second != drawn_at:  # the window has changed, or the clock
                    lines, drawn_at = screen(run, Screen(*console.size, time.time(), paces)), size_and_second
                    if lines != drawn:
                        live.update(Text("\n").join(lines), refresh=True)
                        drawn = lines
                time.sleep(GLANCE_S)


def _as_lines(look: Callable[[], SeenRun | None]) -> None:
    """Print a report whenever it has changed."""
    before = None
    while run := look():
        document = replace(run, at=math.inf).to_json()  # a clock is no change
        if document != before:
            show_parts(*run_report(run), "")
            sys.stdout.flush()
        before = document
        time.sleep(EVERY_S)
