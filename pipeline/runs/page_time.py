"""What happened when, in a few hundred figures however long a run was: tasks at once, and work done a second."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pipeline.cluster.verdict import Cause
from pipeline.records import EventKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pipeline.records import Event
    from pipeline.runs.status import RunStatus, StageStatus

MOST_SLOTS = 400  # in which the work of a stage is counted
SPANS = 240  # into which a run is cut to count the tasks that run at once
TELLING = (EventKind.PROGRESS, EventKind.TASK_FINISHED)


@dataclass(slots=True)
class Slots:
    """Counts over time; events come in any order, and slots become wider before they become too many."""

    width_s: int = 1
    counts: Counter[int] = field(default_factory=Counter)

    def add(self, at: float, count: int) -> None:
        """Count something that was done by a time."""
        self.counts[int(at) // self.width_s] += count
        while len(self.counts) > MOST_SLOTS:
            wider = Counter[int]()
            for slot, known in self.counts.items():
                wider[slot // 2] += known
            self.width_s, self.counts = 2 * self.width_s, wider

    def points(self, until: float) -> list[tuple[float, float]]:
        """Return time and count a second, slot by slot; where nothing was told for long, it is 0."""
        if not self.counts:
            return []
        first, last = min(self.counts), max(self.counts)
        step = max(1, -(-(last - first + 1) // MOST_SLOTS))
        found = []
        for start in range(first, last + 1, step):
            begin, end = start * self.width_s, min((start + step) * self.width_s, max(until, start * self.width_s + 1))
            total = sum(self.counts[slot] for slot in range(start, start + step))
            found.append(((begin + end) / 2, total / (end - begin)))
        return found


class Pace:
    """How much tasks have worked through over time; what was done again counts again: it is a speed."""

    def __init__(self) -> None:
        self.stages: dict[str, Slots] = {}
        self._done: dict[str, int] = {}  # by process, in its present attempt

    def take(self, event: Event) -> None:
        """Take one event into account."""
        if event.kind is EventKind.TASK_STARTED:
            self._done[event.writer] = 0
        elif event.kind in TELLING and (more := event.data["done"] - self._done.get(event.writer, 0)) > 0:
            self._done[event.writer] = event.data["done"]
            self.stages.setdefault(event.data["stage"], Slots()).add(event.at, more)


def span_of(status: RunStatus, now: float) -> tuple[float, float]:
    """Return when a run began, and when it ended or what time it is."""
    begun = status.started_at or min((one.started_at for one in status.stages.values()), default=now)
    ends = [one.ended_at for stage in status.stages.values() for task in stage.work.values() for one in task.ended]
    last = max([status.ended_at, *(stage.ended_at for stage in status.stages.values()), *ends], default=0.0)
    end = max(last, begun) if status.ended_at else now
    return begun, max(end, begun + 1e-3)


def first_start(stage: StageStatus) -> float | None:
    """Return when the first task of a stage began to run."""
    return min((begin for begin, _ in _times(stage, 0.0)), default=None)


def at_once(status: RunStatus, begun: float, end: float) -> dict[str, list[tuple[float, int]]]:
    """Return for each stage how many of its tasks ran, at the beginning of each span of the run."""
    width = (end - begun) / SPANS
    found = {}
    for stage in status.in_order():
        changes = [0] * (SPANS + 1)
        for start, stop in _times(stage, end):
            first, last = (min(SPANS - 1, max(0, int((at - begun) / width))) for at in (start, stop))
            changes[first] += 1
            changes[last + 1] -= 1
        if any(changes):
            running = accumulate(changes[:SPANS])
            found[stage.name] = [(begun + place * width, count) for place, count in enumerate(running)]
    return found


def _times(stage: StageStatus, now: float) -> Iterator[tuple[float, float]]:
    """Yield when each attempt at a task of a stage began and ended, as far as that is known."""
    for task in stage.work.values():
        for one in task.ended:
            if one.ended_at and one.elapsed_s > 0:
                yield one.ended_at - one.elapsed_s, one.ended_at
        word = task.word
        if task.job is not None and word.began:  # nobody has judged it yet, or nobody will: of a run that was stopped
            yield word.began, word.at if word.finished or word.exit_code is not None else now


def failures_over_time(status: RunStatus, begun: float, end: float) -> list[dict[str, Any]]:
    """Return what did not end well by stage, cause and span of time, with how often it was so."""
    width = (end - begun) / SPANS
    counted = Counter[tuple[str, str, int]]()
    for stage in status.in_order():
        for task in stage.work.values():
            for one in task.ended:
                if one.cause is not Cause.DONE and one.ended_at:
                    counted[stage.name, one.cause.value, int((one.ended_at - begun) / width)] += 1
    return [
        {"stage": stage, "cause": cause, "at": begun + (place + 0.5) * width, "times": times}
        for (stage, cause, place), times in sorted(counted.items())
    ]


def paces(pace: Mapping[str, Slots], until: float) -> dict[str, list[tuple[float, float]]]:
    """Return the speed of each stage over time."""
    return {name: slots.points(until) for name, slots in pace.items()}
