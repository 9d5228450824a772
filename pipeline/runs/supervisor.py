"""Follows a run to its end: submits each stage, watches its tasks, judges what they left in the store.

python -m pipeline.runs.supervisor RUN
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cluster.child import mebibytes
from pipeline.cluster.local import LocalExecutor
from pipeline.cluster.machine import Machine
from pipeline.cluster.spec import TaskState
from pipeline.config.load import from_resolved
from pipeline.errors import CacheFull, CacheUnusable, PipelineError
from pipeline.records import EventKind
from pipeline.runs import workflow
from pipeline.runs.folder import RunFolder
from pipeline.runs.ledger import Ledger, Reader
from pipeline.runs.project import Project
from pipeline.runs.status import RunState, RunStatus
from pipeline.runs.submit import Plan, plan, refuse_unfit_disk
from pipeline.runs.workflow import Trouble
from pipeline.store.cache import RECIPES
from pipeline.store.snapshot import IndexState

if TYPE_CHECKING:
    from types import FrameType

    from pipeline.cluster.spec import Executor, TaskStatus
    from pipeline.config.schema import Slots
    from pipeline.runs.workflow import Judged, Stage

log = logging.getLogger(__name__)

STEP_S = 0.1
FAILURES_SHOWN = 3
STOPPED_CODE = 130


def local_machine(slots: Slots) -> Machine:
    """Return what the configuration lends of this machine."""
    given = {"cpus": slots.cpus, "gpus": slots.gpus, "mem_bytes": slots.mem}
    return Machine.detect(**{name: value for name, value in given.items() if value != "auto"})


class Stopped(BaseException):
    """Somebody asked this process to end."""


class Supervisor:
    """Drives one run; everything it knows is in the ledger."""

    def __init__(self, folder: RunFolder, executor: Executor, watch: Callable[[RunStatus], None]) -> None:
        self.folder, self.executor, self.watch = folder, executor, watch
        self.config = from_resolved(folder.config.read_text(), str(folder.config))
        self.ledger, self.reader = Ledger(folder, "supervisor"), Reader(folder)
        self.status = RunStatus(folder.name)

    def run(self, stages: Sequence[str]) -> None:
        """Do the stages in order; whatever ends the run is written down before it is raised."""
        self._emit(EventKind.RUN_STARTED, stages=list(stages), host=socket.gethostname(), pid=os.getpid())
        try:
            self.project = Project.open(self.config)
            for name in stages:
                self._run_stage(workflow.stage(name))
        except PipelineError as error:
            self._end(RunState.FAILED, str(error), error.exit_code)
            raise
        except (KeyboardInterrupt, Stopped):
            self._end(RunState.STOPPED, "stopped by a signal; finished work is kept", STOPPED_CODE)
            raise
        except BaseException as error:
            self._end(RunState.FAILED, f"a bug: {type(error).__name__}: {error}", 1)
            raise
        self._end(RunState.DONE, "", 0)

    def _run_stage(self, stage: Stage) -> None:
        """Do one stage, and judge it by what is in the store, never by what its tasks say."""
        planned = plan(self.project, stage, self.executor.cpus, self.executor.gpus, self.folder)
        self._emit(EventKind.STAGE_SUBMITTED, stage=stage.name, cost=planned.found.cost, **planned.counts())
        self._catch_up()
        judged = None
        try:
            if planned.job is not None:
                refuse_unfit_disk(self.project, planned.found)
                self._follow(planned)
            status = self.status.stages[stage.name]
            hopeless = status.failures or status.waiting  # what was not done does not come by waiting
            patience_s = 0.0 if hopeless else self.config.cache.visibility_s
            judged = stage.judge(self.project, self.folder, patience_s)
            self._index(stage, judged)
            warnings = workflow.check(stage, self.project, self.folder, judged, self._trouble(planned))
        except PipelineError as error:
            found = judged.to_json() if judged else None
            self._end_stage(stage, RunState.FAILED, found, [], str(error))
            raise
        self._end_stage(stage, RunState.DONE, judged.to_json(), warnings, "")

    def _index(self, stage: Stage, judged: Judged) -> None:
        """Bring indexes up to date and describe the recipe; as neither is needed, not being able to is no failure."""
        try:
            if judged.accepted:
                self.project.cache.describe(stage.name, stage.recipe(self.project))
        except (CacheUnusable, CacheFull) as error:
            log.warning("the recipe of %s is not described: %s", stage.name, error.what)
        for store in map(self.project.cache.kind, sorted({*stage.kinds, RECIPES} & {*self.project.cache.kinds()})):
            try:
                if store.stat().index is not IndexState.CURRENT:
                    store.write_index()
            except CacheUnusable as error:
                log.warning("the index of %s stays behind: %s", store.kind, error.what)

    def _trouble(self, planned: Plan) -> Trouble:
        """Return how tasks of a stage failed."""
        status = self.status.stages[planned.stage.name]
        again = self.folder.again.read_text()
        remedy = _remedy({one["state"] for one in status.failures}, planned, again)
        return Trouble(_describe(status.failures, status.said), status.waiting, again, remedy)

    def _follow(self, planned: Plan) -> None:
        """Run the tasks of a stage until the last has ended, or until too much of the data is unusable."""
        assert planned.job is not None
        job = self.executor.submit(planned.job)
        unfinished = len(planned.found.shards)
        while unfinished:
            ended = [task for task in self.executor.step(STEP_S) if task.state.ended]
            for task in ended:
                self._report(planned.stage, task)
            unfinished -= len(ended)
            self._catch_up()
            if self._too_many_rejected(planned):
                self.executor.cancel([job])
        self._catch_up()

    def _report(self, stage: Stage, task: TaskStatus) -> None:
        """Write down how the executor saw a task end."""
        self._emit(
            EventKind.TASK_ENDED,
            stage=stage.name,
            task=task.task,
            state=task.state.value,
            reason=task.reason,
            exit_code=task.exit_code,
            peak_rss_bytes=task.peak_rss_bytes,
            log=task.stderr,
        )

    def _too_many_rejected(self, planned: Plan) -> bool:
        """Say whether more items are already rejected than the configuration lets pass."""
        if not planned.stage.counts_items:
            return False
        counts = planned.found.counts
        rejected = self.status.stages[planned.stage.name].reasons.total() + counts["refused"]
        return workflow.too_many(rejected, counts["items"], self.config.data.max_rejected_fraction)

    def _catch_up(self) -> None:
        """Take the news of the ledger into account and show them."""
        for event in self.reader.fresh():
            self.status.apply(event)
        self.watch(self.status)

    def _emit(self, kind: EventKind, **data: Any) -> None:
        """Write an event down."""
        self.ledger.emit(kind, **data)

    def _end_stage(
        self, stage: Stage, state: RunState, census: dict[str, Any] | None, warnings: list[str], error: str
    ) -> None:
        """Write down how a stage ended."""
        self._emit(
            EventKind.STAGE_ENDED, stage=stage.name, state=state.value, census=census, warnings=warnings, error=error
        )

    def _end(self, state: RunState, error: str, exit_code: int) -> None:
        """Write down how the run ended."""
        self._emit(EventKind.RUN_ENDED, state=state.value, error=error, exit_code=exit_code)
        self._catch_up()
        self.ledger.close()


def _describe(failures: Sequence[dict[str, Any]], said: Mapping[int, str]) -> list[str]:
    """Say which tasks failed and why, the first few in full."""
    lines = []
    for one in failures:
        own_words = f"\n    {said[one['task']]}" if one["task"] in said else ""
        lines.append(f"  task {one['task']}: {one['state']}: {one['reason']}{own_words}\n    log: {one['log']}")
    more = len(lines) - FAILURES_SHOWN
    return lines[:FAILURES_SHOWN] + ([f"  and {more} more tasks"] if more > 0 else [])


def _remedy(states: set[str], planned: Plan, again: str) -> str:
    """Return the command that helps; doing the same again does not help a task that hit a limit."""
    job = planned.job
    if job is not None and TaskState.OUT_OF_MEMORY.value in states and job.mem_bytes:
        enough = mebibytes(max(2 * job.mem_bytes, planned.mem_bytes))
        return f"{workflow.with_setting(again, f'cluster.{job.name}.mem', enough)}   (finished work is kept)"
    if job is not None and TaskState.TIMEOUT.value in states and job.time_s:
        enough = f"{math.ceil(2 * job.time_s / 60)}m"
        return f"{workflow.with_setting(again, f'cluster.{job.name}.time', enough)}   (finished work is kept)"
    return f"{again}   (does only what is missing)"


def main(arguments: Sequence[str]) -> int:
    """Supervise a run in the background."""
    stop_on_signals()
    folder = RunFolder(Path(arguments[0]))
    stages = json.loads(folder.stages.read_text())
    config = from_resolved(folder.config.read_text(), str(folder.config))
    try:
        with LocalExecutor(local_machine(config.cluster.slots)) as executor:
            Supervisor(folder, executor, lambda _status: None).run(stages)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the supervisor's stderr is its log
        return error.exit_code
    except Stopped:
        return STOPPED_CODE
    return 0


def stop_on_signals() -> None:
    """Let what asks this process to end bring an orderly end; a hang-up that `nohup` has it ignore stays ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


def stop(_signal: int, _frame: FrameType | None) -> None:
    """Turn a signal into an orderly end."""
    raise Stopped


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
