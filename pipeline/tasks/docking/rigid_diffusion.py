"""The diffusion of a rigid body's move: its noise, and poses from noise.

Noise: schedules, the isotropic Gaussian on rotations (IGSO(3)), draws and the loss. One time t in [0, 1] says how much
noise there is. The density of a rotation by an angle is a series; tables hold it for many widths, with what it takes to
draw angles and to know the score, the derivative of its logarithm by the angle.

Poses: where a ligand starts, the steps of the reverse diffusion, and how far poses are from the truth. Everything is a
function of its arguments: all that is random was drawn before, for each pose from its own generator.

Shapes: W widths (rows of the tables), A angles, T terms of the series, B items; P poses, L residues of the ligand, R of
the receptor, S steps, I pairs in contact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
        """Return the standard deviation at a time."""
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


@cache
def rotation_tables() -> RotationTables:
    """Compute the tables, in a second or two, once a process; they are 50 MB."""
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


RigidDraw: TypeAlias = "tuple[NDArray[np.float64], NDArray[np.float64], float]"


def rigid_draw(rng: np.random.Generator) -> RigidDraw:
    """Draw a normal shift, an axis of length 1, and the share of rotations by smaller angles, in [0, 1)."""
    normal_3, axis_3 = rng.standard_normal(3), rng.standard_normal(3)
    return normal_3, axis_3 / np.linalg.norm(axis_3), rng.random()


def rigid_noise(time: float, draw: RigidDraw, schedule: NoiseSchedule, *, as_published: bool) -> RigidNoise:
    """Return the noise that some random numbers make at a time."""
    (normal_3, axis_3, share), tables = draw, rotation_tables()
    sigma = schedule.translation.sigma(time)
    row = int(table_rows(torch.tensor(schedule.rotation.sigma(time)), as_published=as_published))
    angle = tables.angle(row, share)
    return RigidNoise(time, sigma * normal_3, angle * axis_3, -normal_3 / sigma, tables.score(row, angle) * axis_3)


def score_errors(found_B3: Tensor, true_B3: Tensor, unit_B: Tensor) -> Tensor:
    """Return mean square errors in units of the scores' size [B]; the loss is half translations', half rotations'.

    The unit of translations is 1 / sigma, that of rotations the norm of their scores and a little.
    """
    return ((found_B3 - true_B3) / unit_B.unsqueeze(-1)).square().mean(-1)


CONTACT = 8.0  # Å between CA atoms of an interface
RMSDS = ("ligand_rmsd", "complex_rmsd", "interface_rmsd")


@dataclass(frozen=True)
class SamplingSteps:
    """How poses are sampled; the temperature 1 and psi 0 change nothing."""

    steps: int = 20
    ode: bool = False  # follow the probability flow: nothing is drawn after the start
    final_noise: bool = False  # in the last step
    temperature: float = 1.0
    psi: float = 0.0  # how much more noise is added and taken away
    data_translation: float = 0.5  # where the data's own spread is between the least and the most noise
    data_rotation: float = 0.5
    actual_steps: int = 0  # stop after this many steps; 0: do all

    def times(self) -> list[float]:
        """Return the time at which each step that is done begins."""
        return [1 - step / self.steps for step in range(self.actual_steps or self.steps)]


LOW_TEMPERATURE = {"temperature": 2.439, "psi": 0.216, "data_translation": 0.593, "data_rotation": 0.228}  # the paper's


class PoseDraw(NamedTuple):
    """The random numbers of one pose, or of several along a first axis."""

    turn_33: Tensor  # uniform among rotations
    translation_3: Tensor  # normal, as all that follow
    translation_S3: Tensor
    rotation_S3: Tensor


def pose_draw(rng: np.random.Generator, steps: int) -> PoseDraw:
    """Draw a pose's numbers from its own generator."""
    quaternion_4, shift_3, noise_S6 = (torch.from_numpy(rng.standard_normal(size)) for size in (4, 3, (steps, 6)))
    return PoseDraw(quaternion_matrices(quaternion_4), shift_3.float(), *torch.split(noise_S6.float(), 3, 1))


