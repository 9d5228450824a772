"""`pipeline doctor`: one row per check, each with its remedy."""

from __future__ import annotations

import typer

from pipeline.cli.options import ConfigFile, Json, Sets, print_json


def doctor(config: ConfigFile = None, sets: Sets = None, as_json: Json = False) -> None:
    """Check configuration, data, disk and packages, and say what to do."""
    from dataclasses import asdict

    from pipeline.report import tables
    from pipeline.runs.checkup import examine

    findings = examine(config, sets or ())
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        rows = [(one.verdict.value, one.what, one.found, one.remedy) for one in findings]
        tables.show(tables.table(("", "check", "found", "what to do"), rows))
    code = max((one.exit_code for one in findings), default=0)
    if code:
        raise typer.Exit(code)
