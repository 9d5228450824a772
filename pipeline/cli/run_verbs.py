"""`pipeline submit`, and how a run is followed."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pipeline.cli.options import (
    AcceptCode,
    ConfigFile,
    DamageList,
    DryRun,
    Emit,
    Follow,
    Json,
    ModelName,
    Only,
    Prune,
    Sets,
    StageOption,
    StageToRun,
    Sweep,
    SweepFile,
    Where,
    load_config,
    one_stage,
    print_json,
)
from pipeline.command_line import Command
from pipeline.stage_names import StageName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from pipeline.cluster.job_spec import Executor, Job
    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import RunStatus
    from pipeline.journal.run_view import ViewReader
    from pipeline.project.project import Project
    from pipeline.report.live_status import RunProgress
    from pipeline.stages.stage import Stage


NEARLY = 0.9  # of the planned memory, which is cautious, may be asked for without a note
WATCH_EVERY_S = 0.5
INLINE_S = 5.0  # work that takes longer is left to the first supervisor job


def submit_command(
    stage: StageToRun = None,
    executor: Where = None,
    only: Only = False,
    damage_list: DamageList = None,
    model: ModelName = None,
    accept_code: AcceptCode = False,
    sweep: Sweep = None,
    sweep_file: SweepFile = None,
    prune: Prune = None,
    follow: Follow = False,
    dry_run: DryRun = False,
    emit: Emit = None,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
    stage_option: StageOption = None,
) -> None:
    """Run a stage and everything it needs; finished work is kept.

    Run it again to continue after an interruption: only missing work is done.

    Examples:
    pipeline submit                         # up to a trained and evaluated model
    pipeline submit train --executor slurm  # returns at once: pipeline status
    pipeline submit train --set train.epochs=20 --follow
    pipeline submit train --sweep train.seed=0:5 --dry-run
    pipeline submit predict --model interface-153f919b
    """
    import json

    from pipeline.cli.plan_verbs import print_plan, show_plan
    from pipeline.config.load import from_resolved, with_settings
    from pipeline.planning.trainings import typed_points
    from pipeline.project.project import Project
    from pipeline.stages.table import untrained
    from pipeline.upkeep.retention import register_use

    stage = one_stage("submit", stage, stage_option)
    idle = dry_run or emit is not None
    if as_json and (emit is not None or not dry_run):
        _refuse("requires --dry-run", "--json", stage, "--dry-run --json")
    if damage_list is not None and stage != StageName.REGENERATE:
        _refuse(f"cannot be combined with stage {stage}", "--list", "regenerate", "--list FILE")
    if accept_code and idle:
        _refuse("cannot be combined with --dry-run or --emit", "--accept-code", stage, "--accept-code")
    if only and stage in ("all", StageName.REGENERATE):
        _refuse(f"takes a single stage, not {stage}", "--only", "train", "--only")
    sets = [*(sets or ()), *([f"cluster.executor={executor}"] if executor else ())]
    swept = [word for values in sweep or () for word in ("--sweep", values)]
    swept += ["--sweep-file", str(sweep_file)] if sweep_file else []
    points = [f"train.sweep.points={typed_points(sweep or (), sweep_file)}"] if swept else []
    points += [f"train.sweep.prune={prune}"] if prune else []
    swept += ["--prune", prune] if prune else []
    if swept and stage != StageName.TRAIN:
        _refuse(f"cannot be combined with stage {stage}", swept[0], "train", " ".join(swept[:2]))
    loaded = load_config(config, [*sets, *points])
    if prune and not loaded.config.train.sweep.points:
        _refuse("requires --sweep", "--prune", "train", "--sweep train.seed=0:5")
    configured = loaded.config
    if model is not None:
        chosen = _settings_of_model(stage, model, configured)
        sets += [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in chosen.items()]
        configured = from_resolved(json.dumps(with_settings(configured.model_dump(mode="json"), chosen)))
    project = Project.open(configured, remember=not idle, beside=loaded.base_dir.absolute(), strict=True)
    project, stages = _stages_of(project, stage, damage_list, only=only)
    if not stages:
        nothing = f"nothing to regenerate: no record in {damage_list} is missing"
        print_json({"stages": [], "scripts": {}}) if as_json else typer.echo(nothing)
        return
    alone = ["--only"] if only and configured.train.command is not None else []  # a script may want no other stage
    typed = typed_command(stage, config, sets, damage_list, [*swept, *alone])
    if accept_code:
        _accept_code(project)
    if (note := untrained(stage, project.config)) and not as_json:
        typer.echo(note, err=True)
    with _checked(project, stages, typed, may_be_silent=idle) as (project, opened, progress):
        if idle:
            progress.close()
            print_plan(project, stages, opened, note) if as_json else show_plan(project, stages, opened, typed, emit)
            return
        if only:
            _refuse_unplanned(project, stages)
        register_use(project, stages, loaded.path)
        _start(project, stages, typed, opened, progress, follow=follow)


@contextmanager
def _checked(
    project: Project, stages: list[str], typed: Command, *, may_be_silent: bool = False
) -> Iterator[tuple[Project, Executor, RunProgress]]:
    """Open the executor of a project and check its stages; a refusal repeats what was typed."""
    from pipeline.errors import SubmissionRefused
    from pipeline.project.container_image import is_contained, refuse_unfit_image, with_digest
    from pipeline.project.project import open_executor
    from pipeline.report.live_status import RunProgress
    from pipeline.stages.table import with_typed_command

    with open_executor(project.config) as opened, RunProgress() as progress:
        try:
            progress.planning(stages[0])
            project = replace(project, executor=opened, config=with_digest(project.config))
            for note in refuse_unfit_image(project.config) if is_contained(project.config) else ():
                _note(f"cluster.slurm.container: {note}")
            _check_first(project, stages, opened, progress, may_be_silent=may_be_silent)
            yield project, opened, progress
        except SubmissionRefused as error:
            raise with_typed_command(error, typed) from None


def _settings_of_model(stage: str, model: str, config: Config) -> dict[str, Any]:
    """Return what `--model` sets: the stage's checkpoint, and that what is predicted needs no labels."""
    from pipeline.planning.trained_model import place_of
    from pipeline.training.checkpoints.checkpoint import weights_file

    if stage not in (StageName.EVALUATE, StageName.PREDICT):
        _refuse(f"cannot be combined with stage {stage}", "--model", "predict", f"--model {model}")
    is_unlabelled = stage == StageName.PREDICT and config.data.labels
    place = place_of(config.train.models, model) or weights_file(model)
    if place is not None and place != config.train.models / model:
        model = str(place)  # whoever goes on with the run may stand elsewhere
    return {f"train.{stage}.checkpoint": model, **({"data.unlabelled": True} if is_unlabelled else {})}


