"""Describes a Slurm cluster by the answers of its commands; the site's profile overrides them.

Each command runs once, when its answer is first needed. Unanswered facts are unknown and limit nothing.

The limits of a QOS override those of the association: first the QOS of the partition, then that of the job. But of
several limits on queued tasks we take the lowest: a smaller queue costs little, a refused job much.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

from pipeline.cluster import refusals, slurm_commands
from pipeline.cluster.accounting import CommandFailed
from pipeline.cluster.candidates import candidates_of, choose, envelope, most
from pipeline.cluster.job_spec import SUPERVISE, Job, Limits, Request
from pipeline.cluster.refusals import CPUS, CPUS_ON_NODE, GPUS, GPUS_ON_NODE, MEM, MEM_ON_NODE, TIME
from pipeline.cluster.slurm_commands import CONFIG, parse_settings
from pipeline.cluster.slurm_words import Gpus, bytes_of, limit_of, parse_gres
from pipeline.units import MIB, first_few

if TYPE_CHECKING:
    from pipeline.cluster.refusals import Bound
    from pipeline.config.schema_cluster import SlurmSection

    Ask: TypeAlias = Callable[[Sequence[str], float], str]  # (arguments, seconds) → stdout, or CommandFailed

PATIENCE_S = {"sacctmgr": 20.0}
PARTITIONS = ("scontrol", "show", "partition", "--oneliner")
# --exact: 3 nodes of 64 GB are no "64000+"
NODES = ("sinfo", "--noheader", "--exact", "--format=%P|%D|%c|%m|%G|%f|%l|%N")
NODE_COLUMNS = ("partition", "count", "cpus", "mem", "gres", "features", "time", "named")
SACCTMGR = ("sacctmgr", "--noheader", "--parsable2", "show")
ASSOCIATION = (
    "Cluster", "Account", "User", "Partition", "DefaultQOS", "QOS",
    "MaxWall", "MaxTRES", "MaxTRESPerNode", "GrpTRES", "MaxSubmitJobs", "GrpSubmitJobs", "MaxJobs", "GrpJobs",
)  # fmt: skip
QOS = (
    "Name",
    "MaxWall", "MaxTRES", "MaxTRESPerNode", "MaxTRESPU", "MaxTRESPA", "GrpTRES",
    "MaxSubmitJobsPU", "MaxSubmitJobsPA", "GrpSubmitJobs", "MaxJobsPU", "MaxJobsPA", "GrpJobs",
)  # fmt: skip
EVERY_QOS = (*SACCTMGR, "qos", f"format={','.join(QOS)}")
QUEUED, RUNNING = "queued", "running"  # limits on the number of tasks
_TRES = {"cpu": CPUS, "mem": MEM, "gres/gpu": GPUS, "node": refusals.NODES}
_TALLIES = {"MaxSubmit": QUEUED, "GrpSubmit": QUEUED, "MaxJobs": RUNNING, "GrpJobs": RUNNING}
_NOTHING = ("", "(null)", "N/A", "n/a", "NONE", "none", "UNLIMITED", "INFINITE", "infinite", "ALL")
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w/:-]*)=(\S*)")


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Nodes of one partition that are alike."""

    partition: str
    is_default: bool  # whether its partition is the default
    count: int
    cpus: int  # of one node, like the next two; 0: unknown
    mem_bytes: int
    gpus: tuple[Gpus, ...]
    features: tuple[str, ...]
    time_s: int | None  # longest time limit of a job; None: no limit
    named: str  # the nodes, as Slurm lists them

    @property
    def gpu_count(self) -> int:
        return sum(gpus.count for gpus in self.gpus)

    def holds(self, request: Request) -> bool:
        """Tell whether a node has the cores and GPUs of a request."""
        return self.cpus >= request.cpus_on_node and self.gpu_count >= request.gpus


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition, as scontrol shows it."""

    name: str
    is_default: bool
    is_up: bool
    time_s: int | None  # None: no limit
    preempt_mode: str  # empty: unknown
    accounts: tuple[str, ...]  # empty: all
    node_mem_bytes: int | None  # most memory of a node for a job; None: all
    job_nodes: int | None  # most nodes of a job; None: all
    own_qos: str  # the QOS whose limits hold for all of its jobs


@dataclass(frozen=True, slots=True)
class Cap:
    """A maximum, and the name of the limit."""

    value: int
    name: str  # such as "MaxWall of QOS tiny"


Caps: TypeAlias = dict[str, Cap]  # limited resource → caps


@dataclass(frozen=True, slots=True)
class Association:
    """The limits of one user of an account, or of all of them together."""

    account: str
    user: str  # empty: all
    partition: str  # empty: all
    qos: tuple[str, ...]  # the default first
    caps: Caps


class Site:
    """One cluster: its partitions and nodes, and the limits of this user."""

    def __init__(self, profile: SlurmSection, ask: Ask | None = None) -> None:
        self.profile = profile
        self._ask = ask
        self._silent: dict[str, str] = {}  # program → why it did not answer; it is not asked again
        self._reserved: dict[str, int] = {}  # node names → memory that they reserve for themselves
        self._caps: dict[tuple[str, str], Caps] = {}  # (partition, QOS) → caps

    def refuse_silent(self) -> Site:
        """Return the site, or raise CommandFailed if its controller does not answer."""
        self.settings = parse_settings(self._run(CONFIG))
        return self

    @property
    def silent(self) -> list[str]:
        """The programs that did not answer, and why."""
        return [f"{program}: {why}" for program, why in self._silent.items()]

    @cached_property
    def settings(self) -> Mapping[str, str]:
        """The values of `scontrol show config`."""
        return parse_settings(self._answer(*CONFIG))

    @cached_property
    def partitions(self) -> tuple[Partition, ...]:
        lines = (dict(_FIELD.findall(line)) for line in self._answer(*PARTITIONS).splitlines())
        return tuple(_partition(line) for line in lines if line.get("PartitionName"))

    @cached_property
    def nodes(self) -> Sequence[NodeKind]:
        """The kinds of node of all partitions."""
        return [_node_kind(row) for row in parse_rows(self._answer(*NODES), NODE_COLUMNS) if row["partition"]]

    @cached_property
    def associations(self) -> list[Association]:
        """The associations of this user on this cluster."""
        return self._associations(f"user={slurm_commands.my_name()}")  # sacctmgr knows users only by name

    @cached_property
    def default_account(self) -> str:
        text = self._answer(*SACCTMGR, "user", slurm_commands.my_name(), "format=DefaultAccount")
        return text.partition("\n")[0].strip()

    @cached_property
    def qos(self) -> dict[str, Caps]:
        """The limits of each QOS."""
        rows = parse_rows(self._answer(*EVERY_QOS), QOS)
        return {row["Name"]: parse_caps(row, f"QOS {row['Name']}") for row in rows}

    @property
    def cluster(self) -> str:
        """The cluster's name; empty if Slurm does not answer."""
        return self.setting("ClusterName")

    @property
    def name(self) -> str:
        return self.cluster or "slurm"

    @property
    def version(self) -> str:
        return self.setting("SLURM_VERSION") or "of unknown version"

    @property
    def default(self) -> Partition | None:
        """The default partition."""
        return next((partition for partition in self.partitions if partition.is_default), None)

    @property
    def max_array_size(self) -> int | None:
        """One more than the highest number of a task in an array."""
        size = self.profile.max_array_size
        return (leading_number(self.setting("MaxArraySize")) or None) if size == "auto" else int(size)

    @property
    def counts_memory(self) -> bool | None:
        """Whether memory is a consumable resource, as cores are; None if unknown."""
        how = self.settings.get("SelectTypeParameters")
        return None if how is None else "MEMORY" in how.upper()

    def setting(self, key: str) -> str:
        """Return a value of the configuration, empty if it is not set."""
        return "" if self.settings.get(key, "") in ("(null)", "N/A") else self.settings.get(key, "")

    def partition(self, name: str) -> Partition | None:
        """Return a partition; without a name, the cluster's default."""
        return next((known for known in self.partitions if known.name == name), None) if name else self.default

    def nodes_of(self, partition: str = "") -> list[NodeKind]:
        """Return the kinds of node in a partition, or in several named as in `a,b`; by default in the site's."""
        names = (partition or ",".join(self.profile.partitions) or self._named).split(",")
        return [kind for kind in self.nodes if (kind.is_default if names == [""] else kind.partition in names)]

    def bars(self, partition: str) -> str:
        """Return why the user's jobs would not run in a partition now; empty if no reason is known."""
        known = self.partition(partition)
        if known is None:
            return ""
        if known.accounts and {association.account for association in self.associations}.isdisjoint(known.accounts):
            return f"{partition} does not accept your accounts, only {first_few(known.accounts)}"
        return "" if known.is_up else f"{partition} is not up"

    def limits(self, request: Request) -> Limits:
        """Return the limits for tasks of such a size in the request's partition, else in the site's.

        If the site names several partitions, return the highest limits over them.
        """
        if not request.partition and self.profile.partitions:
            return envelope([self._limits(name, request) for name in self.profile.partitions])
        return self._limits(request.partition or self._named, request)

    def refuse(self, job: Job) -> Limits:
        """Refuse a job that Slurm would refuse or never start; return its limits."""
        request, limits = job.request, self.limits(job.request)
        caps = self.caps(request.partition, request.qos)
        refusals.refuse_beyond(
            job,
            (
                (kind, cap.value, f"{cap.name} allows {{}}")
                for kind, cap in caps.items()
                if kind not in (QUEUED, RUNNING)
            ),
        )
        queued = caps.get(QUEUED)
        is_cap = queued is not None and queued.value == limits.queued_tasks
        refusals.refuse_narrow_queue(job, limits, queued.name if queued and is_cap else "cluster.slurm.max_submit")
        refusals.refuse_beyond(job, self._bounds_of_nodes(request, limits))
        return limits

    def _bounds_of_nodes(self, request: Request, limits: Limits) -> Iterator[Bound]:
        """Yield the most that the nodes of a request's partitions offer, if known."""
        if not (nodes := self.nodes_of(request.partition)):
            return
        large = [kind for kind in nodes if kind.holds(request)]
        partitions = ", ".join(sorted({kind.partition for kind in nodes}))
        if limits.time_s:
            yield TIME, limits.time_s, f"{partitions} gives at most {{}}"
        largest = f"the largest node of {partitions}"
        yield CPUS_ON_NODE, max(kind.cpus for kind in nodes), f"{largest} has {{}}"
        yield GPUS_ON_NODE, max(kind.gpu_count for kind in nodes), f"{largest} has {{}}"
        if large and max(kind.mem_bytes for kind in large) < max(kind.mem_bytes for kind in nodes):
            largest += f" with {request.cpus_on_node} cores" + (f" and {request.gpus} GPUs" if request.gpus else "")
        if limits.mem_bytes is not None:
            yield MEM_ON_NODE, limits.mem_bytes, f"{largest} has {{}}"
        counts = Counter[str]()
        for kind in large:
            counts[kind.partition] += kind.count
        if counts:
            yield refusals.NODES, max(counts.values()), f"{', '.join(sorted(counts))} has {{}} large enough"

    def placed(self, job: Job) -> Job:
        """Add a partition to a job without one, if the site lists several."""
        request, profile = job.request, self.profile
        if request.partition or not profile.partitions or (job.name == SUPERVISE and profile.partition):
            return job
        found = candidates_of(profile, lambda name: self._limits(name, request))
        return job.asking(partition=choose(found, request.mem_bytes or 0, request.time_s or 0, nodes=request.nodes))

    def caps(self, partition: str = "", qos: str = "") -> Caps:
        """Return the caps of a job in a partition with a QOS. Default: those of the site."""
        key = (partition or self._named, qos or self.profile.qos or "")
        if key not in self._caps:
            known, charged = self.partition(key[0]), self._charged(key[0])
            used = key[1] or next((own.qos[0] for own in charged if own.user and own.qos), "")
            names = [name for name in (known.own_qos if known else "", used) if name and self._enforces_limits]
            self._caps[key] = combined([self.qos.get(name, {}) for name in names], [own.caps for own in charged])
        return self._caps[key]

    def _limits(self, partition: str, request: Request) -> Limits:
        profile, size, caps, known = self.profile, self.max_array_size, self.caps(partition), self.partition(partition)
        nodes = [kind for kind in self.nodes_of(partition) if kind.holds(request)]

        def cap(kind: str) -> int | None:
            return caps[kind].value if kind in caps else None

        mem_bytes = self._largest_mem(nodes) if profile.largest_mem == "auto" else int(profile.largest_mem)
        time_s = most([kind.time_s for kind in nodes]) if profile.longest_time is None else int(profile.longest_time)
        there = sum(kind.count for kind in nodes) or None
        return Limits(
            mem_bytes=_least(mem_bytes, cap(MEM), cap(MEM_ON_NODE), known.node_mem_bytes if known else None),
            time_s=_least(time_s, cap(TIME)),
            job_tasks=size,
            highest_task=size and size - 1,
            queued_tasks=cap(QUEUED) if profile.max_submit == "auto" else int(profile.max_submit),
            nodes=_least(there, cap(refusals.NODES), known.job_nodes if known else None),
            running_tasks=cap(RUNNING),
            preempts=self._may_preempt(known),
            lacks=self._lacking(partition, request, caps, has_nodes=bool(nodes)),
        )

    @property
    def _named(self) -> str:
        return self.profile.partition or os.environ.get("SBATCH_PARTITION", "")

    @property
    def _enforces_limits(self) -> bool:
        """Whether the limits of associations and QOS are enforced; True if unknown."""
        how = self.settings.get("AccountingStorageEnforce", "limits").lower()
        return any(word in how for word in ("limits", "safe", "all"))

    def _may_preempt(self, partition: Partition | None) -> bool:
        mode = (partition.preempt_mode if partition else "") or self.setting("PreemptMode")
        return self.setting("PreemptType") not in ("", "preempt/none") and mode.upper() not in ("", "OFF", "NONE")

    def _lacking(self, partition: str, request: Request, caps: Caps, *, has_nodes: bool) -> str:
        """Return why a task of this size fits no node of a partition; empty if it fits or this is unknown."""
        for kind, wanted in ((CPUS, request.cpus_on_node), (GPUS, request.gpus)):
            if kind in caps and wanted > caps[kind].value:
                return f"is limited to {caps[kind].value} {kind} ({caps[kind].name})"
        if has_nodes or not self.nodes:
            return ""
        if partition and not self.nodes_of(partition):
            return "does not exist or is hidden from you"
        return f"has no node with {request.cpus_on_node} cores" + (f" and {request.gpus} GPUs" if request.gpus else "")

    def _largest_mem(self, nodes: Sequence[NodeKind]) -> int | None:
        """Return the memory of the largest node, without the part that it reserves for itself."""
        if not nodes:
            return None
        most_bytes = max(kind.mem_bytes for kind in nodes)
        named = ",".join(dict.fromkeys(kind.named for kind in nodes if kind.mem_bytes == most_bytes))
        with suppress(CommandFailed):
            if named not in self._reserved:
                self._reserved[named] = slurm_commands.reserved_bytes(named)
        return most_bytes - self._reserved.get(named, 0)

    def _charged(self, partition: str) -> list[Association]:
        """Return the associations for a partition: the user's for it, else the user's for all; and the accounts'."""
        mine = self._mine if self._enforces_limits else []
        own = [association for association in mine if association.user and association.partition == partition != ""]
        all_of_mine = [association for association in mine if association.user and not association.partition]
        return (own or all_of_mine) + [association for association in mine if not association.user]

    @cached_property
    def _mine(self) -> list[Association]:
        """The associations of the jobs' account: this user's and the shared ones."""
        mine, account = self.associations, self.profile.account or os.environ.get("SBATCH_ACCOUNT", "")
        if not account and len({association.account for association in mine}) > 1:
            account = self.default_account
        mine = [association for association in mine if account in ("", association.account)]
        accounts = dict.fromkeys(association.account for association in mine)
        shared = [one for name in accounts for one in self._associations(f"account={name}", "user=") if not one.user]
        return mine + shared

    def _associations(self, *where: str) -> list[Association]:
        rows = parse_rows(
            self._answer(*SACCTMGR, "assoc", "where", *where, f"format={','.join(ASSOCIATION)}"), ASSOCIATION
        )
        return [_association(row) for row in rows if self.cluster.lower() in ("", row["Cluster"].lower())]

    def _answer(self, *command: str) -> str:
        """Return the output of a command; empty if its program has failed to answer before."""
        if command[0] in self._silent:
            return ""
        try:
            return self._run(command)
        except CommandFailed as error:
            self._silent[command[0]] = error.message.removeprefix(f"{command[0]}: ")
            return ""

    def _run(self, command: Sequence[str]) -> str:
        return (self._ask or slurm_commands.run_command)(command, PATIENCE_S.get(command[0], slurm_commands.ASK_S))


