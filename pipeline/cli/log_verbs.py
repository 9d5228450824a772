"""`pipeline logs`: the output of a run's tasks and supervisors."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.help import option
from pipeline.cli.options import STAGES, ConfigFile, Json, Point, Run, Sets, load_config, one_of, print_json, refuse
from pipeline.command_line import Command

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from pipeline.errors import ConfigError
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_logs import Log, LogChoice
    from pipeline.journal.run_status import RunStatus

FOLLOW_EVERY_S = 0.5
LOOK_AFTER_S = 10.0  # how often following a run checks that its supervisor is alive
SHOWN = 10  # logs shown
TOGETHER = ("train", "evaluate", "predict")  # stages whose processes are ranks of one task
LOGGED = (*STAGES[:-1], "supervise")  # with logs


def logs_command(
    run: Run = None,
    stage: Annotated[
        str | None, one_of(LOGGED, "--stage", "Show only logs of this stage, or of the supervisors.")
    ] = None,
    task: Annotated[int | None, option("--task", "Show only logs of this task, in full.", min=0)] = None,
    point: Point = None,
    rank: Annotated[int | None, option("--rank", "Show only lines of this rank of a task.", min=0)] = None,
    attempt: Annotated[int | None, option("--attempt", "Show only this attempt at each task.", min=1)] = None,
    failed: Annotated[bool, option("--failed", "Show only failed attempts.")] = False,
    follow: Annotated[bool, option("-f --follow", "Follow the output until the run ends.")] = False,
    everything: Annotated[bool, option("--all", "Show every matching log in full, not only the ends.")] = False,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Show logs of failed tasks, else the newest logs."""
    from pipeline.journal.run_logs import LogChoice, wanted_logs
    from pipeline.journal.run_status import StatusReader
    from pipeline.planning.points import named_point

    if follow and as_json:
        refuse("cannot be combined with --follow", "--json", "leave -f or --json out")
    folder = run_folder(run, config, sets, with_work=True)
    status = StatusReader(folder).read()
    if point is not None:
        if task is not None or stage not in (None, "train"):
            refuse("cannot be combined with --stage or --task", "--point", "leave --stage and --task out")
        trained = status.stages.get("train")
        stage, task = "train", named_point(point, trained.names if trained else ())
    if rank is not None:
        stage, rank = _ranked(folder, status, stage, rank)
    wanted = LogChoice(stage, task, attempt, failed)
    if follow:
        _follow(folder, wanted, rank)
        return
    logs = wanted_logs(folder, status, wanted)
    if not logs:
        raise _none(folder, status, wanted)
    if as_json:
        print_json([asdict(log) | {"ends": {path: _end_of(path, rank) for path in log.paths}} for log in logs])
        return
    shown = logs if everything else logs[-SHOWN:]
    _show(shown, rank, whole=everything or task is not None)
    if len(shown) < len(logs):
        typer.echo(f"\nshowing the newest {len(shown)} of {len(logs):,} logs; more: --task N, or --all", err=True)


def run_folder(
    run: str | None, config: Path | None, sets: Sequence[str] | None, *, with_work: bool = False
) -> RunFolder:
    """Return the run that a command line names by folder or prefix. Default: the newest.

    `with_work`: the newest run with work.
    """
    from pipeline.journal.run_folder import by_path, find_run, runs_in
    from pipeline.journal.run_status import State, StatusReader

    def had_work(folder: RunFolder) -> bool:
        status = StatusReader(folder).read()
        return status.state is not State.DONE or any(stage.missing for stage in status.stages.values())

    if run and (folder := by_path(run)):
        return folder
    newest = find_run(runs := load_config(config, sets).config.cluster.runs, run)
    if run or not with_work or had_work(newest):
        return newest
    return next(filter(had_work, reversed(runs_in(runs))), newest)


