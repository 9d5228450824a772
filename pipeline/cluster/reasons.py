"""Why jobs wait, by Slurm's own words: what each means, and what helps where it does not pass by itself."""

from __future__ import annotations

import re
from typing import NamedTuple

from pipeline.cluster.job_spec import TaskState

NEVER = ("never starts", "held")  # how the words for a reason begin for which a job will not start as it is
HELD_STATES = frozenset({TaskState.REQUEUE_HOLD, TaskState.SPECIAL_EXIT, TaskState.RESV_DEL_HOLD})
WAITING_STATES = frozenset({TaskState.PENDING, TaskState.REQUEUED, TaskState.REQUEUE_FED, *HELD_STATES})


class Reason(NamedTuple):
    """A reason in words, and the command that helps; a reason that passes by itself has none."""

    words: str
    remedy: str = ""


def is_stuck(state: TaskState, waits_for: str) -> bool:
    """Tell whether a pending task (`waits_for`: its reason in words) will not start unless somebody acts."""
    return state in HELD_STATES or (state in WAITING_STATES and waits_for.startswith(NEVER))


def reason_words(reason: str) -> str:
    """Explain a reason of squeue in words; unknown ones are returned as they are."""
    return explained(reason).words


def remedy_of(state: TaskState, reason: str, job: str) -> str:
    """Return the command that helps a task that waits; empty where it passes by itself, or nothing is known of it."""
    if state not in WAITING_STATES:
        return ""
    remedy = explained(reason).remedy or (RELEASE if state in HELD_STATES else "")
    return remedy.format(job=job)


def word_of(reason: str) -> str:
    """Return Slurm's word for a reason, without the details behind it."""
    return re.split(r"[,(]", reason, maxsplit=1)[0].strip()


def explained(reason: str) -> Reason:
    """Return what is known of a reason; of an unknown one its own words, and no remedy."""
    word = word_of(reason)
    known = REASONS.get(word) or REASONS.get(word.replace(" ", ""))
    if known is not None:
        detail = reason[len(word) :].strip(" ,()")
        return known._replace(words=f"{known.words} ({detail})") if detail else known
    return _limit(word) or Reason(reason)


def _limit(word: str) -> Reason | None:
    """Explain a limit of the account or of the quality of service by how Slurm composes its name."""
    match = re.fullmatch(r"(QOS|Assoc(?:iation)?)(Grp|Max|Min)?(.+?)(Limit|NotSatisfied)?", word)
    if match is None or word in ("QOS", "Assoc"):
        return None
    is_qos, scope, what = match[1] == "QOS", match[2] or "", match[3]
    whose, show = ("the quality of service", QOS_LIMITS) if is_qos else ("the account", ASSOC_LIMITS)
    if scope == "Min":
        return Reason(f"never starts: it asks for less than {whose} wants ({word})", _ask("more", show))
    if "PerJob" in what or "PerNode" in what:
        return Reason(f"never starts: it asks for more than {whose} allows ({word})", _ask("less", show))
    words = f"a limit of {whose} is reached ({word})"
    if what.startswith(("Job", "MaxJobs", "SubmitJob")) and "Minutes" not in what:  # its own jobs, and those end
        return Reason(words)
    return Reason(words, f"{show}   (wait until others have ended, or another account or qos: {CHANGE_ACCOUNT})")


def _ask(how_much: str, show: str) -> str:
    return f"{show}   then   scancel {{job}}   (and submit again, asking for {how_much})"


RELEASE = "scontrol release {job}"
BY_ADMIN = "ask an administrator for it: scontrol release {job}"
PARTITIONS = "sinfo -s   (which are up)   then   scontrol update JobId={job} Partition=NAME"
RESERVED = "sinfo -R; scontrol show reservation   (until when)"
ASSOC_LIMITS = "sacctmgr show assoc user=$USER"
QOS_LIMITS = "sacctmgr show qos"
CHANGE_ACCOUNT = "scontrol update JobId={job} Account=NAME QOS=NAME"
ACCOUNT = f"{ASSOC_LIMITS}   (which are yours)   then   scontrol update JobId={{job}} Account=NAME"
QOS = f"{QOS_LIMITS}   (which there are)   then   scontrol update JobId={{job}} QOS=NAME"
SHORTER = "sinfo -o '%P %l'   (what each gives)   then   scontrol update JobId={job} TimeLimit=TIME"
SMALLER = "sinfo -N -l   (what nodes have)   then   scancel {job}   (and submit again, asking for less)"
FREE = "scontrol update JobId={job} Dependency="
LOOK = "scontrol show job {job}"

