"""`pipeline submit`, and how a run is followed."""

from __future__ import annotations

import os
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
    one_stage,
    print_json,
)
from pipeline.command_line import Command

if TYPE_CHECKING:
    from pipeline.cluster.job_spec import Executor
    from pipeline.engine.submission import Submission
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import RunStatus
    from pipeline.journal.run_view import ViewReader
    from pipeline.report.live_status import RunProgress

LOOK_EVERY_S = 0.1
AT_ONCE_S = 5.0  # how long to wait for the plan of a new run


def submit_command(
    stage: StageToRun = None,
    executor: Where = None,
    only: Only = False,
    damage_list: DamageList = None,
    model: ModelName = None,
    accept: AcceptCode = False,
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
    from pipeline.cli.plan_verbs import show_plan
    from pipeline.engine.submission import Wanted, accept_code, checked, read_submission, refuse
    from pipeline.report.live_status import RunProgress

    stage = one_stage("submit", stage, stage_option)
    dry = dry_run or emit is not None
    if as_json and (emit is not None or not dry_run):
        refuse("requires --dry-run", "--json", stage, "--dry-run --json")
    if accept and dry:
        refuse("cannot be combined with --dry-run or --emit", "--accept-code", stage, "--accept-code")
    wanted = Wanted(stage, executor, only, damage_list, model, sweep, sweep_file, prune, dry)
    submission = read_submission(config, sets or (), wanted)
    if not submission.stages:
        nothing = f"nothing to regenerate: no record in {damage_list} is missing"
        print_json(submission.to_json()) if as_json else typer.echo(nothing)
        return
    if accept:
        name = accept_code(submission.project)
        typer.echo(f"accepted the current code of the task for {name}, which continues", err=True)
    if submission.note and not as_json:
        typer.echo(submission.note, err=True)
    if not dry:
        run_submission(submission, follow=follow)
        return
    with RunProgress() as progress, checked(submission, progress.planning, _note) as submission:
        progress.close()
        print_json(submission.to_json()) if as_json else show_plan(submission, emit)


def run_submission(submission: Submission, *, follow: bool, as_json: bool = False) -> None:
    """Start a run, unless an active one does the same; show it to its end if requested or near."""
    from pipeline.engine.submission import checked, create, start
    from pipeline.project.project import stays
    from pipeline.report.live_status import RunProgress

    with RunProgress() as progress, checked(submission, progress.planning, _note) as submission:
        executor, config = submission.executor, submission.project.config
        follow = follow or config.cluster.executor == "allocation"  # else it would end with the calling script
        folder, is_new = create(submission)
        watch = f"  watch it: {_status_of(folder)}"
        if not is_new:
            progress.close()
            typer.echo(f"run {folder.name} already does this\n{watch}", err=as_json)
        elif follow and stays(config):
            _follow(folder, executor, progress, as_json=as_json)
            return
        else:
            start(folder, executor, config)
        if follow or (is_new and _has_ended_at_once(folder)):
            follow_to_end(folder, progress, as_json=as_json)
        elif is_new:
            progress.close()
            typer.echo(f"run {folder.name} started\n{watch}")


def _has_ended_at_once(folder: RunFolder) -> bool:
    """Wait some seconds until a new run has found work; return whether it has ended."""
    from pipeline.journal.run_status import ENDED, StatusReader
    from pipeline.waiting import wait_for

    reader = StatusReader(folder)

    def is_known() -> bool:
        status = reader.read()
        return status.state in ENDED or any(stage.missing for stage in status.stages.values())

    wait_for(is_known, AT_ONCE_S, LOOK_EVERY_S)
    return reader.status.state in ENDED


def _status_of(folder: RunFolder) -> str:
    """Return the command that watches a run; the path is relative."""
    return str(Command.of("status", os.path.relpath(folder.path), "--watch"))


def _note(text: str) -> None:
    """Print a note on stderr, above the live lines."""
    from pipeline.report.tables import show_parts

    show_parts(f"! {text}", to_stderr=True)


def _follow(folder: RunFolder, executor: Executor, progress: RunProgress, *, as_json: bool) -> None:
    """Supervise a run in this process and show its progress."""
    from pipeline.engine.supervisor import Supervisor, SupervisorStopped, stop_on_signals

    def watch(reader: ViewReader) -> None:
        try:
            progress.show(reader.status, reader.now)
        except (BrokenPipeError, SystemExit) as error:  # the reader of our output is gone; rich turns this into an exit
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
        _show_end(folder, supervisor.status, progress, as_json=as_json)


def _show_end(folder: RunFolder, status: RunStatus, progress: RunProgress, *, as_json: bool = False) -> None:
    """Show how a run ended, without its error, which `main` prints."""
    from pipeline.journal.run_status import State
    from pipeline.journal.run_view import RunView
    from pipeline.report.run_text import ending
    from pipeline.report.tables import show_parts

    gap = [""] * progress.end(RunView(folder, status))
    if as_json:
        print_json(status.to_json())
    elif status.state is not State.ABANDONED and (lines := ending(status, folder.command())):
        show_parts(*gap, *lines)


def follow_to_end(folder: RunFolder, progress: RunProgress, *, as_json: bool = False) -> None:
    """Show a run that another process supervises until it has ended or is orphaned; Ctrl-C does not stop it."""
    from pipeline.engine.submission import followed, refuse_failed

    try:
        status = followed(folder, lambda reader: progress.show(reader.status, reader.now))
    except KeyboardInterrupt:
        progress.close()
        typer.echo(f"the run continues\n  watch it: {_status_of(folder)}", err=True)
        raise
    _show_end(folder, status, progress, as_json=as_json)
    refuse_failed(folder, status)
