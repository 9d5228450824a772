"""Running a rank's share of a failed step again with the same cuts: each part is measured, and nothing is recovered.

It uses the training's own step (`step.exact_step`, `step.contrastive`), but cuts nothing further and stops at the first
part that does not fit. `suspects` then finds where a loss or gradient that is not finite comes from: the item, term,
module, parameter and operation.

Afterwards the step's state is restored, except for memory that the allocator keeps.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from pipeline.device.accelerator import RngState, out_of_memory_error, unless_out_of_memory
from pipeline.errors import PlanInfeasible
from pipeline.memory.runtime.recovery import StepSnapshot, forget_failed_backward
from pipeline.training.checkpoints.keeper import plain_name
from pipeline.training.items.batch import ItemBatch
from pipeline.training.ranks import Ranks
from pipeline.training.step.contrastive import ExactContrastiveStep
from pipeline.training.step.exact_step import ExactStep
from pipeline.training.step.step import ON_HOST
from pipeline.training.step_clock import StepClock
from pipeline.units import first_few

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor, nn

    from pipeline.memory.runtime.meters import Meter
    from pipeline.training.step.contrastive import CachedGradients
    from pipeline.training.step.exact_step import Piece, RankShare
    from pipeline.training.step.step import Step

_NAN = re.compile(r"Function '(\w+?)(?:Backward\d*)?' returned nan values")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in')
_TORCH = str(Path(torch.__file__).parent)
_SHOWN = 4


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
    cost_bytes: int = 0  # as planned, in addition to the model
    sizes: Mapping[str, int] = field(default_factory=dict)  # of all items together


@dataclass(slots=True)
class PartResult:
    """How a part ended, and the memory that it took in the more costly of its passes."""

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
    before = StepSnapshot(step.model, device=step.device, scaler=step.scaler)
    kind = _MeasuredContrastiveStep if step.contrasts else _MeasuredStep
    measured: _MeasuredStep = kind(step, parts, read, meter, begin)
    rng.restore()
    measured.run_again()
    step.release()
    before.rewind()
    return measured.report


class _MeasuredStep(ExactStep):
    """Makes a step of one rank from parts as they are given, and measures each."""

    def __init__(
        self,
        step: Step,
        parts: Sequence[RerunPart],
        read: Callable[[RerunPart], Piece],
        meter: Meter,
        begin: Callable[[RerunPart], None],
    ) -> None:
        nothing: Any = None  # counts nothing, and does no upkeep
        super().__init__(step, Ranks(), nothing, nothing, meter=meter)
        first = meter.read()
        self._standing = first.reserved_bytes if first.allocated_bytes is None else first.allocated_bytes
        self.report = Rerun([PartResult(part) for part in parts], is_counted=first.allocated_bytes is not None)
        self._read, self._begins, self._measures = read, begin, meter
        self._at = self.report.results[0]

    def run_again(self) -> None:
        """Run all parts, and examine the gradients of a share that ran to its end."""
        self.start()
        share = cast("RankShare", SimpleNamespace())
        weights, can_run = self._agreed_weights(share)
        if not (can_run and self._run_share(share, weights)):
            return
        self.report.gradients, totals = not_finite(self.step), self.step.totals
        if weights is None:
            self.step.settle(totals)
        if totals:
            self.report.norm = float(self.step.norm())

    def _ready(self, share: Iterable[Piece]) -> Iterator[Piece]:  # noqa: ARG002 - parts stay as they are
        for result in self.report.results:
            self._at = result
            self._begins(result.part)
            result.rng = RngState.capture(self.step.device)
            yield self._read(result.part)

    def _all_fit(self, pieces: Iterable[Piece], run: Callable[[Piece], object], share: RankShare) -> bool:  # noqa: ARG002
        for result in self.report.results:
            result.outcome = PartOutcome.NOT_RUN
        for piece in pieces:
            self._measure(piece, run)
            if self._at.outcome is PartOutcome.OOM:
                return False
        return True

    def _measure(self, piece: Piece, run: Callable[[Piece], object]) -> None:
        """Run a pass of a part; note how that ended, and its memory."""
        result, totals, own = self._at, self.step.totals, _Sums()
        self.step.watch = own
        self._measures.reset_peak()
        error = out_of_memory_error(run, piece)
        self.step.watch = self.step.clock
        for name, (total, weight) in self.step.totals.items():
            total_before, weight_before = totals.get(name, (0.0, 0.0))
            result.terms[name] = (own.sums.get(name, total - total_before), weight - weight_before)
        finite = all(math.isfinite(value) for term in result.terms.values() for value in term)
        result.outcome, result.error = PartOutcome.FITS if finite else PartOutcome.NOT_FINITE, ""
        if error is not None:
            result.outcome, result.error, result.terms = PartOutcome.OOM, error, {}
        memory = self._measures.read()
        peak = memory.peak_reserved_bytes if memory.peak_allocated_bytes is None else memory.peak_allocated_bytes
        self.report.reserved_bytes = max(self.report.reserved_bytes, memory.peak_reserved_bytes)
        result.peak_bytes = max(result.peak_bytes, peak)
        result.grown_bytes = max(0, result.peak_bytes - self._standing)

    def _count(self, piece: Piece) -> None:
        pass


class _MeasuredContrastiveStep(_MeasuredStep, ExactContrastiveStep):
    """The same for a loss that compares all items: the first part gets the terms of all."""

    def run_again(self) -> None:
        super().run_again()
        totals = self.step.totals
        ran = [result for result in self.report.results if result.outcome in (PartOutcome.FITS, PartOutcome.NOT_FINITE)]
        for place, result in enumerate(self.report.results):
            result.terms = {} if place else totals
        if not all(math.isfinite(value) for term in totals.values() for value in term):
            finite = [unless_out_of_memory(partial(self.is_finite, self._read(result.part))) for result in ran]
            bad = [result for result, is_finite in zip(ran, finite, strict=True) if is_finite is False] or ran
            for result in ran:
                result.outcome = PartOutcome.NOT_FINITE if result in bad else PartOutcome.FITS

    def _whole(self, share: RankShare) -> Piece | None:
        pieces = list(self._ready(share)) if len(self.report.results) == 1 else []
        return pieces[0] if pieces and pieces[0].rung < ON_HOST else None

    def _contrasted(self, parts: list[dict[str, Tensor]], items: int) -> tuple[CachedGradients | None, int]:
        try:
            return super()._contrasted(parts, items)
        except PlanInfeasible as error:
            self._at.outcome, self._at.error = PartOutcome.OOM, error.what
            return None, 0


class _Sums(StepClock):
    """Records a micro-batch's own sums: in a running total, one that is not finite would spoil all later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, float] = {}

    def terms(self, terms: Mapping[str, Tensor]) -> None:
        self.sums = {name: float(total.detach()) for name, total in terms.items()}


