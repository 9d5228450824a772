"""A model's memory, from small real steps on the CPU.

A step is built and run at growing sizes until the allowed time or memory ends. Where all sizes allocate in the same
order, each block is extrapolated; else the peak is, and the largest tape is stretched to it.

Shapes: E events.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pipeline.memory.estimating.cpu_profile import counted_flops, record
from pipeline.memory.estimating.extrapolate import FEWEST, Extrapolated, enlarged, extrapolate, runs_alike
from pipeline.memory.footprint import (
    Category,
    MemoryChoice,
    MemoryPart,
    MicroFootprint,
    Provenance,
    StandingFootprint,
    Tape,
    Unmeasurable,
)
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    Sizes = Mapping[str, int]

MOST = 6  # sizes that are fitted: the largest ones
SMALLEST = 2**-10  # of the wanted size
WORST_GROWTH = 8.0  # of time and memory when the sizes double: items times the square of their length
BETWEEN = (5 / 8, 13 / 16)  # of the largest
MOVED = 3  # bytes for each one allocated: a kernel writes it and reads about two others
SEED = 0


class RehearsedTraining(Protocol):
    """The training step that is run on the CPU, at the model's real width: `training.step.Step`."""

    model: nn.Module

    def accumulate(self, batch: Any) -> None:
        """Run a micro-batch forward and backward."""

    def update(self) -> object:
        """Run the optimizer, and drop the gradients."""

    def release(self) -> None:
        """Drop the gradients."""

    def owned(self) -> Iterable[tuple[str, str, Tensor]]:
        """Yield the tensors that may outlive a micro-batch, each after its category and name."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """The time and memory that measuring may take on this machine."""

    time_s: float = 30.0  # of one question, as far as the next size's time can be foretold
    memory_bytes: int = 4 << 30  # of tensors, the model's state included


@dataclass(frozen=True, slots=True)
class MeasuredSize:
    """The measurement of a size that was run."""

    sizes: Sizes
    first: Tape
    again: Tape
    kernels: int
    flops: int
    took_s: float

    @property
    def peak_bytes(self) -> int:
        return max(self.first.peak_bytes, self.again.peak_bytes)


class MeasuredSmall:
    """An `Oracle` that runs small micro-batches; its answers are of the whole model, whatever the shards."""

    def __init__(
        self,
        build: Callable[[MemoryChoice], RehearsedTraining],
        example: Callable[[Sizes], Any],
        least: Sizes,
        allowance: Allowance | None = None,
        *,
        state_bytes: int = 0,
    ) -> None:
        """Take functions that make a training and a batch, and the sizes of the batch for the first steps.

        `state_bytes`: the known size of the model's state.
        """
        self._build, self._example, self._least = build, example, least
        self._allowance = allowance or Allowance()
        self._state_bytes = state_bytes
        self._rehearsals: dict[MemoryChoice, _Rehearsal] = {}
        self._answers: dict[tuple[MemoryChoice, tuple[tuple[str, int], ...]], MicroFootprint] = {}

    def standing(self, choice: MemoryChoice) -> StandingFootprint:
        """Return the memory that does not depend on the batch."""
        standing = self._rehearsal(_rehearsed(choice)).standing
        return replace(standing, notes=(*standing.notes, *_not_rehearsed(choice)))

    def micro(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return the memory of a micro-batch of these sizes."""
        question = (_rehearsed(choice), tuple(sorted(sizes.items())))
        if question not in self._answers:
            rehearsal = self._rehearsal(_rehearsed(choice))
            measured = rehearsal.measured_up_to(sizes, self._allowance)
            self._answers[question] = _answer(measured, sizes, rehearsal.standing)
        answer = self._answers[question]
        return replace(answer, notes=(*answer.notes, *_not_rehearsed(choice)))

    def _rehearsal(self, choice: MemoryChoice) -> _Rehearsal:
        if choice not in self._rehearsals:
            most = self._allowance.memory_bytes
            if self._state_bytes > most:
                state, limit = format_bytes(self._state_bytes), format_bytes(most)
                raise Unmeasurable(f"its state of {state} is above the {limit} that measuring on the CPU may take")
            with _same_numbers():
                self._rehearsals[choice] = _Rehearsal(self._build(choice), self._example, self._least)
        return self._rehearsals[choice]