def stacked_draws(draws: Sequence[PoseDraw]) -> PoseDraw:
    """Return the numbers of several poses together."""
    return PoseDraw(*(torch.stack(parts) for parts in zip(*draws, strict=True)))


def quaternion_matrices(quaternion_4: Tensor) -> Tensor:
    """Return the rotations of quaternions of any length [..., 3, 3]."""
    r, i, j, k = functional.normalize(quaternion_4, dim=-1).unbind(-1)
    rows = (
        (1 - 2 * (j * j + k * k), 2 * (i * j - k * r), 2 * (i * k + j * r)),
        (2 * (i * j + k * r), 1 - 2 * (i * i + k * k), 2 * (j * k - i * r)),
        (2 * (i * k - j * r), 2 * (j * k + i * r), 1 - 2 * (i * i + j * j)),
    )
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def turn_matrices(vector_3: Tensor) -> Tensor:
    """Return the rotations about axes by their length in radians [..., 3, 3]."""
    half = vector_3.norm(dim=-1, keepdim=True) / 2
    # sin(x) / x, where x is half the angle, is 1 to the last bit near 0
    return quaternion_matrices(torch.cat([half.cos(), vector_3 / 2 * torch.sinc(half / math.pi)], -1))


def rigidly_moved(pos_PL3: Tensor, rotation_P3: Tensor, translation_P3: Tensor) -> Tensor:
    """Turn ligands about their centres, then shift them."""
    centre_P13 = pos_PL3.mean(1, keepdim=True)
    turn_P33 = turn_matrices(rotation_P3).to(pos_PL3)
    return (pos_PL3 - centre_P13) @ turn_P33.transpose(1, 2) + (centre_P13 + translation_P3.to(pos_PL3).unsqueeze(1))


def start_poses(pos_L3: Tensor, draw: PoseDraw, schedule: NoiseSchedule) -> Tensor:
    """Return a ligand placed at random about the origin, which is the receptor's centre [P, L, 3]."""
    centred_L3 = pos_L3 - pos_L3.mean(0)
    away_P13 = schedule.translation.most * draw.translation_3.to(pos_L3).unsqueeze(1)
    return centred_L3 @ draw.turn_33.to(pos_L3).transpose(1, 2) + away_P13


def sampled_poses(
    score: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    start_PL3: Tensor,
    draw: PoseDraw,
    how: SamplingSteps,
    schedule: NoiseSchedule,
    poses_at_once: int | None = None,
) -> Iterator[Tensor]:
    """Yield the poses after each step; `score` returns the translations and rotations [P, 3] for poses and a time [1].

    A pose is the same to the last bit whatever other poses are moved, if one is moved at once.
    """
    pos_PL3, times = start_PL3, how.times()
    for step, time in enumerate(times):
        is_noisy = not how.ode and (how.final_noise or step < len(times) - 1)
        scores = score(pos_PL3, pos_PL3.new_tensor([time]))
        noises = (draw.translation_S3[:, step], draw.rotation_S3[:, step]) if is_noisy else ()
        move = partial(_moved, time=time, how=how, schedule=schedule)
        pos_PL3 = by_poses(poses_at_once, move, pos_PL3, *scores, *noises)
        yield pos_PL3


def by_poses(poses_at_once: int | None, work: Callable[..., Tensor], *of_poses_P: Tensor) -> Tensor:
    """Apply a function to some poses at a time and join the results; None: to all at once."""
    pieces = zip(*(torch.split(one_P, poses_at_once or len(one_P)) for one_P in of_poses_P), strict=True)
    return torch.cat([work(*piece) for piece in pieces])


def _moved(pos_PL3: Tensor, *vectors_P3: Tensor, time: float, how: SamplingSteps, schedule: NoiseSchedule) -> Tensor:
    """Return poses after a step, from both scores and, unless it has none, the noises."""
    spreads, data = (schedule.translation, schedule.rotation), (how.data_translation, how.data_rotation)
    parts = zip(vectors_P3[:2], vectors_P3[2:] or (None, None), spreads, data, strict=True)
    translation_P3, rotation_P3 = (_step_move(*part, time, how) for part in parts)
    return rigidly_moved(pos_PL3, rotation_P3, translation_P3)


