"""The logs of a run: finds them and reads their text, without terminal control characters."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from pipeline.cluster.job_spec import parse_ranges
from pipeline.cluster.sbatch import offset_of
from pipeline.cluster.verdict import Cause
from pipeline.journal.run_status import GOING_ON, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pipeline.journal.attempts import Attempt, TaskRecord
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import RunStatus, StageJob, StageStatus, StatusReader

SUPERVISE = "supervise"
ENDS = (".out", ".err")
LAST_LINES = 200
FIRST_LINES = 10  # lines shown first of a followed log
BLOCK_BYTES = 1 << 16
END_BYTES = 1 << 20  # most bytes read for the end of a log: some have no line ends
A_BUG = 1  # the exit code
_ESCAPE = re.compile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|\\][^\x07\x1b\n]*(?:\x07|\x1b\\\\)?|[ -/]*[0-~])")
_LINE_END = re.compile("\r+\n|\r")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # also marks of text direction


@dataclass(frozen=True, slots=True)
class Log:
    """The output of an attempt at a task, or of a supervisor."""

    stage: str
    task: int | None  # None: of a supervisor
    attempt: int
    state: str
    failed: bool
    live: bool
    paths: tuple[str, ...]  # stdout, stderr
    name: str = ""  # name of the task

    @property
    def title(self) -> str:
        """The heading: task, attempt and how it ended."""
        who = self.stage if self.task is None else f"{self.stage} {self.name}, attempt {self.attempt}"
        return f"{who}: {self.state}" if self.state else who


@dataclass(frozen=True, slots=True)
class LogChoice:
    """Which logs a user asked for; None stands for any."""

    stage: str | None = None
    task: int | None = None
    attempt: int | None = None
    failed: bool = False

    @property
    def is_default(self) -> bool:
        """Whether the user made no choice."""
        return self == LogChoice()

    def takes(self, log: Log) -> bool:
        """Tell whether a log matches the choice."""
        return (
            self.stage in (None, log.stage)
            and self.task in (None, log.task)
            and self.attempt in (None, log.attempt)
            and (log.failed or not self.failed)
        )


def wanted_logs(folder: RunFolder, status: RunStatus, wanted: LogChoice) -> list[Log]:
    """Return the chosen logs, newest last. Default: the failed, else the live, else all."""
    if not wanted.is_default:
        supervisors = supervisor_logs(folder, status) if wanted.stage == SUPERVISE else []
        return [log for log in (*supervisors, *task_logs(folder, status)) if wanted.takes(log)]
    if _supervisor_failed(status):
        return supervisor_logs(folder, status)[-1:]
    logs = list(task_logs(folder, status))
    chosen = [log for log in logs if log.failed] or [log for log in logs if log.live] or logs
    return chosen or supervisor_logs(folder, status)


def _supervisor_failed(status: RunStatus) -> bool:
    """Tell whether the run failed in its supervisor and in no task."""
    if status.state is State.ABANDONED or status.exit_code == A_BUG:
        return True
    return status.state is State.FAILED and not any(stage.failures for stage in status.stages.values())


def task_logs(folder: RunFolder, status: RunStatus) -> Iterator[Log]:
    """Yield the logs of all attempts, in order of submission."""
    for stage in status.in_order():
        ended = {(attempt.job, attempt.task): attempt for task in stage.work.values() for attempt in task.ended}
        for job in stage.jobs.values():
            offset = _offset(folder, job)
            for number in parse_ranges(job.tasks):
                task, attempt = stage.task(number), ended.get((job.id, number))
                stem = str(folder.logs / f"{job.id}_{number - offset}")
                yield _log(stage, job, task, attempt, attempt.log.removesuffix(ENDS[1]) if attempt else stem)


def _log(stage: StageStatus, job: StageJob, task: TaskRecord, attempt: Attempt | None, stem: str) -> Log:
    live = attempt is None and task.job == job.id
    state = f"{attempt.state} ({attempt.cause.value})" if attempt else stage.state_of(task) if live else "unknown"
    failed = attempt is not None and attempt.cause is not Cause.DONE
    paths = tuple(stem + end for end in ENDS)
    return Log(stage.name, task.number, job.attempt, state, failed, live, paths, stage.called(task.number))


def _offset(folder: RunFolder, job: StageJob) -> int:
    """Return the offset of a job's task numbers from its array indexes."""
    try:
        return _script_offset(str(folder.logs / f"{job.id}.sbatch"))
    except OSError:  # a local job, which has no offset
        return 0


@lru_cache(maxsize=1024)
def _script_offset(script: str) -> int:
    with open(script, errors="replace") as file:  # noqa: PTH123 - see above
        return offset_of(file.read()) or 0


