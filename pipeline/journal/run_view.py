"""The present view of a run, from its ledger and the queue: the source of all screens, documents and notifications."""

from __future__ import annotations

import math
import shutil
import socket
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline.cluster import slurm_commands
from pipeline.cluster.accounting import CommandFailed
from pipeline.cluster.job_spec import SUPERVISE, JobId
from pipeline.cluster.slurm_words import WAITING_STATES, Queued, remedy_of, word_of
from pipeline.errors import ConfigError
from pipeline.journal.ledger import has_ended
from pipeline.journal.run_folder import runs_in
from pipeline.journal.run_logs import end_of, harmless, supervisor_logs
from pipeline.journal.run_status import GOING_ON, State, StatusReader, Wait
from pipeline.units import short_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeline.journal.budget import Account
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import RunStatus, StageStatus

ASK_S = 5.0
ASK_AGAIN_S = 10.0  # most frequent poll of the queue by programs that watch for days
LAST_WORDS_BYTES = 4096
BEGINS_WITHIN_S = 600.0  # a supervisor without events for this long died at its start
NO_SUPERVISOR = "NoSupervisor"  # our own reason of a wait
NEVER_BEGAN_S = 86_400  # a run without events for this long never began


@dataclass(frozen=True)
class QueueLook:
    """The tasks of a run in the scheduler's queue; None if the queue does not answer."""

    tasks: Mapping[str, Queued] | None
    trouble: str = ""

    @cached_property
    def _by_job(self) -> dict[JobId, list[Queued]]:
        by_job: defaultdict[JobId, list[Queued]] = defaultdict(list)
        for name, task in (self.tasks or {}).items():
            by_job[name.partition("_")[0]].append(task)
        return by_job

    def queued(self, jobs: Iterable[JobId]) -> set[JobId]:
        """Return the unfinished ones of these jobs; all of them if the queue does not answer."""
        if self.tasks is None:
            return set(jobs)
        return {job for job, task in self._of(jobs) if not task.state.ended}

    def reasons(self, jobs: Iterable[JobId]) -> list[str]:
        """Return why tasks of these jobs wait, the most frequent reason first."""
        counted = Counter(task.waits_for for _, task in self._of(jobs) if task.waits_for)
        return [reason for reason, _ in counted.most_common()]

    def stuck(self, of: str, jobs: Iterable[JobId]) -> list[Wait]:
        """Return the waits of these jobs that need a person, one for each reason."""
        found: dict[str, list[Queued]] = {}
        for _, task in self._of(jobs):
            if remedy_of(task.state, task.reason, ""):
                found.setdefault(word_of(task.reason) or task.state.value, []).append(task)
        return [_wait(of, reason, tasks) for reason, tasks in found.items()]

    def delayed(self, jobs: Mapping[JobId, float], now: float) -> str:
        """Say how long tasks of these jobs (job → submission time) have waited, and when one may start."""
        waiting = [(jobs[job], task) for job, task in self._of(jobs) if task.state in WAITING_STATES]
        if not waiting:
            return ""
        expected = min((task.starts for _, task in waiting if task.starts and task.starts > now), default=None)
        when = f"{datetime.fromtimestamp(expected):%Y-%m-%d %H:%M}" if expected else ""  # noqa: DTZ006 - people's own
        start = f", the first expected to start at {when}" if when else ""
        return f"for {short_seconds(max(0.0, now - min(at for at, _ in waiting)))}{start}"

    def where(self, jobs: Iterable[JobId]) -> str:
        """Return the node of the first unfinished job, or why it waits; empty if all have ended."""
        for job, task in self._of(jobs):
            if not task.state.ended:
                at = f"on {task.node}" if task.node else f"waits: {task.waits_for}" if task.waits_for else "waits"
                return f"job {job} {at}"
        return ""

    def _of(self, jobs: Iterable[JobId]) -> Iterator[tuple[JobId, Queued]]:
        return ((job, task) for job in jobs for task in self._by_job.get(job, ()))


