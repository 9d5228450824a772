"""Why jobs wait, by Slurm's own words: what each means, and what helps where it does not pass by itself."""

from __future__ import annotations

import re
from typing import NamedTuple

from pipeline.cluster.job_spec import TaskState

NEVER = ("never starts", "held")  # how the words for a reason begin for which a job will not start as it is
HELD_STATES = frozenset({TaskState.REQUEUE_HOLD, TaskState.SPECIAL_EXIT, TaskState.RESV_DEL_HOLD})
WAITING_STATES = frozenset({TaskState.PENDING, TaskState.REQUEUED, TaskState.REQUEUE_FED, *HELD_STATES})


class WaitReason(NamedTuple):
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


def explained(reason: str) -> WaitReason:
    """Return what is known of a reason; of an unknown one its own words, and no remedy."""
    word = word_of(reason)
    known = REASONS.get(word) or REASONS.get(word.replace(" ", ""))
    if known is not None:
        detail = reason[len(word) :].strip(" ,()")
        return known._replace(words=f"{known.words} ({detail})") if detail else known
    return _limit(word) or WaitReason(reason)


def _limit(word: str) -> WaitReason | None:
    """Explain a limit of the account or of the quality of service by how Slurm composes its name."""
    match = re.fullmatch(r"(QOS|Assoc(?:iation)?)(Grp|Max|Min)?(.+?)(Limit|NotSatisfied)?", word)
    if match is None or word in ("QOS", "Assoc"):
        return None
    is_qos, scope, what = match[1] == "QOS", match[2] or "", match[3]
    whose, show = ("the quality of service", QOS_LIMITS) if is_qos else ("the account", ASSOC_LIMITS)
    if scope == "Min":
        return WaitReason(f"never starts: it asks for less than {whose} wants ({word})", _ask("more", show))
    if "PerJob" in what or "PerNode" in what:
        return WaitReason(f"never starts: it asks for more than {whose} allows ({word})", _ask("less", show))
    words = f"a limit of {whose} is reached ({word})"
    if what.startswith(("Job", "MaxJobs", "SubmitJob")) and "Minutes" not in what:  # its own jobs, and those end
        return WaitReason(words)
    return WaitReason(words, f"{show}   (wait until others have ended, or another account or qos: {CHANGE_ACCOUNT})")


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

