"""A model's memory from small real steps on the CPU, and the laws by which larger sizes follow from small ones.

A step is built and run at growing sizes until the allowed time or memory ends. Where all sizes allocate in the same
order, each block is extrapolated; else the peak is, and the largest tape is stretched to it. A law is a polynomial of
the drivers (nodes, edges, pairs, …) without negative terms: memory never shrinks when a batch grows. Its error is that
of predicting each measured size from all others.

Shapes: P points, D drivers, K terms, E events, U unlike blocks.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations_with_replacement, count, pairwise, repeat
from math import ceil, log2
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from pipeline.memory.footprint import (
    CannotRun,
    Category,
    MemoryChoice,
    MemoryPart,
    MicroFootprint,
    Provenance,
    Tape,
    Unmeasurable,
)
from pipeline.protocol import ITEMS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pipeline.memory.footprint import Floats, Sizes, StandingFootprint
    from pipeline.memory.tracing.tracer import Build, TraceSession

    Tapes = Sequence[tuple[Sizes, Tape]]
    Question = tuple[MemoryChoice, tuple[tuple[str, int], ...]]

FEWEST = 3  # different points: with only two, no point is left to check a line
EXACT = 2e-4  # of the largest: a fit this good is no coincidence, and hides no square
FLOOR = 0.02  # margin of a fit without any error, and of each doubling: the real batches are not the rehearsed ones
ROUNDING = 1e-9  # of the solver: no error
BEND = 1e-4  # of the largest: a larger excess over the prediction from smaller points means a steeper regime
TRUSTED_ERROR = 0.1  # of tapes made block by block: above it, peaks are extrapolated instead

MOST = 6  # sizes that are fitted: the largest ones
MOST_HALVINGS = 10  # of the wanted size
WORST_GROWTH = 8.0  # of time and memory when the sizes double: items times the square of their length
BETWEEN = (5 / 8, 13 / 16)  # of the largest
SEED = 0
DRAWS, QUICK_S = 3, 1.0  # pairs of draws of the largest size, where one takes no longer


class Estimate(NamedTuple):
    """The bytes of a larger size; `high` is the number to plan with."""

    likely: int
    high: int
    error: float  # the worst when each measured size is predicted from the others
    ratio: float  # the wanted size over the largest measured, of the driver that is furthest

    @classmethod
    def of(cls, likely: float, largest: float, error: float, ratio: float) -> Estimate:
        """Add the margin: floor and error once, and once more for each doubling beyond the largest measured size.

        Where most memory is constant, an error may hide a slope: it is multiplied by the ratio of the sizes.
        """
        times = 1 + max(0.0, log2(ratio))
        margin = FLOOR * likely * times + error * max(likely * times, largest * ratio)
        return cls(ceil(likely), ceil(likely + margin), error, ratio)

    @property
    def margin(self) -> float:
        return self.high / self.likely - 1 if self.likely else 0.0


class Design(NamedTuple):
    """The terms of measured sizes, which are fractions of the wanted one: there, every term is 1."""

    terms_PK: Floats
    degrees: tuple[int, ...]  # how many terms there are up to each degree
    x_PD: Floats

    @classmethod
    def of(cls, sizes: Sequence[Sizes], wanted: Sizes) -> Design:
        """Return the design of these sizes; a driver that never changes explains nothing and is left out.

        Terms of degree 3 are items times products of two others, as for padded pairs.
        """
        names = [name for name, value in wanted.items() if value and any(size[name] != value for size in sizes)]
        rows = [[size[name] / wanted[name] for name in names] for size in sizes]
        x_PD = np.array(rows, np.float64).reshape(len(sizes), len(names))
        drivers, items = range(len(names)), names.index(ITEMS) if ITEMS in names else -1
        pairs = list(combinations_with_replacement(drivers, 2))
        of_items = [(items, *pair) for pair in pairs if items >= 0 and items not in pair]
        products = [(), *((driver,) for driver in drivers), *pairs, *of_items]
        terms_PK = np.stack([x_PD[:, product].prod(axis=1) for product in products], axis=1)
        return cls(terms_PK, (1 + len(names), len(products) - len(of_items), len(products)), x_PD)

    @property
    def is_enough(self) -> bool:
        """Tell whether enough points are different, and each driver varies: else its share would count as constant."""
        return len(np.unique(self.x_PD, axis=0)) >= FEWEST and bool(np.ptp(self.x_PD, axis=0).all())

    @property
    def ratio(self) -> float:
        """Return how many times larger the wanted size is than the largest point."""
        return float(1 / self.x_PD.max(axis=0).min()) if self.x_PD.size else 1.0


def extrapolate(points: Sequence[tuple[Sizes, int]], wanted: Sizes) -> Estimate:
    """Return the estimate for the wanted size from the bytes of measured ones."""
    design = Design.of([sizes for sizes, _ in points], wanted)
    if not design.is_enough:
        raise ValueError(f"{len(points)} measured sizes are too few or too similar to extrapolate from")
    order = np.argsort(design.x_PD.sum(axis=1), kind="stable")
    y_P = np.array([taken for _, taken in points], np.float64)[order]
    terms_PK, error = _chosen(design.terms_PK[order], design.degrees, y_P)
    likely, largest = float(_fitted(terms_PK, y_P).sum()), float(y_P[-1])
    # Where the last point alone has entered a steeper regime, that is at most the line through the origin.
    foretold, noise = _left_out(terms_PK, y_P, len(y_P) - 1), _fit_error(terms_PK[:-1], y_P[:-1])
    is_steeper = largest - foretold > (BEND + 2 * noise) * largest
    bound = max(likely, largest * design.ratio) if is_steeper else likely
    return Estimate.of(bound, largest, error, design.ratio)._replace(likely=ceil(likely))


def _chosen(terms_PK: Floats, degrees: Sequence[int], y_P: Floats) -> tuple[Floats, float]:
    """Return the terms of the lowest degree that predicts left-out points about as well as any, and its worst error."""
    errors = [_fit_error(terms_PK[:, :terms], y_P) for terms in degrees]
    enough = 1.5 * min(errors) + EXACT
    return next((terms_PK[:, :terms], error) for terms, error in zip(degrees, errors, strict=True) if error <= enough)


def _fit_error(terms_PK: Floats, y_P: Floats) -> float:
    """Return the worst relative error when left-out points are predicted."""
    return _worst_error(y_P, {place: _left_out(terms_PK, y_P, place) for place in _larger_half(len(y_P))})


def _larger_half(points: int) -> range:
    """Return the places of the larger points: errors of small ones matter little."""
    return range(points // 2, points)


def _left_out(terms_PK: Floats, y_P: Floats, place: int) -> float:
    """Return the value of one point, as all others predict it."""
    others = np.arange(len(y_P)) != place
    return float(terms_PK[place] @ _fitted(terms_PK[others], y_P[others]))


def _worst_error(y_P: Floats | Sequence[int], guesses: dict[int, float]) -> float:
    """Return the worst relative error of guesses, by the points' places."""
    worst = max(abs(guess - float(y_P[place])) / max(float(y_P[place]), 1.0) for place, guess in guesses.items())
    return worst if worst > ROUNDING else 0.0


