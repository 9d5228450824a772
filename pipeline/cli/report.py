"""`pipeline report`: what a run has used of what it asked for, and what the next should ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.logs import run_folder
from pipeline.cli.options import ConfigFile, Json, Run, Sets, print_json

if TYPE_CHECKING:
    from pipeline.runs.folder import RunFolder

PRINTED = Path("-")
Page = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write a page that shows the whole run, all in one file; -: print it."),
]


def report(
    run: Run = None, html: Page = None, config: ConfigFile = None, sets: Sets = None, as_json: Json = False
) -> None:
    """Show what a run used of the memory, cores and time it asked for, and what to ask for next time."""
    import socket

    from pipeline.report import tables
    from pipeline.report.efficiency import efficiency_report
    from pipeline.runs.measured import efficiency
    from pipeline.runs.status import status_of

    folder = run_folder(run, config, sets)
    if html is not None:
        _write_page(folder, html, as_json=as_json)
        return
    status = status_of(folder, socket.gethostname())
    stages = [stage.to_json() for stage in efficiency(folder, status)]
    if as_json:
        failures = {stage.name: stage.to_json()["failures"] for stage in status.in_order()}
        print_json({"run": folder.name, "state": status.state.value, "stages": stages, "failures": failures})
        return
    tables.show(*efficiency_report(status.to_json(), stages))


def _write_page(folder: RunFolder, file: Path, *, as_json: bool) -> None:
    """Write the page of a run as it stands now."""
    from pipeline.errors import ConfigError
    from pipeline.runs.page import now_of, write_to

    if as_json and file == PRINTED:
        raise ConfigError("two documents cannot be printed at once", where="--html -", remedy="leave --json out")
    page, status, told = now_of(folder)
    if file == PRINTED:
        typer.echo(page.html(status, told))
        return
    write_to(file, page.html(status, told))
    file = file.parent.resolve() / file.name
    if as_json:
        print_json({"run": folder.name, "state": status.state.value, "html": str(file)})
    else:
        typer.echo(f"run {folder.name}: {status.state.value}\npage: {file}")
