"""Formats help: panels of commands and options, whole summaries, examples line by line."""

from __future__ import annotations

import os
import re
from collections import UserDict
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from typer.models import CommandFunctionType

ARGUMENTS, OPTIONS, COMMANDS, EXAMPLES, COMMON = "Arguments", "Options", "Commands", "Examples", "Common options"
START, RUN, RESULTS, DATA, SHORTCUTS, DEBUG = "Start", "Run", "Results", "Data and cache", "Shortcuts", "Debug"
OF_MOST = ("config", "sets", "as_json", "_version", "debug", "help")
ORDER = (ARGUMENTS, OPTIONS, COMMANDS, START, RUN, RESULTS, DATA, SHORTCUTS, DEBUG, COMMON)


def option(names: str, help: str, **more: Any) -> Any:  # noqa: A002 - typer's word for it
    """Return an option by its names and the kind of its value: `--out FILE`, `-f --follow`."""
    words = names.split()
    flags = [word for word in words if word.startswith("-")]
    return typer.Option(*flags, metavar=" ".join(words[len(flags) :]) or None, help=help, **more)


def argument(name: str, help: str, **more: Any) -> Any:  # noqa: A002
    """Return an argument by the name that help shows."""
    return typer.Argument(metavar=name, help=help, **more)


def panels(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Return the options and arguments of a command by panel heading, as (name, meaning)."""
    found: dict[str, list[tuple[str, str]]] = {panel: [] for panel in ORDER}
    for panel, name, meaning in (*_parameters(command, ctx), *_commands(command)):
        found[panel].append((name, meaning))
    return {panel: rows for panel, rows in found.items() if rows}


def _parameters(command: Any, ctx: Any) -> Iterator[tuple[str, str, str]]:
    for param in command.get_params(ctx):
        if (record := param.get_help_record(ctx)) is None:
            continue
        is_option, meaning = param.param_type_name == "option", [param.help or ""]
        if param.required and is_option:
            meaning.append("Required.")
        elif param.default is not None and not getattr(param, "is_flag", False) and "Default:" not in meaning[0]:
            meaning.append(f"Default: {param.default}.")
        if getattr(param, "multiple", False):
            meaning.append("Repeatable.")
        panel = COMMON if param.name in OF_MOST else OPTIONS if is_option else ARGUMENTS
        name = re.sub("<(int|float)( range)?>", "N", record[0]) if is_option else record[0].partition(" ")[0]
        yield panel, name, " ".join(meaning)


def _commands(group: Any) -> Iterator[tuple[str, str, str]]:
    commands = getattr(group, "commands", {})
    for name, command in getattr(commands, "data", commands).items():
        if not command.hidden:
            yield command.rich_help_panel or COMMANDS, name, command.help.partition("\n")[0]


class _Panels:
    """Formats help by panels; the examples of a docstring come last."""

    epilog: str | None

    def __init__(self, *args: Any, help: str | None = None, epilog: str | None = None, **more: Any) -> None:  # noqa: A002
        text, _, examples = (help or "").partition("\n\nExamples:\n")
        super().__init__(*args, help=text, epilog=examples or epilog, **more)  # type: ignore[call-arg]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write each panel below its heading, which is bold on a terminal."""
        for panel, rows in panels(self, ctx).items():
            with formatter.section(_heading(panel)):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write examples line by line; the exit codes are a text."""
        if self.epilog and self.epilog.startswith("pipeline "):
            with formatter.section(_heading(EXAMPLES)):
                formatter.write("".join(f"  {line}\n" for line in self.epilog.splitlines()))
        else:
            super().format_epilog(ctx, formatter)  # type: ignore[misc]  # of the command


def _heading(text: str) -> str:
    return text if "NO_COLOR" in os.environ else typer.style(text, bold=True)


class Verb(_Panels, TyperCommand):
    """A command."""


class _Group(_Panels, TyperGroup):
    """A group of commands."""


class Verbs(typer.Typer):
    """The commands of a group, or all."""

    def __init__(self, help: str, **more: Any) -> None:  # noqa: A002 - typer's word for it
        more = {"cls": _Group, "add_completion": False, **more}
        super().__init__(help=help, no_args_is_help=True, rich_markup_mode=None, **more)

    def command(  # type: ignore[override]
        self, name: str, *, cls: type[TyperCommand] = Verb, **more: Any
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Add a command."""
        return super().command(name, cls=cls, **more)


@dataclass(frozen=True)
class Later:
    """A command imported on first use: its place as `module:name`, summary and panel."""

    place: str
    help: str = ""
    rich_help_panel: str = ""

    @property
    def hidden(self) -> bool:
        """Whether help omits it."""
        return not self.help

    def imported(self, name: str) -> Any:
        """Import and return the command, named `name`."""
        module, _, attribute = self.place.partition(":")
        found = getattr(import_module(f"pipeline.cli.{module}"), attribute)
        command = get_group(found) if isinstance(found, Verbs) else found
        command = command if isinstance(command, TyperCommand | TyperGroup) else alone(name, command)
        command.name, command.hidden, command.rich_help_panel = name, self.hidden, self.rich_help_panel
        return command


def alone(name: str, function: Callable[..., None], cls: type[TyperCommand] = Verb) -> Any:
    """Turn a function into a standalone command."""
    verbs = Verbs("")
    verbs.command(name, cls=cls)(function)
    return get_command(verbs)


class LaterVerbs(_Group):
    """A group of commands that are imported on use."""

    later: ClassVar[Mapping[str, Later]]

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.commands = _Imported(self.later)


class _Imported(UserDict[str, Any]):
    """Commands by name, each imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        if isinstance(found := self.data[name], Later):
            found = self.data[name] = found.imported(name)
        return found
