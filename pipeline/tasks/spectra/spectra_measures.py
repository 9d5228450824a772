"""Losses of spectra, and the field's metrics: errors, yes or no, bits of fingerprints, neighbours.

Each loss is the sum over items; unknown numbers do not count. Shapes: B items, T triplets, K numbers predicted, D
features of an embedding; of figures N items, K targets or bits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from pipeline.store.store import in_chunks
from pipeline.tasks.ranking_scores import Ranking, logits
from pipeline.tasks.task_parts import Vectors, known_figures, labelled, nearest_vectors, unit_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    Values = Sequence[Any]
    Floats = NDArray[np.float64]

SMOOTH = 1.0  # added to both sides of a quotient of bits


def squared_error(predicted_BK: Tensor, true_BK: Tensor, is_known_BK: Tensor) -> Tensor:
    """Return the sum of squared errors."""
    return torch.where(is_known_BK, predicted_BK - true_BK, 0.0).square().sum()


def focal_error(
    logit_BK: Tensor, true_BK: Tensor, is_known_BK: Tensor, alpha: float | None = None, gamma: float = 0.0
) -> Tensor:
    """Return the sum of binary cross entropies, with less weight where the prediction is good.

    The weight of a positive is alpha · (1 − p)^gamma, of a negative (1 − alpha) · p^gamma; it has no gradient.
    """
    error_BK = functional.binary_cross_entropy_with_logits(logit_BK, true_BK, reduction="none")
    is_yes_BK = true_BK > 0.5
    wrong_BK = torch.where(is_yes_BK, -logit_BK, logit_BK).detach().sigmoid()
    weight_BK = wrong_BK**gamma if gamma else torch.ones_like(wrong_BK)
    if alpha is not None:
        weight_BK = weight_BK * torch.where(is_yes_BK, alpha, 1 - alpha)
    return torch.where(is_known_BK, weight_BK * error_BK, 0.0).sum()


def cosine_error(predicted_BK: Tensor, true_BK: Tensor, is_known_BK: Tensor) -> Tensor:
    """Return the sum of 1 − cosine over items of which any bit is known, of their known bits."""
    known_BK = is_known_BK.to(predicted_BK.dtype)
    cosine_B = torch.cosine_similarity(predicted_BK * known_BK, true_BK * known_BK, dim=-1)
    return torch.where(is_known_BK.any(-1), 1 - cosine_B, 0.0).sum()


def overlap_error(predicted_BK: Tensor, true_BK: Tensor, is_known_BK: Tensor) -> Tensor:
    """Return the sum of 1 − smooth intersection over union over items of which any bit is known."""
    known_BK = is_known_BK.to(predicted_BK.dtype)
    both_B = (predicted_BK * true_BK * known_BK).sum(-1)
    any_B = ((predicted_BK + true_BK) * known_BK).sum(-1) - both_B
    overlap_B = (both_B + SMOOTH) / (any_B + SMOOTH)
    return torch.where(is_known_BK.any(-1), 1 - overlap_B, 0.0).sum()


FINGERPRINT_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cosine": cosine_error,
    "iou": overlap_error,
    "bce": focal_error,
}


def triplet_error(anchor_TD: Tensor, positive_TD: Tensor, negative_TD: Tensor, margin: float) -> Tensor:
    """Return the sum over triplets of margin - cosine of the positive + cosine of the negative, if above 0."""
    near_T, far_T = (torch.cosine_similarity(anchor_TD, other_TD) for other_TD in (positive_TD, negative_TD))
    return (margin - near_T + far_T).clamp(min=0).sum()


def found_error(
    anchor_BD: Tensor,
    positive_BD: Tensor,
    negative_BD: Tensor,
    molecule_B: Tensor,
    negative_molecule_B: Tensor,
    temperature: float,
) -> Tensor:
    """Return the sum of cross entropies of finding each anchor's positive among all positives and negatives (InfoNCE).

    Other spectra of the anchor's own molecule, positives or negatives of any item, are left out.
    """
    unit_BD, near_BD, far_BD = (functional.normalize(rows, dim=-1) for rows in (anchor_BD, positive_BD, negative_BD))
    near_BB, far_BB = unit_BD @ near_BD.T / temperature, unit_BD @ far_BD.T / temperature
    molecule_C = torch.cat([molecule_B, negative_molecule_B])
    is_same_BC = (molecule_B[:, None] == molecule_C) & (molecule_C != 0)
    is_same_BC.fill_diagonal_(fill_value=False)  # its own positive
    logit_BC = torch.cat([near_BB, far_BB], 1).masked_fill(is_same_BC, -torch.inf)
    return (logit_BC.logsumexp(1) - near_BB.diagonal()).sum()


PREDICTION = "prediction"
ALIKE_PPM = 10.0  # how far the precursors of spectra may be apart that are compared
SPREAD_LEAST = 1e-12  # of squares: of equal numbers, rounding is left
BLOCK = 1024  # items at a time


def error_figures(predicted: Values, true: Values, names: Sequence[str]) -> dict[str, float]:
    """Return the errors over all known numbers, and of each target where there are several; none if none is known.

    r2 is the part of the spread explained, of each target around its own mean; it needs targets that differ. pearson is
    the correlation of predicted and true values, of one target.
    """
    known_K, true_sum_K, sum_K = np.zeros((3, len(names)))
    for predicted_BK, true_BK, is_known_BK in _blocks(predicted, true, len(names)):
        known_K += is_known_BK.sum(0)
        true_sum_K += np.where(is_known_BK, true_BK, 0.0).sum(0)
        sum_K += np.where(is_known_BK, predicted_BK, 0.0).sum(0)
    true_mean_K, mean_K = true_sum_K / np.maximum(known_K, 1), sum_K / np.maximum(known_K, 1)
    sums_KS = np.zeros((len(names), 8))
    for predicted_BK, true_BK, is_known_BK in _blocks(predicted, true, len(names)):
        off_BK, true_away_BK, away_BK = predicted_BK - true_BK, true_BK - true_mean_K, predicted_BK - mean_K
        terms = (
            np.ones_like(off_BK), np.abs(off_BK), off_BK**2, true_BK**2, predicted_BK**2,
            true_away_BK**2, away_BK**2, true_away_BK * away_BK,
        )  # fmt: skip
        sums_KS += np.stack([np.where(is_known_BK, term_BK, 0.0).sum(0) for term_BK in terms], axis=1)
    figures = _errors(sums_KS.sum(0).tolist(), has_pearson=len(names) == 1)
    for name, sums_S in zip(names if len(names) > 1 else (), sums_KS.tolist(), strict=False):
        figures |= {f"{figure}_{name}": value for figure, value in _errors(sums_S, has_pearson=True).items()}
    return figures


def _blocks(predicted: Values, true: Values, targets: int) -> Iterator[tuple[Floats, Floats, NDArray[np.bool_]]]:
    """Yield the predictions and truths of some items at a time, and which truths are known."""
    pairs = ((np.reshape(predicted_K, -1), np.reshape(true_K, -1)) for predicted_K, true_K in labelled(predicted, true))
    for block in in_chunks(pairs, BLOCK):
        predicted_BK, true_BK = np.array(block, np.float64).reshape(-1, 2, targets).transpose(1, 0, 2)
        yield predicted_BK, true_BK, ~np.isnan(true_BK)


def _errors(sums: Sequence[float], *, has_pearson: bool) -> dict[str, float]:
    known, absolute, error, true_squares, squares, true_spread, spread, both = sums
    if not known:
        return {}
    figures = {"mae": absolute / known, "rmse": math.sqrt(error / known)}
    if true_spread > SPREAD_LEAST * true_squares:
        figures["r2"] = 1 - error / true_spread
        if has_pearson and spread > SPREAD_LEAST * squares:
            figures["pearson"] = both / math.sqrt(spread * true_spread)
    return figures


def answer_figures(predicted: Values, true: Values, names: Sequence[str], threshold: float) -> dict[str, float]:
    """Return how well yes and no are predicted, in all and of each target where there are several."""
    of_all, by_name = _Answers(threshold), {name: _Answers(threshold) for name in names if len(names) > 1}
    for predicted_BK, true_BK, is_known_BK in _blocks(predicted, true, len(names)):
        columns = zip(predicted_BK.T, true_BK.T, is_known_BK.T, strict=True)
        parts = [(of_all, (predicted_BK, true_BK, is_known_BK)), *zip(by_name.values(), columns, strict=False)]
        for answers, (own, own_true, is_known) in parts:
            answers.add(own[is_known], own_true[is_known] > 0.5)
    figures = of_all.figures()
    for name, answers in by_name.items():
        figures |= {f"{figure}_{name}": value for figure, value in answers.figures().items()}
    return figures


class _Answers:
    """Counts of predicted and true yes and no."""

    def __init__(self, threshold: float) -> None:
        self._threshold, self._ranking = threshold, Ranking()
        self._counts_22 = np.zeros((2, 2), np.int64)  # by truth, and prediction

    def add(self, predicted_K: NDArray[Any], is_true_K: NDArray[np.bool_]) -> None:
        """Add some answers, given as probabilities."""
        self._ranking.add(logits(predicted_K), is_true_K)
        np.add.at(self._counts_22, (is_true_K.astype(int), (predicted_K > self._threshold).astype(int)), 1)

    def figures(self) -> dict[str, float]:
        """Return the metrics that are defined."""
        (no, wrong), (missed, right) = self._counts_22.tolist()
        figures = {
            "auroc": self._ranking.auroc(),
            "auprc": self._ranking.auprc(),
            "accuracy": _share(right + no, no + wrong + missed + right),
            "precision": _share(right, right + wrong),
            "recall": _share(right, right + missed),
            "jaccard": _share(right, right + missed + wrong),
        }
        return known_figures(figures)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def bit_figures(predicted: Values, true: Values, threshold: float) -> dict[str, float]:
    """Return how well bits are predicted, in all, and how alike fingerprints are: by cosine, and by Tanimoto of bits.

    Predictions outside of 0 to 1 pass a sigmoid first, as the field's tools do.
    """
    is_chance = all(np.nanmin(one) >= 0 and np.nanmax(one) <= 1 for one in predicted)
    answers, cosines, overlaps = _Answers(threshold), [], []
    for predicted_K, true_K in labelled(predicted, true):
        is_known_K = ~np.isnan(true_K)
        predicted_K = np.array(predicted_K, np.float32)
        predicted_K = predicted_K if is_chance else torch.from_numpy(predicted_K).sigmoid().numpy()
        chance_K = predicted_K.astype(np.float64)[is_known_K]
        bit_K = np.asarray(true_K, np.float64)[is_known_K] > 0.5
        answers.add(chance_K, bit_K)
        lengths = np.linalg.norm(chance_K) * np.sqrt(bit_K.sum())
        cosines.append(chance_K[bit_K].sum() / lengths if lengths else 0.0)
        is_set_K = chance_K > threshold
        overlaps.append((is_set_K & bit_K).sum() / max((is_set_K | bit_K).sum(), 1))
    if not cosines:
        return {}
    return answers.figures() | {"cosine": float(np.mean(cosines)), "tanimoto": float(np.mean(overlaps))}


def neighbour_figures(embedded: Vectors, molecules: Values, precursors: Values) -> dict[str, float]:
    """Return how often the nearest other spectrum is of the same molecule, and how well cosines separate molecules.

    The first is of spectra whose molecule has another one; the second of all pairs of precursors within 10 ppm.
    """
    molecule_N = np.array([int(molecule) for molecule in molecules], np.int64)
    known, count_M = np.unique(molecule_N[molecule_N != 0], return_counts=True)
    asked = np.flatnonzero(np.isin(molecule_N, known[count_M > 1])).tolist()
    figures = {}
    if asked:
        found_N2 = np.stack([places_2 for places_2, _ in nearest_vectors(embedded, embedded, 2, asked)])
        other_N = np.where(found_N2[:, 0] == asked, found_N2[:, 1], found_N2[:, 0])
        figures["nearest_is_same_molecule"] = float((molecule_N[other_N] == molecule_N[asked]).mean())
    ranking, pairs = Ranking(), 0
    precursor_N = np.array([float(precursor) for precursor in precursors])
    for place, near_P in _near_precursors(precursor_N, np.flatnonzero(molecule_N)):
        cosine_P = unit_rows(embedded, near_P.tolist()) @ unit_rows(embedded, [place])[0]
        ranking.add(cosine_P, molecule_N[near_P] == molecule_N[place])
        pairs += len(near_P)
    if pairs and not math.isnan(auroc := ranking.auroc()):
        figures |= {"same_molecule_auroc": auroc, "pairs_within_10_ppm": float(pairs)}
    return figures


def _near_precursors(precursor_N: Floats, places_M: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield spectra with those of at most 10 ppm more, some at a time: each pair of `places_M` once."""
    order_M = places_M[np.argsort(precursor_N[places_M], kind="stable")]
    mass_M = precursor_N[order_M]
    end_M = np.searchsorted(mass_M, mass_M * (1 + ALIKE_PPM * 1e-6), "right")
    for at, (place, end) in enumerate(zip(order_M.tolist(), end_M.tolist(), strict=True)):
        for start in range(at + 1, end, BLOCK):
            yield place, order_M[start : min(start + BLOCK, end)]
