"""The losses of a recursive model of peptides: letters of every answer, spectrum and mass of the last one; and noise.

All are sums over items. The last answer's letters have expected masses, by their probabilities; from those come
fragments, which are compared with the observed peaks by coverage or drawn on a grid, and the mass of the peptide.

Drawn as it is written down, every peak at every bin is a table (batch, peaks, bins): 223 MB for 48 items of 58 peaks
and 20,000 bins, and several such tables are alive at once. With a `reach`, a Gaussian is 0 beyond so many sigmas (10⁻¹⁴
of its height at 8): a peak has 9 bins, not 20,000, and numbers and gradients are the same.

Noise is added as pepTRM's curricula do it, drawn for an item by its own random numbers.

Shapes: B items, P peaks, G bins of the grid, W bins near a peak, L places, F fragments, V letters, T answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from pipeline.tasks.peptides.found_peptides import PAD

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pipeline.tasks.peptides.found_peptides import Vocabulary
    from pipeline.tasks.peptides.recursive_network import SpectrumInput


NOTHING = 1e-12  # an empty spectrum is like no other, and nothing is divided by 0


class DrawnPeaks(NamedTuple):
    """The peaks of spectra; where there is none, its height is 0."""

    mz_BP: Tensor
    height_BP: Tensor


@dataclass(frozen=True, slots=True)
class Grid:
    """The m/z bins that spectra are drawn on, and the width of the drawn peaks."""

    bin_size: float
    max_mz: float
    sigma: float  # of every peak
    reach: float = 0.0  # sigmas at which a Gaussian ends; 0: it reaches every bin

    @property
    def bins(self) -> int:
        return max(1, round(self.max_mz / self.bin_size))


def similarity(predicted: DrawnPeaks, observed: DrawnPeaks, grid: Grid) -> Tensor:
    """Return the cosine between two spectra of each item [B]: 1 where they are alike, 0 where one is empty."""
    drawn = _near if grid.reach else _everywhere
    own_BG, other_BG = drawn(predicted, grid), drawn(observed, grid)
    both_B, own_B, other_B = (own_BG * other_BG).sum(1), (own_BG * own_BG).sum(1), (other_BG * other_BG).sum(1)
    return both_B / (own_B * other_B).clamp(min=NOTHING).sqrt()


def _everywhere(peaks: DrawnPeaks, grid: Grid) -> Tensor:
    """Return the spectra at all bins, each the sum of all peaks there."""
    bins_G = grid.bin_size * torch.arange(grid.bins, device=peaks.mz_BP.device, dtype=peaks.mz_BP.dtype)
    drawn_BPG = _gaussians(peaks.mz_BP.unsqueeze(-1) - bins_G, grid)
    return (peaks.height_BP.unsqueeze(1) @ drawn_BPG).squeeze(1)


def _near(peaks: DrawnPeaks, grid: Grid) -> Tensor:
    """Return the spectra at all bins, drawing each peak only at the bins near it."""
    reach = ceil(grid.reach * grid.sigma / grid.bin_size)
    steps_W = torch.arange(-reach, reach + 1, device=peaks.mz_BP.device)
    place_BPW = (peaks.mz_BP.detach() / grid.bin_size).round().long().unsqueeze(-1) + steps_W
    apart_BPW = peaks.mz_BP.unsqueeze(-1) - grid.bin_size * place_BPW.to(peaks.mz_BP.dtype)
    is_on_grid_BPW = (place_BPW >= 0) & (place_BPW < grid.bins)
    height_BPW = _gaussians(apart_BPW, grid) * (peaks.height_BP.unsqueeze(-1) * is_on_grid_BPW)
    drawn_BG = height_BPW.new_zeros(len(height_BPW), grid.bins)
    return drawn_BG.scatter_add(1, place_BPW.clamp(0, grid.bins - 1).flatten(1), height_BPW.flatten(1))


def _gaussians(apart: Tensor, grid: Grid) -> Tensor:
    """Return the height of a Gaussian peak at a distance from its middle."""
    return (-0.5 * (apart / grid.sigma).square()).exp()


LOWEST, HIGHEST = 0.01, 0.3  # intensities of noise
PER_MILLION = 1e-6


@dataclass(frozen=True)
class SpectrumNoise:
    """Noise added to spectra wherever they are read; options of the task, which train.evaluate.options may set to 0."""

    noise_peaks: int = 0  # at most
    peak_dropout: float = 0.0  # share of peaks that are lost
    mass_error_ppm: float = 0.0  # standard deviation
    intensity_variation: float = 0.0  # standard deviation of the logarithm
    clean_share: float = 0.0  # of spectra without noise

    def with_noise(self, mz_P: Tensor, intensity_P: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return a spectrum with noise, in order of m/z; at least one of its peaks is kept."""
        is_any = self.noise_peaks or self.peak_dropout or self.mass_error_ppm or self.intensity_variation
        if not is_any or not len(mz_P) or rng.random() < self.clean_share:
            return mz_P, intensity_P
        mz, high = mz_P.double().numpy(), intensity_P.double().numpy()
        kept = rng.random(len(mz)) >= self.peak_dropout
        kept[int(np.argmax(high))] = True
        mz = mz[kept] * (1 + PER_MILLION * self.mass_error_ppm * rng.standard_normal(kept.sum()))
        high = high[kept] * np.exp(self.intensity_variation * rng.standard_normal(kept.sum()))
        more = int(rng.integers(self.noise_peaks, endpoint=True))
        mz = np.concatenate([mz, rng.uniform(mz.min(), mz.max(), more)])
        high = np.concatenate([high, high.max() * rng.uniform(LOWEST, HIGHEST, more)])
        order = np.argsort(mz, kind="stable")
        return torch.from_numpy(mz[order]).to(mz_P.dtype), torch.from_numpy(high[order]).to(intensity_P.dtype)


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
    """Return an answer's expected masses at the places of the true peptide."""
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
    return 1 - (near_BPF.max(2).values * share_BP).sum(1)


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
