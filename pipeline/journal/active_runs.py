"""What the cluster says of a run's jobs now: one look at the queue for all of them, which never takes long."""

from __future__ import annotations

import math
import os
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline.cluster import slurm_commands
from pipeline.cluster.accounting import CommandFailed
from pipeline.config.load import from_resolved
from pipeline.errors import ConfigError, PipelineError
from pipeline.journal.run_folder import NAME, RunFolder, is_newer, runs_in
from pipeline.journal.run_logs import end_of, harmless, supervisor_logs
from pipeline.journal.run_status import RunState, is_abandoned, status_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from pipeline.cluster.fields import Queued
    from pipeline.cluster.job_spec import JobId
    from pipeline.config.schema import Config
    from pipeline.journal.run_status import RunStatus, StageStatus

ASK_S = 5.0
ASK_AGAIN_S = 10.0  # who watches for days asks no more often than that
GOING_ON = (RunState.WAITING, RunState.RUNNING)


@dataclass(frozen=True)
class QueueLook:
    """The jobs of a run as the queue has them; None where it does not answer."""

    tasks: Mapping[str, Queued] | None
    trouble: str = ""

    @cached_property
    def _by_job(self) -> dict[JobId, list[Queued]]:
        found: dict[JobId, list[Queued]] = {}
        for name, task in (self.tasks or {}).items():
            found.setdefault(name.partition("_")[0], []).append(task)
        return found

    def queued(self, jobs: Iterable[JobId]) -> set[JobId]:
        """Return which of these jobs have not ended; all of them where the queue does not answer."""
        if self.tasks is None:
            return set(jobs)
        return {job for job in jobs if any(not task.state.ended for task in self._of(job))}

    def reasons(self, jobs: Iterable[JobId]) -> list[str]:
        """Return what the waiting tasks of jobs wait for, in words, what holds most of them first."""
        counted = Counter(task.waits_for for job in jobs for task in self._of(job) if task.waits_for)
        return [reason for reason, _ in counted.most_common()]

    def where(self, jobs: Iterable[JobId]) -> str:
        """Say where the first of jobs is that has not ended."""
        for job in jobs:
            for task in self._of(job):
                if not task.state.ended:
                    at = f"on {task.node}" if task.node else f"waits: {task.waits_for}" if task.waits_for else "waits"
                    return f"job {job} {at}"
        return ""

    def _of(self, job: JobId) -> list[Queued]:
        return self._by_job.get(job, [])


def look_at_queue(status: RunStatus) -> QueueLook:
    """Ask the queue about the jobs of a run that may not have ended."""
    jobs = _jobs(status)
    if status.state not in GOING_ON or not any(job.isdecimal() for job in jobs):
        return QueueLook({})
    try:
        return QueueLook(slurm_commands.queue(jobs, ASK_S))
    except CommandFailed as error:
        return QueueLook(None, error.what.splitlines()[0])


def _jobs(status: RunStatus) -> list[JobId]:
    """Return the jobs of a run that may not have ended."""
    return [*status.successors, *(job for stage in status.stages.values() for job in stage.live)]


class Sparing:
    """Asks the queue for who watches: at once about other jobs, and again about the same ones only after a while."""

    def __init__(self, every_s: float = ASK_AGAIN_S, ask: Callable[[RunStatus], QueueLook] = look_at_queue) -> None:
        self._every_s, self._ask = every_s, ask
        self._about: tuple[object, ...] = ()
        self._said, self._at = QueueLook({}), -math.inf

    def __call__(self, status: RunStatus) -> QueueLook:
        """Return what the queue says, or said a moment ago."""
        about = (status.state, *_jobs(status))
        if about != self._about or time.monotonic() - self._at >= self._every_s:
            self._said, self._about, self._at = self._ask(status), about, time.monotonic()
        return self._said


@dataclass(frozen=True)
class SeenRun:
    """A run as people see it: by its ledger, with what the queue says of it now."""

    status: RunStatus
    at: float = math.inf  # seconds since 1970; inf: nobody asks how long it will still take
    waits_for: Mapping[str, Sequence[str]] = field(default_factory=dict)  # stage → why its tasks wait
    supervisor: str = ""
    trouble: str = ""  # why the queue could not be asked
    losses: Mapping[str, Sequence[float]] = field(default_factory=dict)  # stage → its curve; as who watches it has it
    lately: Sequence[tuple[float, str]] = ()  # when something happened, and what

    def left_s(self, stage: StageStatus) -> float | None:
        """Return how long a stage will still take, if it goes on as it did."""
        return None if math.isinf(self.at) else left_s(stage, self.at)

    def to_json(self) -> dict[str, Any]:
        plain = self.status.to_json()
        for told in plain["stages"]:
            stage = self.status.stages[told["name"]]
            waits = list(self.waits_for.get(stage.name, ()))
            told |= {"waits_for": waits, "use": use(stage), "left_s": self.left_s(stage)}
        return plain | {"supervisor": self.supervisor, "trouble": self.trouble}


