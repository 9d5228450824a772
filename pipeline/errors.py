"""All errors that a user can see, in one tree.

PipelineError            1   a bug, unless a child says otherwise
├── ConfigError          2   the configuration or the command line is wrong
│   └── CacheUnusable    2   the cache folder cannot be used as it is: no cache, read-only, newer format
├── DataError            3   the input data cannot be used
│   └── WeightsUnusable  3   a checkpoint is damaged, or not of the expected model
├── CacheDamaged         4   bytes in the cache differ from those that were written
├── RecordMissing        4   no readable copy of a record is in the cache
├── PlanInfeasible       5   no plan fits the machine
├── SubmissionRefused    6   the executor or the cluster refused the job
│   ├── ClusterSilent    6   the cluster does not answer, so it is unknown whether it accepted the job
│   ├── QueueFull        6   the queue takes no more jobs of this user
│   └── BudgetReached    6   the work would exceed the project's budget
├── JobFailed            7   a job ran and failed
│   ├── CacheFull        7   the disk or the quota under the cache is full
│   └── NodeUnfit        7   the node of a job cannot do its work
└── AllocationEnded     75   the allocation ends before the run; the next one continues

An error says what went wrong, where, and the next command to type. A bad *item* is never an error: it is a
`records.Rejection`, counted and reported.
"""

from __future__ import annotations

from typing import ClassVar

from pipeline.command_line import Command

SUBMIT_AGAIN = Command.submit("all", then="   (processes only missing items)")  # remedy for lost work


class PipelineError(Exception):
    """An error with a message for the user."""

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str = "", remedy: str | Command = "", item: str = "") -> None:
        """Take what went wrong, where, what to type next and, for an error about one item, its id."""
        super().__init__(what)
        self.what = what
        self.where = where
        self.item = item
        self.next = remedy

    @property
    def remedy(self) -> str:
        """What to do next, in words."""
        return str(self.next)

    @property
    def command(self) -> Command | None:
        """The command to type next, if the remedy is one."""
        return self.next if isinstance(self.next, Command) else None

    def in_project(self, typed: Command) -> None:
        """Add the --config and --set of a typed command to the remedy."""
        if self.command is not None:
            self.next = self.command.in_project(typed)

    def __str__(self) -> str:
        """Format what, where and what to do next, a line each."""
        place = f"{self.where}: " if self.where else ""
        hint = f"\n  next: {self.remedy}" if self.remedy else ""
        return f"{place}{self.what}{hint}"


class ConfigError(PipelineError):
    """The configuration or the command line is wrong."""

    exit_code = 2


class CacheUnusable(ConfigError):
    """The cache folder cannot be used as it is: no cache, read-only, or of a newer format."""


class DataError(PipelineError):
    """The input data cannot be used."""

    exit_code = 3


class WeightsUnusable(DataError):
    """A checkpoint is damaged, or not of the expected model."""


class CacheDamaged(PipelineError):
    """Bytes in the cache differ from those that were written."""

    exit_code = 4


class RecordMissing(PipelineError, KeyError):
    """No readable copy of a record is in the cache."""

    exit_code = 4


class PlanInfeasible(PipelineError):
    """No plan fits the machine."""

    exit_code = 5


class SubmissionRefused(PipelineError):
    """The executor or the cluster refused the job."""

    exit_code = 6


class ClusterSilent(SubmissionRefused):
    """The cluster does not answer, so it is unknown whether it accepted the job."""


class QueueFull(SubmissionRefused):
    """The queue takes no more jobs of this user."""


class BudgetReached(SubmissionRefused):
    """The work would exceed the project's budget."""


class JobFailed(PipelineError):
    """A job ran and failed."""

    exit_code = 7


class CacheFull(JobFailed):
    """The disk or the quota under the cache is full."""


class NodeUnfit(JobFailed):
    """The node of a job cannot do its work; another one may."""


class AllocationEnded(PipelineError):
    """The allocation ends before the run; the next one continues."""

    exit_code = 75
