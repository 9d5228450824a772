"""Running a rank's share of a failed step again with the same cuts: each part is measured, and nothing is recovered.

Where a loss compares all items of a step, all parts are embedded first, then each goes backward from the loss of all.

The step is afterwards as it was before, except for memory that the allocator keeps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from pipeline.device.out_of_memory import out_of_memory_error
from pipeline.device.rng import RngState
from pipeline.memory.runtime.recovery import StepSnapshot
from pipeline.protocol import Weights
from pipeline.training.checkpoints.training_state import plain_name
from pipeline.training.step.contrastive import CachedGradients, ContrastiveStep, joined_rows, split_rows
from pipeline.training.step.exact_step import accumulate_piece, weights_of
from pipeline.training.step.optimizers import sums_by_name
from pipeline.training.step_clock import StepClock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from pipeline.memory.runtime.meters import Memory, Meter
    from pipeline.training.step.micro_batches import Piece
    from pipeline.training.step.step import Step


class PartOutcome(StrEnum):
    """How a part ended."""

    FITS = "fits"
    OOM = "out of memory"
    NOT_FINITE = "not finite"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class RerunPart:
    """Items that run forward and backward together."""

    micro: int  # number of its micro-batch in the share, from 0
    ids: tuple[str, ...]
    numbers: tuple[int, ...]  # in the table
    rung: int = 0  # of the ladder
    cost_bytes: int = 0  # as planned, beside the model
    sizes: Mapping[str, int] = field(default_factory=dict)  # of all items together


@dataclass(slots=True)
class PartResult:
    """How a part ended, and the memory that it took."""

    part: RerunPart
    outcome: PartOutcome = PartOutcome.NOT_RUN
    terms: dict[str, tuple[float, float]] = field(default_factory=dict)  # sums and weights
    peak_bytes: int = 0  # live tensors including the model; where a device does not count them, resident memory
    grown_bytes: int = 0  # above the memory at the start of the step
    error: str = ""
    rng: RngState | None = None  # before it ran


@dataclass(slots=True)
class Rerun:
    """The results of a share that was run again."""

    results: list[PartResult]
    is_counted: bool  # whether the device counts tensors; else memory is the process's
    reserved_bytes: int = 0  # at the peak
    gradients: list[str] = field(default_factory=list)  # parameters whose gradients are not finite
    norm: float | None = None  # of all gradients, where every part ran

    def of(self, outcome: PartOutcome) -> list[PartResult]:
        """Return the results with this outcome."""
        return [result for result in self.results if result.outcome is outcome]


def rerun(
    step: Step,
    parts: Sequence[RerunPart],
    read: Callable[[RerunPart], Piece],
    rng: RngState,
    meter: Meter,
    *,
    begin: Callable[[RerunPart], None] = lambda _: None,
) -> Rerun:
    """Run parts in order, up to the first that does not fit in memory."""
    snapshot = StepSnapshot(step.model, device=step.device, scaler=step.scaler)
    weights = None if step.contrasts else _weights(step, parts, read)
    first = meter.read()
    report = Rerun([PartResult(part) for part in parts], is_counted=first.allocated_bytes is not None)
    joint = _Joint(step) if isinstance(step, ContrastiveStep) and len(parts) > 1 else None

    def all_fit(run: Callable[[Piece], None]) -> bool:
        rng.restore()
        for result in report.results:
            result.outcome = PartOutcome.NOT_RUN
        for result in report.results:
            begin(result.part)
            result.rng = RngState.capture(step.device)
            _run(step, result, read, run, meter)
            _measure(report, result, meter.read(), first)
            if result.outcome is PartOutcome.OOM:
                return False
        return True

    if joint is None:
        is_whole = all_fit(lambda piece: accumulate_piece(step, piece, weights, is_whole_step=True))
    else:
        is_whole = all_fit(joint.embed)
        snapshot.restore()
        is_whole = is_whole and joint.contrast(report.results[-1]) and all_fit(joint.back)
        joint.judge(report.results)
    if is_whole:
        _look_at_gradients(step, report, weights)
    step.release()
    snapshot.rewind()
    return report


def _measure(report: Rerun, result: PartResult, memory: Memory, first: Memory) -> None:
    """Note the memory of a part, in the more costly of its passes."""
    counted = memory.peak_allocated_bytes
    before = first.reserved_bytes if first.allocated_bytes is None else first.allocated_bytes
    report.reserved_bytes = max(report.reserved_bytes, memory.peak_reserved_bytes)
    result.peak_bytes = max(result.peak_bytes, memory.peak_reserved_bytes if counted is None else counted)
    result.grown_bytes = max(0, result.peak_bytes - before)


def _run(
    step: Step, result: PartResult, read: Callable[[RerunPart], Piece], run: Callable[[Piece], None], meter: Meter
) -> None:
    """Run a pass of a part; note how that ended."""
    before, sums = step.totals, _Sums()
    step.watch = sums
    piece = read(result.part)
    meter.reset_peak()
    error = out_of_memory_error(run, piece)
    step.watch = step.clock
    if error is not None:
        result.outcome, result.error = PartOutcome.OOM, error
        return
    for name, (total, weight) in step.totals.items():
        total_before, weight_before = before.get(name, (0.0, 0.0))
        result.terms[name] = (sums.sums.get(name, total - total_before), weight - weight_before)
    finite = all(math.isfinite(total) and math.isfinite(weight) for total, weight in result.terms.values())
    result.outcome = PartOutcome.FITS if finite else PartOutcome.NOT_FINITE


class _Joint:
    """The passes of a share with a contrastive loss; parts come in the same order each time."""

    def __init__(self, step: ContrastiveStep) -> None:
        self.step = step
        self._rows: list[dict[str, Tensor]] = []  # of each part; then their gradients
        self._finite: list[bool] = []
        self._cached = CachedGradients()

    def embed(self, piece: Piece) -> None:
        """Embed a part without gradients."""
        rows = self.step.embed(piece.collated(self.step), len(piece), on_host=piece.is_on_host)
        self._finite.append(all(bool(torch.isfinite(row).all()) for row in rows.values()))
        self._rows.append(rows)

    def contrast(self, last: PartResult) -> bool:
        """Compute the loss of all items; return whether it fits in memory, else note the error in the last part."""
        items = [len(next(iter(part.values()))) for part in self._rows]
        rows = joined_rows(self._rows)

        def take() -> None:
            self._cached = self.step.contrast(rows)

        with RngState.preserved(self.step.device):
            error = out_of_memory_error(take)
        if error is not None:
            last.outcome, last.error = PartOutcome.OOM, f"the loss of all {sum(items)} items: {error}"
            return False
        self._rows = list(split_rows(self._cached.rows, items))
        return True

    def back(self, piece: Piece) -> None:
        """Run a part forward with gradients, and backward from the cached gradients of its rows."""
        batch, rows = piece.collated(self.step), self._rows.pop(0)
        with self.step.remedied(piece.rung):
            self.step.go_back(batch, rows, on_host=piece.is_on_host)
        if not self._rows:
            self._cached.finish()

    def judge(self, results: Sequence[PartResult]) -> None:
        """Give the first part the terms of all, and mark parts whose embeddings (else: whose loss) are not finite."""
        totals = self.step.totals
        is_finite = all(map(math.isfinite, (value for term in totals.values() for value in term)))
        for place, result in enumerate(results):
            result.terms = {} if place else totals
            if result.outcome in (PartOutcome.FITS, PartOutcome.NOT_FINITE):
                fits = self._finite[place] if not all(self._finite) else is_finite
                result.outcome = PartOutcome.FITS if fits else PartOutcome.NOT_FINITE


class _Sums(StepClock):
    """Records a micro-batch's own sums: in a running total, one that is not finite would spoil all later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, float] = {}

    def terms(self, terms: Mapping[str, Tensor]) -> None:
        """Record the sums."""
        self.sums = {name: float(total.detach()) for name, total in terms.items()}


