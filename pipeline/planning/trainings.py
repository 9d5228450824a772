"""What a run trains: one training, or one for each point of a sweep; each with its plan, or why it has none.

A point's training is that which a plain run with its settings has: what was trained before counts, and what a sweep
has trained counts for others. Points that fit no machine are reported, and the others are trained.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.codec import read_plain, recall, remember, write_plain
from pipeline.errors import ConfigError, PlanInfeasible
from pipeline.journal.run_folder import writing_run
from pipeline.planning.prepare import has_input, is_planned, known_plan, plan_asked, prepare
from pipeline.planning.sweep_points import SWEEP, at, points_of
from pipeline.project.project import Project, once
from pipeline.project.user_code import plans_folder
from pipeline.stage_names import StageName
from pipeline.training.prepared import Prepared

if TYPE_CHECKING:
    from pipeline.journal.run_folder import RunFolder

REFUSAL = "refused plan"  # the name of what is remembered
REFUSED_FOR_S = 3600.0  # after which memory that is free now, or another node, may let it pass


@dataclass(frozen=True, slots=True)
class Training:
    """A training with its plan, or why there is none."""

    name: str  # of its point; empty: the only one of its run
    prepared: Prepared | None
    why: str = ""  # there is no plan, and what helps


@dataclass(frozen=True, slots=True)
class _Refusal:
    why: str
    at: float  # seconds since 1970


def view_of(project: Project, name: str) -> Project:
    """Return the project of a training of that name."""
    point = next((point for point in points_of(project) if point.name == name), None)
    return project if point is None else at(project, point)


def training_names(project: Project) -> list[str]:
    """Return the names of the trainings of a configuration."""
    return [point.name for point in points_of(project)] or [""]


def plan_trainings(project: Project) -> tuple[Training, ...] | None:
    """Plan every training; None while what is trained on is not there. Raise where none has a plan."""
    if not all(has_input(view_of(project, name)) for name in training_names(project)):
        return None
    return _planned(project)


@once
def _planned(project: Project) -> tuple[Training, ...]:
    if not points_of(project):
        return (Training("", prepare(project)),)
    trainings = tuple(_plan_point(view_of(project, name), name) for name in training_names(project))
    known: dict[str, str] = {}
    for training in trainings:
        model = training.prepared.name if training.prepared else training.name
        if known.setdefault(model, training.name) != training.name:  # what differs between them decides nothing
            what = f"{known[model]} and {training.name} are the same training, {model}"
            raise ConfigError(what, where=SWEEP, remedy="remove one of the two")
    if not any(training.prepared for training in trainings):
        what = f"none of {len(trainings)} points fits, such as {trainings[0].name}: {trainings[0].why}"
        raise PlanInfeasible(what, where=SWEEP)
    return trainings


def _plan_point(project: Project, name: str) -> Training:
    """Plan a point; that it fits no machine is remembered for a while, as it takes long to find."""
    if refusal := _refused(project):
        return Training(name, None, refusal.why)
    try:
        return Training(name, prepare(project))
    except PlanInfeasible as error:
        refusal = _Refusal(str(error), time.time())
        remember(plans_folder(project.config), REFUSAL, plan_asked(project), refusal)
        return Training(name, None, refusal.why)


def _refused(project: Project) -> _Refusal | None:
    """Return why there was no plan a while ago, where it is known."""
    refusal = recall(plans_folder(project.config), REFUSAL, plan_asked(project), _Refusal)
    return refusal if refusal and time.time() - refusal.at < REFUSED_FOR_S else None


def known_plans(project: Project) -> list[Prepared]:
    """Return the plans that were made, none while they are not."""
    if (trainings := _planned.known(project)) is not None:
        return [training.prepared for training in trainings if training.prepared]
    return [plan for name in training_names(project) if (plan := known_plan(view_of(project, name))) is not None]


def unplanned(project: Project) -> list[str]:
    """Return the trainings that can be planned, and are not yet."""
    views = {name: view_of(project, name) for name in training_names(project)}
    return [name for name, view in views.items() if not is_planned(view) and not _refused(view)]


def write_trainings(folder: RunFolder, trainings: tuple[Training, ...]) -> None:
    """Write down what a run trains."""
    with writing_run(folder.path):
        write_plain(folder.plan(StageName.TRAIN), trainings)


def read_trainings(folder: RunFolder) -> tuple[Training, ...]:
    """Return what a run trains."""
    return read_plain(folder.plan(StageName.TRAIN), tuple[Training, ...])