def _refuse(problem: str, option: str, stage: str, more: str = "") -> None:
    """Raise for an option that does not go with the others, naming those that do."""
    from pipeline.errors import ConfigError

    raise ConfigError(problem, where=option, remedy=Command.of(f"submit {stage} {more}"))


def _stages_of(project: Project, stage: str, damage_list: Path | None, *, only: bool) -> tuple[Project, list[str]]:
    """Return the stages to run, and the project, confined to what a damage list names where there is one."""
    from pipeline.stages.table import up_to

    if stage == StageName.REGENERATE:
        return to_regenerate(project, damage_list)
    stages = up_to(stage, project.config)
    if project.config.train.sweep.points and StageName.TRAIN in stages[:-1]:
        _refuse(f"a sweep trains many models; stage {stages[-1]} needs one", "train.sweep.points", "train")
    return project, stages[-1:] if only else stages


def _refuse_unplanned(project: Project, stages: list[str]) -> None:
    """Refuse `--only` for a stage whose graphs do not exist yet."""
    from pipeline.dataset.loading import made_table
    from pipeline.dataset.reader_items import unmade
    from pipeline.errors import ConfigError
    from pipeline.stages import table

    for stage in (table.stage(name, project.config) for name in stages):
        if stage.together and project.config.train.task is not None and made_table(project) is None:
            remedy = Command.submit(stage.name, then="   (without --only)")
            raise ConfigError(unmade(project.config), where="--only", remedy=remedy)


def to_regenerate(project: Project, damage_list: Path | None) -> tuple[Project, list[str]]:
    """Return a project confined to the lost records of a damage list, and the stages to run; none: nothing is lost."""
    from pipeline.project.restriction import read_list
    from pipeline.stages.table import regenerated
    from pipeline.store.maintenance.leftovers import refuse_unusable

    refuse_unusable(project.cache)
    if damage_list is None:
        return project, regenerated(project.config, None)
    confined = read_list(damage_list, project.cache)
    stages = regenerated(project.config, confined.kinds) if confined.kinds else []
    return replace(project, only=confined), stages


