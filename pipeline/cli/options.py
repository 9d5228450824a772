"""Options that several verbs share, and the many of `submit`."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from pipeline.cli.completion import completing, runs, settings
from pipeline.cli.help import argument, option
from pipeline.command_line import Command
from pipeline.stage_names import StageName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.config.load import LoadedConfig

ConfigFile: TypeAlias = Annotated[
    Path | None,
    option("--config FILE", "Configuration file. Default: $PIPELINE_CONFIG, pipeline.yaml or configs/pipeline.yaml."),
]
Sets: TypeAlias = Annotated[
    list[str] | None,
    option("--set KEY=VALUE", "Override a setting, such as train.epochs=3.", autocompletion=completing(settings)),
]
Yes: TypeAlias = Annotated[bool, option("--yes", "Apply the changes. Without it, the command is a dry run.")]
Json: TypeAlias = Annotated[bool, option("--json", "Print one JSON document and nothing else.")]
Verbose: TypeAlias = Annotated[bool, option("--verbose -v", "Show details that the default output leaves out.")]
Run: TypeAlias = Annotated[
    str | None,
    argument(
        "RUN", "Run: its name, a prefix of it, or its folder. Default: the newest run.", autocompletion=completing(runs)
    ),
]
Point: TypeAlias = Annotated[str | None, option("--point NAME", "Select a point of a sweep, such as seed=3.")]

STAGES = tuple(StageName)


def one_of(names: Sequence[str], name: str, help: str, **more: Any) -> Any:  # noqa: A002 - typer's word for it
    """Return an option with a fixed choice of values, which suggests the nearest where another is typed."""
    return option(f"{name} [{'|'.join(names)}]", help, **choice(names), **more)


def choice(names: Sequence[str]) -> dict[str, Any]:
    """Return the `parser` and `autocompletion` of a parameter with a fixed choice of values."""

    def parsed(text: str) -> str:
        if text in names:
            return str(text)
        near = get_close_matches(text, names, n=1)
        meant = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(names)}"
        raise typer.BadParameter(f"unknown value {text!r}: {meant}")

    return {"parser": parsed, "autocompletion": completing(lambda _ctx, _word: ((name, "") for name in names))}


StageToRun: TypeAlias = Annotated[
    str | None,
    argument("STAGE", f"Stage to run: {', '.join(STAGES)} or all. Default: all.", **choice((*STAGES, "all"))),
]
StageOption: TypeAlias = Annotated[str | None, one_of((*STAGES, "all"), "--stage", "The same as STAGE.", hidden=True)]
Where: TypeAlias = Annotated[
    str | None, one_of(("local", "slurm"), "--executor", "Where to run. Default: cluster.executor.")
]
Only: TypeAlias = Annotated[bool, option("--only", "Run this stage alone. Assume that its prerequisites are done.")]
DamageList: TypeAlias = Annotated[
    Path | None, option("--list FILE", "Rebuild only the records in this damage list. Default: all missing records.")
]
ModelName: TypeAlias = Annotated[
    str | None, option("--model NAME", "Evaluate or predict with this model: a name, folder or checkpoint.")
]
AcceptCode: TypeAlias = Annotated[
    bool, option("--accept-code", "Continue the last training although the task's code changed.")
]
Sweep: TypeAlias = Annotated[
    list[str] | None,
    option("--sweep KEY=VALUES", "Train one model per value: A,B,C, or A:B (B excluded). Several options make a grid."),
]
SweepFile: TypeAlias = Annotated[
    Path | None, option("--sweep-file FILE", "Train one model per row of a CSV or YAML file.")
]
Prune: TypeAlias = Annotated[
    str | None,
    one_of(
        ("none", "median"),
        "--prune",
        "Stop sweep points early that fall behind the median. Default: train.sweep.prune.",
    ),
]
Follow: TypeAlias = Annotated[bool, option("--follow", "Show progress until the run ends.")]
DryRun: TypeAlias = Annotated[
    bool, option("--dry-run", "Show the work and the job scripts without submitting anything.")
]
Emit: TypeAlias = Annotated[
    Path | None, option("--emit DIR", "Write the job scripts into DIR without submitting anything.")
]


def one_stage(verb: str, stage: str | None, option: str | None) -> str:
    """Return the stage that a verb is given, as STAGE or by --stage; all where it is given none."""
    if stage and option and stage != option:
        from pipeline.errors import ConfigError

        what = f"STAGE is {stage}, but --stage is {option}"
        raise ConfigError(what, where="--stage", remedy=Command.of(verb, stage))
    return stage or option or "all"


def as_typed(command: Command) -> Command:
    """Return a command with the typed --config and --set: without them it may mean another project."""
    return command.in_project(Command.typed(sys.argv[1:]))


def load_config(file: Path | None, sets: Sequence[str] | None) -> LoadedConfig:
    """Read the configuration that `--config` and `--set` name."""
    from pipeline.config.load import find_config, read_config

    return read_config(find_config(file), sets or ())


def load_config_if_any(file: Path | None, sets: Sequence[str] | None) -> LoadedConfig:
    """Read the same; where no project is here and none is named, the defaults, with a data.path that means nothing."""
    from pipeline.config.load import is_configured, read_config

    return load_config(file, sets) if is_configured(file) else read_config(None, [*(sets or ()), "data.path=."])


def print_json(document: object) -> None:
    """Print a document to stdout as JSON."""
    import json

    typer.echo(json.dumps(document, indent=2, default=str))
