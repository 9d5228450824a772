"""`pipeline completion`: what a shell's TAB offers: verbs, options, stages, runs, settings, recipes, sites.

A script, made here, asks `pipeline __complete LINE`, which walks the same commands as the parser does and answers with
lines of a word and what it means. No answer: the shell offers files.
"""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.options import name_parser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pipeline.journal.run_folder import RunFolder

ASKED = "__complete"  # the word by which a shell's script asks
SITE = "cluster.site="

BASH = r"""_pipeline() {
    local line=${COMP_LINE:0:COMP_POINT} IFS=$'\n'
    local word=${line##*[[:space:]]}
    local kept=${word%"${word##*[=:]}"}   # readline goes on behind these
    COMPREPLY=( $("$1" __complete "$line" 2>/dev/null | cut -f 1) )
    COMPREPLY=( "${COMPREPLY[@]#"$kept"}" )
    if [[ ${#COMPREPLY[@]} -eq 1 && $COMPREPLY == *= ]]; then compopt -o nospace; fi
}
complete -o default -F _pipeline pipeline
"""
ZSH = r"""#compdef pipeline
_pipeline() {
    local -a found ends
    found=("${(@f)$(${(Q)words[1]} __complete "${(j: :)words[1,CURRENT]}" 2>/dev/null)}")
    if [[ -z "$found" ]]; then _files; return; fi
    [[ $#found -eq 1 && ${found[1]%%$'\t'*} == *= ]] && ends=(-S '')
    found=("${(@)found//:/\\:}")
    found=("${(@)found/$'\t'/:}")
    _describe pipeline found "${ends[@]}"
}
compdef _pipeline pipeline
"""
FISH = """function __pipeline_complete
    pipeline __complete (commandline -cp) 2>/dev/null
end
complete -c pipeline -f -n 'count (__pipeline_complete) >/dev/null' -a '(__pipeline_complete)'
"""


class Shell(str, Enum):
    """What can be told how to complete."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


SCRIPTS = {Shell.BASH: BASH, Shell.ZSH: ZSH, Shell.FISH: FISH}


_parser, _shells = name_parser(Shell)
_Shell = Annotated[Shell, typer.Argument(parser=_parser, metavar="|".join(_shells), help="Your shell.")]


def completion_command(shell: _Shell) -> None:
    """Print what lets your shell complete commands: source <(pipeline completion bash), in ~/.bashrc.

    zsh: the same in ~/.zshrc, below compinit. fish: pipeline completion fish | source
    """
    typer.echo(SCRIPTS[shell], nl=False)


def answer(root: Any, line: str) -> Iterator[str]:
    """Yield the lines that answer what can follow on a command line: a word, and after a tab what it means."""
    words = _split(line)
    for word, means in candidates(root, words[1:-1], words[-1]):
        yield f"{word}\t{' '.join(means.split())}" if means else word


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


def candidates(root: Any, before: Sequence[str], word: str) -> Iterator[tuple[str, str]]:
    """Yield what can stand where `word` is being typed, after other words, with what it means."""
    command, given, waits_for = _parsed(root, before)
    if waits_for is not None:
        yield from _values(waits_for, word, given)
        return
    name, equals, value = word.partition("=")
    if equals and name.startswith("-"):
        for option in command.params:
            if name in getattr(option, "opts", ()):
                yield from ((f"{name}={one}", means) for one, means in _values(option, value, given))
    elif word.startswith("-"):
        yield from ((one, means) for one, means in _options(command, before) if one.startswith(word))
    elif commands := getattr(command, "commands", None):
        short = ((one, found.get_short_help_str(60)) for one, found in commands.items() if not found.hidden)
        yield from ((one, means) for one, means in short if one.startswith(word))
    else:
        for argument in command.params:
            if argument.param_type_name == "argument":
                yield from _values(argument, word, given)
                return


def _parsed(root: Any, words: Sequence[str]) -> tuple[Any, list[tuple[str, str]], Any]:
    """Return the command that words lead to, its options with their values, and the option whose value is missing."""
    command, given, waits_for = root, list[tuple[str, str]](), None
    for word in words:
        if waits_for is not None:
            given.append((waits_for.name, word))
            waits_for = None
        elif word.startswith("-"):
            name, equals, value = word.partition("=")
            option = next((one for one in command.params if name in one.opts), None)
            takes = option is not None and option.param_type_name == "option" and not option.is_flag
            if option is not None and takes and equals:
                given.append((option.name, value))
            elif takes:
                waits_for = option
        else:
            command = getattr(command, "commands", {}).get(word, command)
    return command, given, waits_for


def _options(command: Any, before: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options of a command that were not given yet, or may be given again."""
    for option in command.params:
        is_new = option.param_type_name == "option" and (option.multiple or not {*option.opts} & {*before})
        if is_new and not option.hidden:
            yield option.opts[-1] if option.opts[-1].startswith("--") else option.opts[0], option.help or ""
    yield "--help", "Show this message and exit."


