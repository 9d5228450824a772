"""Commands on results: `items` of a scan, `report` of a run, `compare` trainings, `replay` a step."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.help import argument, option
from pipeline.cli.log_verbs import run_folder
from pipeline.cli.options import (
    ConfigFile,
    Json,
    Point,
    Run,
    Sets,
    Verbose,
    completing,
    load_config,
    print_json,
    refuse,
    runs,
    show,
)
from pipeline.command_line import Command
from pipeline.device.kinds import CARD, CPU

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from pipeline.journal.run_folder import RunFolder
    from pipeline.views.compared_models import ComparedModel

PRINTED = Path("-")


ITEMS_SHOWN = 40  # rows of a table; --json and the file have all
KEYS = ("scan_key", "graph_key", "key")
TOO_WIDE = (*KEYS, "origin", "place")
COLUMNS = ("micro-batch", "items", "sizes", "planned", "took", "loss", "outcome")
_NAMES = {"took": "process grew"}  # shown if tensors are not counted
SHOWN = 2  # items of a micro-batch
RUNGS = ("", "checkpointing", "offload", "cpu")


def items_command(
    run: Run = None,
    key: Annotated[str | None, option("--key HEX", "List only items with a record whose key has this prefix.")] = None,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """List usable items: ids, chains, sizes and record keys."""
    import csv
    from itertools import islice

    from pipeline.files import cell_text
    from pipeline.report import tables

    if key is not None and not re.fullmatch("[0-9a-fA-F]+", key):
        keys = Command.of("data items --json", then="   (shows the keys)")
        refuse(f"{key!r} is not a hexadecimal key prefix", "--key", keys)
    path = _scanned(run, config, sets).inventory
    with path.open(encoding="utf-8", errors="backslashreplace", newline="") as file:
        table = csv.DictReader(file)
        every = ({name: cell_text(row[name] or "") for name in table.fieldnames or ()} for row in table)
        chosen = (row for row in every if not key or any(row.get(name, "").startswith(key.lower()) for name in KEYS))
        if as_json:
            _print_array(chosen)
            return
        columns = [name for name in table.fieldnames or () if name not in TOO_WIDE]
        rows = [[row[name] for name in columns] for row in islice(chosen, ITEMS_SHOWN)]
        more = sum(1 for _ in chosen)
    if key and not rows:
        typer.echo(f"no item has a record with key prefix {key}: {path}", err=True)
        return
    answer = f"{tables.plural(len(rows) + more, 'usable item')}{f', the first {len(rows)} here' if more else ''}"
    tables.show_parts(answer, "", tables.text_table(columns, rows), f"All items and columns: {path}")


def _print_array(rows: Iterator[Mapping[str, str]]) -> None:
    """Print rows as a JSON array, one by one: there may be millions."""
    between = "[\n"
    for row in rows:
        typer.echo(between + json.dumps(row), nl=False)
        between = ",\n"
    typer.echo("[]" if between == "[\n" else "\n]")


def _scanned(run: str | None, config: Path | None, sets: Sequence[str] | None) -> RunFolder:
    """Return the named run, or the newest with a list of its items."""
    from pipeline.journal.run_folder import runs_in

    asked = runs_in(load_config(config, sets).config.cluster.runs) if run is None else [run_folder(run, config, sets)]
    if not (scanned := [folder for folder in asked if folder.inventory.exists()]):
        what = "no run has scanned the data set yet" if run is None else f"run {run} has no scan"
        refuse(what, "pipeline data items", Command.submit("scan"))
    return scanned[-1]


def report_command(
    run: Run = None,
    html: Annotated[
        Path | None, option("--html FILE", "Write a self-contained HTML report of the run; -: print it.")
    ] = None,
    verbose: Verbose = False,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Show requested and used resources of a run, and better requests.

    Examples:
    pipeline report                         # the newest run
    pipeline report --html report.html
    """
    from pipeline.journal.budget import spending_of_run
    from pipeline.journal.run_view import view
    from pipeline.views.efficiency import stage_uses, use_report

    folder = run_folder(run, config, sets, with_work=True)
    if html is not None:
        _write_page(folder, html, as_json=as_json)
        return
    status = view(folder).status
    stages, account = stage_uses(folder, status), spending_of_run(folder).account()

    def document() -> dict[str, Any]:
        failures = {stage.name: stage.to_json()["failures"] for stage in status.in_order()}
        run = {"run": folder.name, "state": status.state.value, "stages": list(map(asdict, stages))}
        budget = {"budget": account.to_json()} if account else {}
        return run | budget | {"failures": failures, "waits": list(map(asdict, status.waits))}

    show(document, lambda: use_report(status, stages, account, verbose=verbose), as_json=as_json)


def _write_page(folder: RunFolder, file: Path, *, as_json: bool) -> None:
    """Write or print the HTML report of a run as it is now."""
    from pipeline.views.run_page import page_now, write_page

    if as_json and file == PRINTED:
        refuse("cannot be combined with --json", "--html -", "leave --json out")
    text, run = page_now(folder)
    if file == PRINTED:
        typer.echo(text)
        return
    write_page(file, text)
    file = file.parent.resolve() / file.name
    if as_json:
        print_json({"run": folder.name, "state": run.status.state.value, "html": str(file)})
    else:
        typer.echo(f"run {folder.name}: {run.status.state.value}\nHTML report: {file}")


