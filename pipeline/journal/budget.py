"""The budget of a project: GPU-hours or core-hours for all runs in a folder together, counted from their ledgers.

Ended tasks count their run time, unfinished tasks their time limit; the sum never exceeds the budget. Supervisors,
probes and runs that this user cannot read do not count.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from math import floor
from typing import TYPE_CHECKING

from pipeline.cluster.job_spec import parse_ranges
from pipeline.journal.run_folder import runs_in, writing_run
from pipeline.journal.run_status import ENDED, NO_JOB, StatusReader

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.journal.attempts import Attempt, TaskRecord
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import RunStatus, StageJob, StageStatus

WARN_AT = 0.8
ENDS_WITHIN_S = 60  # beyond a time limit: Slurm checks twice a minute, then waits before it kills (KillWait)
PRUNED = ".spent.jsonl"  # in the folder of runs: the hours of removed runs


@dataclass(frozen=True, slots=True)
class Hours:
    """Hours of cores or GPUs: used ones, and those that unfinished tasks may still use."""

    used: float = 0.0
    held: float = 0.0

    def __add__(self, other: Hours) -> Hours:
        return Hours(self.used + other.used, self.held + other.held)

    @property
    def total(self) -> float:
        return self.used + self.held


@dataclass(frozen=True, slots=True)
class Budget:
    """How many hours all runs may take together, and of what: `gpu` or `core`."""

    hours: float
    unit: str

    @classmethod
    def of(cls, text: str | None) -> Budget | None:
        """Read the setting, such as `500 gpu-hours`."""
        if text is None:
            return None
        number, _, unit = text.partition(" ")
        return cls(float(number), unit.partition("-")[0])

    def task_hours(self, job: StageJob) -> float:
        """Return the most hours that a task can use: its time limit, plus Slurm's tolerance, times its units."""
        return _most_s(job, self.unit) / 3600

    def fitting(self, job: StageJob, taken: Hours) -> int:
        """Return how many tasks of a job the rest of the budget allows."""
        each, tasks = self.task_hours(job), len(parse_ranges(job.tasks))
        return tasks if each == 0 else max(0, min(tasks, floor((self.hours - taken.total) / each + 1e-9)))


@dataclass(frozen=True, slots=True)
class Account:
    """A budget and its use."""

    budget: Budget
    taken: Hours
    holders: tuple[str, ...] = ()  # runs with unfinished tasks

    @property
    def left(self) -> float:
        return max(0.0, self.budget.hours - self.taken.total)

    @property
    def is_low(self) -> bool:
        return self.taken.total >= WARN_AT * self.budget.hours

    def line(self) -> str:
        """Say how much is used, held and left; as a warning where little is."""
        return f"warning: {self.figures()}" if self.is_low else self.figures()

    def figures(self) -> str:
        """Say how much is used, held and left."""
        budget, taken = self.budget, self.taken
        parts = [f"{taken.used:,.2f} of {budget.hours:,g} {budget.unit}-hours used ({taken.used / budget.hours:.0%})"]
        parts += [f"{taken.held:,.2f} held by tasks in flight ({', '.join(self.holders)})"] if taken.held else []
        return f"budget: {', '.join(parts)}, {self.left:,.2f} left"

    def to_json(self) -> dict[str, float | str]:
        hours = {"hours": self.budget.hours, "used": self.taken.used, "held": self.taken.held, "left": self.left}
        return {"unit": f"{self.budget.unit}-hours", **hours}