def _values(param: Any, word: str, given: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the values that a parameter can have."""
    found = VALUES[param.name](given, word) if param.name in VALUES else ((one, "") for one in _choices(param))
    yield from ((one, means) for one, means in found if one.startswith(word))


def _choices(param: Any) -> list[str]:
    """Return the values of a parameter that has only some: its metavar names them."""
    names = (param.metavar or "").strip("[]").split("|")
    return names if len(names) > 1 else []


def _runs(given: Sequence[tuple[str, str]], word: str) -> Iterator[tuple[str, str]]:
    """Yield the runs of the configuration that the line names, the newest first; paths are the shell's business."""
    from pipeline.cli.options import load_config
    from pipeline.errors import PipelineError
    from pipeline.journal.run_folder import runs_in

    if os.sep in word:
        return
    file = next((Path(value).expanduser() for name, value in given if name == "config"), None)
    with suppress(PipelineError):
        runs = load_config(file, [value for name, value in given if name == "sets"]).config.cluster.runs
        for folder in reversed(runs_in(runs)):
            yield folder.name, _typed(folder)


def _typed(folder: RunFolder) -> str:
    """Return the command that began a run; empty where it is gone."""
    try:
        return folder.again.read_text()
    except OSError:
        return ""


def _recipes(_given: Sequence[tuple[str, str]], _word: str) -> Iterator[tuple[str, str]]:
    yield from ((path.stem, "") for path in _shipped("configs/recipes"))


def _settings(_given: Sequence[tuple[str, str]], word: str) -> Iterator[tuple[str, str]]:
    """Yield the settings that can be overridden; of the cluster's profile, its names."""
    from pipeline.config.load import json_schema

    if word.startswith(SITE):
        yield from ((f"{SITE}{path.stem}", "") for path in _shipped("configs/sites"))
        return
    schema = json_schema()
    yield from ((f"{key}=", means) for key, means in _keys(schema, schema))


def _keys(schema: dict[str, Any], within: dict[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted names of a schema's values, with what they mean."""
    for name, one in within.get("properties", {}).items():
        section = schema["$defs"].get(one.get("$ref", "").rpartition("/")[2])
        if section and "properties" in section:
            yield from _keys(schema, section, f"{before}{name}.")
        else:
            yield f"{before}{name}", one.get("description", "")


def _shipped(folder: str) -> list[Path]:
    from pipeline.config.site_profiles import shipped

    return sorted(shipped(folder).glob("*.yaml"))


def _gpus(_given: Sequence[tuple[str, str]], _word: str) -> Iterator[tuple[str, str]]:
    from pipeline.memory.hardware.gpus import known_names

    yield from ((name, "") for name in known_names())


def _models(_given: Sequence[tuple[str, str]], _word: str) -> Iterator[tuple[str, str]]:
    from pipeline.encoder.checkpoints.checkpoint_files import MODELS

    yield from ((one.name, f"{one.layers} layers, width {one.dim:,}") for one in MODELS)


VALUES: dict[str, Callable[[Sequence[tuple[str, str]], str], Iterator[tuple[str, str]]]] = {
    "run": _runs,
    "recipe": _recipes,
    "sets": _settings,
    "gpu": _gpus,
    "name": _models,
}
