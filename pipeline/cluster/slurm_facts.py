"""A cluster's resources and limits, from the site's profile or else from the cluster itself, which is asked once."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from pipeline.cluster import slurm_commands
from pipeline.cluster.accounting import CommandFailed
from pipeline.cluster.job_spec import Limits, refuse_larger
from pipeline.cluster.site_facts import CONFIG, NODES, Site, parse_nodes, parse_settings
from pipeline.command_line import ANY
from pipeline.config.schema_parts import format_duration
from pipeline.errors import ClusterSilent, SubmissionRefused

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipeline.cluster.job_spec import JobSpec
    from pipeline.cluster.site_facts import SiteNodes
    from pipeline.config.schema_cluster import SlurmSection


class Facts:
    """The resources and limits of one site; None where they are unknown."""

    def __init__(self, site: SlurmSection) -> None:
        self.site = site
        self._reserved: dict[str, int] = {}  # bytes that nodes keep for themselves, by their names

    def limits(self, partition: str | None = None, *, cpus: int = 1, gpus: int = 0) -> Limits:
        """Return the limits of a partition (by default the site's or the cluster's) for tasks of such a size."""
        site, size = self.site, self.array_size
        nodes = [kind for kind in self.nodes(partition) if kind.cpus >= cpus and kind.gpu_count >= gpus]
        mem_bytes = self._largest_mem(nodes) if site.largest_mem == "auto" else int(site.largest_mem)
        time_s = _longest(nodes) if site.longest_time is None else int(site.longest_time)
        queued = self._most_queued if site.max_submit == "auto" else int(site.max_submit)
        there = sum(kind.count for kind in nodes) or None
        highest = size and size - 1
        return Limits(mem_bytes, time_s, job_tasks=size, highest_task=highest, queued_tasks=queued, nodes=there)

    def nodes(self, partition: str | None = None) -> list[SiteNodes]:
        """Return the kinds of node in a partition, or in several named as in `a,b`."""
        named = (partition or self.site.partition or os.environ.get("SBATCH_PARTITION", "")).split(",")
        return [kind for kind in self.partitions if (kind.is_default if named == [""] else kind.partition in named)]

    @cached_property
    def partitions(self) -> list[SiteNodes]:
        """The kinds of node of all partitions; empty if sinfo does not answer."""
        try:
            return list(parse_nodes(slurm_commands.run_command(NODES)))
        except CommandFailed:
            return []

    @cached_property
    def array_size(self) -> int | None:
        """MaxArraySize: one more than the highest number of a task."""
        if self.site.max_array_size != "auto":
            return int(self.site.max_array_size)
        try:
            return Site(parse_settings(slurm_commands.run_command(CONFIG))).max_array_size or None
        except CommandFailed:
            return None

    @cached_property
    def _most_queued(self) -> int | None:
        try:
            return slurm_commands.most_queued(self.site.account, self.site.qos, self.site.partition)
        except CommandFailed:
            return None

    def _largest_mem(self, nodes: Sequence[SiteNodes]) -> int | None:
        """Return the memory of the largest node, less what the node reserves for itself."""
        if not nodes:
            return None
        most_bytes = max(kind.mem_bytes for kind in nodes)
        named = ",".join(dict.fromkeys(kind.named for kind in nodes if kind.mem_bytes == most_bytes))
        with suppress(CommandFailed):
            if named not in self._reserved:
                self._reserved[named] = slurm_commands.reserved_bytes(named)
        return most_bytes - self._reserved.get(named, 0)


def _longest(nodes: Sequence[SiteNodes]) -> int | None:
    """Return the longest time limit of the partitions; None if one has no limit."""
    limits = [kind.time_s for kind in nodes]
    return max((limit for limit in limits if limit is not None), default=None) if None not in limits else None


PASSING = (
    "timed out",
    "time out",
    "timeout",
    "unable to contact slurm",
    "temporarily unavailable",
    "temporarily unable to accept job",
    "connection refused",
    "connection reset",
    "communication connection failure",
    "zero bytes were transmitted",
    "message send failure",
    "message receive failure",
    "transport endpoint",
    "standby mode",
    "controller not responding",
    "interrupted system call",
    "could not make sense of sbatch output",
    "without a word",
)

ABSENT = ("no such file or directory", "configuration source")  # signs that Slurm is not here

# what the scheduler says → which keys to change, the first that is found ({} is the stage), and what follows
REMEDIES: dict[str, tuple[tuple[str, ...], str]] = {
    "no such file or directory": ((), " --executor local   (or log in where sbatch is, or load its module)"),
    "configuration source": ((), " --executor local   (or say where Slurm's configuration is: SLURM_CONF)"),
    "maxsubmit": (("slurm.max_submit",), "   (fewer tasks at once), or wait until some have ended"),
    "maxwall": (("{}.time",), ""),
    "maxcpu": (("{}.cpus",), ""),
    "maxmem": (("{}.mem",), ""),
    "maxgres": (("{}.gpus",), ""),
    "job submit limit": (("slurm.max_submit",), "   (fewer tasks at once), or wait until some have ended"),
    "invalid account": (("slurm.account",), "   (sacctmgr show assoc user=$USER lists yours)"),
    "partition": (("slurm.partition",), ""),
    "qos": (("slurm.qos",), "   (sacctmgr show qos lists them)"),
    "reservation": (("slurm.reservation",), "   (scontrol show reservation lists them)"),
    "feature": (("slurm.constraint",), "   (sinfo -o '%n %f' lists what nodes have)"),
    "memory specification": (("{}.mem",), ""),
    "time limit": (("{}.time",), ""),
    "array": (("slurm.max_array_size",), "   (scontrol show config has MaxArraySize)"),
    "gres": (("{}.gpus",), ", or --set cluster.slurm.gpus=gpus-per-node"),
    "node configuration": (("{}.mem", "{}.cpus", "{}.gpus"), "   (less of one)"),
    "dependency": ((), ""),
}


def transient(message: str) -> bool:
    """Tell whether the same submission may succeed a little later."""
    return not message.strip() or any(sign in message.lower() for sign in PASSING)


def refusal_of(spec: JobSpec, message: str, partitions: Iterable[str]) -> SubmissionRefused:
    """Return an error with the scheduler's own message and the settings to change."""
    words = [line.removeprefix("sbatch: error: ") for line in message.strip().splitlines() if line]
    what = "the cluster does not take the job: " + ("; ".join(words) or "sbatch failed without a word")
    keys, then = next((change for sign, change in REMEDIES.items() if sign in message.lower()), ((), ""))
    of_stage = {"slurm.partition": bool(spec.partition), "slurm.constraint": bool(spec.constraint)}
    keys = tuple(key.replace("slurm", spec.section) if of_stage.get(key) else key.format(spec.section) for key in keys)
    if any(key.endswith(".partition") for key in keys) and (names := ", ".join(sorted(set(partitions)))):
        then += f"   (there are: {names})"
    if transient(message):
        keys, then = (), "   (again, when the cluster answers: sinfo)"
    remedy = spec.again.with_settings(*((f"cluster.{key}", ANY) for key in keys), then=then)
    is_silent = transient(message) or any(sign in message.lower() for sign in ABSENT)
    kind = ClusterSilent if is_silent else SubmissionRefused
    return kind(what, where=f"job {spec.name}", remedy=remedy)