def _fitted(terms_PK: Floats, y_P: Floats) -> Floats:
    """Return non-negative coefficients; the largest points, nearest to the wanted size, count most."""
    scale = max(float(y_P.max(initial=0.0)), 1.0)
    try:
        coefficients, _ = nnls(terms_PK, y_P / scale, maxiter=100 * terms_PK.shape[1])
    except RuntimeError:  # terms so alike that it turns in circles: the largest of all is above every point
        coefficients = np.eye(terms_PK.shape[1])[0]
    return np.asarray(coefficients, np.float64) * scale


def projected(recorded: Tapes, wanted: Sizes) -> tuple[Tape, Estimate] | None:
    """Return the tape of the wanted size, each block extrapolated by itself; None where the tapes differ in structure.

    So the peak may be elsewhere in the step than in any measured size.
    """
    model = recorded[-1][1]
    alike = [(sizes, tape) for sizes, tape in recorded if _runs_like(tape, model)]
    tapes, design = [tape for _, tape in alike], Design.of([sizes for sizes, _ in alike], wanted)
    if not design.is_enough:
        return None
    bytes_PE = np.abs(np.stack([tape.bytes_E for tape in tapes]).astype(np.float64))
    again, terms_PK = dict[int, Tape](), design.terms_PK
    for place in _larger_half(len(tapes)):
        others = np.arange(len(tapes)) != place
        again[place] = _tape_at(model, terms_PK[others], design.degrees, bytes_PE[others], terms_PK[place])
    # Temporary blocks are checked as well: where gradients are the peak of small sizes, they hide the error.
    error = max(
        _worst_error([peak(tape) for tape in tapes], {place: peak(tape) for place, tape in again.items()})
        for peak in (_peak_bytes, _own_peak_bytes)
    )
    tape = _tape_at(model, terms_PK, design.degrees, bytes_PE, np.ones(terms_PK.shape[1]))
    return tape, Estimate.of(tape.peak_bytes, model.peak_bytes, error, design.ratio)


