"""Sets of keys as sorted pairs of numbers: 16 bytes a key, and looked up a million at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.keys import KEY_BYTES
from pipeline.store.index import ranges

if TYPE_CHECKING:
    import numpy.typing as npt

    from pipeline.store.index import Integers

NO_KEYS = np.zeros((0, 2), np.uint64)


def sorted_pairs(keys: bytes | bytearray) -> Integers:
    """Return keys that follow each other as sorted pairs of numbers, each once."""
    if len(keys) % KEY_BYTES:
        raise ValueError(f"a key is {KEY_BYTES} bytes")
    pairs = np.frombuffer(keys, ">u8").reshape(-1, 2).astype("<u8")
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    first = np.ones(len(pairs), bool)
    first[1:] = (pairs[1:] != pairs[:-1]).any(axis=1)
    return pairs if first.all() else pairs[first]


def are_among(hi: Integers, lo: Integers, known_hi: Integers, known_lo: Integers) -> npt.NDArray[np.bool_]:
    """Say of each key whether it is among others, which are sorted; a key is two numbers, in two columns."""
    if not len(known_hi):
        return np.zeros(len(hi), bool)
    left = known_hi.searchsorted(hi, "left")
    at = np.minimum(left, len(known_hi) - 1)
    alike = known_hi[at] == hi
    among: npt.NDArray[np.bool_] = alike & (known_lo[at] == lo)
    rest = np.flatnonzero(alike & ~among)  # a million keys of one recipe share their first number now and then
    counts = known_hi.searchsorted(hi[rest], "right") - left[rest]
    asked, found = rest.repeat(counts), ranges(left[rest], counts)
    among[asked[known_lo[found] == lo[asked]]] = True
    return among
