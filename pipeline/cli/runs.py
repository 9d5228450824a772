"""The verbs about runs: demo, submit, status."""

from __future__ import annotations

import os
import shlex
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.options import ConfigFile, Json, Run, Sets, load_config, print_json

if TYPE_CHECKING:
    from pipeline.cluster.spec import JobSpec
    from pipeline.config.schema import Config
    from pipeline.runs.folder import RunFolder
    from pipeline.runs.project import Project
    from pipeline.runs.status import RunStatus


NEARLY = 0.9  # what is planned is cautious


class StageName(str, Enum):
    """What can be submitted."""

    SCAN = "scan"
    EMBED = "embed"
    GRAPH = "graph"
    ALL = "all"


class ExecutorName(str, Enum):
    """Where it can run."""

    LOCAL = "local"


def submit(
    stage: Annotated[StageName, typer.Option("--stage", help="The stage to run, with what it needs before it.")],
    executor: Annotated[
        ExecutorName | None, typer.Option("--executor", help="Where to run it; else cluster.executor.")
    ] = None,
    only: Annotated[bool, typer.Option("--only", help="Run that stage alone; what it needs is there.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Stay, and show progress until it has ended.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Run a stage; what was done before is not done again."""
    from pipeline.errors import ConfigError
    from pipeline.runs.project import Project
    from pipeline.runs.submit import new_run, start_supervisor
    from pipeline.runs.workflow import everything, up_to

    sets = [*(sets or ()), *([f"cluster.executor={executor.value}"] if executor else ())]
    chosen = load_config(config, sets).config
    if only and stage is StageName.ALL:
        raise ConfigError("all stages are not one alone", where="--only", remedy="pipeline submit --stage all")
    stages = everything(chosen) if stage is StageName.ALL else up_to(stage.value)
    stages = stages[-1:] if only else stages
    project = Project.open(chosen, remember=not dry_run)
    _check_first(project, stages)
    if dry_run:
        _show_plan(project, stages)
        return
    folder = new_run(chosen, stages, _typed(stage, config, sets))
    if follow:
        _follow(folder, chosen, stages)
        return
    start_supervisor(folder)
    typer.echo(f"run {folder.name} started\n  watch it: pipeline status {shlex.quote(os.path.relpath(folder.path))}")


def _typed(stage: StageName, config: Path | None, sets: list[str]) -> str:
    """Return the command that does what is missing: the one that was typed, with what the stage needs before it."""
    words = ["pipeline", "submit", "--stage", stage.value, *(["--config", str(config)] if config else [])]
    return shlex.join([*words, *(word for one in sets for word in ("--set", one))])


def _show_plan(project: Project, stages: list[str]) -> None:
    """Print what each stage would do."""
    from pipeline.report import tables
    from pipeline.runs import workflow
    from pipeline.runs.submit import plan
    from pipeline.runs.supervisor import local_machine

    machine = local_machine(project.config.cluster.slots)
    plans = [plan(project, workflow.stage(name), machine.cpus, len(machine.gpus), folder=None) for name in stages]
    tables.show(tables.plan_table([(one.stage.name, one.counts(), one.found.bytes, one.job) for one in plans]))
    for one in plans:
        if waiting := one.counts().get("waiting"):
            typer.echo(f"{one.stage.name}: {waiting:,} items are not scanned yet; what they hold is not counted")


def _check_first(project: Project, stages: list[str]) -> None:
    """Refuse here what would be refused once nobody is looking: an unusable source, cache, checkpoint or request."""
    from pipeline.runs import workflow
    from pipeline.runs.submit import job_spec

    for stage in map(workflow.stage, stages):
        stage.inspect(project)
        job = job_spec(project, stage, 1, folder=None)
        _refuse(project.config, job)
        _warn_of_little(stage.name, job, stage.mem_bytes(project))


def _warn_of_little(stage: str, job: JobSpec | None, planned_bytes: int) -> None:
    """Say where less memory was pinned than is thought to be needed."""
    from pipeline.report.tables import size

    if job is not None and (job.mem_bytes or 0) < NEARLY * planned_bytes:
        what = f"a task gets {size(job.mem_bytes or 0)}, and is thought to need {size(planned_bytes)}"
        typer.echo(f"note: {stage}: {what} (cluster.{stage}.mem: auto)", err=True)


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
    from pipeline.runs.supervisor import Stopped, Supervisor, local_machine, stop_on_signals

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
        stop_on_signals()
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
