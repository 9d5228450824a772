"""The verbs about runs: demo, submit, status."""

from __future__ import annotations

import os
import shlex
import signal
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.options import ConfigFile, Json, Run, Sets, load_config, print_json

if TYPE_CHECKING:
    from pipeline.cluster.spec import JobSpec
    from pipeline.config.schema import Config
    from pipeline.runs.folder import RunFolder
    from pipeline.runs.status import RunStatus


class StageName(str, Enum):
    """What can be submitted."""

    SCAN = "scan"
    ALL = "all"


class ExecutorName(str, Enum):
    """Where it can run."""

    LOCAL = "local"


def submit(
    stage: Annotated[StageName, typer.Option("--stage", help="The stage to run, or all of them.")],
    executor: Annotated[
        ExecutorName | None, typer.Option("--executor", help="Where to run it; else cluster.executor.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Stay, and show progress until it has ended.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Run a stage; what was done before is not done again."""
    from pipeline.runs.submit import new_run, start_supervisor
    from pipeline.runs.workflow import WORKFLOW

    sets = [*(sets or ()), *([f"cluster.executor={executor.value}"] if executor else ())]
    chosen = load_config(config, sets).config
    stages = [row.name for row in WORKFLOW] if stage is StageName.ALL else [stage.value]
    if dry_run:
        _show_plan(chosen, stages)
        return
    _check_first(chosen, stages[0])
    folder = new_run(chosen, stages)
    if follow:
        _follow(folder, chosen, stages)
        return
    start_supervisor(folder)
    typer.echo(f"run {folder.name} started\n  watch it: pipeline status {shlex.quote(os.path.relpath(folder.path))}")


def _show_plan(config: Config, stages: list[str]) -> None:
    """Print what each stage would do."""
    from pipeline.report import tables
    from pipeline.runs import workflow
    from pipeline.runs.project import Project
    from pipeline.runs.submit import plan
    from pipeline.runs.supervisor import local_machine

    project, cpus = Project.open(config), local_machine(config.cluster.slots).cpus
    plans = [plan(project, workflow.stage(name), cpus, folder=None) for name in stages]
    for one in plans:
        if one.job is not None:
            _refuse(config, one.job)
    tables.show(tables.plan_table([(one.stage.name, one.counts(), one.job) for one in plans]))


def _check_first(config: Config, stage: str) -> None:
    """Refuse here what would be refused once nobody is looking: an unusable source, cache or request."""
    from pipeline.runs import todo, workflow
    from pipeline.runs.project import Project
    from pipeline.runs.submit import job_spec

    project = Project.open(config)
    next(todo.list_items(project), None)
    _refuse(config, job_spec(project, workflow.stage(stage), 1, folder=None))


def _refuse(config: Config, job: JobSpec) -> None:
    """Raise SubmissionRefused for a job that the executor could not run."""
    from pipeline.cluster.local import refuse_too_large
    from pipeline.cluster.spec import refuse_impossible
    from pipeline.runs.supervisor import local_machine

    refuse_impossible(job)
    refuse_too_large(job, local_machine(config.cluster.slots))


def _follow(folder: RunFolder, config: Config, stages: list[str]) -> None:
    """Drive a run from this terminal and show it."""
    from pipeline.cluster.local import LocalExecutor
    from pipeline.report import tables
    from pipeline.report.live import Live
    from pipeline.runs.supervisor import Stopped, Supervisor, local_machine, stop

    announced: set[str] = set()
    with Live() as live, LocalExecutor(local_machine(config.cluster.slots)) as executor:
        for caveat in executor.caveats:
            typer.echo(f"note: {caveat}", err=True)

        def watch(status: RunStatus) -> None:
            for stage in status.stages.values():
                if stage.name not in announced:
                    announced.add(stage.name)
                    tables.show(tables.stage_line(stage.name, stage.counts()), to_stderr=True)
                live.show(stage)

        supervisor = Supervisor(folder, executor, watch)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, stop)
        try:
            supervisor.run(stages)
        except (KeyboardInterrupt, Stopped):
            typer.echo("\nstopped; what is finished is kept: run the same command again to go on", err=True)
            raise KeyboardInterrupt from None
        finally:
            live.stop()
            tables.show(*tables.run_report(supervisor.status.to_json() | {"error": ""}))  # `main` says the error


def status(run: Run = None, config: ConfigFile = None, sets: Sets = None, as_json: Json = False) -> None:
    """Show what a run is doing, or what became of it."""
    import socket

    from pipeline.report import tables
    from pipeline.runs.folder import by_path, find
    from pipeline.runs.status import RunState, status_of

    folder = by_path(run) if run else None
    folder = folder or find(load_config(config, sets).config.cluster.runs, run)
    found = status_of(folder, socket.gethostname())
    if as_json:
        print_json(found.to_json())
    else:
        tables.show(*tables.run_report(found.to_json()))
        if found.state is RunState.WAITING:
            typer.echo(f"nothing was heard of its supervisor yet; what it printed: {folder.supervisor_log}")


def demo(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where to make it; must not exist or be empty.")
    ] = Path("demo"),
) -> None:
    """Make a small project, run every stage on it on this machine, and say what to look at."""
    from pipeline.runs.demo import make_project, what_to_look_at

    config_file = make_project(folder)
    submit(StageName.ALL, ExecutorName.LOCAL, follow=True, config=config_file)
    typer.echo(what_to_look_at(folder))