REASONS: dict[str, Reason] = {
    "": Reason(""),
    "None": Reason(""),
    "Priority": Reason("jobs of higher priority go first"),
    "Resources": Reason("what it asks for is in use"),
    "Dependency": Reason("a job that it waits for has not ended"),
    "DependencyNeverSatisfied": Reason("never starts: a job that it waits for has failed", FREE),
    "BeginTime": Reason("its begin time has not come (a requeued job waits a while)"),
    "Cleaning": Reason("its earlier run is being cleaned up"),
    "JobArrayTaskLimit": Reason("as many tasks of its array run as are allowed at once"),
    "JobHeldUser": Reason("held by its user", RELEASE),
    "JobHeldAdmin": Reason("held by an administrator", BY_ADMIN),
    "JobHoldMaxRequeue": Reason("held: it was requeued too often", f"{RELEASE}   (what went wrong: sinfo -R)"),
    "launch failed requeued held": Reason(
        "held: its node could not start it", f"{RELEASE}   (what went wrong: sinfo -R)"
    ),
    "job requeued in held state": Reason("held: it was requeued so", RELEASE),
    "JobLaunchFailure": Reason("its node could not start it"),
    "BadConstraints": Reason(
        "never starts: no node has what it asks for",
        "sinfo -o '%n %f %G'   (what nodes have)   then   scontrol update JobId={job} Features=NAME",
    ),
    "NodeDown": Reason("a node it needs is down", "sinfo -R   (which, and why)"),
    "FrontEndDown": Reason("no front end of the cluster is up", "sinfo -R   (which, and why)"),
    "ReqNodeNotAvail": Reason("nodes it needs are not available", RESERVED),
    "Nodes required for job are DOWN": Reason("nodes it needs are down, drained or reserved", RESERVED),
    "PartitionDown": Reason("its partition is down", PARTITIONS),
    "PartitionInactive": Reason("its partition takes no jobs now", PARTITIONS),
    "PartitionNodeLimit": Reason("never starts: it asks for more nodes than its partition gives", SMALLER),
    "PartitionTimeLimit": Reason("never starts: it asks for more time than its partition gives", SHORTER),
    "PartitionConfig": Reason("never starts: it asks for what its partition does not give", PARTITIONS),
    "AccountNotAllowed": Reason("never starts: its account may not use the partition", ACCOUNT),
    "QOSNotAllowed": Reason("never starts: its quality of service may not use the partition", QOS),
    "InvalidAccount": Reason("never starts: its account is not valid", ACCOUNT),
    "InvalidQOS": Reason("never starts: its quality of service is not valid", QOS),
    "Reservation": Reason("its reservation has not begun"),
    "ReservationDeleted": Reason(
        "held: its reservation was deleted", f"scontrol update JobId={{job}} ReservationName=   then   {RELEASE}"
    ),
    "Licenses": Reason("licences it needs are in use", "scontrol show licenses   (who has them)"),
    "Prolog": Reason("its node is being prepared"),
    "SchedDefer": Reason("the scheduler looks at it later"),
    "FedJobLock": Reason("the clusters of the federation agree on it"),
    "Reconfiguring": Reason("its nodes are being set up"),
    "Power": Reason("its nodes are being switched on"),
    "BurstBufferResources": Reason("room in the burst buffer is in use"),
    "BurstBufferStageIn": Reason("its files are being copied to the burst buffer"),
    "BurstBufferOperation": Reason("the burst buffer failed with it", f"{LOOK}   (what it says)"),
    "DeadLine": Reason("never starts: its deadline cannot be met", f"{LOOK}   then   scancel {{job}}"),
    "InactiveLimit": Reason("it was inactive for too long", LOOK),
    "SystemFailure": Reason("Slurm itself failed", LOOK),
    "NonZeroExitCode": Reason("it ended with an error"),
    "TimeLimit": Reason("it ran out of time"),
    "OutOfMemory": Reason("it ran out of memory"),
    "MaxMemPerLimit": Reason("never starts: it asks for more memory per core or node than is allowed", SMALLER),
    "AssocGrpCPUMinutesLimit": Reason("the account has used up its core minutes", ACCOUNT),
    "AssocGrpCPURunMinutesLimit": Reason("the account's running jobs use up its core minutes", ACCOUNT),
    "AssocGrpBillingMinutes": Reason("the account has used up its allocation", ACCOUNT),
    "AssocMaxJobsLimit": Reason("the account runs as many jobs as it may"),
    "AssocGrpGRES": Reason("the account uses as many GPUs as it may", ACCOUNT),
    "QOSMaxJobsPerUserLimit": Reason("you run as many jobs as the quality of service allows"),
    "QOSMaxSubmitJobPerUserLimit": Reason("you have as many jobs queued as the quality of service allows"),
    "QOSMaxMemoryPerUser": Reason("you use as much memory as the quality of service allows", QOS),
    "QOSMaxGRESPerUser": Reason("you use as many GPUs as the quality of service allows", QOS),
    "QOSMaxCpuPerUserLimit": Reason("you use as many cores as the quality of service allows", QOS),
    "QOSUsageThreshold": Reason("the account has used more than its quality of service wants", QOS),
}