def parse_rows(text: str, columns: Sequence[str]) -> list[dict[str, str]]:
    """Parse lines of cells between bars; malformed lines are skipped."""
    rows = (line.strip().split("|") for line in text.splitlines())
    return [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]


def parse_caps(row: Mapping[str, str], holder: str) -> Caps:
    """Return the lowest cap of each kind in a row of sacctmgr."""
    found: Caps = {}
    for column, text in row.items():
        for kind, value, part in _amounts(column, text):
            cap = Cap(value, f"{column}{part} of {holder}")
            found[kind] = min(found.get(kind, cap), cap, key=attrgetter("value"))
    return found


def combined(of_qos: Sequence[Caps], of_associations: Sequence[Caps]) -> Caps:
    """Return the caps of a job: for each resource that of the first QOS with one, else the lowest association's."""
    found: Caps = {}
    for kind in {kind for caps in (*of_qos, *of_associations) for kind in caps}:
        caps = [caps[kind] for caps in of_qos if kind in caps]
        if kind == QUEUED or not caps:
            caps += [caps[kind] for caps in of_associations if kind in caps]
            caps.sort(key=attrgetter("value"))
        found[kind] = caps[0]
    return found


def leading_number(text: str) -> int | None:
    """Return the whole number at the start of a text such as 6000+."""
    match = re.match(r"\d+", text.strip())
    return int(match.group()) if match else None