def _runs_like(tape: Tape, other: Tape) -> bool:
    """Tell whether both allocate and release blocks in the same order, whatever their sizes."""
    signs = np.sign(tape.bytes_E), np.sign(other.bytes_E)
    return np.array_equal(tape.block_E, other.block_E) and np.array_equal(*signs)


def _peak_bytes(tape: Tape) -> int:
    return tape.peak_bytes


def _own_peak_bytes(tape: Tape) -> int:
    """Return the peak of the tape's own blocks, without those shared with other tapes."""
    return int(np.cumsum(np.where(tape.block_E >= 0, tape.bytes_E, 0)).max(initial=0))


def _turnover_bytes(tape: Tape) -> int:
    """Return the sum of all allocations of the tape."""
    return int(tape.bytes_E[tape.bytes_E > 0].sum())


def _tape_at(model: Tape, terms_PK: Floats, degrees: Sequence[int], bytes_PE: Floats, at_K: Floats) -> Tape:
    """Return the tape at some terms, with each block's size from its own fit."""
    # Blocks with the same bytes at every point share one number: comparing rows of tables takes long.
    marks_P = np.random.default_rng(0).random(len(bytes_PE))
    _, first_U, which_E = np.unique(marks_P @ bytes_PE, return_index=True, return_inverse=True)
    value_U = np.array([_block_bytes(y_P, terms_PK, degrees, at_K) for y_P in bytes_PE[:, first_U].T])
    sizes_E = np.ceil(value_U[which_E.reshape(-1)] - 1e-6).astype(np.int64)
    return Tape(model.block_E, np.sign(model.bytes_E) * np.maximum(sizes_E, 1))


def _block_bytes(y_P: Floats, terms_PK: Floats, degrees: Sequence[int], at_K: Floats) -> float:
    """Return a block's size by the lowest degree that fits exactly, else by the one that predicts best."""
    if y_P.min() == y_P.max():
        return float(y_P[0])
    for terms in degrees:
        coefficients = _fitted(terms_PK[:, :terms], y_P)
        if np.abs(terms_PK[:, :terms] @ coefficients - y_P).max() <= EXACT * y_P.max():
            return float(at_K[:terms] @ coefficients)
    best_PK = _chosen(terms_PK, degrees, y_P)[0] if len(y_P) >= FEWEST else terms_PK[:, : degrees[0]]
    return float(at_K[: best_PK.shape[1]] @ _fitted(best_PK, y_P))


def _enlarged(recorded: Tapes, wanted: Sizes) -> tuple[Tape, Estimate, str]:
    """Return the tape of the wanted size with its margin, the estimate of its peak, and a note on the method."""
    sizes, tape = recorded[-1]
    if dict(sizes) == dict(wanted):
        estimate = Estimate.of(tape.peak_bytes, tape.peak_bytes, 0.0, 1.0)
        return stretched(tape, estimate.high), estimate, "this very size was run"
    blocks = projected(recorded, wanted)
    if blocks and blocks[1].error <= TRUSTED_ERROR:
        return stretched(blocks[0], blocks[1].high), blocks[1], "each block was extrapolated separately"
    # Peaks of small batches may hide growth behind gradients, or elsewhere in the step.
    share = tape.peak_bytes / max(_turnover_bytes(tape), 1)
    measures: list[Callable[[Tape], float]] = [_peak_bytes, _own_peak_bytes, lambda one: share * _turnover_bytes(one)]
    estimates = [extrapolate([(size, ceil(measure(one))) for size, one in recorded], wanted) for measure in measures]
    worse = max(estimates, key=lambda estimate: estimate.high)
    return stretched(tape, worse.high), worse, "the sizes ran differently: the largest trace was scaled to the peak"


