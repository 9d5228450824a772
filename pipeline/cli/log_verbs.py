"""`pipeline logs`: what the tasks and the supervisors of a run have printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.options import STAGES, ConfigFile, Json, Run, Sets, load_config, one_of, print_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from pipeline.errors import ConfigError
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_logs import Log, LogChoice
    from pipeline.journal.run_status import RunStatus

FOLLOW_EVERY_S = 0.5
LOOK_AFTER_S = 10.0  # how often who follows asks whether anybody still looks after the run
SHOWN = 10  # logs
TOGETHER = ("train", "evaluate", "predict")  # stages whose processes are ranks of one task
LOGGED = (*STAGES[:-1], "supervise")  # what has logs


def logs_command(
    run: Run = None,
    stage: Annotated[str | None, one_of(LOGGED, "--stage", "Of one stage, or of the supervisors.")] = None,
    task: Annotated[int | None, typer.Option("--task", min=0, help="Of that task, every line.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Of one process of a task with several.")] = None,
    attempt: Annotated[int | None, typer.Option("--attempt", min=1, help="Of that attempt at each task.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Of the attempts that did not end well.")] = False,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run has ended.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Every line of every such log, not the ends.")] = False,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Show what the tasks of a run have printed: the failed ones, else the newest."""
    from pipeline.errors import ConfigError
    from pipeline.journal.ledger import LedgerReader
    from pipeline.journal.run_logs import LogChoice, wanted_logs
    from pipeline.journal.run_status import fold_events

    if follow and as_json:
        raise ConfigError("one document cannot be followed", where="--json", remedy="leave -f or --json out")
    folder = run_folder(run, config, sets)
    status = fold_events(folder.name, LedgerReader(folder).news())
    if rank is not None:
        stage, rank = _ranked(folder, status, stage, rank)
    wanted = LogChoice(stage, task, attempt, failed)
    if follow:
        _follow(folder, wanted, rank)
        return
    found = wanted_logs(folder, status, wanted)
    if not found:
        raise _none(folder, status, wanted)
    if as_json:
        print_json([_plain(log, rank) for log in found])
        return
    shown = found if everything else found[-SHOWN:]
    _show(shown, rank, whole=everything or task is not None)
    if len(shown) < len(found):
        typer.echo(f"\nthe newest {len(shown)} of {len(found):,}; others: --stage S --task N, or --all", err=True)


def run_folder(run: str | None, config: Path | None, sets: Sequence[str] | None) -> RunFolder:
    """Return the run that a command line names, by its folder or by the beginning of its name."""
    from pipeline.journal.run_folder import by_path, find_run

    return (by_path(run) if run else None) or find_run(load_config(config, sets).config.cluster.runs, run)


def _show(logs: Sequence[Log], rank: int | None = None, *, whole: bool) -> None:
    """Print logs, each below a line that says whose it is."""
    from pipeline.journal import run_logs as kept

    for log in logs:
        ends = [(path, _end_of(path, rank)) for path in log.paths]
        written = [(path, end) for path, end in ends if end] or ends[-1:]
        for path, end in written:
            _head(
                log, path, "" if end else "  (empty)" if end is not None else "  (nothing there yet, or not any more)"
            )
            _write(_of_rank(kept.whole(path), rank) if whole else [end or ""])


def _of_rank(lines: Iterable[str], rank: int | None) -> Iterable[str]:
    """Return the lines of one rank, or of all."""
    from pipeline.journal.run_logs import of_rank

    return lines if rank is None else of_rank(lines, rank)


def _end_of(path: str, rank: int | None) -> str | None:
    """Return the last lines of a log, of one rank or of all."""
    from collections import deque

    from pipeline.journal.run_logs import LAST_LINES, end_of, of_rank, whole

    found = end_of(path)
    return found if found is None or rank is None else "".join(deque(of_rank(whole(path), rank), LAST_LINES))


