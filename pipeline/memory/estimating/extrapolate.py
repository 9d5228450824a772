"""From measured sizes to a larger one: peaks, and whole tapes.

The fit is a polynomial of the drivers (nodes, edges, pairs, …) without negative terms: memory never shrinks when a
batch grows. Its error is estimated by predicting each measured size from all others.

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
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    Sizes = Mapping[str, int]
    Floats = NDArray[np.float64]
    Tapes = Sequence[tuple[Sizes, Tape]]

FEWEST = 3  # different points: with two, nothing is left to check a line with
EXACT = 1e-3  # of the largest: a fit as good as this is the law, not a coincidence
FLOOR = 0.02  # margin of a fit without any error, and of each doubling: the real batches are not the rehearsed ones
ROUNDING = 1e-9  # of the solver: no error
BEND = 1e-4  # of the largest: above what all smaller points foretell by more, a steeper regime has begun
SURE = 0.01  # an error up to which a fit is taken for the law
TRUSTED_ERROR = 0.1  # of tapes made block by block: above it, peaks are extrapolated instead
DEGREES = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Extrapolated:
    """The estimate for a larger size; `high` is the number to plan with."""

    bytes: int
    high: int
    error: float  # the worst when each measured size is predicted from the others
    ratio: float  # the wanted size over the largest measured, of the driver that is furthest
    note: str

    @classmethod
    def of(cls, likely: float, high: float, error: float, ratio: float) -> Extrapolated:
        """Return the estimate in whole bytes, with its note."""
        likely_bytes, high_bytes = ceil(likely), ceil(high)
        more = high_bytes / likely_bytes - 1 if likely_bytes else 0.0
        note = f"extrapolated ×{ratio:.3g}: leave-one-out error {error:.1%}, planned with +{more:.0%}"
        return cls(likely_bytes, high_bytes, error, ratio, note)

    @property
    def margin(self) -> float:
        """Return the relative margin of `high` over the estimate."""
        return self.high / self.bytes - 1 if self.bytes else 0.0


@dataclass(frozen=True, slots=True)
class Design:
    """Measured sizes as fractions of the wanted size, which is 1 in all drivers."""

    x_PD: Floats
    items: int | None  # the driver that counts items

    @classmethod
    def of(cls, sizes: Sequence[Sizes], wanted: Sizes) -> Design:
        """Return the design of these sizes; a driver that never changes explains nothing and is left out."""
        names = [name for name, value in wanted.items() if value and any(size[name] != value for size in sizes)]
        rows = [[size[name] / wanted[name] for name in names] for size in sizes]
        x_PD = np.array(rows, np.float64).reshape(len(sizes), len(names))
        return cls(x_PD, names.index(ITEMS) if ITEMS in names else None)

    def __getitem__(self, rows: slice | Sequence[int] | NDArray[np.int64]) -> Design:
        return Design(self.x_PD[rows], self.items)

    @property
    def is_enough(self) -> bool:
        """Tell whether enough points are different, and each driver varies: else its share would count as constant."""
        return len(np.unique(self.x_PD, axis=0)) >= FEWEST and bool(np.ptp(self.x_PD, axis=0).all())

    @property
    def ratio(self) -> float:
        """Return how many times larger the wanted size is than the largest point."""
        return float(1 / self.x_PD.max(axis=0).min()) if self.x_PD.size else 1.0

    @property
    def wanted(self) -> Design:
        """Return the wanted size as the only point."""
        return Design(np.ones((1, self.x_PD.shape[1])), self.items)

    def terms(self, degree: int) -> Floats:
        """Return the terms up to a degree; degree 3 is items times products of two others, as for padded pairs."""
        drivers = range(self.x_PD.shape[1])
        products: list[tuple[int, ...]] = [(), *((driver,) for driver in drivers)]
        if degree > 1:
            products += combinations_with_replacement(drivers, 2)
        if degree > 2 and self.items is not None:
            sizes = [driver for driver in drivers if driver != self.items]
            products += [(self.items, *pair) for pair in combinations_with_replacement(sizes, 2)]
        return np.stack([self.x_PD[:, product].prod(axis=1) for product in products], axis=1)


def extrapolate(points: Sequence[tuple[Sizes, int]], wanted: Sizes) -> Extrapolated:
    """Return the estimate for the wanted size from the bytes of measured ones."""
    design = Design.of([sizes for sizes, _ in points], wanted)
    if not design.is_enough:
        raise ValueError(f"{len(points)} measured sizes are too few or too similar to extrapolate from")
    order = np.argsort(design.x_PD.sum(axis=1), kind="stable")
    design, y_P = design[order], np.array([taken for _, taken in points], np.float64)[order]
    degree, error = chosen_degree(design, y_P)
    fitted_bytes = predicted(design, y_P, design.wanted, degree)
    tail = predicted(design[-2:], y_P[-2:], design.wanted, 1)
    likely = fitted_bytes if error <= SURE else max(fitted_bytes, tail)
    margin = margin_bytes(likely, float(y_P[-1]), error, design.ratio)
    high = max(likely + margin, tail, steepest(design, y_P, degree))
    return Extrapolated.of(likely, high, error, design.ratio)


def margin_bytes(likely: float, largest: float, error: float, ratio: float) -> float:
    """Return the margin: floor and error once, and once more for each doubling beyond the largest measured size.

    Where most memory is constant, an error may hide a slope: it is multiplied by the ratio of the sizes.
    """
    times = 1 + max(0.0, log2(ratio))
    return FLOOR * likely * times + error * max(likely * times, largest * ratio)


def steepest(design: Design, y_P: Floats, degree: int) -> float:
    """Return an upper bound where only the last point has entered a steeper regime; else 0.

    The slope of that regime cannot be known from one point, but is at most that of the line through the origin.
    """
    above = float(y_P[-1]) - predicted(design[:-1], y_P[:-1], design[-1:], degree)
    noise = fit_error(design[:-1], y_P[:-1], degree)
    return float(y_P[-1]) * design.ratio if above > (BEND + 2 * noise) * y_P[-1] else 0.0


def chosen_degree(design: Design, y_P: Floats) -> tuple[int, float]:
    """Return the lowest degree that predicts left-out points about as well as any, and its worst error."""
    errors = {degree: fit_error(design, y_P, degree) for degree in DEGREES}
    enough = 1.5 * min(errors.values()) + EXACT
    return next((degree, error) for degree, error in errors.items() if error <= enough)


def fit_error(design: Design, y_P: Floats, degree: int) -> float:
    """Return the worst relative leave-one-out error of fits of a degree."""
    guesses = {
        place: predicted(design[others], y_P[others], design[[place]], degree) for place, others in left_out(len(y_P))
    }
    return worst_error(y_P, guesses)


def left_out(points: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each point of the larger half, with all other points.

    The smaller half is only fitted: errors there are negligible at the wanted size.
    """
    for place in range(points // 2, points):
        yield place, np.delete(np.arange(points), place)


def worst_error(y_P: Floats | Sequence[int], guesses: Mapping[int, float]) -> float:
    """Return the worst relative error of guesses, by the points' places."""
    worst = max(abs(guess - float(y_P[place])) / max(float(y_P[place]), 1.0) for place, guess in guesses.items())
    return worst if worst > ROUNDING else 0.0


def predicted(design: Design, y_P: Floats, at: Design, degree: int) -> float:
    """Return the fitted value at one point."""
    return float(at.terms(degree)[0] @ fitted(design.terms(degree), y_P))


def fitted(terms_PK: Floats, y_P: Floats) -> Floats:
    """Return non-negative coefficients; the largest points, nearest to the wanted size, count most."""
    scale = max(float(y_P.max(initial=0.0)), 1.0)
    try:
        coefficients, _ = nnls(terms_PK, y_P / scale, maxiter=100 * terms_PK.shape[1])
    except RuntimeError:  # terms so alike that it turns in circles: the largest of all is above every point
        coefficients = np.zeros(terms_PK.shape[1])
        coefficients[0] = 1.0
    return np.asarray(coefficients, np.float64) * scale


def projected(recorded: Tapes, wanted: Sizes) -> tuple[Tape, Extrapolated] | None:
    """Return the tape of the wanted size, each block extrapolated by itself; None where the tapes differ in structure.

    So the peak may be elsewhere in the step than in any measured size.
    """
    alike = runs_alike(recorded)
    design = Design.of([sizes for sizes, _ in alike], wanted)
    if not design.is_enough:
        return None
    tapes = [tape for _, tape in alike]
    bytes_PE = np.stack([tape.bytes_E for tape in tapes]).astype(np.float64)

    again = {
        place: tape_at(tapes[-1], design[others], bytes_PE[others], design[[place]])
        for place, others in left_out(len(tapes))
    }
    # Temporary blocks are checked as well: where gradients are the peak of small sizes, they hide the error.
    error = max(
        worst_error([peak(tape) for tape in tapes], {place: peak(tape) for place, tape in again.items()})
        for peak in (lambda tape: tape.peak_bytes, passing_peak_bytes)
    )
    tape = tape_at(tapes[-1], design, bytes_PE, design.wanted)
    peak = tape.peak_bytes
    margin = margin_bytes(peak, float(tapes[-1].peak_bytes), error, design.ratio)
    return tape, Extrapolated.of(peak, peak + margin, error, design.ratio)


def passing_peak_bytes(tape: Tape) -> int:
    """Return the peak of the tape's own blocks, without those shared with other tapes."""
    return int(np.cumsum(np.where(tape.block_E >= 0, tape.bytes_E, 0)).max(initial=0))


def runs_alike(recorded: Tapes) -> list[tuple[Sizes, Tape]]:
    """Return the tapes that allocate and release blocks in the last tape's order, whatever their sizes."""

    def course(tape: Tape) -> Sequence[NDArray[np.int64]]:
        return tape.block_E, np.sign(tape.bytes_E)

    return [
        (sizes, tape) for sizes, tape in recorded if all(map(np.array_equal, course(tape), course(recorded[-1][1])))
    ]


def tape_at(model: Tape, design: Design, bytes_PE: Floats, at: Design) -> Tape:
    """Return the tape with each block's size from its own fit."""
    # Blocks with the same bytes at every point share one number: comparing rows of tables takes long.
    marks_P = np.random.default_rng(0).random(len(bytes_PE))
    _, first_U, which_E = np.unique(marks_P @ np.abs(bytes_PE), return_index=True, return_inverse=True)
    unlike_UP = np.abs(bytes_PE)[:, first_U].T
    laws = [(design.terms(degree), at.terms(degree)[0]) for degree in DEGREES]
    value_U = np.array([block_bytes(y_P, laws, design, at) for y_P in unlike_UP])
    sizes_E = np.ceil(value_U[which_E.reshape(-1)] - 1e-6).astype(np.int64)
    return Tape(model.block_E, np.sign(model.bytes_E) * np.maximum(sizes_E, 1))


def block_bytes(y_P: Floats, laws: Sequence[tuple[Floats, Floats]], design: Design, at: Design) -> float:
    """Return a block's size by the lowest degree that fits exactly, else by the one that predicts best."""
    if y_P.min() == y_P.max():
        return float(y_P[0])
    for terms_PK, at_K in laws:
        coefficients = fitted(terms_PK, y_P)
        if np.abs(terms_PK @ coefficients - y_P).max() <= EXACT * y_P.max():
            return float(at_K @ coefficients)
    degree, _ = chosen_degree(design, y_P) if len(y_P) >= FEWEST else (1, 0.0)
    return predicted(design, y_P, at, degree)


def enlarged(recorded: Tapes, wanted: Sizes) -> tuple[Tape, Extrapolated, str]:
    """Return the tape of the wanted size with its margin, the estimate of its peak, and a note on the method."""
    sizes, tape = recorded[-1]
    if dict(sizes) == dict(wanted):
        peak = tape.peak_bytes
        estimate = Extrapolated(peak, ceil(peak * (1 + FLOOR)), 0.0, 1.0, f"planned with +{FLOOR:.0%}")
        return stretched(tape, estimate.high), estimate, "this very size was run"
    blocks = projected(recorded, wanted)
    if blocks and blocks[1].error <= TRUSTED_ERROR:
        return stretched(blocks[0], blocks[1].high), blocks[1], "each block was extrapolated separately"
    worse = worst_peak(recorded, wanted)
    return stretched(tape, worse.high), worse, "the sizes ran differently: the largest trace was scaled to the peak"


def worst_peak(recorded: Tapes, wanted: Sizes) -> Extrapolated:
    """Return the highest of three estimates: from peaks, from peaks of own blocks, and from all allocations, scaled.

    Peaks of small batches may hide growth: behind gradients, or elsewhere in the step.
    """
    largest = recorded[-1][1]
    share = largest.peak_bytes / max(turnover_bytes(largest), 1)
    measures: tuple[Callable[[Tape], float], ...] = (
        lambda tape: tape.peak_bytes,
        passing_peak_bytes,
        lambda tape: share * turnover_bytes(tape),
    )
    estimates = [
        extrapolate([(sizes, ceil(measure(tape))) for sizes, tape in recorded], wanted) for measure in measures
    ]
    return max(estimates, key=lambda estimate: estimate.high)


def turnover_bytes(tape: Tape) -> int:
    """Return the sum of all allocations of the tape."""
    return int(tape.bytes_E[tape.bytes_E > 0].sum())


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
