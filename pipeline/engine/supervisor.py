"""The supervisor of a run: submits each stage, retries failed tasks, and judges each stage by the content of the cache.

python -m pipeline.engine.supervisor RUN            supervise until the run has ended
python -m pipeline.engine.supervisor RUN --visit    do what is due, and hand over to the next visit

The ledger holds all of its state: after any crash the next supervisor continues from there.
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import math
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cluster.job_spec import Limits, mebibytes
from pipeline.cluster.machine import born_at
from pipeline.cluster.verdict import GO_ON, Cause
from pipeline.command_line import Command
from pipeline.config.load import from_resolved
from pipeline.config.masking import without_secrets
from pipeline.engine.dispatch import Dispatch, is_over
from pipeline.engine.handover import STOPPED_CODE, NextVisit, claim_visit, own_job, own_name, refuse_elsewhere
from pipeline.engine.notices import notify, notify_of_waits
from pipeline.engine.searching import Search, awaited
from pipeline.errors import (
    AllocationEnded,
    CacheFull,
    CacheUnusable,
    ClusterSilent,
    JobFailed,
    PipelineError,
    QueueFull,
    SubmissionRefused,
)
from pipeline.files import last_claim, shipped
from pipeline.journal.ledger import SUPERVISOR, Ledger, has_ended
from pipeline.journal.run_folder import RunFolder
from pipeline.journal.run_status import ENDED, State
from pipeline.journal.run_view import RunView, ViewReader
from pipeline.project.container_image import image_of
from pipeline.project.project import Project, open_executor
from pipeline.project.restriction import only_of
from pipeline.records import NOT_FINITE, EventKind
from pipeline.stages import table
from pipeline.stages.jobs import plan_stage, refuse_unfit_disk
from pipeline.stages.table import StageTrouble
from pipeline.store.cache_folder import RECIPES, update_indexes
from pipeline.waiting import wait_for

if TYPE_CHECKING:
    from types import FrameType

    from pipeline.cluster.job_spec import Executor, TaskStatus
    from pipeline.journal.attempts import Attempt, TaskRecord
    from pipeline.journal.run_status import StageStatus
    from pipeline.stages.stage import Stage

log = logging.getLogger(__name__)

STEP_S, CLUSTER_STEP_S = 0.1, 2.0  # between two reads of the ledger
LISTEN_EVERY_S = 0.2
PATIENCE_S, VISIT_POLL_S = 30.0, 1.0
MOST_UNFINISHED = 5  # unfinished visits in a row; then the next one is submitted only after some work
PASSING = (ClusterSilent, QueueFull)
FAILURES_SHOWN = 3
TROUBLESHOOTING = "docs/how-to/troubleshooting.md"  # has an entry for every cause
NOT_FINITE_ENTRY = "nan"  # its entry for a loss or a gradient that is not finite
KEPT = "   (finished work is kept)"


class SupervisorStopped(BaseException):
    """A signal asked this process to end."""


class TakenOver(BaseException):
    """A later visit owns the run now."""


class Supervisor:
    """Supervises one run, in one process."""

    def __init__(
        self, folder: RunFolder, executor: Executor, watch: Callable[[ViewReader], None] = lambda _reader: None
    ) -> None:
        self.folder, self.executor, self.watch, self.again = folder, executor, watch, folder.command()
        self.config = from_resolved(folder.config.read_text(), str(folder.config))
        self.reader = ViewReader(folder)
        self.status = self.reader.status
        self._catch_up()
        refuse_elsewhere(folder, self.status, executor, "resume")
        executor.recognize(self.status.queued_as)
        self.number = claim_visit(folder, self.status.visits + 1)
        self.ledger = Ledger(folder, writer := f"{SUPERVISOR}-{self.number:06d}")
        self.reader.ledger.skip(writer)
        self.stages = [table.stage(name, self.config) for name in json.loads(folder.stages.read_text())]
        self.dispatch = Dispatch(folder, self.config, executor, self.status, self._emit)
        self.search = Search(folder, executor, self._emit)
        self.next = NextVisit(folder, self.config, executor, self.status, self.number, self._emit)
        self.until, self.is_visit, self.is_job, self.is_crowded = math.inf, False, False, False
        self.at: Stage | None = None  # the current stage
        self.census: dict[str, Any] | None = None  # the result of the current stage, once it is judged

    def run(self) -> None:
        """Stay until the run has ended."""
        self._guarded(self._stay)

    def visit(self, patience_s: float = 0.0, until_s: float = math.inf) -> bool:
        """Do what is due now, and hand over; return whether the run has ended.

        Wait up to `patience_s` for the scheduler to report how jobs ended that have left the queue. After `until_s`
        no other stage is begun: the next visit does that.
        """
        if self.status.state in ENDED:
            return True
        self.until, self.is_visit, self.is_job = time.monotonic() + until_s, True, bool(own_job())
        try:
            return self._guarded(lambda: self._advance(self._poll(patience_s)) or self._leave())
        except TakenOver:
            return False

    def _stay(self) -> bool:
        changed, every_s = self._poll(), float(self.config.cluster.supervisor.watch)
        look_at = time.monotonic() + every_s if every_s and self.executor.outlives else math.inf
        while not self._advance(changed):
            changed = self.executor.step(CLUSTER_STEP_S if self.executor.outlives else STEP_S)
            self._catch_up()
            if time.monotonic() >= look_at:
                notify_of_waits(self.reader.now(), self.config.cluster.notify, self._emit)
                look_at += every_s
        return True

    def _poll(self, patience_s: float = 0.0) -> Sequence[TaskStatus]:
        """Return the state of all live tasks; wait up to `patience_s` for the end of jobs that have left the queue."""
        until, live = time.monotonic() + patience_s, self._live()
        self.executor.step(0)
        while (left_s := until - time.monotonic()) > 0:
            if all(map(is_over, self.executor.status({*live} - self.executor.queued(live)))):
                break
            self.executor.step(left_s)
        self._catch_up()
        return self.executor.status(live)

    def _leave(self) -> bool:
        """Make the next visit start when the jobs have ended."""
        self._refuse_if_taken_over()
        self.next.release([job for status in self.status.stages.values() for job in awaited(status)])
        return False

    def _refuse_if_taken_over(self) -> None:
        """Raise TakenOver if another supervisor owns the run."""
        if last_claim(self.folder.claims) > self.number:
            raise TakenOver

    def _guarded(self, work: Callable[[], bool]) -> bool:
        """Do the work of a supervisor; record an error that ends the run before raising it."""
        try:
            self._begin()
            ended = work()
        except TakenOver:
            raise
        except (KeyboardInterrupt, SupervisorStopped):
            if not self.executor.outlives:  # else the next supervisor finds the jobs
                self._end(State.STOPPED, "stopped by a signal; finished work is kept", STOPPED_CODE)
            raise
        except AllocationEnded as error:
            self._end(State.STOPPED, str(error), error.exit_code)
            raise
        except PASSING as error:
            if not (self.is_job or self._live()):  # else the next visit goes on, or `pipeline resume`
                self._fail(error)
            raise
        except OSError as error:
            if self.folder.path.exists():
                self._fail(error)
                raise
            again = replace(self.again, then="   (in the project's folder)")
            moved = JobFailed("this run's folder was moved or removed", where=str(self.folder.path), remedy=again)
            self._fail(moved)
            raise moved from error
        except BaseException as error:
            self._fail(error)
            raise
        if ended:
            self._end(State.DONE, "", 0)
        return ended

    def _fail(self, error: BaseException) -> None:
        """Record an error as the end of the run and of its stage; cancel its jobs."""
        text, code = f"a bug: {type(error).__name__}: {error}", 1
        if isinstance(error, PipelineError):
            error.in_project(self.again)
            text, code = str(error), error.exit_code
        if self.folder.path.exists():
            self._refuse_if_taken_over()
        self._cancel(self._live())
        if self.at is not None:
            self._end_stage(self.at, State.FAILED, [], text)
        self._end(State.FAILED, text, code)

    def _cancel(self, jobs: Sequence[str], tasks: Sequence[int] | None = None) -> None:
        try:
            self.executor.cancel(jobs, tasks)
        except SubmissionRefused as error:
            log.warning("jobs %s continue: %s", ", ".join(jobs), error)

    def _begin(self) -> None:
        """Record that this process is the supervisor, and take over the jobs of the last one."""
        if self.is_job and self.status.unfinished < MOST_UNFINISHED:
            self.next.submit()
        pid = os.getpid()
        about = {"host": socket.gethostname(), "pid": pid, "born": born_at(pid), "uid": os.getuid(), "job": own_job()}
        about |= {"name": own_name(), "cluster": self.executor.cluster, "until": self.executor.ends_at}
        if self.status.state is State.WAITING:
            image = {"image": digest} if (digest := image_of(self.config)) else {}
            self._emit(EventKind.RUN_STARTED, stages=[stage.name for stage in self.stages], **image, **about)
        self._emit(EventKind.VISIT, number=self.number, **about)
        remember, only = not all(stage.only_looks for stage in self.stages), only_of(self.folder)
        self.project = Project.open(
            self.config, remember=remember, beside=self.folder.task_root, only=only, executor=self.executor
        )
        for status in self.status.stages.values():
            self.dispatch.adopt(status)
        self._catch_up()

    def _advance(self, changed: Sequence[TaskStatus]) -> bool:
        """Do what is due in each stage; return whether all are done."""
        for stage in self.stages:
            status = self.status.stages.get(stage.name)
            if status is not None and status.state is State.DONE:
                continue
            self.at, self.census = stage, None
            if status is None or not status.submitted:
                status = self._open(stage)
            else:
                self._look_after(stage, status, changed)
            if status.live or self.is_crowded:
                return False
            self._judge(stage, status)
            if stage is not self.stages[-1] and time.monotonic() > self.until:
                return False
        return True

    def _open(self, stage: Stage) -> StageStatus:
        """Begin a stage: plan the missing work, and submit it."""
        self.watch(self.reader)  # shows the stage while it is planned, which can take minutes
        planned = plan_stage(self.project, stage, self.executor, self.folder)
        self._emit(EventKind.STAGE_SUBMITTED, stage=stage.name, **planned.to_json())
        status = self.status.stages[stage.name]
        if planned.survey.shards or planned.survey.search:
            if stage.kinds:
                refuse_unfit_disk(self.project, planned.survey, stage.kinds)
            self._send(stage, status)
        return status

    def _look_after(self, stage: Stage, status: StageStatus, changed: Sequence[TaskStatus]) -> None:
        """Record the tasks that have ended, and submit what is due."""
        self._end_cancelled(status)
        over = self.dispatch.of_tasks(status, filter(is_over, changed))
        self._await_reports(status, over)
        ended = self.dispatch.collect(self.project, stage, status, over)
        self._catch_up()
        if self._too_many_rejected(stage, status):
            self.executor.cancel(status.live)
        elif ended or not status.live:
            self._send(stage, status)

    def _await_reports(self, status: StageStatus, over: Sequence[TaskStatus]) -> None:
        """Wait a while for the workers' reports on tasks that have ended."""

        def are_there() -> bool:
            self._catch_up()
            return not self.dispatch.lacks_reports(status, over)

        if self.dispatch.lacks_reports(status, over):
            wait_for(are_there, self.config.cache.visibility_s, LISTEN_EVERY_S)

    def _send(self, stage: Stage, status: StageStatus) -> None:
        """Submit as many due tasks as the queue takes; raise if another supervisor has taken over."""
        self._refuse_if_taken_over()
        if self.is_visit:
            self.next.submit()
        try:
            self.dispatch.send(self.project, stage, status)
            if status.search and self.search.advance(self.project, stage, status):
                self.dispatch.send(self.project, stage, status)
        except SubmissionRefused as error:
            self.is_crowded = self.is_job and isinstance(error, QueueFull)  # the next visit tries again
            if not status.live and not self.is_crowded:
                raise
            log.warning("the remaining tasks of %s wait for queue slots: %s", stage.name, error)
        self._catch_up()
        self._end_cancelled(status)

    def _end_cancelled(self, status: StageStatus) -> None:
        """End running tasks that a user has cancelled."""
        for job in status.live:
            if groups := status.cancelled_groups(job):
                self._cancel([job], groups)

    def _judge(self, stage: Stage, status: StageStatus) -> None:
        """End a stage: judge it by the content of the cache, never by the reports of its tasks."""
        hopeless = status.waiting or any(task.open for task in status.work.values())  # waiting longer does not help
        patience_s = 0.0 if hopeless else self.config.cache.visibility_s
        if not stage.only_looks:
            update_indexes(self.project.cache, stage.kinds)  # so that look-ups need little memory
        judged = stage.judge(self.project, self.folder, patience_s)
        self.census = judged.to_json()
        if not stage.only_looks:
            self._index(stage, is_accepted=bool(judged.accepted))
        warnings = table.refuse_or_warn(stage, self.project, self.folder, judged, self._trouble(stage, status))
        account = self.dispatch.account()
        if account and account.is_low and status.work:
            warnings = [*warnings, account.figures()]
        self._end_stage(stage, State.DONE, warnings, "")
        self.at = None

    def _index(self, stage: Stage, *, is_accepted: bool) -> None:
        """Update the indexes and describe the recipe; only log a failure, as no result needs them."""
        try:
            if is_accepted and stage.kinds:
                for recipe in stage.recipes(self.project):
                    self.project.cache.describe(stage.name, recipe)
        except (CacheUnusable, CacheFull) as error:
            log.warning("the recipe of %s could not be recorded: %s", stage.name, error.what)
        update_indexes(self.project.cache, {*stage.kinds, RECIPES})

    def _trouble(self, stage: Stage, status: StageStatus) -> StageTrouble:
        """Return which tasks of a stage failed for good, and the command that helps."""
        open_ = [task for task in status.work.values() if task.open]
        given_up = [task.last for task in open_ if task.last]
        limits, planned_bytes = status.limits or Limits(), stage.mem_bytes(self.project) if given_up else 0
        remedy = _remedy(stage, given_up, self.again, planned_bytes, limits)
        is_damage = any(attempt.cause is Cause.DAMAGE for attempt in given_up)
        rejected = _rejected(status) if stage.counts_items else 0
        return StageTrouble(_describe(status, open_), status.waiting, self.again, remedy, rejected, is_damage=is_damage)

    def _live(self) -> list[str]:
        """Return the jobs that have not ended."""
        return [job for status in self.status.stages.values() for job in status.live]

    def _too_many_rejected(self, stage: Stage, status: StageStatus) -> bool:
        """Tell whether more items are already rejected than the configuration allows."""
        if not stage.counts_items:
            return False
        return table.too_many(_rejected(status), status.items, self.config.data.max_rejected_fraction)

    def _catch_up(self) -> None:
        """Apply the events of other processes; update the display."""
        self.reader.read()
        self.watch(self.reader)

    def _emit(self, kind: EventKind, **data: Any) -> None:
        """Append an event to the ledger, and apply it."""
        self.status.apply(self.ledger.emit(kind, **data))

    def _end_stage(self, stage: Stage, state: State, warnings: list[str], error: str) -> None:
        """Record how a stage ended, and notify people."""
        about = {"stage": stage.name, "state": state.value, "census": self.census}
        self._emit(EventKind.STAGE_ENDED, **about, warnings=warnings, error=error)
        self._catch_up()
        notify(self.config.cluster.notify, self.folder, stage.name, state.value, error)

    def _end(self, state: State, error: str, exit_code: int) -> None:
        """Record how the run ended, close its ledger and cancel the next visit."""
        if self.executor.outlives:
            notify_of_waits(RunView(self.folder, self.status), self.config.cluster.notify, self._emit)
        self._emit(EventKind.RUN_ENDED, state=state.value, error=error, exit_code=exit_code)
        self._catch_up()
        self.ledger.close()
        if self.next.job:
            self._cancel([self.next.job])


