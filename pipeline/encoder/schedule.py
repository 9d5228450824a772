"""The order of a run: batches that are still to do, cut anew when the budget has shrunk; and what they cost.

Shapes: N sequences of a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.encoder import batches

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pipeline.encoder.recipe import Cut, Recipe

    Integers = NDArray[np.int64]


def too_long(lengths_N: Integers, recipe: Recipe) -> Integers:
    """Return the places of the sequences that the recipe refuses for their length."""
    longest = int(lengths_N.max(initial=0))
    return np.flatnonzero(lengths_N > recipe.length) if recipe.refuses(longest) else np.zeros(0, np.int64)


def costs(lengths_N: Integers, recipe: Recipe, dim: int) -> NDArray[np.float64]:
    """Return the multiply-adds of each sequence, cut as the recipe wants it."""
    cut = _cut(lengths_N, recipe)
    if cut is None:
        return batches.cost(lengths_N, recipe.layer, dim)
    costs_N = batches.cost(np.minimum(lengths_N, cut.length), recipe.layer, dim)
    if cut.policy == "windows":
        costs_N *= 1 + np.ceil(np.maximum(lengths_N - cut.length, 0) / (cut.length - cut.overlap))
    return costs_N


def _cut(lengths_N: Integers, recipe: Recipe) -> Cut | None:
    """Return how the longest sequence is cut: all that are cut at all are cut so."""
    return recipe.wanted(int(lengths_N.max(initial=0))).cut


class Schedule:
    """Gives out batches, the longest first; a sequence that is computed in windows is a batch of its own."""

    def __init__(
        self, lengths_N: Integers, refused_N: Integers, recipe: Recipe, *, policy: str, cap: int | None
    ) -> None:
        left_N = np.delete(np.arange(len(lengths_N)), refused_N)
        left_N = left_N[batches.longest_first(lengths_N[left_N])]
        cut = _cut(lengths_N, recipe)
        alone = int((lengths_N[left_N] > cut.length).sum()) if cut and cut.policy == "windows" else 0
        self._alone, self._whole = left_N[:alone], left_N[alone:]
        self._computed_N = lengths_N if cut is None else np.minimum(lengths_N, cut.length)
        self._policy, self._cap = policy, cap
        self._budget = 0
        self._batches: list[Integers] = []

    def draw(self, budget: int) -> Integers | None:
        """Return the places of the next batch, or None when nothing is left."""
        if len(self._alone):
            batch, self._alone = self._alone[:1], self._alone[1:]
            return batch
        if budget != self._budget:
            self._plan(budget)
        return self._batches.pop() if self._batches else None

    def _plan(self, budget: int) -> None:
        """Cut what is left into batches, the first one last."""
        if self._batches:
            self._whole = np.concatenate(self._batches[::-1])
        lengths = self._computed_N[self._whole]
        cap = batches.fitting_cap(lengths, budget) if self._cap is None else self._cap
        plan = batches.plan(lengths, policy=self._policy, cap=cap, budget=budget)
        self._batches = [self._whole[places] for places in reversed(plan)]
        self._whole, self._budget = self._whole[:0], budget
