"""Sizes of made data sets, spread as those of real ones are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

QUANTILE_95 = 1.6449  # of the normal distribution
NEIGHBOURS = 20  # of a residue


def lognormal(
    rng: np.random.Generator, count: int, median: float, *, factor: float = 8.0, least: int = 1, most: int = 2**31
) -> Integers:
    """Return sizes of which the 95% quantile is so many times the 5% quantile."""
    sigma = math.log(factor) / (2 * QUANTILE_95)
    return np.clip(np.rint(median * np.exp(sigma * rng.normal(size=count))), least, most).astype(np.int64)


def graphs(
    count: int, rng: np.random.Generator, *, nodes: float = 60, neighbours: int = NEIGHBOURS
) -> dict[str, Integers]:
    """Return sizes of graphs with so many nodes in the middle."""
    nodes_N = lognormal(rng, count, nodes, least=4)
    return {"nodes": nodes_N, "edges": neighbours * nodes_N}


def complexes(
    count: int, rng: np.random.Generator, *, nodes: float = 60, factor: float = 6.0, neighbours: int = NEIGHBOURS
) -> dict[str, Integers]:
    """Return sizes of complexes of two partners, each with so many nodes in the middle."""
    receptor_N, ligand_N = (lognormal(rng, count, nodes, factor=factor, least=4) for _ in range(2))
    nodes_N = receptor_N + ligand_N
    return {"nodes": nodes_N, "edges": neighbours * nodes_N, "pairs": receptor_N * ligand_N}


def lengths(
    count: int, rng: np.random.Generator, *, median: float = 64, name: str = "length", most: int = 2**31
) -> dict[str, Integers]:
    """Return lengths of sequences."""
    return {name: lognormal(rng, count, median, least=4, most=most)}
