"""Ending a run, or one stage of it, on purpose."""

from __future__ import annotations

import getpass
import os
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.journal.attempts import numbers
from pipeline.journal.ledger import Ledger, Reader
from pipeline.journal.run_status import ENDED, RunState, fold
from pipeline.records import EventKind
from pipeline.runs.engine.handover import claim
from pipeline.runs.views.run_page import renew

if TYPE_CHECKING:
    from pipeline.cluster.job_spec import Executor, JobId
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import RunStatus

STOPPED_CODE = 130


@dataclass(frozen=True, slots=True)
class Cancellation:
    """What ending a run (or one stage) would end."""

    jobs: tuple[JobId, ...]
    tasks: int  # that have not ended
    supervisors: tuple[JobId, ...]
    process: int  # the supervisor's on this machine, 0 where there is none

    @property
    def empty(self) -> bool:
        """Tell whether there is nothing to end."""
        return not (self.jobs or self.supervisors or self.process)


def foresee(status: RunStatus, executor: Executor, stage: str | None) -> Cancellation:
    """Return what would be ended; of one stage only its jobs, which the supervisor then judges."""
    stages = [one for one in status.stages.values() if stage in (None, one.name)]
    queued = executor.queued([*(job for one in stages for job in one.live), *status.successors])
    live = [(one, job) for one in stages for job in one.live if job in queued]
    jobs, tasks = tuple(job for _, job in live), sum(len(numbers(one.jobs[job].tasks)) for one, job in live)
    if stage is not None:
        return Cancellation(jobs, tasks, (), 0)
    here = status.host == socket.gethostname() and status.state is RunState.RUNNING
    supervisors = tuple(job for job in status.successors if job in queued)
    return Cancellation(jobs, tasks, supervisors, status.pid if here and not status.successors else 0)


def is_ours(pid: int) -> bool:
    """Tell whether a process is one of this program; its number may be another's since."""
    try:
        return b"pipeline" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return not Path("/proc/self").exists()  # nobody can tell here


def cancel(folder: RunFolder, status: RunStatus, executor: Executor, what: Cancellation, stage: str | None) -> None:
    """End it: who would go on first, so that nobody repairs what is meant to end."""
    for job in reversed(what.supervisors):  # the standby before the one that it stands by for
        executor.cancel([job])
    if what.process and is_ours(what.process):
        with suppress(ProcessLookupError):
            os.kill(what.process, signal.SIGTERM)
    executor.cancel(what.jobs)
    if stage is not None or status.state in ENDED:
        return
    now = fold(folder.name, Reader(folder).news())  # a supervisor may have submitted more before it ended
    executor.cancel([job for one in now.stages.values() for job in one.live])
    ledger = Ledger(folder, f"supervisor-{claim(folder, status.visits + 1):06d}")
    error = f"cancelled by {getpass.getuser()} on {socket.gethostname()}; finished work is kept"
    ledger.emit(EventKind.RUN_ENDED, state=RunState.STOPPED.value, error=error, exit_code=STOPPED_CODE)
    ledger.close()
    renew(folder)  # its page, which says that it goes on
