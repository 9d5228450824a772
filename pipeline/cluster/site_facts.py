"""What a cluster is like, as its own commands tell it; every version and every site prints a little differently.

Nothing here runs a command by itself: `look` asks through the function it is given, the rest only reads text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pipeline.cluster.accounting import CommandFailed
from pipeline.cluster.slurm_words import Gpus, limit_of, parse_gres
from pipeline.units import MIB, first_few

Ask: TypeAlias = Callable[[Sequence[str], float], str]  # arguments and seconds → stdout; raises CommandFailed

PATIENCE_S = 20.0
CONFIG = ("scontrol", "show", "config")
PARTITIONS = ("scontrol", "show", "partition", "--oneliner")
# --exact: 3 nodes of 64 GB are no "64000+"
NODES = ("sinfo", "--noheader", "--exact", "--format=%P|%D|%c|%m|%G|%f|%l|%N")
NOTHING = ("", "(null)", "N/A", "n/a", "NONE", "none", "UNLIMITED", "INFINITE", "infinite", "ALL")
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w/:-]*)=(\S*)")
_SETTING = re.compile(r"\s*([\w/\[\]-]+)\s*=\s?(.*)")


@dataclass(frozen=True, slots=True)
class SiteNodes:
    """Nodes of one partition that are alike; a partition of several kinds has several such groups."""

    partition: str
    is_default: bool  # whether that is the partition of jobs that name none
    count: int
    cpus: int  # of one node, as the next two; 0: not told
    mem_bytes: int
    gpus: tuple[Gpus, ...]
    features: tuple[str, ...]
    time_s: int | None  # the longest that a job may take; None: no limit
    named: str  # the nodes, as Slurm lists them

    @property
    def gpu_count(self) -> int:
        return sum(gpus.count for gpus in self.gpus)


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition, as scontrol shows it."""

    name: str
    is_default: bool
    is_up: bool
    time_s: int | None  # None: no limit
    preempt_mode: str  # empty: not told
    grace_s: int
    accounts: tuple[str, ...]  # empty: all
    qos: tuple[str, ...]  # empty: all
    nodes: int | None
    node_mem_bytes: int | None = None  # that a job may have of a node; None: all
    job_nodes: int | None = None  # that a job may have; None: all
    own_qos: str = ""  # whose limits hold for all of its jobs


@dataclass(frozen=True, slots=True)
class Association:
    """An account that the user may charge, in which partition, and with which QOS."""

    account: str
    partition: str
    qos: tuple[str, ...]
    max_submit: int | None


@dataclass(frozen=True, slots=True)
class Site:
    """Everything that a cluster's commands reported about it."""

    settings: Mapping[str, str]
    partitions: tuple[Partition, ...] = ()
    nodes: tuple[SiteNodes, ...] = ()
    associations: tuple[Association, ...] = ()
    default_account: str = ""
    qos_max_submit: Mapping[str, int | None] = field(default_factory=dict)  # of every QOS there is
    silent: tuple[str, ...] = ()  # what could not be asked, and why

    @property
    def name(self) -> str:
        return self.settings.get("ClusterName", "") or "slurm"

    @property
    def version(self) -> str:
        return self.settings.get("SLURM_VERSION", "") or "of unknown version"

    @property
    def default(self) -> Partition | None:
        """The partition of jobs that name none."""
        return next((partition for partition in self.partitions if partition.is_default), None)

    @property
    def enforces_limits(self) -> bool:
        """Whether the limits of associations and QOS hold; where it is not told, they are taken to."""
        how = self.settings.get("AccountingStorageEnforce", "limits").lower()
        return any(word in how for word in ("limits", "safe", "all"))

    @property
    def preempts(self) -> bool:
        """Whether jobs may have to make room for others at all."""
        return self.setting("PreemptType") not in ("", "preempt/none")

    @property
    def max_array_size(self) -> int | None:
        """One more than the highest number of a task in an array."""
        return leading_number(self.settings.get("MaxArraySize", ""))

    @property
    def counts_memory(self) -> bool | None:
        """Whether memory is a consumable resource, as cores are; None if unknown."""
        how = self.settings.get("SelectTypeParameters")
        return None if how is None else "MEMORY" in how.upper()

    @property
    def limits_memory(self) -> bool | None:
        """Whether a job that uses more memory than it asked for is stopped; None if unknown."""
        if self.setting("JobAcctGatherParams").lower().find("overmemorykill") >= 0:
            return True
        if not self.settings.get("TaskPlugin"):
            return None
        if "cgroup" not in self.setting("TaskPlugin") or self.counts_memory is False:
            return False
        constrained = self.settings.get("ConstrainRAMSpace")  # which not every version shows
        return None if constrained is None else constrained.lower() in ("yes", "true", "1")

    def setting(self, key: str) -> str:
        """Return a value of `scontrol show config`, empty if it is not set."""
        return "" if self.settings.get(key, "") in ("(null)", "N/A") else self.settings.get(key, "")

    def partition(self, name: str) -> Partition | None:
        return next((partition for partition in self.partitions if partition.name == name), None)

    def bars(self, partition: str) -> str:
        """Say why the user's jobs would not run in a partition now; empty if nothing is known against it."""
        known = self.partition(partition)
        mine = {association.account for association in self.associations}
        if known is None:
            return ""
        if known.accounts and mine.isdisjoint(known.accounts):
            return f"{partition} does not accept your accounts, only {first_few(known.accounts)}"
        return "" if known.is_up else f"{partition} is not up"

    def nodes_of(self, partition: str) -> list[SiteNodes]:
        """Return the groups of nodes in a partition."""
        return [node for node in self.nodes if node.partition == partition]


