"""Divides sequences into batches, and into shards for tasks: pure arithmetic on lengths.

Shapes: N sequences, K of them in a batch or a shard.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

import numpy as np

from pipeline.encoder.embedding_recipe import ENDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    from pipeline.encoder.embedding_recipe import EmbeddingRecipe, SequenceCut

AT_ONCE = 4096  # groups that are Python integers at a time
LARGEST_CAP = 64  # the most that `auto` chooses: larger batches no longer keep a GPU busier


def fitting_cap(lengths_N: Integers, budget: int) -> int:
    """Return how many sequences of the usual length fit the budget; batches of longer ones are split anyway."""
    if len(lengths_N) == 0:
        return 1
    return max(1, min(LARGEST_CAP, budget // (int(np.median(lengths_N)) + ENDS)))


def plan_batches(lengths_N: Integers, *, policy: str, cap: int, budget: int) -> list[Integers]:
    """Return the batches, as places in `lengths_N`: neighbours in length, the longest first.

    `divisor` makes equal batches of `cap` sequences and one group of what remains; `tokens` fills each to the budget.
    No batch has more tokens than the budget, except a single sequence that has.
    """
    order_N = longest_first(lengths_N)
    tokens_N = lengths_N[order_N] + ENDS
    cuts = _divisor_cuts(tokens_N, cap, budget) if policy == "divisor" else _token_cuts(tokens_N, budget)
    return [order_N[start:stop] for start, stop in cuts]


def longest_first(lengths_N: Integers) -> Integers:
    """Return the indices in descending order of length; equals stay in order."""
    return np.argsort(-lengths_N, kind="stable").astype(np.int64, copy=False)


def _divisor_cuts(tokens_N: Integers, cap: int, budget: int) -> Iterator[tuple[int, int]]:
    """Cut into equal batches, then each of them into halves by count until it fits the budget or is one sequence."""
    count = len(tokens_N)
    even = count - count % cap
    sums_N = np.concatenate(([0], np.cumsum(tokens_N)))
    for start, stop in ((0, even), (even, count)):
        size = next(size for size in range(min(cap, max(stop - start, 1)), 0, -1) if (stop - start) % size == 0)
        waiting = [(first, first + size) for first in reversed(range(start, stop, size))]
        while waiting:
            first, last = waiting.pop()
            if last - first == 1 or sums_N[last] - sums_N[first] <= budget:
                yield first, last
            else:
                middle = (first + last) // 2
                waiting += [(middle, last), (first, middle)]


def _token_cuts(tokens_N: Integers, budget: int) -> Iterator[tuple[int, int]]:
    """Fill batch after batch with as many sequences as fit the budget."""
    sums_N = np.cumsum(tokens_N)
    start = 0
    while start < len(tokens_N):
        before = int(sums_N[start] - tokens_N[start])
        stop = max(start + 1, int(np.searchsorted(sums_N, before + budget, side="right")))
        yield start, stop
        start = stop


def cost(lengths_N: Integers, layers: int, dim: int) -> NDArray[np.float64]:
    """Return the multiply-adds of each sequence: in a layer, a token meets the weights once and every token twice.

    The weights are q, k, v and out (4 D²) and the feed-forward (8 D²); the meetings are scores and sums (2 D).
    """
    tokens_N = (lengths_N + ENDS).astype(np.float64)
    return np.asarray(layers * (12.0 * dim**2 * tokens_N + 2.0 * dim * tokens_N**2))


def deal_shards(lengths_N: Integers, costs_N: NDArray[np.float64], shards: int, multiple: int) -> list[Integers]:
    """Divide sequences into shards of about equal cost; return the indices of each shard, longest first.

    Neighbours in length stay together in groups of `multiple`, so that only one shard holds an odd number of them. The
    costliest group goes first, to the shard that has least; where there are more shards than groups, some get nothing.
    """
    order_N = longest_first(lengths_N)
    starts = np.arange(0, len(order_N), multiple)
    owner = _balance(np.add.reduceat(costs_N[order_N], starts), shards)
    owner_N = np.repeat(owner, multiple)[: len(order_N)]
    by_owner = np.argsort(owner_N, kind="stable")
    ends = np.cumsum(np.bincount(owner_N, minlength=shards))
    return [part.copy() for part in np.split(order_N[by_owner], ends[:-1])]


def cap_shards(shards: Iterable[Integers], most: int) -> Iterator[Integers]:
    """Yield the shards that hold anything; one of more than `most` sequences in parts of about equal cost."""
    for shard in shards:
        parts = math.ceil(len(shard) / most)
        yield from (shard[part::parts] for part in range(parts))


def _balance(costs_G: NDArray[np.float64], shards: int) -> Integers:
    """Return the shard of each group: the costliest is dealt first, always to the shard with the least load."""
    owner_G = np.zeros(len(costs_G), np.int64)
    loads = [(0.0, shard) for shard in range(shards)]
    order_G = np.argsort(-costs_G, kind="stable")
    for group in chain.from_iterable(order_G[at : at + AT_ONCE].tolist() for at in range(0, len(order_G), AT_ONCE)):
        load, shard = loads[0]
        owner_G[group] = shard
        heapq.heapreplace(loads, (load + costs_G[group], shard))
    return owner_G


def too_long(lengths_N: Integers, recipe: EmbeddingRecipe) -> Integers:
    """Return the indices of the sequences that the recipe refuses for their length."""
    return np.flatnonzero(lengths_N > recipe.length) if recipe.long == "error" else np.zeros(0, np.int64)


def recipe_costs(lengths_N: Integers, recipe: EmbeddingRecipe, dim: int) -> NDArray[np.float64]:
    """Return the multiply-adds of each sequence, cut as the recipe wants it."""
    computed_N, cut, is_cut_N = _as_cut(lengths_N, recipe)
    costs_N = cost(computed_N, recipe.layer, dim)
    if cut is not None and cut.policy == "windows":
        costs_N *= 1 + np.ceil(is_cut_N * (lengths_N - cut.length) / (cut.length - cut.overlap))
    return costs_N


def _as_cut(lengths_N: Integers, recipe: EmbeddingRecipe) -> tuple[Integers, SequenceCut | None, NDArray[np.bool_]]:
    """Return the residues of each sequence that are encoded as one, how sequences are cut, and which of them are."""
    cut = recipe.wanted(int(lengths_N.max(initial=0))).cut  # of the longest, as are all that are cut
    is_cut_N = lengths_N > (recipe.cut_beyond if cut else np.inf)
    return np.where(is_cut_N, cut.length, lengths_N) if cut else lengths_N, cut, is_cut_N


class BatchSchedule:
    """Gives out batches, the longest first; a sequence that is computed in windows is a batch of its own."""

    def __init__(
        self, lengths_N: Integers, refused_N: Integers, recipe: EmbeddingRecipe, *, policy: str, cap: int | None
    ) -> None:
        left_N = np.delete(np.arange(len(lengths_N)), refused_N)
        left_N = left_N[longest_first(lengths_N[left_N])]
        self._computed_N, cut, is_cut_N = _as_cut(lengths_N, recipe)
        alone = int(is_cut_N[left_N].sum()) if cut and cut.policy == "windows" else 0
        self._alone, self._whole = left_N[:alone], left_N[alone:]
        self._policy, self._cap = policy, cap
        self._budget: int | None = None
        self._batches: list[Integers] = []

    def draw(self, budget: int) -> Integers | None:
        """Return the indices of the next batch, or None when nothing is left."""
        if len(self._alone):
            batch, self._alone = self._alone[:1], self._alone[1:]
            return batch
        if budget != self._budget:
            self._plan(budget)
        return self._batches.pop() if self._batches else None

    def _plan(self, budget: int) -> None:
        """Cut the remaining sequences into batches, the first one last."""
        if self._batches:
            self._whole = np.concatenate(self._batches[::-1])
        lengths = self._computed_N[self._whole]
        cap = fitting_cap(lengths, budget) if self._cap is None else self._cap
        plan = plan_batches(lengths, policy=self._policy, cap=cap, budget=budget)
        self._batches = [self._whole[places] for places in reversed(plan)]
        self._whole, self._budget = self._whole[:0], budget


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How one process encodes."""

    policy: str  # divisor or tokens
    cap: int | Literal["auto"]
    budget: int | Literal["auto"]
    device: str  # cpu, or a kind of card
    threads: int = 1
    shrink: int = 0  # how often the budget is halved, because a card's memory ended in an earlier attempt
    mem_bytes: int | None = None  # what the allocation gives this process on the host
