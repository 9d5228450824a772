"""A run of which a good deal can be told: a training that goes on after trouble, by a fixed clock."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cluster.verdict import Cause
from pipeline.journal.attempts import Ask, Attempt
from pipeline.journal.run_folder import RunFolder
from pipeline.journal.run_status import RunStatus, StageJob, StageStatus
from pipeline.journal.run_view import QueueLook, RunView
from pipeline.records import Event, EventKind

NOON = 1_795_348_800.0  # 2026-11-22 12:00 UTC
GIB = 1 << 30
SUPERVISOR = "job 9001 waits: until job 8003 has ended"
STAGES = ("scan", "graph", "train", "evaluate")


REJECTED = {"no_contacts": 9, "too_short": 2}
EXAMPLES = {"no_contacts": "1abc: its partners are 9 Å apart", "too_short": "2xyz: chain A has 3 residues"}
SCANNED = {"items": 1500, "accepted": 1489, "rejected": REJECTED, "examples": EXAMPLES}
PACE = {"graph": 12.5, "train": 3.4}


def event(after_s: float, kind: EventKind, writer: str = "supervisor-000001", **data: Any) -> Event:
    return Event(kind, NOON + after_s, writer, data)


def job(after_s: float, stage: str, tasks: str, number: int, attempt: int = 1, gib: int = 2, why: str = "") -> Event:
    asked = StageJob(f"t{number}", stage, tasks, attempt, Ask(gib * GIB, 3600), f"{number}", why=why).to_json()
    return event(after_s, EventKind.JOB_SUBMITTED, **asked)


def ended(after_s: float, stage: str, task: int, number: int, cause: Cause, reason: str = "") -> Event:
    asked, peak = Ask(2 * GIB, 3600), 1.6 * GIB
    one = Attempt(task, number, asked, cause, reason, job="8001", peak_rss_bytes=int(peak), ended_at=NOON + after_s)
    return event(after_s, EventKind.TASK_ENDED, stage=stage, **one.to_event())


def progress(after_s: float, stage: str, task: int, done: int, **figures: float) -> Event:
    facts = {"stage": stage, "task": task, "attempt": 1, "done": done, "rejected": {}}
    return event(after_s, EventKind.PROGRESS, f"{stage}-{task:06d}", **facts, figures=figures)


def started(after_s: float, stage: str, task: int) -> Event:
    return event(after_s, EventKind.TASK_STARTED, f"{stage}-{task:06d}", stage=stage, task=task, attempt=1)


def stage_ended(after_s: float, stage: str, state: str = "done", **census: Any) -> Event:
    told = {"state": state, "census": census or None, "warnings": [], "error": ""}
    return event(after_s, EventKind.STAGE_ENDED, stage=stage, **told)


def beginning() -> list[Event]:
    """A scan that ended, and graphs of which one task was killed and tried again."""
    who = {"host": "n1", "pid": 7}
    rejected = {"stage": "scan", "task": 0, "attempt": 1, "done": 1200, "rejected": {"no_contacts": 9, "too_short": 2}}
    killed = "killed at its memory limit of 2.0 GiB"
    return [
        event(0, EventKind.RUN_STARTED, stages=list(STAGES), **who),
        event(1, EventKind.STAGE_SUBMITTED, stage="scan", items=1500, missing=1200, cached=300, tasks=1),
        job(1, "scan", "0", 8000),
        event(60, EventKind.TASK_FINISHED, "scan-000000", **rejected, figures={}),
        ended(61, "scan", 0, 1, Cause.DONE),
        stage_ended(62, "scan", **SCANNED),
        event(63, EventKind.STAGE_SUBMITTED, stage="graph", items=1489, missing=1489, tasks=3),
        job(63, "graph", "0-2", 8001),
        *(started(70, "graph", task) for task in (0, 1, 2)),
        progress(100, "graph", 0, 500, host_peak_bytes=1.2 * GIB),
        ended(110, "graph", 1, 1, Cause.HOST_OOM, killed),
        ended(112, "graph", 2, 1, Cause.HOST_OOM, killed),
        job(115, "graph", "1-2", 8002, 2, 4, "it was killed for memory: twice as much"),
    ]


def training() -> list[Event]:
    """The graphs are there, and a training goes on, which has run out of memory once."""
    told = {
        "oom_step": 312,
        "oom_items": 16,
        "learning_rate": 2e-4,
        "host_peak_bytes": 3 * GIB,
        "device_peak_bytes": 30 * GIB,
    }
    told |= {"planned_bytes": 40 * GIB, "epochs": 10}
    losses = [2.0, 1.7, 1.5, 1.2, 1.25, 0.9, 0.8, 0.7]
    return [
        *beginning(),
        stage_ended(200, "graph"),
        event(201, EventKind.STAGE_SUBMITTED, stage="train", items=5000, missing=5000, tasks=1),
        job(201, "train", "0", 8003, gib=8),
        started(210, "train", 0),
        *(
            progress(240 + 30 * n, "train", 0, 100 * (n + 1), epoch=n // 4, **{"loss.total": loss}, **told, ooms=1)
            for n, loss in enumerate(losses)
        ),
    ]


def finished() -> list[Event]:
    """All stages of a run are done."""
    best = {"validation": {"loss": 0.31, "auroc": 0.9621}}
    measured = {"loss": 0.3, "auroc": 0.9642}
    return [
        *training(),
        progress(1600, "train", 0, 5000, epoch=10, ooms=1, oom_step=312, oom_items=16),
        ended(1650, "train", 0, 1, Cause.DONE),
        stage_ended(1660, "train", epochs=10, monitor="auroc", best=best, folder="/data/project/models/own-0123"),
        event(1661, EventKind.STAGE_SUBMITTED, stage="evaluate", items=300, missing=300, tasks=1),
        progress(1670, "evaluate", 0, 300),
        stage_ended(1680, "evaluate", split="test", figures=measured),
        event(1681, EventKind.RUN_ENDED, state="done", error="", exit_code=0),
    ]


def nothing_to_do() -> list[Event]:
    """Everything was there."""
    events = [event(0, EventKind.RUN_STARTED, stages=list(STAGES), host="n1", pid=7)]
    for stage in STAGES:
        events += [event(1, EventKind.STAGE_SUBMITTED, stage=stage, items=1489, cached=1489), stage_ended(2, stage)]
    return [*events, event(3, EventKind.RUN_ENDED, state="done", error="", exit_code=0)]


@dataclass
class Seen(RunView):
    """A run whose graphs wait in the queue."""

    delay: str = ""

    def waits_for(self, stage: StageStatus) -> list[str]:
        return ["Priority"] if stage.name == "graph" else []

    def delayed(self, stage: StageStatus) -> str:
        return self.delay if stage.name == "graph" else ""


def seen(
    events: list[Event], *, abandoned: bool = False, delay: str = "", trouble: str = "", supervisor: str = SUPERVISOR
) -> RunView:
    """Return a run as `status` sees it."""
    status = RunStatus("20261122-8000")
    for one in events:
        status.apply(one)
    if abandoned:
        status.abandon()
    return Seen(RunFolder(Path()), status, QueueLook({}, trouble), NOON + 500, supervisor, delay=delay)


QUEUED = [*beginning()[:8], job(64, "graph", "0-2", 8001)]
ERROR = "stage graph: 2 tasks failed\n  task 1: exit code 1: no chain A\n  log: runs/R/logs/8002_1.err"
DIED = event(900, EventKind.RUN_ENDED, state="failed", error=f"{ERROR}\n  next: pipeline logs --failed", exit_code=7)
FAILED = [
    *beginning(),
    ended(880, "graph", 1, 2, Cause.FAILED, "exit code 1: no chain A"),
    stage_ended(890, "graph", "failed"),
]
RUNS: dict[str, tuple[list[Event], dict[str, Any]]] = {
    "done": (finished(), {"supervisor": ""}),
    "running": (training(), {}),
    "waiting": (QUEUED, {"delay": "for 3m"}),
    "failed": ([*FAILED, DIED], {"supervisor": ""}),
    "orphaned": (beginning(), {"abandoned": True, "supervisor": "its log ends with\n  Killed"}),
    "up-to-date": (nothing_to_do(), {"supervisor": ""}),
    "planning": (beginning()[:6], {}),
    "mute-queue": (beginning(), {"trouble": "squeue: error: Unable to contact slurm controller"}),
    "not-begun": ([], {}),
}

__all__ = ["NOON", "PACE", "RUNS", "beginning", "event", "seen", "training"]
