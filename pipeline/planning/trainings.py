"""The trainings of a run: one, or one for each point of a sweep; each has a plan or a reason why not.

Points that fit no machine are reported, and the others are trained. A search adds a training for each of its trials.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipeline.codec import read_plain, recall, remember, write_plain
from pipeline.command_line import Command
from pipeline.dataset.reader_items import is_reader
from pipeline.errors import CacheUnusable, ConfigError, PlanInfeasible
from pipeline.journal.run_folder import writing_run
from pipeline.memory.planning.memory_plan import part_of_card
from pipeline.planning.points import SWEEP, Point, points_in
from pipeline.planning.prepare import code_of, has_input, known_plan, plan_asked, prepare, validation_items
from pipeline.planning.search import first_trials, name_of_trial, point_of_trial
from pipeline.project.project import Project, once
from pipeline.project.user_code import plans_folder
from pipeline.stage_names import StageName
from pipeline.training.prepared import Prepared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.journal.run_folder import RunFolder

PER_GPU = "train.sweep.per_gpu"
MOST_SHARING = 8  # with `auto`; more points would mostly wait for each other
REFUSAL = "refused plan"  # the name of what is remembered
REFUSED_FOR_S = 3600.0  # a refusal is remembered for this long: free memory and nodes change


@dataclass(frozen=True, slots=True)
class Training:
    """A training with its plan, or the reason why it has none."""

    name: str  # of its point; empty: the only one of its run
    prepared: Prepared | None
    why: str = ""  # why there is no plan, and what helps
    settings: Mapping[str, Any] = field(default_factory=dict)  # of a trial
    sharing: int = 1  # trainings that share a GPU, each with its part of the memory


@dataclass(frozen=True, slots=True)
class _Refusal:
    why: str
    at: float  # seconds since 1970


@once
def views_of(project: Project) -> dict[str, Project]:
    """Return the project of each training by name: of each point of a sweep, or of a search's first trials."""
    if project.config.train.sweep.is_search:
        return _first_views(project)
    return {point.name: at(project, point) for point in points_in(project.config)} or {"": project}


def _first_views(project: Project) -> dict[str, Project]:
    """Return the projects of a search's first trials with valid settings; raise if there are none."""
    views, refusals = dict[str, Project](), list[ConfigError]()
    for settings in first_trials(project.config):
        try:
            view = at(project, point_of_trial(project.config, settings))
            code_of(view)  # loads the task
            views[name_of_trial(settings)] = view
        except ConfigError as error:
            refusals.append(error)
    if not views:
        raise refusals[0]
    return views


def view_of(project: Project, training: Training) -> Project:
    """Return the project of a training of a run."""
    if training.settings:
        return at(project, point_of_trial(project.config, training.settings))
    return views_of(project)[training.name] if training.name else project


def at(project: Project, point: Point) -> Project:
    """Return the project of one point; it shares everything that does not depend on section `train`."""
    if not is_reader(project.config):
        _ = project.encoding  # read once, for all points
    other = replace(project, config=point.config, made_once={})
    vars(other).update({name: vars(project)[name] for name in ("graphs", "encoding") if name in vars(project)})
    return other


def plan_trainings(project: Project) -> tuple[Training, ...] | None:
    """Plan every training; None while their input is missing. Raise if none has a plan."""
    return _planned(project) if all(map(has_input, views_of(project).values())) else None


@once
def _planned(project: Project) -> tuple[Training, ...]:
    if not project.config.train.sweep.is_used:
        return (Training("", prepare(project)),)
    if project.config.train.sweep.is_search:
        trials = list[Training]()
        for settings in first_trials(project.config):
            trials.append(plan_trial(project, settings, trials))
        return tuple(trials)
    trainings = tuple(_plan_point(view, name) for name, view in views_of(project).items())
    known: dict[str, str] = {}
    for training in trainings:
        model = training.prepared.name if training.prepared else training.name
        if known.setdefault(model, training.name) != training.name:  # their differences have no effect
            what = f"{known[model]} and {training.name} are the same training, {model}"
            raise ConfigError(what, where=SWEEP, remedy="remove one of the two")
    if (share := project.config.train.sweep.share) > 1 and (without := [one for one in trainings if not one.prepared]):
        what = f"{share} trainings do not share a GPU here, as {without[0].name} does not fit: {without[0].why}"
        raise PlanInfeasible(what, where=PER_GPU, remedy=Command.submit("train").with_settings((PER_GPU, "auto")))
    if not any(training.prepared for training in trainings):
        what = f"none of {len(trainings)} points fits, such as {trainings[0].name}: {trainings[0].why}"
        raise PlanInfeasible(what, where=SWEEP)
    return trainings


