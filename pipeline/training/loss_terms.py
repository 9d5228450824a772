"""Loss terms as they are added up: a sum and a weight by name, of a micro-batch, a step or an epoch."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def added(*parts: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """Add up the sums and weights of several parts, term by term."""
    whole: dict[str, tuple[Any, Any]] = {}
    for part in parts:
        for name, (total, weight) in part.items():
            total_before, weight_before = whole.get(name, (0.0, 0.0))
            whole[name] = total_before + total, weight_before + weight
    return whole


def means(terms: Mapping[str, tuple[float, float]]) -> dict[str, float | None]:
    """Return each term's mean; None where it has no weight."""
    return {name: total / weight if weight else None for name, (total, weight) in terms.items()}


def sums_by_name(mappings: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the values of several mappings, name by name."""
    sums = Counter[str]()
    for mapping in mappings:
        sums.update(mapping)
    return dict(sums)
