"""Which runs are active: their jobs in the queue, how long they will take, and what happened recently."""

from __future__ import annotations

import math
import os
import shutil
import socket
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline.cluster import slurm_commands
from pipeline.cluster.accounting import CommandFailed
from pipeline.cluster.job_spec import SUPERVISE
from pipeline.cluster.slurm_words import WAITING_STATES, remedy_of, word_of
from pipeline.cluster.verdict import Cause
from pipeline.errors import ConfigError, PipelineError
from pipeline.journal.ledger import has_ended
from pipeline.journal.run_folder import NAME, RunFolder, is_newer, runs_in
from pipeline.journal.run_logs import end_of, harmless, supervisor_logs
from pipeline.journal.run_status import RunState, StatusReader, Wait
from pipeline.records import EventKind
from pipeline.units import short_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from pipeline.cluster.job_spec import JobId
    from pipeline.cluster.slurm_words import Queued
    from pipeline.config.schema import Config
    from pipeline.journal.budget import Account
    from pipeline.journal.run_status import RunStatus, StageStatus
    from pipeline.records import Event


ASK_S = 5.0
ASK_AGAIN_S = 10.0  # at most so often, by those who watch a run for days
GOING_ON = (RunState.WAITING, RunState.RUNNING)
LAST_WORDS_BYTES = 4096
BEGINS_WITHIN_S = 600.0  # a supervisor that has said nothing for so long died before it began


@dataclass(frozen=True)
class QueueLook:
    """The tasks of a run in the scheduler's queue; None where the queue does not answer."""

    tasks: Mapping[str, Queued] | None
    trouble: str = ""

    @cached_property
    def _by_job(self) -> dict[JobId, list[Queued]]:
        by_job: dict[JobId, list[Queued]] = {}
        for name, task in (self.tasks or {}).items():
            by_job.setdefault(name.partition("_")[0], []).append(task)
        return by_job

    def queued(self, jobs: Iterable[JobId]) -> set[JobId]:
        """Return which of these jobs have not ended; all of them where the queue does not answer."""
        if self.tasks is None:
            return set(jobs)
        return {job for job in jobs if any(not task.state.ended for task in self._of(job))}

    def reasons(self, jobs: Iterable[JobId]) -> list[str]:
        """Return why tasks of these jobs wait, the most frequent reason first."""
        counted = Counter(task.waits_for for job in jobs for task in self._of(job) if task.waits_for)
        return [reason for reason, _ in counted.most_common()]

    def stuck(self, of: str, jobs: Iterable[JobId]) -> list[Wait]:
        """Return for what tasks of these jobs wait that does not pass by itself, a reason each."""
        found: dict[str, list[Queued]] = {}
        for task in (task for job in jobs for task in self._of(job)):
            if remedy_of(task.state, task.reason, ""):
                found.setdefault(word_of(task.reason) or task.state.value, []).append(task)
        return [_wait(of, reason, tasks) for reason, tasks in found.items()]

    def delayed(self, jobs: Mapping[JobId, float], now: float) -> str:
        """Say for how long tasks of these jobs (with when they were submitted) have waited, and when one may start."""
        waiting = [(jobs[job], task) for job in jobs for task in self._of(job) if task.state in WAITING_STATES]
        if not waiting:
            return ""
        expected = min((task.starts for _, task in waiting if task.starts and task.starts > now), default=None)
        when = f"{datetime.fromtimestamp(expected):%Y-%m-%d %H:%M}" if expected else ""  # noqa: DTZ006 - people's own
        start = f", the first expected to start at {when}" if when else ""
        return f"for {short_seconds(max(0.0, now - min(at for at, _ in waiting)))}{start}"

    def where(self, jobs: Iterable[JobId]) -> str:
        """Return on which node the first unfinished job runs, or why it waits; empty where all have ended."""
        for job in jobs:
            for task in self._of(job):
                if not task.state.ended:
                    at = f"on {task.node}" if task.node else f"waits: {task.waits_for}" if task.waits_for else "waits"
                    return f"job {job} {at}"
        return ""

    def _of(self, job: JobId) -> list[Queued]:
        return self._by_job.get(job, [])


