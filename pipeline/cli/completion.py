"""`pipeline completion`: what a shell's TAB offers: verbs, options, stages, runs, settings, recipes, sites.

A script, made here, asks `pipeline __complete LINE`; click finds the parameter that is being typed. Typer's own scripts
are not used: theirs ends a setting with a space, and in bash it offers nothing behind `--stage=` or `cluster.site=`.
"""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Offers = Callable[[typer.Context, str], Iterable[tuple[str, str]]]

SITE = "cluster.site="


class Shell(StrEnum):
    """The shells for which there is a completion script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def shell_script(shell: str) -> str:
    """Return the completion script of a shell."""
    return Path(__file__).with_suffix(f".{shell}").read_text()


def answer(root: Any, line: str) -> Iterator[str]:
    """Yield the words that can follow on a command line, each with its meaning after a tab; none: offer files."""
    click = next(base for base in type(root).__mro__ if base.__name__ == "Command").__module__  # or typer's copy of it
    base = import_module(f"{click.rpartition('.')[0]}.shell_completion").ShellComplete
    # Our scripts speak to `answer`, not to click: the abstract methods for a shell are never called.
    completer = type("Completer", (base,), dict.fromkeys(("source_vars", "get_completion_args", "format_completion")))
    _, *before, word = _split(line)
    option, equals, _ = word.partition("=")
    typed = f"{option}=" if equals and option.startswith("-") else ""
    for item in completer(root, {}, "pipeline", "").get_completions(before, word):
        if item.type == "plain":
            yield f"{typed}{item.value}" + (f"\t{' '.join(item.help.split())}" if item.help else "")


def _split(line: str) -> list[str]:
    """Return the words of a line as a shell sees them; the last is being typed, and may be empty."""
    for quote in ("", '"', "'"):  # one may still be open
        with suppress(ValueError):
            words = shlex.split(line + quote)
            break
    else:
        words = line.split()
    is_between = not quote and line[-1:].isspace()
    return [*words, ""] if is_between or len(words) < 2 else words


def completing(offers: Offers) -> Callable[[typer.Context, str], list[tuple[str, str]]]:
    """Return typer's `autocompletion` for a parameter: the offered values that begin with what is typed."""

    def complete(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        return [(word, means) for word, means in offers(ctx, incomplete) if word.startswith(incomplete)]

    return complete


def runs(ctx: typer.Context, word: str) -> Iterator[tuple[str, str]]:
    """Yield the runs of the configuration that the line names, the newest first; paths are the shell's business."""
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
            with suppress(OSError):  # the run is offered without its command
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
    """Yield the GPUs that are known by name."""
    from pipeline.memory.hardware.gpus import known_names

    yield from ((name, "") for name in known_names())


def models(_ctx: typer.Context, _word: str) -> Iterator[tuple[str, str]]:
    """Yield the published encoders."""
    from pipeline.encoder.checkpoint_files import MODELS

    yield from ((model.name, f"{model.layers} layers, width {model.dim:,}") for model in MODELS)