def _show(logs: Sequence[Log], rank: int | None = None, *, whole: bool) -> None:
    """Print logs, each with a heading."""
    from pipeline.journal import run_logs as kept

    for log in logs:
        ends = [(path, _end_of(path, rank)) for path in log.paths]
        written = [(path, end) for path, end in ends if end] or ends[-1:]
        for path, end in written:
            note = "  (log not found)" if end is None else "" if end else "  (empty)"
            _head(log, path, note)
            lines = kept.whole(path)
            _write((lines if rank is None else kept.of_rank(lines, rank)) if whole else [end or ""])


def _end_of(path: str, rank: int | None) -> str | None:
    """Return the last lines of a log (optionally of one rank); None without a file."""
    from collections import deque

    from pipeline.journal.run_logs import LAST_LINES, end_of, of_rank, whole

    end = end_of(path)
    return end if end is None or rank is None else "".join(deque(of_rank(whole(path), rank), LAST_LINES))


def _head(log: Log, path: str, note: str = "") -> None:
    """Print the line above a log: its stage, task and attempt, and its path."""
    import os

    from pipeline.journal.run_logs import harmless

    near = os.path.relpath(path)
    _write([f"==> {log.title}  {harmless(min(near, path, key=len))}{note}\n"])


def _write(pieces: Iterable[str]) -> None:
    """Print text, whatever the terminal's encoding, and end its last line."""
    piece = "\n"
    for piece in filter(None, pieces):
        typer.echo(piece.encode(errors="replace"), nl=False)
    if not piece.endswith("\n"):
        typer.echo()


def _follow(folder: RunFolder, wanted: LogChoice, rank: int | None = None) -> None:
    """Print new lines of logs until the run has ended."""
    import time

    from pipeline.journal.run_logs import Follower, of_rank
    from pipeline.journal.run_view import ViewReader

    reader, last, looked_at = ViewReader(folder), "", time.monotonic()
    follower = Follower(reader, wanted)
    while True:
        for log, path, text in follower.fresh():
            if not (own := text if rank is None else "".join(of_rank([text], rank))):
                continue
            if path != last:
                _head(log, path)
                last = path
            _write([own])
        if follower.ended:
            break
        if time.monotonic() - looked_at > LOOK_AFTER_S:
            reader.view()  # checks its supervisor
            looked_at = time.monotonic()
        time.sleep(FOLLOW_EVERY_S)
    typer.echo(f"run {folder.name}: {follower.status.state.value}", err=True)


def _none(folder: RunFolder, status: RunStatus, wanted: LogChoice) -> ConfigError:
    """Return the error for a missing log."""
    from pipeline.errors import ConfigError

    if wanted.stage and wanted.stage not in status.stages:
        problem = f"stage {wanted.stage} has not started (started: {', '.join(status.stages) or 'none'})"
    elif wanted.failed:
        problem = "no matching attempt failed"
    else:
        highest = ((stage.name, max(stage.jobs and stage.work, default="none")) for stage in status.in_order())
        tasks = ", ".join(f"{name} {task}" for name, task in highest)
        problem = f"no matching log (highest task of each stage: {tasks or 'none'})"
    return ConfigError(problem, where=folder.name, remedy=Command.of("status", folder.name))


def _ranked(folder: RunFolder, status: RunStatus, stage: str | None, rank: int) -> tuple[str | None, int | None]:
    """Return the stage and the rank that `--rank` selects; no rank if its log has only that rank's lines."""
    from pipeline.config.load import read_resolved

    begun = [name for name in TOGETHER if name in status.stages and stage in (None, name)]
    cluster = read_resolved(folder.config).cluster if begun else None
    worlds = {name: getattr(cluster, name).world for name in begun}
    name = max(reversed(begun), key=worlds.__getitem__, default=stage)
    world = worlds.get(name or "", 1)
    if rank < world == 1:
        return stage, None
    if rank < world and cluster and cluster.executor == "slurm":
        return name, rank
    problem = "the processes of a local task write to one log"  # the local launcher does not prefix lines
    if rank >= world:
        problem = f"tasks have {world} {'process: 0' if world == 1 else f'processes: 0-{world - 1}'}"
    return refuse(problem, f"--rank {rank}", "leave --rank out")
