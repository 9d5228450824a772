"""What a cluster has and allows, as the site's profile says it or else the cluster itself: asked once."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from pipeline.cluster import slurm_commands
from pipeline.cluster.accounting import CommandFailed
from pipeline.cluster.job_spec import Limits, cores_refused
from pipeline.cluster.machine import mebibytes
from pipeline.config.schema_parts import format_duration
from pipeline.errors import SubmissionRefused

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipeline.cluster.job_spec import JobSpec
    from pipeline.cluster.slurm_commands import NodeKind
    from pipeline.config.schema_cluster import SlurmSection


class Facts:
    """The figures of one site; what nobody tells is None."""

    def __init__(self, site: SlurmSection) -> None:
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

    def nodes(self, partition: str | None = None) -> list[NodeKind]:
        """Return the kinds of node in a partition, or in several named as in `a,b`."""
        named = (partition or self.site.partition or "").split(",")
        return [one for one in self.partitions if (one.is_default if named == [""] else one.name in named)]

    @cached_property
    def partitions(self) -> list[NodeKind]:
        """What the cluster has; nothing where it does not tell."""
        try:
            return slurm_commands.node_kinds()
        except CommandFailed:
            return []

    @cached_property
    def array_size(self) -> int | None:
        """MaxArraySize: one more than the highest number of a task."""
        if self.site.max_array_size != "auto":
            return int(self.site.max_array_size)
        try:
            size = slurm_commands.setting("MaxArraySize")
        except CommandFailed:
            return None
        return int(size) if size.isdecimal() and int(size) > 0 else None

    @cached_property
    def _most_queued(self) -> int | None:
        try:
            return slurm_commands.most_queued(self.site.account, self.site.qos, self.site.partition)
        except CommandFailed:
            return None

    def _largest_mem(self, nodes: Sequence[NodeKind]) -> int | None:
        """Return what a task can be given on the largest node: what the node keeps for itself is not it."""
        if not nodes:
            return None
        largest = max(nodes, key=lambda one: one.mem_bytes)
        return largest.mem_bytes - self._kept_bytes(largest.nodes_named)

    def _kept_bytes(self, nodes: str) -> int:
        if nodes not in self._kept:
            try:
                self._kept[nodes] = slurm_commands.reserved_bytes(nodes)
            except CommandFailed:
                return 0
        return self._kept[nodes]

    @cached_property
    def _kept(self) -> dict[str, int]:
        return {}


def _longest(nodes: Sequence[NodeKind]) -> int | None:
    """Return the longest time that any of the partitions gives; None where one has no limit."""
    limits = [one.time_s for one in nodes]
    return max((limit for limit in limits if limit is not None), default=None) if None not in limits else None


SUPERVISE = "supervise"  # the job of a supervisor; its settings are in cluster.supervisor
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

# what the scheduler says → which key to change, the first that is found; {} is the stage
REMEDIES = {
    "no such file or directory": "--executor local   (or log in where sbatch is, or load its module)",
    "configuration source": "--executor local   (or say where Slurm's configuration is: SLURM_CONF)",
    "maxsubmit": "--set cluster.slurm.max_submit=…   (fewer tasks at once), or wait until some have ended",
    "maxwall": "--set cluster.{}.time=…",
    "maxcpu": "--set cluster.{}.cpus=…",
    "maxmem": "--set cluster.{}.mem=…",
    "maxgres": "--set cluster.{}.gpus=…",
    "job submit limit": "--set cluster.slurm.max_submit=…   (fewer tasks at once), or wait until some have ended",
    "invalid account": "--set cluster.slurm.account=…   (sacctmgr show assoc user=$USER lists yours)",
    "partition": "--set cluster.slurm.partition=…",
    "qos": "--set cluster.slurm.qos=…   (sacctmgr show qos lists them)",
    "reservation": "--set cluster.slurm.reservation=…   (scontrol show reservation lists them)",
    "feature": "--set cluster.slurm.constraint=…   (sinfo -o '%n %f' lists what nodes have)",
    "memory specification": "--set cluster.{}.mem=…",
    "time limit": "--set cluster.{}.time=…",
    "array": "--set cluster.slurm.max_array_size=…   (scontrol show config has MaxArraySize)",
    "gres": "--set cluster.{}.gpus=…, or --set cluster.slurm.gpus=gpus-per-node",
    "node configuration": "--set cluster.{0}.mem=… --set cluster.{0}.cpus=… --set cluster.{0}.gpus=…   (less of one)",
    "dependency": "",
}


def transient(said: str) -> bool:
    """Tell whether the same submission may well succeed a little later."""
    return not said.strip() or any(sign in said.lower() for sign in PASSING)


def refusal_of(spec: JobSpec, said: str, partitions: Iterable[str]) -> SubmissionRefused:
    """Return the scheduler's own words, with what to change."""
    words = [line.removeprefix("sbatch: error: ") for line in said.strip().splitlines() if line]
    what = "the cluster does not take the job: " + ("; ".join(words) or "sbatch failed without a word")
    section = _section(spec)
    change = next((change for sign, change in REMEDIES.items() if sign in said.lower()), "").format(section)
    if spec.partition:
        change = change.replace("cluster.slurm.partition", f"cluster.{section}.partition")
    if spec.constraint:
        change = change.replace("cluster.slurm.constraint", f"cluster.{section}.constraint")
    if ".partition=" in change and (names := ", ".join(sorted(set(partitions)))):
        change += f"   (there are: {names})"
    if transient(said):
        change = "  (again, when the cluster answers: sinfo)"
    return SubmissionRefused(what, where=f"job {spec.name}", remedy=f"{_again(spec)} {change}".rstrip())