def _weights(step: Step, parts: Sequence[RerunPart], read: Callable[[RerunPart], Piece]) -> dict[str, float] | None:
    """Return the weights of the share's terms where backward needs them: not for a single term."""
    weights: list[Mapping[str, Any]] = []

    def in_parts(piece: Piece) -> None:  # a single item that does not fit has no weight here
        error = out_of_memory_error(lambda: weights.append(weights_of(step, piece)))
        if error is not None and len(piece) > 1:
            for half in piece.halves():
                in_parts(half)

    if len(parts) < 2 and not isinstance(step.task, Weights):
        return None
    for part in parts:
        in_parts(replace(read(part), rung=0))
        if not isinstance(step.task, Weights) and weights and len(weights[0]) == 1:
            return None
    return {name: float(value) for name, value in sums_by_name(weights).items()} or None


def _look_at_gradients(step: Step, report: Rerun, weights: Mapping[str, float] | None) -> None:
    """Note the norm of the gradients of a share that ran to its end, and which are not finite."""
    report.gradients = not_finite(step)
    totals = step.totals
    if weights is None and len(totals) == 1:
        ((_, weight),) = totals.values()
        step.settle(weight)
    if totals:
        report.norm = float(step.norm())


def not_finite(step: Step) -> list[str]:
    """Return the names of the parameters whose gradients are not finite."""
    gradients = ((name, parameter.grad) for name, parameter in step.model.named_parameters())
    return [plain_name(name) for name, grad in gradients if grad is not None and not bool(torch.isfinite(grad).all())]
