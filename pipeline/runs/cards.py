"""Which kinds of GPU a cluster has, and how much memory their names promise."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from pipeline.runs.site import Nodes, Partition, Site

SizesGib: TypeAlias = tuple[int, ...]

# What programs can have, as nvidia-smi tells it, in whole GiB: less than on the box, by ECC and what the driver keeps.
MODELS: tuple[tuple[str, SizesGib], ...] = (
    ("h200", (140,)),
    ("b200", (178,)),
    ("h100", (79, 93)),
    ("a100", (39, 79)),
    ("v100s?", (15, 31)),
    ("p100", (11, 15)),
    ("a40", (44,)),
    ("a30", (23,)),
    ("a16", (14,)),
    ("a10g?", (22,)),
    ("l40s?", (44,)),
    ("l4", (22,)),
    ("t4", (14,)),
    ("k80", (11,)),
    ("(?:rtx)?_?a6000", (47,)),
    ("(?:rtx)?_?a5000", (23,)),
    ("rtx_?8000", (44,)),
    ("rtx_?6000_ada", (47,)),
    ("rtx_?5000_ada", (31,)),
    ("rtx_?pro_?6000", (95,)),
    ("rtx_?6000", (22, 47)),  # Quadro or Ada
    ("(?:rtx)?_?5090", (31,)),
    ("(?:rtx)?_?4090", (23,)),
    ("(?:rtx)?_?3090", (23,)),
    ("(?:rtx)?_?2080_?ti", (10,)),
    ("(?:gtx)?_?1080_?ti", (10,)),
    ("titan_?rtx", (23,)),
)
_MODELS = tuple((re.compile(rf"(?<![a-z0-9]){model}(?![0-9])"), sizes) for model, sizes in MODELS)
_SLICE = re.compile(r"(?<![a-z0-9])\d+g\.(\d+)gb")  # MIG, such as 1g.10gb or a100_3g.20gb
_SIZE = re.compile(r"(?<![0-9])(\d+)_?gi?b?(?![a-z0-9.])")
_BARE_SIZE = re.compile(r"_(\d{2,3})(?![a-z0-9.])")  # as in a100-80


@dataclass(slots=True)
class Kind:
    """GPUs that are alike, and where they are."""

    gres: str
    feature: str
    sizes_gib: SizesGib  # one: known; several: it may be any; none: nobody knows
    partitions: list[str] = field(default_factory=list)
    count: int = 0


def sizes_gib(name: str) -> SizesGib:
    """Return how much memory the name of a GPU promises: one size, those that were sold, or none."""
    text = _plain(name)
    if mig := _SLICE.search(text):
        return (_usable(int(mig[1])),)
    sold = next((sizes for model, sizes in _MODELS if model.search(text)), ())
    said = [int(size) for size in _SIZE.findall(text)]
    if sold and said and said[-1] < min(sold):  # a part of one, such as h200.35gb
        return (_usable(said[-1]),)
    if len(sold) > 1:
        return _nearest(sold, said or [int(size) for size in _BARE_SIZE.findall(text)]) or sold
    return sold or tuple(_usable(size) for size in said[-1:])


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
            feature = next((one for one in nodes.features if _names_a_model(one)), "")
            sizes = sizes_gib(feature)
        elif len(sizes) > 1:
            feature, sizes = _told_by_feature(nodes.features, sizes)
        yield Kind(gpus.type, feature, sizes, count=gpus.count)


def _names_a_model(feature: str) -> bool:
    return any(model.search(_plain(feature)) for model, _ in _MODELS)


def _plain(name: str) -> str:
    """Return a name as the patterns know it."""
    return re.sub(r"[\s-]", "_", name.lower())


def _told_by_feature(features: Sequence[str], sold: SizesGib) -> tuple[str, SizesGib]:
    """Return the feature that says which of several sizes it is, and that size."""
    for feature in features:
        named = sizes_gib(feature) if _names_a_model(feature) else ()
        said = [int(size) for size in _SIZE.findall(_plain(feature))]
        near = tuple(size for size in sold if size in named) or _nearest(sold, said)
        if len(near) == 1:
            return feature, near
    return "", sold


def _nearest(sold: SizesGib, said: Sequence[int]) -> SizesGib:
    """Return the sizes that a name can mean by its number: 80 means 79."""
    return tuple(size for size in sold if any(size <= number <= 1.1 * size + 1 for number in said))


def _usable(said_gib: int) -> int:
    """Return what is surely left of a size that a name says."""
    return max(1, said_gib * 15 // 16)
