"""What a cluster has and allows, as the site's profile says it or else the cluster itself: asked once."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from pipeline.cluster import commands
from pipeline.cluster.accounting import CommandFailed
from pipeline.cluster.spec import Limits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.cluster.commands import Partition
    from pipeline.config.schema_cluster import Slurm


class Facts:
    """The figures of one site; what nobody tells is None."""

    def __init__(self, site: Slurm) -> None:
        self.site = site

    def limits(self, partition: str | None = None, *, cpus: int = 1, gpus: int = 0) -> Limits:
        """Return the limits of a partition (the site's or the cluster's default if none is named) for such tasks."""
        site, size = self.site, self.array_size
        nodes = [one for one in self.nodes(partition) if one.cpus >= cpus and one.gpus >= gpus]
        mem_bytes = self._largest_mem(nodes) if site.largest_mem == "auto" else int(site.largest_mem)
        time_s = _longest(nodes) if site.longest_time is None else int(site.longest_time)
        queued = self._most_queued if site.max_submit == "auto" else int(site.max_submit)
        there = sum(one.nodes for one in nodes) or None
        highest = size and size - 1
        return Limits(mem_bytes, time_s, job_tasks=size, highest_task=highest, queued_tasks=queued, nodes=there)

    def nodes(self, partition: str | None = None) -> list[Partition]:
        """Return the kinds of node in a partition, or in several named as in `a,b`."""
        named = (partition or self.site.partition or "").split(",")
        return [one for one in self.partitions if (one.is_default if named == [""] else one.name in named)]

    @cached_property
    def partitions(self) -> list[Partition]:
        """What the cluster has; nothing where it does not tell."""
        try:
            return commands.partitions()
        except CommandFailed:
            return []

    @cached_property
    def array_size(self) -> int | None:
        """MaxArraySize: one more than the highest number of a task."""
        if self.site.max_array_size != "auto":
            return int(self.site.max_array_size)
        try:
            size = commands.setting("MaxArraySize")
        except CommandFailed:
            return None
        return int(size) if size.isdecimal() and int(size) > 0 else None

    @cached_property
    def _most_queued(self) -> int | None:
        try:
            return commands.most_queued(self.site.account, self.site.qos, self.site.partition)
        except CommandFailed:
            return None

    def _largest_mem(self, nodes: Sequence[Partition]) -> int | None:
        """Return what a task can be given on the largest node: what the node keeps for itself is not it."""
        if not nodes:
            return None
        largest = max(nodes, key=lambda one: one.mem_bytes)
        return largest.mem_bytes - self._kept_bytes(largest.nodes_named)

    def _kept_bytes(self, nodes: str) -> int:
        if nodes not in self._kept:
            try:
                self._kept[nodes] = commands.reserved_bytes(nodes)
            except CommandFailed:
                return 0
        return self._kept[nodes]

    @cached_property
    def _kept(self) -> dict[str, int]:
        return {}


def _longest(nodes: Sequence[Partition]) -> int | None:
    """Return the longest time that any of the partitions gives; None where one has no limit."""
    limits = [one.time_s for one in nodes]
    return max((limit for limit in limits if limit is not None), default=None) if None not in limits else None