def _rejected(status: StageStatus) -> int:
    """Return the number of items that the tasks have rejected so far."""
    return status.reasons.total() + status.refused


def _describe(stage: StageStatus, tasks: Sequence[TaskRecord]) -> list[str]:
    """Describe failed tasks: the first few with cause and log, then the number of the others."""
    lines = []
    failures, page = [(task, task.last) for task in tasks if task.last], shipped(TROUBLESHOOTING)
    for task, attempt in failures[:FAILURES_SHOWN]:
        tries = f" (attempt {attempt.number})" if attempt.number > 1 else ""
        own_words = f"\n    {attempt.said}" if attempt.said and attempt.said not in attempt.reason else ""
        then = f"\n    then: {task.then[attempt.number]}" if task.then.get(attempt.number) else ""
        ended = f"{attempt.state}: {_reason(attempt)[0]}{own_words}{then}"
        lines.append(f"  {stage.called(attempt.task)}{tries}: {ended}\n    log: {attempt.log}")
        entry = NOT_FINITE_ENTRY if NOT_FINITE in attempt.reason else attempt.cause.value
        lines.append(f"    more: {page if page.is_file() else TROUBLESHOOTING}#{entry}")
    more = len(failures) - FAILURES_SHOWN
    return lines + ([f"  and {more} more tasks"] if more > 0 else [])


