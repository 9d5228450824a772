"""From measured sizes to a larger one: peaks, and whole tapes.

What is fitted is a polynomial of the drivers (nodes, edges, pairs, …) without negative terms: memory never shrinks when
a batch grows. How far it may be wrong is found by predicting each measured size from all others.

Shapes: P points, D drivers, K terms, E events, U unlike blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import ceil, log2
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import nnls

from pipeline.memory.footprint import Tape
from pipeline.protocol import ITEMS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    Sizes = Mapping[str, int]
    Floats = NDArray[np.float64]

FEWEST = 3  # points: with two, nothing is left to check a line with
EXACT = 1e-3  # of the largest: a fit as good as this is the law, not a coincidence
FLOOR = 0.02  # margin of a fit without any error: the real batches are not the rehearsed ones
ROUNDING = 1e-9  # of the solver: no error
BEND = 1e-4  # of the largest: above what all smaller points foretell by more, a steeper regime has begun
SURE = 0.01  # an error up to which a fit is taken for the law
NEARBY = 0.6  # of the largest
TRUSTED_ERROR = 0.1  # of tapes made block by block: above it, peaks are extrapolated instead
DEGREES = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Extrapolated:
    """What a larger size is thought to take; `high` is the number to plan with."""

    bytes: int
    low: int
    high: int
    error: float  # the worst when each measured size is predicted from the others
    ratio: float  # the wanted size over the largest measured, of the driver that is furthest
    note: str

    @property
    def margin(self) -> float:
        """Return how much is planned above what is thought."""
        return self.high / self.bytes - 1 if self.bytes else 0.0


@dataclass(frozen=True, slots=True)
class Design:
    """Points as multiples of the wanted size, which is 1 in all drivers."""

    x_PD: Floats
    items: int | None  # the driver that counts items

    @classmethod
    def of(cls, sizes: Sequence[Sizes], wanted: Sizes) -> Design:
        """Return these sizes; a driver that never changes explains nothing and is left out."""
        names = [name for name, value in wanted.items() if value and any(size[name] != value for size in sizes)]
        rows = [[size[name] / wanted[name] for name in names] for size in sizes]
        x_PD = np.array(rows, np.float64).reshape(len(sizes), len(names))
        return cls(x_PD, names.index(ITEMS) if ITEMS in names else None)

    @property
    def ratio(self) -> float:
        """Return how many times larger than the largest point the wanted one is."""
        return float(1 / self.x_PD.max(axis=0).min()) if self.x_PD.size else 1.0

    def but(self, point: int) -> tuple[Design, Design]:
        """Return all other points, and this one."""
        return Design(np.delete(self.x_PD, point, axis=0), self.items), Design(self.x_PD[[point]], self.items)

    def from_(self, point: int) -> Design:
        """Return the points from this one on."""
        return Design(self.x_PD[point:], self.items)

    def wanted(self) -> Design:
        """Return the wanted size as the only point."""
        return Design(np.ones((1, self.x_PD.shape[1])), self.items)

    def terms(self, degree: int) -> Floats:
        """Return the terms up to a degree: 3 is a square for each item, as of padded pairs."""
        drivers = range(self.x_PD.shape[1])
        products: list[tuple[int, ...]] = [(), *((driver,) for driver in drivers)]
        if degree > 1:
            products += combinations_with_replacement(drivers, 2)
        if degree > 2 and self.items is not None:
            others = [driver for driver in drivers if driver != self.items]
            products += [(self.items, *pair) for pair in combinations_with_replacement(others, 2)]
        return np.stack([self.x_PD[:, product].prod(axis=1) for product in products], axis=1)


def extrapolate(points: Sequence[tuple[Sizes, int]], wanted: Sizes) -> Extrapolated:
    """Return what the wanted size takes, given what others took."""
    if len(points) < FEWEST:
        raise ValueError(f"{len(points)} measured sizes are too few to extrapolate from: {FEWEST} are needed")
    design, y_P = in_order(points, wanted)
    degree, error = chosen_degree(design, y_P)
    thought = predicted(design, y_P, design.wanted(), degree)
    tail = predicted(design.from_(-2), y_P[-2:], design.wanted(), 1)
    likely = thought if error <= SURE else max(thought, tail)
    margin = margin_bytes(likely, float(y_P[-1]), error, design.ratio)
    high = max(likely + margin, tail, steepest(design, y_P, degree))
    return told(likely, min(thought, tail) - margin, high, error, design.ratio)


def in_order(points: Sequence[tuple[Sizes, int]], wanted: Sizes) -> tuple[Design, Floats]:
    """Return the points, the smallest first."""
    design = Design.of([sizes for sizes, _ in points], wanted)
    order = np.argsort(design.x_PD.sum(axis=1), kind="stable")
    return Design(design.x_PD[order], design.items), np.array([taken for _, taken in points], np.float64)[order]


def told(likely: float, low: float, high: float, error: float, ratio: float) -> Extrapolated:
    """Return the numbers with their words."""
    likely_bytes, high_bytes = ceil(likely), ceil(high)
    more = high_bytes / likely_bytes - 1 if likely_bytes else 0.0
    note = f"extrapolated ×{ratio:.3g}: leave-one-out error {error:.1%}, planned with +{more:.0%}"
    return Extrapolated(likely_bytes, max(0, int(low)), high_bytes, error, ratio, note)


def margin_bytes(likely: float, largest: float, error: float, ratio: float) -> float:
    """Return the margin: the error once, and once more for each doubling beyond the largest that was measured.

    Where most is constant, an error there may have hidden a slope: it counts as often as the wanted size is larger.
    """
    return FLOOR * likely + error * max(likely * (1 + max(0.0, log2(ratio))), largest * ratio)


def steepest(design: Design, y_P: Floats, degree: int) -> float:
    """Return a bound where the last point alone has entered a steeper regime: what it takes, in proportion; else 0.

    The slope of that regime cannot be known from one point, but it is not above that of the line through nothing.
    """
    others, last = design.but(len(y_P) - 1)
    above = float(y_P[-1]) - predicted(others, y_P[:-1], last, degree)
    noise = left_out_error(others, y_P[:-1], degree)
    return float(y_P[-1]) * design.ratio if above > (BEND + 2 * noise) * y_P[-1] else 0.0


def chosen_degree(design: Design, y_P: Floats) -> tuple[int, float]:
    """Return the lowest degree that predicts left-out points about as well as any does, and its worst error."""
    errors = {degree: left_out_error(design, y_P, degree) for degree in DEGREES}
    enough = 1.5 * min(errors.values()) + EXACT
    return next((degree, error) for degree, error in errors.items() if error <= enough)


def left_out_error(design: Design, y_P: Floats, degree: int) -> float:
    """Return the worst relative error when each point is predicted from the others."""
    return worst_error(y_P, lambda others, one, place: predicted(others, np.delete(y_P, place), one, degree), design)


def worst_error(y_P: Floats, predict: Callable[[Design, Design, int], float], design: Design) -> float:
    """Return the worst relative error when each point of the larger half is predicted from all others.

    The smaller half is only fitted: what is off by its own size there is nothing beside what is wanted.
    """
    pairs = ((float(y_P[place]), predict(*design.but(place), place)) for place in range(len(y_P) // 2, len(y_P)))
    worst = max(abs(guess - y) / max(y, 1.0) for y, guess in pairs)
    return worst if worst > ROUNDING else 0.0


def predicted(design: Design, y_P: Floats, at: Design, degree: int) -> float:
    """Return the fitted value at one point."""
    return float(at.terms(degree)[0] @ fitted(design.terms(degree), y_P))


def fitted(terms_PK: Floats, y_P: Floats) -> Floats:
    """Return the coefficients, none below 0; the largest points count most, being the nearest to what is wanted."""
    scale = max(float(y_P.max(initial=0.0)), 1.0)
    try:
        coefficients, _ = nnls(terms_PK, y_P / scale, maxiter=100 * terms_PK.shape[1])
    except RuntimeError:  # terms so alike that it turns in circles: the largest of all is above every point
        coefficients = np.zeros(terms_PK.shape[1])
        coefficients[0] = 1.0
    return np.asarray(coefficients, np.float64) * scale


def projected(recorded: Sequence[tuple[Sizes, Tape]], wanted: Sizes) -> tuple[Tape, Extrapolated] | None:
    """Return the tape of the wanted size, block by block; nothing where the sizes did not run alike.

    Each block is fitted for itself, so that the peak may be elsewhere than in any size that was measured: a regime that
    small sizes never enter is found.
    """
    alike = longest_alike(recorded)
    if len(alike) < FEWEST:
        return None
    design = Design.of([sizes for sizes, _ in alike], wanted)
    model = alike[-1][1]
    bytes_PE = np.stack([tape.bytes_E for _, tape in alike]).astype(np.float64)
    tapes = [tape for _, tape in alike]
    again = {place: played(model, *left_out(design, bytes_PE, place)) for place in range(len(tapes) // 2, len(tapes))}
    # What passes is looked at as well: where gradients are the peak of small sizes, they hide its error.
    error = max(replayed_error(design, tapes, again, peak) for peak in (highest_bytes, passing_peak_bytes))
    tape = played(model, design, bytes_PE, design.wanted())
    peak = tape.peak_bytes
    margin = margin_bytes(peak, float(tapes[-1].peak_bytes), error, design.ratio)
    return tape, told(peak, peak - margin, peak + margin, error, design.ratio)


def replayed_error(
    design: Design, tapes: Sequence[Tape], again: Mapping[int, Tape], peak: Callable[[Tape], int]
) -> float:
    """Return the worst relative error of a peak, of tapes that were made again from all others."""
    peaks_P = np.array([peak(tape) for tape in tapes], np.float64)
    return worst_error(peaks_P, lambda _, __, place: peak(again[place]), design)


def left_out(design: Design, bytes_PE: Floats, place: int) -> tuple[Design, Floats, Design]:
    """Return all points but one, their bytes, and that one."""
    others, one = design.but(place)
    return others, np.delete(bytes_PE, place, axis=0), one


def highest_bytes(tape: Tape) -> int:
    """Return the most that is live."""
    return tape.peak_bytes


def passing_peak_bytes(tape: Tape) -> int:
    """Return the most that is live of what the tape does not leave."""
    return int(np.cumsum(np.where(tape.block_E >= 0, tape.bytes_E, 0)).max(initial=0))


def longest_alike(recorded: Sequence[tuple[Sizes, Tape]]) -> list[tuple[Sizes, Tape]]:
    """Return those of the tapes that go like the last one: very small sizes may go other ways."""
    if not recorded:
        return []
    last = recorded[-1][1]
    return [(sizes, tape) for sizes, tape in recorded if same_course(tape, last)]


def same_course(one: Tape, other: Tape) -> bool:
    """Return whether both allocate and release the same blocks in the same order, whatever their sizes."""
    return np.array_equal(one.block_E, other.block_E) and np.array_equal(np.sign(one.bytes_E), np.sign(other.bytes_E))


def played(model: Tape, design: Design, bytes_PE: Floats, at: Design) -> Tape:
    """Return the tape with each block as large as its own fit says; a release is of what was allocated."""
    unlike_UP, which_E = np.unique(np.abs(bytes_PE).T, axis=0, return_inverse=True)
    degrees = {degree: (design.terms(degree), at.terms(degree)[0]) for degree in DEGREES}
    value_U = np.array([block_bytes(y_P, degrees, design, at) for y_P in unlike_UP])
    sizes_E = np.ceil(value_U[which_E.reshape(-1)] - 1e-6).astype(np.int64)
    return Tape(model.block_E, np.sign(model.bytes_E) * np.maximum(sizes_E, 1))


def block_bytes(y_P: Floats, degrees: Mapping[int, tuple[Floats, Floats]], design: Design, at: Design) -> float:
    """Return the size of a block: by the simplest law that holds, else by the one that foretells best."""
    if y_P.min() == y_P.max():
        return float(y_P[0])
    for terms_PK, at_K in degrees.values():
        coefficients = fitted(terms_PK, y_P)
        if np.abs(terms_PK @ coefficients - y_P).max() <= EXACT * y_P.max():
            return float(at_K @ coefficients)
    degree, _ = chosen_degree(design, y_P) if len(y_P) >= FEWEST else (1, 0.0)
    return predicted(design, y_P, at, degree)


def enlarged(recorded: Sequence[tuple[Sizes, Tape]], wanted: Sizes) -> tuple[Tape, Extrapolated, str]:
    """Return the tape of the wanted size with its margin, what is thought of its peak, and how it was made."""
    sizes, tape = recorded[-1]
    if dict(sizes) == dict(wanted):
        peak = tape.peak_bytes
        thought = Extrapolated(peak, peak, ceil(peak * (1 + FLOOR)), 0.0, 1.0, f"planned with +{FLOOR:.0%}")
        return stretched(tape, thought.high), thought, "this very size was run"
    blocks = projected(recorded, wanted)
    if blocks and blocks[1].error <= TRUSTED_ERROR:
        tape, thought = blocks
        return stretched(tape, thought.high), thought, "each block was extrapolated for itself"
    worse = worst_peak(recorded, wanted)
    smaller = smaller_alike(recorded, wanted)
    if smaller and smaller[1].high > worse.high:
        return stretched(smaller[0], smaller[1].high), smaller[1], "each block was extrapolated from the smaller sizes"
    return stretched(tape, worse.high), worse, "the sizes did not run alike: the largest tape was stretched to the peak"


def smaller_alike(recorded: Sequence[tuple[Sizes, Tape]], wanted: Sizes) -> tuple[Tape, Extrapolated] | None:
    """Return what sizes that went one way say, block by block, where only those close above began to go another.

    A kernel that takes another way from some size on must not hide what grows elsewhere in the step.
    """
    last = recorded[-1][0]
    for count in range(len(recorded) - 1, FEWEST - 1, -1):
        if any(recorded[count - 1][0][name] < NEARBY * value for name, value in last.items()):
            return None
        blocks = projected(recorded[:count], wanted)
        if blocks and blocks[1].error <= TRUSTED_ERROR:
            return blocks
    return None


def worst_peak(recorded: Sequence[tuple[Sizes, Tape]], wanted: Sizes) -> Extrapolated:
    """Return the highest of what the peaks say, what passes, and all that is allocated, in its share at the peak.

    Peaks of small batches may hide what will grow: behind gradients, or at another place of the step.
    """
    largest = recorded[-1][1]
    share = largest.peak_bytes / max(turnover_bytes(largest), 1)
    ways: tuple[Callable[[Tape], float], ...] = (
        lambda tape: tape.peak_bytes,
        passing_peak_bytes,
        lambda tape: share * turnover_bytes(tape),
    )
    told = [extrapolate([(sizes, ceil(way(tape))) for sizes, tape in recorded], wanted) for way in ways]
    return max(told, key=lambda one: one.high)


def stretched(tape: Tape, peak_bytes: int) -> Tape:
    """Return the tape with its own blocks larger, so that this is its peak; it is never made smaller."""
    own_E = np.where(tape.block_E >= 0, tape.bytes_E, 0)
    live_E, kept_E = np.cumsum(own_E), np.cumsum(tape.bytes_E - own_E)
    matters_E = live_E > 0
    if not matters_E.any():
        return tape
    factor = max(1.0, float(((peak_bytes - kept_E[matters_E]) / live_E[matters_E]).min()))
    larger_E = np.sign(own_E) * np.ceil(np.abs(own_E) * factor).astype(np.int64)
    return Tape(tape.block_E, np.where(tape.block_E >= 0, larger_E, tape.bytes_E))


def turnover_bytes(tape: Tape) -> int:
    """Return all that the tape allocates, one after another."""
    return int(tape.bytes_E[tape.bytes_E > 0].sum())