def not_finite(step: Step) -> list[str]:
    """Return the names of the parameters whose gradients are not finite."""
    gradients = {plain_name(name): parameter.grad for name, parameter in step.model.named_parameters()}
    return [name for name, grad in gradients.items() if grad is not None and _not_finite_parts(grad)]


# Where it is not finite


@dataclass(frozen=True, slots=True)
class Suspect:
    """Items whose loss or gradients are not finite, and where that begins."""

    ids: tuple[str, ...]  # a single one fails by itself
    fields: tuple[str, ...] = ()  # of the batch that are not finite themselves
    terms: tuple[str, ...] = ()  # of the loss
    module: str = ""  # the first whose output is not finite; with none, it is the loss itself
    kind: str = ""  # of module
    was_given: bool = False  # the module's input was not finite already
    parameters: tuple[str, ...] = ()  # whose gradients are not finite though the loss is
    operation: str = ""  # the first whose derivative is NaN
    line: str = ""  # where it is called

    def words(self) -> str:
        """Describe it in a sentence for people."""
        parts = [f"{self.ids[0]} alone" if len(self.ids) == 1 else f"{len(self.ids)} items together, no single one"]
        if self.fields:
            parts.append(f"the batch itself is not finite: {first_few(self.fields, _SHOWN)}")
        if self.terms:
            given = ", whose input was not finite" if self.was_given and not self.fields else ""
            place = f"first in the output of {self.module} ({self.kind}){given}"
            alone = "every module's output is finite: the problem starts in loss() itself"
            parts += [f"the term {first_few(self.terms, _SHOWN)} of the loss", place if self.module else alone]
        if self.parameters:
            parts.append(f"the loss is finite, the gradients of {first_few(self.parameters, _SHOWN)} are not")
        if self.operation:
            parts.append(f"first in the derivative of {self.operation}{f' ({self.line})' if self.line else ''}")
        return "; ".join(parts)


