"""Creates runs, finds one that does the same already, and cancels them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cluster.job_spec import format_ranges, parse_ranges
from pipeline.command_line import Command, status_or_cancel
from pipeline.config.load import dump_resolved, from_resolved, read_resolved, with_settings
from pipeline.config.masking import without_secrets
from pipeline.engine.dispatch import pieces
from pipeline.engine.handover import STOPPED_CODE, claim_visit, refuse_elsewhere, supervisor_job
from pipeline.errors import ConfigError, JobFailed, SubmissionRefused
from pipeline.files import is_mine, user_name, write_whole
from pipeline.journal import run_folder as folders
from pipeline.journal.ledger import SUPERVISOR, Ledger, has_ended
from pipeline.journal.run_folder import runs_in, writing_run
from pipeline.journal.run_status import ENDED, State, StatusReader
from pipeline.journal.run_view import view
from pipeline.planning.points import LISTED, named_points
from pipeline.planning.prepare import DECISIVE
from pipeline.project.project import open_executor
from pipeline.project.restriction import EVERYTHING, Only
from pipeline.project.run_code import freeze, freeze_files, load_reader, sources
from pipeline.project.user_code import encoder_code, task_code
from pipeline.records import EventKind
from pipeline.stage_names import StageName
from pipeline.stages.jobs import StagePlan, job_of
from pipeline.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import TypeAlias

    from pipeline.cluster.job_spec import Executor, JobId
    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import RunStatus
    from pipeline.project.project import Project

    Opened: TypeAlias = tuple[RunFolder, Config, Executor, RunStatus]

DECIDES_WITHIN_S, LOOK_EVERY_S = 60.0, 0.1  # how long a run submitted at the same moment may take to begin
OVER = (State.DONE, State.CANCELLED)  # states of points that cannot be cancelled
TASKED = ("train", "evaluate", "predict")  # the stages that run the user's own code


def new_run(
    config: Config,
    stages: Sequence[str],
    typed: Command | None = None,
    beside: Path | None = None,
    only: Only = EVERYTHING,
    tags: Iterable[tuple[str, bytes]] | None = None,
) -> RunFolder:
    """Create the folder of a run, with the configuration, the code and the typed command frozen in it.

    `beside` is the folder of the user's modules; those of the task and the reader are frozen, too. `tags` names the
    recipes whose records the run reads. `cache clean` keeps these records while the run is active, even for a run of
    another user, without loading its code.
    """
    now, private = datetime.now(tz=UTC), config.cluster.private
    folder = None
    try:
        folder = folders.create_folder(config.cluster.runs, now, private=private)
        with writing_run(folder.path):
            folder.code.write_text(str(freeze(config.cluster.runs)))
            is_tasked = any(stage in TASKED for stage in stages)
            if (code := freeze_own(config, beside, is_tasked=is_tasked)) is not None:
                folder.task_code.write_text(str(code))
            folder.config.write_text(dump_resolved(config))
            if not only.is_all:
                only.write(folder)
            if tags is not None:
                write_whole(folder.recipes, json.dumps(sorted((kind, tag.hex()) for kind, tag in tags)))
            folder.again.write_text(without_secrets(str(typed or Command.submit(stages[-1]))))
            write_whole(folder.stages, json.dumps(list(stages)))  # last: it makes the run visible to others
    except JobFailed as error:
        if folder is not None:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise SubmissionRefused(error.what, where=error.where, remedy=error.next) from error
    return folder


def freeze_own(config: Config, beside: Path | None, *, is_tasked: bool) -> Path | None:
    """Freeze the user's code; return the folder, or None without such code. A script is not copied."""
    if is_tasked and config.train.command is not None:
        return beside
    data = config.data
    files: list[tuple[str, Path]] = []
    if is_tasked and config.train.task is not None:
        files += task_code(config, beside).files
    for each in map(config.of_encoder, config.encoders):
        if each.embed.is_own:
            files += encoder_code(each, beside).files
    if data.reader is not None:
        files += sources(load_reader(data.reader, data.path, data.options, beside=beside))
    return freeze_files(sorted(dict(files).items()), config.cluster.runs) if files else None


