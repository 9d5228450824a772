"""Options that several verbs share, and the many of `submit`."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from pipeline.cli.completion import completing, runs, settings
from pipeline.command_line import Command
from pipeline.stage_names import StageName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.config.load import LoadedConfig

ConfigFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Default: $PIPELINE_CONFIG, pipeline.yaml, configs/pipeline.yaml."),
]
Sets: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        autocompletion=completing(settings),
        help="Override a configured value; may be given several times.",
    ),
]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", help="Do it; without it, only show what would be done.")]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Verbose: TypeAlias = Annotated[bool, typer.Option("--verbose", "-v", help="Show every detail, not only the answer.")]
Run: TypeAlias = Annotated[
    str | None,
    typer.Argument(metavar="RUN", autocompletion=completing(runs), help="Name of a run (default: the newest)."),
]

Point: TypeAlias = Annotated[
    str | None, typer.Option("--point", metavar="NAME", help="Of this point of a sweep: seed=3, or more of its name.")
]

STAGES = tuple(StageName)


def one_of(names: Sequence[str], option: str, help: str, **more: Any) -> Any:  # noqa: A002 - typer's word for it
    """Return an option with a fixed choice of values, which suggests the nearest where another is typed."""
    return typer.Option(option, metavar=f"[{'|'.join(names)}]", help=help, **choice(names), **more)


def choice(names: Sequence[str]) -> dict[str, Any]:
    """Return the `parser` and `autocompletion` of a parameter with a fixed choice of values."""

    def parsed(text: str) -> str:
        if text in names:
            return str(text)
        near = get_close_matches(text, names, n=1)
        meant = f"did you mean {near[0]}?" if near else f"it is one of {', '.join(names)}"
        raise typer.BadParameter(f"there is no {text!r}: {meant}")

    return {"parser": parsed, "autocompletion": completing(lambda _ctx, _word: ((name, "") for name in names))}


StageToRun: TypeAlias = Annotated[
    str | None,
    typer.Argument(metavar="STAGE", help=f"{', '.join(STAGES)} or all. Default: all.", **choice((*STAGES, "all"))),
]
StageOption: TypeAlias = Annotated[str | None, one_of((*STAGES, "all"), "--stage", "The same as STAGE.", hidden=True)]
Where: TypeAlias = Annotated[
    str | None, one_of(("local", "slurm"), "--executor", "Where to run it; by default as cluster.executor says.")
]
Only: TypeAlias = Annotated[bool, typer.Option("--only", help="Run that stage only; the stages it needs are done.")]
DamageList: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--list", metavar="FILE", help="Regenerate what this damage list calls lost; by default all that is missing."
    ),
]
ModelName: TypeAlias = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="Evaluate or predict with this model, folder or checkpoint."),
]
AcceptCode: TypeAlias = Annotated[
    bool, typer.Option("--accept-code", help="Go on with the last training though the task's code changed.")
]
Sweep: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="KEY=VALUES",
        help="Train a model for each value: A,B,C or A:B, which leaves B out; several make a grid.",
    ),
]
SweepFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--sweep-file", metavar="FILE", help="Train a model for each row: CSV with a header, or YAML."),
]
Prune: TypeAlias = Annotated[
    str | None, one_of(("none", "median"), "--prune", "End those of a sweep early that fall behind the median.")
]
Follow: TypeAlias = Annotated[bool, typer.Option("--follow", help="Stay and show progress until the run has ended.")]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be done, with the job scripts, and do nothing.")
]
Emit: TypeAlias = Annotated[
    Path | None, typer.Option("--emit", metavar="DIR", help="Write the job scripts into DIR, and do nothing else.")
]
JsonPlan: TypeAlias = Annotated[
    bool, typer.Option("--json", help="With --dry-run: one JSON document and nothing else.")
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
