"""How what is wrong with an array is said: the first place, its value, and how many more there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from pipeline.graphs.graph import Array


def first(name: str, bad: Any, values: Any, what: str, instead: Any = None) -> Iterator[str]:
    """Yield the first place that is bad, its value and what is wrong, and how many more there are."""
    if not bad.any():
        return
    at = np.unravel_index(int(bad.argmax()), bad.shape)
    count = int(np.count_nonzero(bad))
    more = f" (and {count - 1} more)" if count > 1 else ""
    place = ", ".join(str(int(one)) for one in at)
    wanted = "" if instead is None else f", {np.round(instead[at], 4)}"
    yield f"{name}[{place}] is {shown(values[at])}: {what}{wanted}{more}"


def falls(values: Array) -> NDArray[np.bool_]:
    """Mark what is less than the value before it."""
    falls = np.zeros(len(values), np.bool_)
    falls[1:] = values[1:] < values[:-1]
    return falls


def listed(values: Any) -> str:
    """Return some values in a row."""
    return ", ".join(str(getattr(one, "value", one)) for one in values) or "none"


def shown(value: Any) -> str:
    """Return a value in few digits."""
    array = np.asarray(value)
    if array.ndim == 0:
        return f"{array.item():.4f}" if array.dtype.kind == "f" else str(array.item())
    return " ".join(str(np.round(array.astype(np.float64), 3).tolist()).split())
