"""The results of trainings: progress, best epoch and skipped items; of a sweep, of each point."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.codec import rebuilt
from pipeline.journal.ledger import LedgerReader
from pipeline.journal.run_status import State, StatusReader
from pipeline.planning.prepare import folder_of, items_in, steps_of
from pipeline.planning.rank_setup import log_line
from pipeline.planning.trainings import Training, read_trainings, view_of
from pipeline.records import EventKind, Reason
from pipeline.stage_names import StageName
from pipeline.stages.stage import Judged
from pipeline.training.checkpoints.checkpoint import CheckpointFolder, latest_checkpoint
from pipeline.training.loop.metrics_log import Pruned, read_epochs
from pipeline.training.state import TRAINING, TrainingState
from pipeline.units import first_few

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.training.prepared import ModelFolder, Prepared

COURSE = 8  # epochs whose metric shows the course of a training
LONGEST = 255  # in a file name


@dataclass(slots=True)
class Trained(Judged):
    """The result of a training."""

    folder: str = ""
    epochs: int = 0
    steps: int = 0
    last: dict[str, Any] = field(default_factory=dict)  # figures of the last epoch
    best: dict[str, Any] = field(default_factory=dict)  # of the best epoch
    course: list[float] = field(default_factory=list)  # the monitored figure, from the first epoch to the last
    monitor: str = ""
    ooms: int = 0
    skipped: int = 0
    damaged: int = 0  # items skipped in this or an earlier run because their records were damaged
    damaged_items: list[str] = field(default_factory=list)  # these
    cropped: int = 0
    remarks: list[str] = field(default_factory=list)  # on its validations and skipped items
    remedied: dict[str, int] = field(default_factory=dict)  # memory remedy → items it was used for, over all epochs

    def left_out(self, items: Iterable[str]) -> None:
        """Add items with damaged records, each once."""
        self.damaged_items = sorted({*self.damaged_items, *items})
        self.damaged = len(self.damaged_items)


@dataclass(slots=True)
class SweepResult(Trained):
    """The result of a sweep."""

    points: list[dict[str, Any]] = field(default_factory=list)  # of each: its outcome and best value


def progress_of(folder: ModelFolder) -> TrainingState:
    """Return the progress of a training by its newest checkpoint."""
    newest = latest_checkpoint(folder.checkpoints)
    return rebuilt(TrainingState, newest.data[TRAINING]) if newest else TrainingState()


def steps_left(project: Project, prepared: Prepared, progress: TrainingState) -> int:
    """Return how many steps a training still needs; at least one unless it is over."""
    is_over = progress.is_over(prepared.epochs, project.config.train.validation)
    return 0 if is_over else max(1, steps_of(project, prepared) - progress.done)


def prunes(project: Project) -> bool:
    """Tell whether a sweep prunes trainings that fall behind."""
    return project.config.train.sweep.prune != "none"


def trained_so_far(project: Project, prepared: Prepared) -> Trained:
    """Return the result of a training by its newest intact checkpoint, verified byte by byte."""
    made, settings = folder_of(project, prepared), project.config.train.validation
    newest = latest_checkpoint(made.checkpoints)
    identity = newest.sealed.identity if newest else {}
    checkpoint = CheckpointFolder(made.checkpoints, last=1, best=0, identity=identity, say=log_line).newest()
    judged = Trained(folder=str(made.path), monitor=settings.monitor)
    progress = rebuilt(TrainingState, checkpoint.data[TRAINING]) if checkpoint else TrainingState()
    judged.left_out(sorted(progress.damaged))
    if progress.killed:
        remedy = "move the model away to train again on all items"
        killed = first_few(sorted(progress.killed))
        judged.remarks.append(f"trained without {killed}, on which its process died   ({remedy})")
    judged.items = judged.steps = progress.done
    judged.epochs = progress.epoch
    if left := steps_left(project, prepared, progress):
        judged.undone = left
        judged.first_undone = f"step {progress.done + 1}"
    epochs = read_epochs(made.path) if made.path.exists() else []
    if epochs:
        figures = [epoch.to_json() for epoch in epochs]
        judged.course = course_of(figures, settings.monitor)
        judged.last, judged.best = figures[-1], best_of(figures, settings.monitor, lower=settings.lower_is_better)
        judged.remarks += unmonitored(figures, settings.monitor)
        judged.ooms, judged.cropped = sum(epoch.ooms for epoch in epochs), max(epoch.cropped for epoch in epochs)
        remedied = Counter[str]()
        for epoch in epochs:
            remedied.update(epoch.remedied)
        judged.remedied = dict(sorted(remedied.items()))
        judged.skipped = len(prepared.skipped)
        if left_out := sum(epoch.left_out_steps for epoch in epochs):
            made_steps = sum(epoch.steps for epoch in epochs)
            what = f"{left_out:,} of {left_out + made_steps:,} steps were not finite and were skipped"
            judged.remarks.append(f"{what} (train.nan: {project.config.train.nan})")
    judged.remarks += unvalidated(project, prepared)
    return judged


def course_of(epochs: list[dict[str, Any]], monitor: str) -> list[float]:
    """Return the monitored metric of the first epoch, the last and a few in between."""
    known = [value for epoch in epochs if (value := epoch["validation"].get(monitor)) is not None]
    places = sorted({round(place * (len(known) - 1) / (COURSE - 1)) for place in range(COURSE)}) if known else []
    return [known[place] for place in places]


def unmonitored(epochs: list[dict[str, Any]], monitor: str) -> list[str]:
    """Return a remark if validations lack the monitored metric."""
    known = dict.fromkeys(name for epoch in epochs for name in epoch["validation"])
    if not known or monitor in known:
        return []
    return [f"the validation has no metric {monitor!r} (train.validation.monitor); available: {', '.join(known)}"]


def best_of(epochs: list[dict[str, Any]], monitor: str, *, lower: bool) -> dict[str, Any]:
    """Return the metrics of the best epoch by `monitor`; empty if no epoch has it."""
    known = [epoch for epoch in epochs if epoch["validation"].get(monitor) is not None]
    choose: Callable[..., dict[str, Any]] = min if lower else max
    return choose(known, key=lambda epoch: epoch["validation"][monitor]) if known else {}


def unvalidated(project: Project, prepared: Prepared) -> list[str]:
    """Return a remark if the data set has splits and the validation split is empty."""
    wanted = project.config.train.validation.split
    if wanted is None or wanted in (table := items_in(project, prepared.table, wanted)).splits or not any(table.splits):
        return []
    return [f"no validation: no item is in split {wanted!r} (train.validation.split); {table.named_splits()}"]


def damaged_items(folder: RunFolder) -> list[str]:
    """Return the items that a training skipped because their records were damaged."""
    refused = (event.data for event in LedgerReader(folder, whole=False).fresh() if event.kind is EventKind.REFUSED)
    return sorted({data["key"] for data in refused if data["reason"] == Reason.DAMAGED.value})


def swept_so_far(project: Project, folder: RunFolder) -> SweepResult:
    """Return the result of every point of a sweep; its models get links in the run's folder."""
    judged = SweepResult(folder=str(project.config.train.models), monitor=project.config.train.validation.monitor)
    status = StatusReader(folder).read().stages[StageName.TRAIN]
    failed = {trial.name: trial.why for trial in status.asked.values() if trial.state is State.FAILED}
    for training in read_trainings(folder):
        result, point = point_result(project, training, status.cancelled.get(training.name, ""))
        if result.undone and training.name in failed and status.best_trial:  # a failed trial does not fail its search
            result.undone = 0
            point |= {"state": State.FAILED, "why": failed[training.name]}
        judged.points.append(point)
        for count in ("items", "steps", "epochs", "ooms", "undone"):
            setattr(judged, count, getattr(judged, count) + getattr(result, count))
        judged.skipped = max(judged.skipped, result.skipped)
        judged.left_out(result.damaged_items)
        judged.remarks = list(dict.fromkeys((*judged.remarks, *result.remarks)))
        if result.undone and not judged.first_undone:
            judged.first_undone = f"{result.first_undone} of {training.name}"
    _link(folder, project.config.train.models, judged.points)
    return judged


