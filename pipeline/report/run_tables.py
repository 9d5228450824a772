"""A run as text: its stages, what they made and used, and what went wrong and was done about it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.text import Text

from pipeline.cluster.verdict import Cause
from pipeline.command_line import Command
from pipeline.journal.run_status import GOING_ON, State
from pipeline.report.run_summary import MARKS, ending, held_lines, notes, rows_of
from pipeline.report.stage_lines import (
    counted,
    memory_line,
    rejection_table,
    result_lines,
    script_figures,
    so_far,
    speed_lines,
    tasks_line,
    wait_lines,
)
from pipeline.report.tables import NO_TERMINAL, plural, text_table
from pipeline.units import format_bytes, short_bytes, short_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from pipeline.journal.attempts import Attempt
    from pipeline.journal.run_status import StageStatus
    from pipeline.journal.run_view import RunView
    from pipeline.report.run_summary import Row

TABLE_COLUMNS = 64  # that the table needs
AT_A_GLANCE = ("STAGE", "STATE", "DONE", "CACHED", "TIME", "PEAK/REQUESTED")
STORIES_SHOWN = 5
TASKS_NAMED = 5


NO_PACES: Mapping[str, float] = {}


def status_report(
    run: RunView, typed: Command, width: int = NO_TERMINAL, paces: Mapping[str, float] = NO_PACES
) -> list[RenderableType]:
    """Show a run at a glance: its stages, what needs attention, how it ended or what it does, and what to type next."""
    status, is_over, named = run.status, run.status.state not in GOING_ON, typed.words[1:]
    took = (status.ended_at or (run.at if math.isfinite(run.at) else 0.0)) - status.started_at
    clock = [short_seconds(took)] if status.started_at and took > 0 else []
    shown: list[RenderableType] = [" · ".join([f"Run {status.name}", status.state.word, *clock])]
    if status.state not in (*GOING_ON, State.DONE):
        head, *places = ending(status, typed, named)
        shown += [head, *_indented(status.error), *_indented(run.supervisor), *places, ""]
    rows = rows_of(run, paces)
    if rows and width >= TABLE_COLUMNS:
        cells = (_cells(row, status.stages.get(row.name)) for row in rows)
        shown.append(text_table(AT_A_GLANCE, cells, right=AT_A_GLANCE[2:]))
        going = [replace(row, share=None).line(width, run.at) for row in rows if row.state is State.RUNNING]
        shown += ["", *going] if going and not is_over else []
    else:
        shown += [row.line(width, run.at) for row in rows]
    if not is_over:
        shown += [f"! the queue does not answer: {run.trouble}"] if run.trouble else []
        shown += [] if rows else [run.supervisor]
    shown += [*held_lines(run), *(f"! {note}" for stage in status.in_order() for note in notes(stage))]
    shown += [run.account.line()] if run.account and run.account.is_low else []
    shown += ["", *ending(status, typed, named)] if status.state is State.DONE else []
    return [*shown, f"  Details: {Command.of('status', *named, '-v').in_project(typed)}"]


def _indented(text: str) -> list[str]:
    return [f"  {line.removesuffix('; finished work is kept')}" for line in text.splitlines()]  # the headline says it


def _cells(row: Row, stage: StageStatus | None) -> tuple[str | Text, ...]:
    """Return the cells of a stage."""
    symbol, style = MARKS[row.state]
    state = Text(f"{symbol} {row.state.word}", style)
    if stage is None:
        return (row.name, state, *[""] * 4)
    asked, peak, _ = stage.use().values()
    peak = peak or stage.highest("host_peak_bytes")
    memory = f"{short_bytes(peak) if peak else '?'}/{short_bytes(asked)}" if asked else ""
    done = f"{stage.cached + stage.items_done:,}/{stage.cached + stage.missing:,}"
    return row.name, state, done, f"{stage.cached:,}", row.took, memory


def run_report(
    run: RunView, typed: Command, width: int = NO_TERMINAL, paces: Mapping[str, float] = NO_PACES
) -> list[RenderableType]:
    """Show a run with every detail: what each stage made and used, and the story of its attempts."""
    status, shown = run.status, status_report(run, typed, width, paces)[:-1]
    shown += [f"  Supervisor: {run.supervisor}"] if run.supervisor and status.state in GOING_ON else []
    shown += wait_lines((wait for wait in run.status.waits if wait.is_over), run.at)
    shown += [run.account.line()] if run.account and not run.account.is_low else []
    rejected: Mapping[str, int] = {}
    for stage in status.in_order():
        shown += ["", Text(f"{stage.name}: {counted(stage)}", "bold"), *_progress(stage, run)]
        if stage.census:
            shown += result_lines(stage)
            if stage.census["rejected"] not in ({}, rejected):  # what an earlier stage has left out stays left out
                rejected = stage.census["rejected"]
                shown += ["", rejection_table(rejected, stage.census["examples"])]
        elif reasons := stage.reasons:
            shown.append(rejection_table(reasons, {}))
        is_stopped = status.state is State.STOPPED
        failed = [attempt for attempt in stage.failures if not (is_stopped and attempt.cause is Cause.CANCELLED)]
        failed = [attempt for attempt in failed if attempt.reason.partition("\n")[0] not in (status.error or "")]
        shown += [f"{plural(len(failed), 'attempt')} failed", *story(stage, failed)] if failed else []
    return shown


def _progress(stage: StageStatus, run: RunView) -> Iterator[str]:
    """Yield the progress of a stage, its memory and its speed."""
    yield from tasks_line(stage, run)
    yield from memory_line(stage)
    yield from script_figures(stage.figures)
    yield from so_far(stage)
    yield from speed_lines(stage)


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