class _Rehearsal:
    """A built training, its standing memory, and the measuring of its micro-batches."""

    def __init__(self, training: RehearsedTraining, example: Callable[[Sizes], Any], least: Sizes) -> None:
        """Run two steps: the first makes the optimizer's state."""
        self._training, self._example = training, example
        self._numbers: dict[tuple[Category, str], int] = {}  # below 0: of each block that stays, in every tape
        self._failure = ""  # of the last size that could not be run
        setup = self._owned()
        runs = [lambda: training.accumulate(example(least)), training.update]
        micro, first_update = record(runs, self._numbers_by_address)
        _, update = record(runs, self._numbers_by_address)
        sums: Counter[Category] = Counter()
        for (category, _), _, size_bytes in self._owned():
            sums[category] += size_bytes
        parts = tuple(MemoryPart(category, "", sums[category]) for category in Category if category in sums)
        parameters = list(training.model.parameters())
        self.standing = StandingFootprint(
            setup=Tape(np.array([number for _, number, _ in setup]), np.array([size for _, _, size in setup])),
            first_update=first_update.tape,
            update=update.tape,
            parts=parts,
            update_parts=(*parts, *_peak_parts(update.tape, micro.tape.left_bytes, Category.TEMPORARIES, "optimizer")),
            parameters=sum(parameter.numel() for parameter in parameters),
            trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            origin=Provenance.EXTRAPOLATED,
            notes=("the model's state and the optimizer's step were measured in real steps on the CPU",),
        )

    def measured_up_to(self, wanted: Sizes, allowance: Allowance) -> list[MeasuredSize]:
        """Run growing sizes until time, memory or the sizes end; return the largest ones, in order."""
        ends_s = time.monotonic() + allowance.time_s
        spare_bytes = allowance.memory_bytes - self.standing.bytes
        measured: list[MeasuredSize] = []
        self._failure = ""
        for sizes in rising(wanted):
            if not _may_grow(measured, ends_s - time.monotonic(), spare_bytes):
                break
            measured += (tried := self._tried(sizes))
            if measured and not tried:  # before the first it was too small to be a batch at all
                break
        measured = measured[-MOST:]
        if measured and measured[-1].sizes == dict(wanted):
            return measured
        # Small sizes may take other ways than larger ones: then more is to be known of the larger ones.
        if len(runs_alike([(size.sizes, size.first) for size in measured])) < FEWEST:
            for share in BETWEEN if measured else ():
                if time.monotonic() + measured[-1].took_s < ends_s:
                    measured[-1:-1] = self._tried(proportional(measured[-1].sizes, share))
        if len(measured) < FEWEST:
            problem = f"only {len(measured)} small real batches could be run, {FEWEST} are needed"
            raise Unmeasurable(problem + self._failure)
        return measured

    def _tried(self, sizes: Sizes) -> list[MeasuredSize]:
        """Return the measurement of a size; if the task raises, none, and the error is kept for the message."""
        try:
            return [self._measured(sizes)]
        except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError) as error:
            words = ", ".join(f"{value} {name}" for name, value in sizes.items())
            self._failure = f"; {words}: {type(error).__name__}: {error}"
            return []

    def _measured(self, sizes: Sizes) -> MeasuredSize:
        """Run two such micro-batches and return what they allocated."""
        begun_s = time.monotonic()

        def micro() -> None:
            self._training.accumulate(self._example(sizes))

        with _same_numbers():
            try:
                first, again = record([micro, micro], self._numbers_by_address)
                flops = counted_flops(micro)
            finally:
                self._training.release()
        return MeasuredSize(dict(sizes), first.tape, again.tape, first.kernels, flops, time.monotonic() - begun_s)

    def _owned(self) -> list[tuple[tuple[Category, str], int, int]]:
        """Return the storages that stay: category and name, number in every tape, bytes; each storage once."""
        owned: dict[int, tuple[tuple[Category, str], int, int]] = {}
        for category, name, tensor in self._training.owned():
            storage, place = tensor.untyped_storage(), (Category(category), name)
            if storage.nbytes() and storage.data_ptr() not in owned:
                number = self._numbers.setdefault(place, -1 - len(self._numbers))
                owned[storage.data_ptr()] = (place, number, storage.nbytes())
        return list(owned.values())

    def _numbers_by_address(self) -> dict[int, int]:
        """Return the numbers of the storages that stay, by present address."""
        self._owned()
        return {
            tensor.untyped_storage().data_ptr(): self._numbers[Category(category), name]
            for category, name, tensor in reversed(list(self._training.owned()))
            if (Category(category), name) in self._numbers
        }


