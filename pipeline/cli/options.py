"""Options that several commands share, their shell completion, and the printing of results.

`pipeline completion` prints a script that calls `pipeline __complete LINE`; click finds the parameter that is being
typed. Typer's scripts are not used: they add a space after a setting, and in bash they complete nothing after
`--stage=` or `cluster.site=`.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeAlias

import typer

from pipeline.cli.help import argument, option
from pipeline.command_line import Command
from pipeline.config.masking import without_secrets
from pipeline.stage_names import StageName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.console import RenderableType

    from pipeline.config.load import LoadedConfig
    from pipeline.project.project import Project

    Offers = Callable[[typer.Context, str], Iterable[tuple[str, str]]]

SITE = "cluster.site="
SHELLS = ("bash", "zsh", "fish")  # shells with a completion script


def shell_script(shell: str) -> str:
    """Return the completion script of a shell."""
    return Path(__file__).with_name(f"completion.{shell}").read_text()


def answer(root: Any, line: str) -> Iterator[str]:
    """Yield the words that can follow on a command line, each with its meaning after a tab; none: offer files."""
    click = next(base for base in type(root).__mro__ if base.__name__ == "Command").__module__  # or typer's copy
    completion = import_module(f"{click.rpartition('.')[0]}.shell_completion")
    # Our scripts call `answer`, not click: click's abstract methods for a shell are never called.
    unused = dict.fromkeys(("source_vars", "get_completion_args", "format_completion"))
    completer = type("Completer", (completion.ShellComplete,), unused)
    words = completion.split_arg_string(line)  # its quotes may still be open
    _, *before, word = [*words, ""] if line[-1:].isspace() or len(words) < 2 else words
    option, equals, _ = word.partition("=")
    typed = f"{option}=" if equals and option.startswith("-") else ""
    for item in completer(root, {}, "pipeline", "").get_completions(before, word):
        if item.type == "plain":
            yield f"{typed}{item.value}" + (f"\t{' '.join(item.help.split())}" if item.help else "")


def completing(offers: Offers) -> Callable[[typer.Context, str], list[tuple[str, str]]]:
    """Return typer's `autocompletion` for a parameter: the values with the typed prefix."""

    def complete(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        return [(word, means) for word, means in offers(ctx, incomplete) if word.startswith(incomplete)]

    return complete


def runs(ctx: typer.Context, word: str) -> Iterator[tuple[str, str]]:
    """Yield the runs of the line's configuration, the newest first; the shell completes paths."""
    from pipeline.config.load import find_config, read_config
    from pipeline.errors import PipelineError
    from pipeline.journal.run_folder import runs_in

    if os.sep in word:
        return
    file = ctx.params.get("config")
    with suppress(PipelineError):
        config = read_config(find_config(file and file.expanduser()), ctx.params.get("sets") or ()).config
        for folder in reversed(runs_in(config.cluster.runs)):
            typed = ""
            with suppress(OSError):  # offer the run without its command
                typed = folder.again.read_text()
            yield folder.name, typed


def settings(_ctx: typer.Context, word: str) -> Iterator[tuple[str, str]]:
    """Yield the keys for `--set`; for `cluster.site=`, the shipped profiles."""
    from pipeline.config.schema import LEAVES

    if word.startswith(SITE):
        yield from ((f"{SITE}{path.stem}", "") for path in _shipped("configs/sites"))
    else:
        yield from ((f"{'.'.join(key)}=", info.description or "") for key, info in LEAVES.items())


def recipes(_ctx: typer.Context, _word: str) -> Iterator[tuple[str, str]]:
    """Yield the recipes for `pipeline init`."""
    yield from ((path.stem, "") for path in _shipped("configs/recipes"))


def _shipped(folder: str) -> list[Path]:
    from pipeline.files import shipped

    return sorted(shipped(folder).glob("*.yaml"))


def gpus(_ctx: typer.Context, _word: str) -> Iterator[tuple[str, str]]:
    """Yield the known GPUs."""
    from pipeline.memory.hardware.gpus import known_names

    yield from ((name, "") for name in known_names())


def models(_ctx: typer.Context, _word: str) -> Iterator[tuple[str, str]]:
    """Yield the published encoders."""
    from pipeline.encoder.checkpoint_files import MODELS

    yield from ((model.name, f"{model.layers} layers, width {model.dim:,}") for model in MODELS)


ConfigFile: TypeAlias = Annotated[
    Path | None,
    option(
        "--config FILE",
        "Configuration file or project folder. Default: $PIPELINE_CONFIG, pipeline.yaml or configs/pipeline.yaml.",
    ),
]
Sets: TypeAlias = Annotated[
    list[str] | None,
    option("--set KEY=VALUE", "Override a setting, such as train.epochs=3.", autocompletion=completing(settings)),
]
Yes: TypeAlias = Annotated[bool, option("--yes/--dry-run", "Apply the changes. Default: a dry run.")]
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
    """Return an option with a fixed choice of values; a wrong value gets the nearest as a suggestion."""
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
    str | None, one_of(("local", "slurm", "allocation"), "--executor", "Where to run. Default: cluster.executor.")
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
    """Return the stage given as STAGE or by --stage. Default: all."""
    if stage and option and stage != option:
        refuse(f"STAGE is {stage}, but --stage is {option}", "--stage", Command.of(verb, stage))
    return stage or option or "all"


def refuse(problem: str, where: object, remedy: str | Command) -> NoReturn:
    """Raise for conflicting options or an unusable value; `instead` is what to type."""
    from pipeline.errors import ConfigError

    raise ConfigError(problem, where=str(where), remedy=remedy)


def as_typed(command: Command) -> Command:
    """Return a command with the typed --config and --set, so that it means the same project."""
    return command.in_project(Command.typed(sys.argv[1:]))


def load_config(file: Path | None, sets: Sequence[str] | None) -> LoadedConfig:
    """Read the configuration that `--config` and `--set` name."""
    from pipeline.config.load import find_config, read_config

    return read_config(find_config(file), sets or ())


def load_config_if_any(file: Path | None, sets: Sequence[str] | None) -> LoadedConfig:
    """Read the configuration; without a project, return the defaults with a placeholder as data.path."""
    from pipeline.config.load import is_configured, read_config

    return load_config(file, sets) if is_configured(file) else read_config(None, [*(sets or ()), "data.path=."])


def open_project(file: Path | None, sets: Sequence[str] | None, **how: Any) -> tuple[LoadedConfig, Project]:
    """Read the configuration and open its project; `how` has the options of `Project.open`."""
    from pipeline.project.project import Project

    loaded = load_config(file, sets)
    return loaded, Project.open(loaded.config, beside=loaded.base_dir.absolute(), **how)


def print_json(document: object) -> None:
    """Print a document to stdout as JSON."""
    import json

    typer.echo(json.dumps(document, indent=2, default=str))


def show(document: Callable[[], object], text: Callable[[], Iterable[RenderableType]], *, as_json: bool) -> None:
    """Print a result as JSON or text."""
    if as_json:
        print_json(document())
        return
    from pipeline.report.tables import show_parts

    show_parts(*text())


def show_dry_run(undone: str, again: str, *words: object) -> None:
    """Print that this was a dry run, and the command that does the work."""
    typer.echo(f"dry run: nothing {undone}; to apply: {as_typed(Command.of(again, *words, '--yes'))}")


class MaskedLines(logging.Formatter):
    """Masks secrets in log lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a log record."""
        return without_secrets(super().format(record))


def show_log(*, debug: bool) -> None:
    """Log warnings to stderr; with `debug`, everything."""
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(MaskedLines("%(levelname)s: %(message)s"))
