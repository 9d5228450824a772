"""`pipeline explain` and `plan --dag`: how each stage stands, of the whole data set or of one item, and why."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.help import Verb, argument, option
from pipeline.cli.options import ConfigFile, Json, Sets, as_typed, choice, load_config, one_of, print_json
from pipeline.command_line import Command
from pipeline.stage_names import StageName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from pipeline.project.project import Project
    from pipeline.views.stage_states import StageBox

OPTION, TEXT = "--dag", "text"
KEY_DIGITS = 16  # the first 8 are those of all records of a recipe
GRAPH_FORMS = (TEXT, "mermaid", "dot")
GraphForm = Annotated[
    str | None,
    option(
        f"{OPTION} [={'|'.join(GRAPH_FORMS)}]",
        "Draw the graph of stages with their states and reasons. Default form: text.",
        **choice(GRAPH_FORMS),
    ),
]


class WithGraph(Verb):
    """A command whose `--dag` needs no value; `--graph` is an old name of it."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Let `--dag` alone mean `--dag=text`."""
        args = [re.sub("^--graph(?=$|=)", OPTION, word) for word in args]
        followed = zip(args, [*args, ""][1:], strict=True)
        bare = [word == OPTION and after not in GRAPH_FORMS for word, after in followed]
        return super().parse_args(ctx, [f"{OPTION}={TEXT}" if b else word for word, b in zip(args, bare, strict=True)])


def show_graph(stage: str, project: Project, form: str, *, as_json: bool) -> None:
    """Print the graph of a stage and those it needs, or of all."""
    from pipeline.report import tables
    from pipeline.stages.table import up_to
    from pipeline.views.stage_states import arrows, as_dot, as_mermaid, stage_boxes

    boxes = stage_boxes(project, up_to(stage, project.config))
    if as_json:
        print_json({"stages": [box.to_json() for box in boxes], "arrows": arrows(boxes)})
    elif form == TEXT:
        tables.show_parts(*_graph_text(boxes))
    else:
        typer.echo(as_mermaid(boxes) if form == "mermaid" else as_dot(boxes))


def _graph_text(boxes: Sequence[StageBox]) -> list[RenderableType]:
    """Return a graph as text: names and arrows, then a row for each stage."""
    from pipeline.report.tables import text_table
    from pipeline.views.stage_states import graph_lines

    rows = [(box.name, box.state, box.counts, box.why) for box in boxes]
    return ["\n".join(graph_lines(boxes)), "", text_table(("STAGE", "STATE", "WORK", "WHY"), rows)]


def explain_command(
    item: Annotated[str | None, argument("ITEM", "Item id.")] = None,
    stage: Annotated[
        str | None,
        one_of(
            tuple(StageName),
            "--stage",
            "Explain this stage. For train: what differs from the most similar earlier model.",
        ),
    ] = None,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Explain why an item or a stage is missing, rebuilt or waiting.

    Examples:
    pipeline explain 1abc                   # one item, in every stage
    pipeline explain --stage train          # why a training starts from scratch
    """
    from pipeline.errors import ConfigError
    from pipeline.project.project import Project

    if (item is None) == (stage is None):
        what = "name an item or --stage STAGE" + (", not both" if item else "")
        remedy = Command.of("explain ITEM", then="   or   pipeline explain --stage train")
        raise ConfigError(what, where="pipeline explain", remedy=remedy)
    loaded = load_config(config, sets)
    project = Project.open(loaded.config, remember=False, beside=loaded.base_dir.absolute())
    if item is not None:
        _show_item(project, item, as_json=as_json)
    else:
        _show_stage(project, str(stage), as_json=as_json)


def _show_item(project: Project, name: str, *, as_json: bool) -> None:
    from pipeline.journal.run_status import State
    from pipeline.report.tables import show_parts, text_table
    from pipeline.views.explained_item import explain_item

    explained = explain_item(project, name)
    if as_json:
        print_json(explained.to_json())
        return
    rows = [
        (of.stage, of.because.state.word, str(of.because), " ".join(key[:KEY_DIGITS] for key in of.keys.values()))
        for of in explained.stages
    ]
    worst = next((of for of in explained.stages if of.because.state not in (State.DONE, State.NOTHING)), None)
    answer = f"! {worst.stage}: {worst.because.state.word}" if worst else "✓ nothing to do"
    title = f"{explained.id} ({explained.origin})" if explained.origin else explained.id
    show_parts(f"{answer}   {title}", "", text_table(("STAGE", "STATE", "WHY", "KEY"), rows))
    _show_next(explained.next)


def _show_stage(project: Project, name: str, *, as_json: bool) -> None:
    from pipeline.report.tables import show_parts
    from pipeline.views.stage_states import explain_stage

    explained = explain_stage(project, name)
    if as_json:
        print_json(explained.to_json())
        return
    because, counts = explained.because, explained.counts
    head = ": ".join(filter(None, (f"{name}: {because.state.value}", because.why)))
    show_parts(head, *([f"  {counts}"] if counts else []), *(f"  {change}" for change in because.changes))
    _show_next(explained.next)


def _show_next(command: Command | None) -> None:
    if command is not None:
        typer.echo(f"next: {as_typed(command)}")
