"""What tasks over mass spectra take of one. Shapes: P peaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.training.batch import Graph

MZ, INTENSITY = "peaks.mz", "peaks.intensity"


def most_intense(item: Graph, most: int) -> tuple[Tensor, Tensor]:
    """Return m/z and intensity of the most intense peaks in their order, the first of those that are alike."""
    if MZ not in item.values or INTENSITY not in item.values:
        what = f"the task reads {MZ} and {INTENSITY}; {item.id} has {', '.join(sorted(item.values)) or 'no arrays'}"
        raise ConfigError(what, where="data.reader", remedy="name a reader of spectra")
    mz_P, intensity_P = item.values[MZ].float(), item.values[INTENSITY].float()
    if len(mz_P) > most:
        kept = intensity_P.argsort(descending=True, stable=True)[:most].sort().values
        mz_P, intensity_P = mz_P[kept], intensity_P[kept]
    return mz_P, intensity_P
