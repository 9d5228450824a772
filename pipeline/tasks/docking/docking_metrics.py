"""Figures of docked poses over a split: how far they are from the truth, and how many complexes have a near one.

Shapes: N poses of all complexes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.protocol import item_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

RMSDS = ("ligand_rmsd", "complex_rmsd", "interface_rmsd")
WITHIN = (2, 5, 10)  # Å of RMSD
FEW = 5  # ranks that people look at


def docking_metrics(outputs: Mapping[str, Any]) -> dict[str, float]:
    """Return medians of all poses' RMSDs, and shares of complexes by their best-ranked pose, five, and any of all.

    Without confidences the first pose of a complex is ranked best. A pose that exploded is nowhere near.
    """
    rmsds = {name: values_N for name in RMSDS if (values_N := _column(outputs, name)).size}
    figures: dict[str, float] = {}
    for name, values_N in rmsds.items():
        sound_N = values_N[~np.isnan(values_N)]
        figures |= {f"{name}_median": float(np.median(sound_N))} if len(sound_N) else {}
        figures |= {"exploded": 1 - len(sound_N) / len(values_N)} if len(sound_N) < len(values_N) else {}
        ranked = ranked_by_complex(_complexes(outputs[name]), values_N, _column(outputs, "confidence"))
        figures |= near_shares(name.removesuffix("_rmsd"), ranked)
    return figures


def near_shares(kind: str, ranked: Sequence[Floats]) -> dict[str, float]:
    """Return shares of complexes whose poses, the best-ranked first, are near the truth."""
    figures: dict[str, float] = {}
    for name, count in {"top1": 1, f"top{FEW}": FEW, "oracle": None}.items():
        best = np.array([np.min(np.nan_to_num(values[:count], nan=np.inf)) for values in ranked])
        figures |= {f"{kind}_{name}_within_{limit}": float((best < limit).mean()) for limit in WITHIN}
    return figures


def ranked_by_complex(names: Sequence[str], values_N: Floats, confidence_N: Floats) -> list[Floats]:
    """Return each complex's values, the most confident first; in their order where there are no confidences."""
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    if len(confidence_N) == len(values_N):
        merit_N = np.nan_to_num(confidence_N, nan=-np.inf)
        return [values_N[sorted(mine, key=lambda place: -merit_N[place])] for mine in places.values()]
    return [values_N[mine] for mine in places.values()]


def _column(outputs: Mapping[str, Any], name: str) -> Floats:
    values = [np.asarray(value, np.float64).reshape(-1)[:1] for value in outputs.get(name, ()) if value is not None]
    return np.concatenate([np.zeros(0), *values])


def _complexes(column: Any) -> list[str]:
    """Return the complex of each pose; without ids, each is its own."""
    told = getattr(column, "id", None)
    return [item_of(told(place)) if told else str(place) for place in range(len(column))]