def _section(spec: JobSpec) -> str:
    """Return the section of `cluster` that has a job's settings."""
    return "supervisor" if spec.name == SUPERVISE else spec.name


def _again(spec: JobSpec) -> str:
    """Return the beginning of the command that tries again; a supervisor's job is no stage of its own."""
    return "pipeline submit --stage all" if spec.name == SUPERVISE else f"pipeline submit --stage {spec.name}"


def refuse_above_nodes(spec: JobSpec, nodes: Sequence[NodeKind], limits: Limits) -> None:
    """Refuse a job with tasks that no node could ever hold; what nobody knows refuses nothing."""
    if not nodes:
        return
    cpus, gpus = max(one.cpus for one in nodes), max(one.gpus for one in nodes)
    where = f"the largest node of {', '.join(sorted({one.name for one in nodes}))}"
    section = _section(spec)
    most_mem = spec.mem_bytes or 0 if limits.mem_bytes is None else limits.mem_bytes
    if spec.time_s and limits.time_s and spec.time_s > limits.time_s:
        where = f"{', '.join(sorted({one.name for one in nodes}))} gives at most {format_duration(limits.time_s)}"
        what = f"each task asks for {format_duration(spec.time_s)}"
        remedy = f"{_again(spec)} --set cluster.{section}.time={format_duration(limits.time_s)}"
        raise SubmissionRefused(f"{what}; {where}", where=f"job {spec.name}", remedy=remedy)
    mem, mem_there = mebibytes(spec.mem_bytes or 0), mebibytes(most_mem)
    cores, fewer = cores_refused(spec, cpus)
    for change, fits, asked, there in (
        (fewer, spec.cpus_on_node <= cpus, cores, str(cpus)),
        (f"gpus={gpus}", spec.gpus <= gpus, f"{spec.gpus} GPU{'s' * (spec.gpus != 1)}", str(gpus)),
        (f"mem={mem_there}", (spec.mem_bytes or 0) <= most_mem, f"{mem} of memory", mem_there),
    ):
        if not fits:
            what = f"each task asks for {asked}; {where} has {there}"
            remedy = f"{_again(spec)} --set cluster.{section}.{change}"
            raise SubmissionRefused(what, where=f"job {spec.name}", remedy=remedy)
    _refuse_too_many(spec, nodes)


def _refuse_too_many(spec: JobSpec, nodes: Sequence[NodeKind]) -> None:
    """Refuse a job of more nodes than a partition has; a job is never in two of them."""
    there: dict[str, int] = {}
    for one in nodes:
        if one.cpus >= spec.cpus_on_node and one.gpus >= spec.gpus:
            there[one.name] = there.get(one.name, 0) + one.nodes
    most = max(there.values(), default=spec.nodes)
    if spec.nodes > most:
        what = f"each task asks for {spec.nodes} nodes; {', '.join(sorted(there))} has {most} that are large enough"
        remedy = f"{_again(spec)} --set cluster.{_section(spec)}.nodes={most}"
        raise SubmissionRefused(what, where=f"job {spec.name}", remedy=remedy)
