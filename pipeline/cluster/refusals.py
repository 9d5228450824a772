"""What a cluster says when it takes no job: whether to try again, and what a person can change. Only words are here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.cluster.child import mebibytes
from pipeline.config.quantities import format_duration
from pipeline.errors import SubmissionRefused

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipeline.cluster.commands import Partition
    from pipeline.cluster.spec import JobSpec, Limits

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


def refused(spec: JobSpec, said: str, partitions: Iterable[str]) -> SubmissionRefused:
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


def refuse_above_nodes(spec: JobSpec, nodes: Sequence[Partition], limits: Limits) -> None:
    """Refuse a job with tasks that no node could ever hold; what nobody knows refuses nothing."""
    if not nodes:
        return
    cpus, gpus = max(one.cpus for one in nodes), max(one.gpus for one in nodes)
    where = f"the largest node of {', '.join(sorted({one.name for one in nodes}))}"
    most_mem = spec.mem_bytes or 0 if limits.mem_bytes is None else limits.mem_bytes
    if spec.time_s and limits.time_s and spec.time_s > limits.time_s:
        where = f"{', '.join(sorted({one.name for one in nodes}))} gives at most {format_duration(limits.time_s)}"
        what, section = f"each task asks for {format_duration(spec.time_s)}", _section(spec)
        remedy = f"{_again(spec)} --set cluster.{section}.time={format_duration(limits.time_s)}"
        raise SubmissionRefused(f"{what}; {where}", where=f"job {spec.name}", remedy=remedy)
    for key, fits, asked, there in (
        ("cpus", spec.cpus <= cpus, f"{spec.cpus} cores", str(cpus)),
        ("gpus", spec.gpus <= gpus, f"{spec.gpus} GPU{'s' * (spec.gpus != 1)}", str(gpus)),
        ("mem", (spec.mem_bytes or 0) <= most_mem, f"{mebibytes(spec.mem_bytes or 0)} of memory", mebibytes(most_mem)),
    ):
        if not fits:
            what = f"each task asks for {asked}; {where} has {there}"
            section = _section(spec)
            remedy = f"{_again(spec)} --set cluster.{section}.{key}={there}"
            raise SubmissionRefused(what, where=f"job {spec.name}", remedy=remedy)
