"""What a recursive model of peptides learns by: the letters of every answer, and the spectrum and mass of the last one.

All are sums over items. The last answer's letters have expected masses, by their probabilities; from those come
fragments, which are compared with the observed peaks in one of two ways, and the mass of the peptide.

Shapes: B items, P peaks, L places, F fragments, V letters, T answers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from pipeline.tasks.peptides.drawn_spectra import DrawnPeaks, Grid, similarity
from pipeline.tasks.peptides.vocabulary import PAD

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pipeline.tasks.peptides.recursive_network import SpectrumInput
    from pipeline.tasks.peptides.vocabulary import Vocabulary

LINEAR, UNIFORM, EXPONENTIAL = ANSWER_WEIGHTS = ("linear", "uniform", "exponential")
COVERAGE, DRAWN = SPECTRUM_LOSSES = ("coverage", "drawn")
SMOOTH, ABSOLUTE = PRECURSOR_LOSSES = ("smooth", "absolute")
NEAR = 0.2  # standard deviation, in m/z, of how near an ion is to a peak that it covers
OF_A_RESIDUE = 110.0  # Da; the smooth loss of the mass is in residues
BEND = 0.1  # residues, below which that loss is a square
OF_A_DALTON = 0.004  # the absolute loss of the mass


class ExpectedPeptide(NamedTuple):
    """The expected masses of an answer's residues, 0 where there is none, and between which of them it breaks."""

    mass_BL: Tensor
    is_break_BF: Tensor  # behind each residue but the last


def answer_weights(kind: str, answers: int) -> list[float]:
    """Return how much each answer's letters weigh, 1 in all."""
    shapes: dict[str, Callable[[int], float]] = {
        LINEAR: float,
        UNIFORM: lambda _: 1.0,
        EXPONENTIAL: lambda place: math.exp(place / 2),
    }
    weights = [shapes[kind](place) for place in range(1, answers + 1)]
    return [weight / sum(weights) for weight in weights]


def letters_loss(logits_TBLV: Tensor, letter_BL: Tensor, weights: list[float], smoothing: float) -> Tensor:
    """Return the cross entropy of the letters that are known, the weighted mean over answers."""
    totals_T = [
        functional.cross_entropy(
            logits_BLV.flatten(0, 1), letter_BL.flatten(), ignore_index=PAD, label_smoothing=smoothing, reduction="sum"
        )
        for logits_BLV in logits_TBLV
    ]
    return sum((weight * total for weight, total in zip(weights, totals_T, strict=True)), totals_T[0].new_zeros(()))


def expected_peptide(
    logits_BLV: Tensor, masses_V: Tensor, residues_B: Tensor, has_terminal_B: Tensor
) -> ExpectedPeptide:
    """Return what an answer is expected to weigh at the places of the true peptide."""
    place_L = torch.arange(logits_BLV.shape[1], device=logits_BLV.device)
    mass_BL = (logits_BLV.softmax(-1) @ masses_V) * (place_L < residues_B.unsqueeze(1))
    is_break_BF = place_L[1:] < residues_B.unsqueeze(1)
    is_break_BF = is_break_BF & ~(has_terminal_B.unsqueeze(1) & (place_L[1:] == 1))  # nothing breaks off a change
    return ExpectedPeptide(mass_BL, is_break_BF)


def published_peptide(expected: ExpectedPeptide) -> ExpectedPeptide:
    """Return the peptide as pepTRM breaks it: without the first and the last place, at every place that is left."""
    mass_BL = expected.mass_BL[:, 1:-1]
    return ExpectedPeptide(mass_BL, torch.ones_like(mass_BL[:, 1:], dtype=torch.bool))


def fragments(expected: ExpectedPeptide, charges: int, vocabulary: Vocabulary) -> DrawnPeaks:
    """Return the b ions, then the y ions, then those of each further charge."""
    prefix_BF = expected.mass_BL.cumsum(1)[:, :-1]
    suffix_BF = expected.mass_BL.sum(1, keepdim=True) - prefix_BF + vocabulary.water
    neutral_BF = torch.cat([prefix_BF, suffix_BF], 1)
    mz_BF = torch.cat([neutral_BF / charge + vocabulary.proton for charge in range(1, charges + 1)], 1)
    return DrawnPeaks(mz_BF, expected.is_break_BF.to(mz_BF.dtype).repeat(1, 2 * charges))


def coverage_loss(ions: DrawnPeaks, spectra: SpectrumInput) -> Tensor:
    """Return 1 - the share of each item's intensity that is near an ion [B]."""
    apart_BPF = (spectra.mz_BP.unsqueeze(2) - ions.mz_BP.unsqueeze(1)) / NEAR
    near_BPF = (-0.5 * apart_BPF.square()).exp() * ions.height_BP.unsqueeze(1)
    share_BP = spectra.intensity_BP / spectra.intensity_BP.sum(1, keepdim=True).clamp(
        min=torch.finfo(torch.float32).tiny
    )
    loss_B: Tensor = 1 - (near_BPF.max(2).values * share_BP).sum(1)
    return loss_B


def drawn_loss(ions: DrawnPeaks, spectra: SpectrumInput, grid: Grid) -> Tensor:
    """Return 1 - the cosine between the drawn ions and the drawn peaks of each item [B]."""
    return 1 - similarity(ions, DrawnPeaks(spectra.mz_BP, spectra.intensity_BP), grid)


def mass_loss(expected: ExpectedPeptide, mass_B: Tensor, kind: str, vocabulary: Vocabulary) -> Tensor:
    """Return how far each peptide's expected mass is from the precursor's [B]."""
    off_B = expected.mass_BL.sum(1) + vocabulary.water - mass_B
    if kind == ABSOLUTE:
        return OF_A_DALTON * off_B.abs()
    in_residues_B = off_B / OF_A_RESIDUE
    return functional.smooth_l1_loss(in_residues_B, torch.zeros_like(in_residues_B), beta=BEND, reduction="none")
