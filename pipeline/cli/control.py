"""The verbs that act on a run that has begun: resume, cancel."""

from __future__ import annotations

import socket
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.options import ConfigFile, Run, Sets, load_config, one_of

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.cluster.spec import Executor
    from pipeline.config.schema import Config
    from pipeline.runs.cancel import Cancellation
    from pipeline.runs.folder import RunFolder
    from pipeline.runs.status import RunStatus


class Cancelled(str, Enum):
    """What has jobs to cancel."""

    SCAN = "scan"
    EMBED = "embed"
    GRAPH = "graph"
    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"
    VALIDATE = "validate"
    REGENERATE = "regenerate"


Yes = Annotated[bool, typer.Option("--yes", help="Do it; else only say what would be done.")]


def resume(run: Run = None, config: ConfigFile = None, sets: Sets = None) -> None:
    """Take up a run that nobody looks after any more: its supervisor or its login process died."""
    from pipeline.errors import ConfigError
    from pipeline.runs.executors import stays
    from pipeline.runs.ledger import Reader
    from pipeline.runs.status import ENDED, RunState, fold
    from pipeline.runs.submit import pay_visit, start_supervisor

    folder, frozen, executor, status = _opened(run, config, sets)
    with executor:
        if status.state in ENDED:
            what, again = f"run {folder.name} has ended: it is {status.state.value}", folder.again.read_text()
            raise ConfigError(what, where=str(folder.path), remedy=f"{again}   (does what is missing)")
        if status.state is RunState.RUNNING:
            watch = f"watch it: pipeline status {folder.name} --watch"
            typer.echo(f"run {folder.name} is looked after: nothing to do\n  {watch}")
            return
    if stays(frozen):
        start_supervisor(folder)
    else:
        pay_visit(folder)
        if failed := fold(folder.name, Reader(folder).news()).exit_code:  # the visit has said why
            raise typer.Exit(failed)
    typer.echo(f"run {folder.name} goes on\n  watch it: pipeline status {folder.name} --watch")


def cancel(
    run: Run = None,
    only: Annotated[Cancelled | None, one_of(Cancelled, "--stage", "Only the jobs of this stage.")] = None,
    yes: Yes = False,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """End a run with its jobs and supervisors; finished work is kept."""
    from pipeline.errors import ConfigError
    from pipeline.runs.cancel import cancel as end
    from pipeline.runs.cancel import foresee
    from pipeline.runs.status import RunState

    stage = only.value if only else None
    folder, _, executor, status = _opened(run, config, sets)
    with executor:
        if stage is not None and stage not in status.stages:
            what = f"run {folder.name} has no stage {stage!r} ({', '.join(status.stages) or 'none has begun'})"
            raise ConfigError(what, where="--stage", remedy=f"pipeline status {folder.name}")
        found = foresee(status, executor, stage)
        if found.empty and stage is not None and status.state is RunState.RUNNING and not executor.outlives:
            what = "on this machine a stage ends with its run"
            raise ConfigError(what, where="--stage", remedy=f"pipeline cancel {folder.name}")
        if found.empty:
            typer.echo(f"run {folder.name} is {status.state.value}: nothing to cancel")
            return
        typer.echo(f"run {folder.name}: {_words(found)}")
        if not yes:
            again = f"pipeline cancel {folder.name}{f' --stage {stage}' if stage else ''} --yes"
            typer.echo(f"nothing was done yet\n  next: {again}")
            return
        end(folder, status, executor, found, stage)
    typer.echo("cancelled; finished work is kept")


def _opened(
    run: str | None, file: Path | None, sets: list[str] | None
) -> tuple[RunFolder, Config, Executor, RunStatus]:
    """Return a run, its frozen configuration, what its jobs run on, and how it stands."""
    from pipeline.config.load import from_resolved
    from pipeline.runs.executors import open_executor
    from pipeline.runs.folder import by_path, find
    from pipeline.runs.status import status_of

    folder = (by_path(run) if run else None) or find(load_config(file, sets).config.cluster.runs, run)
    frozen = from_resolved(folder.config.read_text(), str(folder.config))
    executor = open_executor(frozen)
    return folder, frozen, executor, status_of(folder, socket.gethostname(), executor)


def _words(what: Cancellation) -> str:
    """Say what would be ended."""
    from pipeline.report.tables import plural

    jobs = (
        [f"{plural(what.tasks, 'task')} in {plural(len(what.jobs), 'job')} ({', '.join(what.jobs)})"]
        if what.jobs
        else []
    )
    watch = [f"its supervisor jobs ({', '.join(what.supervisors)})"] if what.supervisors else []
    return " and ".join([*jobs, *watch, *([f"its supervisor (process {what.process})"] if what.process else [])])
