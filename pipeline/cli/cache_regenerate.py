"""`pipeline cache regenerate`: makes anew, on this machine, what a damage list calls lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from pipeline.cli.options import ConfigFile, Json, Sets, load_config, print_json
from pipeline.cli.runs import DamageList, StageName, run_to_its_end, tables_of, to_regenerate, typed_command

if TYPE_CHECKING:
    from pipeline.runs.status import RunStatus


def regenerate(
    damage_list: DamageList = None, config: ConfigFile = None, sets: Sets = None, as_json: Json = False
) -> None:
    """Make lost records anew, here and now; on a cluster: pipeline submit --stage regenerate."""
    from pipeline.runs.project import Project
    from pipeline.runs.status import RunState
    from pipeline.runs.status import RunStatus as Status

    sets = [*(sets or ()), "cluster.executor=local"]
    loaded = load_config(config, sets)
    project, stages = to_regenerate(
        Project.open(loaded.config, beside=loaded.base_dir.absolute(), strict=True), damage_list
    )
    if not stages:
        nothing = f"nothing to regenerate: {damage_list} names no record that is lost"
        print_json(Status("", RunState.DONE).to_json()) if as_json else typer.echo(nothing)
        return
    typed = typed_command(StageName.REGENERATE, config, sets, damage_list)
    run_to_its_end(project, stages, typed, loaded.path, _as_document if as_json else _in_short)


def _in_short(status: RunStatus) -> None:
    """Print how a run ended: in a line, where there was nothing to do."""
    if status.state.value != "done" or any(stage.missing or stage.warnings for stage in status.stages.values()):
        tables_of(status)
        return
    last = status.stages.get(StageName.REGENERATE.value)
    what = "what the list names" if last and last.items else "everything that this data set needs"
    typer.echo(f"nothing to regenerate: {what} is there   (pipeline status {status.name})")


def _as_document(status: RunStatus) -> None:
    """Print how a run ended as `pipeline status --json` does."""
    print_json(status.to_json())
