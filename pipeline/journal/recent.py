"""What happened lately in a run, and how its loss went: what a fold of its events forgets, for who watches it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.cluster.verdict import Cause
from pipeline.records import EventKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.records import Event

KEPT, ROOM = 40, 160  # happenings
MOST_LOSSES = 256  # of a stage; more are thinned
LOSS, OOMS = "loss", "ooms"
HAS_LOSS = (LOSS, f"script.{LOSS}")


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that happened, to a stage or to one of its tasks."""

    at: float
    stage: str
    what: str
    task: str = ""  # its number, or a range
    more: int = 0  # tasks to which the same happened just before

    def is_like(self, other: Happening) -> bool:
        """Tell whether the same happened to another task."""
        return bool(self.task) and (self.stage, self.what) == (other.stage, other.what)

    def words(self) -> str:
        """Say it in a line."""
        noun = "task" if self.task.isdecimal() and not self.more else "tasks"
        tasks = f"{noun} {self.task}{f' and {self.more:,} more' if self.more else ''}, " if self.task else ""
        return f"{self.stage}: {tasks}{self.what}"


class Trail:
    """Takes events in any order of writers; memory does not grow with their number."""

    def __init__(self) -> None:
        self._lately: list[Happening] = []
        self._losses: dict[str, list[tuple[float, float]]] = {}
        self._ooms: dict[str, int] = {}

    def apply(self, event: Event) -> None:
        """Take one event into account."""
        if event.kind in (EventKind.PROGRESS, EventKind.TASK_FINISHED):
            self._hear(event)
        elif said := _said(event):
            self._note(said)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data: the newest happening last."""
        losses = {stage: [loss for _, loss in sorted(points)] for stage, points in self._losses.items()}
        return {"losses": losses, "lately": [[one.at, one.words()] for one in self._merged()]}

    def _note(self, one: Happening) -> None:
        self._lately.append(one)
        if len(self._lately) > ROOM:
            self._lately = self._merged()

    def _merged(self) -> list[Happening]:
        """Return the newest happenings; what happened to several tasks in the same way is one."""
        merged: list[Happening] = []
        for one in sorted(self._lately, key=lambda one: one.at):
            if merged and one.task and merged[-1].is_like(one):
                merged[-1] = replace(one, more=merged[-1].more + 1 + one.more)
            else:
                merged.append(one)
        return merged[-KEPT:]

    def _hear(self, event: Event) -> None:
        """Take down the loss that a process tells, and how often it has survived the end of memory."""
        figures: Mapping[str, float] = event.data.get("figures") or {}
        if not figures:
            return
        if (loss := _loss(figures)) is not None:
            points = self._losses.setdefault(event.data["stage"], [])
            if not points or points[-1][1] != loss:  # progress is told more often than figures are
                points.append((event.at, loss))
            if len(points) > MOST_LOSSES:
                del points[1:-1:2]
        ooms = int(figures.get(OOMS, 0))
        if ooms > self._ooms.get(event.writer, 0):
            self._note(Happening(event.at, event.data["stage"], f"out of memory, and went on ({ooms:,} so far)"))
        self._ooms[event.writer] = ooms


def _loss(figures: Mapping[str, float]) -> float | None:
    """Return the loss that figures tell: the sum of its terms."""
    terms = [value for name, value in figures.items() if name.startswith(f"{LOSS}.")]
    return sum(terms) if terms else next((figures[name] for name in HAS_LOSS if name in figures), None)


def _said(event: Event) -> Happening | None:
    """Say what happened; nothing of what is no news."""
    data, stage = event.data, event.data.get("stage", "run")
    task = str(data.get("task", data.get("tasks", "")))
    what = _what(event.kind, data)
    if not what:
        return None
    of_stage = event.kind in (EventKind.STAGE_SUBMITTED, EventKind.STAGE_ENDED, EventKind.RUN_ENDED)
    return Happening(event.at, stage, what, "" if of_stage else task)


def _what(kind: EventKind, data: Mapping[str, Any]) -> str:
    """Return the words for an event; empty: it is no news."""
    if kind is EventKind.TASK_ENDED:
        cause = data.get("cause", Cause.FAILED.value)
        how = f"{cause}: {data['reason']}" if data.get("reason") else cause
        return "" if cause == Cause.DONE.value else f"attempt {data['number']}: {how}"
    if kind is EventKind.JOB_SUBMITTED:
        attempt = data.get("attempt", 1)
        return f"attempt {attempt}: {data.get('why') or 'submitted'}" if attempt > 1 else ""
    if kind is EventKind.STAGE_SUBMITTED:
        return f"began, {data['missing']:,} to do" if data.get("missing") else ""
    if kind is EventKind.TASK_SPLIT:
        return f"split into {len(data['into'])}: {data['why']}"
    if kind is EventKind.LEFT_OUT:
        return f"left out {', '.join(data['names'])}: {data['why']}"
    plain = {
        EventKind.TASK_GIVEN_UP: "given up: {why}",
        EventKind.JOB_REFUSED: "its job was refused",
        EventKind.STAGE_ENDED: "{state}",
        EventKind.RUN_ENDED: "{state}",
    }
    return plain[kind].format_map(data) if kind in plain else ""