def _wait(of: str, reason: str, tasks: Sequence[Queued]) -> Wait:
    """Return the wait of some tasks, with the command that helps all of their jobs."""
    jobs = list(dict.fromkeys(task.job.partition("_")[0] for task in tasks))
    named, first = ",".join(jobs), tasks[0]
    words = first.waits_for or f"held by the scheduler ({first.state.value})"
    return Wait(of, reason, words=words, remedy=remedy_of(first.state, first.reason, named), tasks=len(tasks))


def look_at_queue(status: RunStatus) -> QueueLook:
    """Ask the queue about the jobs of a run that may not have ended."""
    jobs = status.queued_as
    if status.state not in GOING_ON or not any(job.isdecimal() for job in jobs):
        return QueueLook({})
    try:
        tasks = slurm_commands.queue(jobs, ASK_S, uid=status.uid)
        elsewhere = "" if tasks or not status.cluster else status.elsewhere(slurm_commands.cluster_name(ASK_S))
    except CommandFailed as error:
        return QueueLook(None, error.what.splitlines()[0])
    return QueueLook(None, elsewhere) if elsewhere else QueueLook(tasks)


@dataclass
class RunView:
    """A run by its ledger and its jobs by the queue; a deep view has the times of out-of-memory steps, too."""

    folder: RunFolder
    status: RunStatus
    queue: QueueLook = QueueLook({})
    at: float = math.inf  # seconds since 1970; inf: do not estimate the time left
    supervisor: str = ""  # its supervising process or job; of an orphaned run, the end of its supervisor's log
    account: Account | None = None  # use of the project's budget, if any

    @property
    def goes_on(self) -> bool:
        return self.status.state in GOING_ON

    @property
    def trouble(self) -> str:
        """Why the queue could not be asked."""
        return self.queue.trouble

    def waits_for(self, stage: StageStatus) -> list[str]:
        """Return why tasks of a stage wait, the most frequent reason first."""
        return self.queue.reasons(stage.live)

    def delayed(self, stage: StageStatus) -> str:
        """Say how long tasks of a stage have waited, and when one may start."""
        return self.queue.delayed({job: stage.jobs[job].at for job in stage.live}, self.at)

    def left_s(self, stage: StageStatus) -> float | None:
        """Return the seconds left for a running stage at its mean speed; None before the first item."""
        done = stage.items_done
        if stage.state is not State.RUNNING or math.isinf(self.at) or not 0 < done < stage.missing:
            return None
        return (stage.missing - done) * max(0.0, self.at - stage.started_at) / done

    @property
    def stuck(self) -> list[Wait]:
        """Present waits of its jobs and of its next visit that need a person."""
        status = self.status
        waits = [wait for stage in status.stages.values() for wait in self.queue.stuck(stage.name, stage.live)]
        if status.state is State.ABANDONED:
            words, remedy = "it has no supervisor", f"pipeline resume {status.name}"
            return [*waits, Wait(SUPERVISE, NO_SUPERVISOR, words=words, remedy=remedy)]
        return [*waits, *self.queue.stuck(SUPERVISE, status.successors)]

    @property
    def waits(self) -> list[Wait]:
        """Present and past waits of its jobs that need a person."""
        return [*self.status.waits, *(wait for wait in self.stuck if self.status.open_wait(wait) is None)]

    def to_json(self) -> dict[str, Any]:
        plain = self.status.to_json()
        for stage_data in plain["stages"]:
            stage = self.status.stages[stage_data["name"]]
            stage_data |= {"waits_for": self.waits_for(stage), "use": stage.use(), "left_s": self.left_s(stage)}
        plain |= {"waits": list(map(asdict, self.waits)), "supervisor": self.supervisor, "trouble": self.trouble}
        return plain | ({"budget": self.account.to_json()} if self.account else {})


