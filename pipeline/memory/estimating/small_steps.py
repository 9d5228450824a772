"""What a model takes, from small real steps on the CPU.

A step is really built and run at ever larger sizes, until time or memory for it end. Where all sizes do the same in the
same order, each block is extrapolated; else the peak is, and the largest tape is stretched to it.

Shapes: E events.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pipeline.memory.estimating.cpu_profile import counted_flops, record
from pipeline.memory.estimating.extrapolate import FEWEST, Extrapolated, enlarged, extrapolate, longest_alike
from pipeline.memory.estimating.fallback_oracle import Unmeasurable
from pipeline.memory.footprint import (
    Category,
    MemoryChoice,
    MemoryPart,
    MicroFootprint,
    Provenance,
    StandingFootprint,
    Tape,
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
MIB = 1 << 20


class Training(Protocol):
    """What is rehearsed, on the CPU, at the model's real width: `training.step.Step`."""

    model: nn.Module

    def accumulate(self, batch: Any) -> None:
        """Run a micro-batch forward and backward."""

    def update(self) -> object:
        """Let the optimizer take the gradients, and drop them."""

    def release(self) -> None:
        """Drop the gradients."""

    def owned(self) -> Iterable[tuple[str, str, Tensor]]:
        """Yield what may stay from one micro-batch to the next: what for, whose, the tensor."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What measuring may take on this machine."""

    time_s: float = 30.0  # of one question, as far as the next size's time can be foretold
    memory_bytes: int = 4 << 30  # of tensors, the model's state included


@dataclass(frozen=True, slots=True)
class Point:
    """A size that was really run."""

    sizes: Sizes
    first: Tape
    again: Tape
    kernels: int
    flops: int
    took_s: float

    @property
    def peak_bytes(self) -> int:
        """Return the higher of its peaks."""
        return max(self.first.peak_bytes, self.again.peak_bytes)


