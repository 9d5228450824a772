"""`pipeline report` as text: whether memory was enough, a table of what was used, and settings for the next run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pipeline.cluster.verdict import Cause
from pipeline.journal.run_status import State
from pipeline.report.run_tables import story
from pipeline.report.stage_lines import unit_of, wait_lines
from pipeline.report.tables import NUMBERS, Column, plural, table_of
from pipeline.units import short_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from pipeline.journal.budget import Account
    from pipeline.journal.run_status import RunStatus
    from pipeline.report.facts import StageUse

COLUMNS: tuple[Column, ...] = (
    ("STAGE", "stage"), ("TASKS", "tasks", "count"), ("TRIES", "attempts", "count"), ("PEAK", "peak_bytes", "bytes"),
    ("REQUESTED", "asked_bytes", "bytes"), ("USED", "mem_used", "percent"), ("CPUS", "cpus", "count"),
    ("CPU USE", "cpu_used", "percent"), ("LONGEST", "longest_s", "span"), ("LIMIT", "limit_s", "span"),
)  # fmt: skip
OOMS = (Cause.HOST_OOM.value, Cause.GPU_OOM.value)
UNKNOWN = "unknown"


def use_report(
    status: RunStatus, stages: Sequence[StageUse], account: Account | None = None, *, verbose: bool = False
) -> list[RenderableType]:
    """Say whether the run's memory was enough; then show what each stage used, and what to request next time."""
    shown: list[RenderableType] = [*_verdict(status, stages)]
    shown += wait_lines(status.waits, status.ended_at or math.inf)
    shown += [f"! {use.stage}: {advice}" for use in stages for advice in use.advice]
    shown += [account.line()] if account else []
    shown += ["", f"Run {status.name} · {status.state.value}"]
    if stages:
        shown.append(table_of(COLUMNS, stages, unknown=UNKNOWN))
    suggested = [setting for use in stages for setting in use.suggested]
    if suggested:
        shown += ["", "Better requests for the next run (mem: auto follows its use by itself):"]
    options = [f"--set {setting.key}={setting.typed}" for setting in suggested]
    width = max(map(len, options), default=0)
    for option, setting in zip(options, suggested, strict=True):
        why = f": {setting.why}" if verbose else ""
        shown.append(f"  {option.ljust(width)}   # was {setting.shown(setting.was)}{why}")
    if not verbose:
        return [*shown, *(["", "Details: -v"] if stages else [])]
    for stage in status.in_order():
        if failed := stage.failures:
            shown += ["", f"{stage.name}: {plural(len(failed), 'attempt')} failed", *story(stage, failed)]
    return [*shown, *[""] * bool(stages), *(line for use in stages for line in _details(use))]


def _verdict(status: RunStatus, stages: Sequence[StageUse]) -> Iterator[str]:
    """Yield whether memory was enough, and how many attempts failed."""
    if not stages:
        yield "✓ Up to date: no task was needed" if status.state is State.DONE else "! No task has ended"
        return
    ooms = {use.stage: sum(use.causes.get(cause, 0) for cause in OOMS) for use in stages}
    known = [(use.peak_bytes / use.asked_bytes, use) for use in stages if use.peak_bytes and use.asked_bytes]
    if any(ooms.values()):
        named = ", ".join(f"{stage} ({count})" for stage, count in ooms.items() if count)
        sign, then = ("!", "retries got more") if status.state is State.DONE else ("✗", "see pipeline logs --failed")
        yield f"{sign} Out of memory: {named}; {then}"
    elif known:
        share, use = max(known, key=lambda pair: pair[0])
        size = f"peak {short_bytes(use.peak_bytes or 0)} of {short_bytes(use.asked_bytes or 0)} requested"
        yield f"✓ Memory fits: {size} ({share:.0%}, {use.stage})"
    else:
        yield "! Memory use is unknown: neither Slurm nor the tasks measured it"
    for use in stages:
        if use.gpu_peak_bytes and use.gpu_total_bytes:
            share = use.gpu_peak_bytes / use.gpu_total_bytes
            size = f"peak {short_bytes(use.gpu_peak_bytes)} of {short_bytes(use.gpu_total_bytes)}"
            yield f"✓ GPU memory: {size} ({share:.0%}, {use.stage})"
    if failed := sum(len(stage.failures) for stage in status.in_order()):
        yield f"! {plural(failed, 'attempt')} failed → pipeline logs {status.name} --failed"


def _details(use: StageUse) -> list[str]:
    """Return the measurements of a stage that have no column in the table."""
    pace = f" ({use.items_per_s:,.1f} per second and task)" if use.items_per_s else ""
    parts = [f"{plural(use.items, unit_of(use.stage))}{pace}", f"{use.core_hours:,.2f} core-hours"]
    if use.gpus:
        parts += [f"{use.gpu_hours:,.2f} GPU-hours", f"GPU busy {_known(use.gpu_busy, 'percent')}"]
    planned = f"; planned {short_bytes(use.planned_bytes)}" if use.planned_bytes else ""
    why = f", {use.why}" if use.why else ""
    first, median = (_known(size, "bytes") for size in (use.first_bytes, use.median_peak_bytes))
    memory = f"  memory: first request {first}{why}{planned}, median peak {median}"
    return [f"{use.stage}: {', '.join(parts)}", memory]


def _known(value: float | None, kind: str) -> str:
    return UNKNOWN if value is None else NUMBERS[kind](value)
