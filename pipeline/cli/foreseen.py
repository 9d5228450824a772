"""What `submit --dry-run` and `--emit` show: what each stage would do, and the scripts of its jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from pipeline.cli.options import print_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pipeline.cluster.job_spec import Executor
    from pipeline.project.project import Project
    from pipeline.runs.workflow.jobs import StagePlan


def show_plan(project: Project, stages: list[str], executor: Executor, emit: Path | None) -> None:
    """Print what each stage would do, and the scripts that would be submitted."""
    from pipeline.report import tables
    from pipeline.report.plan_tables import plan_table
    from pipeline.runs.workflow import script_stage, table
    from pipeline.runs.workflow.jobs import plan_stage, script_outline

    plans = [plan_stage(project, table.stage(name, project.config), executor, folder=None) for name in stages]
    tables.show_parts(plan_table([one.row() for one in plans]))
    for one in plans:
        if waiting := one.counts().get("waiting"):
            typer.echo(f"{one.stage.name}: {waiting:,} items are not scanned yet; what they hold is not counted")
        if script_stage.is_script(project.config, one.stage.name):
            typer.echo("\n".join(script_outline(project, one.stage, executor).lines()))
        elif one.found.shards:
            typer.echo(f"{one.stage.name}: memory {one.job.why}")
    if project.config.cluster.executor == "slurm":
        _show_scripts(project, plans, executor, emit)
    elif emit is not None:
        typer.echo("no scripts: this run would be local (--executor slurm)", err=True)


def _show_scripts(project: Project, plans: Sequence[StagePlan], executor: Executor, emit: Path | None) -> None:
    """Print or write the scripts of the jobs of each stage, and of a supervisor."""
    from pipeline.errors import ConfigError
    from pipeline.runs.engine.lifecycle import scripts

    for name, text in scripts(project, plans, executor):
        if emit is None:
            typer.echo(f"\n# ---- {name}\n{text}")
            continue
        try:
            emit.mkdir(parents=True, exist_ok=True)
            (emit / name).write_text(text)
        except OSError as error:
            raise ConfigError(f"cannot write: {error.strerror}", where=str(emit / name), remedy="--emit DIR") from error
        typer.echo(f"wrote {emit / name}")
    if emit is not None:
        typer.echo("to be read: RUN stands for a run folder that `submit` makes. To submit by hand: sbatch/")


def print_plan(project: Project, stages: list[str], executor: Executor) -> None:
    """Print the same as one document."""
    from pipeline.runs.engine.lifecycle import scripts
    from pipeline.runs.workflow import table
    from pipeline.runs.workflow.jobs import plan_stage

    plans = [plan_stage(project, table.stage(name, project.config), executor, folder=None) for name in stages]
    texts = dict(scripts(project, plans, executor)) if project.config.cluster.executor == "slurm" else {}
    print_json({"stages": [_stage_json(project, one, executor) for one in plans], "scripts": texts})


def _stage_json(project: Project, one: StagePlan, executor: Executor) -> dict[str, Any]:
    """Return what a stage would do as JSON data."""
    from pipeline.runs.workflow import script_stage
    from pipeline.runs.workflow.jobs import script_outline

    told: dict[str, Any] = {"stage": one.stage.name, "counts": one.counts(), "disk_bytes": one.found.bytes}
    if script_stage.is_script(project.config, one.stage.name):
        return told | {"script": script_outline(project, one.stage, executor).to_json()}
    if not one.found.shards:
        return told
    return told | {"cpus": one.job.cpus, "gpus": one.job.gpus, "ask": one.ask.to_json(), "why": one.job.why}
