"""What waits and runs now, read from the text of squeue, and what waiting tasks wait for, in words."""

from __future__ import annotations

import re
from typing import NamedTuple

from pipeline.cluster.fields import epoch_of, expand, node_of, state_of
from pipeline.cluster.spec import TaskState

SQUEUE = ("squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r|%S|%N|%i")  # further words choose jobs
NEVER = ("never starts", "held")  # how the words for a reason that does not pass by itself begin


class Queued(NamedTuple):
    """What squeue shows of a task."""

    job: str
    state: TaskState
    reason: str  # Slurm's own word
    waits_for: str  # the same in words
    starts: float | None  # when it began, or is expected to
    node: str
    stuck: bool  # it waits for what will never come by itself


def parse_squeue(text: str) -> dict[str, Queued]:
    """Return the tasks in the queue by their names (12 or 12_3), from what `SQUEUE` prints."""
    tasks: dict[str, Queued] = {}
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) != SQUEUE[-1].count("%") or cells[0] != cells[-1]:
            continue
        name, state_text, reason, start, node, _ = cells
        state, reason = state_of(state_text), "" if reason == "None" else reason
        waits_for = words(reason) if state in _WAITING else ""
        for task in expand(name):
            stuck = is_stuck(state, waits_for)
            tasks[task] = Queued(task, state, reason, waits_for, epoch_of(start), node_of(node), stuck)
    return tasks


_HELD = frozenset({TaskState.REQUEUE_HOLD, TaskState.SPECIAL_EXIT, TaskState.RESV_DEL_HOLD})
_WAITING = frozenset({TaskState.PENDING, TaskState.REQUEUED, TaskState.REQUEUE_FED, *_HELD})


def is_stuck(state: TaskState, waits_for: str) -> bool:
    """Tell whether a waiting task (by `words` of its reason) will not start unless a person or a supervisor acts."""
    return state in _HELD or (state in _WAITING and waits_for.startswith(NEVER))


def words(reason: str) -> str:
    """Say a reason of squeue in words; one that nobody knows stays as it is."""
    word = re.split(r"[,(]", reason, maxsplit=1)[0].strip()
    said = REASONS.get(word) or REASONS.get(word.replace(" ", ""))
    if said is not None:
        detail = reason[len(word) :].strip(" ,()")
        return f"{said} ({detail})" if detail else said
    limit = re.fullmatch(r"(QOS|Assoc)(Grp|Max)?(.+?)(Limit|PerUserLimit|PerAccountLimit|PerAccount|PerUser)?", word)
    if limit is None:
        return reason
    return f"a limit of {'the quality of service' if limit[1] == 'QOS' else 'the account'} is reached ({word})"


REASONS = {
    "": "",
    "None": "",
    "Priority": "jobs of higher priority go first",
    "Resources": "what it asks for is in use",
    "Dependency": "a job that it waits for has not ended",
    "DependencyNeverSatisfied": "never starts: a job that it waits for has failed",
    "BeginTime": "its begin time has not come (a requeued job waits a while)",
    "Cleaning": "its earlier run is being cleaned up",
    "JobArrayTaskLimit": "as many tasks of its array run as are allowed at once",
    "JobHeldUser": "held by its user: scontrol release",
    "JobHeldAdmin": "held by an administrator",
    "JobHoldMaxRequeue": "held: it was requeued too often",
    "launch failed requeued held": "held: its node could not start it",
    "JobLaunchFailure": "its node could not start it",
    "BadConstraints": "never starts: no node has what it asks for",
    "NodeDown": "a node it needs is down",
    "ReqNodeNotAvail": "nodes it needs are not available",
    "Nodes required for job are DOWN": "nodes it needs are down, drained or reserved",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition takes no jobs now",
    "PartitionNodeLimit": "never starts: it asks for more nodes than its partition gives",
    "PartitionTimeLimit": "never starts: it asks for more time than its partition gives",
    "PartitionConfig": "never starts: it asks for what its partition does not give",
    "AccountNotAllowed": "never starts: its account may not use the partition",
    "QOSNotAllowed": "never starts: its quality of service may not use the partition",
    "InvalidAccount": "never starts: its account is not valid",
    "InvalidQOS": "never starts: its quality of service is not valid",
    "Reservation": "its reservation has not begun",
    "ReservationDeleted": "held: its reservation was deleted",
    "Licenses": "licences it needs are in use",
    "Prolog": "its node is being prepared",
    "InactiveLimit": "it was inactive for too long",
    "SystemFailure": "Slurm itself failed",
    "MaxMemPerLimit": "never starts: it asks for more memory per core or node than is allowed",
    "AssocGrpCPUMinutesLimit": "the account has used up its core minutes",
    "AssocGrpCPURunMinutesLimit": "the account's running jobs use up its core minutes",
    "AssocGrpBillingMinutes": "the account has used up its allocation",
    "AssocMaxJobsLimit": "the account runs as many jobs as it may",
    "AssocGrpGRES": "the account uses as many GPUs as it may",
    "QOSMaxJobsPerUserLimit": "you run as many jobs as the quality of service allows",
    "QOSMaxSubmitJobPerUserLimit": "you have as many jobs queued as the quality of service allows",
    "QOSMaxMemoryPerUser": "you use as much memory as the quality of service allows",
    "QOSMaxGRESPerUser": "you use as many GPUs as the quality of service allows",
    "QOSMaxCpuPerUserLimit": "you use as many cores as the quality of service allows",
}