def _plan_point(project: Project, name: str) -> Training:
    """Plan a point; remember for a while that it fits no machine, because finding out is slow."""
    if refusal := _known_refusal(project):
        return Training(name, None, refusal.why)
    try:
        return Training(name, prepare(project))
    except PlanInfeasible as error:
        refusal = _Refusal(str(error), time.time())
        remember(plans_folder(project.config), REFUSAL, plan_asked(project), refusal)
        return Training(name, None, refusal.why)


def plan_trial(project: Project, settings: Mapping[str, Any], others: Sequence[Training]) -> Training:
    """Plan a trial of a search; refuse conflicting settings and repeated trainings."""
    name = name_of_trial(settings)
    try:
        view = views_of(project).get(name) or at(project, point_of_trial(project.config, settings))
        training = replace(_plan_point(view, name), settings=settings)
    except CacheUnusable:
        raise
    except ConfigError as error:
        return Training(name, None, error.what, settings)
    _refuse_unvalidated(view, training)
    model = training.prepared and training.prepared.name
    same = next((other for other in others if model and other.prepared and other.prepared.name == model), None)
    return replace(training, prepared=None, why=f"the same training as {same.name}") if same else training


def _refuse_unvalidated(view: Project, training: Training) -> None:
    """Raise for a trial without a validation to judge it."""
    if training.prepared and validation_items(view, training.prepared) is None:
        what = f"a search needs validations, but no item is in split {view.config.train.validation.split!r}"
        remedy = Command.of("data split --out splits.csv", then="   (and set data.splits to that file)")
        raise ConfigError(what, where="train.validation.split", remedy=remedy)


def _known_refusal(project: Project) -> _Refusal | None:
    """Return the remembered reason why there is no plan."""
    refusal = recall(plans_folder(project.config), REFUSAL, plan_asked(project), _Refusal)
    return refusal if refusal and time.time() - refusal.at < REFUSED_FOR_S else None


def known_plans(project: Project) -> list[Prepared]:
    """Return the plans that were made before."""
    return [plan for view in views_of(project).values() if (plan := known_plan(view)) is not None]


def unplanned(project: Project) -> list[str]:
    """Return the trainings that can be planned, and are not yet."""
    return [
        name
        for name, view in views_of(project).items()
        if has_input(view) and not (known_plan(view) or _known_refusal(view))
    ]


def sharing_of(project: Project) -> int:
    """Return how many points share a GPU: as configured, or as many as fit by the largest plan."""
    sweep, resources, plans = project.config.train.sweep, project.config.cluster.train, known_plans(project)
    if not (sweep.points and plans):
        return 1
    if sweep.per_gpu != "auto":
        return sweep.per_gpu
    if resources.world != 1 or not resources.gpus:
        return 1
    fitting = ((plan.held_bytes + plan.process_bytes) // plan.taken_bytes for plan in plans)
    return max(1, min(MOST_SHARING, len(plans), *fitting))


def in_parts(project: Project, trainings: Sequence[Training]) -> list[Training]:
    """Return the trainings, each with the limits of its part of a GPU."""
    sharing = sharing_of(project)
    parts = sharing // project.config.train.sweep.share
    return [_in_part(training, sharing, parts) for training in trainings]


def _in_part(training: Training, sharing: int, parts: int) -> Training:
    prepared = training.prepared
    if prepared and parts > 1:
        held_bytes = part_of_card(prepared.held_bytes, prepared.process_bytes, parts)
        prepared = replace(prepared, limit_bytes=held_bytes - prepared.workspace_bytes)
    return replace(training, prepared=prepared, sharing=sharing)


def write_trainings(folder: RunFolder, trainings: Sequence[Training]) -> None:
    """Write the trainings of a run."""
    with writing_run(folder.path):
        write_plain(folder.plan(StageName.TRAIN), trainings)


def read_trainings(folder: RunFolder) -> tuple[Training, ...]:
    """Read the trainings of a run."""
    return read_plain(folder.plan(StageName.TRAIN), tuple[Training, ...])