def _wait(of: str, reason: str, tasks: Sequence[Queued]) -> Wait:
    """Return a wait of some tasks, with the command that helps all of their jobs."""
    jobs = list(dict.fromkeys(task.job.partition("_")[0] for task in tasks))
    named, first = ",".join(jobs), tasks[0]
    words = first.waits_for or f"held by the scheduler ({first.state.value})"
    return Wait(of, reason, words=words, remedy=remedy_of(first.state, first.reason, named), tasks=len(tasks))


def stuck_in(status: RunStatus, queue: QueueLook) -> list[Wait]:
    """Return for what jobs of a run wait that does not pass by itself: those of its stages, and its next visit's."""
    waits = [wait for stage in status.stages.values() for wait in queue.stuck(stage.name, stage.live)]
    if status.state is RunState.ABANDONED:
        words, remedy = "it has no supervisor", f"pipeline resume {status.name}"
        return [*waits, Wait(SUPERVISE, "NoSupervisor", words=words, remedy=remedy)]
    return [*waits, *queue.stuck(SUPERVISE, status.successors[:1])]


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


class Sparing:
    """Asks the queue for those who watch a run: again about the same jobs only after a while."""

    def __init__(self, every_s: float = ASK_AGAIN_S, ask: Callable[[RunStatus], QueueLook] = look_at_queue) -> None:
        self._every_s, self._ask = every_s, ask
        self._about: tuple[object, ...] = ()
        self._look, self._at = QueueLook({}), -math.inf

    def __call__(self, status: RunStatus) -> QueueLook:
        """Return a look at the queue, at most some seconds old."""
        about = (status.state, *status.queued_as)
        if about != self._about or time.monotonic() - self._at >= self._every_s:
            self._look, self._about, self._at = self._ask(status), about, time.monotonic()
        return self._look


@dataclass(frozen=True)
class SeenRun:
    """A run as it is shown: its status by the ledger, and what the queue says now."""

    status: RunStatus
    at: float = math.inf  # seconds since 1970; inf: no estimate of the time left is wanted
    waits_for: Mapping[str, Sequence[str]] = field(default_factory=dict)  # stage → why its tasks wait
    supervisor: str = ""
    trouble: str = ""  # why the queue could not be asked
    # stage → for how long its tasks have waited, and until when, as the queue has it
    delayed: Mapping[str, str] = field(default_factory=dict)
    stuck: Sequence[Wait] = ()  # for what does not pass by itself
    losses: Mapping[str, Sequence[float]] = field(default_factory=dict)  # stage → its loss curve
    lately: Sequence[tuple[float, str]] = ()  # when something happened, and what
    account: Account | None = None  # of the project's budget, where it has one

    def left_s(self, stage: StageStatus) -> float | None:
        """Return the seconds that a stage will still take at its speed so far."""
        return None if math.isinf(self.at) else left_s(stage, self.at)

    @property
    def waits(self) -> list[Wait]:
        """What jobs wait for now, or waited for, that does not pass by itself."""
        return [*self.status.waits.values(), *(wait for wait in self.stuck if self.status.open_wait(wait) is None)]

    def to_json(self) -> dict[str, Any]:
        plain = self.status.to_json()
        for plain_stage in plain["stages"]:
            stage = self.status.stages[plain_stage["name"]]
            waits = list(self.waits_for.get(stage.name, ()))
            plain_stage |= {"waits_for": waits, "use": use(stage), "left_s": self.left_s(stage)}
        plain["waits"] = [asdict(wait) for wait in self.waits]
        budget = {"budget": self.account.to_json()} if self.account else {}
        return plain | {"supervisor": self.supervisor, "trouble": self.trouble, **budget}


