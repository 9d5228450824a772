"""Spectra drawn on a grid, each peak a Gaussian, and how alike two of them are; and noise that is added to spectra.

Drawn as it is written down, every peak at every bin is a table (batch, peaks, bins): 223 MB for 48 items of 58 peaks
and 20,000 bins, and several such tables are alive at once. With a `reach`, a Gaussian is 0 beyond so many sigmas (10⁻¹⁴
of its height at 8): a peak has 9 bins, not 20,000, and numbers and gradients are the same.

Noise is added as pepTRM's curricula do it, drawn for an item by its own random numbers.

Shapes: B items, P peaks, G bins of the grid, W bins near a peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

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
    cosine_B: Tensor = both_B / (own_B * other_B).clamp(min=NOTHING).sqrt()
    return cosine_B


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
