"""The memory of a training step as values: tapes of allocations, their peaks and parts, and margins.

`tracer` or a stand-in makes the tapes, `caching_allocator` replays them, and the planner compares them with a limit.

Shapes: E events.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pipeline.errors import PlanInfeasible

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Sizes = Mapping[str, int]


class Category(StrEnum):
    """The use of a block of memory."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    EMA = "ema"
    INPUTS = "inputs"
    ACTIVATIONS = "activations"  # kept from forward to backward, by module
    LOSS = "loss"  # the same, by term of the loss
    TEMPORARIES = "temporaries"  # freed within the part of the step that made them
    SCRATCH = "scratch"  # internal to kernels: from a table


class Provenance(StrEnum):
    """The origin of a number, the most reliable first."""

    MEASURED = "measured"  # on such a GPU
    TRACED = "traced"  # every allocation of the very step, on fake tensors
    SIMULATED = "simulated"  # an allocator fed with a trace
    GUESSED = "guessed"  # traced, but branches depend on values: the costliest branch found
    EXTRAPOLATED = "extrapolated"  # from small real steps on the CPU
    ASSUMED = "assumed"  # a formula, or a figure from a table


@dataclass(frozen=True, slots=True)
class Tape:
    """Allocations and releases, in order.

    Blocks from 0 on are this tape's own, and new each time it is played. A negative number is the same block in every
    tape of a model: one tape may allocate it, and another release it.
    """

    block_E: Integers
    bytes_E: Integers  # above 0: allocated; below: released

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes that are live during the tape, beyond those live before it."""
        return int(np.cumsum(self.bytes_E).max(initial=0))

    @property
    def left_bytes(self) -> int:
        """Return how many more bytes are live after the tape than before; negative if fewer."""
        return int(self.bytes_E.sum())


ALIKE = 1e-3  # of a peak: smaller differences do not matter


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """A share of the memory at the peak."""

    category: Category
    name: str  # the module, the term of the loss, …; may be empty
    bytes: int


EVERY_BLOCK = 1 << 30  # as `checkpointing`, where their number does not matter


@dataclass(frozen=True, slots=True)
class MemoryChoice:
    """The settings a plan may choose that change memory; all others are the same in every plan of a run."""

    precision: str = "fp32"  # fp32, or autocast to bf16 or fp16
    checkpointing: int = 0  # the number of repeated blocks that are recomputed in backward
    offload: bool = False  # saved activations are moved to host memory
    shards: int = 1  # ranks over which parameters, gradients and optimizer state are spread


@dataclass(frozen=True, slots=True)
class StandingFootprint:
    """Memory that does not depend on the batch: the model's state and the optimizer's updates."""

    setup: Tape  # parameters, buffers, moving averages
    first_update: Tape  # clipping, the optimizer's first step, which makes its state; releases the gradients
    update: Tape  # every later one
    parts: tuple[MemoryPart, ...]  # live between two steps
    parameters: int  # how many numbers
    trained: int  # how many of them are trained
    origin: Provenance = Provenance.TRACED
    notes: tuple[str, ...] = ()  # how far to trust it, in words
    update_parts: tuple[MemoryPart, ...] = ()  # live at the peak of an update, `parts` included
    kernels: int = 0  # of the smallest micro-batch; 0: unknown

    @property
    def bytes(self) -> int:
        """Return the bytes live between two steps, gradients excluded: an update releases them."""
        return sum(part.bytes for part in self.parts)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Return the sizes of the blocks that are live between two steps, once the first has made its state."""
        live: dict[tuple[int, int], int] = {}
        for number, tape in enumerate((self.setup, self.first_update)):
            for block, size in zip(tape.block_E.tolist(), tape.bytes_E.tolist(), strict=True):
                key = (0 if block < 0 else number, block)  # below 0 it is the same in both
                live[key] = live.get(key, 0) + size
        return tuple(size for size in live.values() if size > 0)


@dataclass(frozen=True, slots=True)
class MicroFootprint:
    """Memory of one micro-batch: input, forward, losses, backward."""

    sizes: Sizes
    first: Tape  # of a step: it allocates the gradients, which are blocks below 0
    again: Tape  # later ones add to the gradients
    parts: tuple[MemoryPart, ...]  # of the peak of `again`, the standing ones and gradients included
    flops: float
    kernels: int
    moved_bytes: float = 0.0  # read and written by its kernels
    origin: Provenance = Provenance.TRACED
    notes: tuple[str, ...] = ()
    host_bytes: int = 0  # offloaded at most
    first_parts: tuple[MemoryPart, ...] = ()  # of the peak of `first`; empty: unknown

    def is_like(self, other: MicroFootprint) -> bool:
        """Tell whether both take the same memory, or nearly so."""
        pairs = ((self.first.peak_bytes, other.first.peak_bytes), (self.again.peak_bytes, other.again.peak_bytes))
        return all(abs(one - another) <= ALIKE * another for one, another in pairs)