def _peak_parts(tape: Tape, gradient_bytes: int, kind: Category, name: str) -> list[MemoryPart]:
    """Return what is live at the peak of a tape, beyond the standing memory: gradients, and all else as one kind."""
    live_E = np.cumsum(tape.bytes_E)
    peak = int(live_E.argmax()) + 1 if live_E.max(initial=0) > 0 else 0
    own = int(tape.bytes_E[:peak][tape.block_E[:peak] >= 0].sum())
    gradients = gradient_bytes + int(live_E[peak - 1] if peak else 0) - own
    parts = (MemoryPart(Category.GRADIENTS, "", gradients), MemoryPart(kind, name, own))
    return [part for part in parts if part.bytes]


def _answer(measured: Sequence[MeasuredSize], wanted: Sizes, standing: StandingFootprint) -> MicroFootprint:
    """Return the memory of the wanted micro-batch, from measured ones, the largest last."""

    def likely(count: Callable[[MeasuredSize], int]) -> int:
        """Return a count at the wanted size, without a margin."""
        if dict(measured[-1].sizes) == dict(wanted):
            return count(measured[-1])
        return extrapolate([(size.sizes, count(size)) for size in measured], wanted).bytes

    first, first_estimate, _ = enlarged([(size.sizes, size.first) for size in measured], wanted)
    again, again_estimate, how = enlarged([(size.sizes, size.again) for size in measured], wanted)
    worse = max(first_estimate, again_estimate, key=lambda extrapolated: extrapolated.margin)
    return MicroFootprint(
        sizes=dict(wanted),
        first=first,
        again=again,
        parts=(*standing.parts, *_peak_parts(again, first.left_bytes, Category.ACTIVATIONS, "")),
        flops=float(likely(lambda size: size.flops)),
        kernels=likely(lambda size: size.kernels),
        moved_bytes=float(MOVED * again.bytes_E[again.bytes_E > 0].sum()),
        origin=Provenance.EXTRAPOLATED,
        notes=(_how_far(worse, len(measured)), how, "inputs and temporaries are counted among the activations"),
    )


def _how_far(estimate: Extrapolated, sizes: int) -> str:
    """Say what was measured and how far it was taken."""
    if estimate.ratio <= 1:
        return f"measured on a real batch of this size on the CPU, {estimate.note}"
    largest = f"1/{estimate.ratio:.3g} of this one"
    return f"measured on small real batches on the CPU ({sizes} sizes up to {largest}), {estimate.note}"


def proportional(wanted: Sizes, fraction: float) -> dict[str, int]:
    """Return the sizes times a fraction; those above 0 stay at least 1."""
    return {name: max(1, round(value * fraction)) if value else 0 for name, value in wanted.items()}


def rising(wanted: Sizes) -> Iterator[dict[str, int]]:
    """Yield doubling sizes, up to the wanted one."""
    fraction, before = SMALLEST, dict[str, int]()
    while fraction < 1:
        sizes = proportional(wanted, fraction)
        if sizes not in (before, dict(wanted)):
            yield sizes
        fraction, before = 2 * fraction, sizes
    yield dict(wanted)


def _may_grow(measured: Sequence[MeasuredSize], left_s: float, spare_bytes: int) -> bool:
    """Tell whether the next size will likely stay within time and memory."""
    if not measured:
        return left_s > 0
    took_s = _grown([size.took_s for size in measured])
    return took_s <= left_s and _grown([size.peak_bytes for size in measured]) <= spare_bytes


def _grown(values: Sequence[float]) -> float:
    """Predict the next value of a series: it grows as before, but at least doubles (a constant may hide the growth)."""
    growth = values[-1] / max(values[-2], 1e-9) if len(values) > 1 else WORST_GROWTH
    return values[-1] * min(max(growth, 2.0), WORST_GROWTH)


@contextmanager
def _same_numbers() -> Iterator[None]:
    """Use a fixed seed within, and leave torch's random state as it was."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield


def _rehearsed(choice: MemoryChoice) -> MemoryChoice:
    """Return a choice reduced to what a single machine without a GPU can run."""
    return MemoryChoice(precision=choice.precision, checkpointing=choice.checkpointing)


def _not_rehearsed(choice: MemoryChoice) -> tuple[str, ...]:
    """Return notes on what could not be run; numbers are those without it, which are higher."""
    return ("offloading could not be rehearsed: planned as without",) if choice.offload else ()
