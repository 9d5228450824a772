"""Follows a job's tasks by the reports of the queue and the accounting; it queries neither.

The queue is right about unfinished tasks, the accounting about ended ones, because only it knows the steps. For some
seconds after an end they disagree. When the patience is over, the queue's report counts, and a task that neither knows
is UNKNOWN.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pipeline.cluster.job_spec import TaskState, TaskStatus, mebibytes
from pipeline.cluster.slurm_words import WAITING_STATES, Queued

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipeline.cluster.accounting import AccountedTask
    from pipeline.cluster.job_spec import Job, JobId


@dataclass(frozen=True, slots=True)
class Views:
    """The replies of one look at the cluster; `queue` is None if squeue did not answer."""

    queue: Mapping[str, Queued] | None
    rows: Mapping[str, AccountedTask]
    at: float  # by the monotonic clock
    trouble: str = ""
    never_began: Callable[[JobId, int], bool] = lambda _job, _index: False  # from the accounting


@dataclass(slots=True, eq=False)
class Followed:
    """A submitted job, and the last known status of its tasks by Slurm's names (12_3)."""

    id: JobId
    job: Job
    offset: int  # from a task's index in the array to its number
    since: float  # earliest possible submission
    tasks: dict[str, TaskStatus] = field(default_factory=dict)
    _unclear: dict[str, float] = field(default_factory=dict)  # task → since when its state is unclear
    _over: dict[str, Queued] = field(default_factory=dict)  # tasks that have ended according to the queue

    def __post_init__(self) -> None:
        for number in self.job.tasks:
            index = number - self.offset
            stdout, stderr = self.job.log_paths(self.id, index)
            self.tasks[f"{self.id}_{index}"] = TaskStatus(self.id, number, TaskState.PENDING, stdout, stderr)

    @property
    def is_open(self) -> bool:
        return any(not task.state.ended for task in self.tasks.values())

    def leaves_open(self, queue: Mapping[str, Queued] | None) -> bool:
        """Tell whether to ask the accounting: the queue lacks a task or calls it ended."""
        return any(
            not task.state.ended and (queue is None or name not in queue or queue[name].state.ended)
            for name, task in self.tasks.items()
        )

    def take_in(self, views: Views, patience_s: float) -> list[TaskStatus]:
        """Update the tasks from new replies; return those whose state changed."""
        changed = []
        for name, before in self.tasks.items():
            if not before.state.ended:
                now = self.tasks[name] = self._now(name, before, views, patience_s)
                changed += [now] if now.state is not before.state else []
        return changed

    def _now(self, name: str, before: TaskStatus, views: Views, patience_s: float) -> TaskStatus:
        """Return a task's status by the new replies."""
        queued = (views.queue or {}).get(name)
        if queued is not None and not queued.state.ended:
            self._unclear.pop(name, None)
            self._over.pop(name, None)
            return _live(before, queued)
        row = self._row(name, views)
        if row is not None and row.state.ended:
            return self._explained(_as_seen(before, row.status(before.task, before.stdout, before.stderr)))
        if queued is not None:
            self._over[name] = queued
        unclear_s = views.at - self._unclear.setdefault(name, views.at)
        if views.queue is None or unclear_s < patience_s:
            return replace(before, state=TaskState.COMPLETING, waits_for="") if name in self._over else before
        if name in self._over:
            return self._explained(_ended(before, self._over[name]))
        if views.never_began(self.id, before.task - self.offset):
            now = replace(before, state=TaskState.CANCELLED, reason="cancelled while it waited", waits_for="")
            return self._explained(now)
        return _unknown(before, row, views.trouble)

    def _row(self, name: str, views: Views) -> AccountedTask | None:
        """Return the accounting's row of a task; a job's only task is at first listed under the job's own id."""
        return views.rows.get(name) or (views.rows.get(self.id) if len(self.tasks) == 1 else None)

    def _explained(self, task: TaskStatus) -> TaskStatus:
        """Complete the reason of a task that has ended."""
        if task.state is TaskState.CANCELLED and not task.node:  # the accounting gives the end as the start
            task = replace(task, started=None)
        return replace(task, reason="; ".join(filter(None, (_ending(task, self.job), task.reason))))


def _live(before: TaskStatus, queued: Queued) -> TaskStatus:
    """Return a task that has not ended, as the queue reports it."""
    started = None if queued.state in WAITING_STATES else queued.starts
    changes = {"state": queued.state, "node": queued.node, "waits_for": queued.waits_for, "started": started}
    return replace(before, reason="", **changes)  # type: ignore[arg-type]


def _as_seen(before: TaskStatus, now: TaskStatus) -> TaskStatus:
    """Return a task with the node and start from the queue, if the accounting has only its end."""
    return replace(now, node=before.node, started=before.started) if before.started and not now.node else now


def _ended(before: TaskStatus, queued: Queued) -> TaskStatus:
    """Return an ended task by the queue, if the accounting knows nothing."""
    code = 0 if queued.state.ok else None
    reason = "" if queued.state.ok else queued.reason
    return replace(before, state=queued.state, exit_code=code, node=queued.node, waits_for="", reason=reason)


def _unknown(before: TaskStatus, row: AccountedTask | None, trouble: str) -> TaskStatus:
    """Return a task as UNKNOWN, with the reason."""
    in_accounts = f"the accounting still has it as {row.state.value}" if row else "and neither does the accounting"
    reason = f"the queue no longer has it, {in_accounts}" + (f" ({trouble})" if trouble else "")
    return replace(before, state=TaskState.UNKNOWN, reason=reason, waits_for="")


def _ending(task: TaskStatus, job: Job) -> str:
    """Describe how a task ended."""
    if task.state is TaskState.OUT_OF_MEMORY and job.request.mem_bytes:
        return f"over its memory limit of {mebibytes(job.request.mem_bytes)}"
    if task.state is TaskState.TIMEOUT and job.request.time_s:
        return f"over its time limit of {job.request.time_s} s"
    if task.signal is not None:
        return f"ended by signal {task.signal}"
    return f"exit code {task.exit_code}" if task.exit_code else ""