def _step_move(
    score_P3: Tensor, noise_P3: Tensor | None, spread: Spread, data: float, time: float, how: SamplingSteps
) -> Tensor:
    """Return the translations or rotations of a step [P, 3], from their scores and, unless it has none, its noise."""
    sigma, growth = spread.sigma(time), spread.rate(time) ** 2 / how.steps
    if how.ode:
        return growth / 2 * score_P3
    temperature, psi, own = how.temperature, how.psi, spread.sigma(data)
    pull = (own + sigma) / (own + sigma / temperature) + temperature * psi / 2
    move_P3 = growth * pull * score_P3
    return move_P3 if noise_P3 is None else move_P3 + math.sqrt(growth * (1 + psi)) * noise_P3.to(score_P3)


def pose_rmsds(pos_PL3: Tensor, true_L3: Tensor, receptor_R3: Tensor) -> Tensor:
    """Return the RMSDs in Å of poses' CA atoms from the truth, in the receptor's frame [P, 3], as `RMSDS` names them.

    They are of the ligand without superposing; of both partners, superposed; and of residues in contact in the truth,
    superposed, each once for each contact.
    """
    receptor_I, ligand_I = (torch.cdist(receptor_R3, true_L3) < CONTACT).nonzero().unbind(1)
    receptor_PR3 = receptor_R3.expand(len(pos_PL3), -1, -1)
    found_P3, true_3 = torch.cat([receptor_PR3, pos_PL3], 1), torch.cat([receptor_R3, true_L3])
    met_P3 = torch.cat([receptor_PR3[:, receptor_I], pos_PL3[:, ligand_I]], 1)
    met_3 = torch.cat([receptor_R3[receptor_I], true_L3[ligand_I]])
    of_complex_P, of_interface_P = (rmsd(superposed(*pair), pair[1]) for pair in ((found_P3, true_3), (met_P3, met_3)))
    return torch.stack([rmsd(pos_PL3, true_L3), of_complex_P, of_interface_P], -1)


def rmsd(pos_PN3: Tensor, true_N3: Tensor) -> Tensor:
    """Return the root of the mean square distance of poses from positions [P]."""
    return (pos_PN3 - true_N3).square().sum(-1).mean(-1).sqrt()


def superposed(pos_PN3: Tensor, onto_N3: Tensor, moved_PM3: Tensor | None = None) -> Tensor:
    """Move positions as a whole to where they are nearest to others; or move others with them."""
    from_P13, to_3 = pos_PN3.mean(-2, keepdim=True), onto_N3.mean(0)
    moved_PM3 = pos_PN3 if moved_PM3 is None else moved_PM3
    return (moved_PM3 - from_P13) @ nearest_turn(pos_PN3 - from_P13, onto_N3 - to_3) + to_3


def nearest_turn(centred_PN3: Tensor, target_N3: Tensor) -> Tensor:
    """Return the rotation [P, 3, 3], from the right, that brings positions nearest to others of one centre (Kabsch)."""
    left_P33, _, right_P33 = torch.linalg.svd(centred_PN3.transpose(-2, -1) @ target_N3)
    mirror_P = torch.linalg.det(left_P33 @ right_P33).sign()
    signs_P3 = torch.stack([torch.ones_like(mirror_P), torch.ones_like(mirror_P), mirror_P], -1)
    turn_P33: Tensor = left_P33 * signs_P3.unsqueeze(-2) @ right_P33
    return turn_P33


def rigid_moves(file_L3: Tensor, pos_PL3: Tensor, centre_3: Tensor) -> Tensor:
    """Return the moves of a ligand from its place in its file to poses about a receptor's centre [P, 12], in float64.

    The first nine numbers are a rotation, row by row, and the last three a shift: x → turn · x + shift.
    """
    before_3, after_P3 = file_L3.mean(0), pos_PL3.double().mean(1)
    # the matrix that turns rows back, multiplied from the right, turns the file's columns from the left
    turn_P33 = nearest_turn(pos_PL3.double() - after_P3.unsqueeze(1), file_L3 - before_3)
    shift_P3 = after_P3 + centre_3 - turn_P33 @ before_3
    return torch.cat([turn_P33.flatten(1), shift_P3], 1)
