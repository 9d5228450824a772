"""`pipeline report`: what a run has used of what it asked for, and what the next should ask for."""

from __future__ import annotations

from pipeline.cli.logs import run_folder
from pipeline.cli.options import ConfigFile, Json, Run, Sets, print_json


def report(run: Run = None, config: ConfigFile = None, sets: Sets = None, as_json: Json = False) -> None:
    """Show what a run used of the memory, cores and time it asked for, and what to ask for next time."""
    import socket

    from pipeline.report import tables
    from pipeline.report.efficiency import efficiency_report
    from pipeline.runs.measured import efficiency
    from pipeline.runs.status import status_of

    folder = run_folder(run, config, sets)
    status = status_of(folder, socket.gethostname())
    stages = [stage.to_json() for stage in efficiency(folder, status)]
    if as_json:
        failures = {stage.name: stage.to_json()["failures"] for stage in status.in_order()}
        print_json({"run": folder.name, "state": status.state.value, "stages": stages, "failures": failures})
        return
    tables.show(*efficiency_report(status.to_json(), stages))
