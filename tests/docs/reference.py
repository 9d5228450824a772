"""The pages under docs/reference, written from the schema, the command line, the errors and the names of files.

`python -m tests.docs.reference` writes them; a test asks whether they are what the code says.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_origin

import typer

from pipeline import errors
from pipeline.cli.help import COMMON, panels
from pipeline.cli.main import app
from pipeline.config.schema import SECTIONS, Config
from pipeline.config.schema_parts import Section
from pipeline.errors import PipelineError
from pipeline.journal.run_folder import RunFolder
from pipeline.records import Reason
from pipeline.training.loop.metrics_log import EPOCHS, FIGURES
from pipeline.training.prepared import ModelFolder

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
MADE = "<!-- written by `python -m tests.docs.reference`: change the code, not this page -->\n"
BAR = "\\|"  # in a table
SIZE, TIME = "a size (512MiB, 24G)", "a time (90m, 2h, 1-12:00:00)"
DEFINITIONS: dict[str, Any] = Config.model_json_schema()["$defs"]
EXITS = {
    0: "done, or nothing to do",
    1: "report it with the output of `--debug`",
    2: "correct the file and line that the message names",
    3: "`pipeline status` shows the reasons; `rejected.jsonl` in the run's folder lists rejected items",
    4: "damaged records are never used and count as missing: `pipeline cache repair`",
    5: "the plan names the item and what would make it fit",
    6: "the message quotes the scheduler and names the setting to change",
    7: "the message names task, cause and log (`pipeline logs --failed`); finished work is kept: submit again",
}

LOGS = {
    EPOCHS: "one line per epoch: losses, metrics, memory and times",
    FIGURES: "one line per logged step",
}


def pages() -> dict[str, str]:
    """Return each page by its name."""
    return {"configuration.md": configuration(), "commands.md": commands(), "files.md": files()}


# Configuration


def configuration() -> str:
    """Return the page of all settings."""
    lines = [
        MADE,
        "# Every setting\n",
        "`pipeline config show` prints the value of each setting and where it comes from. `pipeline config check` finds"
        " mistakes and their lines. The configuration is `--config FILE`, else `$PIPELINE_CONFIG`, `./pipeline.yaml`,"
        " or `./configs/pipeline.yaml`. `--set section.key=value` overrides it. Units of sizes are powers of 1024."
        " Relative paths start from the folder of the file.\n",
    ]
    for names, model in sections():
        level = "#" * (2 + min(name.count(".") for name in names))
        lines += [f"{level} {', '.join(names)}\n", f"{first_line(model)}\n"]
        lines += table(model, names[0])
    return "\n".join(lines)


def sections() -> Iterator[tuple[list[str], type[Section]]]:
    """Yield each kind of section with the places where it stands; a list's entries stand behind the list."""
    places: dict[type[Section], list[str]] = {}
    for key in SECTIONS:
        places.setdefault(SECTIONS[key].annotation, []).append(".".join(key))  # type: ignore[arg-type]
        for name, info in SECTIONS[key].annotation.model_fields.items():  # type: ignore[union-attr]
            for part in getattr(info.annotation, "__args__", ()):
                if inspect.isclass(part) and issubclass(part, Section):
                    entry = ".NAME" if get_origin(info.annotation) is dict else "[]"
                    places.setdefault(part, []).append(f"{'.'.join((*key, name))}{entry}")
    for model, names in places.items():
        yield names, model


def table(model: type[Section], name: str) -> list[str]:
    """Return the settings of a section as rows."""
    own = DEFINITIONS[model.__name__]
    rows = []
    for field, schema in own["properties"].items():
        if (*name.split("."), field) in SECTIONS:
            continue
        default = "*required*" if field in own.get("required", ()) else code(shown(schema, model, field))
        rows.append(f"| `{field}` | {kind(schema)} | {default} | {cell(schema.get('description', ''))} |")
    return ["| setting | type | default | meaning |", "|---|---|---|---|", *rows, ""] if rows else []


def kind(schema: dict[str, Any]) -> str:
    """Return a type as people say it."""
    if "anyOf" in schema:
        ways = list(dict.fromkeys(kind(choice) for choice in schema["anyOf"]))
        if SIZE in ways:  # also as a number of bytes
            ways = [way for way in ways if not way.startswith("whole number")]
        return " or ".join(ways)
    if "enum" in schema:
        return ", ".join(code(choice) for choice in schema["enum"])
    if "const" in schema:
        return code(schema["const"])
    if "$ref" in schema:
        return "an entry, see below"
    match schema.get("type"):
        case "array":
            return f"list of: {kind(schema['items'])}" if "items" in schema else "list"
        case "object":
            return "values by name"
        case "string" if "pattern" in schema:
            return SIZE if "KMGT" in schema["pattern"] else TIME if "smhd" in schema["pattern"] else "text"
        case "string":
            return "path" if schema.get("format") == "path" else "text"
        case "integer" | "number" as number:
            return ("whole number" if number == "integer" else "number") + bounds(schema)
        case "boolean":
            return "`true`, `false`"
    return "null" if schema.get("type") == "null" else "any value"


def bounds(schema: dict[str, Any]) -> str:
    """Return the least and the largest value."""
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[name]:g}" for name, sign in signs.items() if name in schema]
    return f" {', '.join(limits)}" if limits else ""


