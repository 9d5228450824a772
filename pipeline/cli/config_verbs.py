"""`pipeline config`: what is configured, and whether it holds."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from pipeline.cli.options import ConfigFile, Json, Sets, load_config, print_json

if TYPE_CHECKING:
    from pipeline.config.load import LoadedConfig

app = typer.Typer(help="Show, check and describe the configuration.", no_args_is_help=True)


@app.command("show")
def show_command(config: ConfigFile = None, sets: Sets = None, as_json: Json = False) -> None:
    """Print every value and where it comes from."""
    from pipeline.config import load
    from pipeline.report import tables

    settings = load.settings_shown(load_config(config, sets))
    if as_json:
        print_json([asdict(setting) for setting in settings])
        return
    rows = [(one.key, _plain(one.value), one.origin) for one in settings]
    tables.show_parts(tables.text_table(("key", "value", "from"), rows))


@app.command("check")
def check_command(config: ConfigFile = None, sets: Sets = None, as_json: Json = False) -> None:
    """Say whether the configuration is valid and what it names exists."""
    from pipeline.config import load
    from pipeline.errors import ConfigError
    from pipeline.project.project import Project, source_spec
    from pipeline.runs.dataset import reader_items
    from pipeline.runs.workflow.script_stage import ScriptStage
    from pipeline.structures.sources.data_source import items

    loaded = load_config(config, sets)
    missing = load.missing_inputs(loaded)
    if as_json:
        print_json({"config": str(loaded.path), "missing": missing})
    if missing:
        raise ConfigError("\n".join(missing), remedy=f"edit {loaded.path}, or use --set KEY=VALUE")
    beside = loaded.base_dir.absolute()
    project = Project.open(loaded.config, remember=False, beside=beside, strict=True)  # which refuses caches under it
    if loaded.config.train.command is not None:
        ScriptStage().inspect(project)  # which refuses a command that cannot be meant
    if reader_items.is_reader(loaded.config):
        reader_items.refuse_unreadable(project)
        reader_items.refuse_crop(loaded.config)
    else:
        next(items(source_spec(loaded.config)), None)  # which refuses settings that the source would not heed
    if loaded.config.train.task is not None:
        _check_task(loaded)
    if not as_json:
        typer.echo(f"{loaded.path}: valid")


def _check_task(loaded: LoadedConfig) -> None:
    """Try the task out: its model and a batch on tensors without data, and on a few items where graphs are there."""
    from pipeline.errors import ConfigError
    from pipeline.project.project import Project
    from pipeline.project.run_code import load_task
    from pipeline.runs.model.prepare import some_items, told_sizes
    from pipeline.runs.model.task_contract import breaches
    from pipeline.runs.workflow.train_stage import misfits

    train, beside = loaded.config.train, loaded.base_dir.absolute()
    task = load_task(train.task, train.options, beside=beside)
    project = Project.open(loaded.config, remember=False, beside=beside)
    told = told_sizes(project)
    items, padded = some_items(project), train.batching == "padded"
    found = [*misfits(project), *breaches(task, items=items, seed=train.seed, told=told, padded=padded)]
    if found:
        remedy = "what a task must have: pipeline/protocol.py"
        raise ConfigError("\n".join(found), where=f"train.task: {train.task}", remedy=remedy)


@app.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of the configuration, for editors."""
    from pipeline.config.load import json_schema

    print_json(json_schema())


def _plain(value: object) -> str:
    """Return a value as YAML would have it."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{', '.join(map(_plain, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
