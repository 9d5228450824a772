"""Visits: supervisors that are jobs. A visit first submits its successor, which starts when the visit has ended.

So the run continues even if a visit is killed. A visit that has finished makes its successor wait for the jobs of
tasks; a visit that ends the run cancels its successor. A visit claims its number by creating a file exclusively. The
highest number owns the run: a visit that finds a higher number submits nothing more.
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.cluster.job_spec import SUPERVISE, Job, Request
from pipeline.command_line import Command
from pipeline.engine.repair import avoid_bad_nodes
from pipeline.errors import ClusterSilent, ConfigError, JobFailed, SubmissionRefused
from pipeline.files import create_claim
from pipeline.journal.run_folder import shown_mode, writing_run
from pipeline.journal.run_status import ENDED
from pipeline.project.run_code import SUPERVISOR, module_command
from pipeline.records import EventKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeline.cluster.job_spec import Executor, JobId
    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import RunStatus

log = logging.getLogger(__name__)

STOPPED_CODE = 130  # of a run that a user stopped
LATER_S = 600  # start of the next visit if there is no job to wait for


def claim_visit(folder: RunFolder, number: int) -> int:
    """Claim a visit number: this one, or the first free one after it."""
    claimant = f"{socket.gethostname()} {os.getpid()} {own_job()}\n"
    with writing_run(folder.claims):
        while not create_claim(folder.claims / f"{number:06d}", claimant):
            number += 1
    return number


def own_job() -> JobId:
    """Return the job id if this process is a supervisor job, else an empty text."""
    return os.environ.get("SLURM_JOB_ID", "") if SUPERVISE in own_name().split("-") else ""


def own_name() -> str:
    """Return the name of the Slurm job that this process runs in; empty outside of a job."""
    return os.environ.get("SLURM_JOB_NAME", "")


def refuse_elsewhere(folder: RunFolder, status: RunStatus, executor: Executor, verb: str) -> None:
    """Refuse a run whose jobs are on another cluster: they can be neither seen nor cancelled from here."""
    if status.cluster and status.state not in ENDED and (what := status.elsewhere(executor.cluster)):
        gone = f"or, if that cluster no longer exists: rm -r {shlex.quote(str(folder.path))}"
        remedy = Command.of(verb, folder.name, then=f"   (on a login node of {status.cluster}), {gone}")
        raise ConfigError(what, where=str(folder.path), remedy=remedy)


class NextVisit:
    """The job of the next visit."""

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        executor: Executor,
        run: RunStatus,
        number: int,
        emit: Callable[..., None],
    ) -> None:
        """Take the number of this visit as `number`."""
        self._folder, self._config, self._executor, self._run, self._emit = folder, config, executor, run, emit
        self._number = number + 1
        self.job: JobId = ""  # empty until it is in the queue

    def submit(self) -> None:
        """Submit it, unless an earlier start of this visit, or another visit, has done so.

        It starts when this job has ended; in ten minutes if this process is not a job.
        """
        own = own_job()
        if self.job:
            return
        if own:
            self._executor.recognize({own: own_name()})
        waiting = [job for job in self._run.successors[-1:] if job != own and self._executor.queued([job])]
        if waiting:
            self.job = waiting[0]
            return
        visit = self._visit(after_any=(own,)) if own else self._visit(begin_s=LATER_S)
        self.job = self._executor.submit(visit)
        names = {own: own_name(), self.job: visit.tag} if own else {self.job: visit.tag}
        self._emit(EventKind.SUCCESSOR, jobs=[*names], names=[*names.values()])

    def release(self, live: Sequence[JobId]) -> None:
        """Let it start when these jobs have ended, on nodes that did not fail.

        Submit a replacement if it was cancelled meanwhile, or if the site forbids changing jobs.
        """
        self.submit()
        visit = self._visit(after_any=tuple(live), begin_s=0 if live else LATER_S)
        name = self._run.names.get(self.job, "")
        if not self._reschedule(visit):
            before, name = self.job, f"{visit.tag}.again"  # the accounting still lists the first under its name
            self.job = self._executor.submit(replace(visit, tag=name))
            with suppress(SubmissionRefused):  # if it runs all the same, it finds this one in the queue
                self._executor.cancel([before])
        self._emit(EventKind.HANDED_OVER, jobs=[self.job], names=[name])

    def _reschedule(self, visit: Job) -> bool:
        """Update its job in the queue; return False if it is gone or cannot be changed."""
        if not self._executor.queued([self.job]):
            return False
        try:
            self._executor.reschedule(self.job, visit)
        except ClusterSilent:
            raise
        except SubmissionRefused as error:
            log.warning("job %s cannot be changed, so another one takes its place: %s", self.job, error.what)
            return False
        return True

    def _visit(self, *, after_any: tuple[JobId, ...] = (), begin_s: int = 0) -> Job:
        visit = supervisor_job(self._folder, self._config, f"{self._number}")
        return avoid_bad_nodes(self._run, self._executor, replace(visit, after_any=after_any, begin_s=begin_s))


def supervisor_job(folder: RunFolder | None, config: Config, visit: str) -> Job:
    """Return the job of a visit; without a folder, a sample for `--dry-run` and `doctor`."""
    wanted = config.cluster.supervisor
    return Job(
        name=SUPERVISE,
        argv=(*module_command(SUPERVISOR, folder), str(folder.path) if folder else "RUN", "--visit"),
        tasks=range(1),
        log_dir=str(folder.logs) if folder else "logs",
        tag=f"{folder.unique if folder else 'RUN'}-{SUPERVISE}-{visit}",
        request=Request(
            mem_bytes=int(wanted.mem),
            time_s=int(wanted.time),
            partition=wanted.partition or "",
            qos=wanted.qos or "",
        ),
    )


def pay_visit(folder: RunFolder) -> None:
    """Run one supervisor visit now, with the run's frozen code; raise when it fails."""
    done = subprocess.run([*module_command(SUPERVISOR, folder), str(folder.path), "--visit", "--now"], check=False)
    if done.returncode:
        what = f"its supervisor ended with {done.returncode}"
        raise JobFailed(what, where=folder.name, remedy=Command.of("status", folder.name))


def start_supervisor(folder: RunFolder) -> int:
    """Start a supervisor in a new session, so that it outlives this process and its terminal; return its pid."""
    mode = shown_mode(folder.path)
    log = (os.POSIX_SPAWN_OPEN, 1, str(folder.supervisor_log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
    files = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), log, (os.POSIX_SPAWN_DUP2, 1, 2)]
    command = [*module_command(SUPERVISOR, folder), str(folder.path)]
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=files, setsid=True)
