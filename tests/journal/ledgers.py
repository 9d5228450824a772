"""Runs as their ledgers tell of them: events written as supervisors and workers write them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.cluster.job_spec import format_ranges
from pipeline.journal import run_folder as folders
from pipeline.journal.attempts import Ask, Attempt
from pipeline.journal.ledger import Ledger, LedgerReader
from pipeline.journal.run_folder import RunFolder
from pipeline.journal.run_status import RunStatus, StageJob
from pipeline.records import Event, EventKind

ASK = Ask(1 << 30, 3600)


def fold_events(name: str, events: Iterable[Event]) -> RunStatus:
    """Return the status that these events lead to."""
    status = RunStatus(name)
    for event in events:
        status.apply(event)
    return status


class Told:
    """A run folder in which a supervisor and workers write."""

    def __init__(self, runs: Path, stage: str = "scan", tasks: int = 2) -> None:
        self.folder: RunFolder = folders.create_folder(runs, datetime.now(tz=UTC))
        self.folder.stages.write_text(f'["{stage}"]')
        self.stage, self.supervisor = stage, Ledger(self.folder, "supervisor-000001")
        self.supervisor.emit(EventKind.RUN_STARTED, stages=[stage], host="elsewhere", pid=1)
        counts = {"items": 10 * tasks, "missing": 10 * tasks, "tasks": tasks}
        self.supervisor.emit(EventKind.STAGE_SUBMITTED, stage=stage, **counts)

    def job(self, job: str, tasks: list[int], attempt: int = 1, **more: Any) -> None:
        """Submit a job."""
        given = StageJob(
            f"{job}-tag", self.stage, format_ranges(tasks), attempt, more.pop("ask", ASK), job, **more
        ).to_json()
        self.supervisor.emit(EventKind.JOB_SUBMITTED, **{name: value for name, value in given.items() if name != "at"})

    def worker(self, task: int, kind: EventKind, **more: Any) -> None:
        """Let a worker say something."""
        ledger = Ledger(self.folder, f"{self.stage}-{task:06d}")
        ledger.emit(kind, stage=self.stage, task=task, **{"attempt": 1, **more})
        ledger.close()

    def ended(self, attempt: Attempt) -> None:
        """Judge an attempt."""
        self.supervisor.emit(EventKind.TASK_ENDED, stage=self.stage, **attempt.to_event())

    def over(self, state: str = "done", exit_code: int = 0, error: str = "") -> None:
        """End the run."""
        self.supervisor.emit(EventKind.RUN_ENDED, state=state, error=error, exit_code=exit_code)

    def log(self, name: str, text: str | bytes) -> Path:
        """Write a log."""
        path = self.folder.logs / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    @property
    def status(self) -> RunStatus:
        """What the ledger says."""
        return fold_events(self.folder.name, LedgerReader(self.folder).fresh())
