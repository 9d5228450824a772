"""The contents of a run's HTML report, of bounded size, computed from the run's ledger."""

from __future__ import annotations

import json
from collections import Counter
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

from pipeline.cluster.verdict import Cause
from pipeline.journal.run_status import State
from pipeline.report.html.run_facts import (
    STEP_OOM,
    FailuresAt,
    RejectedItems,
    Rejections,
    StageFacts,
    TimeFacts,
    TroubledAttempt,
    Troubles,
)
from pipeline.report.stage_lines import script_figures, so_far, wait_lines
from pipeline.report.tables import clip

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.journal.attempts import Attempt
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import RunStatus, StageStatus
    from pipeline.journal.run_view import RunView

ATTEMPTS = 200  # failed, each with a row
REJECTIONS = 200
LIST_MOST = 40
DICT_MOST = 200


def stage_facts(run: RunView, stage: StageStatus) -> StageFacts:
    """Return what is known of a stage, however many tasks it has."""
    return StageFacts(
        status=stage,
        first_task_at=min((begin for begin, _ in _times(stage, 0.0)), default=None),
        left_s=run.left_s(stage),
        waits_for=bounded(run.waits_for(stage)),
        waits=bounded(wait_lines((wait for wait in run.waits if wait.of == stage.name), run.at)),
        census=bounded(stage.census or {}),
        warnings=bounded(stage.warnings),
        so_far=[*script_figures(stage.figures), *so_far(stage)],
    )


def trouble_facts(status: RunStatus) -> Troubles:
    """Return the attempts that did not end well, counts by cause, and what was done about each."""
    stages = status.in_order()
    failures = [(stage, attempt) for stage in stages for attempt in stage.failures]
    return Troubles(
        total=len(failures),
        causes=dict(Counter((stage.name, attempt.cause.value) for stage, attempt in failures).most_common()),
        attempts=[_trouble(stage, attempt) for stage, attempt in failures[:ATTEMPTS]],
        survived=sum(stage.task(attempt.task).good for stage, attempt in failures),
        open=sum(1 for stage in stages for task in stage.work.values() if task.ended and task.open),
        left_out=[
            {"stage": stage.name, **bounded(record)} for stage in stages for record in stage.left_out[:LIST_MOST]
        ],
    )


def _trouble(stage: StageStatus, attempt: Attempt) -> TroubledAttempt:
    task = stage.task(attempt.task)
    now = "done" if task.good else "running again" if task.job is not None else "not done"
    of = f"{stage.name} {stage.name_of(attempt.task)}".rstrip()
    return TroubledAttempt(of, attempt, task.then.get(attempt.number, ""), now)


def rejection_facts(folder: RunFolder, status: RunStatus) -> Rejections:
    """Return why items were left out: by reason from the newest census, or as counted so far while stages run."""
    stages = status.in_order()
    rows = [row for stage in _with_new_rejections(stages) for row in _by_census(stage)]
    rows += [
        RejectedItems(stage.name, reason, items, so_far=True)
        for stage in stages
        if not stage.census
        for reason, items in stage.reasons.most_common()
    ]
    return Rejections(rows, *_listed(folder), folder.rejected)


def _with_new_rejections(stages: Sequence[StageStatus]) -> Iterator[StageStatus]:
    """Yield the stages whose rejections differ from the stage before; those that are equal are the same items."""
    before: Mapping[str, int] = {}
    for stage in stages:
        rejected = (stage.census or {}).get("rejected")
        if rejected and rejected != before:
            yield stage
            before = rejected


def _by_census(stage: StageStatus) -> Iterator[RejectedItems]:
    census = stage.census or {}
    for reason, items in list(census["rejected"].items())[:LIST_MOST]:
        yield RejectedItems(stage.name, reason, items, str(census.get("examples", {}).get(reason, "")))


def _listed(folder: RunFolder) -> tuple[list[dict[str, str]], int]:
    """Return the first items of the list of rejections, and how many more it has."""
    rows: list[dict[str, str]] = []
    try:
        with folder.rejected.open("rb") as file:
            for line in islice(file, REJECTIONS):
                record = json.loads(line)
                rows.append({name: str(record.get(name, "")) for name in ("id", "reason", "detail", "origin", "split")})
            more = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    except (OSError, ValueError):
        return rows, 0
    return rows, more