def suspects(
    step: Step, results: Iterable[PartResult], read: Callable[[RerunPart], Piece], *, backward: bool = False
) -> list[Suspect]:
    """Check the items of each part one by one, and together where none fails alone; `backward`: also gradients."""
    snapshot = StepSnapshot(step.model, device=step.device, scaler=step.scaler)
    found: list[Suspect] = []
    for result in results:
        piece = read(result.part)
        assert result.rng is not None  # the part ran
        look = partial(_suspect, step, rng=result.rng, snapshot=snapshot, backward=backward)
        alone = [suspect for single in piece.singles() if (suspect := look(single))]
        together = look(piece) if not alone and len(piece) > 1 else None
        found += alone or ([together] if together else [])
    snapshot.rewind()
    return found


def _suspect(step: Step, piece: Piece, *, rng: RngState, snapshot: StepSnapshot, backward: bool) -> Suspect | None:
    """Run a piece with hooks on every module; None: all is finite, or it does not fit in memory."""
    found: list[Suspect | None] = []

    def again() -> None:
        step.release()
        snapshot.restore()
        rng.restore()

    def look(piece: Piece) -> None:
        again()
        found.append(_forward(step, piece) or (_backward(step, piece, again) if backward else None))

    if out_of_memory_error(look, piece) is not None:
        snapshot.rewind()
    again()
    return found[0] if found else None


def _forward(step: Step, piece: Piece) -> Suspect | None:
    """Check the forward pass and the loss."""
    batch = step.moved(piece.collated())
    modules: list[tuple[str, str, bool]] = []  # with a bad output, innermost first: name, class, whether input was bad

    def look(name: str, module: nn.Module, given: Any, output: Any) -> None:
        if _not_finite_parts(output):
            modules.append((name or "the model", type(module).__name__, bool(_not_finite_parts(given))))

    with ExitStack() as stack, torch.no_grad(), step.cast():
        for name, module in step.model.named_modules():
            stack.callback(module.register_forward_hook(partial(look, plain_name(name))).remove)
        terms = step.task.loss(step.model, batch)
    bad = tuple(name for name, term in terms.items() if _not_finite_parts(term))
    return Suspect(piece.ids, _not_finite_parts(batch), bad, *(modules[0] if modules else ())) if bad else None


def _backward(step: Step, piece: Piece, again: Callable[[], None]) -> Suspect | None:
    """Check the gradients, and find the first operation whose derivative is NaN, and the line that calls it."""
    again()
    step.accumulate_all([piece.collated()], None)
    if not (bad := tuple(not_finite(step))):
        return None
    again()
    with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(True, check_nan=True):
        warnings.simplefilter("always")
        try:
            step.accumulate_all([piece.collated()], None)
        except RuntimeError as error:
            match = _NAN.search(str(error))
            if match is None:
                raise
            forget_failed_backward()
            trace = "\n".join(str(warning.message) for warning in caught)
            frames = [frame for frame in _FRAME.finditer(trace) if not frame[1].startswith(_TORCH)]
            line = f"{frames[-1][1]}:{frames[-1][2]}" if frames else ""  # the innermost
            return Suspect(piece.ids, parameters=bad, operation=match[1], line=line)
    return Suspect(piece.ids, parameters=bad)


def _not_finite_parts(value: Any, name: str = "") -> tuple[str, ...]:
    """Return the names of the parts of a nested value that are not finite; `batch` if they have none."""
    if isinstance(value, ItemBatch):
        value = value.fields
    elif is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        parts = (_not_finite_parts(part, f"{name}.{key}".removeprefix(".")) for key, part in value.items())
        return tuple(dict.fromkeys(chain.from_iterable(parts)))
    if isinstance(value, list | tuple):
        return tuple(dict.fromkeys(chain.from_iterable(_not_finite_parts(part, name) for part in value)))
    tensor = torch.tensor(value) if isinstance(value, float) else value
    has_numbers = isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex())
    return (name or "batch",) if has_numbers and not bool(torch.isfinite(tensor).all()) else ()