class ViewReader(StatusReader):
    """Keeps the view of a run up to date; polls the queue only now and then."""

    def __init__(self, folder: RunFolder, *, deep: bool = False) -> None:
        super().__init__(folder, deep=deep)
        self._about: tuple[str, ...] = ()
        self._asked_at, self._queue = -math.inf, QueueLook({})

    def view(self) -> RunView:
        """Return the run as it is now. An active run without a supervisor is orphaned."""
        self.read()
        if self._is_abandoned(self.ask()):
            self.read()  # a visit may have handed over meanwhile
            if self._is_abandoned(self.ask(again=True)):
                self.status.abandon()
        return replace(self.now(), supervisor=self._supervisor())

    def now(self) -> RunView:
        """Return the run by the events read so far, without checking for a supervisor."""
        return RunView(self.folder, self.status, self.ask(), time.time())

    def ask(self, *, again: bool = False) -> QueueLook:
        """Return a look at the queue, at most some seconds old."""
        about = (self.status.state, *self.status.queued_as)
        if again or about != self._about or time.monotonic() - self._asked_at >= ASK_AGAIN_S:
            self._queue, self._about, self._asked_at = look_at_queue(self.status), about, time.monotonic()
        return self._queue

    def _is_abandoned(self, queue: QueueLook) -> bool:
        """Tell whether the run has no supervisor; False if that cannot be known from here."""
        status = self.status
        if status.state is State.WAITING:
            return time.time() - self.folder.stages.stat().st_mtime > BEGINS_WITHIN_S
        if status.state is not State.RUNNING:
            return False
        is_here = status.host == socket.gethostname()
        if is_here and status.has_process:
            return False
        return not queue.queued(status.successors) if status.successors else is_here or time.time() > status.until

    def _supervisor(self) -> str:
        """Return the supervising process or job of an active run, or the end of an orphaned run's supervisor log."""
        status, jobs = self.status, ", ".join(self.status.successors)
        if status.state is State.ABANDONED:
            return self._last_words()
        if status.state is State.WAITING:
            return f"it has not reported yet; its output: {self.folder.supervisor_log}"
        if status.state is not State.RUNNING:
            return ""
        if not jobs:
            return f"process {status.pid} on {status.host}"
        unseen = " (not visible from here)" if self._queue.tasks is None else ""
        return self._queue.where(status.successors) or f"job {jobs}{unseen}"

    def _last_words(self) -> str:
        """Return the last lines of the last supervisor's log; empty where there are none."""
        for log in reversed(supervisor_logs(self.folder, self.status)):
            for path in log.paths:
                if (end := end_of(path, 3)) and end.strip():
                    return f"gone; its log ends with\n  {harmless(end.strip())}\n  log: {path}"
        place = self.folder.path
        is_full = shutil.disk_usage(place).free < LAST_WORDS_BYTES
        return f"gone; it wrote no log because the disk is full: df -h {place}" if is_full else ""


def view(folder: RunFolder, *, deep: bool = False) -> RunView:
    """Return a run as it is now; `deep`: with the times at which steps ran out of memory."""
    return ViewReader(folder, deep=deep).view()


def active_runs(runs: Path, root: Path) -> list[RunFolder]:
    """Return the active runs in a folder that use the cache at `root`, as far as this user can read them."""
    try:
        folders = runs_in(runs)
    except ConfigError:  # another user's
        return []
    return [folder for folder in folders if _may_use(folder, root) and is_active(folder)]


def _may_use(folder: RunFolder, root: Path) -> bool:
    """Tell whether a run uses the cache at `root`; True if this version cannot read its configuration."""
    from pipeline.config.load import read_resolved  # imported late: slow, and not needed for a single run

    try:
        config = read_resolved(folder.config)
    except ConfigError:
        return True
    return root.resolve() in {path.resolve() for path in (config.cache.root, *config.cache.under)}


def is_active(folder: RunFolder) -> bool:
    """Tell whether a run is active. The jobs of an orphaned run count; a run removed meanwhile is not active."""
    try:
        if has_ended(folder):
            return False
        run = view(folder)
        status, live = run.status, [job for stage in run.status.stages.values() for job in stage.live]
        if not status.started_at:
            return time.time() - folder.path.stat().st_mtime < NEVER_BEGAN_S
        return status.state is State.RUNNING or (status.state is State.ABANDONED and bool(run.queue.queued(live)))
    except FileNotFoundError:
        if folder.path.exists():
            raise
        return False