def bounded(value: Any) -> Any:
    """Return JSON data cut to a bounded size, with a count of what was cut."""
    if isinstance(value, str):
        return clip(value)
    if isinstance(value, dict):
        return {clip(str(name), 200): bounded(entry) for name, entry in islice(value.items(), DICT_MOST)}
    if isinstance(value, list | tuple):
        more = [f"… and {len(value) - LIST_MOST:,} more"] if len(value) > LIST_MOST else []
        return [*map(bounded, value[:LIST_MOST]), *more]
    return value if value is None or isinstance(value, int | float) else clip(str(value))


SPANS = 240  # into which a run is cut to count the tasks that run at once


def span_of(status: RunStatus, now: float) -> tuple[float, float]:
    """Return when a run began, and when it ended or, while it runs, the present time."""
    begun = status.started_at or min((attempt.started_at for attempt in status.stages.values()), default=now)
    ends = [
        attempt.ended_at for stage in status.stages.values() for task in stage.work.values() for attempt in task.ended
    ]
    last = max([status.ended_at, *(stage.ended_at for stage in status.stages.values()), *ends], default=0.0)
    end = max(last, begun) if status.ended_at else now
    return begun, max(end, begun + 1e-3)


def running_over_time(status: RunStatus, begun: float, end: float) -> dict[str, list[tuple[float, int]]]:
    """Return for each stage how many of its tasks ran at the beginning of each span of the run."""
    width = (end - begun) / SPANS
    series = {}
    for stage in status.in_order():
        changes = [0] * (SPANS + 1)
        for start, stop in _times(stage, end):
            first, last = (min(SPANS - 1, max(0, int((at - begun) / width))) for at in (start, stop))
            changes[first] += 1
            changes[last + 1] -= 1
        if any(changes):
            running = accumulate(changes[:SPANS])
            series[stage.name] = [(begun + place * width, count) for place, count in enumerate(running)]
    return series


def _times(stage: StageStatus, now: float) -> Iterator[tuple[float, float]]:
    """Yield when each attempt at a task of a stage began and ended, as far as that is known."""
    for task in stage.work.values():
        for attempt in task.ended:
            if attempt.ended_at and attempt.elapsed_s > 0:
                yield attempt.ended_at - attempt.elapsed_s, attempt.ended_at
        word = task.word
        if task.job is not None and word.began:  # nobody has judged it yet, or nobody will: of a run that was stopped
            yield word.began, word.at if word.finished or word.exit_code is not None else now


def planning_over_time(status: RunStatus, begun: float, end: float) -> dict[str, tuple[float, float]]:
    """Return when each stage was planned: from the end of the stage before, or from the visit of its supervisor."""
    before, planning = begun, {}
    starts = {stage.name: stage.started_at for stage in status.in_order()}
    is_between = status.state is State.RUNNING and all(stage.ended_at for stage in status.stages.values())
    later = [name for name in status.planned if name not in starts]
    for name, at in [*starts.items(), *((name, end) for name in later[:1] if is_between)]:
        planning[name] = (max(before, status.seen) if status.seen < at else before, at)
        before = max(before, status.stages[name].ended_at or at) if name in starts else at
    return planning


def failures_over_time(status: RunStatus, begun: float, end: float) -> list[FailuresAt]:
    """Return what failed, by stage, cause and span of time: attempts, and steps that ran out of memory."""
    width = (end - begun) / SPANS
    counted = Counter[tuple[str, str, bool, int]]()
    for stage in status.in_order():
        for task in stage.work.values():
            for attempt in task.ended:
                if attempt.cause is not Cause.DONE and attempt.ended_at:
                    counted[stage.name, attempt.cause.value, task.good, int((attempt.ended_at - begun) / width)] += 1
        for slot, times in stage.ooms.counts.items():
            place = int(((slot + 0.5) * stage.ooms.width_s - begun) / width)
            counted[stage.name, STEP_OOM, True, place] += times
    return [
        FailuresAt(stage, cause, begun + (place + 0.5) * width, times, survived)
        for (stage, cause, survived, place), times in sorted(counted.items())
    ]


def time_facts(status: RunStatus, now: float) -> TimeFacts:
    """Return the run's time span, planning, running tasks, failures and paces."""
    begun, end = span_of(status, now)
    return TimeFacts(
        begun=begun,
        end=end,
        planning=planning_over_time(status, begun, end),
        running=running_over_time(status, begun, end),
        failures=failures_over_time(status, begun, end),
        paces={stage.name: stage.over_time.points(end) for stage in status.in_order() if stage.over_time.counts},
    )