def _amounts(column: str, text: str) -> Iterator[tuple[str, int, str]]:
    """Yield the limits in a cell: kind, amount, and the suffix of the limit's name."""
    if column == "MaxWall" and text:
        if (time_s := limit_of(text)) is not None:
            yield TIME, time_s, ""
    elif "TRES" in column:
        for name, _, value in (part.partition("=") for part in text.split(",")):
            text = f"{value}M" if name == "mem" and value.isdecimal() else value
            amount = bytes_of(text) if name == "mem" else leading_number(text)
            if name in _TRES and amount is not None:
                kind = MEM_ON_NODE if (name, column) == ("mem", "MaxTRESPerNode") else _TRES[name]
                yield kind, amount, f"({name})"
    elif text.isdecimal():
        yield from ((kind, int(text), "") for sign, kind in _TALLIES.items() if column.startswith(sign))


def _association(row: Mapping[str, str]) -> Association:
    holder = "/".join(filter(None, (row["Account"], row["User"], row["Partition"])))
    qos = tuple(dict.fromkeys(filter(None, (row["DefaultQOS"], *_list(row["QOS"])))))
    return Association(row["Account"], row["User"], row["Partition"], qos, parse_caps(row, f"the association {holder}"))


def _node_kind(row: Mapping[str, str]) -> NodeKind:
    return NodeKind(
        partition=row["partition"].rstrip("*"),
        is_default=row["partition"].endswith("*"),
        count=leading_number(row["count"]) or 0,
        cpus=leading_number(row["cpus"]) or 0,
        mem_bytes=(leading_number(row["mem"]) or 0) * MIB,
        gpus=parse_gres(row["gres"]),
        features=_list(row["features"]),
        time_s=limit_of(row["time"]),
        named=row["named"],
    )


def _partition(line: Mapping[str, str]) -> Partition:
    return Partition(
        name=line["PartitionName"],
        is_default=line.get("Default") == "YES",
        is_up=line.get("State", "UP").upper() == "UP",
        time_s=limit_of(line.get("MaxTime", "")),
        preempt_mode=line.get("PreemptMode", ""),
        accounts=_list(line.get("AllowAccounts", "")),
        node_mem_bytes=(leading_number(line.get("MaxMemPerNode", "")) or 0) * MIB or None,
        job_nodes=leading_number(line.get("MaxNodes", "")),
        own_qos="" if line.get("QoS", "") in _NOTHING else line["QoS"],
    )


def _list(text: str) -> tuple[str, ...]:
    """Return the parts of a comma-separated list; empty for ALL or none."""
    return tuple(part for part in (part.strip() for part in text.split(",")) if part not in _NOTHING)


def _least(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)