def _start(
    project: Project,
    stages: list[str],
    typed: Command,
    executor: Executor,
    progress: RunProgress,
    *,
    follow: bool,
    ended: Callable[[RunStatus], None] | None = None,
) -> None:
    """Start a run, unless one is doing the same already; `ended` prints its result in place of a summary."""
    from pipeline.engine.handover import start_supervisor
    from pipeline.engine.lifecycle import gives_way, new_run, refuse_double
    from pipeline.engine.supervisor import Supervisor
    from pipeline.project.project import stays
    from pipeline.upkeep.retention import tags_read

    config, is_json = project.config, ended is not None
    same = refuse_double(config, stages, project.only)
    if same is None:
        folder = new_run(config, stages, typed, project.beside, project.only, tags_read(project, stages))
        same = gives_way(folder, config, stages, project.only)
    if same is not None:
        progress.close()
        typer.echo(f"run {same.name} already does this\n  watch it: {_status_of(same)}", err=is_json)
        if follow:
            follow_to_end(same, progress, ended)
        return
    if not stays(config):
        Supervisor(folder, executor).visit(until_s=INLINE_S)
    elif follow:
        _follow(folder, executor, progress, ended)
        return
    else:
        start_supervisor(folder)
    if follow or _has_ended_at_once(folder):
        follow_to_end(folder, progress, ended)
        return
    progress.close()
    typer.echo(f"run {folder.name} started\n  watch it: {_status_of(folder)}")


def _has_ended_at_once(folder: RunFolder) -> bool:
    """Wait until something was found to do in a new run, or some seconds; tell whether it has ended."""
    from pipeline.journal.run_status import ENDED, StatusReader
    from pipeline.waiting import wait_for

    reader = StatusReader(folder)

    def is_known() -> bool:
        status = reader.read()
        return status.state in ENDED or any(stage.missing for stage in status.stages.values())

    wait_for(is_known, INLINE_S, WATCH_EVERY_S / 5)
    return reader.status.state in ENDED


def run_to_its_end(
    project: Project, stages: list[str], typed: Command, file: Path | None, ended: Callable[[RunStatus], None] | None
) -> None:
    """Run stages, show their progress until they have ended, and print the result, by `ended` if given."""
    from pipeline.upkeep.retention import register_use

    with _checked(project, stages, typed) as (project, opened, progress):
        register_use(project, stages, file)
        _start(project, stages, typed, opened, progress, follow=True, ended=ended)


def begin_again(folder: RunFolder, config: Config, status: RunStatus, *, follow: bool) -> None:
    """Start a run that does what an ended one has left undone, with its configuration and the user's code of then."""
    import json

    from pipeline.project.project import Project
    from pipeline.project.restriction import only_of

    project = Project.open(config, beside=folder.task_root, strict=True, only=only_of(folder))
    stages, typed = json.loads(folder.stages.read_text()), folder.command()
    typer.echo(f"run {folder.name} has ended ({status.state.value}); a new run does the rest")
    with _checked(project, stages, typed) as (project, executor, progress):
        _start(project, stages, typed, executor, progress, follow=follow)


def _accept_code(project: Project) -> None:
    """Let the training that differs in nothing but its code go on with the code of today."""
    from pipeline.errors import ConfigError
    from pipeline.planning.prepare import accept_code, prepare

    if project.config.train.sweep.points:
        _refuse(
            "accepts code for one training, not for a sweep", "--accept-code", "train", "--set KEY=VALUE --accept-code"
        )
    prepared = prepare(project)
    if prepared is None:
        remedy = Command.of("submit train")
        raise ConfigError("nothing was trained on this data set yet", where="--accept-code", remedy=remedy)
    name = accept_code(prepared, project.config.train.models)
    typer.echo(f"accepted the current code of the task for {name}, which continues", err=True)


def _status_of(folder: RunFolder) -> str:
    """Return the command that watches a run, with its path from the current folder."""
    return str(Command.of("status", os.path.relpath(folder.path), "--watch"))


def typed_command(
    stage: str, config: Path | None, sets: list[str], damage_list: Path | None = None, also: Sequence[str] = ()
) -> Command:
    """Return the command to type again to do what is missing: without --follow and the like."""
    listed = ("--list", damage_list) if damage_list else ()
    return Command.of(" ".join(Command.submit(stage).words), *listed, *also).in_project(Command.about(config, sets))


