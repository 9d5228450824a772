"""Advances a search: records how its trials ended, and asks optuna for the next ones.

The plan and the share of a trial are written first, then its settings go into the ledger, then its task is submitted.
After a kill in between, the next visit asks for the same trial and writes its files again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.cluster.job_spec import format_ranges
from pipeline.codec import plain
from pipeline.dataset.worklist import StageSurvey, read_shards
from pipeline.errors import PlanInfeasible
from pipeline.journal.run_status import State, Trial
from pipeline.planning.search import SPACE, is_due, next_settings
from pipeline.planning.trainings import plan_trial, read_trainings, view_of, write_trainings
from pipeline.records import EventKind
from pipeline.stages.jobs import first_job, on_cards
from pipeline.stages.train import share_of
from pipeline.stages.trained import point_result
from pipeline.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from pipeline.cluster.job_spec import Executor, JobId
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import StageStatus
    from pipeline.project.project import Project
    from pipeline.stages.stage import Stage

LOOK_AGAIN_S = 0.5


class Search:
    """The search of a stage; the ledger holds all of its state."""

    def __init__(self, folder: RunFolder, executor: Executor, emit: Callable[..., None]) -> None:
        self._folder, self._executor, self._emit = folder, executor, emit

    def advance(self, project: Project, stage: Stage, status: StageStatus) -> bool:
        """Record the trials that have ended and add the due ones; return whether there are new tasks."""
        before = len(status.work)
        while True:
            for trial in [trial for trial in status.asked.values() if trial.state is State.RUNNING]:
                if (ended := self._ended(project, status, trial)) is not None:
                    self._emit(EventKind.TRIAL_ENDED, stage=stage.name, **plain(ended))
            asked = [status.asked[number] for number in sorted(status.asked)]
            settings = next_settings(project.config, asked) if is_due(project.config.train.sweep, asked) else None
            if settings is None:
                if all(trial.state is State.INFEASIBLE for trial in asked):
                    what = f"none of {len(asked)} trials can be trained, such as {asked[0].name}: {asked[0].why}"
                    raise PlanInfeasible(what, where=SPACE)
                return len(status.work) > before
            self._ask(project, stage, status, settings)

    def _ask(self, project: Project, stage: Stage, status: StageStatus, settings: dict[str, Any]) -> None:
        """Plan a trial, and record it."""
        number, task = len(status.asked), len(status.work)
        others = read_trainings(self._folder)[:number]
        training = plan_trial(project, settings, others)
        write_trainings(self._folder, [*others, training])
        trial, counts, job = Trial(number, training.name, settings), {"refused": 1}, {}
        if training.prepared is not None:
            share = share_of(project, training)
            counts = {"items": share.end, "cached": share.start, "missing": share.items}
            if share.items:
                shards = (*read_shards(self._folder, stage.name)[:task], replace(share, items=1))
                StageSurvey({}, shards).write_shards(self._folder, stage.name)
                trial, view = replace(trial, task=task), view_of(project, training)
                first = replace(first_job(view, stage, self._executor, self._folder), tasks=format_ranges([task]))
                counts["tasks"], job = 1, on_cards(view, stage, self._executor, self._folder, first).to_json()
        self._emit(EventKind.TRIAL_ASKED, stage=stage.name, **plain(trial), counts=counts, job=job)

    def _ended(self, project: Project, status: StageStatus, trial: Trial) -> Trial | None:
        """Return the outcome of a trial; None if it still runs."""
        task = None if trial.task is None else status.task(trial.task)
        if task is not None and (task.job or (task.open and not task.given_up)):
            return None
        training = read_trainings(self._folder)[trial.number]
        cancelled = task.cancelled if task else ""
        row: dict[str, Any] = {}

        def is_whole() -> bool:
            row.update(point_result(project, training, cancelled)[1])
            return row["state"] is not State.UNDONE

        is_late = task is not None and task.good  # files of other nodes may appear late
        wait_for(is_whole, project.config.cache.visibility_s if is_late else 0.0, LOOK_AGAIN_S)
        ended = replace(trial, state=row["state"], epochs=row.get("epochs", 0), why=row["why"])
        if ended.state is State.UNDONE:
            return replace(ended, state=State.FAILED, why=task.last.reason if task and task.last else "")
        if ended.state in (State.DONE, State.PRUNED):
            ended = replace(ended, value=row["best"])
        if ended.state is State.DONE and ended.value is None:
            return replace(ended, state=State.FAILED, why=f"no validation {status.search['monitor']}")
        return ended


def awaited(status: StageStatus) -> list[JobId]:
    """Return the jobs to wait for: all of a stage; of a search, the one that its next trial waits for."""
    running = [trial.task for trial in status.asked.values() if trial.state is State.RUNNING and trial.task is not None]
    if not running or len(status.asked) >= status.search["trials"]:
        return status.live
    job = status.task(min(running)).job
    return [job] if job else status.live