def current_status(
    reader: StatusReader, ask: Callable[[RunStatus], QueueLook] = look_at_queue
) -> tuple[RunStatus, QueueLook]:
    """Return the status of a run, and the queue's word on its jobs; a running one without a supervisor is abandoned."""
    queue = ask(reader.read())
    if is_abandoned(reader, queue):
        reader.read()  # a visit may have handed over since
        queue = look_at_queue(reader.status)
        if is_abandoned(reader, queue):
            reader.status.abandon()
    return reader.status, queue


def status_of(folder: RunFolder) -> RunStatus:
    """Return the status of a run; a running one without a supervisor is abandoned."""
    return current_status(StatusReader(folder))[0]


def is_abandoned(reader: StatusReader, queue: QueueLook) -> bool:
    """Tell whether a run has lost its supervisor, or never had one; False where that cannot be known from here."""
    status = reader.status
    if status.state is RunState.WAITING:
        return time.time() - reader.folder.stages.stat().st_mtime > BEGINS_WITHIN_S
    if status.state is not RunState.RUNNING:
        return False
    is_here = status.host == socket.gethostname()
    if is_here and status.has_process:
        return False
    return not queue.queued(status.successors) if status.successors else is_here


def run_as_shown(
    folder: RunFolder, reader: StatusReader, ask: Callable[[RunStatus], QueueLook] = look_at_queue
) -> SeenRun:
    """Return a run as it is shown, by its ledger and the queue."""
    status, now = current_status(reader, ask)
    return replace(seen_in_queue(status, now), supervisor=supervisor(folder, status, now))


def seen_in_queue(status: RunStatus, now: QueueLook) -> SeenRun:
    """Return a run with what its tasks wait for."""
    stages, at = status.stages.values(), time.time()
    waits_for = {stage.name: now.reasons(stage.live) for stage in stages}
    delayed = {stage.name: now.delayed({job: stage.jobs[job].at for job in stage.live}, at) for stage in stages}
    return SeenRun(status, at, waits_for, trouble=now.trouble, delayed=delayed, stuck=stuck_in(status, now))


def use(stage: StageStatus) -> dict[str, int | None]:
    """Return the most memory that any task of a stage asked for, and the most that one used."""
    ended = [attempt for task in stage.work.values() for attempt in task.ended]
    asks = [task.ask for task in stage.work.values() if task.ask]
    return {
        "asked_bytes": max((ask.mem_bytes for ask in asks), default=None),
        "peak_bytes": max((attempt.peak_rss_bytes for attempt in ended if attempt.peak_rss_bytes), default=None),
        "gpu_peak_bytes": max((attempt.gpu_peak_bytes for attempt in ended if attempt.gpu_peak_bytes), default=None),
    }


def left_s(stage: StageStatus, now: float) -> float | None:
    """Return the seconds that a running stage will still take at its speed so far; None before an item is done."""
    done = stage.items_done
    if stage.state is not RunState.RUNNING or not 0 < done < stage.missing:
        return None
    return (stage.missing - done) * max(0.0, now - stage.started_at) / done


def _last_words(folder: RunFolder, status: RunStatus) -> str:
    """Return the last lines of the last supervisor's log; empty where there are none."""
    for log in reversed(supervisor_logs(folder, status)):
        for path in log.paths:
            if (end := end_of(path, 3)) and end.strip():
                return f"gone; its log ends with\n  {harmless(end.strip())}\n  log: {path}"
    is_full = shutil.disk_usage(folder.path).free < LAST_WORDS_BYTES
    return f"gone; it wrote no log because the disk is full: df -h {folder.path}" if is_full else ""


def supervisor(folder: RunFolder, status: RunStatus, now: QueueLook) -> str:
    """Return which process or job supervises an active run; of an abandoned one, how its supervisor's log ends."""
    if status.state is RunState.ABANDONED:
        return _last_words(folder, status)
    if status.state is RunState.WAITING:
        return f"it has not reported yet; its output: {folder.supervisor_log}"
    if status.state is not RunState.RUNNING:
        return ""
    if not status.successors:
        return f"process {status.pid} on {status.host}"
    jobs = ", ".join(status.successors)
    return now.where(status.successors) or f"job {jobs}" + (" (not visible from here)" if now.tasks is None else "")


