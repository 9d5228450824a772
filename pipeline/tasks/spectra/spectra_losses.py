"""Losses of spectra, each as the sum over items; what is not known counts nothing.

Shapes: B items, T triplets, K numbers told, D features of an embedding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SMOOTH = 1.0  # added to both sides of a quotient of bits


def squared_error(told_BK: Tensor, true_BK: Tensor, is_known_BK: Tensor) -> Tensor:
    """Return the sum of squared errors."""
    return torch.where(is_known_BK, told_BK - true_BK, 0.0).square().sum()


def focal_error(
    logit_BK: Tensor, true_BK: Tensor, is_known_BK: Tensor, alpha: float | None = None, gamma: float = 0.0
) -> Tensor:
    """Return the sum of binary cross entropies, those of what is told well weighing less.

    The weight of a positive is alpha · (1 − p)^gamma, of a negative (1 − alpha) · p^gamma; it has no gradient.
    """
    error_BK = functional.binary_cross_entropy_with_logits(logit_BK, true_BK, reduction="none")
    is_yes_BK = true_BK > 0.5
    wrong_BK = torch.where(is_yes_BK, -logit_BK, logit_BK).detach().sigmoid()
    weight_BK = wrong_BK**gamma if gamma else torch.ones_like(wrong_BK)
    if alpha is not None:
        weight_BK = weight_BK * torch.where(is_yes_BK, alpha, 1 - alpha)
    return torch.where(is_known_BK, weight_BK * error_BK, 0.0).sum()


def cosine_error(told_BK: Tensor, true_BK: Tensor, is_known_BK: Tensor) -> Tensor:
    """Return the sum of 1 − cosine over items of which any bit is known, of their known bits."""
    known_BK = is_known_BK.to(told_BK.dtype)
    cosine_B = torch.cosine_similarity(told_BK * known_BK, true_BK * known_BK, dim=-1)
    return torch.where(is_known_BK.any(-1), 1 - cosine_B, 0.0).sum()


def overlap_error(told_BK: Tensor, true_BK: Tensor, is_known_BK: Tensor) -> Tensor:
    """Return the sum of 1 − smooth intersection over union over items of which any bit is known."""
    known_BK = is_known_BK.to(told_BK.dtype)
    both_B = (told_BK * true_BK * known_BK).sum(-1)
    any_B = ((told_BK + true_BK) * known_BK).sum(-1) - both_B
    overlap_B = (both_B + SMOOTH) / (any_B + SMOOTH)
    return torch.where(is_known_BK.any(-1), 1 - overlap_B, 0.0).sum()


FINGERPRINT_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cosine": cosine_error,
    "iou": overlap_error,
    "bce": focal_error,
}


def triplet_error(anchor_TD: Tensor, positive_TD: Tensor, negative_TD: Tensor, margin: float) -> Tensor:
    """Return the sum of what a negative is nearer than `margin` behind the positive, by cosines."""
    near_T, far_T = (torch.cosine_similarity(anchor_TD, other_TD) for other_TD in (positive_TD, negative_TD))
    return (margin - near_T + far_T).clamp(min=0).sum()


def found_error(
    anchor_BD: Tensor, positive_BD: Tensor, negative_BD: Tensor, molecule_B: Tensor, temperature: float
) -> Tensor:
    """Return the sum of cross entropies of finding each anchor's positive among all positives and negatives.

    Those of its own molecule are no answers to it but for its own positive, and no wrong ones either (InfoNCE).
    """
    unit_BD, near_BD, far_BD = (functional.normalize(rows, dim=-1) for rows in (anchor_BD, positive_BD, negative_BD))
    near_BB, far_BB = unit_BD @ near_BD.T / temperature, unit_BD @ far_BD.T / temperature
    is_same_BB = (molecule_B[:, None] == molecule_B) & (molecule_B != 0)
    is_same_BB = is_same_BB & ~torch.eye(len(molecule_B), dtype=torch.bool, device=molecule_B.device)
    logit_BC = torch.cat([near_BB.masked_fill(is_same_BB, -torch.inf), far_BB], 1)
    return (logit_BC.logsumexp(1) - near_BB.diagonal()).sum()