def stretched(tape: Tape, peak_bytes: int) -> Tape:
    """Return the tape with its own blocks scaled up to this peak; it is never made smaller."""
    own_E = np.where(tape.block_E >= 0, tape.bytes_E, 0)
    live_E, kept_E = np.cumsum(own_E), np.cumsum(tape.bytes_E - own_E)
    matters_E = live_E > 0
    if not matters_E.any():
        return tape
    factor = max(1.0, float(((peak_bytes - kept_E[matters_E]) / live_E[matters_E]).min()))
    larger_E = np.sign(own_E) * np.ceil(np.abs(own_E) * factor).astype(np.int64)
    return Tape(tape.block_E, np.where(tape.block_E >= 0, larger_E, tape.bytes_E))


@dataclass(frozen=True, slots=True)
class Allowance:
    """The time and memory that measuring may take on this machine; time is this thread's CPU time."""

    time_s: float = 30.0  # of this thread's CPU for one question, as far as the next size's time can be foretold
    memory_bytes: int = 4 << 30  # of tensors, the model's state included


class MeasuredSize(NamedTuple):
    """A size that was run."""

    micro: MicroFootprint
    took_s: float

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
        self._build, self._example, self._is_given = build, example, near is not None
        self._near = near or dict
        self._least = self._near(least)
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
        rising = (_times(wanted, 2.0**-halvings) for halvings in range(MOST_HALVINGS, -1, -1))
        for sizes in _distinct(map(self._near, rising)):
            took_s = _grown([size.took_s for size in measured])
            if took_s > ends_s - time.thread_time() or _grown([size.peak_bytes for size in measured]) > spare_bytes:
                break
            tried = self._tried(sizes, choice, failures)
            measured += tried
            if measured and not tried:  # before the first it was too small to be a batch at all
                break
        measured = measured[-MOST:]
        if measured and measured[-1].micro.sizes == dict(wanted):
            return measured
        known = [size.micro.sizes for size in measured]
        for sizes in _distinct(map(self._near, _between(measured, wanted) if measured else ())):
            is_allowed = time.thread_time() + 2 * measured[-1].took_s < ends_s
            if is_allowed and sizes not in known and 2 * measured[-1].peak_bytes < spare_bytes:
                measured[-1:-1] = self._tried(sizes, choice, failures)
        if not Design.of([size.micro.sizes for size in measured], wanted).is_enough:
            problem = f"too few distinct small batches could be run: {len(measured)}"
            raise Unmeasurable("; ".join((problem, *failures[-1:])))
        return measured

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
        """Return the factor on measured memory for memory inside kernels, and for batches with other random numbers."""
        from pipeline.memory.tracing.tracer import TraceSession

        draws = DRAWS if measured.took_s < QUICK_S else 1
        with _own_numbers():
            example = partial(self._seeded_example, count())
            make = partial(TraceSession, partial(self._build, choice), example, self._least)
            peaks, *_ = real_peaks(make, [measured.micro.sizes] * draws)
        drawn = [peak for pair in peaks for peak in pair] or [measured.micro.again.peak_bytes]
        # Where some draws differ, others may differ as much again.
        return (2 * max(drawn) - min(drawn)) / measured.micro.again.peak_bytes

    def _session(self, choice: MemoryChoice) -> TraceSession:
        from pipeline.memory.tracing.fake_mode import failure_reason
        from pipeline.memory.tracing.tracer import TraceSession

        if choice not in self._sessions:
            if choice != MemoryChoice():
                self._session(MemoryChoice())  # an error of it is the model's own
            try:
                with _own_numbers():
                    # All batches are of the same random numbers: what depends on values grows evenly with sizes.
                    example = partial(self._seeded_example, repeat(SEED))
                    session = TraceSession(partial(self._build, choice), example, self._least)
                    session.standing()
            except RuntimeError as error:
                if choice == MemoryChoice() and not self._is_given:
                    raise
                if choice == MemoryChoice():  # the user did not choose the CPU
                    raise Unmeasurable(failure_reason(error)) from error
                what = f"a real step failed: {failure_reason(error)}"
                raise CannotRun(what, remedy="let the planner choose checkpointing and precision") from error
            self._sessions[choice] = session
        return self._sessions[choice]

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
    """Return the memory of the wanted micro-batch, from measured ones (the largest last) and their unseen share."""
    largest = measured[-1]
    counts = {name: float(getattr(largest, name)) for name in ("flops", "kernels", "moved_bytes")}
    if dict(largest.sizes) != dict(wanted):
        for name in counts:
            counts[name] = extrapolate([(micro.sizes, int(getattr(micro, name))) for micro in measured], wanted).likely
    first, first_estimate, _ = _enlarged([(micro.sizes, micro.first) for micro in measured], wanted)
    again, again_estimate, how = _enlarged([(micro.sizes, micro.again) for micro in measured], wanted)
    first, again = (stretched(tape, ceil(unseen * tape.peak_bytes)) for tape in (first, again))
    worse = max(first_estimate, again_estimate, key=lambda estimate: estimate.margin)
    how_far = f"measured on a real batch of this size on the CPU, planned with +{worse.margin:.0%}"
    if worse.ratio > 1:
        how_far = (
            f"measured on small real batches on the CPU ({len(measured)} sizes), extrapolated ×{worse.ratio:.3g}: "
            f"leave-one-out error {worse.error:.1%}, planned with +{worse.margin:.0%}"
        )
    return MicroFootprint(
        sizes=dict(wanted),
        first=first,
        again=again,
        parts=(*standing.parts, *_peak_parts(again, first.left_bytes)),
        flops=counts["flops"],
        kernels=int(counts["kernels"]),
        moved_bytes=counts["moved_bytes"],
        origin=Provenance.EXTRAPOLATED,
        notes=(how_far, how, "activations include inputs and temporaries"),
    )


