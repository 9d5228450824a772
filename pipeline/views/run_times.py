"""What happened in a run at which time, as its HTML report draws it: of bounded size, however long the run is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from pipeline.cluster.verdict import Cause
from pipeline.journal.run_status import State

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.journal.run_status import RunStatus, StageStatus

STEP_OOM = "step out of memory"  # a cause: the step was repeated in smaller parts
SPANS = 240  # into which a run is cut
Span = tuple[float, float]


class FailuresAt(NamedTuple):
    """How often a stage failed of a cause in a span of time: attempts, or steps of a training."""

    stage: str
    cause: str
    survived: bool  # the task is done now, or the step was repeated
    at: float
    times: int


@dataclass(frozen=True, slots=True)
class RunTimes:
    """What happened at which time, in seconds since 1970; everything but the span of the run by stage."""

    begun: float
    end: float  # now, of a run that is active
    planning: Mapping[str, Span]  # from the end of the stage before to its beginning
    first: Mapping[str, float]  # when its first task began
    running: Mapping[str, Sequence[Span]]  # when the number of its running tasks changed, and to what
    failures: Sequence[FailuresAt]
    paces: Mapping[str, Sequence[Span]]  # time and items per second; repeated work counts again


def times_of(status: RunStatus, now: float) -> RunTimes:
    """Return what happened in a run at which time, by its deep view."""
    begun, end = span_of(status, now)
    tasks = {stage.name: list(_task_times(stage, end)) for stage in status.in_order()}
    width = (end - begun) / SPANS
    failed = Counter[tuple[str, str, bool, int]]()
    for stage in status.in_order():
        for task in stage.work.values():
            for attempt in task.ended:
                if attempt.cause is not Cause.DONE and attempt.ended_at:
                    failed[stage.name, attempt.cause.value, task.good, int((attempt.ended_at - begun) / width)] += 1
        for slot, times in stage.ooms.counts.items():
            place = int(((slot + 0.5) * stage.ooms.width_s - begun) / width)
            failed[stage.name, STEP_OOM, True, place] += times
    return RunTimes(
        begun,
        end,
        planning_times(status, begun, end),
        {name: min(start for start, _ in spans) for name, spans in tasks.items() if spans},
        {name: _at_once(spans, begun, width) for name, spans in tasks.items() if spans},
        [
            FailuresAt(stage, cause, is_survived, begun + (place + 0.5) * width, times)
            for (stage, cause, is_survived, place), times in sorted(failed.items())
        ],
        {stage.name: stage.over_time.points(end) for stage in status.in_order() if stage.over_time.counts},
    )


def span_of(status: RunStatus, now: float) -> Span:
    """Return when a run began, and when it ended or, while it runs, the present time."""
    stages = status.stages.values()
    begun = status.started_at or min((stage.started_at for stage in stages), default=now)
    ends = [attempt.ended_at for stage in stages for task in stage.work.values() for attempt in task.ended]
    last = max([begun, status.ended_at, *(stage.ended_at for stage in stages), *ends])
    return begun, max(last if status.ended_at else now, begun + 1e-3)


def planning_times(status: RunStatus, begun: float, end: float) -> dict[str, Span]:
    """Return when each stage was planned: from the end of the stage before, or from the visit of its supervisor."""
    before, planning = begun, {}
    starts = {stage.name: stage.started_at for stage in status.in_order()}
    is_between = status.state is State.RUNNING and all(stage.ended_at for stage in status.stages.values())
    later = [name for name in status.planned if name not in starts]
    for name, at in [*starts.items(), *((name, end) for name in later[:1] if is_between)]:
        planning[name] = (max(before, status.seen) if status.seen < at else before, at)
        before = max(before, status.stages[name].ended_at or at) if name in starts else at
    return planning


def _task_times(stage: StageStatus, now: float) -> Iterator[Span]:
    """Yield when each attempt at a task of a stage began and ended, as far as that is known."""
    for task in stage.work.values():
        for attempt in task.ended:
            if attempt.ended_at and attempt.elapsed_s > 0:
                yield attempt.ended_at - attempt.elapsed_s, attempt.ended_at
        word = task.word
        if task.job is not None and word.began:  # not judged yet, or never: of a run that was stopped
            yield word.began, word.at if word.finished or word.exit_code is not None else now


def _at_once(tasks: Sequence[Span], begun: float, width: float) -> list[Span]:
    """Return how many tasks ran at the beginning of each span of a run, where that changes; at its end none."""
    changes = [0] * (SPANS + 1)
    for start, stop in tasks:
        first, last = (min(SPANS - 1, max(0, int((at - begun) / width))) for at in (start, stop))
        changes[first] += 1
        changes[last + 1] -= 1
    counts = [*accumulate(changes[:SPANS]), 0]
    return [
        (begun + place * width, count)
        for place, count in enumerate(counts)
        if place in (0, SPANS) or count != counts[place - 1]
    ]
