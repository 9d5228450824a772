"""Live progress: the stages of a run, checks, downloads, and `status --watch`."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from rich.live import Live
from rich.segment import SegmentLines
from rich.text import Text

from pipeline.journal.run_status import State
from pipeline.report.run_text import SOON, Row, held_lines, notes, planning_row, rows_of, waiting_row
from pipeline.report.tables import NO_TERMINAL, SPINNER, fitted, grouped, show_parts, the_console
from pipeline.units import short_bytes, short_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    from rich.console import Console, RenderableType

    from pipeline.journal.run_status import RunStatus, StageStatus
    from pipeline.journal.run_view import RunView
    from pipeline.store.maintenance.damage_report import Checked

    Report: TypeAlias = Callable[[RunView, Mapping[str, float]], Iterable[RenderableType]]  # by the speeds of stages

LINE_EVERY_S = 10.0
LOOK_EVERY_S = 0.25
FRAMES_PER_S = 8
EVERY_S = 2.0
GLANCE_S = 0.2  # how soon a resized terminal is noticed
CHANGES = 30  # changes of a stage from which its speed is computed
LEAVES = "Ctrl-C leaves; the run continues"


class LiveLines:
    """Progress on stderr (stdout is for results): redrawn lines on a terminal, else a line now and then.

    Other output is printed above the redrawn lines.
    """

    def __init__(self) -> None:
        self._console, self._begun = the_console(to_stderr=True), time.monotonic()
        self._quiet_since = self._begun
        self._rows: list[Row] = []
        self._notes: list[str] = []
        self._printed: set[str] = set()  # rows and notes that are final
        self._said_at: dict[str, float] = {}
        self._said: dict[str, Text] = {}  # the last line of each row
        self._live = Live(
            console=self._console, get_renderable=self._drawn, refresh_per_second=FRAMES_PER_S, transient=True
        )
        self._handlers: list[logging.StreamHandler[Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop drawing; final lines stay."""
        self._live.stop()
        for handler in self._handlers:
            handler.setStream(sys.stderr)
        self._handlers.clear()

    def _redraw(self) -> None:
        if not self._console.is_terminal:
            self._print_now_and_then()
        elif not self._live.is_started:
            self._live.start(refresh=True)
            own = (each for each in logging.getLogger().handlers if isinstance(each, logging.StreamHandler))
            self._handlers += [each for each in own if each.stream is self._console.file]
            for handler in self._handlers:  # so that it does not continue the last line
                handler.setStream(sys.stderr)  # its stream now prints above the live lines

    def _print_now_and_then(self) -> None:
        """Without a terminal: print a line of progress, and later another if it has changed."""
        moment = time.monotonic()
        for row in (row for row in self._rows if row.state is State.RUNNING and SOON not in row.parts):
            what = f"{row.name} {row.since}"
            if moment - self._said_at.get(what, self._quiet_since) >= LINE_EVERY_S:
                self._said_at[what] = moment
                line = replace(row, share=None, since=0.0).line(NO_TERMINAL, time.time(), " ")
                if line != self._said.get(what):
                    self._said[what] = line
                    self._say(line)
                self._print_notes()

    def _print_notes(self, stage: str = "") -> None:
        for note in self._notes:
            if note not in self._printed and note.startswith(f"! {stage}"):
                self._printed.add(note)
                self._say(Text(note, style="yellow"))

    def _say(self, line: Text) -> None:
        show_parts(line, to_stderr=True)

    @property
    def _width(self) -> int:
        """Columns of a line; ASCII replacements of symbols need more room."""
        room = 0 if self._console.encoding.startswith("utf") else len("...")
        return self._console.width - room if self._console.is_terminal else NO_TERMINAL

    def _drawn(self) -> Text:
        """Return the lines that may still change, cut to the width of the terminal."""
        now = time.time()
        mark = SPINNER[int(now * FRAMES_PER_S) % len(SPINNER)]
        left = [row for row in self._rows if row.name not in self._printed]
        lines = [row.line(self._width, now, mark if row.state is State.RUNNING else "") for row in left]
        lines += [Text(note, style="yellow") for note in self._notes if note not in self._printed]
        return Text("\n", no_wrap=True).join(fitted(line, self._width) for line in lines)


