"""A model's memory, from small real steps on the CPU.

A step is built and run at growing sizes until the allowed time or memory ends. Where all sizes allocate in the same
order, each block is extrapolated; else the peak is, and the largest tape is stretched to it.

Shapes: E events.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise, repeat
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.memory.estimating.extrapolate import (
    FEWEST,
    Design,
    Extrapolated,
    enlarged,
    extrapolate,
    runs_alike,
    stretched,
)
from pipeline.memory.footprint import (
    CannotRun,
    Category,
    MemoryChoice,
    MemoryPart,
    MicroFootprint,
    Provenance,
    Unmeasurable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pipeline.memory.footprint import Sizes, StandingFootprint, Tape
    from pipeline.memory.tracing.tracer import Build, TraceSession

    Question = tuple[MemoryChoice, tuple[tuple[str, int], ...]]

MOST = 6  # sizes that are fitted: the largest ones
SMALLEST = 2**-10  # of the wanted size
WORST_GROWTH = 8.0  # of time and memory when the sizes double: items times the square of their length
BETWEEN = (5 / 8, 13 / 16)  # of the largest
SEED = 0
DRAWS, QUICK_S = 3, 1.0  # pairs of draws of the largest size, where one takes no longer


@dataclass(frozen=True, slots=True)
class Allowance:
    """The time and memory that measuring may take on this machine; other processes' load takes none of the time."""

    time_s: float = 30.0  # of this thread's CPU for one question, as far as the next size's time can be foretold
    memory_bytes: int = 4 << 30  # of tensors, the model's state included


@dataclass(frozen=True, slots=True)
class MeasuredSize:
    """The measurement of a size that was run."""

    micro: MicroFootprint
    took_s: float

    @property
    def sizes(self) -> Sizes:
        return self.micro.sizes

    @property
    def peak_bytes(self) -> int:
        return max(self.micro.first.peak_bytes, self.micro.again.peak_bytes)


