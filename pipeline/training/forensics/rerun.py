"""A rank's share of a step that went wrong, run again as it was cut: each part is measured, and nothing is recovered.

Where a loss compares all items of a step, all parts are embedded first, and each then goes back from the loss of all.

Everything is afterwards as it was before, but for what the allocator holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from pipeline.memory.runtime.out_of_memory import out_of_memory_error
from pipeline.memory.runtime.recovery import StepSnapshot
from pipeline.protocol import Weights
from pipeline.training.checkpoints.training_state import plain_name
from pipeline.training.random_state import as_drawn, rng_state, set_rng_state
from pipeline.training.step.contrastive import CachedGradients, ContrastiveStep, joined_rows
from pipeline.training.step.local_step import accumulate_piece, weights_of
from pipeline.training.step.optimizers import sums_by_name
from pipeline.training.step.step import Unwatched

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from pipeline.memory.runtime.meters import Memory, Meter
    from pipeline.training.step.micro_batches import Piece
    from pipeline.training.step.step import Step

    Numbers = Mapping[str, Tensor]  # states of random numbers


class PartOutcome(str, Enum):
    """What came of a part."""

    FITS = "fits"
    OOM = "out of memory"
    NOT_FINITE = "not finite"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class RerunPart:
    """Items that run forward and backward together."""

    micro: int  # of which micro-batch of the share, from 0
    ids: tuple[str, ...]
    numbers: tuple[int, ...]  # in the table
    rung: int = 0  # of the ladder
    cost_bytes: int = 0  # as planned, beside the model
    sizes: Mapping[str, int] = field(default_factory=dict)  # of all items together


@dataclass(slots=True)
class PartResult:
    """What came of a part, and what it took."""

    part: RerunPart
    outcome: PartOutcome = PartOutcome.NOT_RUN
    terms: dict[str, tuple[float, float]] = field(default_factory=dict)  # sums and weights
    peak_bytes: int = 0  # live tensors, the model and all; where nobody counts these, what is resident
    grown_bytes: int = 0  # above what there was when the step began
    error: str = ""
    rng: Numbers = field(default_factory=dict)  # before it


@dataclass(slots=True)
class Rerun:
    """What came of a share."""

    results: list[PartResult]
    is_counted: bool  # whether a device counts tensors; else figures are of the process
    reserved_bytes: int = 0  # at the peak
    gradients: list[str] = field(default_factory=list)  # parameters whose gradients are not finite
    norm: float | None = None  # of all gradients, where every part ran

    def of(self, outcome: PartOutcome) -> list[PartResult]:
        """Return the parts that ended so."""
        return [one for one in self.results if one.outcome is outcome]


def rerun(
    step: Step,
    parts: Sequence[RerunPart],
    read: Callable[[RerunPart], Piece],
    rng: Numbers,
    meter: Meter,
    *,
    begin: Callable[[RerunPart], None] = lambda _: None,
) -> Rerun:
    """Run parts in order, to the first for which memory does not suffice."""
    snapshot = StepSnapshot(step.model, device=step.device, scaler=step.scaler)
    weights = None if step.contrasts else _weights(step, parts, read)
    first = meter.read()
    found = Rerun([PartResult(part) for part in parts], is_counted=first.allocated_bytes is not None)
    joint = _Joint(step) if isinstance(step, ContrastiveStep) and len(parts) > 1 else None

    def all_fit(run: Callable[[Piece], None]) -> bool:
        set_rng_state(rng, step.device)
        for result in found.results:
            result.outcome = PartOutcome.NOT_RUN
        for result in found.results:
            begin(result.part)
            result.rng = rng_state(step.device)
            _run(step, result, read, run, meter)
            _measure(found, result, meter.read(), first)
            if result.outcome is PartOutcome.OOM:
                return False
        return True

    if joint is None:
        is_whole = all_fit(lambda piece: accumulate_piece(step, piece, weights, is_whole_step=True))
    else:
        is_whole = all_fit(joint.embed)
        snapshot.restore()
        is_whole = is_whole and joint.contrast(found.results[-1]) and all_fit(joint.back)
        joint.judge(found.results)
    if is_whole:
        _look_at_gradients(step, found, weights)
    step.release()
    snapshot.rewind()
    return found


def _measure(found: Rerun, result: PartResult, memory: Memory, first: Memory) -> None:
    """Note what a part took, in the more costly of its passes."""
    counted = memory.peak_allocated_bytes
    before = first.reserved_bytes if first.allocated_bytes is None else first.allocated_bytes
    found.reserved_bytes = max(found.reserved_bytes, memory.peak_reserved_bytes)
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
    step.watch = Unwatched()
    if error is not None:
        result.outcome, result.error = PartOutcome.OOM, error
        return
    for name, (total, weight) in step.totals.items():
        earlier = before.get(name, (0.0, 0.0))
        result.terms[name] = (sums.sums.get(name, total - earlier[0]), weight - earlier[1])
    finite = all(math.isfinite(total) and math.isfinite(weight) for total, weight in result.terms.values())
    result.outcome = PartOutcome.FITS if finite else PartOutcome.NOT_FINITE


class _Joint:
    """The passes of a share whose loss is of all its items; parts come in the same order each time."""

    def __init__(self, step: ContrastiveStep) -> None:
        self.step = step
        self._rows: list[dict[str, Tensor]] = []  # of each part; then their gradients
        self._finite: list[bool] = []
        self._cached = CachedGradients()

    def embed(self, piece: Piece) -> None:
        """Embed a part without a trace."""
        rows = self.step.embed(piece.collated(self.step.task), len(piece), on_host=piece.is_on_host)
        self._finite.append(all(bool(torch.isfinite(row).all()) for row in rows.values()))
        self._rows.append(rows)

    def contrast(self, last: PartResult) -> bool:
        """Take the loss of all items; say whether memory sufficed, else the last part has what was said."""
        items = [len(next(iter(one.values()))) for one in self._rows]
        rows = joined_rows(self._rows)

        def take() -> None:
            self._cached = self.step.contrast(rows)

        with as_drawn(self.step.device):
            error = out_of_memory_error(take)
        if error is not None:
            last.outcome, last.error = PartOutcome.OOM, f"the loss of all {sum(items)} items: {error}"
            return False
        split = {name: torch.split(one, items) for name, one in self._cached.rows.items()}
        self._rows = [{name: one[place] for name, one in split.items()} for place in range(len(items))]
        return True

    def back(self, piece: Piece) -> None:
        """Run a part with a trace, and back."""
        batch, rows = piece.collated(self.step.task), self._rows.pop(0)
        with self.step.remedied(piece.rung):
            self.step.go_back(batch, rows, on_host=piece.is_on_host)
        if not self._rows:
            self._cached.finish()

    def judge(self, results: Sequence[PartResult]) -> None:
        """Let the first part have the terms of all; those are to blame that were not embedded to numbers, if any."""
        totals = self.step.totals
        is_finite = all(map(math.isfinite, (value for one in totals.values() for value in one)))
        for place, result in enumerate(results):
            result.terms = {} if place else totals
            if result.outcome in (PartOutcome.FITS, PartOutcome.NOT_FINITE):
                fits = self._finite[place] if not all(self._finite) else is_finite
                result.outcome = PartOutcome.FITS if fits else PartOutcome.NOT_FINITE


class _Sums(Unwatched):
    """Hears what a micro-batch's terms come to: what is added up keeps the first that is not finite for good."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}

    def terms(self, terms: Mapping[str, Tensor]) -> None:
        """Hear the sums."""
        self.sums = {name: float(total.detach()) for name, total in terms.items()}