class Spending:
    """Counts the hours of the runs in a folder; re-reads a run only when its ledger has grown."""

    def __init__(self, runs: Path, budget: Budget | None) -> None:
        """Count the runs in this folder; without a budget count nothing."""
        self._runs, self._budget = runs, budget
        self._known: dict[str, tuple[int, Hours]] = {}  # run → bytes of its ledger, and its hours
        self._live: dict[str, StatusReader] = {}

    def account(self) -> Account | None:
        """Return the budget and its use so far; None without a budget."""
        if (budget := self._budget) is None:
            return None
        taken = {folder.name: self._of(folder, budget.unit) for folder in runs_in(self._runs)}
        total = sum(taken.values(), _pruned(self._runs, budget.unit, set(taken)))
        return Account(budget, total, tuple(name for name, hours in taken.items() if hours.held))

    def _of(self, folder: RunFolder, unit: str) -> Hours:
        size, known = _ledger_bytes(folder), self._known.get(folder.name)
        if known is None or known[0] != size:
            reader = self._live.pop(folder.name, None) or StatusReader(folder)
            if (status := reader.read()).state not in ENDED:
                self._live[folder.name] = reader
            known = self._known[folder.name] = (size, hours_of(status, unit))
        return known[1]


def spending_of_run(folder: RunFolder) -> Spending:
    """Return a counter for the budget under which a run began."""
    setting = None
    with suppress(OSError, ValueError, KeyError):
        setting = json.loads(folder.config.read_text())["cluster"].get("budget")
    return Spending(folder.path.parent, Budget.of(setting))


def hours_of(status: RunStatus, unit: str) -> Hours:
    """Return the hours of a run's cores or GPUs."""
    return sum((_of_stage(stage, status, unit) for stage in status.stages.values()), Hours())


def _of_stage(stage: StageStatus, status: RunStatus, unit: str) -> Hours:
    """Return the hours of a stage. An ended run has no unfinished tasks: they were cancelled."""
    used_s = held_s = 0.0
    for task in stage.work.values():
        used_s += sum(_units(stage.jobs.get(end.job) or stage.planned, unit) * _took_s(task, end) for end in task.ended)
        job = stage.jobs.get(task.job or "")
        if job is None:
            continue
        if status.state not in ENDED:
            held_s += _most_s(job, unit)
        elif began := task.word.began:
            used_s += min(_units(job, unit) * max(0.0, status.ended_at - began), _most_s(job, unit))
    if status.state not in ENDED:
        held_s += sum(len(parse_ranges(job.tasks)) * _most_s(job, unit) for job in stage.intents.values())
    return Hours(used_s / 3600, held_s / 3600)


def _took_s(task: TaskRecord, attempt: Attempt) -> float:
    """Return how long an attempt ran, by the executor, else from its worker's first event to its end."""
    began = task.words[attempt.number].began if attempt.number in task.words else 0.0
    unknown_s = max(0.0, attempt.ended_at - began) if began and not attempt.elapsed_s else 0.0
    return attempt.elapsed_s + attempt.earlier_s + unknown_s


def _units(job: StageJob | None, unit: str) -> float:
    """Return how many cores or GPUs a task of a job has."""
    return (job or NO_JOB).cores if unit == "core" else (job or NO_JOB).cards


def _most_s(job: StageJob, unit: str) -> float:
    """Return the most seconds that a task can run by its limit, which Slurm rounds up to minutes."""
    return _units(job, unit) * (-(-job.ask.time_s // 60) * 60 + ENDS_WITHIN_S)


def _ledger_bytes(folder: RunFolder) -> int:
    """Return the size of a run's ledger; -1 where there is none."""
    try:
        return sum(entry.stat().st_size for entry in os.scandir(folder.events))
    except OSError:
        return -1


def note_pruned(runs: Path, folder: RunFolder) -> None:
    """Record the hours of a run before it is removed."""
    status = StatusReader(folder).read()
    used = {unit: hours_of(status, unit).used for unit in ("core", "gpu")}
    if not any(used.values()):
        return
    line, path = {"run": folder.name, **used}, runs / PRUNED
    with writing_run(path), path.open("ab") as file:
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _pruned(runs: Path, unit: str, there: set[str]) -> Hours:
    """Return the hours of removed runs."""
    used: dict[str, float] = {}
    with suppress(OSError):
        for line in (runs / PRUNED).read_text().splitlines():
            with suppress(ValueError, KeyError, TypeError):  # truncated by a full disk
                noted = json.loads(line)
                used[str(noted["run"])] = float(noted[unit])
    return Hours(sum(hours for name, hours in used.items() if name not in there))
