"""Metrics of binary scores (AUROC, average precision) over any number of items, in a fixed amount of memory.

A score is kept as one of 65,536 bins: its bits as a half-precision number, put in order. Figures are exact for scores
of that precision (three digits); scores that are equal there count as ties. Shapes: S scores, K bins.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]
    Bins = NDArray[np.uint16]

BINS = 1 << 16
SIGN = -(1 << 15)  # of 16 bits, as an integer
LARGEST = float(np.finfo(np.float16).max)


class Ranking:
    """Counts of positives and negatives in bins ordered by score."""

    def __init__(self) -> None:
        self.yes_K, self.no_K = np.zeros((2, BINS), np.int64)
        self._has_nan = False

    def add(self, scores: Array, labels: Array) -> None:
        """Count some scores with their labels."""
        scores_S, is_yes_S = np.array(scores).ravel(), np.array(labels, np.bool_).ravel()
        if len(scores_S) != len(is_yes_S):
            raise ValueError(f"{len(scores_S)} scores, {len(is_yes_S)} labels")
        self._has_nan |= bool(np.isnan(scores_S).any())
        bins_S = bins(scores_S)
        np.add.at(self.yes_K, bins_S[is_yes_S], 1)
        np.add.at(self.no_K, bins_S[~is_yes_S], 1)

    @property
    def _is_defined(self) -> bool:
        return bool(self.yes_K.any() and self.no_K.any()) and not self._has_nan

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
    return ranks_S.numpy().view(np.uint16)


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
