"""Slurm's accounting of jobs, parsed from the output of sacct; nothing here runs a command.

The format has few columns, all in Slurm since 20.11, and the job's id is both the first and the last. A line whose ends
differ was cut or garbled and is ignored. Measured on 22.05: sacct subtracts 128 from exit codes of 128 and more
(`exit 139` reads 11:0), so only a step distinguishes a signal from an exit code. An array task that was cancelled while
pending has no line at all (`AccountingLook.never_began`).
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from pipeline.cluster.job_spec import TaskState, TaskStatus
from pipeline.cluster.slurm_words import (
    OOM_CODE,
    bytes_of,
    epoch_of,
    exit_of,
    expand,
    is_number,
    node_of,
    only_ours,
    parse_state,
    reason_words,
    seconds_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pipeline.cluster.job_spec import JobId

ENVIRONMENT = {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0", "LC_ALL": "C"}  # for sacct and squeue
SACCT_COLUMNS = (
    "JobID,TRESUsageInAve,State,ExitCode,DerivedExitCode,MaxRSS,TotalCPU,Submit,Start,End,NNodes,NodeList,Reason,AveRSS,"
    "NTasks,JobID"
)
SACCT = ("sacct", "--parsable2", "--noheader", "--duplicates", f"--format={SACCT_COLUMNS}")
JOBS_A_CALL = 500  # Linux limits the argument with their names to 128 KiB
SAID_MOST = 200
EARLIER_S = 86_400.0  # tolerance for clock differences and the end of summer time


class CommandFailed(Exception):
    """A command of Slurm could not be run, failed, or did not answer in time."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    @property
    def message(self) -> str:
        """The last line of the command's output that is not blank."""
        return next((line for line in reversed(self.what.splitlines()) if line.strip()), "")


class AccountedStep(NamedTuple):
    """One step of a job: the script itself is `batch`, what srun starts has a number."""

    name: str
    state: TaskState
    exit_code: int | None
    signal: int | None
    cpu_s: float | None
    rss_bytes: int | None = None  # of all its processes on a node, if known
    node: str = ""
    nodes: str = ""  # how many
    gpu_busy: float | None = None  # share, mean over its processes
    gpu_bytes: int | None = None

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the kernel killed one of its processes at the memory limit."""
        return self.state is TaskState.OUT_OF_MEMORY or (self.exit_code, self.signal) == OOM_CODE


@dataclass(slots=True)
class AccountedTask:
    """The accounting of one job or array task; None: unknown."""

    job: str  # 12 or 12_3
    state: TaskState
    exit_code: int | None = None  # of the srun step, else of the script; sacct may have subtracted 128
    signal: int | None = None
    derived_exit_code: str = ""
    node: str = ""
    nodes: str = ""  # how many
    submitted: float | None = None
    started: float | None = None
    ended: float | None = None
    cpu_s: float | None = None
    peak_rss_bytes: int | None = None
    gpu_busy: float | None = None
    gpu_bytes: int | None = None
    reason: str = ""
    cancelled_by: int | None = None
    steps: list[AccountedStep] = field(default_factory=list)
    before: tuple[tuple[TaskState, str], ...] = ()  # earlier records: state and node

    earlier_s: float = 0.0  # run time in earlier records

    @property
    def restarts(self) -> int:
        """How often Slurm itself requeued and restarted it."""
        return len(self.before)

    @property
    def why(self) -> str:
        """Details that the accounting adds to the state."""
        notes = []
        if self.state is TaskState.OUT_OF_MEMORY:
            notes += [f"step {step.name} ran out of memory" for step in self.steps if step.ran_out_of_memory][:1]
        if self.cancelled_by is not None:
            notes.append(f"cancelled by user {self.cancelled_by}")
        if self.before:
            earlier = (f"{state.value} on {node}" if node else state.value for state, node in self.before)
            notes.append("restarted after " + ", ".join(earlier))
        return "; ".join(notes)

    def status(self, task: int, stdout: str, stderr: str) -> TaskStatus:
        """Return this record as the `TaskStatus` that an executor reports."""
        return TaskStatus(
            job=self.job.partition("_")[0],
            task=task,
            stdout=stdout,
            stderr=stderr,
            reason=self.why,
            waits_for=reason_words(self.reason) if self.state is TaskState.PENDING else "",
            **{name: getattr(self, name) for name in _AS_IN_STATUS},
        )


@dataclass(frozen=True, slots=True)
class AccountingLook:
    """The result of one query of the accounting; a task without a row is unknown, not gone."""

    rows: Mapping[str, AccountedTask]
    trouble: str = ""
    arrays: frozenset[JobId] = frozenset()  # those with a row for any task

    def never_began(self, job: JobId, task: int) -> bool:
        """Tell whether a task that is in neither the queue nor the accounting was cancelled while pending.

        It was if the accounting knows other tasks of its array.
        """
        return not self.trouble and job in self.arrays and f"{job}_{task}" not in self.rows


class Accounting:
    """Queries Slurm's accounting (sacct) through `run`, which takes a command and a time limit in seconds."""

    def __init__(self, run: Callable[[Sequence[str], float], str], *, timeout_s: float = 30.0) -> None:
        self._run = run
        self._timeout_s = timeout_s

    def look(self, names: Mapping[JobId, str], since: float) -> AccountingLook:
        """Query all tasks of all jobs at once, by number and unique name; never raise.

        No job may have ended long before `since`.
        """
        wanted = sorted(names)
        start = datetime.fromtimestamp(max(0.0, since - EARLIER_S)).strftime("%Y-%m-%dT%H:%M:%S")  # noqa: DTZ006
        rows: dict[str, AccountedTask] = {}
        torn, until = 0, time.monotonic() + self._timeout_s
        for first in range(0, len(wanted), JOBS_A_CALL):
            batch = wanted[first : first + JOBS_A_CALL]
            try:
                left_s = max(0.1, until - time.monotonic())
                ours = only_ours({job: names[job] for job in batch})
                text = self._run([*SACCT, f"--starttime={start}", *ours], left_s)
            except (CommandFailed, OSError) as error:
                return AccountingLook(rows, trouble(getattr(error, "what", str(error))))
            batch_rows, cut = parse_sacct(text, batch)
            rows.update(batch_rows)
            torn += cut
        arrays = frozenset(name.partition("_")[0] for name in rows)
        return AccountingLook(rows, f"{torn} of sacct's lines are malformed" if torn else "", arrays)


