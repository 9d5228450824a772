"""A run: its stages, what they made, and what went wrong and was done about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.report.stage_lines import (
    CENSUS,
    DAMAGED,
    UNIT,
    found_damage,
    found_so_far,
    memory_line,
    named_records,
    read_so_far,
    rejection_table,
    script_figures,
    speed,
    tasks_line,
    unit_of,
    validated_files,
)
from pipeline.report.tables import duration, plural, size, text_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

STORIES_SHOWN = 5
TASKS_NAMED = 5


def run_report(run: Mapping[str, Any]) -> list[RenderableType]:
    """Show a run: its stages, what they made, and what went wrong."""
    state = f"{DAMAGED} ({run['state']})" if any(map(found_damage, run["stages"])) else run["state"]
    shown: list[RenderableType] = [f"run {run['name']}: {state}"]
    if run["state"] == "abandoned":
        shown.append(f"nobody looks after it any more; finished work is kept: pipeline resume {run['name']}")
    shown += [f"supervisor: {run['supervisor']}"] if run.get("supervisor") else []
    shown += [f"the queue could not be asked: {run['trouble']}"] if run.get("trouble") else []
    rejected: Mapping[str, int] = {}
    for stage in run["stages"]:
        shown += ["", _head(stage)]
        shown += tasks_line(stage)
        shown += memory_line(stage)
        shown += script_figures(stage["figures"])
        shown += [] if stage["census"] else [*found_so_far(stage["figures"]), *read_so_far(stage["figures"])]
        shown += [", ".join(speed(stage["measured"]))] if stage["measured"] else []
        if stage["census"]:
            shown += CENSUS[stage["name"]](stage["census"])
            if stage["census"]["rejected"] not in ({}, rejected):  # what an earlier stage has left out stays left out
                rejected = stage["census"]["rejected"]
                shown += ["", rejection_table(rejected, stage["census"]["examples"])]
        elif stage["reasons"]:
            shown.append(rejection_table(stage["reasons"], {}))
        shown += [f"warning: {warning}" for warning in stage["warnings"]]
        failed = [one for one in stage["failures"] if one["cause"] != "cancelled" or run["state"] != "stopped"]
        shown += [f"{plural(len(failed), 'attempt')} did not end well", *story(failed)] if failed else []
    if run["error"]:
        shown += ["", f"error: {run['error']}"]
    if run["state"] == "stopped":
        shown.append(f"next: pipeline resume {run['name']}")
    return shown


def _head(stage: Mapping[str, Any]) -> str:
    """Say in a line how a stage stands, and how much it had and has to do."""
    name = stage["name"]
    took = f" in {duration(stage['ended_at'] - stage['started_at'])}" if stage["ended_at"] else ""
    counts = f"{stage['cached']:,} cached, {stage['items_done']:,} of {stage['missing']:,} done"
    if name == "validate":
        counts = f"{stage['items_done']:,} read"
    counts = f"{validated_files(stage) or plural(stage['items'], unit_of(name, stage))}, {counts}"
    if name == "regenerate":
        counts = named_records(stage["items"])
    state = DAMAGED if found_damage(stage) else stage["state"]
    return f"{name}: {state}{took}: {counts}"


def story(failed: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tell what failed in the same way, and what was done about it, in one go; the most frequent first."""
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for one in failed:
        alike.setdefault((one["cause"], one["number"], one["then"], one["ask"]["mem_bytes"]), []).append(one)
    groups = sorted(alike.values(), key=len, reverse=True)
    more = sum(map(len, groups[STORIES_SHOWN:]))
    rest = [f"  and {plural(more, 'attempt')} more: pipeline logs --failed"] if more else []
    return [*map(_told, groups[:STORIES_SHOWN]), *rest]


def _told(group: Sequence[Mapping[str, Any]]) -> str:
    """Say how some attempts failed, by the first of them."""
    first = group[0]
    tasks = ", ".join(str(one["task"]) for one in group[:TASKS_NAMED]) + (", …" if len(group) > TASKS_NAMED else "")
    asked = f" with {size(first['ask']['mem_bytes'])}" if first["cause"] == "host_oom" else ""
    then = f"\n    then: {first['then']}" if first["then"] else ""
    said = f"\n    it said: {first['said']}" if first["said"] and first["said"] not in first["reason"] else ""
    noun = "task" if len(group) == 1 else "tasks"
    what = f"  {noun} {tasks}, attempt {first['number']}: {first['cause']}{asked}: {first['reason']}"
    return f"{what}{said}{then}\n    log: {first['log']}"


UNKNOWN = "?"
USED = ("stage", "tasks", "tries", "memory", "peak", "used", "cpus", "used", "limit", "longest")


def efficiency_report(run: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """Show what the stages of a run have used, what went wrong, and what to ask for next time."""
    shown: list[RenderableType] = [f"run {run['name']}: {run['state']}"]
    if not stages:
        return [*shown, "no task has ended yet; nothing was measured"]
    shown += ["", text_table(USED, map(_row, stages), right=" ".join(USED[1:]))]
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
