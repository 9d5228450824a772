"""What is nearest to what, among the vectors of a split: places of true pairs, and lists of the nearest.

Two blocks of items and their cosines are held at a time. Shapes: N items of a split, K and M items of two blocks, D
features, T nearest ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Counts = NDArray[np.int64]

BLOCK = 2048  # items whose embeddings are held at once, twice
ALIKE = 1e-6  # cosines no further apart are ties


def found_at(most: int, nearer_N: Counts, tied_N: Counts) -> float:
    """Return how often a true one is among the nearest so many; among ties every place is equally likely."""
    return float(np.clip((most - nearer_N) / (1 + tied_N), 0, 1).mean())


def pair_places(left: Sequence[Any], right: Sequence[Any]) -> list[tuple[Counts, Counts]]:
    """Count for each left the other rights that are nearer than its own, and the ties; likewise for each right.

    NaN counts as nearer than anything.
    """
    pairs = zip(_blocks(left), _blocks(right), strict=True)
    own_N = np.concatenate([(left_KD * right_KD).sum(1) for (_, left_KD), (_, right_KD) in pairs])
    ways = [(np.zeros(len(own_N), np.int64), np.zeros(len(own_N), np.int64)) for _ in range(2)]
    for rows, left_KD in _blocks(left):
        for columns, right_MD in _blocks(right):
            cosine_KM = left_KD @ right_MD.T
            if rows == columns:
                np.fill_diagonal(cosine_KM, -np.inf)  # an item's own other side is not counted
            _count(ways[0], rows, cosine_KM, own_N[rows])
            _count(ways[1], columns, cosine_KM.T, own_N[columns])
    return ways


def _count(way: tuple[Counts, Counts], rows: slice, cosine_KM: Floats, own_K: Floats) -> None:
    """Add a block's counts: items nearer than the own other side, and ties."""
    above_KM = cosine_KM - own_K[:, None]
    is_below_KM = above_KM < -ALIKE
    is_tied_KM = np.abs(above_KM) <= ALIKE
    is_other_KM = cosine_KM != -np.inf
    way[0][rows] += (~is_below_KM & ~is_tied_KM & is_other_KM).sum(1)
    way[1][rows] += is_tied_KM.sum(1)


def nearest_sides(left: Sequence[Any], right: Sequence[Any], most: int) -> Iterator[tuple[Counts, Floats]]:
    """Yield for each left the numbers and cosines of the nearest rights [T], the nearest first."""
    for _, left_KD in _blocks(left):
        best_KT = np.full((len(left_KD), 0), -np.inf, np.float32)
        number_KT = np.zeros((len(left_KD), 0), np.int64)
        for columns, right_MD in _blocks(right):
            cosine_KM = np.concatenate([best_KT, np.nan_to_num(left_KD @ right_MD.T, nan=-np.inf)], 1)
            own_M = np.arange(columns.start, columns.stop)
            number_KM = np.concatenate([number_KT, np.broadcast_to(own_M, (len(left_KD), len(own_M)))], 1)
            order_KT = np.argsort(-cosine_KM, 1, kind="stable")[:, :most]
            best_KT, number_KT = (np.take_along_axis(table, order_KT, 1) for table in (cosine_KM, number_KM))
        yield from zip(number_KT, best_KT, strict=True)


def _blocks(vectors: Sequence[Any]) -> Iterator[tuple[slice, Floats]]:
    """Yield the vectors in blocks of items, each with its slice."""
    for start in range(0, len(vectors), BLOCK):
        rows = slice(start, min(start + BLOCK, len(vectors)))
        yield rows, np.stack([np.asarray(vectors[place], np.float32) for place in range(rows.start, rows.stop)])
