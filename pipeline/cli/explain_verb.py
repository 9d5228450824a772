"""`pipeline explain` and `plan --dag`: the state of each stage, or of one item, and the reasons."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.help import Verb, argument, option
from pipeline.cli.options import (
    ConfigFile,
    Json,
    Sets,
    as_typed,
    choice,
    one_of,
    open_project,
    print_json,
    refuse,
    show,
)
from pipeline.command_line import Command
from pipeline.stage_names import StageName

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from pipeline.project.project import Project
    from pipeline.views.explained_item import ItemExplained
    from pipeline.views.stage_states import StageExplained

OPTION, TEXT = "--dag", "text"
KEY_DIGITS = 16  # of a key; the first 8 identify the recipe
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
    """Print the graph of a stage and its needs, or of all stages."""
    from pipeline.report import tables
    from pipeline.stages.table import up_to
    from pipeline.views.stage_states import arrows, as_dot, as_mermaid, graph_lines, stage_boxes

    boxes = stage_boxes(project, up_to(stage, project.config))
    if as_json:
        print_json({"stages": [box.as_box() for box in boxes], "arrows": arrows(boxes)})
    elif form == TEXT:
        rows = [(box.name, box.because.state.value, box.counts, str(box.because)) for box in boxes]
        table = tables.text_table(("STAGE", "STATE", "WORK", "WHY"), rows)
        tables.show_parts("\n".join(graph_lines(boxes)), "", table)
    else:
        typer.echo(as_mermaid(boxes) if form == "mermaid" else as_dot(boxes))


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
    from pipeline.views.explained_item import explain_item
    from pipeline.views.stage_states import explain_stage

    if (item is None) == (stage is None):
        what = "name an item or --stage STAGE" + (", not both" if item else "")
        remedy = Command.of("explain ITEM", then="   or   pipeline explain --stage train")
        refuse(what, "pipeline explain", remedy)
    _, project = open_project(config, sets, remember=False)
    if item is not None:
        of_item = explain_item(project, item)
        show(of_item.to_json, lambda: _item_lines(of_item), as_json=as_json)
    else:
        of_stage = explain_stage(project, str(stage))
        show(of_stage.to_json, lambda: _stage_lines(of_stage), as_json=as_json)


def _item_lines(explained: ItemExplained) -> Iterator[RenderableType]:
    from pipeline.journal.run_status import State
    from pipeline.report.tables import text_table

    rows = [
        (of.stage, of.because.state.word, str(of.because), " ".join(key[:KEY_DIGITS] for key in of.keys.values()))
        for of in explained.stages
    ]
    worst = next((of for of in explained.stages if of.because.state not in (State.DONE, State.NOTHING)), None)
    answer = f"! {worst.stage}: {worst.because.state.word}" if worst else "✓ nothing to do"
    yield f"{answer}   {explained.id}{f' ({explained.origin})' if explained.origin else ''}"
    yield ""
    yield text_table(("STAGE", "STATE", "WHY", "KEY"), rows)
    yield from _next_line(explained.next)


def _stage_lines(explained: StageExplained) -> Iterator[RenderableType]:
    because, counts = explained.because, explained.counts
    yield ": ".join(filter(None, (f"{explained.name}: {because.state.value}", because.why)))
    yield from ([f"  {counts}"] if counts else [])
    yield from [f"  {change}" for change in because.changes] + _next_line(explained.next)


def _next_line(command: Command | None) -> list[str]:
    return [f"next: {as_typed(command)}"] if command is not None else []
