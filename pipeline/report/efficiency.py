"""What the stages of a run used of what they asked for, as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.report.census import UNIT
from pipeline.report.run import story
from pipeline.report.tables import duration, plural, size, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

UNKNOWN = "?"
USED = ("stage", "tasks", "tries", "memory", "peak", "used", "cpus", "used", "limit", "longest")


def efficiency_report(run: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """Show what the stages of a run have used, what went wrong, and what to ask for next time."""
    shown: list[RenderableType] = [f"run {run['name']}: {run['state']}"]
    if not stages:
        return [*shown, "no task has ended yet; nothing was measured"]
    shown += ["", table(USED, map(_row, stages), right=" ".join(USED[1:]))]
    shown += ["", *(line for stage in stages for line in _lines(stage))]
    failures = {stage["name"]: stage["failures"] for stage in run["stages"] if stage["failures"]}
    for name, failed in failures.items():
        shown += [
            "",
            f"{name}: {plural(len(failed), 'attempt')} did not end well (pipeline logs --failed)",
            *story(failed),
        ]
    suggested = [_suggested(one) for stage in stages for one in stage["suggested"]]
    if suggested:
        shown += ["", "for the next run (mem: auto asks for this by itself)", *suggested]
    return shown


def _row(stage: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        stage["stage"],
        f"{stage['tasks']:,}",
        f"{stage['attempts']:,}",
        _size(stage["asked_bytes"]),
        _size(stage["peak_bytes"]),
        _percent(stage["mem_used"]),
        str(stage["cpus"]),
        _percent(stage["cpu_used"]),
        _time(stage["limit_s"]),
        _time(stage["longest_s"]),
    )


def _lines(stage: Mapping[str, Any]) -> list[str]:
    """Say what a table has no column for."""
    unit = UNIT[stage["stage"]]
    pace = f" ({stage['items_per_s']:,.1f} a second and task)" if stage["items_per_s"] else ""
    parts = [f"{plural(stage['items'], unit)}{pace}", f"{stage['core_hours']:,.2f} core hours"]
    if stage["gpu_peak_bytes"]:
        parts.append(f"GPU memory {size(stage['gpu_peak_bytes'])}")
    planned = f"; planned {size(stage['planned_bytes'])}" if stage["planned_bytes"] else ""
    why = f" ({stage['why']})" if stage["why"] else ""
    median = f" (median {size(stage['median_peak_bytes'])})" if stage["median_peak_bytes"] else ""
    memory = f"  memory: first {_size(stage['first_bytes'])}{why}{planned}; peak {_size(stage['peak_bytes'])}{median}"
    return [f"{stage['stage']}: {', '.join(parts)}", memory, *([f"  {stage['note']}"] if stage["note"] else [])]


def _suggested(one: Mapping[str, Any]) -> str:
    """Say what to ask for, as the configuration would have it."""
    name = one["key"].rpartition(".")[2]
    value, was = (_value(name, one[which]) for which in ("value", "was"))
    return f"  {one['key']}: {value}, was {was}: {one['why']}"


def _value(name: str, value: float) -> str:
    """Return a setting's value as people read it."""
    return size(value) if name == "mem" else duration(value) if name == "time" else f"{value:,}"


def _size(count: int | None) -> str:
    return UNKNOWN if count is None else size(count)


def _time(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else duration(seconds)


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"
