"""Metrics of binary scores (AUROC, average precision) over any number of items, in a fixed amount of memory.

A score is kept as one of 65,536 bins: its bits as a half-precision number, put in order. Figures are exact for scores
of that precision (three digits); scores that become one number there count as ties. Shapes: S scores, K bins.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]
    Counts = NDArray[np.int64]

BINS = 1 << 16
SIGN = np.uint16(1 << 15)
LARGEST = float(np.finfo(np.float16).max)


class Ranking:
    """Counts of positives and negatives in bins ordered by score."""

    def __init__(self) -> None:
        self.not_numbers = 0
        self._counts_2K: Counts = np.zeros((2, BINS), np.int64)
        self._pending: list[NDArray[np.int64]] = []  # a few scores are counted with others: every count passes all bins
        self._pending_scores = 0

    @property
    def yes_K(self) -> Counts:
        return self._counted()[1]

    @property
    def no_K(self) -> Counts:
        return self._counted()[0]

    def add(self, scores: Array, labels: Array) -> None:
        """Count some scores with their labels."""
        scores_S, is_yes_S = np.ravel(scores), np.ravel(labels).astype(np.bool_)
        if len(scores_S) != len(is_yes_S):
            raise ValueError(f"{len(scores_S)} scores, {len(is_yes_S)} labels")
        self.not_numbers += int(np.isnan(scores_S).sum())
        self._pending.append(bins(scores_S) + np.int64(BINS) * is_yes_S)
        self._pending_scores += len(scores_S)
        if self._pending_scores >= BINS:
            self._counted()

    def _counted(self) -> tuple[Counts, Counts]:
        """Count the scores that were added since the last time; return the negatives and the positives of each bin."""
        if self._pending:
            self._counts_2K += np.bincount(np.concatenate(self._pending), minlength=2 * BINS).reshape(2, BINS)
            self._pending, self._pending_scores = [], 0
        return self._counts_2K[0], self._counts_2K[1]

    @property
    def _is_defined(self) -> bool:
        return not self.not_numbers and bool(self.yes_K.any()) and bool(self.no_K.any())

    def auroc(self) -> float:
        """Return how often a positive scores above a negative, ties counting half; NaN if either is missing."""
        if not self._is_defined:
            return math.nan
        below_K = np.cumsum(self.no_K) - self.no_K
        wins = float(self.yes_K @ (below_K + self.no_K / 2))
        return wins / (float(self.yes_K.sum()) * float(self.no_K.sum()))

    def auprc(self) -> float:
        """Return the average precision: over all thresholds, the precision times the recall it adds; may be NaN."""
        if not self._is_defined:
            return math.nan
        yes_K, all_K = self.yes_K[::-1], (self.yes_K + self.no_K)[::-1]
        precision_K = np.cumsum(yes_K) / np.maximum(np.cumsum(all_K), 1)
        return float(precision_K @ yes_K) / float(yes_K.sum())


def bins(scores_S: Array) -> NDArray[np.uint16]:
    """Return each score's bin: its rank among all half-precision numbers."""
    halves_S = np.clip(scores_S, -LARGEST, LARGEST).astype(np.float16)
    halves_S += np.float16(0)  # -0 becomes 0
    bits_S = halves_S.view(np.uint16)
    bins_S: NDArray[np.uint16] = np.where(bits_S & SIGN, ~bits_S, bits_S | SIGN)
    return bins_S


def precision_at(scores: Array, labels: Array, most: int) -> float:
    """Return the share of positives among the `most` highest scores; ties at the end count in proportion."""
    scores_S, is_yes_S = np.ravel(scores), np.ravel(labels).astype(np.bool_)
    if not len(scores_S) or np.isnan(scores_S).any():
        return math.nan
    most = min(max(most, 1), len(scores_S))
    last = np.partition(scores_S, len(scores_S) - most)[len(scores_S) - most]
    above_S, tied_S = scores_S > last, scores_S == last
    places = most - int(above_S.sum())
    return float(is_yes_S[above_S].sum() + places * is_yes_S[tied_S].mean()) / most


def logits(chances: Array) -> NDArray[np.float32]:
    """Return the logits of probabilities, which half precision resolves evenly near 0 and near 1."""
    with np.errstate(divide="ignore"):
        chances_S = np.asarray(chances, np.float64)
        logits_S: NDArray[np.float32] = (np.log(chances_S) - np.log1p(-chances_S)).astype(np.float32)
    return logits_S
