"""An exact search of vectors: the nearest of some by cosine, with a block of each side in memory at a time.

Shapes: N vectors that are asked for, M among which is looked, B and C of a block, D numbers of one, T the nearest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Places = NDArray[np.int64]

BLOCK = 4096  # vectors at a time, of both sides


class Vectors(Protocol):
    """Vectors of equal length by their place."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: int) -> Any: ...


def unit_rows(vectors: Vectors, places: Sequence[int]) -> Floats:
    """Return some vectors at length 1 [N, D]; one of no length stays."""
    row_ND: Any
    if isinstance(vectors, np.ndarray):
        row_ND = vectors[places[0] : places[-1] + 1] if isinstance(places, range) else vectors[list(places)]
        row_ND = np.asarray(row_ND, np.float32)
    else:
        row_ND = np.stack([np.asarray(vectors[place], np.float32) for place in places])
    length_N1 = np.linalg.norm(row_ND, axis=1, keepdims=True)
    unit_ND: Floats = (row_ND / np.where(length_N1 > 0, length_N1, 1)).astype(np.float32, copy=False)
    return unit_ND


def nearest_vectors(queries: Vectors, library: Vectors, most: int) -> Iterator[tuple[Places, Floats]]:
    """Yield for each query the places of the nearest by cosine, and the cosines [T]: the nearest first.

    Every pair is compared. A cosine with what is no number is the lowest.
    """
    most = min(most, len(library))
    for start in range(0, len(queries), BLOCK):
        query_BD = unit_rows(queries, range(start, min(start + BLOCK, len(queries))))
        place_BT, cosine_BT = np.zeros((len(query_BD), 0), np.int64), np.zeros((len(query_BD), 0), np.float32)
        for first in range(0, len(library), BLOCK):
            block = range(first, min(first + BLOCK, len(library)))
            cosine_BC = np.nan_to_num(query_BD @ unit_rows(library, block).T, nan=-np.inf)
            place_BC = np.tile(np.array(block, np.int64), (len(query_BD), 1))
            place_BC, cosine_BC = np.concatenate([place_BT, place_BC], 1), np.concatenate([cosine_BT, cosine_BC], 1)
            order_BT = np.argsort(-cosine_BC, axis=1, kind="stable")[:, :most]
            place_BT, cosine_BT = (np.take_along_axis(table, order_BT, 1) for table in (place_BC, cosine_BC))
        yield from zip(place_BT, cosine_BT, strict=True)
