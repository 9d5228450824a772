"""A run's status again and again: in one place of a terminal, and elsewhere whenever it has changed."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from pipeline.report.tables import run_report, show

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import RenderableType

EVERY_S = 2.0


def watched(now: Callable[[], Mapping[str, Any]], goes_on: Callable[[], bool]) -> None:
    """Show what `now` tells until nothing goes on any more; the last report stays."""
    if sys.stdout.isatty():
        with Live(auto_refresh=False, transient=True) as live:
            while report := _next(now, goes_on):
                live.update(Group(*map(_plain, run_report(report))), refresh=True)
                time.sleep(EVERY_S)
    else:
        before: Mapping[str, Any] = {}
        while report := _next(now, goes_on):
            if report != before:
                show(*run_report(report), "")
                sys.stdout.flush()
            before = report
            time.sleep(EVERY_S)
    show(*run_report(now()))


def _plain(part: RenderableType) -> RenderableType:
    """Return text as it is: nothing in it is markup."""
    return Text(part) if isinstance(part, str) else part


def _next(now: Callable[[], Mapping[str, Any]], goes_on: Callable[[], bool]) -> Mapping[str, Any] | None:
    """Return what to show, or nothing once the run has ended."""
    report = now()
    return report if goes_on() else None
