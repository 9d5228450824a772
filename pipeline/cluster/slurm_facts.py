"""A cluster's resources and limits, from the site's profile or else from the cluster itself, which is asked once."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from pipeline.cluster import allowances, slurm_commands
from pipeline.cluster.accounting import CommandFailed
from pipeline.cluster.candidates import candidates_of, choose, envelope
from pipeline.cluster.job_spec import SUPERVISE, Limits, refuse_larger
from pipeline.cluster.site_facts import (
    CONFIG,
    NODES,
    PARTITIONS,
    PATIENCE_S,
    Site,
    default_account_of,
    parse_default_account,
    parse_nodes,
    parse_partitions,
    parse_settings,
)
from pipeline.command_line import ANY
from pipeline.config.schema_parts import format_duration
from pipeline.errors import ClusterSilent, SubmissionRefused

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipeline.cluster.allowances import Caps
    from pipeline.cluster.job_spec import JobSpec
    from pipeline.cluster.site_facts import Partition, SiteNodes
    from pipeline.config.schema_cluster import SlurmSection


LEAST_QUEUE = 4
MEMORY = (allowances.MEM, allowances.MEM_ON_NODE)


class Facts:
    """The resources and limits of one site; None where they are unknown."""

    def __init__(self, site: SlurmSection) -> None:
        self.site = site
        self._reserved: dict[str, int] = {}  # bytes that nodes keep for themselves, by their names
        self._caps: dict[tuple[str, str], Caps] = {}  # by partition and QOS
        self._is_silent = False  # whether the accounting did not answer

    def limits(self, partition: str | None = None, *, cpus: int = 1, gpus: int = 0) -> Limits:
        """Return the limits of a partition (by default the site's or the cluster's) for tasks of such a size.

        Where the site names several for tasks to go to, those are the limits of what any of them gives.
        """
        if not partition and self.site.partitions:
            return envelope([self._limits(name, cpus, gpus) for name in self.site.partitions])
        return self._limits(partition or self._named, cpus, gpus)

    def _limits(self, partition: str, cpus: int, gpus: int) -> Limits:
        site, size, every = self.site, self.array_size, self.nodes(partition)
        nodes = [kind for kind in every if kind.cpus >= cpus and kind.gpu_count >= gpus]
        known, caps = self._partition(partition), self.caps(partition)
        mem_bytes = self._largest_mem(nodes) if site.largest_mem == "auto" else int(site.largest_mem)
        time_s = _longest(nodes) if site.longest_time is None else int(site.longest_time)
        queued = _capped(caps, allowances.QUEUED) if site.max_submit == "auto" else int(site.max_submit)
        there = sum(kind.count for kind in nodes) or None
        return Limits(
            mem_bytes=_least(
                mem_bytes, *(_capped(caps, kind) for kind in MEMORY), known.node_mem_bytes if known else None
            ),
            time_s=_least(time_s, _capped(caps, allowances.TIME)),
            job_tasks=size,
            highest_task=size and size - 1,
            queued_tasks=queued,
            nodes=_least(there, _capped(caps, allowances.NODES), known.job_nodes if known else None),
            running_tasks=_capped(caps, allowances.RUNNING),
            preempts=self._may_preempt(known),
            lacks=self._lacking(partition, bool(nodes), cpus, gpus),
        )

    def caps(self, partition: str = "", qos: str = "") -> Caps:
        """Return what the accounting allows a job in a partition (default: the site's), with a QOS (the same)."""
        key = (partition or self._named, qos or self.site.qos or "")
        if key not in self._caps:
            own = (known := self._partition(key[0])) and known.own_qos
            mine = self._mine(key[0])
            used = key[1] or next(
                (row["DefaultQOS"] or row["QOS"].partition(",")[0] for row in mine if row["User"]), ""
            )
            of_qos = [allowances.qos_caps(row) for name in (own, used) for row in self._qos if row["Name"] == name]
            self._caps[key] = allowances.combined(of_qos, map(allowances.association_caps, mine))
        return self._caps[key]

    def _mine(self, partition: str) -> list[dict[str, str]]:
        """Return the associations that hold in a partition: mine for it, else mine for all, and those of accounts."""
        rows = self._associations
        own = [row for row in rows if row["User"] and row["Partition"] and row["Partition"] == partition]
        return (own or [row for row in rows if row["User"] and not row["Partition"]]) + [
            row for row in rows if not row["User"]
        ]

    def nodes(self, partition: str | None = None) -> list[SiteNodes]:
        """Return the kinds of node in a partition, or in several named as in `a,b`; by default in the site's."""
        default = ",".join(self.site.partitions) or self._named
        named = (partition or default).split(",")
        return [kind for kind in self.partitions if (kind.is_default if named == [""] else kind.partition in named)]

    def placed(self, spec: JobSpec) -> JobSpec:
        """Return a job that names a partition if it named none and the site has several for it to go to."""
        if spec.partition or not self.site.partitions or (spec.name == SUPERVISE and self.site.partition):
            return spec
        found = candidates_of(self.site, lambda name: self._limits(name, spec.cpus_on_node, spec.gpus))
        where = choose(found, spec.mem_bytes or 0, spec.time_s or 0, nodes=spec.nodes)
        return replace(spec, partition=where)

    @cached_property
    def partitions(self) -> list[SiteNodes]:
        """The kinds of node of all partitions; empty if sinfo does not answer."""
        return list(parse_nodes(_answer(NODES)))

    @cached_property
    def array_size(self) -> int | None:
        """MaxArraySize: one more than the highest number of a task."""
        size = self.site.max_array_size
        return (self.told.max_array_size or None) if size == "auto" else int(size)

    @cached_property
    def told(self) -> Site:
        """The configuration and the partitions of the cluster; empty where Slurm does not answer."""
        return Site(parse_settings(_answer(CONFIG)), parse_partitions(_answer(PARTITIONS)))

    @property
    def _named(self) -> str:
        return self.site.partition or os.environ.get("SBATCH_PARTITION", "")

    def _partition(self, name: str) -> Partition | None:
        return self.told.partition(name) if name else self.told.default

    def _may_preempt(self, partition: Partition | None) -> bool:
        mode = (partition.preempt_mode if partition else "") or self.told.setting("PreemptMode")
        return self.told.preempts and mode.upper() not in ("", "OFF", "NONE")

    def _lacking(self, partition: str, has_nodes: bool, cpus: int, gpus: int) -> str:  # noqa: FBT001
        """Say why a partition holds no task of such a size; empty where it does, or tells nothing."""
        caps = self.caps(partition)
        for kind, wanted in ((allowances.CPUS, cpus), (allowances.GPUS, gpus)):
            if kind in caps and wanted > caps[kind].value:
                return f"is limited to {caps[kind].value} {kind} ({caps[kind].name})"
        if has_nodes or not self.partitions:
            return ""
        if partition and not self.nodes(partition):
            return "does not exist or is hidden from you"
        return f"has no node with {cpus} cores" + (f" and {gpus} GPUs" if gpus else "")

    @cached_property
    def _associations(self) -> list[dict[str, str]]:
        """What I may charge, and what the accounts are allowed that I charge; empty where no limit holds."""
        if not self.told.enforces_limits:
            return []
        me, columns = slurm_commands.my_name(), allowances.ASSOCIATION
        mine = allowances.parse_rows(self._accounted(allowances.own_limits_of(me)), columns)
        account = self.site.account or os.environ.get("SBATCH_ACCOUNT", "")
        if not account and len({row["Account"] for row in mine}) > 1:
            account = parse_default_account(self._accounted(default_account_of(me)))
        mine = [row for row in mine if account in ("", row["Account"])]
        accounts = dict.fromkeys(row["Account"] for row in mine)
        shared = [self._accounted(allowances.shared_limits_of(name)) for name in accounts]
        of_account = [row for text in shared for row in allowances.parse_rows(text, columns) if not row["User"]]
        return mine + of_account

    @cached_property
    def _qos(self) -> list[dict[str, str]]:
        if not self.told.enforces_limits:
            return []
        return allowances.parse_rows(self._accounted(allowances.every_qos()), allowances.QOS)

    def _accounted(self, command: Sequence[str]) -> str:
        """Return what sacctmgr prints; nothing once it has failed to answer, which may take it long."""
        if self._is_silent:
            return ""
        try:
            return slurm_commands.run_command(command, PATIENCE_S)
        except CommandFailed:
            self._is_silent = True
            return ""

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


def _answer(command: Sequence[str]) -> str:
    """Return what a command prints; nothing if it fails."""
    try:
        return slurm_commands.run_command(command)
    except CommandFailed:
        return ""


def _least(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _capped(caps: Caps, kind: str) -> int | None:
    return caps[kind].value if kind in caps else None


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

FULL_QUEUE = "   (lists your jobs; each run has 3 supervisor jobs), or wait until some end"

# what the scheduler says → which keys to change, the first that is found ({} is the stage), and what follows
REMEDIES: dict[str, tuple[tuple[str, ...], str]] = {
    "no such file or directory": ((), " --executor local   (or log in where sbatch is installed, or load its module)"),
    "configuration source": ((), " --executor local   (or set SLURM_CONF to Slurm's configuration file)"),
    "maxsubmit": (("slurm.max_submit",), FULL_QUEUE),
    "maxwall": (("{}.time",), ""),
    "maxcpu": (("{}.cpus",), ""),
    "maxmem": (("{}.mem",), ""),
    "maxgres": (("{}.gpus",), ""),
    "job submit limit": (("slurm.max_submit",), FULL_QUEUE),
    "invalid account": (("slurm.account",), "   (sacctmgr show assoc user=$USER lists yours)"),
    "partition": (("slurm.partition",), ""),
    "qos": (("slurm.qos",), "   (sacctmgr show qos lists them)"),
    "reservation": (("slurm.reservation",), "   (scontrol show reservation lists them)"),
    "feature": (("slurm.constraint",), "   (sinfo -o '%n %f' lists what nodes have)"),
    "memory specification": (("{}.mem",), ""),
    "time limit": (("{}.time",), ""),
    "array": (("slurm.max_array_size",), "   (scontrol show config has MaxArraySize)"),
    "gres": (("{}.gpus",), ", or --set cluster.slurm.gpus=gpus-per-node"),
    "node configuration": (("{}.mem", "{}.cpus", "{}.gpus"), "   (reduce one of them)"),
    "dependency": ((), ""),
}


def transient(message: str) -> bool:
    """Tell whether the same submission may succeed a little later."""
    return not message.strip() or any(sign in message.lower() for sign in PASSING)


def refusal_of(spec: JobSpec, message: str, partitions: Iterable[str]) -> SubmissionRefused:
    """Return an error with the scheduler's own message and the settings to change."""
    words = [line.removeprefix("sbatch: error: ") for line in message.strip().splitlines() if line]
    what = "the cluster rejected the job: " + ("; ".join(words) or "sbatch failed without a message")
    keys, then = next((change for sign, change in REMEDIES.items() if sign in message.lower()), ((), ""))
    of_stage = {"slurm.partition": bool(spec.partition), "slurm.constraint": bool(spec.constraint)}
    keys = tuple(key.replace("slurm", spec.section) if of_stage.get(key) else key.format(spec.section) for key in keys)
    if any(key.endswith(".partition") for key in keys) and (names := ", ".join(sorted(set(partitions)))):
        then += f"   (available: {names})"
    if transient(message):
        keys, then = (), "   (when sinfo answers again)"
    remedy = spec.again.with_settings(*((f"cluster.{key}", ANY) for key in keys), then=then)
    is_silent = transient(message) or any(sign in message.lower() for sign in ABSENT)
    kind = ClusterSilent if is_silent else SubmissionRefused
    return kind(what, where=f"job {spec.name}", remedy=remedy)


def refuse_above_caps(spec: JobSpec, caps: Caps) -> None:
    """Refuse a job whose tasks ask for more than the accounting allows: Slurm would refuse it, or never start it."""
    mem_bytes = spec.mem_bytes or 0
    asked = {
        allowances.TIME: (spec.time_s or 0, "time", 1),
        allowances.MEM: (mem_bytes * spec.nodes, "mem", spec.nodes),
        allowances.MEM_ON_NODE: (mem_bytes, "mem", 1),
        allowances.CPUS: (spec.cpus * spec.processes, "cpus", spec.processes),
        allowances.GPUS: (spec.gpus * spec.nodes, "gpus", spec.nodes),
        allowances.NODES: (spec.nodes, "nodes", 1),
    }
    for kind, (wanted, setting, shares) in asked.items():
        if kind not in caps or wanted <= caps[kind].value:
            continue
        cap, thing = caps[kind], {"time": "", "mem": " of memory"}.get(setting, f" {setting}")
        most = allowances.shown(kind, cap.value)
        what = f"each task asks for {allowances.shown(kind, wanted)}{thing}; {cap.name} allows {most}"
        fits = allowances.shown(kind, max(1, cap.value // shares))
        remedy = spec.again.with_settings((f"cluster.{spec.section}.{setting}", fits))
        raise SubmissionRefused(what, where=f"job {spec.name}", remedy=remedy)


def refuse_narrow_queue(spec: JobSpec, limits: Limits, caps: Caps) -> None:
    """Refuse a supervisor's job where the queue has no place for it, its standby, the next visit and a task."""
    most = limits.queued_tasks
    if spec.name != SUPERVISE or most is None or most >= LEAST_QUEUE:
        return
    cap = caps.get(allowances.QUEUED)
    limit = cap.name if cap and cap.value == most else "cluster.slurm.max_submit"
    what = f"{limit} allows {most} jobs in the queue: a run with its supervisors needs {LEAST_QUEUE}"
    remedy = spec.again.with_settings(("cluster.supervisor.where", "login"))
    raise SubmissionRefused(what, where=f"job {spec.name}", remedy=remedy)


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
        what = f"each task asks for {spec.nodes} nodes; {', '.join(sorted(there))} has {most} large enough"
        remedy = spec.again.with_settings((f"cluster.{spec.section}.nodes", str(most)))
        raise SubmissionRefused(what, where=f"job {spec.name}", remedy=remedy)