def shown(schema: dict[str, Any], model: type[Section], field: str) -> Any:
    """Return a default as people write it."""
    default = schema.get("default")
    if isinstance(default, int) and not isinstance(default, bool):
        filled = {name: "." for name in DEFINITIONS[model.__name__].get("required", ()) if name == "path"}
        if not set(DEFINITIONS[model.__name__].get("required", ())) - set(filled):
            return model.model_validate_json(_json(filled)).model_dump(mode="json")[field]
    return default


def _json(plain: dict[str, Any]) -> str:
    return "{" + ", ".join(f'"{name}": "{value}"' for name, value in plain.items()) + "}"


def code(value: Any) -> str:
    """Return a value as code, as YAML has it."""
    names = {True: "true", False: "false", None: "null"}
    if isinstance(value, list):
        return f"`[{', '.join(map(str, value[:2]))}{', …' if len(value) > 2 else ''}]`"
    return f"`{names[value] if value is None or isinstance(value, bool) else value}`"


def cell(text: str) -> str:
    """Return a text that may stand in a table."""
    return text.replace("|", BAR).replace("<", "&lt;")


def first_line(documented: Any) -> str:
    """Return the first line of a docstring."""
    return (inspect.getdoc(documented) or "").partition("\n")[0]


# Commands


def commands() -> str:
    """Return the page of all commands."""
    root: Any = typer.main.get_command(app)
    with typer.Context(root) as context:
        rows = panels(root.commands["status"], context)[COMMON]
    lines = [
        MADE,
        "# Every command\n",
        "Common options, which most commands have:\n",
        "| option | meaning |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in rows]
    lines += ["", "Progress and logs go to stderr.\n"]
    for name, command in walk("pipeline", root):
        lines += [f"## {name}\n", *described(command)]
    lines += ["## Exit codes\n", "| code | meaning | errors | what to do |", "|---|---|---|---|"]
    for number, advice in EXITS.items():
        classes = [error for error in family(PipelineError) if error.exit_code == number]
        meaning = "ok" if number == 0 else first_line(min(classes, key=lambda error: len(error.__mro__))).rstrip(".")
        meaning = "a bug in pipeline" if number == 1 else meaning
        lines.append(f"| {number} | {meaning} | {', '.join(f'`{error.__name__}`' for error in classes)} | {advice} |")
    lines += [
        "",
        "130: interrupted (Ctrl-C); 141: no process read the output (`| head`). An error says what happened, "
        "where, and the next command to type.\n",
    ]
    return "\n".join(lines)


def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield every command with what is typed for it, without old names; the commands of a group follow the group."""
    if command.hidden:
        return
    yield name, command
    for word, inner in getattr(command, "commands", {}).items():
        yield from walk(f"{name} {word}", inner)


def described(command: Any) -> Iterator[str]:
    """Yield what a command does, and a table of its options."""
    yield re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(command.help or "")).strip() + "\n"
    with typer.Context(command) as context:
        found = panels(command, context)
    common = [name for name, _ in found.pop(COMMON) if "--help" not in name]
    for panel, rows in found.items():
        if rows:
            yield from (f"| {panel.lower()} | |", "|---|---|")
            yield from (f"| `{name.replace('|', BAR)}` | {cell(meaning)} |" for name, meaning in rows)
            yield ""
    if common:
        yield f"Common options: {', '.join(f'`{name}`' for name in common)}\n"
    if command.epilog and command.epilog.startswith("pipeline "):
        yield f"<!-- not run: examples of the help -->\n```sh\n{command.epilog}\n```\n"


def family(error: type[PipelineError]) -> Iterator[type[PipelineError]]:
    """Yield an error class and its subclasses."""
    yield error
    for child in error.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from family(child)


# Files


def files() -> str:
    """Return the page of the files of a project."""
    lines = [MADE, "# The files of a run and of a training\n"]
    lines += ["## A run\n", "`cluster.runs` has one folder per run. `pipeline status` reads it.\n"]
    lines += file_rows(RunFolder, stage_files())
    lines += ["## A training\n", "`train.models` has one folder per recipe.\n"]
    lines += file_rows(ModelFolder, LOGS.items())
    lines += ["## Why an item was rejected\n", "Values of `reason` in `rejected.jsonl`:\n"]
    lines += [", ".join(f"`{reason.value}`" for reason in Reason), ""]
    return "\n".join(lines)


def stage_files() -> Iterator[tuple[str, str]]:
    """Yield the files of which a run has one for a stage, with what they are."""
    run = RunFolder(Path("run"))
    for method in filter(inspect.isfunction, vars(RunFolder).values()):
        wanted = list(inspect.signature(method).parameters)
        if "stage" in wanted:
            values = {name: "STAGE" if name == "stage" else 0 for name in wanted if name != "self"}
            meaning = first_line(method).removeprefix("Return ").rstrip(".")
            yield str(method(run, **values).relative_to(run.path)), meaning


def file_rows(folder: type, others: Iterable[tuple[str, str]] = ()) -> list[str]:
    """Return a table of the names that a class of paths gives its files, with the comment behind each name."""
    names = [*re.findall(r'(?:_RunFile\(|= path / )"([^"]+)"\)?  # (.+)', inspect.getsource(folder)), *others]
    rows = [f"| `{name}` | {cell(meaning[0].upper() + meaning[1:])}. |" for name, meaning in names]
    return ["| file | meaning |", "|---|---|", *sorted(rows), ""]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for page, text in pages().items():
        (FOLDER / page).write_text(text)
