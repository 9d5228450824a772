"""What stages would do and take, before anything is submitted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from pipeline.report.census import named_records, unit_of
from pipeline.report.tables import duration, plural, size, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import RenderableType
    from rich.table import Table

PLANNED = ("items", "refused", "unusable", "cached", "missing", "tasks")
REFUSED = {"scan": "refused by the source", "embed": "that cannot be encoded", "graph": "left out before"}
LATER = {"train": "planned when its graphs are there"}


class Asked(Protocol):
    """What a task gets."""

    @property
    def mem_bytes(self) -> int:
        """Memory."""

    @property
    def time_s(self) -> int:
        """The time limit."""


def stage_line(name: str, counts: Mapping[str, int]) -> str:
    """Say what a stage found when it was submitted: what is done already, and what is not."""
    parts = [f"{counts['cached']:,} cached", f"{counts['missing']:,} to do"]
    if name == "validate":
        parts = parts[1:]
    if name == "regenerate":
        return f"regenerate: {named_records(counts['items'])}"
    if counts.get("unplanned"):
        return f"{name}: {LATER.get(name, 'counted when the model is trained')}"
    if counts["refused"]:
        parts.append(f"{counts['refused']:,} {REFUSED[name]}")
    if counts["unusable"]:
        parts.append(f"{counts['unusable']:,} missing or unreadable")
    tasks = f" in {plural(counts['tasks'], 'task')}" if counts["tasks"] else ""
    residues = f" ({counts['residues']:,} residues)" if counts.get("residues") else ""
    if counts.get("unnamed"):
        parts.append(f"{counts['unnamed']:,} missing that the list does not name")
    waiting = f"; {plural(counts['waiting'], 'item')} still to scan" if counts.get("waiting") else ""
    if counts.get("unkept"):
        parts = ["built when they are read (graph.cache: false)"]
    return f"{name}: {plural(counts['items'], unit_of(name, counts))}: {', '.join(parts)}{tasks}{residues}{waiting}"


def plan_table(plans: Iterable[tuple[str, Mapping[str, int], int, int, Asked | None]]) -> Table:
    """Show what would be submitted."""
    rows = []
    for name, counts, made_bytes, cpus, ask in plans:
        asks = ("", "", "") if ask is None else (cpus, size(ask.mem_bytes), duration(ask.time_s))
        disk = size(made_bytes) if made_bytes else ""
        rows.append((name, f"{unit_of(name, counts)}s", *(f"{counts[column]:,}" for column in PLANNED), *asks, disk))
    columns = ("stage", "of", *PLANNED, "cpus", "mem", "time limit", "disk")
    return table(columns, rows, right=" ".join((*PLANNED, "cpus", "mem", "disk")))


def estimate_report(stages: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """Show what each stage would take, and where the numbers are from."""
    columns = ("stage", "to do", "cached", "tasks", "cpus", "gpus", "mem", "limit", "disk", "about")
    shown: list[RenderableType] = [table(columns, map(_estimate_row, stages), right=" ".join(columns[1:]))]
    waiting = {stage["stage"]: stage["counts"].get("waiting", 0) for stage in stages}
    unknown = "not scanned yet, and what they hold is not counted"
    shown += [f"{name}: {plural(count, 'item')} {unknown}" for name, count in waiting.items() if count]
    for stage in stages:
        if stage["tasks"]:
            shown += ["", f"{stage['stage']}: where the numbers are from"]
            shown += [f"  {name}: {source}" for name, source in stage["sources"].items()]
    return shown


def _estimate_row(stage: Mapping[str, Any]) -> tuple[str, ...]:
    counts = stage["counts"]
    if not stage["tasks"]:
        return (stage["stage"], f"{counts['missing']:,}", f"{counts['cached']:,}", "0", *[""] * 6)
    return (
        stage["stage"],
        f"{counts['missing']:,}",
        f"{counts['cached']:,}",
        f"{stage['tasks']:,}",
        str(stage["cpus"]),
        str(stage["gpus"]),
        size(stage["mem_bytes"]),
        duration(stage["time_s"]),
        size(stage["disk_bytes"]) if stage["disk_bytes"] else "",
        "unknown" if stage["all_s"] is None else duration(stage["all_s"]),
    )
