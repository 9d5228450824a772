"""`pipeline plan`: what each stage would take, before anything is submitted."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.cli.options import ConfigFile, Json, Sets, load_config, print_json
from pipeline.cli.runs import StageName

UNTOLD = "note: the cluster does not tell its limits here (no Slurm answers): they are not counted in"


def plan(
    stage: Annotated[
        StageName, typer.Option("--stage", help="The stage to plan, with what it needs before it.")
    ] = StageName.ALL,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Say how many tasks, how much memory, time and disk each stage would take, and where each number is from."""
    from pipeline.cluster.spec import Limits
    from pipeline.report import tables
    from pipeline.runs.executors import open_executor
    from pipeline.runs.outlook import estimates
    from pipeline.runs.project import Project
    from pipeline.runs.workflow import everything, up_to

    loaded = load_config(config, sets)
    names = everything(loaded.config) if stage is StageName.ALL else up_to(stage.value)
    with open_executor(loaded.config) as executor:
        project = Project.open(loaded.config, remember=False)
        found = [one.to_json() for one in estimates(project, names, executor, loaded.origins)]
        if loaded.config.cluster.executor == "slurm" and executor.limits == Limits():
            typer.echo(UNTOLD, err=True)
    if as_json:
        print_json(found)
    else:
        tables.show(*tables.estimate_report(found))
