"""Which kinds of GPU a cluster has, and how much memory their names promise (which `memory/devices.py` knows)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.memory.devices import SizesGib, names_a_model, nearest, sizes_gib, sizes_said

if TYPE_CHECKING:
    from pipeline.runs.site import Nodes, Partition, Site


@dataclass(slots=True)
class Kind:
    """GPUs that are alike, and where they are."""

    gres: str
    feature: str
    sizes_gib: SizesGib  # one: known; several: it may be any; none: nobody knows
    partitions: list[str] = field(default_factory=list)
    count: int = 0


def kinds(site: Site) -> list[Kind]:
    """Return the kinds of GPU of a cluster, told apart by type and, where that is not enough, by feature."""
    found: dict[tuple[str, str, SizesGib], Kind] = {}
    for nodes in site.nodes:
        for kind in _of_nodes(nodes):
            same = found.setdefault((kind.gres, kind.feature, kind.sizes_gib), kind)
            same.count = max(same.count, kind.count)
            if nodes.partition not in same.partitions:
                same.partitions.append(nodes.partition)
    every = sorted(found.values(), key=lambda kind: (kind.gres, kind.feature))
    for kind in every:
        if kind.gres and sum(other.gres == kind.gres for other in every) == 1:
            kind.feature = ""  # the type alone says it
    return every


def best_partition(site: Site, names: Sequence[str]) -> str:
    """Return where a job fares best: where it may run, is not preempted, and has the longest time."""
    known = [partition for name in names if (partition := site.partition(name)) is not None]
    return max(known, key=lambda one: _merit(site, one)).name if known else names[0]


def _merit(site: Site, partition: Partition) -> tuple[bool, bool, bool, float]:
    is_left_alone = partition.preempt_mode.upper() in ("", "OFF")
    time_s = float("inf") if partition.time_s is None else partition.time_s
    return (not site.bars(partition.name), partition.is_default, is_left_alone, time_s)


def _of_nodes(nodes: Nodes) -> Iterator[Kind]:
    """Yield the kinds of GPU that nodes have."""
    for gpus in nodes.gpus:
        sizes, feature = sizes_gib(gpus.type), ""
        if not gpus.type:
            feature = next((one for one in nodes.features if names_a_model(one)), "")
            sizes = sizes_gib(feature)
        elif len(sizes) > 1:
            feature, sizes = _told_by_feature(nodes.features, sizes)
        yield Kind(gpus.type, feature, sizes, count=gpus.count)


def _told_by_feature(features: Sequence[str], sold: SizesGib) -> tuple[str, SizesGib]:
    """Return the feature that says which of several sizes it is, and that size."""
    for feature in features:
        named = sizes_gib(feature) if names_a_model(feature) else ()
        said = sizes_said(feature)
        near = tuple(size for size in sold if size in named) or nearest(sold, said)
        if len(near) == 1:
            return feature, near
    return "", sold