def run_as_shown(
    folder: RunFolder,
    status: RunStatus,
    this_host: str,
    catch_up: Callable[[], None],
    ask: Callable[[RunStatus], QueueLook] = look_at_queue,
) -> SeenRun:
    """Return a run as people see it: by its ledger, with what the queue says now."""
    now = ask(status)
    if is_abandoned(status, this_host, now):
        catch_up()  # a visit may have handed over since
        now = look_at_queue(status)
        if is_abandoned(status, this_host, now):
            status.abandon()
    waits_for = {stage.name: now.reasons(stage.live) for stage in status.stages.values()}
    return SeenRun(status, time.time(), waits_for, supervisor(folder, status, now), now.trouble)


def use(stage: StageStatus) -> dict[str, int | None]:
    """Return the most memory that a task was given, and the most that one has used."""
    ended = [one for task in stage.work.values() for one in task.ended]
    asks = [task.ask for task in stage.work.values() if task.ask]
    return {
        "asked_bytes": max((ask.mem_bytes for ask in asks), default=None),
        "peak_bytes": max((one.peak_rss_bytes for one in ended if one.peak_rss_bytes), default=None),
        "gpu_peak_bytes": max((one.gpu_peak_bytes for one in ended if one.gpu_peak_bytes), default=None),
    }


def left_s(stage: StageStatus, now: float) -> float | None:
    """Return how long a stage will still take if it goes on as it did; None before anything is done."""
    done = stage.items_done
    if stage.state is not RunState.RUNNING or not 0 < done < stage.missing:
        return None
    return (stage.missing - done) * max(0.0, now - stage.started_at) / done


def _last_words(folder: RunFolder, status: RunStatus) -> str:
    """Return how the log of the last supervisor ends, where it says anything."""
    for log in reversed(supervisor_logs(folder, status)):
        for path in log.paths:
            if (end := end_of(path, 3)) and end.strip():
                return f"gone; its log ends with\n  {harmless(end.strip())}\n  log: {path}"
    return ""


def supervisor(folder: RunFolder, status: RunStatus, now: QueueLook) -> str:
    """Say who looks after a run that goes on."""
    if status.state is RunState.ABANDONED:
        return _last_words(folder, status)
    if status.state is RunState.WAITING:
        return f"nothing was heard of it yet; what it printed: {folder.supervisor_log}"
    if status.state is not RunState.RUNNING:
        return ""
    if not status.successors:
        return f"process {status.pid} on {status.host}"
    jobs = ", ".join(status.successors)
    return now.where(status.successors) or f"job {jobs}" + (" (the queue does not answer)" if now.tasks is None else "")


HEARD_OF_S = 86_400  # a run of which nothing was heard for so long has never begun


@dataclass(frozen=True, slots=True)
class GoingRun:
    """A run that goes on, and its configuration, where this version can read it."""

    folder: RunFolder
    config: Config | None


def going_on(runs: Path, root: Path) -> list[GoingRun]:
    """Return the runs of a folder that go on and use the cache at `root`, as far as this user can see."""
    try:
        folders = runs_in(runs)
    except ConfigError:  # it is another user's
        return []
    found = []
    for folder in folders:
        config = _config_of(folder)
        if (config is None or uses(config, root)) and _goes_on(folder):
            found.append(GoingRun(folder, config))
    return found


def uses(config: Config, root: Path) -> bool:
    """Say whether a configuration reads a cache."""
    return root.resolve() in {path.resolve() for path in (config.cache.root, *config.cache.under)}


def hidden(runs: Path) -> list[str]:
    """Return the runs of a folder of which nothing can be told: private to others, or of a later version."""
    try:
        names = sorted(name for name in os.listdir(runs) if NAME.fullmatch(name))  # noqa: PTH208 - names are enough
        known = {folder.name for folder in runs_in(runs)}
    except FileNotFoundError:
        return []
    except (OSError, PipelineError):
        return [runs.name]
    unknown = [runs / name for name in names if name not in known]
    return [path.name for path in unknown if not os.access(path, os.X_OK) or is_newer(path)]


def _goes_on(folder: RunFolder) -> bool:
    """Say whether anybody works on a run; jobs may do so that nobody looks after."""
    status: RunStatus = status_of(folder, socket.gethostname())
    jobs = look_at_queue(status)
    if status.state is RunState.WAITING:
        return time.time() - folder.path.stat().st_mtime < HEARD_OF_S
    if status.state is RunState.RUNNING:
        status = status_of(folder, socket.gethostname(), jobs)
    if status.state is RunState.RUNNING:
        return True
    live = [job for stage in status.stages.values() for job in stage.live]
    return status.state is RunState.ABANDONED and bool(jobs.queued(live))


def _config_of(folder: RunFolder) -> Config | None:
    try:
        return from_resolved(folder.config.read_text(), str(folder.config))
    except (OSError, ConfigError):
        return None