def _check_first(
    project: Project, stages: list[str], executor: Executor, progress: RunProgress, *, may_be_silent: bool = False
) -> None:
    """Refuse before submission an unusable source, cache, checkpoint or request, which would fail in a job later.

    Of a cluster that does not answer a note is printed where it `may_be_silent`, once.
    """
    from pipeline.engine.handover import supervisor_job
    from pipeline.errors import ClusterSilent
    from pipeline.journal.budget import Budget, Spending
    from pipeline.project.project import stays
    from pipeline.stages import table
    from pipeline.stages.jobs import first_job, job_of
    from pipeline.units import format_bytes

    silent = list[str]()

    def check(job: Job) -> None:
        try:
            if not silent:
                executor.check(job)
        except ClusterSilent as error:
            if not may_be_silent:
                raise
            silent.append(error.what)
            _note(f"the cluster could not check these jobs: {error.what}")

    cluster = project.config.cluster
    account = Spending(cluster.runs, Budget.of(cluster.budget)).account()
    if account and account.is_low:
        _note(account.line())
    for stage in (table.stage(name, project.config) for name in stages):
        stage.inspect(project)
        if not stage.has_tasks:
            continue
        _plan(stage, project, progress)
        job = job_of(None, project.config, first_job(project, stage, executor))
        check(job)
        requested, planned_bytes = job.request.mem_bytes or 0, stage.mem_bytes(project)
        if requested < NEARLY * planned_bytes:
            needs = f"requests {format_bytes(requested)} but needs about {format_bytes(planned_bytes)}"
            _note(f"{stage.name}: {needs}; set cluster.{stage.name}.mem=auto")
    if not stays(project.config):
        check(supervisor_job(None, project.config, "1"))


def _note(text: str) -> None:
    """Print a note on stderr, above what is drawn there."""
    from pipeline.report.tables import show_parts

    show_parts(f"! {text}", to_stderr=True)


def _plan(stage: Stage, project: Project, progress: RunProgress) -> None:
    """Plan a stage, which may take a while; print why an earlier training is not continued, and which have no plan."""
    from pipeline.planning.trainings import plan_trainings, unplanned
    from pipeline.stages.train import novelty

    trains = project.config.train.task is not None
    if trains and StageName.TRAIN in (stage.name, *stage.needed(project.config)) and (names := unplanned(project)):
        points = f"planning memory of {len(names):,} points…" if stage.are_apart(project.config) else ""
        progress.planning(stage.name, points)
    stage.plan(project)
    if trains and stage.name == StageName.TRAIN:
        for line in () if stage.are_apart(project.config) else novelty(project):
            _note(line)
        for training in plan_trainings(project) or ():
            if training.prepared is None:
                _note(f"train: {training.name} is not trained, the others are: {training.why}")


def _follow(
    folder: RunFolder, executor: Executor, progress: RunProgress, ended: Callable[[RunStatus], None] | None
) -> None:
    """Supervise a run in this process and show its progress."""
    from pipeline.engine.supervisor import Supervisor, SupervisorStopped, stop_on_signals

    def watch(reader: ViewReader) -> None:
        try:
            progress.show(reader.status, reader.now)
        except (BrokenPipeError, SystemExit) as error:  # its reader has gone: rich turns one into the other
            raise SupervisorStopped from error

    supervisor = Supervisor(folder, executor, watch)
    stop_on_signals()
    try:
        supervisor.run()
    except (KeyboardInterrupt, SupervisorStopped):
        if executor.outlives:
            progress.close()
            typer.echo(f"! Jobs are still running unsupervised.\n  next: pipeline resume {folder.name}", err=True)
        raise KeyboardInterrupt from None
    finally:
        executor.close()
        _show_end(folder, supervisor.status, progress, ended)


def _show_end(
    folder: RunFolder, status: RunStatus, progress: RunProgress, ended: Callable[[RunStatus], None] | None
) -> None:
    """Show how a run ended, without its error, which `main` prints."""
    from pipeline.journal.run_status import State
    from pipeline.journal.run_view import RunView
    from pipeline.report.run_text import ending
    from pipeline.report.tables import show_parts

    gap = [""] * progress.end(RunView(folder, status))
    if ended is not None:
        ended(status)
    elif status.state is not State.ABANDONED and (lines := ending(status, folder.command())):
        show_parts(*gap, *lines)


def follow_to_end(folder: RunFolder, progress: RunProgress, ended: Callable[[RunStatus], None] | None = None) -> None:
    """Show a run that another process supervises until it has ended or is orphaned; Ctrl-C does not stop it."""
    import time

    from pipeline.errors import JobFailed
    from pipeline.journal.run_status import GOING_ON, State
    from pipeline.journal.run_view import ViewReader

    reader = ViewReader(folder)
    try:
        while reader.status.state in GOING_ON:
            reader.view()
            progress.show(reader.status, reader.now)
            time.sleep(WATCH_EVERY_S)
    except KeyboardInterrupt:
        progress.close()
        typer.echo(f"the run continues\n  watch it: {_status_of(folder)}", err=True)
        raise
    status = reader.status
    _show_end(folder, status, progress, ended)
    if status.state is State.ABANDONED:
        what = f"run {folder.name} has no supervisor (its process died); finished work is kept"
        raise JobFailed(what, where=str(folder.path), remedy=Command.of("resume", folder.name))
    if status.exit_code:
        failed = JobFailed(status.error)
        failed.exit_code = status.exit_code  # type: ignore[misc]  # the run's own
        raise failed
