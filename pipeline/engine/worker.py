"""Runs one task of one stage: the process that a job starts.

python -m pipeline.engine.worker RUN STAGE TASK [--attempt N --mem BYTES --shrink K --careful]

A task with several GPUs starts this module once for each GPU, with --part. With --ended it does no work: it prints
whether the job script should restart the processes of a training.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import math
import os
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pipeline.cluster.verdict import GO_ON, SIGNALLED
from pipeline.config.load import from_resolved
from pipeline.config.masking import without_secrets
from pipeline.dataset.reader_items import ITEMS_READ
from pipeline.device.kinds import VISIBLE
from pipeline.engine.side_by_side import run_side_by_side
from pipeline.errors import CacheFull, NodeUnfit, PipelineError
from pipeline.journal.ledger import Ledger, Note
from pipeline.journal.run_folder import RunFolder
from pipeline.memory.runtime.meters import GpuSampler, highest_resident_bytes
from pipeline.project.project import Project
from pipeline.project.restriction import only_of
from pipeline.project.run_code import WORKER, module_command
from pipeline.records import EventKind, NodePlace, RankPlace, TaskContext
from pipeline.stages import script as script_stage
from pipeline.stages import table
from pipeline.store.cache_folder import update_indexes
from pipeline.store.format.disk import FULL
from pipeline.training.ranks import RankLost
from pipeline.training.ranks.launch import ALONE_S, FORWARDED, launch_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType
    from typing import Any

    from pipeline.records import Reason, TaskReport
    from pipeline.stages.stage import Stage

PROGRESS_EVERY_S = 0.5
WARNINGS_MOST = 20  # of a process, in the ledger
BEGAN = time.time()
OWN_LOG = "/proc/self/fd/2"


class TaskStopped(BaseException):
    """A signal asked this process to end; finished work is published on the way out."""

    came_further: ClassVar[bool] = False  # whether this start made progress

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def exit_code(self) -> int:
        """Return GO_ON (restart me) near the time limit, or as killed by SIGTERM if nothing progressed.

        After a cancellation or preemption the scheduler decides whether to restart the task.
        """
        if self.number == signal.SIGTERM:
            return SIGNALLED + self.number
        return GO_ON if self.came_further else SIGNALLED + signal.SIGTERM


def main(words: Sequence[str]) -> int:
    """Do one task, or one process's part of it, and record it in the ledger; return the exit code."""
    atexit.register(gc.freeze)  # saves half a second of garbage collection over torch at exit
    for number in FORWARDED:
        signal.signal(number, _stop)
    arguments = _parse(words)
    folder = RunFolder(Path(arguments.run))
    if arguments.beside:  # tasks that share a job are never restarted in it
        return run_side_by_side(words, folder, arguments) if arguments.ended is None else 0
    place, node = _place(arguments), NodePlace.of(os.environ)
    writer = f"{arguments.stage}-{arguments.task:06d}" + (
        f"-{place.rank}" if place else f"-node{node.number}" if node.number else ""
    )
    facts: dict[str, Any] = {"stage": arguments.stage, "task": arguments.task, "attempt": arguments.attempt}
    ledger = Ledger(folder, writer)
    if arguments.ended is not None:
        return _answer_job_script(folder, ledger, facts, arguments.ended, arguments.spent)
    try:
        # The leader reports for the whole task
        leads = node.number == 0 if place is None else place.rank == 0 and not arguments.part
        if leads:
            ledger.emit(EventKind.TASK_STARTED, **facts, host=socket.gethostname())
        config = from_resolved(folder.config.read_text(), str(folder.config))
        stage = table.stage(arguments.stage, config)
        remember, only = not stage.only_looks, only_of(folder)
        project = Project.open(config, remember=remember, beside=folder.task_root, only=only)
        if leads and stage.kinds:
            kinds = {kind for name in json.loads(folder.stages.read_text()) for kind in table.known_stage(name).kinds}
            update_indexes(project.cache, kinds, far_behind=True)
        processes = stage.processes(project)
        if place is None and processes > 1:
            # Each of its processes sees all GPUs, as under torchrun
            if stage.is_script:
                words = [*words, "--lent", os.environ.get(VISIBLE, "")]
            command = [*module_command(WORKER, folder), *words]
            alone_s = ALONE_S if stage.together else math.inf  # one that fails does not stop others that work alone
            launch = partial(launch_ranks, command, processes, node, alone_s=alone_s)
            return _start_processes(folder, ledger, facts, launch, node)
        if stage.together:
            for number in FORWARDED:
                signal.signal(number, _note_signal)
        if arguments.lent is not None:
            os.environ[VISIBLE] = arguments.lent
        with closing(GpuSampler.of_environment()) as gpus:
            work_through(stage, project, folder, arguments, place, News(ledger, facts, gpus), leads=leads)
    except script_stage.Ended as ended:
        if not ended.quiet:
            _record_end(ledger, facts, ended.what, ended.code, ended.trouble)
            print(without_secrets(ended.what), file=sys.stderr)  # noqa: T201 - a task's stderr is its log
        return ended.code
    except TaskStopped as stopped:
        _record_end(ledger, facts, "stopped by a signal", stopped.exit_code, "")
        return stopped.exit_code
    except PipelineError as error:
        error.in_project(folder.command())
        _record_end(ledger, facts, str(error), error.exit_code, failure_kind(error))
        print(without_secrets(f"error: {error}"), file=sys.stderr)  # noqa: T201 - a task's stderr is its log
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the supervisor reads it from the ledger
        print(without_secrets(traceback.format_exc()), file=sys.stderr)  # noqa: T201
        _record_end(ledger, facts, f"{type(error).__name__}: {error}", 1, failure_kind(error))
        return 1
    return 0


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of a task."""
    parser = argparse.ArgumentParser(WORKER)
    parser.add_argument("run")
    parser.add_argument("stage")
    parser.add_argument("task", type=int)
    parser.add_argument("--attempt", type=int, default=1)
    parser.add_argument("--mem", type=int, default=0, help="bytes available to this attempt")
    parser.add_argument("--shrink", type=int, default=0, help="how many times to halve the batch budget")
    parser.add_argument("--careful", action="store_true", help="one item at a time")
    parser.add_argument("--beside", help="all tasks of this job: several run side by side")
    parser.add_argument("--sharing", type=int, default=1, help="how many of these this one starts, itself the first")
    parser.add_argument("--part", help="this process of all processes, such as 0/2")
    parser.add_argument("--meeting", default="", help="the shared start name of cooperating processes")
    parser.add_argument("--ended", type=int, help="the exit code of the processes of this task")
    parser.add_argument("--spent", type=float, default=0.0, help="seconds of the job's time limit that are over")
    parser.add_argument("--lent", help="the GPUs of all processes on this node, if each must see all")
    return parser.parse_args(words)


def _record_end(ledger: Ledger, facts: dict[str, Any], what: str, exit_code: int, trouble: str) -> None:
    """Record that and why a task failed, if the disk is not full."""
    _record_if_possible(ledger, EventKind.TASK_FAILED, **facts, what=what, exit_code=exit_code, trouble=trouble)


def _record_if_possible(ledger: Ledger, kind: EventKind, **data: Any) -> None:
    """Record an event; on a full disk only log the error, so that the exit code stays."""
    try:
        ledger.emit(kind, **data)
    except PipelineError as refused:
        print(without_secrets(f"error: {refused}"), file=sys.stderr)  # noqa: T201 - a task's stderr is its log


def failure_kind(error: BaseException | None) -> str:
    """Classify an error and its causes: gpu_oom, host_oom, disk_full, node, or empty."""
    while error is not None:
        if type(error).__name__ == "OutOfMemoryError":  # torch's; it may never have been imported here
            return "gpu_oom"
        if isinstance(error, MemoryError):
            return "host_oom"
        if isinstance(error, CacheFull) or (isinstance(error, OSError) and error.errno in FULL):
            return "disk_full"
        if isinstance(error, NodeUnfit):
            return "node"
        error = error.__cause__ or error.__context__
    return ""


class News:
    """Records the progress of a task and the items that it rejects in the ledger."""

    def __init__(self, ledger: Ledger, facts: dict[str, Any], gpus: GpuSampler | None = None) -> None:
        self._ledger, self._facts, self._gpus, self._recorded_s = ledger, facts, gpus, 0.0
        self._rejected = Counter[str]()
        self.done = 0

    def refuse(self, key: str, reason: Reason, detail: str) -> None:
        """Record something that cannot be made, and why."""
        self._ledger.emit(EventKind.REFUSED, **self._facts, key=key, reason=reason.value, detail=detail)

    def add(self, reason: Reason | None) -> None:
        """Count an item as done; with a reason, as rejected."""
        self.done += 1
        if reason is not None:
            self._rejected[reason.value] += 1

    def record(self, kind: EventKind, report: TaskReport) -> None:
        """Record the count of items, the figures and the warnings; raise only if a finished task cannot be recorded."""
        of_gpus = self._gpus.figures() if self._gpus else {}
        measured = {"host_peak_bytes": highest_resident_bytes(), **of_gpus, **report.figures}
        about = {**self._facts, "done": self.done, "rejected": dict(self._rejected), "figures": measured}
        if report.warnings:
            about["warnings"] = list(report.warnings.values())[:WARNINGS_MOST]
        if kind is EventKind.PROGRESS:
            _record_if_possible(self._ledger, kind, **about)
        else:
            self._ledger.emit(kind, **about)

    def catch_up(self) -> None:
        """Record that this start has passed the progress of the last one, and how long that took."""
        _record_if_possible(self._ledger, EventKind.CAUGHT_UP, **self._facts, lost_s=round(time.time() - BEGAN, 3))

    def go_on(self, report: TaskReport) -> None:
        """Record progress, at most twice a second."""
        if time.monotonic() - self._recorded_s > PROGRESS_EVERY_S:
            self.record(EventKind.PROGRESS, report)
            self._recorded_s = time.monotonic()


def work_through(
    stage: Stage,
    project: Project,
    folder: RunFolder,
    arguments: argparse.Namespace,
    place: RankPlace | None,
    news: News,
    *,
    leads: bool = True,
) -> None:
    """Do a task; write its progress to the ledger, and the items in work to a note that survives any kill."""

    def note_items(names: Sequence[str]) -> None:
        figures = context.report.figures
        note.write(news.done or int(figures.get(script_stage.PROGRESS, 0)), names)
        if script_stage.PROGRESS in figures or ITEMS_READ in figures:  # such a task yields only at its end
            news.go_on(context.report)

    place = place or RankPlace(0, 1)
    with closing(Note(folder.on(arguments.stage, arguments.task, place.rank), arguments.attempt)) as note:
        context = TaskContext(
            refuse=news.refuse,
            on=note_items,
            ending=lambda: _stop_signal.number,
            mem_bytes=arguments.mem,
            shrink=arguments.shrink,
            careful=arguments.careful,
            attempt=arguments.attempt,
            place=place,
        )
        outcomes, behind = stage.work(project, folder, arguments.task, context), note.done_before
        try:
            with closing(outcomes):  # closing it publishes finished work
                for reason in outcomes:
                    news.add(reason)
                    TaskStopped.came_further = news.done > note.done_before
                    if 0 < behind < news.done:
                        behind = 0
                        news.catch_up()
                    news.go_on(context.report)
        except script_stage.Ended as ended:
            if ended.code == GO_ON:  # a script that saves but reports no step: count attempts as steps
                note.write(ended.step or arguments.attempt * ended.further, ())
            news.record(EventKind.PROGRESS, context.report)
            raise
        except RankLost:  # the items in work killed another process, not this one
            note.write(news.done, ())
            raise
        if context.report.ended_by:
            news.record(EventKind.PROGRESS, context.report)
            TaskStopped.came_further = context.report.moved
            raise TaskStopped(context.report.ended_by)
        note.write(news.done, ())
    news.record(EventKind.TASK_FINISHED if leads else EventKind.PROGRESS, context.report)


def _start_processes(
    folder: RunFolder, ledger: Ledger, facts: dict[str, Any], launch: Callable[[], int], node: NodePlace
) -> int:
    """Run a process for each GPU of this node; a training on one node may restart its processes."""
    from pipeline.engine.restart import restarts

    began = time.monotonic()
    while code := launch():
        if node.nodes > 1 or not restarts(folder, ledger, facts, code, time.monotonic() - began, OWN_LOG):
            return code
    if node.number == 0:
        ledger.emit(EventKind.TASK_FINISHED, **facts, done=0, rejected={}, figures={})  # its processes report figures
    return 0


def _answer_job_script(folder: RunFolder, ledger: Ledger, facts: dict[str, Any], code: int, spent_s: float) -> int:
    """Print `again` if the Slurm job script should restart the processes of the task."""
    from pipeline.engine.restart import restarts

    log = folder.logs / f"{os.environ.get('SLURM_ARRAY_JOB_ID')}_{os.environ.get('SLURM_ARRAY_TASK_ID')}.err"
    if restarts(folder, ledger, facts, code, spent_s, str(log)):
        print("again")  # noqa: T201 - the script reads it
    return 0


def _place(arguments: argparse.Namespace) -> RankPlace | None:
    """Return the rank of this process; None if it is the only process of its task or starts the others."""
    if arguments.part:
        return RankPlace.parse(arguments.part, arguments.meeting, NodePlace.of(os.environ).nodes)
    is_together = table.known_stage(arguments.stage).together
    return RankPlace.by_slurm(os.environ, arguments.attempt) if is_together else None


@dataclass(slots=True)
class _StopSignal:
    """The last signal that asked this rank to stop (0: none); training checks it between steps."""

    number: int = 0


_stop_signal = _StopSignal()


def _note_signal(number: int, _frame: FrameType | None) -> None:
    """Remember a signal; the work stops at its next safe point."""
    _stop_signal.number = number


def _stop(number: int, _frame: FrameType | None) -> None:
    """Raise TaskStopped for the first signal, and ignore later ones."""
    for ending in FORWARDED:
        signal.signal(ending, signal.SIG_IGN)
    raise TaskStopped(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
