"""Commands on existing runs: resume, cancel, status, list and prune."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.help import Verbs, option
from pipeline.cli.log_verbs import run_folder
from pipeline.cli.options import (
    STAGES,
    ConfigFile,
    Follow,
    Json,
    Run,
    Sets,
    Verbose,
    Yes,
    as_typed,
    load_config,
    one_of,
    refuse,
    show,
    show_dry_run,
)
from pipeline.command_line import Command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from pipeline.engine.lifecycle import Cancellation, Opened
    from pipeline.journal.run_view import RunView

BEGINNING_S = 0.1  # how often to look for a new supervisor


def resume_command(run: Run = None, follow: Follow = False, config: ConfigFile = None, sets: Sets = None) -> None:
    """Resume a stopped, failed or orphaned run."""
    from pipeline.cli.run_verbs import follow_to_end, run_submission
    from pipeline.engine.handover import pay_visit, start_supervisor
    from pipeline.engine.lifecycle import opened_run
    from pipeline.engine.submission import rest_of
    from pipeline.journal.run_status import ENDED, State, StatusReader
    from pipeline.project.project import stays
    from pipeline.report.live_status import RunProgress

    folder, frozen, executor, status = opened_run(run_folder(run, config, sets), "resume")
    with executor:
        if status.state is State.DONE:
            refuse(f"run {folder.name} is done", folder.path, replace(folder.command(), then="   (does the rest)"))
        if status.state in ENDED:
            rest = rest_of(folder, frozen)
            typer.echo(f"run {folder.name} has ended ({status.state.value}); a new run does the rest")
            run_submission(rest, follow=follow)
            return
    done = "is running: nothing to resume"
    if status.state is not State.RUNNING:
        done, follow = "resumed", follow or frozen.cluster.executor == "allocation"
        if stays(frozen):
            pid, reader = start_supervisor(folder), StatusReader(folder)
            while follow and reader.read().pid != pid and not os.waitpid(pid, os.WNOHANG)[0]:
                time.sleep(BEGINNING_S)
        else:
            pay_visit(folder)
            if failed := StatusReader(folder).read().exit_code:  # the visit has printed the reason
                raise typer.Exit(failed)
    typer.echo(f"run {folder.name} {done}\n  watch it: pipeline status {folder.name} --watch")
    if follow:
        with RunProgress() as progress:
            follow_to_end(folder, progress)


def cancel_command(
    run: Run = None,
    stage: Annotated[str | None, one_of(STAGES, "--stage", "Cancel only the jobs of this stage.")] = None,
    point: Annotated[
        list[str] | None, option("--point NAME", "Cancel only these points of a sweep, such as seed=3 or seed=*.")
    ] = None,
    yes: Yes = False,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Cancel a run or points of its sweep; finished work is kept."""
    from pipeline.engine.lifecycle import cancel as end
    from pipeline.engine.lifecycle import cancellation_of, opened_run
    from pipeline.journal.run_status import State

    opened = opened_run(run_folder(run, config, sets), "cancel")
    folder, _, executor, status = opened
    with executor:
        if point:
            _cancel_points(opened, point, stage, yes=yes)
            return
        if stage is not None and stage not in status.stages:
            begun = ", ".join(status.stages) or "no stage has started"
            refuse(f"run {folder.name} has no stage {stage!r} ({begun})", "--stage", Command.of("status", folder.name))
        cancellation = cancellation_of(status, executor, stage)
        if cancellation.empty and stage is not None and status.state is State.RUNNING and not executor.outlives:
            refuse("a local run cannot cancel one stage", "--stage", Command.of("cancel", folder.name))
        if cancellation.empty:
            typer.echo(f"run {folder.name} is {status.state.value}: nothing to cancel")
            return
        typer.echo(f"run {folder.name}: {_words(cancellation)}")
        if not yes:
            show_dry_run("cancelled", "cancel", folder.name, *(("--stage", stage) if stage else ()))
            return
        end(folder, status, executor, cancellation, stage)
    typer.echo("cancelled; finished work is kept")


def _cancel_points(opened: Opened, wanted: Sequence[str], stage: str | None, *, yes: bool) -> None:
    """End points of a sweep alone."""
    from pipeline.engine.lifecycle import cancel_points, points_to_cancel
    from pipeline.journal.run_status import ENDED
    from pipeline.planning.points import points_in
    from pipeline.report.tables import plural

    folder, frozen, executor, status = opened
    if stage is not None:
        refuse("cannot be combined with --stage", "--point", "leave --stage out")
    trials = [trial.name for stage in status.stages.values() for trial in stage.asked.values()]
    points = [point.name for point in points_in(frozen)] or trials
    tasks = points_to_cancel(status, points, wanted)
    if status.state in ENDED:
        typer.echo(f"run {folder.name} is {status.state.value}: nothing to cancel")
        return
    typer.echo(f"run {folder.name}: {len(tasks)} of {plural(len(points), 'point')}")
    for name in tasks.values():
        typer.echo(f"  {name}")
    if not yes:
        show_dry_run("cancelled", "cancel", folder.name, *(word for name in wanted for word in ("--point", name)))
        return
    cancel_points(folder, frozen, executor, list(tasks))
    typer.echo("cancelled; other points continue. Submit the same sweep again to train these points.")


