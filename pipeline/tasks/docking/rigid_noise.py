"""Noise on the move of a rigid body: schedules, and the isotropic Gaussian on rotations (IGSO(3)) as tables.

One time t in [0, 1] says how much noise there is. The density of a rotation by an angle is a series; tables hold it for
many widths, with what it takes to draw angles and to know the score, the derivative of its logarithm by the angle.

Shapes: W widths (rows of the tables), A angles, T terms of the series.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

WIDTHS, ANGLES, TERMS = 1000, 2000, 2000
NARROWEST, WIDEST = 0.01, 2.0  # radians


@dataclass(frozen=True)
class NoiseSchedule:
    """Standard deviations by time, on a logarithmic scale: Å for translations, radians for rotations."""

    translation_least: float = 0.01
    translation_most: float = 30.0
    rotation_least: float = 0.01
    rotation_most: float = 1.65

    def translation_sigma(self, time: Tensor) -> Tensor:
        """Return the standard deviation of translations along each axis."""
        return self.translation_least ** (1 - time) * self.translation_most**time

    def rotation_sigma(self, time: Tensor) -> Tensor:
        """Return the width of rotations."""
        return self.rotation_least ** (1 - time) * self.rotation_most**time

    def translation_rate(self, time: Tensor) -> Tensor:
        """Return the diffusion coefficient of translations."""
        return self.translation_sigma(time) * math.sqrt(2 * math.log(self.translation_most / self.translation_least))

    def rotation_rate(self, time: Tensor) -> Tensor:
        """Return the diffusion coefficient of rotations, of which the variance along an axis is twice sigma squared."""
        return 2 * self.rotation_sigma(time) * math.sqrt(math.log(self.rotation_most / self.rotation_least))


class RotationTables(NamedTuple):
    """IGSO(3) by width and angle."""

    widths_W: NDArray[np.float64]
    angles_A: NDArray[np.float64]
    density_WA: NDArray[np.float64]  # of the angle
    cumulative_WA: NDArray[np.float64]
    score_WA: NDArray[np.float64]  # derivative by the angle of the logarithm of the density on rotations
    norms_W: NDArray[np.float64]  # root of the mean square score, over the square root of π

    def angle(self, row: int, uniform: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the angle below which this share of the rotations is."""
        return np.interp(uniform, self.cumulative_WA[row], self.angles_A)

    def score(self, row: int, angle: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the score along the axis of a rotation by an angle."""
        return np.interp(angle, self.angles_A, self.score_WA[row])


def table_rows(sigma: Tensor, *, as_published: bool) -> Tensor:
    """Return the rows of widths. Published rows are counted by one step too many: up to one row too wide."""
    place = (sigma.double().log10() - math.log10(NARROWEST)) / (math.log10(WIDEST) - math.log10(NARROWEST))
    return (place * (WIDTHS - (not as_published))).round().clamp(0, WIDTHS - 1).long()


def rotation_tables() -> RotationTables:
    """Compute the tables, in a second or two; they are 50 MB."""
    widths_W = 10 ** np.linspace(math.log10(NARROWEST), math.log10(WIDEST), WIDTHS)
    angles_A = np.linspace(0, np.pi, ANGLES + 1)[1:]
    degree_T = np.arange(TERMS, dtype=np.float64)
    decay_WT = (2 * degree_T + 1) * np.exp(-degree_T * (degree_T + 1) * widths_W[:, None] ** 2)
    half_A, turn_TA = angles_A / 2, (degree_T[:, None] + 0.5) * angles_A
    low_A = np.sin(half_A)
    rise_WA = decay_WT @ np.sin(turn_TA)
    slope_WA = decay_WT @ ((degree_T[:, None] + 0.5) * np.cos(turn_TA)) / low_A
    slope_WA -= rise_WA * (0.5 * np.cos(half_A) / low_A**2)
    score_WA = slope_WA / (rise_WA / low_A)
    density_WA = rise_WA / low_A * (1 - np.cos(angles_A)) / np.pi
    return RotationTables(
        widths_W=widths_W,
        angles_A=angles_A,
        density_WA=density_WA,
        cumulative_WA=density_WA.cumsum(1) / ANGLES * np.pi,
        score_WA=score_WA,
        norms_W=np.sqrt((score_WA**2 * density_WA).sum(1) / density_WA.sum(1) / np.pi),
    )
