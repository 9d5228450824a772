"""What cleaning a cache removes and keeps, and why, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.command_line import Command
from pipeline.report.cache_tables import NAMED, said, settings_text
from pipeline.report.tables import plural, table_of
from pipeline.store.maintenance.overview import DAY_S
from pipeline.store.maintenance.shard_plans import Fate
from pipeline.units import first_few, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import RenderableType

    from pipeline.report.cache_tables import AsTyped
    from pipeline.report.tables import Column
    from pipeline.store.maintenance.leftovers import LeftoverFile
    from pipeline.store.maintenance.overview import Cleaning

UNNEEDED: tuple[Column, ...] = (
    ("UNNEEDED", "kind"), ("RECORDS", "items", "count"), ("SIZE", "bytes", "bytes"), ("WHY", "why"),
    ("SETTINGS", lambda dead: settings_text(dead.recipe or {})),
)  # fmt: skip
LEFTOVERS: tuple[Column, ...] = (("LEFTOVER", 0), ("FILES", 1, "count"), ("SIZE", 2, "bytes"))


def cleaning_lines(cleaning: Cleaning, as_typed: AsTyped = str) -> list[RenderableType]:
    """Show what cleaning would remove, and which unneeded files stay and why."""
    dead, leftovers = list(cleaning.dead()), [(name, *counts) for name, counts in _by_what(cleaning.leftovers).items()]
    shown: list[RenderableType] = []
    for columns, rows in ((UNNEEDED, dead), (LEFTOVERS, leftovers)):
        shown += [table_of(columns, rows), ""] if rows else []
    shown += _staying(cleaning, as_typed)
    for note in cleaning.notes:
        shown += [f"note: {note.what}", *([f"  next: {said(note.remedy, as_typed)}"] if note.remedy else [])]
    return shown[:-1] if shown and shown[-1] == "" else shown


def _staying(cleaning: Cleaning, as_typed: AsTyped) -> Iterator[str]:
    """Yield which unneeded records and files stay, and why."""
    grace_s = cleaning.asked.grace_s
    reasons = {
        Fate.YOUNG: f"in files younger than {_span(grace_s)} (--older-than)",
        Fate.SPARSE: f"in files of mostly needed records: {as_typed(Command.of('cache compact'))}",
        Fate.FOREIGN: "in files of an unknown form",
    }
    for fate, why in reasons.items():
        items, taken = cleaning.stays(fate)
        if items:
            yield f"kept: {plural(items, 'unneeded record')}, {format_bytes(taken)}, {why}"
    for seconds in sorted({cleaning.asked.grace_of(file.what) for file in cleaning.young}):
        option = " (--older-than)" if seconds == grace_s else ""
        young = [file for file in cleaning.young if cleaning.asked.grace_of(file.what) == seconds]
        for label, (files, taken) in _by_what(young).items():
            held = f"{plural(files, 'file')}, {format_bytes(taken)}"
            yield f"kept: {label}: {held}, younger than {_span(seconds)}{option}"
    if damaged := [f"{kind}/{shard}" for kind, shard, _ in cleaning.damaged()]:
        yield f"kept: unreadable: {first_few(damaged, NAMED)}: {as_typed(Command.of('cache repair'))}"
    if cleaning.foreign:
        yield f"left alone, not written by pipeline: {first_few(map(str, cleaning.foreign), NAMED)}"
    if others := dict.fromkeys(user.config or user.runs for user in cleaning.others):
        consequence = (
            "--all removes their records, too" if cleaning.asked.all else "records made with their settings are kept"
        )
        yield f"also used by {first_few(others, NAMED)}: {consequence}"


def _span(seconds: float) -> str:
    """Format a time in whole days where possible."""
    return plural(round(seconds / DAY_S), "day") if seconds % DAY_S == 0 else format_seconds(seconds)


def _by_what(files: Iterable[LeftoverFile]) -> dict[str, tuple[int, int]]:
    """Return the number of files and their bytes by what they are."""
    totals: dict[str, tuple[int, int]] = {}
    for file in files:
        name = f"{file.what.value} of {file.kind}" if file.kind else file.what.value
        count, taken = totals.get(name, (0, 0))
        totals[name] = count + 1, taken + file.bytes
    return totals
