"""The data of a run's HTML report: lists of bounded length; the report itself cuts long texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pipeline.journal.attempts import Attempt
    from pipeline.journal.budget import Account
    from pipeline.journal.run_status import StageStatus
    from pipeline.journal.run_view import RunView
    from pipeline.report.compared import Comparison
    from pipeline.report.facts import StageUse
    from pipeline.training.loop.metrics_log import Epoch
    from pipeline.training.prepared import Prepared

STEP_OOM = "step out of memory"  # a cause: the step was repeated in smaller parts
Curve = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class StageFacts:
    """A stage: its status by the ledger, and what else is known of it."""

    status: StageStatus
    first_task_at: float | None
    left_s: float | None
    waits_for: Sequence[str]
    waits: Sequence[str]  # that do not pass by themselves, or did not
    census: Mapping[str, Any]  # of bounded size
    warnings: Sequence[str]
    so_far: Sequence[str]  # reported by a script, a validation or a reader while it runs

    @property
    def attempts(self) -> int:
        return sum(len(task.ended) for task in self.status.work.values())


@dataclass(frozen=True, slots=True)
class TroubledAttempt:
    """A failed attempt, the reaction to it, and the present state of its task."""

    stage: str  # and of which encoder, or point of a sweep
    attempt: Attempt
    then: str
    now: str


@dataclass(frozen=True, slots=True)
class Troubles:
    """The failed attempts."""

    total: int
    causes: Mapping[tuple[str, str], int]  # stage and cause → attempts
    attempts: Sequence[TroubledAttempt]
    survived: int
    open: int
    left_out: Sequence[Mapping[str, Any]]  # items that killed their task


@dataclass(frozen=True, slots=True)
class RejectedItems:
    """Items that a stage has left out for one reason."""

    stage: str
    reason: str
    items: int
    example: str = ""
    so_far: bool = False


@dataclass(frozen=True, slots=True)
class Rejections:
    """Why items were left out, and the first of them."""

    rows: Sequence[RejectedItems]
    items: Sequence[Mapping[str, str]]
    more: int
    file: Path


@dataclass(frozen=True, slots=True)
class FailuresAt:
    """How often a stage failed of a cause in a span of time: attempts, or steps of a training."""

    stage: str
    cause: str
    at: float
    times: int
    survived: bool  # the task is done now, or the step was repeated


@dataclass(frozen=True, slots=True)
class TimeFacts:
    """What happened at which time, in seconds since 1970."""

    begun: float
    end: float  # now, of a run that goes on
    planning: Mapping[str, tuple[float, float]]  # stage → from the end of the stage before to its beginning
    running: Mapping[str, Sequence[tuple[float, int]]]  # stage → tasks at once
    failures: Sequence[FailuresAt]
    paces: Mapping[str, Curve]  # stage → items per second


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step with a bundle from which `pipeline replay` runs it again."""

    step: int
    kind: str
    rank: int


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """What is known of the training of a run."""

    prepared: Prepared
    folder: Path
    monitor: str
    on_gpu: bool
    epochs: Sequence[Epoch]  # of the curves
    newest: Sequence[Epoch]  # of the tables
    known_epochs: int
    losses: Sequence[str]
    metrics: Sequence[str]
    curves: Mapping[str, Curve]  # of steps
    bundles: Sequence[RecordedStep]
    more_bundles: int

    @property
    def metrics_file(self) -> Path:
        return self.folder / "epochs.jsonl"

    @property
    def survived(self) -> list[Epoch]:
        """Return the epochs with steps that ran out of memory and went on."""
        return [epoch for epoch in self.newest if epoch.ooms or epoch.remedied]

    @property
    def most_reserved_bytes(self) -> int | None:
        return max((phase.reserved_bytes for phase in self.prepared.phases), default=None)

    def predicted_bytes(self, epoch: int) -> int | None:
        """Return the memory that was planned for an epoch: of a GPU, else of a node, if one process has it alone."""
        if not self.on_gpu:
            return self.prepared.mem_bytes if self.prepared.ranks == 1 else None
        return self.prepared.phases[self.prepared.phase_of(epoch - 1)].reserved_bytes


@dataclass(frozen=True, slots=True)
class PageFacts:
    """Everything that the HTML report of a run shows."""

    run: RunView
    folder: Path
    made_at: float
    again: str  # the command that began it
    stages: Sequence[StageFacts]
    time: TimeFacts
    troubles: Troubles
    rejections: Rejections | None
    training: TrainingFacts | None
    compared: Comparison | None  # the points of a sweep
    uses: Sequence[StageUse]
    account: Account | None  # of the project's budget, where it has one
    settings: Mapping[str, str]  # that differ from their defaults
    notes: Sequence[str]  # parts that could not be read, and are missing
