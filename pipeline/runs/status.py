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
    from collections.abc import Iterable, Mapping, Sequence

    from pipeline.runs.folder import RunFolder


COUNTED = ("items", "refused", "unusable", "cached", "missing", "tasks", "waiting", "residues", "unkept")


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
    waiting: int = 0  # items that an earlier stage has still to do
    residues: int = 0  # to do
    unkept: int = 0  # graphs that are built when they are read
    cost: float = 0.0  # to do, in the unit of the figure `cost_done`
    done: dict[str, int] = field(default_factory=dict)  # process → items
    rejected: dict[str, Mapping[str, int]] = field(default_factory=dict)  # process → reason → items
    figures: dict[str, Mapping[str, float]] = field(default_factory=dict)  # process → what it measured
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

    def measured(self) -> dict[str, float]:
        """Return what the processes measured, put together."""
        running = sum(one["task"] not in self.ended for one in self.figures.values())
        return summary(list(self.figures.values()), self.cost, running)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        failures = [failure | {"said": self.said.get(failure["task"], "")} for failure in self.failures]
        derived: dict[str, Any] = {
            "state": self.state.value,
            "items_done": self.items_done,
            "reasons": dict(self.reasons),
        }
        derived |= {"measured": self.measured()}
        return asdict(self) | derived | {"failures": failures}


def summary(figures: Sequence[Mapping[str, float]], cost: float, running: int) -> dict[str, float]:
    """Return what some processes measured as figures of the stage, of which so many still run."""
    busy = [one for one in figures if one.get("forward_s")]
    if not busy:
        return {}

    def total(name: str) -> float:
        return sum(one[name] for one in busy)

    left = max(0.0, cost - total("cost_done"))
    return {
        "residues_per_s": total("residues") / total("forward_s"),  # of one process
        "pad_factor": total("tokens") / max(1, total("encoded_residues")),
        "left_s": left / (total("cost_done") / total("forward_s") * max(1, running)) if total("cost_done") else 0.0,
        "peak_rss_bytes": max(one["host_peak_bytes"] for one in busy),
        "peak_gpu_bytes": max(one["device_peak_bytes"] for one in busy),
        "lowest_cosine": min(one["lowest_cosine"] for one in busy),
        "splits": total("splits"),
    }


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
            for name in (*COUNTED, "cost"):
                setattr(stage, name, data.get(name, 0))
            stage.started_at = event.at
        elif event.kind is EventKind.STAGE_ENDED:
            stage.state, stage.ended_at = RunState(data["state"]), event.at
            stage.census, stage.warnings, stage.error = data["census"], data["warnings"], data["error"]
        elif event.kind in (EventKind.PROGRESS, EventKind.TASK_FINISHED):
            stage.done[event.writer] = data["done"]
            stage.rejected[event.writer] = data["rejected"]
            if data.get("figures"):
                stage.figures[event.writer] = {**data["figures"], "task": data["task"]}
        elif event.kind is EventKind.TASK_ENDED:
            stage.ended[data["task"]] = data["state"]
            if data["reason"]:
                stage.failures.append(dict(data))
        elif event.kind is EventKind.TASK_FAILED:
            stage.said[data["task"]] = data["what"]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        in_order = sorted(self.stages.values(), key=lambda stage: stage.started_at)  # event files are read by name
        return asdict(self) | {"state": self.state.value, "stages": [stage.to_json() for stage in in_order]}


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