def look_at_site(ask: Ask, user: str) -> Site:
    """Query the cluster; raises only if the controller does not answer, other failures go into `silent`."""
    settings = parse_settings(ask(CONFIG, PATIENCE_S))
    silent: list[str] = []

    def answer_to(*command: str) -> str:
        try:
            return ask(command, PATIENCE_S)
        except CommandFailed as error:
            silent.append(f"{command[0]}: {last_line(error.what).removeprefix(f'{command[0]}: ')}")
            return ""

    return Site(
        settings=settings,
        partitions=parse_partitions(answer_to(*PARTITIONS)),
        nodes=parse_nodes(answer_to(*NODES)),
        associations=parse_associations(answer_to(*associations_of(user)), settings.get("ClusterName", "")),
        default_account=parse_default_account(answer_to(*default_account_of(user))),
        qos_max_submit=parse_qos(answer_to("sacctmgr", "-nP", "show", "qos", "format=Name,MaxSubmitPU")),
        silent=tuple(dict.fromkeys(silent)),
    )


def associations_of(user: str) -> tuple[str, ...]:
    """Return the command that lists what a user may charge."""
    return ("sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=Cluster,Account,Partition,QOS,MaxSubmit")


def default_account_of(user: str) -> tuple[str, ...]:
    """Return the command that prints a user's default account."""
    return ("sacctmgr", "-nP", "show", "user", user, "format=DefaultAccount")


def parse_settings(text: str) -> dict[str, str]:
    """Parse `scontrol show config`."""
    matches = (_SETTING.fullmatch(line) for line in text.splitlines())
    return {match[1]: match[2].strip() for match in matches if match}


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """Parse `scontrol show partition --oneliner`."""
    lines = (dict(_FIELD.findall(line)) for line in text.splitlines())
    return tuple(_partition(line) for line in lines if line.get("PartitionName"))


def parse_nodes(text: str) -> tuple[SiteNodes, ...]:
    """Parse the output of NODES; malformed lines are skipped."""
    rows = (line.strip().split("|") for line in text.splitlines())
    return tuple(
        SiteNodes(
            partition=row[0].rstrip("*"),
            is_default=row[0].endswith("*"),
            count=leading_number(row[1]) or 0,
            cpus=leading_number(row[2]) or 0,
            mem_bytes=(leading_number(row[3]) or 0) * MIB,
            gpus=parse_gres(row[4]),
            features=_list(row[5]),
            time_s=limit_of(row[6]),
            named=row[7],
        )
        for row in rows
        if len(row) == 8 and row[0]
    )


def parse_associations(text: str, cluster: str = "") -> tuple[Association, ...]:
    """Parse the output of `associations_of`, skipping other clusters."""
    rows = (line.split("|") for line in text.splitlines())
    return tuple(
        Association(row[1], row[2], _list(row[3]), leading_number(row[4]))
        for row in rows
        if len(row) >= 5 and row[1] and cluster.lower() in ("", row[0].lower())
    )


def parse_default_account(text: str) -> str:
    """Parse the output of `default_account_of`."""
    return next((line.split("|")[0].strip() for line in text.splitlines() if line.strip()), "")


def parse_qos(text: str) -> dict[str, int | None]:
    """Return each QOS with the number of jobs that one user may submit to it."""
    rows = (line.split("|") for line in text.splitlines())
    return {row[0]: leading_number(row[1]) for row in rows if len(row) >= 2 and row[0]}


def leading_number(text: str) -> int | None:
    """Return the whole number that a text begins with, such as 6000+."""
    match = re.match(r"\d+", text.strip())
    return int(match.group()) if match else None


def _partition(line: Mapping[str, str]) -> Partition:
    return Partition(
        name=line["PartitionName"],
        is_default=line.get("Default") == "YES",
        is_up=line.get("State", "UP").upper() == "UP",
        time_s=limit_of(line.get("MaxTime", "")),
        preempt_mode=line.get("PreemptMode", ""),
        grace_s=leading_number(line.get("GraceTime", "")) or 0,
        accounts=_list(line.get("AllowAccounts", "")),
        qos=_list(line.get("AllowQos", "")),
        nodes=leading_number(line.get("TotalNodes", "")),
        node_mem_bytes=(leading_number(line.get("MaxMemPerNode", "")) or 0) * MIB or None,
        job_nodes=leading_number(line.get("MaxNodes", "")),
        own_qos="" if line.get("QoS", "") in NOTHING else line["QoS"],
    )


def _list(text: str) -> tuple[str, ...]:
    """Return the parts of a comma-separated list; empty where it stands for all or for none."""
    return tuple(part for part in (part.strip() for part in text.split(",")) if part not in NOTHING)


def last_line(text: str) -> str:
    """Return the last line that is not blank: the message with which a command ended."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")
