"""Progress while it is made: the stages of a run, checks and downloads, and `status --watch`."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

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

from pipeline.report.run_summary import MEMORY, held_lines, notes, planning_row, rows_of, waiting_row
from pipeline.report.run_tables import status_report
from pipeline.report.screen import Screen, screen
from pipeline.report.tables import NO_TERMINAL, SPINNER, columns, fitted, show_parts, the_console
from pipeline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import Console

    from pipeline.command_line import Command
    from pipeline.encoder.checkpoints.download import DownloadProgress
    from pipeline.journal.active_runs import SeenRun
    from pipeline.journal.run_status import RunStatus, StageStatus
    from pipeline.report.run_summary import Row
    from pipeline.store.maintenance.damage_report import Checked

LINE_EVERY_S = 10.0
LOOK_EVERY_S = 0.25
FRAMES_PER_S = 8
BAR = 20  # columns
EVERY_S = 2.0
GLANCE_S = 0.2  # how soon a terminal's new size is seen
CHANGES = 30  # of a stage, from which its pace is computed


class LiveBars:
    """Shows progress on stderr (stdout is for the document): bars on a terminal, else a line now and then."""

    def __init__(self, *columns: ProgressColumn) -> None:
        self._console = the_console(to_stderr=True)
        shown = (TextColumn("{task.description}"), BarColumn(BAR), *columns, TextColumn("{task.fields[note]}"))
        self._bars = Progress(*shown, console=self._console)
        self._tasks: dict[str, TaskID] = {}
        self._begun = time.monotonic()
        self._told: dict[str, tuple[float, int]] = {}  # when a line was printed, and how far it was then

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


class RunProgress:
    """Shows a run on stderr: on a terminal a line per stage that is drawn again and again, else lines now and then.

    Lines that do not change any more are printed for good above the others. While nothing was found to do, none is.
    """

    def __init__(self, stages: Sequence[str] = ()) -> None:
        self._console, self._meter, self._stages = the_console(to_stderr=True), PaceMeter(), stages
        self._rows: list[Row] = []
        self._notes: list[str] = []  # of stages that have not ended
        self._printed: set[str] = set()  # stages and notes
        self._has_work, self._looked_at, self._said_at = False, -math.inf, dict[str, float]()
        self._live = Live(
            console=self._console, get_renderable=self._drawn, refresh_per_second=FRAMES_PER_S, transient=True
        )
        self._handlers: list[logging.StreamHandler[Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def planning(self, name: str, words: str = "") -> None:
        """Show on a terminal that a stage is planned, before anything is submitted."""
        row = planning_row(name, time.time(), words)
        self._rows = [row if stage == name else waiting_row(stage) for stage in self._stages]
        self._redraw()

    def show(self, run: Callable[[], SeenRun]) -> None:
        """Show a run as `run` returns it, unless that was done a moment ago."""
        if time.monotonic() - self._looked_at >= LOOK_EVERY_S:
            self._take(run())
            self._redraw()
            self._looked_at = time.monotonic()

    def end(self, run: SeenRun) -> None:
        """Print what is left to say of the stages of a run that has ended."""
        self._take(run)
        self.close()
        if self._has_work:
            self._print(row for row in self._rows if row.state != "waiting")
            self._print_notes()

    def close(self) -> None:
        """Stop drawing; only the lines that were printed for good stay."""
        self._live.stop()
        for handler in self._handlers:
            handler.setStream(sys.stderr)
        self._handlers.clear()

    @property
    def has_printed(self) -> bool:
        return bool(self._printed)

    def _take(self, run: SeenRun) -> None:
        """Compute the lines of a run, and print those that do not change any more."""
        stages = run.status.in_order()
        self._has_work = self._has_work or any(stage.missing or stage.warnings for stage in stages)
        self._rows = rows_of(run, self._meter.take(run.status, time.time()))
        self._notes = [f"! {note}" for stage in stages for note in notes(stage)]
        self._notes += [f"! the queue does not answer: {run.trouble}"] if run.trouble else []
        self._notes += held_lines(run.stuck)
        if not self._has_work:
            return
        for stage, row in zip(stages, self._rows, strict=False):
            if row.state not in ("running", "waiting"):
                self._print([row])
                self._print_notes(stage.name)

    def _print(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if row.name not in self._printed:
                self._printed.add(row.name)
                self._say(row.line(self._width, time.time()))

    def _print_notes(self, stage: str = "") -> None:
        for note in self._notes:
            if note not in self._printed and note.startswith(f"! {stage}"):
                self._printed.add(note)
                self._say(Text(note, style="yellow"))

    def _say(self, line: Text) -> None:
        show_parts(line, to_stderr=True)

    @property
    def _width(self) -> int:
        """Columns of a line, with room for symbols that are longer where the terminal cannot encode them."""
        room = 0 if self._console.encoding.startswith("utf") else len("...")
        return self._console.width - room if self._console.is_terminal else NO_TERMINAL

    def _redraw(self) -> None:
        if not self._console.is_terminal:
            self._print_now_and_then()
        elif not self._live.is_started:
            self._live.start(refresh=True)
            own = (each for each in logging.getLogger().handlers if isinstance(each, logging.StreamHandler))
            self._handlers += [each for each in own if each.stream is self._console.file]
            for handler in self._handlers:  # else their lines would be glued to the last one
                handler.setStream(sys.stderr)  # which now prints above

    def _drawn(self) -> Text:
        """Return the lines that may still change, none longer than the terminal is wide."""
        now = time.time()
        mark = SPINNER[int(now * FRAMES_PER_S) % len(SPINNER)]
        left = [row for row in self._rows if row.name not in self._printed]
        lines = [row.line(self._width, now, mark if row.state == "running" else "") for row in left]
        lines += [Text(note, style="yellow") for note in self._notes if note not in self._printed]
        return Text("\n", no_wrap=True).join(fitted(line, self._width) for line in lines)

    def _print_now_and_then(self) -> None:
        """Without a terminal: print a line when a stage begins, and after each while how far it is."""
        moment = time.monotonic()
        for row in (row for row in self._rows if row.state == "running" and self._has_work):
            what = f"{row.name} {row.since}"
            if moment - self._said_at.get(what, -math.inf) >= LINE_EVERY_S and (MEMORY in row.parts or not row.since):
                self._said_at[what] = moment
                self._say(replace(row, share=None, since=0.0).line(NO_TERMINAL, time.time(), " "))
                self._print_notes()


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


def watched(now: Callable[[], SeenRun], goes_on: Callable[[], bool], typed: Command) -> None:
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
            _as_lines(look, typed)
    except KeyboardInterrupt:  # leaving is no failure
        pass
    for run in last:
        show_parts(*status_report(run, typed, columns()))


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


def _as_lines(look: Callable[[], SeenRun | None], typed: Command) -> None:
    """Print a report whenever it has changed."""
    before = None
    while run := look():
        document = replace(run, at=math.inf).to_json()  # a clock is no change
        if document != before:
            show_parts(*status_report(run, typed, columns()), "")
            sys.stdout.flush()
        before = document
        time.sleep(EVERY_S)