def _reason(attempt: Attempt) -> tuple[str, str]:
    """Return why an attempt failed, and the command that its error suggests, if any."""
    if attempt.cause is not Cause.REFUSED:
        return attempt.reason, ""
    reason, _, remedy = attempt.reason.partition("\n  next: ")
    return reason, remedy


def _remedy(
    stage: Stage, failures: Sequence[Attempt], again: Command, planned_bytes: int, limits: Limits
) -> Command | str:
    """Return what to try next: the command of an error, or the run's with more memory or time."""
    for attempt in failures:
        if remedy := _reason(attempt)[1]:
            return remedy
        if attempt.cause is Cause.HOST_OOM:
            most = min(max(2 * attempt.ask.mem_bytes, planned_bytes), limits.mem_bytes or sys.maxsize)
            if most <= attempt.ask.mem_bytes:
                return again.with_settings(then=f"   (where a task can get more than {mebibytes(most)} of memory)")
            enough = mebibytes(most)
            return again.with_settings((f"cluster.{stage.name}.mem", enough), then=KEPT)
        if attempt.cause is Cause.TIMEOUT:
            enough = f"{math.ceil(2 * attempt.ask.time_s / 60)}m"
            return again.with_settings((f"cluster.{stage.name}.time", enough), then=KEPT)
        if attempt.cause is Cause.DAMAGE:
            return Command(("cache", "repair", "--yes"), then=f"   then   {again}{KEPT}")
    return again.with_settings(then="   (processes only missing items)")


