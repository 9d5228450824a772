"""`train.sampling`: which items an epoch of training draws, by weights, clusters and sources from a table.

Shapes: N items, R rows of the table, C clusters, S sources.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from pipeline.errors import ConfigError, DataError
from pipeline.records import Rejection
from pipeline.structures.sources.source_rows import Columns, read_rows, show_header
from pipeline.training.sampling import Draws
from pipeline.units import first_few, printable_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pipeline.config.schema_train import SamplingSection
    from pipeline.training.items.item_table import ItemTable

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

WHERE = "train.sampling"
ROUNDING = 1e-9
TINY = 1e-300  # in place of a divisor 0


def with_draws(table: ItemTable, sampling: SamplingSection) -> ItemTable:
    """Return the items that an epoch may draw, and how often it draws each.

    An item that an epoch may draw twice has two rows, so that no row is drawn twice and a plan knows the worst draw.
    """
    if not sampling.is_used or not len(table):
        return table
    draws = _draws(table, sampling)
    copies_N = np.ceil(draws.expected_N - ROUNDING).astype(np.int64)
    rows = np.repeat(np.arange(len(table)), copies_N)
    copy_N = np.arange(len(rows)) - np.repeat(np.cumsum(copies_N) - copies_N, copies_N)
    each = replace(draws.take(rows), expected_N=draws.expected_N[rows] / copies_N[rows], copy_N=copy_N)
    return replace(table.take(rows), draws=each)


def _draws(table: ItemTable, sampling: SamplingSection) -> Draws:
    """Return how often an epoch draws each item: its part of its cluster, times the part of its source."""
    weight_N, cluster_N, source_N, sources = _columns(table, sampling)
    mass_N = weight_N
    if sampling.cluster:
        size_C = np.bincount(cluster_N, weight_N > 0)
        drawn_C = np.minimum(size_C, sampling.per_cluster)
        mass_N = weight_N * (drawn_C / np.maximum(np.bincount(cluster_N, weight_N), TINY))[cluster_N]
    items = sampling.items_per_epoch or (round(float(mass_N.sum())) if sampling.cluster else len(table))
    if sampling.shares:
        share_S = np.array([sampling.shares.get(name, 0.0) for name in sources])
        mass_S = np.bincount(source_N, mass_N, len(sources))
        empty = [name for name in sampling.shares if name not in sources or not mass_S[sources.index(name)]]
        if empty:
            what = f"no item to draw has the source {first_few(map(repr, empty))}; there are: {', '.join(sources)}"
            raise ConfigError(what, where=f"{WHERE}.shares", remedy=show_header(sampling.table_path))
        mass_N = mass_N * (share_S / np.maximum(mass_S, TINY))[source_N]
    expected_N = items * (mass_N / math.fsum(mass_N))
    return Draws(expected_N, source_N, cluster_N, np.zeros(len(table), np.int64))


def _columns(table: ItemTable, sampling: SamplingSection) -> tuple[Floats, Integers, Integers, list[str]]:
    """Return each item's weight, cluster and source, and the names of the sources."""
    items = len(table)
    alone = np.ones(items), np.arange(items), np.zeros(items, np.int64), [""]
    if not sampling.columns:
        return alone
    path = sampling.table_path
    digests, weights, clusters, sources = array("Q"), array("d"), array("Q"), array("Q")
    names: dict[str, int] = {}
    for row in read_rows(path, Columns(required=("id", *sampling.columns))):
        if isinstance(row, Rejection):
            raise _bad_row(sampling, row.origin, row.detail)
        digests.append(_digest(row["id"]))
        if sampling.weight:
            weights.append(weight := _number(row[sampling.weight]))
            if not 0 <= weight < math.inf:
                problem = f"{sampling.weight} is {printable_text(row[sampling.weight])!r}, not a number from 0"
                raise _bad_row(sampling, row.origin, problem)
        if sampling.cluster:
            clusters.append(_digest(row[sampling.cluster] or f"\0{row['id']}"))  # without one: alone in its own
        if sampling.source:
            sources.append(names.setdefault(row[sampling.source], len(names)))
    values = [np.array(column) for column in (weights, clusters, sources) if column]
    row_N = _rows_of(table, np.array(digests, np.uint64), values, sampling)
    weight_N, cluster_N, source_N, _ = alone
    if sampling.weight:
        weight_N = np.array(weights)[row_N]
        if not weight_N.any():
            what = f"the weights of all {items:,} items are 0"
            raise ConfigError(what, where=f"{WHERE}.weight", remedy=show_header(path))
        weight_N = weight_N / weight_N.max()  # sums of large ones would overflow
    if sampling.cluster:
        cluster_N = np.unique(np.array(clusters, np.uint64)[row_N], return_inverse=True)[1]
    if sampling.source:
        source_N = np.array(sources, np.int64)[row_N]
    return weight_N, cluster_N, source_N, list(names) or [""]


def _rows_of(
    table: ItemTable, digest_R: NDArray[np.uint64], values: Sequence[NDArray[Any]], sampling: SamplingSection
) -> Integers:
    """Return the row of each item; raise where one has none, or several with different values."""
    order_R = np.argsort(digest_R, kind="stable")
    digest_N = np.fromiter((_digest(table.ids[number]) for number in range(len(table))), np.uint64, len(table))
    place_N = np.minimum(np.searchsorted(digest_R[order_R], digest_N), max(0, len(digest_R) - 1))
    row_N = order_R[place_N] if len(order_R) else np.zeros(len(table), np.int64)
    missing = np.flatnonzero(digest_R[row_N] != digest_N) if len(order_R) else np.arange(len(table))
    if len(missing):
        lacks = first_few(table.ids[number] for number in missing[:4].tolist())
        what = f"{len(missing):,} of {len(table):,} items to train on have no row, such as {lacks}"
        raise DataError(what, where=str(sampling.table_path), remedy="add their rows; weight 0: never drawn")
    again_R = np.flatnonzero(digest_R[order_R[1:]] == digest_R[order_R[:-1]])
    pairs = order_R[again_R], order_R[again_R + 1]
    differs_R = np.any([column[pairs[0]] != column[pairs[1]] for column in values], axis=0)
    twice = np.flatnonzero(np.isin(digest_N, digest_R[pairs[0][differs_R]]))
    if len(twice):
        several = first_few(table.ids[number] for number in twice[:4].tolist())
        what = f"{len(twice):,} of {len(table):,} items to train on have several rows that differ, such as {several}"
        raise DataError(what, where=str(sampling.table_path), remedy="keep one row of each")
    return np.asarray(row_N, np.int64)


def _digest(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _bad_row(sampling: SamplingSection, origin: str, problem: str) -> DataError:
    path, line = sampling.table_path, int(origin.rpartition(":")[2])
    return DataError(problem, where=f"{path}:{line}", remedy=f"sed -n {line}p {quote(str(path))}")