class MeasuredSmall:
    """An `Oracle` that runs small micro-batches; its answers are of the whole model, whatever the shards."""

    def __init__(
        self,
        build: Callable[[MemoryChoice], Training],
        example: Callable[[Sizes], Any],
        least: Sizes,
        allowance: Allowance | None = None,
        *,
        state_bytes: int = 0,
        smaller: Callable[[Sizes, float], Sizes] | None = None,
    ) -> None:
        """Take how to make a training and a batch, and the sizes of a batch to make the first steps with.

        `state_bytes`: what the model is known to hold; `smaller`: makes sizes a fraction as large.
        """
        self.build, self.example, self.least = build, example, least
        self.allowance = allowance or Allowance()
        self.state_bytes = state_bytes
        self.smaller = smaller or proportional
        self.stages: dict[MemoryChoice, Stage] = {}
        self.answers: dict[tuple[MemoryChoice, tuple[tuple[str, int], ...]], MicroFootprint] = {}

    def standing(self, choice: MemoryChoice) -> StandingFootprint:
        """Return what it takes whatever the batch."""
        standing = self.stage(choice).standing
        return replace(standing, notes=(*standing.notes, *not_rehearsed(choice)))

    def micro(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return what a micro-batch of these sizes takes."""
        question = (rehearsed(choice), tuple(sorted(sizes.items())))
        if question not in self.answers:
            stage = self.stage(choice)
            self.answers[question] = answered(self.points(stage, sizes), sizes, stage.standing)
        answer = self.answers[question]
        return replace(answer, notes=(*answer.notes, *not_rehearsed(choice)))

    def stage(self, choice: MemoryChoice) -> Stage:
        """Return the built step."""
        asked = rehearsed(choice)
        if asked not in self.stages:
            most = self.allowance.memory_bytes
            if self.state_bytes > most:
                state, limit = format_bytes(self.state_bytes), format_bytes(most)
                raise Unmeasurable(f"its state of {state} is above the {limit} that measuring on the CPU may take")
            self.stages[asked] = staged(self.build, asked, self.example, self.least)
        return self.stages[asked]

    def points(self, stage: Stage, wanted: Sizes) -> list[Point]:
        """Run ever larger sizes until time, memory or the sizes end; return the largest ones, in order."""
        spare_bytes = self.allowance.memory_bytes - stage.standing.bytes
        run = Run(stage, time.monotonic() + self.allowance.time_s, spare_bytes)
        for sizes in rising(wanted, self.smaller):
            if not run.go_on(sizes):
                break
        points = run.points[-MOST:]
        if points and points[-1].sizes == dict(wanted):
            return points
        # Small sizes may take other ways than larger ones: then more is to be known of the larger ones.
        if len(longest_alike([(point.sizes, point.first) for point in points])) < FEWEST:
            between = [self.smaller(points[-1].sizes, share) for share in BETWEEN if points]
            points = [*points[:-1], *run.more(between), *points[-1:]]
        if len(points) < FEWEST:
            raise Unmeasurable(f"only {len(points)} small real batches could be run, {FEWEST} are needed{run.why}")
        return points


@dataclass(slots=True)
class Run:
    """Sizes that are run one after another, while there is time and memory."""

    stage: Stage
    ends_s: float
    spare_bytes: int
    points: list[Point] = field(default_factory=list)
    why: str = ""  # the last one failed

    def go_on(self, sizes: Sizes) -> bool:
        """Run the next larger size; return whether there may be larger ones."""
        if not may_grow(self.points, self.ends_s - time.monotonic(), self.spare_bytes):
            return False
        point = self.tried(sizes)
        self.points += [point] if point else []
        return point is not None or not self.points  # before the first: too small to be a batch at all

    def more(self, many: Iterable[Sizes]) -> list[Point]:
        """Run sizes below the largest, while there is time."""
        took_s = self.points[-1].took_s if self.points else 0.0
        tried = [self.tried(sizes) for sizes in many if time.monotonic() + took_s < self.ends_s]
        return [point for point in tried if point]

    def tried(self, sizes: Sizes) -> Point | None:
        """Run a size; whatever a task may raise is written down."""
        try:
            return self.stage.point(sizes)
        except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError) as error:
            self.why = f"; {told_sizes(sizes)}: {type(error).__name__}: {error}"
            return None


@dataclass(slots=True)
class Stage:
    """A built training and what it takes whatever the batch."""

    training: Training
    example: Callable[[Sizes], Any]
    standing: StandingFootprint
    numbers: Numbers

    def point(self, sizes: Sizes) -> Point:
        """Run two such micro-batches and write down what they take."""
        begun_s = time.monotonic()

        def micro() -> None:
            self.training.accumulate(self.example(sizes))

        with same_numbers():
            try:
                first, again = record([micro, micro], self.numbers.at)
                flops = counted_flops(micro)
            finally:
                self.training.release()
        return Point(dict(sizes), first.tape, again.tape, first.kernels, flops, time.monotonic() - begun_s)


def staged(
    build: Callable[[MemoryChoice], Training], choice: MemoryChoice, example: Callable[[Sizes], Any], least: Sizes
) -> Stage:
    """Build the training and run two steps: the first makes the optimizer's state."""
    with same_numbers():
        training = build(choice)
        numbers = Numbers(training)
        setup = numbers.blocks()
        runs = [lambda: training.accumulate(example(least)), training.update]
        micro, first = record(runs, numbers.at)
        _, later = record(runs, numbers.at)
    live = numbers.blocks()
    parts = tuple(summed((what, size) for (what, _), _, size in live))
    gradient_bytes = micro.tape.left_bytes
    parameters = list(training.model.parameters())
    standing = StandingFootprint(
        setup=Tape(np.array([number for _, number, _ in setup]), np.array([size for _, _, size in setup])),
        first_update=first.tape,
        update=later.tape,
        parts=parts,
        update_parts=(*parts, *parts_of(later.tape, gradient_bytes, Category.TEMPORARIES, "optimizer")),
        parameters=sum(one.numel() for one in parameters),
        trained=sum(one.numel() for one in parameters if one.requires_grad),
        origin=Provenance.EXTRAPOLATED,
        notes=("the model's state and the optimizer's step were measured in real steps on the CPU",),
    )
    return Stage(training, example, standing, numbers)


@dataclass(slots=True)
class Numbers:
    """The number, below 0, that each block which stays has in every tape."""

    training: Training
    known: dict[tuple[Category, str], int] = field(default_factory=dict)

    def blocks(self) -> list[tuple[tuple[Category, str], int, int]]:
        """Return what there is now: what for and whose, its number, its bytes; what is shared is named once."""
        found: dict[int, tuple[tuple[Category, str], int, int]] = {}
        for what, name, tensor in self.training.owned():
            storage, place = tensor.untyped_storage(), (Category(what), name)
            if storage.nbytes() and storage.data_ptr() not in found:
                number = self.known.setdefault(place, -1 - len(self.known))
                found[storage.data_ptr()] = (place, number, storage.nbytes())
        return list(found.values())

    def at(self) -> dict[int, int]:
        """Return the numbers by address."""
        self.blocks()
        return {
            tensor.untyped_storage().data_ptr(): self.known[Category(what), name]
            for what, name, tensor in reversed(list(self.training.owned()))
            if (Category(what), name) in self.known
        }


def summed(sizes: Iterable[tuple[Category, int]]) -> list[MemoryPart]:
    """Return the parts that blocks make up, in the order of categories."""
    sums: dict[Category, int] = {}
    for category, size_bytes in sizes:
        sums[category] = sums.get(category, 0) + size_bytes
    return [MemoryPart(category, "", sums[category]) for category in Category if category in sums]


def parts_of(tape: Tape, gradient_bytes: int, kind: Category, name: str) -> list[MemoryPart]:
    """Return what is live at the peak of a tape, above what stands: gradients, and all else as one kind."""
    live_E = np.cumsum(tape.bytes_E)
    peak = int(live_E.argmax()) + 1 if live_E.max(initial=0) > 0 else 0
    own = int(tape.bytes_E[:peak][tape.block_E[:peak] >= 0].sum())
    gradients = gradient_bytes + int(live_E[peak - 1] if peak else 0) - own
    parts = (MemoryPart(Category.GRADIENTS, "", gradients), MemoryPart(kind, name, own))
    return [part for part in parts if part.bytes]


def answered(points: Sequence[Point], wanted: Sizes, standing: StandingFootprint) -> MicroFootprint:
    """Return what a micro-batch takes, from smaller ones, the largest last."""
    first, thought, _ = enlarged([(point.sizes, point.first) for point in points], wanted)
    again, thought_again, how = enlarged([(point.sizes, point.again) for point in points], wanted)
    worse = max(thought, thought_again, key=lambda one: one.margin)
    return MicroFootprint(
        sizes=dict(wanted),
        first=first,
        again=again,
        parts=(*standing.parts, *parts_of(again, first.left_bytes, Category.ACTIVATIONS, "")),
        flops=float(likely([(point.sizes, point.flops) for point in points], wanted)),
        kernels=likely([(point.sizes, point.kernels) for point in points], wanted),
        moved_bytes=float(MOVED * again.bytes_E[again.bytes_E > 0].sum()),
        origin=Provenance.EXTRAPOLATED,
        notes=(words(points, worse), how, "inputs and temporaries are counted among the activations"),
    )


def likely(points: Sequence[tuple[Sizes, int]], wanted: Sizes) -> int:
    """Return a count at the wanted size, without a margin."""
    sizes, count = points[-1]
    return count if dict(sizes) == dict(wanted) else extrapolate(points, wanted).bytes


def words(points: Sequence[Point], thought: Extrapolated) -> str:
    """Say what was measured and how far it was taken."""
    if thought.ratio <= 1:
        return f"measured on a real batch of this size on the CPU, {thought.note}"
    largest = f"1/{thought.ratio:.3g} of this one"
    return f"measured on small real batches on the CPU ({len(points)} sizes up to {largest}), {thought.note}"


def proportional(wanted: Sizes, fraction: float) -> Sizes:
    """Return sizes a fraction as large; what is there at all stays there."""
    return {name: max(1, round(value * fraction)) if value else 0 for name, value in wanted.items()}


def rising(wanted: Sizes, smaller: Callable[[Sizes, float], Sizes]) -> Iterator[Sizes]:
    """Return ever larger sizes, up to the wanted one, each twice the one before."""
    fraction, before = SMALLEST, None
    while fraction < 1:
        sizes = dict(smaller(wanted, fraction))
        if sizes not in (before, dict(wanted)):
            yield sizes
        fraction, before = 2 * fraction, sizes
    yield dict(wanted)


def may_grow(points: Sequence[Point], left_s: float, spare_bytes: int) -> bool:
    """Return whether the next size will likely stay within time and memory."""
    if not points:
        return left_s > 0
    took_s = grown([point.took_s for point in points])
    return took_s <= left_s and grown([point.peak_bytes for point in points]) <= spare_bytes


def grown(values: Sequence[float]) -> float:
    """Return what follows a row, growing as it did, but not less than twice: a constant share may hide the growth."""
    growth = values[-1] / max(values[-2], 1e-9) if len(values) > 1 else WORST_GROWTH
    return values[-1] * min(max(growth, 2.0), WORST_GROWTH)


@contextmanager
def same_numbers() -> Iterator[None]:
    """Draw the same random numbers each time, and none of those of others."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield


def rehearsed(choice: MemoryChoice) -> MemoryChoice:
    """Return the part of a choice that one machine without a GPU can rehearse."""
    return MemoryChoice(precision=choice.precision, checkpointing=choice.checkpointing)


def not_rehearsed(choice: MemoryChoice) -> tuple[str, ...]:
    """Say what of a choice was not rehearsed: its numbers are those without it, which are higher."""
    return ("offloading could not be rehearsed: planned as without",) if choice.offload else ()


def told_sizes(sizes: Sizes) -> str:
    """Return sizes as words."""
    return ", ".join(f"{value} {name}" for name, value in sizes.items())