class SmallSteps:
    """An `Oracle` that runs small micro-batches."""

    def __init__(
        self,
        build: Build,
        example: Callable[[Sizes], Any],
        least: Sizes,
        allowance: Allowance | None = None,
        *,
        near: Callable[[Sizes], Sizes] | None = None,
    ) -> None:
        """Take functions that make a training and a batch, and the sizes of the batch for the first steps.

        `near` returns sizes for which a batch can be made, near others; None: any can be made.
        """
        self._build, self._example, self._near = build, example, near
        self._least = near(least) if near else least
        self._allowance = allowance or Allowance()
        self._sessions: dict[MemoryChoice, TraceSession] = {}
        self._sizes: dict[Question, MeasuredSize] = {}
        self._answers: dict[Question, MicroFootprint] = {}

    def standing(self, choice: MemoryChoice) -> StandingFootprint:
        """Return the memory that does not depend on the batch."""
        standing = self._session(_rehearsed(choice)).standing()
        note = "the model's state and the optimizer's step were measured in real steps on the CPU"
        return replace(standing, origin=Provenance.EXTRAPOLATED, notes=(note, *_not_rehearsed(choice)))

    def micro(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return the memory of a micro-batch of these sizes."""
        question = (_rehearsed(choice), tuple(sorted(sizes.items())))
        if question not in self._answers:
            measured = self._measured_up_to(sizes, question[0])
            standing = self._session(question[0]).standing()
            unseen = self._share_unseen(measured[-1], question[0])
            self._answers[question] = _answer([size.micro for size in measured], sizes, standing, unseen)
        answer = self._answers[question]
        return replace(answer, notes=(*answer.notes, *_not_rehearsed(choice)))

    def _measured_up_to(self, wanted: Sizes, choice: MemoryChoice) -> list[MeasuredSize]:
        """Run growing sizes until time, memory or the sizes end; return the largest ones, in order."""
        ends_s = time.thread_time() + self._allowance.time_s
        spare_bytes = self._allowance.memory_bytes - self._session(choice).standing().bytes
        measured: list[MeasuredSize] = []
        failures: list[str] = []  # of sizes that could not be run
        for sizes in self._possible(rising(wanted)):
            if not _may_grow(measured, ends_s - time.thread_time(), spare_bytes):
                break
            measured += (tried := self._tried(sizes, choice, failures))
            if measured and not tried:  # before the first it was too small to be a batch at all
                break
        measured = measured[-MOST:]
        if measured and measured[-1].sizes == dict(wanted):
            return measured
        for sizes in self._possible(between(measured, wanted) if measured else ()):
            largest = measured[-1]
            if time.thread_time() + 2 * largest.took_s < ends_s and 2 * largest.peak_bytes < spare_bytes:
                measured[-1:-1] = self._tried(sizes, choice, failures)
        if not Design.of([size.sizes for size in measured], wanted).is_enough:
            problem = f"too few distinct small batches could be run: {len(measured)}"
            raise Unmeasurable("; ".join((problem, *failures[-1:])))
        return measured

    def _possible(self, wanted: Iterable[Sizes]) -> Iterator[dict[str, int]]:
        """Yield sizes for which a batch can be made, near these; none twice."""
        seen: list[dict[str, int]] = []
        for sizes in wanted:
            seen.append(dict(self._near(sizes) if self._near else sizes))
            if seen[-1] not in seen[:-1]:
                yield seen[-1]

    def _tried(self, sizes: Sizes, choice: MemoryChoice, failures: list[str]) -> list[MeasuredSize]:
        """Return the measurement of a size; if the task raises, none, and the error is kept for the message."""
        key = (choice, tuple(sizes.items()))
        begun_s = time.thread_time()
        try:
            with _own_numbers():
                micro = self._session(choice).micro(sizes)
        except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError) as error:
            words = ", ".join(f"{value} {name}" for name, value in sizes.items())
            failures.append(f"{words}: {type(error).__name__}: {error}")
            return []
        # A size that was run before is answered at once: how long it took is still that of the first time.
        return [self._sizes.setdefault(key, MeasuredSize(micro, time.thread_time() - begun_s))]

    def _share_unseen(self, measured: MeasuredSize, choice: MemoryChoice) -> float:
        """Return by what to multiply what was measured, for what kernels take within themselves, and other numbers."""
        from pipeline.memory.tracing.tracer import TraceSession

        with _own_numbers():
            example = partial(self._seeded_example, count())
            make = partial(TraceSession, partial(self._build, choice), example, self._least)
            peaks, *_ = real_peaks(make, [measured.sizes] * (DRAWS if measured.took_s < QUICK_S else 1))
        drawn = [peak for pair in peaks for peak in pair]
        if not drawn:
            return 1.0
        # Where some draws differ, others may differ as much again.
        return (2 * max(drawn) - min(drawn)) / measured.micro.again.peak_bytes

    def _session(self, choice: MemoryChoice) -> TraceSession:
        from pipeline.memory.tracing.guesses import failure_reason
        from pipeline.memory.tracing.tracer import TraceSession

        if choice not in self._sessions:
            if choice != MemoryChoice():
                self._session(MemoryChoice())  # an error of it is the model's own
            try:
                with _own_numbers():
                    build = partial(self._build, choice)
                    session = TraceSession(build, self._same_example, self._least)
                    session.standing()
            except RuntimeError as error:
                if choice == MemoryChoice() and self._near is None:
                    raise
                if choice == MemoryChoice():  # it was not asked to run on the CPU
                    raise Unmeasurable(failure_reason(error)) from error
                what = f"a real step failed: {failure_reason(error)}"
                raise CannotRun(what, remedy="let the planner choose checkpointing and precision") from error
            self._sessions[choice] = session
        return self._sessions[choice]

    def _same_example(self, sizes: Sizes) -> Any:
        """Make a batch from the same random numbers as all others: what depends on values grows evenly with sizes."""
        return self._seeded_example(repeat(SEED), sizes)

    def _seeded_example(self, seeds: Iterator[int], sizes: Sizes) -> Any:
        import torch

        torch.manual_seed(next(seeds))
        return self._example(sizes)


def real_peaks(
    make: Callable[[], TraceSession], sizes: Sequence[Sizes], *, kernels: bool = True
) -> tuple[list[tuple[int, int]], Exception | None, int]:
    """Run real steps; return two peaks of each size with other numbers, up to one that ends in an error, and that.

    Also return by how many bytes the model keeps more after each micro-batch; 0: not after each. `kernels`: as torch's
    own allocator counts them, with what kernels take within themselves.
    """
    recorded, allocated, failed = list[tuple[int, int]](), list[int](), None
    with _given_out(allocated) if kernels else nullcontext():
        try:
            session = make()
            for size in sizes:
                recorded += session.peaks(size)
        except Exception as error:  # noqa: BLE001 - whatever a model does with such sizes, or without a card
            failed = error
    peaks = [kept + own for (_, kept), own in zip(recorded, allocated, strict=False)] or [peak for peak, _ in recorded]
    growth = min((after - before for (_, before), (_, after) in pairwise(recorded)), default=0)
    return list(zip(peaks[::2], peaks[1::2], strict=False)), failed, max(0, growth)


@contextmanager
def _given_out(found: list[int]) -> Iterator[None]:
    """Append the most that torch's allocator gave out in each marked run."""
    from torch.autograd.profiler import profile

    from pipeline.memory.tracing.tracer import MARKED

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes a line to stderr at each start
    with profile(profile_memory=True) as seen:
        yield
    events = sorted(seen.kineto_results.events(), key=lambda event: event.start_ns())
    memory = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    memory_EX = np.array(memory, np.int64).reshape(-1, 2)
    for run in (event for event in events if event.name() == MARKED):
        begins, ends = np.searchsorted(memory_EX[:, 0], (run.start_ns(), run.start_ns() + run.duration_ns()))
        found.append(int(np.cumsum(memory_EX[begins:ends, 1]).max(initial=0)))


def _answer(
    measured: Sequence[MicroFootprint], wanted: Sizes, standing: StandingFootprint, unseen: float
) -> MicroFootprint:
    """Return the memory of the wanted micro-batch, from measured ones, the largest last, and the share they hide."""

    def likely(count: Callable[[MicroFootprint], float]) -> int:
        """Return a count at the wanted size, without a margin."""
        if dict(measured[-1].sizes) == dict(wanted):
            return int(count(measured[-1]))
        return extrapolate([(micro.sizes, int(count(micro))) for micro in measured], wanted).bytes

    first, first_estimate, _ = enlarged([(micro.sizes, micro.first) for micro in measured], wanted)
    again, again_estimate, how = enlarged([(micro.sizes, micro.again) for micro in measured], wanted)
    first, again = (stretched(tape, ceil(unseen * tape.peak_bytes)) for tape in (first, again))
    worse = max(first_estimate, again_estimate, key=lambda extrapolated: extrapolated.margin)
    return MicroFootprint(
        sizes=dict(wanted),
        first=first,
        again=again,
        parts=(*standing.parts, *_peak_parts(again, first.left_bytes)),
        flops=float(likely(lambda micro: micro.flops)),
        kernels=likely(lambda micro: micro.kernels),
        moved_bytes=float(likely(lambda micro: micro.moved_bytes)),
        origin=Provenance.EXTRAPOLATED,
        notes=(_how_far(worse, len(measured)), how, "activations include inputs and temporaries"),
    )


def _peak_parts(tape: Tape, gradient_bytes: int) -> list[MemoryPart]:
    """Return what is live at a tape's peak beyond the standing memory: gradients, and all else as activations."""
    live_E = np.cumsum(tape.bytes_E)
    peak = int(live_E.argmax()) + 1 if live_E.max(initial=0) > 0 else 0
    own = int(tape.bytes_E[:peak][tape.block_E[:peak] >= 0].sum())
    gradients = gradient_bytes + int(live_E[peak - 1] if peak else 0) - own
    parts = (MemoryPart(Category.GRADIENTS, "", gradients), MemoryPart(Category.ACTIVATIONS, "", own))
    return [part for part in parts if part.bytes]


def _how_far(estimate: Extrapolated, sizes: int) -> str:
    """Say what was measured and how far it was taken."""
    if estimate.ratio <= 1:
        return f"measured on a real batch of this size on the CPU, {estimate.note}"
    largest = f"1/{estimate.ratio:.3g} of this one"
    return f"measured on small real batches on the CPU ({sizes} sizes up to {largest}), {estimate.note}"


def proportional(wanted: Sizes, fraction: float) -> dict[str, int]:
    """Return the sizes times a fraction; those above 0 stay at least 1."""
    return {name: max(1, round(value * fraction)) if value else 0 for name, value in wanted.items()}


def between(measured: Sequence[MeasuredSize], wanted: Sizes) -> list[dict[str, int]]:
    """Return more sizes to measure, of at most twice the largest: near it, and with drivers that do not vary yet.

    Small sizes may take other ways than larger ones: then more is to be known of the larger ones.
    """
    largest = measured[-1].sizes
    alike = len(runs_alike([(size.sizes, size.micro.first) for size in measured]))
    more = [proportional(largest, share) for share in BETWEEN if alike < FEWEST]
    for name, value in largest.items():
        if value < wanted[name] and all(size.sizes[name] == value for size in measured):
            more.append({**largest, name: 2 * value})
    known = [dict(size.sizes) for size in measured]
    return [sizes for place, sizes in enumerate(more) if sizes not in (known + more[:place])]


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
def _own_numbers() -> Iterator[None]:
    """Use a fixed seed within, and leave torch's random state as it was."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield


def _rehearsed(choice: MemoryChoice) -> MemoryChoice:
    """Return a choice reduced to what a single machine without a GPU can run."""
    return replace(choice, offload=False)


def _not_rehearsed(choice: MemoryChoice) -> tuple[str, ...]:
    """Return notes on what could not be run; numbers are those without it, which are higher."""
    return ("offloading could not be tried: planned without it",) if choice.offload else ()
