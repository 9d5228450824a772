"""Refuses jobs before their submission, and explains refusals of the scheduler."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeAlias

from pipeline.cluster.job_spec import SUPERVISE, Job
from pipeline.command_line import ANY
from pipeline.config.schema_parts import format_duration, format_size
from pipeline.errors import ClusterSilent, QueueFull, SubmissionRefused
from pipeline.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipeline.cluster.job_spec import Limits, Request

    Bound: TypeAlias = tuple[str, int, str]  # a kind, its maximum, and the source, with {} for the maximum

LEAST_QUEUE = 3  # a visit at work, the next one, and a task
# Limited resources of a task: of all its nodes together, or (`on_node`) of one.
TIME, MEM, CPUS, GPUS, NODES = "time", "mem", "cpus", "gpus", "nodes"
MEM_ON_NODE, CPUS_ON_NODE, GPUS_ON_NODE = "mem_on_node", "cpus_on_node", "gpus_on_node"

PASSING = (  # signs that the same submission may succeed a little later
    "timed out", "time out", "timeout", "unable to contact slurm", "temporarily unavailable",
    "temporarily unable to accept job", "connection refused", "connection reset", "communication connection failure",
    "zero bytes were transmitted", "message send failure", "message receive failure", "transport endpoint",
    "standby mode", "controller not responding", "interrupted system call", "could not make sense of sbatch output",
    "without a word",
)  # fmt: skip
# sbatch names the limit that a job violates, but its last line speaks of the "job submit limit" whatever that limit is.
LIMIT = re.compile(r"\b(?:assoc|qos)(?:grp|max|min)\w+", re.IGNORECASE)
SUBMIT, ANY_POLICY = "submit", "job submit limit"
ABSENT = ("no such file or directory", "configuration source")  # signs that Slurm is missing

FULL_QUEUE = "   (lists your jobs; each run has a supervisor job), or wait until some end"

# Message of the scheduler → keys to change ({}: the stage), and the effect; the first match counts
REMEDIES: dict[str, tuple[tuple[str, ...], str]] = {
    "no such file or directory": ((), " --executor local   (or log in where sbatch is installed, or load its module)"),
    "configuration source": ((), " --executor local   (or set SLURM_CONF to Slurm's configuration file)"),
    "maxsubmit": (("slurm.max_submit",), FULL_QUEUE),
    "maxwall": (("{}.time",), ""),
    "maxcpu": (("{}.cpus",), ""),
    "maxmem": (("{}.mem",), ""),
    "maxgres": (("{}.gpus",), ""),
    "maxnode": (("{}.nodes",), ""),
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
    "node configuration": (
        ("{}.mem", "{}.cpus", "{}.gpus"),
        "   (reduce one of them; sinfo -R shows nodes that are down)",
    ),
    "dependency": ((), ""),
}


def refuse_beyond(job: Job, bounds: Iterable[Bound]) -> None:
    """Refuse a job whose tasks exceed one of these bounds."""
    request, asked = job.request, _asked(job.request)
    for kind, most, holder in bounds:
        wanted, shares, setting = asked[kind]
        if wanted <= most:
            continue
        unit = {"time": "", "mem": " of memory", "cpus": " cores", "gpus": f" GPU{'s' * (wanted != 1)}"}
        what = f"each task asks for {shown(kind, wanted)}{unit.get(setting, f' {setting}')}"
        if kind == CPUS_ON_NODE and request.ranks > 1:
            what += f", {request.cpus} for each of its {request.ranks} processes on a node"
            if most < shares:  # not even a core for each process
                setting, shares = "gpus" if request.gpus else "ranks", 1
        raise job.refused(
            f"{what}; {holder.format(shown(kind, most))}", (f"{{}}.{setting}", shown(kind, max(1, most // shares)))
        )


def refuse_narrow_queue(job: Job, limits: Limits, limit: str) -> None:
    """Refuse a supervisor job if the queue is too small for it, the next visit and a task."""
    most = limits.queued_tasks
    if job.name == SUPERVISE and most is not None and most < LEAST_QUEUE:
        what = f"{limit} allows {most} jobs in the queue: a run with its supervisors needs {LEAST_QUEUE}"
        raise job.refused(what, ("supervisor.where", "login"))


def shown(kind: str, value: int) -> str:
    """Format an amount for the configuration; memory in whole mebibytes."""
    if kind == TIME:
        return format_duration(value)
    return str(format_size(value // MIB * MIB)) if kind in (MEM, MEM_ON_NODE) else str(value)


def transient(message: str) -> bool:
    """Tell whether the same submission may succeed a little later."""
    return not message.strip() or any(sign in message.lower() for sign in PASSING)


def refusal_of(job: Job, message: str, partitions: Iterable[str]) -> SubmissionRefused:
    """Return an error with the scheduler's own message and the settings to change."""
    words = [line.removeprefix("sbatch: error: ") for line in message.strip().splitlines() if line]
    what = "the cluster rejected the job: " + ("; ".join(words) or "sbatch failed without a message")
    keys, then = next((change for sign, change in REMEDIES.items() if sign in message.lower()), ((), ""))
    of_stage = {"slurm.partition": job.request.partition, "slurm.constraint": job.request.constraint}
    keys = tuple(key.replace("slurm", "{}") if of_stage.get(key) else key for key in keys)
    if any(key.endswith(".partition") for key in keys) and (names := ", ".join(sorted(set(partitions)))):
        then += f"   (available: {names})"
    if transient(message):
        keys, then = (), "   (when sinfo answers again)"
    refused = job.refused(what, *((key, ANY) for key in keys), then=then)
    if transient(message) or any(sign in message.lower() for sign in ABSENT):
        return ClusterSilent(what, where=refused.where, remedy=refused.next)
    if _is_of_queue(message):
        return QueueFull(what, where=refused.where, remedy=refused.next)
    return refused


def _is_of_queue(message: str) -> bool:
    """Tell whether the user has too many jobs in the queue: the same job is accepted later."""
    named = LIMIT.findall(message)
    return any(SUBMIT in limit.lower() for limit in named) if named else ANY_POLICY in message.lower()


def _asked(request: Request) -> dict[str, tuple[int, int, str]]:
    """Return each requested amount of a task, the number of shares, and the setting of a share."""
    mem_bytes, ranks = request.mem_bytes or 0, max(1, request.ranks)
    return {
        TIME: (request.time_s or 0, 1, "time"),
        MEM: (mem_bytes * request.nodes, request.nodes, "mem"),
        MEM_ON_NODE: (mem_bytes, 1, "mem"),
        CPUS: (request.cpus * request.processes, request.processes, "cpus"),
        CPUS_ON_NODE: (request.cpus_on_node, ranks, "cpus"),
        GPUS: (request.gpus * request.nodes, request.nodes, "gpus"),
        GPUS_ON_NODE: (request.gpus, 1, "gpus"),
        NODES: (request.nodes, 1, "nodes"),
    }
