"""Noise on the move of a rigid body: schedules, the isotropic Gaussian on rotations (IGSO(3)), draws and the loss.

One time t in [0, 1] says how much noise there is. The density of a rotation by an angle is a series; tables hold it for
many widths, with what it takes to draw angles and to know the score, the derivative of its logarithm by the angle.

Shapes: W widths (rows of the tables), A angles, T terms of the series, B items.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

WIDTHS, ANGLES, SERIES = 1000, 2000, 2000
NARROWEST, WIDEST = 0.01, 2.0  # radians


Time = TypeVar("Time", float, "Tensor")


@dataclass(frozen=True)
class Spread:
    """Standard deviations by time, on a logarithmic scale."""

    least: float
    most: float
    variance: float = 1.0  # along an axis, in units of sigma squared

    def sigma(self, time: Time) -> Time:
        """Return the standard deviation, or what it is called by."""
        sigma: Time = self.least ** (1 - time) * self.most**time
        return sigma

    def rate(self, time: Time) -> Time:
        """Return the diffusion coefficient, whose square is the growth of the variance."""
        return self.sigma(time) * math.sqrt(2 * self.variance * math.log(self.most / self.least))


@dataclass(frozen=True)
class NoiseSchedule:
    """How far noise moves a ligand: Å, and radians."""

    translation: Spread = Spread(0.01, 30.0)
    rotation: Spread = Spread(0.01, 1.65, variance=2.0)


class RotationTables(NamedTuple):
    """IGSO(3) by width and angle."""

    widths_W: NDArray[np.float64]
    angles_A: NDArray[np.float64]
    density_WA: NDArray[np.float64]  # of the angle
    cumulative_WA: NDArray[np.float64]
    score_WA: NDArray[np.float64]  # derivative by the angle of the logarithm of the density on rotations
    norms_W: NDArray[np.float64]  # root of the mean square score, over the square root of π

    def angle(self, row: int, share: float) -> float:
        """Return the angle below which this share of the rotations is."""
        return float(np.interp(share, self.cumulative_WA[row], self.angles_A))

    def score(self, row: int, angle: float) -> float:
        """Return the score along the axis of a rotation by an angle."""
        return float(np.interp(angle, self.angles_A, self.score_WA[row]))


def table_rows(sigma: Tensor, *, as_published: bool) -> Tensor:
    """Return the rows of widths. Published rows are counted by one step too many: up to one row too wide."""
    place = (sigma.double().log10() - math.log10(NARROWEST)) / (math.log10(WIDEST) - math.log10(NARROWEST))
    return (place * (WIDTHS - (not as_published))).round().clamp(0, WIDTHS - 1).long()


def rotation_tables() -> RotationTables:
    """Compute the tables, in a second or two; they are 50 MB."""
    widths_W = 10 ** np.linspace(math.log10(NARROWEST), math.log10(WIDEST), WIDTHS)
    angles_A = np.linspace(0, np.pi, ANGLES + 1)[1:]
    degree_T = np.arange(SERIES, dtype=np.float64)
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


class RigidNoise(NamedTuple):
    """How a ligand was moved, turned about its centre and then shifted, and the scores of that."""

    time: float
    translation_3: NDArray[np.float64]  # Å
    rotation_3: NDArray[np.float64]  # an axis times radians
    translation_score_3: NDArray[np.float64]
    rotation_score_3: NDArray[np.float64]


class RigidDraw(NamedTuple):
    """The random numbers behind a noise."""

    translation_3: NDArray[np.float64]  # normal
    axis_3: NDArray[np.float64]  # of length 1
    share: float  # of rotations by smaller angles, in [0, 1)


def rigid_draw(rng: np.random.Generator) -> RigidDraw:
    """Draw an item's numbers from its own generator."""
    translation_3, axis_3 = rng.standard_normal(3), rng.standard_normal(3)
    return RigidDraw(translation_3, axis_3 / np.linalg.norm(axis_3), rng.random())


def rigid_noise(
    time: float, draw: RigidDraw, schedule: NoiseSchedule, tables: RotationTables, *, as_published: bool
) -> RigidNoise:
    """Return the noise that some random numbers make at a time."""
    sigma = schedule.translation.sigma(time)
    row = int(table_rows(torch.tensor(schedule.rotation.sigma(time)), as_published=as_published))
    angle = tables.angle(row, draw.share)
    return RigidNoise(
        time=time,
        translation_3=sigma * draw.translation_3,
        rotation_3=angle * draw.axis_3,
        translation_score_3=-draw.translation_3 / sigma,
        rotation_score_3=tables.score(row, angle) * draw.axis_3,
    )


def score_errors(found_B3: Tensor, true_B3: Tensor, unit_B: Tensor) -> Tensor:
    """Return mean square errors in units of the scores' size [B]; the loss is half translations', half rotations'.

    The unit of translations is 1 / sigma, that of rotations the norm of their scores and a little.
    """
    return ((found_B3 - true_B3) / unit_B.unsqueeze(-1)).square().mean(-1)