def point_result(project: Project, training: Training, cancelled: str = "") -> tuple[Trained, dict[str, Any]]:
    """Return the result of one point and its row; `cancelled` says who cancelled it."""
    row: dict[str, Any] = {"name": training.name, "model": "", "state": State.INFEASIBLE, "why": training.why}
    if training.prepared is None:
        return Trained(), row
    trained = trained_so_far(view_of(project, training), training.prepared)
    made = folder_of(project, training.prepared)
    pruned = Pruned.read(made, trained.epochs) if prunes(project) and trained.undone else None
    why = pruned.why if pruned else cancelled if trained.undone else ""
    state = State.PRUNED if pruned else State.CANCELLED if why else State.UNDONE if trained.undone else State.DONE
    if why:
        trained.undone, trained.first_undone = 0, ""
    figure = trained.best["validation"].get(trained.monitor) if trained.best else None
    row |= {"model": made.path.name, "state": state, "why": why}
    row |= {"epochs": trained.epochs, "steps": trained.steps, "best": figure}
    row |= {"best_epoch": trained.best.get("epoch")}
    return trained, row


def _link(folder: RunFolder, models: Path, points: Sequence[Mapping[str, Any]]) -> None:
    """Link each point's model in the run's folder, under a name that says its settings."""
    with suppress(OSError):  # a file system without links: the census lists the models
        folder.points.mkdir(exist_ok=True)
        for point in (point for point in points if point["model"]):
            link = folder.points / point["name"].replace("/", "_")[:LONGEST]
            if not link.is_symlink():
                link.symlink_to(models / point["model"])