def main(words: Sequence[str]) -> int:
    """Supervise a run until it ends, or for one visit; return the exit code."""
    atexit.register(gc.freeze)  # saves half a second of garbage collection over torch at exit
    stop_on_signals()
    folder, visiting = RunFolder(Path(words[0])), "--visit" in words[1:]
    if visiting and has_ended(folder):
        return 0
    try:
        config = from_resolved(folder.config.read_text(), str(folder.config))
        with open_executor(config, poll_s=VISIT_POLL_S if visiting else None) as executor:
            supervisor = Supervisor(folder, executor)
            supervisor.visit(0.0 if "--now" in words else PATIENCE_S) if visiting else supervisor.run()
    except PipelineError as error:
        print(without_secrets(f"error: {error}"), file=sys.stderr)  # noqa: T201 - the supervisor's stderr is its log
        if visiting and has_ended(folder):
            return 0  # or its job would begin again
        return GO_ON if isinstance(error, PASSING) and own_job() else error.exit_code
    except TakenOver:
        return 0
    except SupervisorStopped:
        return STOPPED_CODE
    except Exception:  # noqa: BLE001 - a bug, which the ledger has
        print(without_secrets(traceback.format_exc()), file=sys.stderr)  # noqa: T201
        return 1
    return 0


def stop_on_signals() -> None:
    """Turn SIGTERM and SIGHUP into SupervisorStopped; a SIGHUP that `nohup` has it ignore stays ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


def stop(_signal: int, _frame: FrameType | None) -> None:
    """Raise SupervisorStopped."""
    raise SupervisorStopped


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