def refuse_above_nodes(spec: JobSpec, nodes: Sequence[SiteNodes], limits: Limits) -> None:
    """Refuse a job whose tasks no node could hold; nothing is refused if the nodes are unknown."""
    if not nodes:
        return
    cpus, gpus = max(kind.cpus for kind in nodes), max(kind.gpu_count for kind in nodes)
    partitions = ", ".join(sorted({kind.partition for kind in nodes}))
    where = f"the largest node of {partitions}"
    most_mem = spec.mem_bytes or 0 if limits.mem_bytes is None else limits.mem_bytes
    if spec.time_s and limits.time_s and spec.time_s > limits.time_s:
        where = f"{partitions} gives at most {format_duration(limits.time_s)}"
        what = f"each task asks for {format_duration(spec.time_s)}"
        remedy = spec.again.with_settings((f"cluster.{spec.section}.time", format_duration(limits.time_s)))
        raise SubmissionRefused(f"{what}; {where}", where=f"job {spec.name}", remedy=remedy)
    large = [kind.mem_bytes for kind in nodes if kind.cpus >= spec.cpus_on_node and kind.gpu_count >= spec.gpus]
    if large and max(large) < max(kind.mem_bytes for kind in nodes):  # those with the most memory have fewer of these
        where += f" with {spec.cpus_on_node} cores" + (f" and {spec.gpus} GPUs" if spec.gpus else "")
    refuse_larger(spec, (cpus, gpus, most_mem), f"{where} has {{}}")
    _refuse_too_many(spec, nodes)


def _refuse_too_many(spec: JobSpec, nodes: Sequence[SiteNodes]) -> None:
    """Refuse a job of more nodes than any one partition has."""
    there: dict[str, int] = {}
    for kind in nodes:
        if kind.cpus >= spec.cpus_on_node and kind.gpu_count >= spec.gpus:
            there[kind.partition] = there.get(kind.partition, 0) + kind.count
    most = max(there.values(), default=spec.nodes)
    if spec.nodes > most:
        what = f"each task asks for {spec.nodes} nodes; {', '.join(sorted(there))} has {most} that are large enough"
        remedy = spec.again.with_settings((f"cluster.{spec.section}.nodes", str(most)))
        raise SubmissionRefused(what, where=f"job {spec.name}", remedy=remedy)
