"""Spectra drawn on a grid, each peak a Gaussian, and how alike two of them are; and noise that is added to spectra.

Drawn as it is written down, every peak at every bin is a table (batch, peaks, bins): 223 MB for 48 items of 58 peaks
and 20,000 bins, and several such tables are alive at once. There are three ways to the same numbers and gradients:

- near bins only: a Gaussian is 0 beyond some sigmas (10⁻¹⁴ of its height at 8), so that a peak has 9 bins, not 20,000;
- all bins, some at a time: each chunk is computed again in backward, and only sums over its bins are kept;
- all bins at once.

Noise is added as pepTRM's curricula do it, drawn for an item by its own random numbers.

Shapes: B items, P peaks, G bins of the grid, W bins near a peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

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
    chunk: int = 0  # bins at a time, where every peak reaches all of them; 0: all at once

    @property
    def bins(self) -> int:
        return max(1, round(self.max_mz / self.bin_size))


def similarity(predicted: DrawnPeaks, observed: DrawnPeaks, grid: Grid) -> Tensor:
    """Return the cosine between two spectra of each item [B]: 1 where they are alike, 0 where one is empty."""
    if grid.reach:
        products_3B = _products(_near(predicted, grid), _near(observed, grid))
    elif grid.chunk:
        products_3B = _chunked(predicted, observed, grid)
    else:
        products_3B = _between(predicted, observed, grid, 0, grid.bins)
    both_B, own_B, other_B = products_3B
    cosine_B: Tensor = both_B / (own_B * other_B).clamp(min=NOTHING).sqrt()
    return cosine_B


def _chunked(predicted: DrawnPeaks, observed: DrawnPeaks, grid: Grid) -> Tensor:
    """Return the products of two spectra, chunk by chunk; backward draws each chunk again."""
    products_3B = predicted.mz_BP.new_zeros(3, len(predicted.mz_BP))
    for first in range(0, grid.bins, grid.chunk):
        bounds = first, min(first + grid.chunk, grid.bins)
        part_3B = checkpoint(
            _between, predicted, observed, grid, *bounds, use_reentrant=False, preserve_rng_state=False
        )  # nothing is drawn from random numbers
        products_3B = products_3B + part_3B
    return products_3B


def _between(predicted: DrawnPeaks, observed: DrawnPeaks, grid: Grid, first: int, last: int) -> Tensor:
    """Return the products of two spectra over some bins."""
    return _products(_at(predicted, grid, first, last), _at(observed, grid, first, last))


def _products(drawn_BG: Tensor, other_BG: Tensor) -> Tensor:
    """Return the three dot products of a cosine similarity [3, B]: of the two, and of each with itself."""
    pairs = (drawn_BG, other_BG), (drawn_BG, drawn_BG), (other_BG, other_BG)
    return torch.stack([(left_BG * right_BG).sum(1) for left_BG, right_BG in pairs])


def _at(peaks: DrawnPeaks, grid: Grid, first: int, last: int) -> Tensor:
    """Return the spectra at some bins, each the sum of all peaks there."""
    bins_G = grid.bin_size * torch.arange(first, last, device=peaks.mz_BP.device, dtype=peaks.mz_BP.dtype)
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
    """How much is done to a spectrum."""

    peaks: int = 0  # of noise, at most
    dropout: float = 0.0  # share of peaks that are lost
    mass_error_ppm: float = 0.0  # standard deviation
    intensity_variation: float = 0.0  # standard deviation of the logarithm
    clean: float = 0.0  # share of spectra to which nothing is done

    @property
    def is_none(self) -> bool:
        return not (self.peaks or self.dropout or self.mass_error_ppm or self.intensity_variation)

    def added(self, mz_P: Tensor, intensity_P: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return a spectrum with noise, in order of m/z; at least one of its peaks is kept."""
        if self.is_none or not len(mz_P) or rng.random() < self.clean:
            return mz_P, intensity_P
        mz, high = mz_P.double().numpy(), intensity_P.double().numpy()
        kept = rng.random(len(mz)) >= self.dropout
        kept[int(np.argmax(high))] = True
        mz = mz[kept] * (1 + PER_MILLION * self.mass_error_ppm * rng.standard_normal(kept.sum()))
        high = high[kept] * np.exp(self.intensity_variation * rng.standard_normal(kept.sum()))
        more = int(rng.integers(self.peaks, endpoint=True))
        mz = np.concatenate([mz, rng.uniform(mz.min(), mz.max(), more)])
        high = np.concatenate([high, high.max() * rng.uniform(LOWEST, HIGHEST, more)])
        order = np.argsort(mz, kind="stable")
        return torch.from_numpy(mz[order]).to(mz_P.dtype), torch.from_numpy(high[order]).to(intensity_P.dtype)
