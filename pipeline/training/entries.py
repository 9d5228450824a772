"""What a reader may give of an item, how large that is, and the digest by which it is known again."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from pipeline.protocol import ITEMS
from pipeline.training.fields import OF_GRAPHS, Form, parse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Array = NDArray[Any]

NUMBERS = "numbers"  # the size that every item has: how many numbers it is of in all
TAKEN = {ITEMS, NUMBERS, *OF_GRAPHS}
_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*", re.ASCII)
_WIDEST = 8  # bytes of a number


def digest_of(arrays: Mapping[str, Array]) -> bytes:
    """Return the 16-byte digest of arrays: of their names, types, shapes and bytes."""
    digest = xxhash.xxh3_128()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def as_arrays(values: Mapping[str, Any]) -> dict[str, Array]:
    """Return what a reader gave as arrays: a number alone may be one."""
    return {name: np.asarray(value) for name, value in values.items()}


def sizes_of(arrays: Mapping[str, Array]) -> dict[str, int]:
    """Return how many rows an item has along each axis, and how many numbers in all."""
    rows = {parse(name).axis: len(array) for name, array in arrays.items() if parse(name).axis}
    return {NUMBERS: sum(array.size for array in arrays.values()), **rows}


@dataclass(slots=True)
class Forms:
    """What the arrays of a data set are like, by the items that came first; a batch joins those of any items."""

    known: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = field(default_factory=dict)  # of one item, or of a row
    most: dict[str, int] = field(default_factory=dict)  # rows of any item along each axis
    items: int = 0

    def wrong(self, arrays: Mapping[str, Array]) -> str:
        """Say what is wrong with the arrays of an item; nothing where they can be joined with those before."""
        if not arrays:
            return "it has no arrays"
        return next((what for name, array in arrays.items() if (what := _wrong(name, array))), "") or (
            _odd_rows(arrays) or self._other(arrays) or self._absent(arrays) or self._late(arrays)
        )

    def take(self, arrays: Mapping[str, Array]) -> None:
        """Let the items to come be like this one."""
        self.items += 1
        for name, array in arrays.items():
            self.known.setdefault(name, _form(name, array))
        for axis, rows in sizes_of(arrays).items():
            self.most[axis] = max(rows, self.most.get(axis, 0))

    def _other(self, arrays: Mapping[str, Array]) -> str:
        for name, array in arrays.items():
            mine, first = _form(name, array), self.known.get(name)
            if first is not None and mine != first:
                return f"{name} is {_said(mine)}, and {_said(first)} in the items before"
        return ""

    def _absent(self, arrays: Mapping[str, Array]) -> str:
        """Say what it lacks for which nothing can stand: a whole number, and a row of them."""
        rows = sizes_of(arrays)
        for name, (dtype, _) in self.known.items():
            if name not in arrays and not _may_lack(name, dtype, rows):
                return f"it has no {name}, which the items before have ({dtype.name}: nothing can stand for it)"
        return ""

    def _late(self, arrays: Mapping[str, Array]) -> str:
        """Say what it has that the items before lack, and for which nothing can stand."""
        for name, array in arrays.items():
            if self.items and name not in self.known and not _may_lack(name, array.dtype, self.most):
                return f"the items before have no {name} ({array.dtype.name}: nothing can stand for it)"
        return ""


def _wrong(name: str, array: Array) -> str:
    """Say what is wrong with an array by itself."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return f"{name!r} is no name of an array: letters, digits, _ and dots"
    if (first := name.partition(".")[0]) in TAKEN:
        return f"{name}: the name {first} is taken"
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > _WIDEST or not array.dtype.isnative:
        return f"{name} is of {array.dtype}, not of numbers that torch knows"
    if parse(name).axis and not array.ndim:
        return f"{name} is one number, but lies along {parse(name).axis}"
    return ""


def _odd_rows(arrays: Mapping[str, Array]) -> str:
    """Say which array is not as long as another along its axis."""
    first: dict[str, tuple[str, int]] = {}
    for name, array in arrays.items():
        if axis := parse(name).axis:
            other, rows = first.setdefault(axis, (name, len(array)))
            if rows != len(array):
                return f"{name} has {len(array)} rows, and {other} has {rows}"
    return ""


def _form(name: str, array: Array) -> tuple[np.dtype[Any], tuple[int, ...]]:
    return array.dtype, array.shape[1:] if parse(name).form is Form.ROWS else array.shape


def _said(form: tuple[np.dtype[Any], tuple[int, ...]]) -> str:
    return f"{form[0].name} {list(form[1])}"


def _may_lack(name: str, dtype: np.dtype[Any], rows: Mapping[str, int]) -> bool:
    """Tell whether something stands for an array that an item lacks: no rows, unknown numbers, or no for a yes."""
    is_rows = parse(name).form is Form.ROWS
    return dtype.kind == "f" or (is_rows and (dtype.kind == "b" or not rows.get(parse(name).axis)))