def scripts(project: Project, plans: Sequence[StagePlan], executor: Executor) -> Iterator[tuple[str, str]]:
    """Yield the file name and the text of each sbatch script, with RUN in place of the run's folder."""
    from pipeline.cluster.slurm import SlurmExecutor

    assert isinstance(executor, SlurmExecutor)
    jobs = ((plan, job) for plan in plans if plan.stage.has_tasks for job in plan.jobs())
    for planned, first in jobs:
        job = job_of(None, project.config, first)
        cut = list(pieces(job.tasks, planned.limits, len(job.tasks)))
        most = max(1, (job.max_parallel or len(job.tasks)) // len(cut))
        for tasks in cut:
            piece = replace(job, tasks=tuple(tasks), max_parallel=most)
            yield f"{planned.stage.name}-{format_ranges(tasks)}.sbatch", executor.script_for(piece)
    yield "supervise.sbatch", executor.script_for(supervisor_job(None, project.config, "1"))


def joins_double(folder: RunFolder, config: Config, stages: Sequence[str], only: Only = EVERYTHING) -> RunFolder | None:
    """Look for a double again when a new run is visible, so that of two equal submissions only one runs.

    Both runs are visible before either looks, so at least one sees the other. The run with the later name is removed,
    unless it has begun. Return or raise as `refuse_double` does.
    """
    try:
        same = refuse_double(config, stages, only, new=folder)
    except SubmissionRefused:
        _withdraw(folder)
        raise
    if same is not None:
        _withdraw(folder)
    return same


def _withdraw(new: RunFolder) -> None:
    """Remove a run that has not begun: first its list of stages, which makes it a run."""
    new.stages.unlink(missing_ok=True)
    shutil.rmtree(new.path, ignore_errors=True)


def _is_withdrawn(later: RunFolder) -> bool:
    """Wait until a run that was submitted at the same moment has begun or is withdrawn."""
    wait_for(lambda: not later.stages.exists() or any(later.claims.glob("*")), DECIDES_WITHIN_S, LOOK_EVERY_S)
    return not later.stages.exists()


def refuse_double(
    config: Config, stages: Sequence[str], only: Only = EVERYTHING, *, new: RunFolder | None = None
) -> RunFolder | None:
    """Return an active run with the same work and settings; raise SubmissionRefused if its settings differ."""
    for folder in filterfalse(has_ended, reversed(runs_in(config.cluster.runs))):
        with suppress(FileNotFoundError):  # it was withdrawn meanwhile
            if (new is None or folder.name != new.name) and _is_double(folder, config, stages, new):
                return _joined(folder, config, stages, only)
    return None


def _is_double(folder: RunFolder, config: Config, stages: Sequence[str], new: RunFolder | None) -> bool:
    """Tell whether an active run makes the same records."""
    if not _has_same_work(folder, config) or _only_looks(stages) != _only_looks(json.loads(folder.stages.read_text())):
        return False
    if not view(folder).goes_on:
        return False
    return new is None or folder.name < new.name or not _is_withdrawn(folder)


def _joined(folder: RunFolder, config: Config, stages: Sequence[str], only: Only) -> RunFolder:
    """Return this run, whose records are the same, if its settings are, too; else raise SubmissionRefused."""
    is_part = set(stages) <= set(json.loads(folder.stages.read_text()))
    is_confined = folder.only.exists() or not only.is_all  # to the records of a damage list
    if is_part and not is_confined and folder.config.read_text() == dump_resolved(config):
        return folder
    what = f"run {folder.name} already processes this data set with the same settings"
    raise SubmissionRefused(what, where=str(config.cluster.runs), remedy=status_or_cancel(folder.name))


def _only_looks(stages: Sequence[str]) -> bool:
    """Tell whether a run leaves the cache unchanged, so that it may run next to others."""
    return all(name == StageName.VALIDATE for name in stages)


def _has_same_work(folder: RunFolder, config: Config) -> bool:
    """Tell whether a run makes the same records: only its `cluster` settings may differ."""
    try:
        text = folder.config.read_text()
        with suppress(ConfigError):  # written by a later version
            text = dump_resolved(from_resolved(text))  # new settings get their defaults
        frozen = json.loads(text)
    except (OSError, ValueError):
        return False
    wanted = json.loads(dump_resolved(config))
    alike = all(frozen.get(name) == value for name, value in wanted.items() if name not in ("cluster", "train"))
    return alike and any(training in _trainings(frozen) for training in _trainings(wanted))


def _trainings(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what decides each training of a configuration: one, or the points of its sweep."""
    train = config.get("train", {})
    decided = {"train": {name: train.get(name) for name in (*DECISIVE, "command")}}
    sweep = train.get("sweep", {})
    points = sweep.get("points", ())
    if sweep.get("search", "none") != "none":
        decided["train"] |= {"sweep": sweep}
    return [with_settings(decided, point) for point in points] or [decided]


def refuse_others(folder: RunFolder, verb: str) -> None:
    """Refuse a verb to anyone but the owner of a run."""
    if not is_mine(folder.path):
        owner = user_name(folder.path.stat().st_uid)
        what = f"run {folder.name} belongs to {owner}, and only {owner} can {verb} it"
        remedy = Command.of("status", folder.name, then="   (to view it)")
        raise ConfigError(what, where=str(folder.path), remedy=remedy)


def opened_run(folder: RunFolder, verb: str) -> Opened:
    """Return a run of this user, its frozen configuration, its executor and its status."""
    refuse_others(folder, verb)
    config = read_resolved(folder.config)
    executor, status = open_executor(config), view(folder).status
    refuse_elsewhere(folder, status, executor, verb)
    executor.recognize(status.queued_as)
    return folder, config, executor, status


@dataclass(frozen=True, slots=True)
class Cancellation:
    """The jobs and processes that cancelling a run or a stage would end."""

    jobs: tuple[JobId, ...]
    tasks: int  # that have not ended
    supervisors: tuple[JobId, ...]
    process: int  # the supervisor's pid on this machine; 0: none

    @property
    def empty(self) -> bool:
        return not (self.jobs or self.supervisors or self.process)


def cancellation_of(status: RunStatus, executor: Executor, stage: str | None) -> Cancellation:
    """Find what cancelling would end; of a single stage only its jobs, which its supervisor then judges."""
    stages = [row for row in status.stages.values() if stage in (None, row.name)]
    queued = executor.queued([*(job for row in stages for job in row.live), *status.successors])
    live = [(row, job) for row in stages for job in row.live if job in queued]
    jobs, tasks = tuple(job for _, job in live), sum(len(parse_ranges(row.jobs[job].tasks)) for row, job in live)
    if stage is not None:
        return Cancellation(jobs, tasks, (), 0)
    here = status.host == socket.gethostname() and status.state is State.RUNNING
    supervisors = tuple(job for job in status.successors if job in queued)
    return Cancellation(jobs, tasks, supervisors, status.pid if here and not status.successors else 0)


def cancel(folder: RunFolder, status: RunStatus, executor: Executor, what: Cancellation, stage: str | None) -> None:
    """Cancel a run or a stage: supervisors first, so that none retries a cancelled task."""
    for job in reversed(what.supervisors):  # the next visit first: the end of the present one would start it
        executor.cancel([job])
    if what.process and status.has_process:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(what.process, signal.SIGTERM)
    executor.cancel(what.jobs)
    if stage is not None or status.state in ENDED:
        return
    now = StatusReader(folder).read()  # a supervisor may have submitted more before it ended
    executor.recognize(now.queued_as)
    more = [*reversed(now.successors), *(job for row in now.stages.values() for job in row.live)]
    executor.cancel([job for job in more if job not in (*what.supervisors, *what.jobs)])
    ledger = Ledger(folder, f"{SUPERVISOR}-{claim_visit(folder, status.visits + 1):06d}")
    error = f"cancelled by {user_name(os.getuid())} on {socket.gethostname()}; finished work is kept"
    ledger.emit(EventKind.RUN_ENDED, state=State.STOPPED.value, error=error, exit_code=STOPPED_CODE)
    ledger.close()


def points_to_cancel(status: RunStatus, points: Sequence[str], wanted: Sequence[str]) -> dict[int, str]:
    """Return the unfinished tasks of these points, by number; raise if there are none or a name is wrong."""
    if not points:
        what, remedy = f"run {status.name} is not a sweep and has no points", Command.of("cancel", status.name)
        raise ConfigError(what, where="--point", remedy=remedy)
    chosen = dict.fromkeys(points[number] for name in wanted for number in named_points(name, points))
    stage, again = status.stages.get(StageName.TRAIN), Command.of("status", status.name)
    if stage is None or not stage.submitted:
        what = f"run {status.name} has not started to train: single points cannot be cancelled yet"
        raise ConfigError(what, where="--point", remedy=again)
    states = {name: stage.state_of(stage.task(number)) for number, name in enumerate(stage.names)}
    going = {number: name for number, name in enumerate(stage.names) if name in chosen and states[name] not in OVER}
    if not going:
        # points without a task were trained before, or fit no machine
        said = ", ".join(f"{name} is {states.get(name, 'not trained in this run')}" for name in [*chosen][:LISTED])
        raise ConfigError(f"nothing to cancel: {said}", where="--point", remedy=again)
    return going


def cancel_points(folder: RunFolder, config: Config, executor: Executor, tasks: Sequence[int]) -> None:
    """Record that a user cancels these tasks of a sweep, and end them.

    It is recorded first: a supervisor that submits one of them meanwhile ends it, and those that run on its machine.
    """
    ledger = Ledger(folder, f"cancel-{socket.gethostname()}-{os.getpid()}")
    why = f"cancelled by {user_name(os.getuid())} on {socket.gethostname()}"
    for number in tasks:
        ledger.emit(EventKind.TASK_CANCELLED, stage=StageName.TRAIN.value, task=number, why=why)
    ledger.close()
    stage = StatusReader(folder).read().stages[StageName.TRAIN]
    for job in stage.live if executor.outlives else ():
        executor.adopt(job, job_of(folder, config, stage.jobs[job]))
        executor.cancel([job], stage.cancelled_groups(job))