_AS_IN_STATUS = (
    "state", "exit_code", "signal", "peak_rss_bytes", "started", "ended", "node", "cpu_s", "restarts", "earlier_s",
    "gpu_busy", "gpu_bytes",
)  # fmt: skip


def trouble(message: str) -> str:
    """Explain why the accounting did not answer, by the error message of sacct."""
    message = " ".join(message.split())
    for sign, meaning in _TROUBLES.items():
        if sign.lower() in message.lower():
            return f"{meaning} ({message[:SAID_MOST]})"
    return f"the accounting does not answer: {message[:SAID_MOST] or 'no reason given'}"


_TROUBLES = {
    "accounting storage is disabled": "this cluster keeps no accounting",
    "Connection refused": "the accounting daemon (slurmdbd) is down",
    "Unable to contact slurm": "a daemon of Slurm is down",
    "Connection timed out": "the accounting daemon (slurmdbd) does not answer",
    "timed out": "sacct did not answer in time",
    "No such file or directory": "sacct is not installed here",
}


def parse_sacct(text: str, jobs: Iterable[JobId]) -> tuple[dict[str, AccountedTask], int]:
    """Return the rows of the jobs by task (12 or 12_3), and how many lines are malformed."""
    records, torn = _records(text, frozenset(jobs))
    rows: dict[str, AccountedTask] = {}
    for name, history in records.items():
        row = _settle(history)
        if "[" not in name:
            rows[name] = row
            continue
        for task in expand(name):  # the pending rest of an array; it may list tasks that have lines of their own
            if task not in records:
                rows[task] = _copy(row, task)
    return rows, torn


def _records(text: str, wanted: frozenset[JobId]) -> tuple[dict[str, list[AccountedTask]], int]:
    """Return the records of each job or task, each with its steps, and how many lines are malformed."""
    records: dict[str, list[AccountedTask]] = {}
    torn, columns = 0, SACCT_COLUMNS.split(",")
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) != len(columns) or cells[0] != cells[-1]:
            torn += bool(line.strip())
            continue
        name, _, step = cells[0].partition(".")
        if name.partition("_")[0] not in wanted:
            continue
        values = dict(zip(columns, cells, strict=True))
        if not step:
            records.setdefault(name, []).append(_row(values))
        elif name in records:
            records[name][-1].steps.append(_step(step, values))
    return records, torn


def _row(values: Mapping[str, str]) -> AccountedTask:
    """Parse the sacct line of a job."""
    exit_code, killed_by = exit_of(values["ExitCode"])
    return AccountedTask(
        job=values["JobID"],
        state=parse_state(values["State"]),
        exit_code=exit_code,
        signal=killed_by,
        derived_exit_code=values["DerivedExitCode"],
        node=node_of(values["NodeList"]),
        nodes=values["NNodes"],
        submitted=epoch_of(values["Submit"]),
        started=epoch_of(values["Start"]),
        ended=epoch_of(values["End"]),
        cpu_s=seconds_of(values["TotalCPU"]),
        peak_rss_bytes=bytes_of(values["MaxRSS"]),
        reason="" if values["Reason"] == "None" else values["Reason"],
        cancelled_by=_canceller(values["State"]),
    )