HEARD_OF_S = 86_400  # a run without any event for so long never began


def going_on(runs: Path, root: Path) -> list[RunFolder]:
    """Return the active runs in a folder that use the cache at `root`, as far as this user can read them."""
    try:
        folders = runs_in(runs)
    except ConfigError:  # it is another user's
        return []
    active = []
    for folder in folders:
        config = _config_of(folder)
        if (config is None or uses(config, root)) and goes_on(folder):
            active.append(folder)
    return active


def uses(config: Config, root: Path) -> bool:
    """Tell whether a configuration uses the cache at `root`."""
    return root.resolve() in {path.resolve() for path in (config.cache.root, *config.cache.under)}


def hidden(runs: Path) -> list[str]:
    """Return the names of runs that cannot be read: private to other users, or of a later version."""
    try:
        names = sorted(name for name in os.listdir(runs) if NAME.fullmatch(name))  # noqa: PTH208 - names are enough
        known = {folder.name for folder in runs_in(runs)}
    except FileNotFoundError:
        return []
    except (OSError, PipelineError):
        return [runs.name]
    unknown = [runs / name for name in names if name not in known]
    return [path.name for path in unknown if not os.access(path, os.X_OK) or is_newer(path)]


def goes_on(folder: RunFolder) -> bool:
    """Tell whether a run is active; the jobs of an abandoned run count. A run that is removed meanwhile is not."""
    try:
        return not has_ended(folder) and _is_active(folder)
    except FileNotFoundError:
        if folder.path.exists():
            raise
        return False


def _is_active(folder: RunFolder) -> bool:
    status, queue = current_status(StatusReader(folder))
    if not status.started_at:
        return time.time() - folder.path.stat().st_mtime < HEARD_OF_S
    live = [job for stage in status.stages.values() for job in stage.live]
    return status.state is RunState.RUNNING or (status.state is RunState.ABANDONED and bool(queue.queued(live)))


def _config_of(folder: RunFolder) -> Config | None:
    from pipeline.config.load import read_resolved  # late: it is slow to import, and who asks for one run needs it not

    try:
        return read_resolved(folder.config)
    except ConfigError:
        return None


KEPT, ROOM = 40, 160  # happenings
MOST_LOSSES = 256  # of a stage; more are thinned
LOSS, OOMS = "loss", "ooms"
HAS_LOSS = (LOSS, f"script.{LOSS}")


@dataclass(frozen=True, slots=True)
class Happening:
    """An event worth telling people, of a stage or of one of its tasks."""

    at: float
    stage: str
    what: str
    task: str = ""  # its number, or a range
    more: int = 0  # tasks to which the same happened just before

    def is_like(self, other: Happening) -> bool:
        """Tell whether the same happened to another task."""
        return bool(self.task) and (self.stage, self.what) == (other.stage, other.what)

    def words(self) -> str:
        """Return it as a line of text."""
        noun = "task" if self.task.isdecimal() and not self.more else "tasks"
        tasks = f"{noun} {self.task}{f' and {self.more:,} more' if self.more else ''}, " if self.task else ""
        return f"{self.stage}: {tasks}{self.what}"


