"""What a run is doing, folded from its events; the fold is pure, so it is the same live and long after."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from pipeline.records import Event, EventKind
from pipeline.runs.ledger import Reader

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pipeline.runs.folder import RunFolder


COUNTED = ("items", "refused", "unusable", "cached", "missing", "tasks")


class RunState(str, Enum):
    """Where a run or a stage stands."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    ABANDONED = "abandoned"  # its supervisor is gone and did not say goodbye


@dataclass(slots=True)
class StageStatus:
    """One stage of a run."""

    name: str
    state: RunState = RunState.RUNNING
    items: int = 0
    refused: int = 0
    unusable: int = 0
    cached: int = 0
    missing: int = 0
    tasks: int = 0
    done: dict[int, int] = field(default_factory=dict)  # task → items
    rejected: dict[int, Mapping[str, int]] = field(default_factory=dict)  # task → reason → items
    ended: dict[int, str] = field(default_factory=dict)  # task → state
    failures: list[dict[str, Any]] = field(default_factory=list)
    said: dict[int, str] = field(default_factory=dict)  # task → what it said of its own failure
    census: Mapping[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)
    error: str = ""
    started_at: float = 0.0
    ended_at: float = 0.0

    def counts(self) -> dict[str, int]:
        """Return what was found when the stage was submitted."""
        return {name: getattr(self, name) for name in COUNTED}

    @property
    def items_done(self) -> int:
        """Items that tasks have worked through."""
        return sum(self.done.values())

    @property
    def reasons(self) -> Counter[str]:
        """Rejections so far, by reason."""
        return sum((Counter(reasons) for reasons in self.rejected.values()), Counter[str]())

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        failures = [failure | {"said": self.said.get(failure["task"], "")} for failure in self.failures]
        derived = {"state": self.state.value, "items_done": self.items_done, "reasons": dict(self.reasons)}
        return asdict(self) | derived | {"failures": failures}


@dataclass(slots=True)
class RunStatus:
    """One run."""

    name: str
    state: RunState = RunState.WAITING
    stages: dict[str, StageStatus] = field(default_factory=dict)
    host: str = ""
    pid: int = 0
    error: str = ""
    exit_code: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0

    def apply(self, event: Event) -> None:
        """Take one event into account."""
        if event.kind is EventKind.RUN_STARTED:
            self.state, self.started_at = RunState.RUNNING, event.at
            self.host, self.pid = event.data["host"], event.data["pid"]
        elif event.kind is EventKind.RUN_ENDED:
            self.state, self.ended_at = RunState(event.data["state"]), event.at
            self.error, self.exit_code = event.data["error"], event.data["exit_code"]
            self.settle()
        else:
            self._apply_to_stage(event)

    def settle(self) -> None:
        """Let no stage go on in a run that does not."""
        for stage in self.stages.values():
            if stage.state is RunState.RUNNING:
                stage.state = self.state

    def _apply_to_stage(self, event: Event) -> None:
        """Take an event of a stage or of one of its tasks into account."""
        data = event.data
        stage = self.stages.setdefault(data["stage"], StageStatus(data["stage"], started_at=event.at))
        if event.kind is EventKind.STAGE_SUBMITTED:
            for name in COUNTED:
                setattr(stage, name, data.get(name, 0))
            stage.started_at = event.at
        elif event.kind is EventKind.STAGE_ENDED:
            stage.state, stage.ended_at = RunState(data["state"]), event.at
            stage.census, stage.warnings, stage.error = data["census"], data["warnings"], data["error"]
        elif event.kind in (EventKind.PROGRESS, EventKind.TASK_FINISHED):
            stage.done[data["task"]] = data["done"]
            stage.rejected[data["task"]] = data["rejected"]
        elif event.kind is EventKind.TASK_ENDED:
            stage.ended[data["task"]] = data["state"]
            if data["reason"]:
                stage.failures.append(dict(data))
        elif event.kind is EventKind.TASK_FAILED:
            stage.said[data["task"]] = data["what"]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self) | {"state": self.state.value, "stages": [stage.to_json() for stage in self.stages.values()]}


def fold(name: str, events: Iterable[Event]) -> RunStatus:
    """Return the state that events lead to."""
    status = RunStatus(name)
    for event in events:
        status.apply(event)
    return status


def status_of(folder: RunFolder, this_host: str) -> RunStatus:
    """Return the state of a run; one that says it is running while its supervisor is gone is abandoned."""
    status = fold(folder.name, Reader(folder).fresh())
    if status.state is RunState.RUNNING and status.host == this_host and not _alive(status.pid):
        status.state = RunState.ABANDONED
        status.settle()
    return status


def _alive(pid: int) -> bool:
    """Say whether a process of this machine lives."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