def _step(name: str, values: Mapping[str, str]) -> AccountedStep:
    """Parse the sacct line of a job step."""
    mean_bytes = bytes_of(values["AveRSS"]) or 0
    on_node = max(bytes_of(values["MaxRSS"]) or 0, _rss_on_node(mean_bytes, values["NTasks"], values["NNodes"]))
    state, cpu_s, node = parse_state(values["State"]), seconds_of(values["TotalCPU"]), node_of(values["NodeList"])
    gpu_use = _gpu_use(values["TRESUsageInAve"])
    return AccountedStep(
        name, state, *exit_of(values["ExitCode"]), cpu_s, on_node or None, node, values["NNodes"], *gpu_use
    )


def _gpu_use(usage: str) -> tuple[float | None, int | None]:
    """Return the use and the memory of a step's GPUs; 0 is unknown, as sites without measurements write it."""
    if "gpu" not in usage:
        return None, None
    used = dict(part.partition("=")[::2] for part in usage.split(","))
    mem_bytes, percent = bytes_of(used.get("gres/gpumem", "")), used.get("gres/gpuutil", "")
    if not mem_bytes:
        return None, None
    return (int(percent) / 100 if is_number(percent) else None), mem_bytes


def _rss_on_node(mean_bytes: int, tasks: str, nodes: str) -> int:
    """Return a lower bound of a step's memory on its fullest node: the mean over all nodes.

    Measured on 22.05: a step on several nodes may report only the processes of the first node.
    """
    return mean_bytes * int(tasks) // max(1, int(nodes)) if is_number(tasks) and is_number(nodes) else 0


def _settle(records: list[AccountedTask]) -> AccountedTask:
    """Return the newest record of a task, with its earlier records in `before` and corrected by its steps."""
    if all(record.submitted for record in records):
        records.sort(key=lambda record: record.submitted or 0.0)
    row = records[-1]
    row.before = tuple((record.state, record.node) for record in records[:-1])
    row.earlier_s = sum(max(0.0, end.ended - end.started) for end in records[:-1] if end.started and end.ended)
    _read_steps(row)
    return row


def _read_steps(row: AccountedTask) -> None:
    """Correct the figures of a job by its steps, which are more accurate about the worker's end."""
    peaks = [step.rss_bytes for step in row.steps if step.rss_bytes]
    row.peak_rss_bytes = max([*peaks, row.peak_rss_bytes or 0]) or None
    for step in row.steps:
        if step.nodes == row.nodes and step.node:  # for a moment sacct lists only the first node
            row.node = step.node
    row.gpu_busy = max((step.gpu_busy for step in row.steps if step.gpu_busy is not None), default=None)
    row.gpu_bytes = max((step.gpu_bytes for step in row.steps if step.gpu_bytes), default=None)
    if not row.cpu_s:
        row.cpu_s = sum(step.cpu_s or 0.0 for step in row.steps) or row.cpu_s
    bad = [step for step in row.steps if step.name.isdecimal() and (step.exit_code or step.signal)]
    if bad:
        row.exit_code, row.signal = bad[-1].exit_code, bad[-1].signal
    oom = row.derived_exit_code == "0:125" or (row.exit_code, row.signal) == OOM_CODE
    oom = oom or any(step.ran_out_of_memory for step in row.steps)
    if oom and row.state in _OOM_HIDES_BEHIND:
        row.state = TaskState.OUT_OF_MEMORY
    if row.exit_code == 0 and row.signal is None and not row.state.ok:
        row.exit_code = None  # not known (yet)
    if (row.exit_code, row.signal) == OOM_CODE:
        row.exit_code, row.signal = None, int(signal.SIGKILL)  # the kernel sent this signal
    if row.state is TaskState.CANCELLED and row.cancelled_by is None and "Dependency" not in row.reason:
        row.state = TaskState.UNKNOWN  # not by a user: the accounting closes jobs of a controller that lost its state


_OOM_HIDES_BEHIND = frozenset({TaskState.FAILED, TaskState.COMPLETED, TaskState.TIMEOUT, TaskState.OUT_OF_MEMORY})


def _copy(row: AccountedTask, task: str) -> AccountedTask:
    """Return the row of one pending task from the row that stands for the whole rest of its array."""
    kept = ("state", "submitted", "reason", "cancelled_by", "before")
    return AccountedTask(job=task, **{name: getattr(row, name) for name in kept})


def _canceller(state: str) -> int | None:
    """Return the user id in a state such as `CANCELLED by 1000`."""
    _, by, user = state.partition(" by ")
    return int(user) if by and is_number(user) else None