def _weights(step: Step, parts: Sequence[RerunPart], read: Callable[[RerunPart], Piece]) -> dict[str, float] | None:
    """Return the weights of the share's terms, where they must be known before; of one term they need not."""
    found: list[Mapping[str, Any]] = []

    def in_parts(piece: Piece) -> None:  # an item that does not fit even so has no weight here
        said = out_of_memory_error(lambda: found.append(weights_of(step, piece)))
        if said is not None and len(piece) > 1:
            for half in piece.halves():
                in_parts(half)

    if len(parts) < 2 and not isinstance(step.task, Weights):
        return None
    for part in parts:
        in_parts(replace(read(part), rung=0))
        if not isinstance(step.task, Weights) and found and len(found[0]) == 1:
            return None
    return {name: float(value) for name, value in sums_by_name(found).items()} or None


def _look_at_gradients(step: Step, found: Rerun, weights: Mapping[str, float] | None) -> None:
    """Note what is not finite of the gradients of a share that ran to its end."""
    found.gradients = not_finite(step)
    totals = step.totals
    if weights is None and len(totals) == 1:
        ((_, weight),) = totals.values()
        step.settle(weight)
    if totals:
        found.norm = float(step.norm())


def not_finite(step: Step) -> list[str]:
    """Return the names of the parameters whose gradients are not finite."""
    named = ((name, one.grad) for name, one in step.model.named_parameters())
    return [plain_name(name) for name, grad in named if grad is not None and not bool(torch.isfinite(grad).all())]
