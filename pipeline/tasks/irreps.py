"""Irreps: blocks of equivariant channels, paths of tensor products with harmonics, and e3nn's constants.

Shapes: D components of an irrep.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

DEGREES = (0, 1, 2)
DIRECTIONS = 8  # harmonics of degree 1 and 2
KEPT = ((1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (2, 2, 2))  # e3nn stores no constants for the other symbols


class Irrep(NamedTuple):
    """Channels of one irrep: scalars (degree 0), vectors (1) or tensors (2), even or odd under reflection."""

    channels: int
    degree: int
    parity: int  # 1 or -1

    @property
    def components(self) -> int:
        return 2 * self.degree + 1


class ProductPath(NamedTuple):
    """One way through a tensor product: block in × harmonics of a degree → block out, and its part of the weights."""

    source: int
    harmonic: int
    target: int
    degrees: tuple[int, int, int]
    first: int  # of its weights, which are laid out [channel in, channel out]
    weights: int
    scale: float


def product_paths(enter: Sequence[Irrep], leave: Sequence[Irrep]) -> tuple[ProductPath, ...]:
    """Return the paths of the full tensor product with harmonics of degrees 0 to 2, in the order of their weights."""
    found = [
        (source, harmonic, target)
        for source, block in enumerate(enter)
        for harmonic in DEGREES
        for target, result in enumerate(leave)
        if block.channels and result.channels and block.parity * (-1) ** harmonic == result.parity
        and abs(block.degree - harmonic) <= result.degree <= block.degree + harmonic
    ]  # fmt: skip
    paths, first = [], 0
    for source, harmonic, target in found:
        block, result = enter[source], leave[target]
        fan_in = sum(enter[other].channels for other, _, into in found if into == target)
        degrees, weights = (block.degree, harmonic, result.degree), block.channels * result.channels
        scale = math.sqrt(result.components / fan_in)
        paths.append(ProductPath(source, harmonic, target, degrees, first, weights, scale))
        first += weights
    return tuple(paths)


def harmonics(way_3: Tensor) -> Tensor:
    """Return harmonics of vectors' directions [..., 8]; all are 0 where a vector is.

    Degree 1 is the unit vector; degree 2 is its outer product without the trace, in five numbers.
    """
    x, y, z = functional.normalize(way_3, dim=-1).unbind(-1)
    trace = (x * x + y * y + z * z) / 3
    return torch.stack([x, y, z, x * z, x * y, y * y - trace, y * z, (z * z - x * x) / 2], -1)


@cache
def coupling(left: int, right: int, out: int) -> NDArray[np.float64]:
    """Return the real 3j symbol of three degrees [D, D, D]: which is invariant under rotation.

    Degree 2 is written as symmetric matrices without a trace: two of them and a vector, or three, make one number. It
    is an array, because a cached tensor would stay on the device of the first call.
    """
    if 0 in (left, right, out):
        degree = max(left, right, out)
        one_DD = np.eye(2 * degree + 1) / math.sqrt(2 * degree + 1)
        return one_DD.reshape([2 * part + 1 for part in (left, right, out)])
    if (left, right, out) == (1, 1, 1):
        return np.cross(np.eye(3)[:, None], np.eye(3)[None]) / math.sqrt(6) + 0.0  # + 0.0: no 0 is negative
    matrices_533 = _matrices()
    if (left, right, out) == (2, 2, 2):
        symbol = np.einsum("iab,jbc,kca->ijk", matrices_533, matrices_533, matrices_533)
        # Squares are whole seventieths: so each root alone is rounded, not a sum
        shares = np.square(symbol / np.linalg.norm(symbol)) * 70
        exact: NDArray[np.float64] = np.sign(symbol) * np.sqrt(shares.round() / 70) + 0.0
        return exact
    symbol = np.moveaxis(matrices_533, 0, (left, right, out).index(2))
    return symbol / np.linalg.norm(symbol)


def _matrices() -> NDArray[np.float64]:
    """Return the five matrices of xz, xy, 2y² − x² − z², yz and z² − x², each of norm 1."""
    matrices_533 = np.zeros((5, 3, 3))
    for place, (row, column) in zip((0, 1, 3), ((0, 2), (0, 1), (1, 2)), strict=True):
        matrices_533[place, row, column] = matrices_533[place, column, row] = math.sqrt(1 / 2)
    matrices_533[2] = np.diag([-1, 2, -1]) / math.sqrt(6)
    matrices_533[4] = np.diag([-1, 0, 1]) / math.sqrt(2)
    return matrices_533


def product_constants(place: str, paths: Sequence[ProductPath], leave: Sequence[Irrep]) -> dict[str, Tensor]:
    """Return the constants of a tensor product in e3nn's state of a model."""
    width = sum(block.channels * block.components for block in leave)
    symbols = {path.degrees for path in paths} & set(KEPT)
    return no_weights(place, torch.ones(width)) | {
        f"{place}._compiled_main_left_right._w3j_{'_'.join(map(str, degrees))}": torch.tensor(
            coupling(*degrees), dtype=torch.float32
        )
        for degrees in symbols
    }


def no_weights(place: str, mask: Tensor, empty: str = "weight") -> dict[str, Tensor]:
    """Return the entries in e3nn's state of an operation without weights of its own."""
    return {f"{place}.{empty}": torch.empty(0), f"{place}.output_mask": mask}
