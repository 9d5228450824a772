"""Labels that are numbers, such as affinities: columns of a table that a task is given with its items."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pipeline.structures.sources.ids import shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipeline.records import Item

UNKNOWN = frozenset({"", "na", "n/a", "nan", "none", "null"})  # as tables write what nobody has measured
WORDS = {"true": 1.0, "false": 0.0}
LARGEST = 3.4e38  # of the single precision in which tasks have it


def value_of(text: str) -> float:
    """Return a label as a number, NaN where it is unknown; whatever else it is, is a ValueError."""
    word = text.strip().lower()
    if word in UNKNOWN:
        return math.nan
    if word in WORDS:
        return WORDS[word]
    value = float(word) if word.isascii() and "_" not in word else math.nan
    if not abs(value) <= LARGEST:  # NaN, too
        raise ValueError(text)
    return value


def label_problem(item: Item, names: Iterable[str]) -> str:
    """Say which label of an item is no number; nothing where all are."""
    for name in names:
        try:
            value_of(item.labels[name])
        except ValueError:
            return f"the label {name} is {shown(item.labels[name])!r}, not a number"
    return ""


def values_of(item: Item, names: Iterable[str]) -> dict[str, float]:
    """Return labels of an item that was accepted."""
    return {name: value_of(item.labels[name]) for name in names}
