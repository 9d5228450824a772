"""A download while it goes on: a bar on a terminal, a line now and then where there is none."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from pipeline.report.tables import duration, size

if TYPE_CHECKING:
    from rich.progress import TaskID

    from pipeline.encoder.fetch import Progress

LINE_EVERY_S = 10.0


class Download:
    """Shows a download on stderr, so that stdout stays a document."""

    def __init__(self, name: str) -> None:
        self._name, self._console = name, Console(file=sys.stderr, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
        self._bars = Bars(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=self._console)
        self._task: TaskID | None = None
        self._told_at = time.monotonic()

    def __enter__(self) -> Download:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def show(self, progress: Progress) -> None:
        """Show how far it is."""
        if self._console.is_terminal:
            if self._task is None:  # only now: what an earlier command brought must not count as speed
                self._task = self._bars.add_task(self._name, total=progress.total, completed=progress.bytes)
            self._bars.update(self._task, completed=progress.bytes, total=progress.total)
        elif progress.bytes == progress.total or time.monotonic() - self._told_at > LINE_EVERY_S:
            self._told_at = time.monotonic()
            self._console.print(f"{self._name}: {said(progress)}", soft_wrap=True)


def said(progress: Progress) -> str:
    """Say how far a download is, and how long it will take."""
    if progress.total is None:
        return f"{size(progress.bytes)}, {size(progress.rate)}/s"
    left = (progress.total - progress.bytes) / max(progress.rate, 1e-9)
    ends = f", {duration(left)} left" if left else ""
    return f"{size(progress.bytes)} of {size(progress.total)}, {size(progress.rate)}/s{ends}"
