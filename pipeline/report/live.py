"""A run while it goes on: a bar on a terminal, a line now and then where there is none."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
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

from pipeline.report.census import UNIT
from pipeline.report.progress import read_so_far, speed

if TYPE_CHECKING:
    from collections.abc import Mapping

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


class Live:
    """Shows stages on stderr, so that stdout stays a document."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
        self._bars = Progress(*columns, TextColumn("{task.fields[note]}"), console=self._console, transient=False)
        self._tasks: dict[str, TaskID] = {}
        self._told: dict[str, tuple[float, int]] = {}

    def __enter__(self) -> Live:
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
