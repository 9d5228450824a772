"""A run as text: its stages, what they made and used, and what went wrong and was done about it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pipeline.cluster.verdict import Cause
from pipeline.journal.run_status import RunState
from pipeline.report.stage_lines import (
    CENSUS,
    DAMAGED,
    counted,
    found_damage,
    memory_line,
    named_records,
    rejection_table,
    script_figures,
    so_far,
    speed_lines,
    state_of_stage,
    tasks_line,
    unit_of,
    validated_files,
    wait_lines,
)
from pipeline.report.tables import plural, text_table
from pipeline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from pipeline.journal.active_runs import SeenRun
    from pipeline.journal.attempts import Attempt
    from pipeline.journal.budget import Account
    from pipeline.journal.run_status import RunStatus, StageStatus
    from pipeline.report.facts import StageUse

STORIES_SHOWN = 5
TASKS_NAMED = 5


def run_report(run: SeenRun, *, with_error: bool = True) -> list[RenderableType]:
    """Show a run: its stages, what they made, and what went wrong."""
    status, stages = run.status, run.status.in_order()
    state = f"{DAMAGED} ({status.state.value})" if any(map(found_damage, stages)) else status.state.value
    shown: list[RenderableType] = [f"run {status.name}: {state}"]
    if status.state is RunState.ABANDONED:
        shown.append(f"nobody looks after it any more; finished work is kept: pipeline resume {status.name}")
    shown += [f"supervisor: {run.supervisor}"] if run.supervisor else []
    shown += wait_lines((wait for wait in run.waits if wait.of not in status.stages), run.at)
    shown += [f"the queue could not be asked: {run.trouble}"] if run.trouble else []
    shown += [run.account.line()] if run.account else []
    rejected: Mapping[str, int] = {}
    for stage in stages:
        shown += ["", _head(stage), *_progress(stage, run)]
        if stage.census:
            shown += CENSUS[stage.name](stage.census)
            if stage.census["rejected"] not in ({}, rejected):  # what an earlier stage has left out stays left out
                rejected = stage.census["rejected"]
                shown += ["", rejection_table(rejected, stage.census["examples"])]
        elif reasons := stage.reasons:
            shown.append(rejection_table(reasons, {}))
        shown += [f"warning: {warning}" for warning in stage.warnings]
        is_stopped = status.state is RunState.STOPPED
        failed = [attempt for attempt in stage.failures if not (is_stopped and attempt.cause is Cause.CANCELLED)]
        failed = [attempt for attempt in failed if attempt.reason.partition("\n")[0] not in (status.error or "")]
        shown += [f"{plural(len(failed), 'attempt')} did not end well", *story(stage, failed)] if failed else []
    shown += ["", f"error: {status.error}"] if status.error and with_error else []
    shown += [f"next: pipeline resume {status.name}"] if status.state is RunState.STOPPED else []
    return shown


def _progress(stage: StageStatus, run: SeenRun) -> Iterator[str]:
    """Yield the progress of a stage, its memory and its speed."""
    yield from tasks_line(stage, run)
    yield from wait_lines((wait for wait in run.waits if wait.of == stage.name), run.at)
    yield from memory_line(stage)
    yield from script_figures(stage.figures)
    yield from so_far(stage)
    yield from speed_lines(stage)


def _head(stage: StageStatus) -> str:
    """Say in a line the state of a stage, and how much of it is cached and done."""
    took = f" in {format_seconds(stage.ended_at - stage.started_at)}" if stage.ended_at else ""
    counts = counted(stage)
    if stage.name == "validate":
        counts = f"{stage.items_done:,} read"
    counts = f"{validated_files(stage) or plural(stage.items, unit_of(stage.name, stage.counts()))}, {counts}"
    if stage.name == "regenerate":
        counts = named_records(stage.items)
    return f"{stage.name}: {state_of_stage(stage)}{took}: {counts}"


def story(stage: StageStatus, failed: Sequence[Attempt]) -> list[str]:
    """Group attempts that failed in the same way, and say what was done about each group, the largest first."""
    alike: dict[tuple[Any, ...], list[Attempt]] = {}
    for attempt in failed:
        action = stage.task(attempt.task).then.get(attempt.number, "")
        alike.setdefault((attempt.cause, attempt.number, action, attempt.ask.mem_bytes), []).append(attempt)
    groups = sorted(alike.items(), key=lambda group: len(group[1]), reverse=True)
    more = sum(len(group) for _, group in groups[STORIES_SHOWN:])
    more_line = [f"  and {plural(more, 'attempt')} more: pipeline logs --failed"] if more else []
    return [*(_told(stage, group, action) for (_, _, action, _), group in groups[:STORIES_SHOWN]), *more_line]


def _told(stage: StageStatus, group: Sequence[Attempt], action: str) -> str:
    """Describe a group of failed attempts by the first of them."""
    first = group[0]
    named = [stage.label(attempt.task) for attempt in group[:TASKS_NAMED]]
    tasks = ", ".join(named + ["…"] * (len(group) > TASKS_NAMED))
    asked = f" with {format_bytes(first.ask.mem_bytes)}" if first.cause is Cause.HOST_OOM else ""
    followed = f"\n    then: {action}" if action else ""
    output = f"\n    it said: {first.said}" if first.said and first.said not in first.reason else ""
    noun = f"{'point' if stage.is_swept else 'task'}{'s' * (len(group) != 1)}"
    headline = f"  {noun} {tasks}, attempt {first.number}: {first.cause.value}{asked}: {first.reason}"
    return f"{headline}{output}{followed}\n    log: {first.log}"


UNKNOWN = "unknown"
USED = ("stage", "tasks", "tries", "memory", "peak", "mem %", "cpus", "cpu %", "limit", "longest")


def efficiency_report(
    status: RunStatus, stages: Sequence[StageUse], account: Account | None = None
) -> list[RenderableType]:
    """Show what the stages of a run have used, what went wrong, and what to ask for next time."""
    shown: list[RenderableType] = [f"run {status.name}: {status.state.value}"]
    shown += [account.line()] if account else []
    if not stages:
        if status.state is RunState.DONE:
            return [*shown, "nothing was left to do: no task was needed"]
        return [*shown, "no task has ended yet; nothing was measured"]
    shown += wait_lines(status.waits.values(), status.ended_at or math.inf)
    shown += ["", text_table(USED, map(_row, stages), right=USED[1:])]
    shown += ["", *(line for use in stages for line in _lines(use))]
    for stage in status.in_order():
        if failed := stage.failures:
            count = plural(len(failed), "attempt")
            shown += ["", f"{stage.name}: {count} did not end well (pipeline logs --failed)", *story(stage, failed)]
    if advice := [f"  {use.stage}: {line}" for use in stages for line in use.advice]:
        shown += ["", "what lay idle", *advice]
    suggested = [
        f"  {setting.key}: {setting.shown(setting.value)}, was {setting.shown(setting.was)}: {setting.why}"
        for use in stages
        for setting in use.suggested
    ]
    if suggested:
        shown += ["", "for the next run (mem: auto asks for this by itself)", *suggested]
    return shown


def _row(use: StageUse) -> tuple[str, ...]:
    return (
        use.stage,
        f"{use.tasks:,}",
        f"{use.attempts:,}",
        _size(use.asked_bytes),
        _size(use.peak_bytes),
        _percent(use.mem_used),
        str(use.cpus),
        _percent(use.cpu_used),
        _time(use.limit_s),
        _time(use.longest_s),
    )


def _lines(use: StageUse) -> list[str]:
    """Return the figures of a stage that have no column in the table."""
    pace = f" ({use.items_per_s:,.1f} a second and task)" if use.items_per_s else ""
    parts = [f"{plural(use.items, unit_of(use.stage))}{pace}", f"{use.core_hours:,.2f} core hours"]
    if use.gpus:
        memory = _size(use.gpu_peak_bytes) + (f" of {format_bytes(use.gpu_total_bytes)}" if use.gpu_total_bytes else "")
        parts += [f"{use.gpu_hours:,.2f} GPU hours", f"GPU busy {_percent(use.gpu_busy)}", f"GPU memory {memory}"]
    planned = f"; planned {format_bytes(use.planned_bytes)}" if use.planned_bytes else ""
    why = f" ({use.why})" if use.why else ""
    median = f" (median {format_bytes(use.median_peak_bytes)})" if use.median_peak_bytes else ""
    memory = f"  memory: first {_size(use.first_bytes)}{why}{planned}; peak {_size(use.peak_bytes)}{median}"
    return [f"{use.stage}: {', '.join(parts)}", memory]


def _size(count: int | None) -> str:
    return UNKNOWN if count is None else format_bytes(count)


def _time(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else format_seconds(seconds)


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"