class Oracle(Protocol):
    """Answers how much memory a model takes, by tracing or otherwise.

    Some also have `evaluation(choice, sizes)`, for a batch without gradients, and `confirmed(choice, sizes)`: a
    micro-batch that is not computed from others.
    """

    def standing(self, choice: MemoryChoice) -> StandingFootprint:
        """Return the memory that does not depend on the batch."""

    def micro(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return the memory of a micro-batch of these sizes; a repeated question costs nothing."""


@dataclass(frozen=True, slots=True)
class StepTapes:
    """A training step as tapes, played one after another."""

    tapes: tuple[Tape, ...]

    @classmethod
    def of(cls, standing: StandingFootprint, micros: Sequence[MicroFootprint], *, first: bool = False) -> StepTapes:
        """Return the step of these micro-batches; the `first` step of a run also creates the optimizer's state."""
        play = [micro.again if place else micro.first for place, micro in enumerate(micros)]
        return cls((*play, standing.first_update if first else standing.update))

    def peak_bytes(self, live: int) -> int:
        """Return the most bytes live during the step, with `live` bytes before it."""
        highest = live
        for tape in self.tapes:
            highest = max(highest, live + tape.peak_bytes)
            live += tape.left_bytes
        return highest


def live_peak_bytes(standing: StandingFootprint, micro: MicroFootprint, *, accumulate: bool) -> int:
    """Return the live peak of building the model and of a step of one such micro-batch, or of several accumulated."""
    step = StepTapes.of(standing, [micro, micro] if accumulate else [micro])
    return max(standing.setup.peak_bytes, step.peak_bytes(standing.bytes))  # a model may take more to be built


def parts_at_peak(
    standing: StandingFootprint, micro: MicroFootprint, *, accumulate: bool = True
) -> tuple[MemoryPart, ...]:
    """Return the parts live at the peak of building the model, or of a step of such micro-batches."""
    parts = micro.parts if accumulate or not micro.first_parts else micro.first_parts
    built = (MemoryPart(Category.TEMPORARIES, "building the model", standing.setup.peak_bytes),)
    return max(standing.update_parts, parts, built, key=lambda parts: sum(part.bytes for part in parts))


FIRST_CONTACT = {  # share added to a prediction for the caching allocator of a GPU, by its origin
    Provenance.MEASURED: 0.02,
    Provenance.TRACED: 0.08,
    Provenance.SIMULATED: 0.08,
    Provenance.GUESSED: 0.12,
    Provenance.EXTRAPOLATED: 0.15,
    Provenance.ASSUMED: 0.30,
}
LIVE_ONLY = {  # without a caching allocator
    **FIRST_CONTACT,
    Provenance.TRACED: 0.02,
    Provenance.SIMULATED: 0.02,
    Provenance.GUESSED: 0.05,
}
ASSUMED_PROBABILITY = 0.95
REPEATED = 0.02  # difference between repetitions of a run
COMPILED = 0.10  # fusing mostly saves memory; its buffers, autotuning and captured graphs may take some: assumed
LEAST = 0.9  # of a prediction, however little was measured


@dataclass(frozen=True, slots=True)
class Margin:
    """The factor on a prediction, and the chance that a run then fits."""

    factor: float
    probability: float  # that a run fits
    origin: Provenance  # of the factor
    why: str
    trust: Provenance = Provenance.ASSUMED  # of the probability


def margin_of(
    origin: Provenance, ratios: Sequence[float] = (), *, caching: bool = True, compiled: bool = False
) -> Margin:
    """Return the margin for a prediction of some origin, given the ratios measured/predicted of past runs.

    Its text says how little a few runs prove. A compiled model is planned as it runs eagerly, with an extra margin for
    what fusing changes.
    """
    extra = (FIRST_CONTACT if caching else LIVE_ONLY)[origin]
    factor, chance, source, trust = 1.0 + extra, ASSUMED_PROBABILITY, Provenance.ASSUMED, Provenance.ASSUMED
    why = f"no measurements yet: {extra:.0%} on {origin.value} values, assumed sufficient in {ASSUMED_PROBABILITY:.0%}"
    if ratios:
        worst, runs = max(ratios), len(ratios)
        factor, chance = max(worst, LEAST) * (1.0 + REPEATED), max(runs / (runs + 1), ASSUMED_PROBABILITY)
        source = Provenance.MEASURED
        trust = source if runs / (runs + 1) >= ASSUMED_PROBABILITY else trust
        why = (
            f"the worst of {runs} measured run{'s' if runs > 1 else ''} was {worst:.3f} of its prediction, "
            f"{REPEATED:.0%} are added; the next run is no worse with a chance of {runs}/{runs + 1}"
        )
    if compiled:
        factor, why = factor * (1.0 + COMPILED), f"{why}; compiled: planned as eager, and {COMPILED:.0%}"
    return Margin(factor, chance, source, why, trust)


def least_sure(origins: Iterable[Provenance]) -> Provenance:
    """Return the least reliable origin: that of a number made from several."""
    return max(origins, key=tuple(Provenance).index, default=Provenance.TRACED)


class Unmeasurable(Exception):
    """An oracle cannot answer; the message says why."""


class CannotRun(PlanInfeasible):
    """Real steps fail under a choice of settings, and not without it."""
