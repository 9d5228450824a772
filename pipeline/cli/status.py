"""`pipeline status`: what a run is doing, or what became of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.logs import run_folder
from pipeline.cli.options import ConfigFile, Json, Run, Sets, print_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.runs.folder import RunFolder


def status(
    run: Run = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on showing it until it has ended.")] = False,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Show what a run is doing, or what became of it."""
    import gc

    from pipeline.errors import ConfigError
    from pipeline.report import tables
    from pipeline.report.run import run_report

    if watch and as_json:
        raise ConfigError("one document cannot go on", where="--json", remedy="leave --watch or --json out")
    folder = run_folder(run, config, sets)
    now, goes_on = _looks(folder, watch=watch)
    if watch:
        from pipeline.report.watch import watched

        watched(now, goes_on)
        return
    gc.disable()  # a short life, in which collecting would walk through all tasks again and again
    if as_json:
        print_json(now())
    else:
        tables.show(*run_report(now()))


def _looks(folder: RunFolder, *, watch: bool) -> tuple[Callable[[], dict[str, Any]], Callable[[], bool]]:
    """Return what tells how a run stands now, by what its ledger says more than last time, and whether it goes on."""
    import socket

    from pipeline.runs.ledger import Reader
    from pipeline.runs.pending import GOING_ON, Sparing, look, shown
    from pipeline.runs.status import RunStatus
    from pipeline.runs.trail import Trail

    found, reader, trail = RunStatus(folder.name), Reader(folder), Trail()
    ask = Sparing() if watch else look

    def catch_up() -> None:
        for event in reader.news():
            found.apply(event)
            if watch:
                trail.apply(event)

    def now() -> dict[str, Any]:
        catch_up()
        told = shown(folder, found, socket.gethostname(), catch_up, ask)
        return told | (trail.to_json() if watch else {})

    return now, lambda: found.state in GOING_ON
