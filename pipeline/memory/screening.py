"""What an item costs, in bytes: non-negative weights of its sizes, fitted to a few answers of the oracle.

It is for screening only. One fit errs by tens of per cent, so what is chosen by it is verified by the oracle.

Concatenated items add up, so a micro-batch is a sum of weights times sums of sizes. A padded micro-batch costs its
items times what the largest sizes cost, with their products (attention over a length is its square).

Shapes: P points, N items, M micro-batches, S sizes (`items` first), T terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import nnls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Floats = NDArray[np.float64]

MOST_COST = 1 << 52  # costs are added in float64 by the sampler


@dataclass(frozen=True)
class Terms:
    """The products of sizes that a cost is made of; each is of items, and of the sizes named by their places."""

    names: tuple[str, ...]  # `items` first
    padded: bool

    @property
    def factors(self) -> tuple[tuple[int, ...], ...]:
        """Return the places of each term's sizes."""
        sizes = range(1, len(self.names))
        pairs = tuple(combinations_with_replacement(sizes, 2)) if self.padded else ()
        return ((), *((place,) for place in sizes), *pairs)

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the terms in words, for an item."""
        return tuple("*".join(self.names[place] for place in places) or "item" for places in self.factors)

    def of_micros(self, rows_MS: Integers) -> Floats:
        """Return the terms of micro-batches [M, T]."""
        rows = rows_MS.astype(np.float64)
        items = rows[:, 0] if self.padded else np.ones(len(rows))
        first = rows[:, 0]
        columns = [items * rows[:, list(places)].prod(axis=1) if places else first for places in self.factors]
        return np.stack(columns, axis=1)

    def of_items(self, sizes_NS: Integers) -> Floats:
        """Return the terms of single items, whose sizes are given without the number of items [N, T]."""
        return self.of_micros(np.concatenate((np.ones((len(sizes_NS), 1), np.int64), sizes_NS), axis=1))


@dataclass(frozen=True, eq=False)
class CostModel:
    """Predicts what micro-batches take; `base` is what they all take."""

    terms: Terms
    weights_T: Floats
    base: float

    def predict(self, rows_MS: Integers) -> Floats:
        """Return the prediction for micro-batches."""
        return np.asarray(self.base + self.terms.of_micros(rows_MS) @ self.weights_T)

    def cost(self, sizes_NS: Integers) -> Integers:
        """Return each item's share as a whole number, at least 1."""
        cost_N = np.ceil(self.terms.of_items(sizes_NS) @ self.weights_T)
        return np.clip(cost_N, 1, MOST_COST).astype(np.int64)

    def named(self) -> dict[str, float]:
        """Return the weights that are not 0, by their terms."""
        pairs = zip(self.terms.texts, self.weights_T.tolist(), strict=True)
        return {text: weight for text, weight in pairs if weight > 0}


def fit(terms: Terms, rows_PS: Sequence[Sequence[int]], values: Sequence[float]) -> CostModel:
    """Fit weights by least relative squares, so that the small points tell as much as the large; none is negative."""
    target_P = np.array(values, np.float64)
    unit = max(float(target_P.max(initial=0.0)), 1e-30)
    target_P = target_P / unit
    micros_PT = terms.of_micros(np.array(rows_PS, np.int64))
    matrix_PT = np.concatenate((np.ones((len(micros_PT), 1)), micros_PT), axis=1)
    scale_T = np.maximum(matrix_PT.max(axis=0), 1.0)
    row_P = 1.0 / np.maximum(target_P, 0.01)  # nothing near 0 may rule the fit
    weights_T, _ = nnls(matrix_PT / scale_T * row_P[:, None], target_P * row_P)
    weights_T = weights_T / scale_T * unit
    return CostModel(terms, weights_T[1:], float(weights_T[0]))
