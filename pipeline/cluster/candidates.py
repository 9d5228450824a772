"""Chooses the partition of a task: the cheapest candidate with enough resources, the first of equal ones.

Pure functions: `cluster.slurm.partitions` lists the candidates and their costs, the cluster reports their limits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline.cluster.job_spec import Limits, mebibytes
from pipeline.config.schema_parts import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeline.config.schema_cluster import SlurmSection


@dataclass(frozen=True, slots=True)
class Candidate:
    """A partition that tasks may use, and its limits for one task."""

    partition: str
    limits: Limits
    price: float = 1.0

    def refuses(self, mem_bytes: int, time_s: int, nodes: int = 1) -> str:
        """Return why a task does not fit; empty if it fits, as far as known."""
        limits = self.limits
        if limits.lacks:
            return limits.lacks
        if limits.mem_bytes is not None and mem_bytes > limits.mem_bytes:
            return f"gives at most {mebibytes(limits.mem_bytes)}"
        if limits.time_s is not None and time_s > limits.time_s:
            return f"gives at most {format_duration(limits.time_s)}"
        return f"has {limits.nodes} such nodes" if limits.nodes is not None and nodes > limits.nodes else ""


def candidates_of(site: SlurmSection, limits_of: Callable[[str], Limits]) -> tuple[Candidate, ...]:
    """Return the candidates of a site, the cheapest first."""
    found = (Candidate(name, limits_of(name), site.prices.get(name, 1.0)) for name in site.partitions)
    return tuple(sorted(found, key=lambda candidate: candidate.price))


def choose(candidates: Sequence[Candidate], mem_bytes: int, time_s: int, *, nodes: int = 1, stay: str = "") -> str:
    """Return the partition for a task: the present one (`stay`) if the task fits there, else the first it fits.

    If it fits none, it stays; without a present one, choose the most memory among those with enough time, else the
    first: the refusal then names the limits of that partition.
    """
    holding = [place.partition for place in candidates if not place.refuses(mem_bytes, time_s, nodes)]
    if stay in holding or (stay and not holding):
        return stay
    long_enough = sorted(
        (place for place in candidates if not place.refuses(0, time_s, nodes)), key=_memory, reverse=True
    )
    return next(iter(holding), next(iter(long_enough), candidates[0]).partition)


def reach(candidates: Sequence[Candidate], mem_bytes: int, time_s: int, limits: Limits) -> Limits:
    """Return limits with the most memory for this time limit, and the longest time for this memory."""
    mem = most([place.limits.mem_bytes for place in candidates if not place.refuses(0, time_s)], mem_bytes)
    longest = most([place.limits.time_s for place in candidates if not place.refuses(mem_bytes, 0)], time_s)
    return replace(limits, mem_bytes=mem, time_s=longest)


def envelope(limits: Sequence[Limits]) -> Limits:
    """Return the highest limits over several partitions; None if one of them is unknown."""
    there = [each for each in limits if not each.lacks] or list(limits)
    return replace(
        there[0],
        mem_bytes=most([each.mem_bytes for each in there]),
        time_s=most([each.time_s for each in there]),
        nodes=most([each.nodes for each in there]),
        preempts=any(each.preempts for each in there),
    )


def why_there(candidates: Sequence[Candidate], chosen: str, mem_bytes: int, time_s: int, nodes: int = 1) -> str:
    """Explain why a partition was chosen and the ones before it were not."""
    parts = []
    for place in candidates:
        if place.partition == chosen:
            break
        why = place.refuses(mem_bytes, time_s, nodes)
        parts.append(f"{place.partition} {why or 'was left'}")
    place = next(place for place in candidates if place.partition == chosen)
    is_priced = len({each.price for each in candidates}) > 1
    rank = "the cheapest that fits" if is_priced else "the first in the list that fits"
    notes = [rank, *([f"price {place.price:g}"] if is_priced else [])]
    notes += ["its jobs may be preempted"] if place.limits.preempts else []
    return "; ".join([", ".join(notes), *parts])


def _memory(place: Candidate) -> float:
    return float("inf") if place.limits.mem_bytes is None else place.limits.mem_bytes


def most(values: Sequence[int | None], least: int | None = None) -> int | None:
    """Return the largest value, or `least` without values; None (no limit) if one of them is None."""
    known = [value for value in values if value is not None]
    return None if len(known) < len(values) else max(known, default=least)