def _words(cancellation: Cancellation) -> str:
    """Describe the jobs and processes that would be ended."""
    from pipeline.report.tables import plural

    parts = []
    if jobs := cancellation.jobs:
        parts.append(f"{plural(cancellation.tasks, 'task')} in {plural(len(jobs), 'job')} ({', '.join(jobs)})")
    if cancellation.supervisors:
        parts.append(f"its supervisor jobs ({', '.join(cancellation.supervisors)})")
    if cancellation.process:
        parts.append(f"its supervisor (process {cancellation.process})")
    return " and ".join(parts)


def status_command(
    run: Run = None,
    watch: Annotated[bool, option("--watch", "Update the screen until the run ends.")] = False,
    verbose: Verbose = False,
    exit_code: Annotated[
        bool, option("--exit-code", "Exit with the code of a failed run, or 7 for an orphaned one.")
    ] = False,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Show the progress of a run, or how it ended.

    Examples:
    pipeline status                         # the newest run
    pipeline status 20261128-6cd9 --watch
    pipeline status --exit-code             # for scripts
    """
    import gc

    from pipeline.errors import JobFailed
    from pipeline.journal.budget import spending_of_run
    from pipeline.journal.run_status import State
    from pipeline.journal.run_view import ViewReader
    from pipeline.report import tables
    from pipeline.report.run_text import run_report, status_report

    if watch and as_json:
        refuse("cannot be combined with --watch", "--json", "leave --watch or --json out")
    folder = run_folder(run, config, sets)
    reader, spending = ViewReader(folder), spending_of_run(folder)
    typed = as_typed(Command.of("status", *filter(None, [run])))

    def look() -> RunView:
        return replace(reader.view(), account=spending.account())

    def report(seen: RunView, paces: Mapping[str, float]) -> list[RenderableType]:
        return (run_report if verbose else status_report)(seen, typed, tables.columns(), paces)

    if watch:
        from pipeline.report.live_status import watched

        watched(look, report)
    gc.disable()  # a short process: collections would scan all tasks again and again
    seen = look()
    if not watch:
        show(seen.to_json, lambda: report(seen, {}), as_json=as_json)
    is_abandoned = seen.status.state is State.ABANDONED
    if exit_code and (code := JobFailed.exit_code if is_abandoned else seen.status.exit_code):
        raise typer.Exit(code)


def prune_command(
    keep: Annotated[int, option("--keep", "Keep at least this many of the newest runs.", min=0)] = 10,
    yes: Yes = False,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Remove the folders of old runs.

    Records, models and measurements stay, and so do active runs and those that trainings still read.
    """
    from pipeline.report.tables import plural
    from pipeline.units import format_bytes
    from pipeline.upkeep.prune_runs import foresee_pruning, prune

    pruning = foresee_pruning(load_config(config, sets).config.cluster.runs, keep)
    is_empty = not (pruning.goes or pruning.copies or pruning.left)
    lines = [f"  {run.folder.name}   {format_bytes(run.bytes)}" for run in pruning.goes]
    lines += [f"kept: {plural(runs, 'run')}: {why}" for why, runs in pruning.stays.items()]
    goes = f"{plural(len(pruning.goes), 'run')} to remove: {format_bytes(pruning.bytes)}"
    answer = f"{pruning.runs}: {'nothing to prune' if is_empty else goes}"
    show(pruning.to_json, lambda: [*lines, answer], as_json=as_json)
    if yes and not is_empty:
        gone = list(prune(pruning))
        typer.echo(f"removed {plural(len(gone), 'run')}: {format_bytes(sum(run.bytes for run in gone))}", err=True)
    elif not is_empty and not as_json:
        show_dry_run("removed", "runs prune --keep", keep)


def list_command(
    limit: Annotated[int, option("--limit", "Show at most N runs. Default: 20.", min=1)] = 20,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """List runs, newest first: state, stages, start and duration."""
    from datetime import datetime

    from pipeline.journal.run_folder import runs_in
    from pipeline.journal.run_view import view
    from pipeline.report.tables import text_table
    from pipeline.units import short_seconds

    runs = load_config(config, sets).config.cluster.runs
    listed, rows = list[dict[str, object]](), list[tuple[str, ...]]()
    for folder in reversed(runs_in(runs)[-limit:]):
        seen, stages = view(folder), json.loads(folder.stages.read_text())
        status, begun = seen.status, seen.status.started_at
        ended = status.ended_at or (seen.at if seen.goes_on else 0.0)
        took_s = max(0.0, ended - begun) if begun and ended else None
        listed.append({"run": folder.name, "state": status.state.value, "stages": stages, "started_at": begun or None})
        listed[-1] |= {"duration_s": took_s}
        at = f"{datetime.fromtimestamp(begun):%Y-%m-%d %H:%M}" if begun else ""  # noqa: DTZ006 - people's own
        took = "" if took_s is None else short_seconds(took_s)
        rows.append((folder.name, status.state.word, at, took, " ".join(stages)))
    table = text_table(("RUN", "STATE", "STARTED", "TIME", "STAGES"), rows)
    show(lambda: listed, lambda: [table if rows else f"{runs}: no runs yet"], as_json=as_json)


runs_app = Verbs("List runs and remove the folders of old ones.")
runs_app.command("list")(list_command)
runs_app.command("prune")(prune_command)
