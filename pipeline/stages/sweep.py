"""Stage train of a sweep: a whole training for each point, each a task, a plan and a model of its own.

A point's model is that which a plain training with its settings has: what was trained before counts, and what a sweep
has trained counts for others. Points that fit no machine are told, and the others are done.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.dataset.early_items import refuse_unknown_splits
from pipeline.dataset.worklist import Shard, StageSurvey, read_shard
from pipeline.errors import ConfigError, PlanInfeasible
from pipeline.files import write_whole
from pipeline.journal.run_folder import writing_run
from pipeline.journal.run_status import State, StatusReader
from pipeline.planning.prepare import folder_of, plan_file, prepare
from pipeline.planning.sweep_points import SWEEP, at, points_of
from pipeline.stages.train import (
    NOTHING,
    Trained,
    TrainStage,
    damaged_items,
    progress_of,
    steps_left,
    train_there,
    trained_so_far,
    unprepared,
)
from pipeline.training.loop.metrics_log import MedianStop, Pruned
from pipeline.training.prepared import Prepared

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.records import TaskContext
    from pipeline.stages.stage import Outcomes
    from pipeline.training.state import TrainingState

REFUSED_FOR_S = 3600.0  # after which memory that is free now, or another node, may let it pass
LONGEST = 255  # of a file's name


class Unmade(Exception):
    """What is trained on is not there yet."""


@dataclass(frozen=True)
class PointPlan:
    """A point with its plan, or why there is none."""

    name: str
    prepared: Prepared | None
    why: str = ""  # there is none, and what helps

    def to_json(self) -> dict[str, Any]:
        plan = self.prepared.to_json() if self.prepared else None
        return {"name": self.name, "prepared": plan, "why": self.why}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PointPlan:
        plan = data["prepared"]
        return cls(data["name"], Prepared.from_json(plan) if plan else None, data["why"])


@dataclass(slots=True)
class SweepResult(Trained):
    """The result of a sweep."""

    points: list[dict[str, Any]] = field(default_factory=list)  # of each: what became of it, and its best figure


class SweepStage(TrainStage):
    """A task, graphs and embeddings in, a trained model for each point out."""

    is_sweep = True
    may_be_empty = True  # whose points were cancelled before they had done a step

    def at(self, project: Project, name: str) -> Project:
        """Return the project of a point."""
        point = next((point for point in points_of(project) if point.name == name), None)
        return project if point is None else at(project, point)

    def inspect(self, project: Project) -> None:
        """Raise where a point cannot be trained, whatever its memory."""
        train = project.config.train
        if train.sweep.prune != "none" and train.validation.split is None:
            what = "pruning needs validations, but train.validation.split is null"
            raise ConfigError(what, where="train.sweep.prune", remedy="set a split, or omit --prune")
        refuse_unknown_splits(project)
        for point in points_of(project):
            super().inspect(at(project, point))

    def survey(self, project: Project, folder: RunFolder | None, at_once: int) -> StageSurvey:  # noqa: ARG002
        """Find how far each point is, and plan what is left."""
        points, plans = points_of(project), plans_of(project)
        if plans is None:
            return unprepared(project, folder, len(points))
        items = cached = 0
        shards = list[Shard]()
        for point, plan in zip(points, plans, strict=True):
            if plan.prepared is None:
                continue
            progress, left = _standing(at(project, point), plan.prepared, prunes=_prunes(project))
            items, cached = items + progress.done + left, cached + progress.done
            if left:
                shards.append(Shard(progress.done, progress.done + left, 1, of=point.name))
        if folder is not None:
            text = json.dumps({"points": [plan.to_json() for plan in plans]})
            with writing_run(folder.plan(self.name)):
                folder.plan(self.name).write_text(text)
        refused = sum(plan.prepared is None for plan in plans)
        counts = NOTHING | {"items": items, "cached": cached, "missing": items - cached, "refused": refused}
        return StageSurvey(counts, tuple(shards), cost=float(items - cached))

    def parallel(self, config: Config) -> int:
        return config.train.sweep.parallel

    def mem_bytes(self, project: Project) -> int:
        """Return the most memory that a node needs for any point."""
        if not (plans := plans_of(project)):
            return super().mem_bytes(project)
        return max(plan.prepared.mem_bytes for plan in plans if plan.prepared)

    def gpu_bytes(self, project: Project) -> int:
        """Return the memory that a GPU must have at least for every point: all go to the same cards."""
        if not (plans := plans_of(project)):
            return super().gpu_bytes(project)
        return max(phase.reserved_bytes for plan in plans if plan.prepared for phase in plan.prepared.phases)

    def work(self, project: Project, folder: RunFolder, task: int, tell: TaskContext) -> Outcomes:
        """Train a point, as one of the ranks."""
        plans = {plan.name: plan for plan in told_plans(folder)}
        shard = read_shard(folder, self.name, task)
        mine, own = self.at(project, shard.of), plans[shard.of].prepared
        assert own is not None
        prune = None
        if _prunes(project):
            rivals = (plan.prepared for plan in plans.values() if plan.prepared and plan.name != shard.of)
            others = [folder_of(mine, rival) for rival in rivals]
            settings = mine.config.train.validation
            made, grace = folder_of(mine, own), project.config.train.sweep.grace
            prune = MedianStop(made, others, settings.monitor, lower=settings.lower_is_better, grace=grace)
        yield from train_there(mine, folder, own, tell, shard.start, prune)

    def judge(self, project: Project, folder: RunFolder, patience_s: float) -> SweepResult:  # noqa: ARG002
        """Return the result of every point, by its newest intact checkpoint, every byte of which is read."""
        judged = SweepResult(folder=str(project.config.train.models), monitor=project.config.train.validation.monitor)
        cancelled = StatusReader(folder).read().stages[self.name].cancelled
        for plan in told_plans(folder):
            by_hand = cancelled.get(plan.name, "")
            result, told = _judged(self.at(project, plan.name), plan, by_hand, prunes=_prunes(project))
            judged.points.append(told)
            judged.items += result.items
            judged.steps += result.steps
            judged.epochs += result.epochs
            judged.ooms += result.ooms
            judged.undone += result.undone
            judged.skipped = max(judged.skipped, result.skipped)  # mostly the same ones
            judged.left_out(result.damaged_items)
            judged.remarks = list(dict.fromkeys((*judged.remarks, *result.remarks)))
            if result.undone and not judged.first_undone:
                judged.first_undone = f"{result.first_undone} of {plan.name}"
        judged.left_out(damaged_items(folder))
        _link(folder, project.config.train.models, judged.points)
        return judged

    def check(self, project: Project, folder: RunFolder, judged: Trained) -> list[str]:
        """Return warnings, those about points that were not trained first."""
        assert isinstance(judged, SweepResult)
        left = [point for point in judged.points if point["state"] in (State.CANCELLED, State.INFEASIBLE)]
        named = [f"{point['name']} was not trained: {point['why']}" for point in left]
        return [*named, *super().check(project, folder, judged)]


def told_plans(folder: RunFolder) -> Iterator[PointPlan]:
    """Yield the plans of the points that a run is to train."""
    return map(PointPlan.from_json, json.loads(folder.plan(SweepStage.name).read_text())["points"])


def plans_of(project: Project) -> list[PointPlan] | None:
    """Return the plan of each point; None while what is trained on is not there. Raise where no point has one."""
    try:
        return project.once("plans of the sweep", lambda: _planned(project))
    except Unmade:
        return None


def _planned(project: Project) -> list[PointPlan]:
    """Plan each point; raise Unmade while what is trained on is not there."""
    plans = [_plan_of(at(project, point), point.name) for point in points_of(project)]
    _refuse_same(plans)
    if plans and not any(plan.prepared for plan in plans):
        what = f"none of {len(plans)} points fits, such as {plans[0].name}: {plans[0].why}"
        raise PlanInfeasible(what, where=SWEEP)
    return plans


def _plan_of(project: Project, name: str) -> PointPlan:
    """Plan a point; that it fits no machine is remembered for a while, as it takes long to find."""
    if (path := plan_file(project)) is None:
        raise Unmade
    refusal = path.with_suffix(".refused.json")
    with suppress(OSError, ValueError, KeyError):
        if time.time() - refusal.stat().st_mtime < REFUSED_FOR_S:
            return PointPlan(name, None, json.loads(refusal.read_text())["why"])
    try:
        prepared = prepare(project)
    except PlanInfeasible as error:
        with suppress(OSError):
            refusal.parent.mkdir(parents=True, exist_ok=True)
            write_whole(refusal, json.dumps({"why": str(error)}))
        return PointPlan(name, None, str(error))
    return PointPlan(name, prepared)


def unplanned(project: Project) -> list[str]:
    """Return the points that are not planned yet, and can be."""
    files = ((point.name, plan_file(at(project, point))) for point in points_of(project))
    return [name for name, path in files if path and not (path.exists() or path.with_suffix(".refused.json").exists())]


def _refuse_same(plans: Sequence[PointPlan]) -> None:
    """Raise where two points are one training: what differs between them decides nothing."""
    known: dict[str, str] = {}
    for plan in plans:
        if plan.prepared is not None and known.setdefault(plan.prepared.name, plan.name) != plan.name:
            what = f"{known[plan.prepared.name]} and {plan.name} are the same training, {plan.prepared.name}"
            raise ConfigError(what, where=SWEEP, remedy="remove one of the two")


def _prunes(project: Project) -> bool:
    return project.config.train.sweep.prune != "none"


def _standing(project: Project, prepared: Prepared, *, prunes: bool) -> tuple[TrainingState, int]:
    """Return how far a point is, and how many steps are left: none where it is over, or was pruned."""
    made = folder_of(project, prepared)
    progress = progress_of(made)
    is_pruned = prunes and Pruned.read(made, progress.epoch) is not None
    return progress, 0 if is_pruned else steps_left(project, prepared, progress)


def _judged(project: Project, plan: PointPlan, cancelled: str, *, prunes: bool) -> tuple[Trained, dict[str, Any]]:
    """Return the result of one point, which may have been `cancelled` by hand, and what is told of it."""
    told: dict[str, Any] = {"name": plan.name, "model": "", "state": State.INFEASIBLE, "why": plan.why}
    if plan.prepared is None:
        return Trained(), told
    trained = trained_so_far(project, plan.prepared)
    made = folder_of(project, plan.prepared)
    pruned = Pruned.read(made, trained.epochs) if prunes and trained.undone else None
    why = pruned.why if pruned else cancelled if trained.undone else ""
    state = State.PRUNED if pruned else State.CANCELLED if why else State.UNDONE if trained.undone else State.DONE
    if why:
        trained.undone, trained.first_undone = 0, ""
    figure = trained.best["validation"].get(trained.monitor) if trained.best else None
    told |= {"model": made.path.name, "state": state, "why": why}
    told |= {"epochs": trained.epochs, "steps": trained.steps, "best": figure}
    told |= {"best_epoch": trained.best.get("epoch")}
    return trained, told


def _link(folder: RunFolder, models: Path, points: Sequence[Mapping[str, Any]]) -> None:
    """Lay a link to each point's model into the run's folder, under a name that says what differs."""
    with suppress(OSError):  # a file system without links: the census names them, too
        folder.points.mkdir(exist_ok=True)
        for point in (point for point in points if point["model"]):
            link = folder.points / point["name"].replace("/", "_")[:LONGEST]
            if not link.is_symlink():
                link.symlink_to(models / point["model"])
