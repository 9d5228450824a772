"""Finds the nodes of an existing allocation, the command that starts a program on one, and their end.

They come from a host file, or from the variables of the scheduler in whose job this process runs.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from pipeline.cluster.accounting import CommandFailed
from pipeline.cluster.slurm_commands import run_command
from pipeline.cluster.slurm_words import epoch_of
from pipeline.command_line import Command
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config.schema_cluster import AllocationSection

HOST = "{host}"
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", HOST)
# A step with all of the job's resources on the node; without --mem=0 and --cpu-bind=none it gets only a share.
SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--cpu-bind=none", "--mpi=none", "-w", HOST)
HOSTFILES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE")
LOOKED_AT = ("cluster.allocation.hosts", "SLURM_JOB_NODELIST", *HOSTFILES, "LSB_MCPU_HOSTS")


@dataclass(frozen=True, slots=True)
class Host:
    """A node and its resources for tasks; None: everything it has."""

    name: str
    cpus: int | None = None
    gpus: int | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """Nodes, the command prefix that starts a program on one, and their end, if known."""

    hosts: tuple[Host, ...]
    start: tuple[str, ...]
    ends_at: float | None = None


def find_allocation(section: AllocationSection) -> Allocation:
    """Return the allocation that this process runs in; raise ConfigError where there is none."""
    found, environment = None, os.environ
    if section.hosts is not None:
        found = Allocation(_read_hosts(section.hosts), SSH)
    elif listed := environment.get("SLURM_JOB_NODELIST"):
        found = _of_slurm(listed, environment.get("SLURM_JOB_ID", ""))
    elif path := environment.get("PBS_NODEFILE"):
        tool = ("pbs_tmrsh", HOST) if shutil.which("pbs_tmrsh") else ("pbsdsh", "-h", HOST)
        names = tuple(Host(host.name) for host in _read_hosts(Path(path)))  # a line is a process, not a core
        found = Allocation(names, tool, _after_start(environment.get("PBS_WALLTIME", "")))
    elif path := environment.get("LSB_DJOB_HOSTFILE"):
        found = Allocation(_read_hosts(Path(path)), ("blaunch", HOST), _end_of_lsf())
    elif counts := environment.get("LSB_MCPU_HOSTS", "").split():
        hosts = tuple(Host(name, int(cpus)) for name, cpus in zip(counts[::2], counts[1::2], strict=True))
        found = Allocation(hosts, ("blaunch", HOST), _end_of_lsf())
    if found is None or not found.hosts:
        what = f"this process runs in no allocation: none of these names a node: {', '.join(LOOKED_AT)}"
        remedy = Command.submit("all").with_settings(("cluster.allocation.hosts", "FILE"), then="   (a host a line)")
        raise ConfigError(what, where="cluster.executor", remedy=remedy)
    ends_at = found.ends_at if section.time is None else psutil.Process().create_time() + section.time
    return Allocation(found.hosts, section.start or found.start, ends_at)


def _read_hosts(path: Path) -> tuple[Host, ...]:
    """Read a host file: `name slots=8 gpus=2` a line, or a line for each slot; # begins a comment."""
    try:
        lines = [line.partition("#")[0].split() for line in path.read_text().splitlines()]
        named = [(words[0], dict(word.split("=", 1) for word in words[1:])) for words in lines if words]
        known = dict(named)
        counted = {name: count for name, count in Counter(name for name, _ in named).items() if count > 1}
        return tuple(
            Host(name, _count(own, "slots") or counted.get(name), _count(own, "gpus")) for name, own in known.items()
        )
    except (OSError, ValueError) as error:
        what = f"cannot be read as a host file: {error}"
        raise ConfigError(what, where=str(path), remedy="write lines such as: node1 slots=16 gpus=4") from error


def _count(settings: dict[str, str], name: str) -> int | None:
    return int(settings[name]) if name in settings else None


def _of_slurm(listed: str, job: str) -> Allocation:
    """Return the nodes and the end of a Slurm job."""
    try:
        names = run_command(["scontrol", "show", "hostnames", listed]).split()
        end = os.environ.get("SLURM_JOB_END_TIME") or run_command(["squeue", "-h", "-j", job, "-o", "%e"]).strip()
    except CommandFailed as error:
        remedy = Command.submit("all").with_settings(("cluster.allocation.hosts", "FILE"), then="   (a host a line)")
        raise ConfigError(f"the nodes of job {job} are unknown: {error.what}", remedy=remedy) from error
    return Allocation(tuple(map(Host, names)), SRUN, epoch_of(end))


def _after_start(seconds: str) -> float | None:
    """Return the end of a job with this time limit, counted from the start of its script."""
    if not seconds.isdecimal():
        return None
    return psutil.Process(os.getsid(0) or None).create_time() + int(seconds)


def _end_of_lsf() -> float | None:
    """Return when LSF ends this job, if bjobs says how many minutes are left."""
    with suppress(CommandFailed, ValueError):
        left = run_command(["bjobs", "-noheader", "-o", "time_left", os.environ.get("LSB_JOBID", "")]).split()
        hours, _, minutes = left[0].partition(":") if left else ("", "", "")
        return time.time() + 60 * (60 * int(hours) + int(minutes))
    return None