def _head(log: Log, path: str, note: str = "") -> None:
    """Print whose log follows."""
    import os

    from pipeline.journal.run_logs import harmless

    near = os.path.relpath(path)
    _write([f"==> {log.title}  {harmless(min(near, path, key=len))}{note}\n"])


def _write(pieces: Iterable[str]) -> None:
    """Print text as it is, whatever the terminal's encoding; the last line gets an end."""
    piece = "\n"
    for piece in filter(None, pieces):
        typer.echo(piece.encode(errors="replace"), nl=False)
    if not piece.endswith("\n"):
        typer.echo()


def _plain(log: Log, rank: int | None = None) -> dict[str, object]:
    """Return a log as JSON data."""
    from dataclasses import asdict

    return asdict(log) | {"ends": {path: _end_of(path, rank) for path in log.paths}}


def _follow(folder: RunFolder, wanted: LogChoice, rank: int | None = None) -> None:
    """Print what is added to logs until the run has ended."""
    import socket
    import time

    from pipeline.journal.run_logs import Follower
    from pipeline.journal.run_status import is_abandoned

    follower, last, looked_at = Follower(folder, wanted), "", time.monotonic()
    while True:
        for log, path, text in follower.news():
            if not (own := "".join(_of_rank([text], rank))):
                continue
            if path != last:
                _head(log, path)
                last = path
            _write([own])
        if follower.ended:
            break
        if time.monotonic() - looked_at > LOOK_AFTER_S:
            if is_abandoned(follower.status, socket.gethostname(), None):
                follower.status.abandon()
            looked_at = time.monotonic()
        time.sleep(FOLLOW_EVERY_S)
    typer.echo(f"run {folder.name}: {follower.status.state.value}", err=True)


def _none(folder: RunFolder, status: RunStatus, wanted: LogChoice) -> ConfigError:
    """Return the error that says why there is no such log."""
    from pipeline.errors import ConfigError

    if wanted.stage and wanted.stage not in status.stages:
        what = f"stage {wanted.stage} has not begun (begun: {', '.join(status.stages) or 'none'})"
    elif wanted.failed:
        what = "no such attempt has failed"
    else:
        tasks = ", ".join(
            f"{stage.name} {max(stage.jobs and stage.work, default='none')}" for stage in status.in_order()
        )
        what = f"there is no such log (the highest task of each stage: {tasks or 'none'})"
    return ConfigError(what, where=folder.name, remedy=f"pipeline status {folder.name}")


def _ranked(folder: RunFolder, status: RunStatus, stage: str | None, rank: int) -> tuple[str | None, int | None]:
    """Return the stage whose processes work together, and the rank whose lines can be told from others there."""
    from pipeline.config.load import from_resolved

    begun = [name for name in TOGETHER if name in status.stages and stage in (None, name)]
    config = from_resolved(folder.config.read_text(), str(folder.config)) if begun else None
    worlds = {name: getattr(config.cluster, name).world for name in begun} if config else {}
    together = {name: world for name, world in worlds.items() if world > 1}
    if not config or not together or config.cluster.executor != "slurm":  # the local launcher does not mark their lines
        _refuse_rank(status, stage, rank, max(together.values(), default=1))
        return stage, None
    name, world = list(together.items())[-1]
    if rank >= world:
        _refuse_rank(status, name, rank, world)
    return name, rank


def _refuse_rank(status: RunStatus, stage: str | None, rank: int, world: int = 1) -> None:
    """Raise where a process of a task has no log of its own: only a task's only process has."""
    from pipeline.errors import ConfigError

    stages = [one for one in status.stages.values() if stage in (None, one.name)]
    processes = max((job.gpus for one in stages for job in one.jobs.values()), default=1) or 1
    processes = max(world, processes)
    if rank >= processes or processes > 1:
        what = (
            f"the {processes} processes of a task write into one log"
            if rank < processes
            else f"tasks here have {processes} {'process: 0' if processes == 1 else f'processes: 0-{processes - 1}'}"
        )
        raise ConfigError(what, where=f"--rank {rank}", remedy="leave --rank out")