def compare_command(
    what: Annotated[
        list[str] | None,
        argument(
            "RUN|MODEL",
            "Runs (with all points of a sweep) and models. Default: every model of this project.",
            autocompletion=completing(runs),
        ),
    ] = None,
    metric: Annotated[
        str | None, option("--metric NAME", "Rank by this metric. Default: the monitored metric.")
    ] = None,
    html: Annotated[Path | None, option("--html FILE", "Write a self-contained HTML report with their curves.")] = None,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Compare trainings: settings, metrics over seeds, memory, hours."""
    from pipeline.views.compared_models import compared_data, comparison, comparison_lines

    shown = comparison(_models(what or (), config, sets), metric)
    if html is not None:
        from pipeline.report.html_page import render
        from pipeline.views.run_page import write_page

        write_page(html, render("compared.html", **compared_data(shown)))
    show(shown.to_json, lambda: comparison_lines(shown), as_json=as_json)
    if html is not None and not as_json:
        typer.echo(f"HTML report: {html.parent.resolve() / html.name}")


def _models(named: Sequence[str], config: Path | None, sets: Sequence[str] | None) -> list[ComparedModel]:
    """Return the named trainings, each once. Default: all models of the project."""
    from pipeline.planning.trained_model import model_names
    from pipeline.views.compared_models import read_model

    if not named:
        models = load_config(config, sets).config.train.models
        return [read_model(models / name) for name in model_names(models)]
    found = [model for name in named for model in _compared(name, config, sets)]
    return list({model.folder: model for model in found}.values())


def _compared(name: str, config: Path | None, sets: Sequence[str] | None) -> list[ComparedModel]:
    """Return the trainings of a run, or the model with that name or folder."""
    from pipeline.errors import ConfigError
    from pipeline.journal.run_folder import by_path, find_run
    from pipeline.views.compared_models import models_of_run, read_model

    if (run := by_path(name)) is None:
        here = None if (Path(name) / "prepared.json").is_file() else load_config(config, sets).config
        folder = Path(name).resolve() if here is None else here.train.models / name
        if (folder / "prepared.json").is_file():
            return [read_model(folder)]
        assert here is not None
        try:
            run = find_run(here.cluster.runs, name)
        except ConfigError as error:
            what = f"{name!r} is not a run or a model of this project ({error.what})"
            raise ConfigError(what, where="pipeline compare", remedy=Command.of("model list")) from error
    if not (models := models_of_run(run)):
        refuse("this run has not trained a model yet", run.name, Command.of("status", run.name))
    return models


def replay_command(
    run: Run = None,
    step: Annotated[
        int | None, option("--step", "Step that failed. Without it, the error lists the recorded steps.", min=1)
    ] = None,
    rank: Annotated[int | None, option("--rank", "Rank to replay. Default: the rank that failed first.", min=0)] = None,
    point: Point = None,
    device: Annotated[
        str, option("--device DEVICE", f"Where to run: {CARD}, {CPU}, or auto (a GPU if there is one).")
    ] = "auto",
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Replay a failed training step and show what fails.

    Steps that ran out of memory or were not finite leave a bundle. A replay changes nothing.
    """
    from pipeline.engine.lifecycle import refuse_others
    from pipeline.replay.replay_step import find_case, replay_document, steps_with_bundles

    folder = run_folder(run, config, sets, with_work=True)
    refuse_others(folder, "replay")  # a replay loads the run's code
    if step is None:
        steps = ", ".join(map(str, steps_with_bundles(folder, point)))
        known = f"steps with a bundle: {steps}" if steps else "no step has a bundle"
        remedy = Command.of("replay", folder.name, "--step", "N", then=f"   ({known})")
        refuse("choose the step to replay", "--step", remedy)
    case = find_case(folder, step, rank, point)
    if not as_json:
        typer.echo(case.bundle.words())
    document = replay_document(case, device=device)
    show(lambda: document, lambda: _shown(document), as_json=as_json)


def _shown(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield the result of a replayed step: micro-batches, memory, and the origin of the fault."""
    from pipeline.report import tables
    from pipeline.units import format_bytes

    yield ""
    yield f"here, on {document['device']}" + (f": weights from {document['weights']}" if document["weights"] else "")
    yield from (f"  {note}" for note in document["notes"])
    if document["micro_batches"]:
        yield ""
        rows = [_row(part, counted=document["counted"]) for part in document["micro_batches"]]
        yield tables.text_table([_NAMES.get(name, name) if not document["counted"] else name for name in COLUMNS], rows)
    if document["counted"]:
        allowed = format_bytes(document["limit_bytes"])
        yield f"{format_bytes(document['reserved_bytes'])} reserved at the peak; the run's device allowed {allowed}"
    if document["suspects"][1:]:  # the verdict has the first one
        yield from ("", *(f"  {part['words']}" for part in document["suspects"]))
    if document["traced"]:
        yield document["traced"]["words"]
    yield ""
    yield document["verdict"]


def _row(part: Mapping[str, Any], *, counted: bool) -> Sequence[str]:
    """Return the table row of a micro-batch; if tensors are not counted, with the growth of the process."""
    from pipeline.units import format_bytes

    items = ", ".join(part["items"][:SHOWN]) + (", …" if len(part["items"]) > SHOWN else "")
    ran = part["outcome"] != "not run"
    took = format_bytes(part["peak_bytes"]) if counted else f"+{format_bytes(part['grown_bytes'])}"
    rung = f" ({RUNGS[min(part['rung'], len(RUNGS) - 1)]})" if part["rung"] else ""
    return (
        str(part["micro_batch"]),
        f"{len(part['items'])}: {items}{rung}",
        ", ".join(f"{size:,} {name}" for name, size in part["sizes"].items()),
        f"+{format_bytes(part['planned_bytes'])}",
        took if ran else "",
        ", ".join(f"{name} {_number(term[0])}/{_number(term[1])}" for name, term in part["terms"].items()),
        part["outcome"] + (f": {part['error']}" if part["error"] else ""),
    )


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
