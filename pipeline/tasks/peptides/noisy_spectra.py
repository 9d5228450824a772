"""Noise that spectra are trained with, as pepTRM's curricula add it: drawn for an item by its own random numbers.

Shapes: P peaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

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