def supervisor_logs(folder: RunFolder, status: RunStatus) -> list[Log]:
    """Return the logs of supervisors, which are all logs without a task."""
    jobs = {job for stage in status.stages.values() for job in stage.jobs}
    try:
        names = {name.rpartition(".")[0] for name in os.listdir(folder.logs) if name.endswith(ENDS)}  # noqa: PTH208 - names alone
    except OSError:
        names = set()
    stems = sorted((name for name in names if name.partition("_")[0] not in jobs), key=_by_number)
    state = status.state.value
    local = [Log(SUPERVISE, None, 1, state, failed=False, live=True, paths=(str(folder.supervisor_log),))]
    visits = [_visit(folder, stem) for stem in stems]
    return [*(local if folder.supervisor_log.exists() or not visits else []), *visits]


def _visit(folder: RunFolder, stem: str) -> Log:
    """Return the log of a supervisor that was a job."""
    paths = tuple(str(folder.logs / (stem + end)) for end in ENDS)
    return Log(SUPERVISE, None, 1, f"job {stem.partition('_')[0]}", failed=False, live=True, paths=paths)


def _by_number(stem: str) -> tuple[int, str]:
    job = stem.partition("_")[0]
    return (int(job) if job.isdecimal() else 0, stem)


def harmless(text: str) -> str:
    """Return text without escape sequences and control characters."""
    return _CONTROL.sub("", _LINE_END.sub("\n", _ESCAPE.sub("", text)))


def end_of(path: str, lines: int = LAST_LINES) -> str | None:
    """Return the last lines of a log, without reading the rest; None where there is no log."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - names of some are not text
            file.seek(end_position(path, lines))
            return harmless(file.read(END_BYTES).decode(errors="replace"))
    except OSError:
        return None


def end_position(path: str, lines: int) -> int:
    """Return the position of the last lines of a file, at most a megabyte before its end."""
    with open(path, "rb") as file:  # noqa: PTH123 - see above
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - END_BYTES))
        last = file.readlines()[-lines:]
        return file.tell() - sum(map(len, last))


def whole(path: str) -> Iterator[str]:
    """Yield a log line by line; an overlong line comes in pieces."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - see above
            for line in iter(lambda: file.readline(BLOCK_BYTES), b""):
                yield harmless(line.decode(errors="replace"))
    except OSError:
        return


def of_rank(lines: Iterable[str], rank: int) -> Iterator[str]:
    """Yield the lines of one rank, without srun's prefix."""
    label = re.compile(rf"[ 0]*{rank}: ")
    for line in lines:
        if prefix := label.match(line):
            yield line[prefix.end() :]


@dataclass(slots=True)
class _Place:
    """A position in a file."""

    inode: int
    position: int


class Follower:
    """Follows the logs of a run until its end; logs may appear late, shrink or be replaced."""

    def __init__(self, reader: StatusReader, wanted: LogChoice) -> None:
        self._folder, self._wanted, self.reader = reader.folder, wanted, reader
        self._places: dict[str, _Place] = {}
        self._over: set[str] = set()  # finished logs that were read completely
        self._first = True

    @property
    def status(self) -> RunStatus:
        return self.reader.status

    @property
    def ended(self) -> bool:
        """Whether the run has ended."""
        return self.status.state not in GOING_ON

    def fresh(self) -> Iterator[tuple[Log, str, str]]:
        """Yield new text, with its log and its file."""
        self.reader.read()
        for log in self._logs():
            last = self.ended or not log.live
            for path in log.paths:
                if path not in self._over:
                    yield from ((log, path, text) for text in self._added(path, last=last))
                    self._over |= {path} if last else set()
        self._first = False

    def _logs(self) -> Iterator[Log]:
        """Yield the logs to follow: the chosen ones. Default: live ones and all later ones."""
        if self._wanted.is_default or self._wanted.stage == SUPERVISE:
            yield from supervisor_logs(self._folder, self.status)
        for log in task_logs(self._folder, self.status):
            if self._first and self._wanted.is_default and not log.live:
                self._over |= set(log.paths)
            elif self._wanted.takes(log):
                yield log

    def _added(self, path: str, *, last: bool) -> Iterator[str]:
        """Yield new complete lines of a file; with `last`, also an incomplete one."""
        try:
            with open(path, "rb") as file:  # noqa: PTH123 - see above
                place = self._place(path, os.fstat(file.fileno()))
                file.seek(place.position)
                for line in iter(lambda: file.readline(BLOCK_BYTES), b""):
                    if not (line.endswith(b"\n") or last or len(line) == BLOCK_BYTES):
                        return
                    place.position += len(line)
                    yield harmless(line.decode(errors="replace"))
        except FileNotFoundError:  # it was replaced by a new log, perhaps with the same inode
            self._places.pop(path, None)
        except OSError:
            return

    def _place(self, path: str, facts: os.stat_result) -> _Place:
        """Return where to continue reading a file; a log that existed at the start is read near its end."""
        place = self._places.get(path)
        if place is None:
            start = end_position(path, FIRST_LINES) if self._first else 0
            place = self._places[path] = _Place(facts.st_ino, start)
        if place.inode != facts.st_ino or place.position > facts.st_size:
            place.inode, place.position = facts.st_ino, 0
        return place