class RunProgress(LiveLines):
    """The progress of a run, a line for each stage; final lines are printed only after work was found."""

    def __init__(self, stages: Sequence[str] = ()) -> None:
        super().__init__()
        self._stages, self._meter, self._has_work = stages, PaceMeter(), False
        self._states: list[tuple[str, str]] = []
        self._looked_at = self._quiet_since = -math.inf

    def planning(self, name: str, words: str = "") -> None:
        """Show on a terminal that a stage is being planned."""
        row = planning_row(name, time.time(), words)
        self._rows = [row if stage == name else waiting_row(stage) for stage in self._stages]
        if self._console.is_terminal:
            self._redraw()

    def show(self, status: RunStatus, seen: Callable[[], RunView]) -> None:
        """Show a run, unless it was shown a moment ago and no stage has begun or ended since."""
        states = [(stage.name, stage.state.value) for stage in status.stages.values()]
        if states != self._states or time.monotonic() - self._looked_at >= LOOK_EVERY_S:
            self._take(seen())
            self._redraw()
            self._states, self._looked_at = states, time.monotonic()

    def end(self, run: RunView) -> bool:
        """Print the remaining final lines of an ended run; return whether any line was printed."""
        self._take(run)
        self.close()
        if self._has_work:
            self._print(row for row in self._rows if row.state is not State.WAITING)
        for name in ("",) if self._has_work else ("scan", "train"):  # notes on data and settings, also without work
            self._print_notes(name)
        return bool(self._printed)

    def _take(self, run: RunView) -> None:
        """Compute the lines of a run, and print the final ones."""
        stages = run.status.in_order()
        self._has_work = self._has_work or any(stage.missing or stage.error for stage in stages)
        rows = rows_of(run, self._meter.take(run.status, time.time()))
        self._rows = rows if self._has_work or self._console.is_terminal else []
        self._notes = [f"! {note}" for stage in stages for note in notes(stage)]
        self._notes += [f"! the queue does not answer: {run.trouble}"] if run.trouble else []
        self._notes += [line for lines in held_lines(run) for line in lines.splitlines()]
        for row in self._rows if self._has_work else ():
            if row.state not in (State.RUNNING, State.WAITING):
                self._print([row])
                self._print_notes(row.name)

    def _print(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if row.name not in self._printed:
                self._printed.add(row.name)
                self._say(row.line(self._width, time.time()))


class WorkBar(LiveLines):
    """The progress of work on files: checking or copying them."""

    def __init__(self, name: str, files: int | None = None) -> None:
        super().__init__()
        self._name, self._total = name, files
        self._files = self._bytes = self._wrong = 0

    def take(self, checked: Checked) -> None:
        """Count a checked file."""
        self._bytes += checked.read_bytes
        self._wrong += len(checked.findings)
        self._files += bool(checked.shard)
        of = "" if self._total is None else f"/{self._total:,}"
        parts = f"{self._files:,}{of} files", short_bytes(self._bytes), f"{short_bytes(self._pace(self._bytes))}/s"
        self._draw((*parts, f"{self._wrong:,} wrong"), self._files, self._total)

    def show(self, copied: int, total: int) -> None:
        """Show the copied bytes and the remaining time."""
        pace = self._pace(copied)
        parts = [f"{short_bytes(copied)}/{short_bytes(total)}", f"{short_bytes(pace)}/s"]
        parts += [f"about {short_seconds((total - copied) / max(pace, 1e-9))} left"] if copied < total else []
        self._quiet_since = -math.inf if copied == total else self._quiet_since
        self._draw(tuple(parts), copied, total)

    def _pace(self, done: float) -> float:
        return done / max(1e-3, time.monotonic() - self._begun)

    def _draw(self, parts: tuple[str, ...], done: int, total: int | None) -> None:
        self._rows = [Row(State.RUNNING, self._name, parts, share=done / total if total else None)]
        self._redraw()


class PaceMeter:
    """The speed of stages over their last changes; it falls while no item is finished."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def take(self, status: RunStatus, now: float) -> dict[str, float]:
        """Record the progress of stages, and return the items per second of each."""
        return {stage.name: self._of(stage, now) for stage in status.stages.values()}

    def _of(self, stage: StageStatus, now: float) -> float:
        begun = (stage.started_at, 0)  # at first only the mean is known
        changes = self._seen.setdefault(stage.name, deque([begun], maxlen=CHANGES))
        done = stage.items_done
        if done < changes[-1][1]:  # a task was split or retried
            changes.clear()
            changes.append((now, done))
        elif done > changes[-1][1]:
            changes.append((now, done))
        (since, before), took = changes[0], now - changes[0][0]
        return (done - before) / took if took > 0 and since else 0.0


def watched(look: Callable[[], RunView], report: Report) -> None:
    """Show the run that `look` returns until its end or Ctrl-C; the last report stays on the screen."""
    last: list[RunView] = []
    console = the_console()

    def looks() -> Iterator[RunView]:
        while (run := look()).goes_on:
            last[:] = [run]
            yield run
        last[:] = [run]

    try:
        if sys.stdout.isatty() and not console.is_dumb_terminal:
            _on_screen(console, looks(), report)
        else:
            _as_lines(looks(), report)
    except KeyboardInterrupt:  # Ctrl-C is not a failure
        pass
    for run in last:
        show_parts(*report(run, {}))


def _on_screen(console: Console, looks: Iterable[RunView], report: Report) -> None:
    """Show a run on the whole terminal."""
    meter = PaceMeter()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for run in looks:
            paces, due, size = meter.take(run.status, time.time()), time.monotonic() + EVERY_S, None
            while time.monotonic() < due:
                if console.size != size:
                    live.update(_cropped(console, [*report(run, paces), "", LEAVES]), refresh=True)
                    size = console.size
                time.sleep(GLANCE_S)


def _cropped(console: Console, parts: Iterable[RenderableType]) -> SegmentLines:
    """Return the lines that fit a terminal: the first, and the last ones, which name the next command."""
    first, *more = console.render_lines(grouped(parts, console.width), pad=False)
    return SegmentLines([first, *more[max(0, len(more) + 1 - console.height) :]], new_lines=True)


def _as_lines(looks: Iterable[RunView], report: Report) -> None:
    """Print a report whenever it has changed."""
    before = None
    for run in looks:
        document = replace(run, at=math.inf).to_json()  # ignores clocks
        if document != before:
            show_parts(*report(run, {}), "")
            sys.stdout.flush()
        before = document
        time.sleep(EVERY_S)