REASONS: dict[str, WaitReason] = {
    "": WaitReason(""),
    "None": WaitReason(""),
    "Priority": WaitReason("jobs of higher priority go first"),
    "Resources": WaitReason("what it asks for is in use"),
    "Dependency": WaitReason("a job that it waits for has not ended"),
    "DependencyNeverSatisfied": WaitReason("never starts: a job that it waits for has failed", FREE),
    "BeginTime": WaitReason("its begin time has not come (a requeued job waits a while)"),
    "Cleaning": WaitReason("its earlier run is being cleaned up"),
    "JobArrayTaskLimit": WaitReason("as many tasks of its array run as are allowed at once"),
    "JobHeldUser": WaitReason("held by its user", RELEASE),
    "JobHeldAdmin": WaitReason("held by an administrator", BY_ADMIN),
    "JobHoldMaxRequeue": WaitReason("held: it was requeued too often", f"{RELEASE}   (what went wrong: sinfo -R)"),
    "launch failed requeued held": WaitReason(
        "held: its node could not start it", f"{RELEASE}   (what went wrong: sinfo -R)"
    ),
    "job requeued in held state": WaitReason("held: it was requeued so", RELEASE),
    "JobLaunchFailure": WaitReason("its node could not start it"),
    "BadConstraints": WaitReason(
        "never starts: no node has what it asks for",
        "sinfo -o '%n %f %G'   (what nodes have)   then   scontrol update JobId={job} Features=NAME",
    ),
    "NodeDown": WaitReason("a node it needs is down", "sinfo -R   (which, and why)"),
    "FrontEndDown": WaitReason("no front end of the cluster is up", "sinfo -R   (which, and why)"),
    "ReqNodeNotAvail": WaitReason("nodes it needs are not available", RESERVED),
    "Nodes required for job are DOWN": WaitReason("nodes it needs are down, drained or reserved", RESERVED),
    "PartitionDown": WaitReason("its partition is down", PARTITIONS),
    "PartitionInactive": WaitReason("its partition takes no jobs now", PARTITIONS),
    "PartitionNodeLimit": WaitReason("never starts: it asks for more nodes than its partition gives", SMALLER),
    "PartitionTimeLimit": WaitReason("never starts: it asks for more time than its partition gives", SHORTER),
    "PartitionConfig": WaitReason("never starts: it asks for what its partition does not give", PARTITIONS),
    "AccountNotAllowed": WaitReason("never starts: its account may not use the partition", ACCOUNT),
    "QOSNotAllowed": WaitReason("never starts: its quality of service may not use the partition", QOS),
    "InvalidAccount": WaitReason("never starts: its account is not valid", ACCOUNT),
    "InvalidQOS": WaitReason("never starts: its quality of service is not valid", QOS),
    "Reservation": WaitReason("its reservation has not begun"),
    "ReservationDeleted": WaitReason(
        "held: its reservation was deleted", f"scontrol update JobId={{job}} ReservationName=   then   {RELEASE}"
    ),
    "Licenses": WaitReason("licences it needs are in use", "scontrol show licenses   (who has them)"),
    "Prolog": WaitReason("its node is being prepared"),
    "SchedDefer": WaitReason("the scheduler looks at it later"),
    "FedJobLock": WaitReason("the clusters of the federation agree on it"),
    "Reconfiguring": WaitReason("its nodes are being set up"),
    "Power": WaitReason("its nodes are being switched on"),
    "BurstBufferResources": WaitReason("room in the burst buffer is in use"),
    "BurstBufferStageIn": WaitReason("its files are being copied to the burst buffer"),
    "BurstBufferOperation": WaitReason("the burst buffer failed with it", f"{LOOK}   (what it says)"),
    "DeadLine": WaitReason("never starts: its deadline cannot be met", f"{LOOK}   then   scancel {{job}}"),
    "InactiveLimit": WaitReason("it was inactive for too long", LOOK),
    "SystemFailure": WaitReason("Slurm itself failed", LOOK),
    "NonZeroExitCode": WaitReason("it ended with an error"),
    "TimeLimit": WaitReason("it ran out of time"),
    "OutOfMemory": WaitReason("it ran out of memory"),
    "MaxMemPerLimit": WaitReason("never starts: it asks for more memory per core or node than is allowed", SMALLER),
    "AssocGrpCPUMinutesLimit": WaitReason("the account has used up its core minutes", ACCOUNT),
    "AssocGrpCPURunMinutesLimit": WaitReason("the account's running jobs use up its core minutes", ACCOUNT),
    "AssocGrpBillingMinutes": WaitReason("the account has used up its allocation", ACCOUNT),
    "AssocMaxJobsLimit": WaitReason("the account runs as many jobs as it may"),
    "AssocGrpGRES": WaitReason("the account uses as many GPUs as it may", ACCOUNT),
    "QOSMaxJobsPerUserLimit": WaitReason("you run as many jobs as the quality of service allows"),
    "QOSMaxSubmitJobPerUserLimit": WaitReason("you have as many jobs queued as the quality of service allows"),
    "QOSMaxMemoryPerUser": WaitReason("you use as much memory as the quality of service allows", QOS),
    "QOSMaxGRESPerUser": WaitReason("you use as many GPUs as the quality of service allows", QOS),
    "QOSMaxCpuPerUserLimit": WaitReason("you use as many cores as the quality of service allows", QOS),
    "QOSUsageThreshold": WaitReason("the account has used more than its quality of service wants", QOS),
}
