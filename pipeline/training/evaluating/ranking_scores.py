"""Metrics of binary scores (AUROC, average precision) over any number of items, in a fixed amount of memory.

A score is kept as one of 65,536 bins: its bits as a half-precision number, put in order. Figures are exact for scores
of that precision (three digits); scores that are equal there count as ties. Shapes: S scores, H high ones, G
groups of scores, K bins.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]
    Counts = NDArray[np.int64]
    Bins = NDArray[np.uint16]

BINS = 1 << 16
SIGN = -(1 << 15)  # of 16 bits, as an integer
LARGEST = float(np.finfo(np.float16).max)
GROUP = 32  # scores of which only the highest is looked at first


class Ranking:
    """Counts of positives and negatives in bins ordered by score."""

    def __init__(self) -> None:
        self._yes_K: Counts = np.zeros(BINS, np.int64)
        self._no_K: Counts = np.zeros(BINS, np.int64)
        self._not_numbers = 0
        self._pending: list[tuple[Array, Array]] = []  # a few scores wait for others: every count passes all bins
        self._pending_scores = 0

    @property
    def yes_K(self) -> Counts:
        self._count()
        return self._yes_K

    @property
    def no_K(self) -> Counts:
        self._count()
        return self._no_K

    def add(self, scores: Array, labels: Array) -> None:
        """Count some scores with their labels."""
        scores_S, is_yes_S = np.array(scores).ravel(), np.array(labels, np.bool_).ravel()
        if len(scores_S) != len(is_yes_S):
            raise ValueError(f"{len(scores_S)} scores, {len(is_yes_S)} labels")
        self._pending.append((scores_S, is_yes_S))
        self._pending_scores += len(scores_S)
        if self._pending_scores >= BINS:
            self._count()

    def _count(self) -> None:
        """Count the scores that were added since the last time."""
        if self._pending:
            scores_S, is_yes_S = map(np.concatenate, zip(*self._pending, strict=True))
            self._not_numbers += int(np.count_nonzero(np.isnan(scores_S)))
            bins_S = bins(scores_S)
            yes_K = np.bincount(bins_S[is_yes_S], minlength=BINS)
            self._yes_K += yes_K
            self._no_K += np.bincount(bins_S, minlength=BINS) - yes_K
            self._pending, self._pending_scores = [], 0

    @property
    def _is_defined(self) -> bool:
        return bool(self.yes_K.any() and self.no_K.any()) and not self._not_numbers

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


def bins(scores_S: Array) -> Bins:
    """Return each score's bin: its rank among all half-precision numbers."""
    clipped_S = np.clip(np.asarray(scores_S), -LARGEST, LARGEST).astype(np.float32, copy=False)
    halves_S = torch.from_numpy(clipped_S).half().add_(0)  # numpy's way is ten times as slow; -0 becomes 0
    bits_S = halves_S.view(torch.int16)
    ranks_S = bits_S ^ ((bits_S >> 15) | SIGN)  # all bits of a negative change, and the sign of others
    bins_S: Bins = ranks_S.numpy().view(np.uint16)
    return bins_S


def precision_at(scores: Array, labels: Array, most: int) -> float:
    """Return the share of positives among the `most` highest scores; ties at the end count in proportion."""
    scores_S, is_yes_S = np.ravel(scores), np.ravel(labels)
    if not len(scores_S) or np.isnan(scores_S).any():
        return math.nan
    most = min(max(most, 1), len(scores_S))
    high_H = _high(scores_S, most)
    scores_S, is_yes_S = scores_S[high_H], is_yes_S[high_H].astype(np.bool_)
    last = np.partition(scores_S, len(scores_S) - most)[len(scores_S) - most]
    above_S, tied_S = scores_S > last, scores_S == last
    places = most - int(above_S.sum())
    return float(is_yes_S[above_S].sum() + places * is_yes_S[tied_S].mean()) / most


def _high(scores_S: Array, most: int) -> slice | NDArray[np.intp]:
    """Return where the `most` highest scores are among, with all that equal the last of them."""
    groups = len(scores_S) // GROUP
    if groups < 2 * most:
        return slice(None)
    highest_G = scores_S[: GROUP * groups].reshape(GROUP, groups).max(0)
    return np.flatnonzero(scores_S >= np.partition(highest_G, groups - most)[groups - most])  # so many are as high


def logits(chances: Array) -> NDArray[np.float32]:
    """Return the logits of probabilities, which half precision resolves evenly near 0 and near 1."""
    with np.errstate(divide="ignore"):
        chances_S = np.asarray(chances, np.float64)
        logits_S: NDArray[np.float32] = (np.log(chances_S) - np.log1p(-chances_S)).astype(np.float32)
    return logits_S