class Trail:
    """Collects recent happenings and loss curves from events, in bounded memory."""

    def __init__(self) -> None:
        self._lately: list[Happening] = []
        self._losses: dict[str, list[tuple[float, float]]] = {}
        self._ooms: dict[str, int] = {}

    def apply(self, event: Event) -> None:
        """Take one event into account."""
        if event.kind in (EventKind.PROGRESS, EventKind.TASK_FINISHED):
            self._hear(event)
        elif happening := _happening(event):
            self._note(happening)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; the newest happening is last."""
        losses = {stage: [loss for _, loss in sorted(points)] for stage, points in self._losses.items()}
        return {"losses": losses, "lately": [[happening.at, happening.words()] for happening in self._merged()]}

    def _note(self, happening: Happening) -> None:
        self._lately.append(happening)
        if len(self._lately) > ROOM:
            self._lately = self._merged()

    def _merged(self) -> list[Happening]:
        """Return the newest happenings; equal ones of several tasks are merged."""
        merged: list[Happening] = []
        for happening in sorted(self._lately, key=lambda happening: happening.at):
            if merged and happening.task and merged[-1].is_like(happening):
                merged[-1] = replace(happening, more=merged[-1].more + 1 + happening.more)
            else:
                merged.append(happening)
        return merged[-KEPT:]

    def _hear(self, event: Event) -> None:
        """Record the loss that a process reports, and new recoveries from running out of memory."""
        figures: Mapping[str, float] = event.data.get("figures") or {}
        if not figures:
            return
        if (loss := _loss(figures)) is not None:
            points = self._losses.setdefault(event.data["stage"], [])
            if not points or points[-1][1] != loss:  # progress comes more often than new figures
                points.append((event.at, loss))
            if len(points) > MOST_LOSSES:
                del points[1:-1:2]
        ooms = int(figures.get(OOMS, 0))
        if ooms > self._ooms.get(event.writer, 0):
            self._note(Happening(event.at, event.data["stage"], f"survived out of memory ({ooms:,} so far)"))
        self._ooms[event.writer] = ooms


def loss_of(stage: StageStatus) -> float | None:
    """Return the latest loss that a process of a stage reported."""
    losses = (_loss(figures) for figures in reversed(stage.figures.values()))
    return next((loss for loss in losses if loss is not None), None)


def _loss(figures: Mapping[str, float]) -> float | None:
    """Return the loss among figures, as the sum of its terms; None where there is none."""
    terms = [value for name, value in figures.items() if name.startswith(f"{LOSS}.")]
    return sum(terms) if terms else next((figures[name] for name in HAS_LOSS if name in figures), None)


def _happening(event: Event) -> Happening | None:
    """Return an event as a happening; None where it is not worth telling."""
    data, stage = event.data, event.data.get("stage", "run")
    task = str(data.get("task", data.get("tasks", "")))
    what = _text(event.kind, data)
    if not what:
        return None
    of_stage = event.kind in (EventKind.STAGE_SUBMITTED, EventKind.STAGE_ENDED, EventKind.RUN_ENDED)
    return Happening(event.at, stage, what, "" if of_stage else task)


def _text(kind: EventKind, data: Mapping[str, Any]) -> str:
    """Return an event in words; empty where it is not worth telling."""
    if kind is EventKind.TASK_ENDED:
        cause = data.get("cause", Cause.FAILED.value)
        how = f"{cause}: {data['reason']}" if data.get("reason") else cause
        return "" if cause == Cause.DONE.value else f"attempt {data['number']}: {how}"
    if kind is EventKind.JOB_SUBMITTED:
        attempt = data.get("attempt", 1)
        return f"attempt {attempt}: {data.get('why') or 'submitted'}" if attempt > 1 else ""
    if kind is EventKind.STAGE_SUBMITTED:
        return f"started, {data['missing']:,} to do" if data.get("missing") else ""
    if kind is EventKind.TASK_SPLIT:
        return str(data["why"])
    if kind is EventKind.LEFT_OUT:
        return f"skipped {', '.join(data['names'])}: {data['why']}"
    plain = {
        EventKind.TASK_GIVEN_UP: "given up: {why}",
        EventKind.TASK_CANCELLED: "{why}",
        EventKind.JOB_REFUSED: "its job was rejected",
        EventKind.STAGE_ENDED: "{state}",
        EventKind.RUN_ENDED: "{state}",
    }
    return plain[kind].format_map(data) if kind in plain else ""
