"""Submission: reads and checks what to run, plans it, and starts the run.

`pipeline submit`, `pipeline cache regenerate`, `pipeline resume` and `pipeline.api` call these functions; they print
nothing themselves.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pipeline.codec import plain
from pipeline.command_line import Command
from pipeline.config.load import find_config, from_resolved, read_config, with_settings
from pipeline.dataset.loading import made_table
from pipeline.dataset.reader_items import unmade
from pipeline.engine.handover import start_supervisor, supervisor_job
from pipeline.engine.lifecycle import joins_double, new_run, refuse_double, scripts
from pipeline.engine.supervisor import Supervisor
from pipeline.errors import ClusterSilent, ConfigError, JobFailed, SubmissionRefused
from pipeline.journal.budget import Budget, Spending
from pipeline.journal.run_status import GOING_ON, State
from pipeline.journal.run_view import ViewReader
from pipeline.planning.points import typed_points
from pipeline.planning.prepare import accept_code as accept_trained_code
from pipeline.planning.prepare import prepare
from pipeline.planning.trained_model import place_of
from pipeline.planning.trainings import plan_trainings, unplanned
from pipeline.project.container_image import is_contained, refuse_unfit_image, with_digest
from pipeline.project.project import Project, open_executor, stays
from pipeline.project.restriction import only_of, read_list
from pipeline.stage_names import StageName
from pipeline.stages import table
from pipeline.stages.jobs import first_job, job_of, plan_stage, script_outline, side_by_side
from pipeline.stages.train import novelty
from pipeline.store.maintenance.leftovers import refuse_unusable
from pipeline.training.checkpoints.checkpoint import weights_file
from pipeline.units import format_bytes
from pipeline.upkeep.retention import register_use, tags_read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pipeline.cluster.job_spec import Executor, Job
    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import RunStatus
    from pipeline.stages.jobs import StagePlan
    from pipeline.stages.stage import Stage

    Note = Callable[[str], None]  # takes a line that needs the user's attention
    Planning = Callable[[str, str], None]  # takes the stage that is being planned, and a text about it

NEARLY = 0.9  # of the planned memory, which is cautious: a request above this gets no note
WATCH_EVERY_S = 0.5
INLINE_S = 5.0  # longer work is left to the first supervisor job


@dataclass(frozen=True)
class Wanted:
    """What to submit, as the options of `pipeline submit` name it."""

    stage: str = table.ALL
    executor: str | None = None
    only: bool = False
    damage_list: Path | None = None
    model: str | None = None
    sweep: Sequence[str] | None = None
    sweep_file: Path | None = None
    prune: str | None = None
    dry: bool = False  # submit nothing


@dataclass(frozen=True)
class Submission:
    """A project and the stages to run in it; empty if there is nothing to do."""

    project: Project
    stages: list[str]
    typed: Command  # the command that does the missing work
    file: Path | None = None  # the configuration
    dry: bool = False
    only: bool = False
    note: str = ""  # why no training follows

    @property
    def executor(self) -> Executor:
        assert self.project.executor is not None, "it was not checked yet"
        return self.project.executor

    def plans(self) -> list[StagePlan]:
        """Return what each stage would do."""
        config = self.project.config
        return [plan_stage(self.project, table.stage(name, config), self.executor, None) for name in self.stages]

    def to_json(self) -> dict[str, Any]:
        """Return what each stage would do, a note, and the scripts that would be submitted."""
        plans = self.plans() if self.stages else []
        on_slurm = plans and self.project.config.cluster.executor == "slurm"
        texts = dict(scripts(self.project, plans, self.executor)) if on_slurm else {}
        stages = [_stage_json(self.project, plan, self.executor) for plan in plans]
        return {"stages": stages, "scripts": texts, "note": self.note}


def read_submission(file: Path | None, sets: Sequence[str], wanted: Wanted) -> Submission:
    """Read the configuration, and find out which stages are to run; refuse options that contradict each other."""
    stage, model = wanted.stage, wanted.model
    if wanted.damage_list is not None and stage != StageName.REGENERATE:
        refuse(f"cannot be combined with stage {stage}", "--list", "regenerate", "--list FILE")
    if wanted.only and stage in (table.ALL, StageName.REGENERATE):
        refuse(f"takes a single stage, not {stage}", "--only", "train", "--only")
    sets = [*sets, *([f"cluster.executor={wanted.executor}"] if wanted.executor else ())]
    swept, points = _swept(wanted)
    loaded = read_config(find_config(file), [*sets, *points])
    config = loaded.config
    if wanted.prune and not config.train.sweep.is_used:
        refuse("requires --sweep", "--prune", "train", "--sweep train.seed=0:5")
    if model is not None:
        chosen = _settings_of_model(stage, model, config)
        sets += [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in chosen.items()]
        config = from_resolved(json.dumps(with_settings(config.model_dump(mode="json"), chosen)))
    project = Project.open(config, remember=not wanted.dry, beside=loaded.base_dir.absolute(), strict=True)
    project, stages = _stages_of(project, wanted)
    listed = ("--list", wanted.damage_list) if wanted.damage_list else ()
    alone = ["--only"] if wanted.only and config.train.command is not None else []  # a script may want no other stage
    typed = Command.of(" ".join(Command.submit(stage).words), *listed, *swept, *alone)
    typed, note = typed.in_project(Command.about(file, sets)), table.untrained(stage, config)
    return Submission(project, stages, typed, loaded.path, wanted.dry, wanted.only, note)


def rest_of(folder: RunFolder, config: Config) -> Submission:
    """Return a submission of the unfinished stages of an ended run, with its frozen configuration and user code."""
    project = Project.open(config, beside=folder.task_root, strict=True, only=only_of(folder))
    return Submission(project, json.loads(folder.stages.read_text()), folder.command())


def refuse(problem: str, option: str, stage: str, more: str = "") -> NoReturn:
    """Raise for an option that conflicts with the others."""
    raise ConfigError(problem, where=option, remedy=Command.of(f"submit {stage} {more}"))


def _swept(wanted: Wanted) -> tuple[list[str], list[str]]:
    """Return the options of a sweep, and the settings that they stand for."""
    words = [word for values in wanted.sweep or () for word in ("--sweep", values)]
    words += ["--sweep-file", str(wanted.sweep_file)] if wanted.sweep_file else []
    sets = [f"train.sweep.points={typed_points(wanted.sweep or (), wanted.sweep_file)}"] if words else []
    if wanted.prune:
        words += ["--prune", wanted.prune]
        sets.append(f"train.sweep.prune={wanted.prune}")
    if words and wanted.stage != StageName.TRAIN:
        refuse(f"cannot be combined with stage {wanted.stage}", words[0], "train", " ".join(words[:2]))
    return words, sets


def _settings_of_model(stage: str, model: str, config: Config) -> dict[str, Any]:
    """Return the settings that `--model` stands for: the checkpoint; for predictions also that labels are optional."""
    if stage not in (StageName.EVALUATE, StageName.PREDICT):
        refuse(f"cannot be combined with stage {stage}", "--model", "predict", f"--model {model}")
    is_unlabelled = stage == StageName.PREDICT and config.data.labels
    place = place_of(config.train.models, model) or weights_file(model)
    if place is not None and place != config.train.models / model:
        model = str(place)  # `resume` may run in another folder
    return {f"train.{stage}.checkpoint": model, **({"data.unlabelled": True} if is_unlabelled else {})}


def _stages_of(project: Project, wanted: Wanted) -> tuple[Project, list[str]]:
    """Return the stages to run, and the project, confined to what a damage list names where there is one."""
    if wanted.stage != StageName.REGENERATE:
        stages = table.up_to(wanted.stage, project.config)
        if project.config.train.sweep.is_used and StageName.TRAIN in stages[:-1]:
            refuse(f"a sweep trains many models; stage {stages[-1]} needs one", "train.sweep", "train")
        return project, stages[-1:] if wanted.only else stages
    refuse_unusable(project.cache)
    if wanted.damage_list is None:
        return project, table.regenerated(project.config, None)
    confined = read_list(wanted.damage_list, project.cache)
    stages = table.regenerated(project.config, confined.kinds) if confined.kinds else []
    return replace(project, only=confined), stages


def accept_code(project: Project) -> str:
    """Let the training that differs only in its code continue with the present code; return its name."""
    if project.config.train.sweep.is_used:
        more = "--set KEY=VALUE --accept-code"
        refuse("accepts code for one training, not for a sweep", "--accept-code", "train", more)
    prepared = prepare(project)
    if prepared is None:
        remedy = Command.of("submit train")
        raise ConfigError("nothing was trained on this data set yet", where="--accept-code", remedy=remedy)
    return accept_trained_code(prepared, project.config.train.models)


@contextmanager
def checked(submission: Submission, planning: Planning, note: Note) -> Iterator[Submission]:
    """Check a submission, with its executor open in the block; a refusal repeats what was typed.

    This refuses unusable sources, caches, checkpoints and requests before they fail in a job.
    """
    config = submission.project.config
    with open_executor(config) as executor:
        try:
            planning(submission.stages[0], "")
            project = replace(submission.project, executor=executor, config=with_digest(config))
            for problem in refuse_unfit_image(project.config) if is_contained(project.config) else ():
                note(f"cluster.slurm.container: {problem}")
            submission = replace(submission, project=project)
            _check(submission, planning, note)
            yield submission
        except SubmissionRefused as error:
            raise table.with_typed_command(error, submission.typed) from None


def _check(submission: Submission, planning: Planning, note: Note) -> None:
    """Check each stage; a cluster that does not answer is noted once where nothing is submitted."""
    project, executor = submission.project, submission.executor
    silent = list[str]()

    def check(job: Job) -> None:
        try:
            if not silent:
                executor.check(job)
        except ClusterSilent as error:
            if not submission.dry:
                raise
            silent.append(error.what)
            note(f"the cluster could not check these jobs: {error.what}")

    cluster = project.config.cluster
    account = Spending(cluster.runs, Budget.of(cluster.budget)).account()
    if account and account.is_low:
        note(account.line())
    for stage in (table.stage(name, project.config) for name in submission.stages):
        stage.inspect(project)
        if not stage.has_tasks:
            continue
        _plan(stage, project, planning, note)
        first = first_job(project, stage, executor, tasks=stage.sharing(project))
        job = job_of(None, project.config, side_by_side(project, stage, executor, first))
        check(job)
        requested, planned_bytes = job.request.mem_bytes or 0, stage.mem_bytes(project)
        if requested < NEARLY * planned_bytes:
            needs = f"requests {format_bytes(requested)} but needs about {format_bytes(planned_bytes)}"
            note(f"{stage.name}: {needs}; set cluster.{stage.name}.mem=auto")
    if not stays(project.config):
        check(supervisor_job(None, project.config, "1"))


def _plan(stage: Stage, project: Project, planning: Planning, note: Note) -> None:
    """Plan a stage; note why an earlier training is not continued and which trainings have no plan."""
    trains = project.config.train.task is not None
    if trains and StageName.TRAIN in (stage.name, *stage.needed(project.config)) and (names := unplanned(project)):
        points = f"planning memory of {len(names):,} points…" if stage.are_apart(project.config) else ""
        planning(stage.name, points)
    stage.plan(project)
    if trains and stage.name == StageName.TRAIN:
        for line in () if stage.are_apart(project.config) else novelty(project):
            note(line)
        for training in plan_trainings(project) or ():
            if training.prepared is None:
                note(f"train: {training.name} is not trained, the others are: {training.why}")


def create(submission: Submission) -> tuple[RunFolder, bool]:
    """Write the folder of a run and return it and True; or return the active run that does the same, and False."""
    project, stages = submission.project, submission.stages
    config = project.config
    if submission.only:
        _refuse_unplanned(project, stages)
    if submission.file is not None:
        register_use(project, stages, submission.file)
    if (same := refuse_double(config, stages, project.only)) is not None:
        return same, False
    folder = new_run(config, stages, submission.typed, project.beside, project.only, tags_read(project, stages))
    same = joins_double(folder, config, stages, project.only)
    return (same, False) if same is not None else (folder, True)


def start(folder: RunFolder, executor: Executor, config: Config) -> int:
    """Start a new run: by a supervisor process (return its pid) or by a first visit, which submits jobs."""
    if stays(config):
        return start_supervisor(folder)
    Supervisor(folder, executor).visit(until_s=INLINE_S)
    return 0


def _refuse_unplanned(project: Project, stages: list[str]) -> None:
    """Refuse `--only` for a stage whose graphs do not exist yet."""
    for stage in (table.stage(name, project.config) for name in stages):
        if stage.together and project.config.train.task is not None and made_table(project) is None:
            remedy = Command.submit(stage.name, then="   (without --only)")
            raise ConfigError(unmade(project.config), where="--only", remedy=remedy)


def followed(folder: RunFolder, show: Callable[[ViewReader], None]) -> RunStatus:
    """Show a run that another process supervises until it has ended or is orphaned; return its status."""
    reader = ViewReader(folder)
    while reader.status.state in GOING_ON:
        reader.view()
        show(reader)
        time.sleep(WATCH_EVERY_S)
    return reader.status


def refuse_failed(folder: RunFolder, status: RunStatus) -> None:
    """Raise the error of a run that has failed or is orphaned."""
    if status.state is State.ABANDONED:
        what = f"run {folder.name} has no supervisor (its process died); finished work is kept"
        raise JobFailed(what, where=str(folder.path), remedy=Command.of("resume", folder.name))
    if status.exit_code:
        what, _, remedy = status.error.partition("\n  next: ")
        failed = JobFailed(what, remedy=remedy)
        failed.exit_code = status.exit_code  # type: ignore[misc]  # the run's own
        raise failed


def _stage_json(project: Project, plan: StagePlan, executor: Executor) -> dict[str, Any]:
    """Return what a stage would do as JSON data."""
    document: dict[str, Any] = {"stage": plan.title, "counts": plan.counts(), "disk_bytes": plan.survey.bytes}
    if plan.survey.parts:
        document["parts"] = [_stage_json(project, part, executor) for part in plan.parts()]
    if plan.stage.is_script:
        return document | {"script": script_outline(project, plan.stage, executor)}
    if not plan.survey.shards:
        return document
    if plan.own and not plan.survey.parts:
        document["points"] = [{"name": name, "ask": plain(job.ask)} for name, job in plan.own.items()]
    return document | {"cpus": plan.job.cpus, "gpus": plan.job.gpus, "ask": plain(plan.ask), "why": plan.job.why}
