"""Nothing waits in silence: what does not pass by itself is told once, and once more when it is over.

Between two visits of a supervisor a small job looks every few minutes; `pipeline status` does so whenever it is typed,
which helps where no job can start at all. The ledger keeps what was found.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from pipeline.config.load import read_resolved
from pipeline.engine.handover import log, notify, own_job, supervisor_job
from pipeline.errors import PipelineError
from pipeline.files import is_mine
from pipeline.journal.ledger import Ledger, has_ended
from pipeline.journal.run_status import State
from pipeline.journal.run_view import RunView, ViewReader
from pipeline.records import EventKind
from pipeline.report.stage_lines import wait_lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from pipeline.cluster.job_spec import Executor, Job
    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import RunStatus, Wait

WATCH = "watch"  # the word that asks for a look, and how the ledger of those who look is named
BEGAN, OVER = "waiting", "waited"  # the states that people are told
LOOK_S = 600  # its time limit


def tell(run: RunView, config: Config, emit: Callable[..., Any] | None = None) -> None:
    """Record and tell what has begun, since the last look, to wait for what does not pass by itself, and what is over.

    Without `emit` the events go to a file of this process's own.
    """
    if run.queue.tasks is None:  # nothing is known
        return
    folder, status, found = run.folder, run.status, run.stuck
    now, still = round(time.time(), 3), {(wait.of, wait.reason) for wait in found}
    begun = [_numbered(status, replace(wait, since=now)) for wait in found if status.open_wait(wait) is None]
    over = [wait for wait in status.waits.values() if not wait.is_over and (wait.of, wait.reason) not in still]
    if not begun and not over:
        return
    ledger = None if emit else Ledger(folder, f"{WATCH}-{own_job() or os.getpid()}")
    for kind, waits in ((EventKind.WAITING, begun), (EventKind.WAITED, [replace(wait, until=now) for wait in over])):
        for wait in waits:
            if ledger is not None:
                status.apply(ledger.emit(kind, **asdict(wait)))
            elif emit is not None:
                emit(kind, **asdict(wait))
            if _is_first(folder, wait):
                notify(config.cluster.notify, folder, wait.of, OVER if wait.is_over else BEGAN, *wait_lines([wait]))
    if ledger is not None:
        ledger.close()


def _numbered(status: RunStatus, wait: Wait) -> Wait:
    """Return a wait that has begun, with the number of the times that these have waited for this."""
    before = sum((known.of, known.reason) == (wait.of, wait.reason) for known in status.waits.values())
    return replace(wait, number=before + 1)


def _is_first(folder: RunFolder, wait: Wait) -> bool:
    """Claim the telling of a wait's begin or end: several may look at once, and one tells."""
    name = re.sub("[^A-Za-z0-9]+", "_", wait.reason)
    path = folder.told / f"{wait.of}-{name}-{wait.number}{'-over' if wait.is_over else ''}"
    try:
        folder.told.mkdir(exist_ok=True)
        path.open("x").close()
    except OSError:  # somebody else has; or nothing can be written here, and then nobody could know what was told
        return False
    return True


def tell_of_own(run: RunView) -> None:
    """Do as `tell` where the run goes on and is this user's; where it cannot be recorded, it is only shown."""
    is_news = run.stuck or not all(wait.is_over for wait in run.status.waits.values())
    if not run.goes_on or not is_news or not is_mine(run.folder.path):
        return
    try:
        tell(run, read_resolved(run.folder.config))
    except PipelineError as error:
        log.warning("waiting jobs could not be recorded: %s", error.what)


def submit_watch(
    folder: RunFolder, config: Config, executor: Executor, visit: int, number: int, emit: Callable[..., Any]
) -> None:
    """Submit the next look of a visit's time; a queue that does not take it is no reason to fail."""
    every_s = int(config.cluster.supervisor.watch)
    if not every_s:
        return
    try:
        job = _watch_job(folder, config, visit, number, every_s)
        job_id = executor.submit(job)
    except PipelineError as error:
        log.warning("waiting jobs are checked only at the next visit: %s", error.what)
        return
    emit(EventKind.WATCH_SUBMITTED, visit=visit, number=number, job=job_id, name=job.tag)


def _watch_job(folder: RunFolder, config: Config, visit: int, number: int, every_s: int) -> Job:
    job, tag = supervisor_job(folder, config, ""), f"{folder.unique}-{WATCH}-{visit}-{number}"
    argv = (*job.argv[:-1], f"--{WATCH}", str(visit))
    job = job.asking(time_s=min(LOOK_S, job.request.time_s or LOOK_S))
    return replace(job, tag=tag, argv=argv, begin_s=every_s)


def watch(folder: RunFolder, config: Config, executor: Executor, visit: int) -> None:
    """Look once at what a run waits for, and submit the next look; a later visit has looks of its own."""
    reader = ViewReader(folder)
    if reader.read().visits > visit or has_ended(folder):
        return
    tell(reader.view(), config)
    status = reader.status
    if status.state is State.RUNNING and status.visits == visit:
        ledger = Ledger(folder, f"{WATCH}-{own_job() or os.getpid()}")
        submit_watch(folder, config, executor, visit, status.watch[0] + 1, ledger.emit)
        ledger.close()