def _peak_parts(tape: Tape, gradient_bytes: int) -> list[MemoryPart]:
    """Return the live memory at a tape's peak beyond the standing memory: gradients; the rest counts as activations."""
    live_E = np.cumsum(tape.bytes_E)
    peak = int(live_E.argmax()) + 1 if live_E.max(initial=0) > 0 else 0
    own = int(tape.bytes_E[:peak][tape.block_E[:peak] >= 0].sum())
    gradients = gradient_bytes + int(live_E[peak - 1] if peak else 0) - own
    parts = (MemoryPart(Category.GRADIENTS, "", gradients), MemoryPart(Category.ACTIVATIONS, "", own))
    return [part for part in parts if part.bytes]


def _times(sizes: Sizes, fraction: float) -> dict[str, int]:
    """Return a fraction of sizes; those above 0 stay at least 1."""
    return {name: max(1, round(value * fraction)) if value else 0 for name, value in sizes.items()}


def _between(measured: Sequence[MeasuredSize], wanted: Sizes) -> list[dict[str, int]]:
    """Return more sizes to measure, of at most twice the largest: near it, and with drivers that do not vary yet.

    Small sizes may take other ways than larger ones: then more is to be known of the larger ones.
    """
    largest = measured[-1].micro
    alike = sum(_runs_like(size.micro.first, largest.first) for size in measured)
    more = [_times(largest.sizes, share) for share in BETWEEN if alike < FEWEST]
    for name, value in largest.sizes.items():
        if value < wanted[name] and all(size.micro.sizes[name] == value for size in measured):
            more.append({**largest.sizes, name: 2 * value})
    return more


def _distinct(sizes: Iterable[Sizes]) -> Iterator[Sizes]:
    seen: list[Sizes] = []
    for size in sizes:
        if size not in seen:
            seen.append(size)
            yield size


def _grown(values: Sequence[float]) -> float:
    """Predict the next value of a series: it grows as before, but at least doubles (a constant may hide the growth)."""
    growth = values[-1] / max(values[-2], 1e-9) if len(values) > 1 else WORST_GROWTH
    return values[-1] * min(max(growth, 2.0), WORST_GROWTH) if values else 0.0


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
