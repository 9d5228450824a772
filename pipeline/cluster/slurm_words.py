"""Parses Slurm's formats (states, exit codes, sizes, times, arrays) and explains why jobs wait.

Unreadable values become None or UNKNOWN. Each reason has an explanation, and a command if it needs a person.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from pipeline.cluster.job_spec import TaskState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pipeline.cluster.job_spec import JobId

NEVER = ("will never start", "held")  # start of an explanation for a job that will never start as it is
HELD_STATES = frozenset({TaskState.REQUEUE_HOLD, TaskState.SPECIAL_EXIT, TaskState.RESV_DEL_HOLD})
WAITING_STATES = frozenset({TaskState.PENDING, TaskState.REQUEUED, TaskState.REQUEUE_FED, *HELD_STATES})


class WaitReason(NamedTuple):
    """The explanation of a reason, and the command that helps, unless the wait ends by itself."""

    words: str
    remedy: str = ""


def is_stuck(state: TaskState, waits_for: str) -> bool:
    """Tell whether a pending task with this explanation will not start by itself."""
    return state in HELD_STATES or (state in WAITING_STATES and waits_for.startswith(NEVER))


def reason_words(reason: str) -> str:
    """Explain a reason of squeue; unknown reasons stay unchanged."""
    return explained(reason).words


def remedy_of(state: TaskState, reason: str, job: str) -> str:
    """Return the command that helps a waiting task; empty if the wait ends by itself or is unknown."""
    if state not in WAITING_STATES:
        return ""
    remedy = explained(reason).remedy or (RELEASE if state in HELD_STATES else "")
    return remedy.format(job=job)


def word_of(reason: str) -> str:
    """Return Slurm's word for a reason, without details."""
    return re.split(r"[,(]", reason, maxsplit=1)[0].strip()


def explained(reason: str) -> WaitReason:
    """Return the explanation and the remedy of a reason; an unknown one is its own explanation."""
    word = word_of(reason)
    known = REASONS.get(word) or REASONS.get(word.replace(" ", ""))
    if known is not None:
        detail = reason[len(word) :].strip(" ,()")
        return known._replace(words=f"{known.words} ({detail})") if detail else known
    return _limit(word) or WaitReason(reason)


def _limit(word: str) -> WaitReason | None:
    """Explain a limit of an account or a QOS by the parts of its name."""
    match = re.fullmatch(r"(QOS|Assoc(?:iation)?)(Grp|Max|Min)?(.+?)(Limit|NotSatisfied)?", word)
    if match is None or word in ("QOS", "Assoc"):
        return None
    is_qos, scope, what = match[1] == "QOS", match[2] or "", match[3]
    whose, show = ("the QOS", QOS_LIMITS) if is_qos else ("the account", ASSOC_LIMITS)
    if scope == "Min":
        return WaitReason(f"will never start: it requests less than {whose} requires ({word})", _ask("more", show))
    if "PerJob" in what or "PerNode" in what:
        return WaitReason(f"will never start: it requests more than {whose} allows ({word})", _ask("less", show))
    words = f"a limit of {whose} is reached ({word})"
    if what.startswith(("Job", "MaxJobs", "SubmitJob")) and "Minutes" not in what:  # the user's own jobs, which end
        return WaitReason(words)
    return WaitReason(words, f"{show}   (wait until others have ended, or another account or qos: {CHANGE_ACCOUNT})")


def _ask(how_much: str, show: str) -> str:
    return f"{show}   then   scancel {{job}}   (and submit again, requesting {how_much})"


RELEASE = "scontrol release {job}"
BY_ADMIN = "ask an administrator to run: scontrol release {job}"
PARTITIONS = "sinfo -s   (lists partitions)   then   scontrol update JobId={job} Partition=NAME"
RESERVED = "sinfo -R; scontrol show reservation   (shows until when)"
ASSOC_LIMITS = "sacctmgr show assoc user=$USER"
QOS_LIMITS = "sacctmgr show qos"
CHANGE_ACCOUNT = "scontrol update JobId={job} Account=NAME QOS=NAME"
ACCOUNT = f"{ASSOC_LIMITS}   (lists yours)   then   scontrol update JobId={{job}} Account=NAME"
QOS = f"{QOS_LIMITS}   (lists them)   then   scontrol update JobId={{job}} QOS=NAME"
SHORTER = "sinfo -o '%P %l'   (lists limits)   then   scontrol update JobId={job} TimeLimit=TIME"
SMALLER = "sinfo -N -l   (lists nodes)   then   scancel {job}   (and submit again, requesting less)"
FREE = "scontrol update JobId={job} Dependency="
LOOK = "scontrol show job {job}"

REASONS: dict[str, WaitReason] = {
    "": WaitReason(""),
    "None": WaitReason(""),
    "Priority": WaitReason("jobs with higher priority run first"),
    "Resources": WaitReason("the requested resources are in use"),
    "Dependency": WaitReason("it waits for another job to end"),
    "DependencyNeverSatisfied": WaitReason("will never start: a job that it depends on failed", FREE),
    "BeginTime": WaitReason("its start time is in the future (requeued jobs wait a while)"),
    "Cleaning": WaitReason("its earlier attempt is being cleaned up"),
    "JobArrayTaskLimit": WaitReason("its array already runs as many tasks as allowed"),
    "JobHeldUser": WaitReason("held by its user", RELEASE),
    "JobHeldAdmin": WaitReason("held by an administrator", BY_ADMIN),
    "JobHoldMaxRequeue": WaitReason("held: it was requeued too often", f"{RELEASE}   (for the reason: sinfo -R)"),
    "launch failed requeued held": WaitReason(
        "held: its node could not start it", f"{RELEASE}   (for the reason: sinfo -R)"
    ),
    "job requeued in held state": WaitReason("held: it was requeued in held state", RELEASE),
    "JobLaunchFailure": WaitReason("its node could not start it"),
    "BadConstraints": WaitReason(
        "will never start: no node has the requested resources",
        "sinfo -o '%n %f %G'   (lists nodes)   then   scontrol update JobId={job} Features=NAME",
    ),
    "NodeDown": WaitReason("a node it needs is down", "sinfo -R   (lists nodes and reasons)"),
    "FrontEndDown": WaitReason("no front-end node is up", "sinfo -R   (lists nodes and reasons)"),
    "ReqNodeNotAvail": WaitReason("nodes it needs are not available", RESERVED),
    "Nodes required for job are DOWN": WaitReason("nodes it needs are down, drained or reserved", RESERVED),
    "PartitionDown": WaitReason("its partition is down", PARTITIONS),
    "PartitionInactive": WaitReason("its partition accepts no jobs now", PARTITIONS),
    "PartitionNodeLimit": WaitReason("will never start: it requests more nodes than its partition allows", SMALLER),
    "PartitionTimeLimit": WaitReason("will never start: it requests more time than its partition allows", SHORTER),
    "PartitionConfig": WaitReason(
        "will never start: it requests resources that its partition does not have", PARTITIONS
    ),
    "AccountNotAllowed": WaitReason("will never start: its account may not use the partition", ACCOUNT),
    "QOSNotAllowed": WaitReason("will never start: its QOS may not use the partition", QOS),
    "InvalidAccount": WaitReason("will never start: its account is invalid", ACCOUNT),
    "InvalidQOS": WaitReason("will never start: its QOS is invalid", QOS),
    "Reservation": WaitReason("its reservation has not started"),
    "ReservationDeleted": WaitReason(
        "held: its reservation was deleted", f"scontrol update JobId={{job}} ReservationName=   then   {RELEASE}"
    ),
    "Licenses": WaitReason("licences it needs are in use", "scontrol show licenses   (shows who uses them)"),
    "Prolog": WaitReason("its node is being prepared"),
    "SchedDefer": WaitReason("the scheduler has not considered it yet"),
    "FedJobLock": WaitReason("the federated clusters are deciding about it"),
    "Reconfiguring": WaitReason("its nodes are being set up"),
    "Power": WaitReason("its nodes are being powered up"),
    "BurstBufferResources": WaitReason("the burst buffer is full"),
    "BurstBufferStageIn": WaitReason("its files are being copied to the burst buffer"),
    "BurstBufferOperation": WaitReason("the burst buffer failed with it", f"{LOOK}   (shows details)"),
    "DeadLine": WaitReason("will never start: its deadline cannot be met", f"{LOOK}   then   scancel {{job}}"),
    "InactiveLimit": WaitReason("it was inactive for too long", LOOK),
    "SystemFailure": WaitReason("Slurm itself failed", LOOK),
    "NonZeroExitCode": WaitReason("it ended with an error"),
    "TimeLimit": WaitReason("it ran out of time"),
    "OutOfMemory": WaitReason("it ran out of memory"),
    "MaxMemPerLimit": WaitReason("will never start: it requests more memory per core or node than allowed", SMALLER),
    "QOSUsageThreshold": WaitReason("the account's usage exceeds the limit of its QOS", QOS),
}


OOM_CODE = (0, 125)  # Slurm's exit code for a step that ran out of memory
EXPANDED_MOST = 4_000_001  # largest array that Slurm can be configured for
LATEST = 1e11  # seconds since 1970
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
cache_some = functools.lru_cache(maxsize=4096)  # halves the time for large arrays
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)([KMGTP]?)")
_NOWHERE = frozenset({"", "None assigned", "(null)", "N/A"})


def expand(job: str) -> Iterator[str]:
    """Yield the tasks that `12_[4-9%2]` stands for; `12_3` and `12` stand for themselves."""
    array, bracket, indices = job.partition("_[")
    if not bracket:
        yield job
        return
    for part in indices.partition("]")[0].partition("%")[0].split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?", part)
        if match is None:
            continue  # "...": Slurm cut the list
        first, last, stride = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        for task in range(first, min(last, first + EXPANDED_MOST) + 1, max(1, stride)):
            yield f"{array}_{task}"


@cache_some
def parse_state(text: str) -> TaskState:
    """Return the state that a text begins with ("CANCELLED by 0"); UNKNOWN for other words."""
    return _STATES.get(text.split(" ", 1)[0].rstrip("+"), TaskState.UNKNOWN)


_STATES = {state.value: state for state in TaskState}


@cache_some
def exit_of(text: str) -> tuple[int | None, int | None]:
    """Parse `1:0` into exit code and signal (or None); keep Slurm's special 0:125."""
    code, colon, killed_by = text.partition(":")
    if not colon or not is_number(code) or not is_number(killed_by):
        return None, None
    if (int(code), int(killed_by)) == OOM_CODE:
        return OOM_CODE
    return (None, int(killed_by)) if int(killed_by) else (int(code), None)


@cache_some
def bytes_of(text: str) -> int | None:
    """Parse a size such as 121588K or 1.5G; None if it is malformed."""
    match = _SIZE.fullmatch(text)
    return int(float(match[1]) * _UNITS[match[2]]) if match else None


@cache_some
def seconds_of(text: str) -> float | None:
    """Parse a duration such as 1-02:03:04 or 00:00.018; None if it is malformed."""
    days, dash, clock = text.rpartition("-")
    total = 0.0
    for part in clock.split(":"):
        if not is_number(part.replace(".", "", 1)):
            return None
        total = total * 60 + float(part)
    if dash and not is_number(days):
        return None
    return total + (86_400 * int(days) if dash else 0)


@cache_some
def epoch_of(text: str) -> float | None:
    """Parse a time, in seconds since 1970 or as 2026-11-21T22:52:19 local time; None if it is malformed."""
    if is_number(text):
        return float(text) if 0 < float(text) < LATEST else None
    if len(text) != len("2026-11-21T22:52:19"):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()  # Slurm's times are local
    except (ValueError, OverflowError, OSError):
        return None


def node_of(text: str) -> str:
    """Return the node list of a field; empty if there is none yet."""
    return "" if text in _NOWHERE else text


def is_number(text: str) -> bool:
    """Tell whether a text is a plausible whole number."""
    return text.isascii() and text.isdecimal() and len(text) < 16


SQUEUE = ("squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r|%S|%N|%i")  # more words select jobs


def only_ours(names: Mapping[JobId, str], uid: int | None = None) -> list[str]:
    """Return the options of squeue and sacct for jobs of one user (default: this one), by number and name."""
    user = os.getuid() if uid is None else uid
    return [f"--user={user}", f"--jobs={','.join(names)}", f"--name={','.join(dict.fromkeys(names.values()))}"]


STOPPED = {TaskState.SUSPENDED: "it is suspended; scontrol resume continues it"}


class Queued(NamedTuple):
    """A task's line of squeue."""

    job: str
    state: TaskState
    reason: str  # Slurm's own word
    waits_for: str  # its explanation
    starts: float | None  # start time, or the expected one
    node: str


def parse_squeue(text: str) -> dict[str, Queued]:
    """Parse the output of `SQUEUE` into tasks by name (12 or 12_3)."""
    tasks: dict[str, Queued] = {}
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) != SQUEUE[-1].count("%") or cells[0] != cells[-1]:
            continue
        name, state_text, reason, start, node, _ = cells
        state, reason = parse_state(state_text), "" if reason == "None" else reason
        waits_for = reason_words(reason) if state in WAITING_STATES else STOPPED.get(state, "")
        for task in expand(name):
            tasks[task] = Queued(task, state, reason, waits_for, epoch_of(start), node_of(node))
    return tasks


def limit_of(text: str) -> int | None:
    """Parse a time limit such as 1-00:00:00, 2:00 or 60 (minutes); None if it is `infinite` or malformed."""
    seconds = seconds_of(text if ":" in text else f"{text}:0")
    return None if seconds is None else int(seconds)


_GRES = re.compile(r"gpu(?::(?P<type>[^:()]*))??(?::no_consume)?(?::(?P<count>\d+)[KMGT]?)?(?:\(.*\))?")
_SOCKETS = re.compile(r"\([^()]*\)")


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of one type in a node."""

    type: str  # empty: no type
    count: int


def parse_gres(text: str) -> tuple[Gpus, ...]:
    """Parse the GPUs in a node's GRES, such as gpu:a100:4(S:0-1),nvme:1."""
    matches = (_GRES.fullmatch(part.strip()) for part in _SOCKETS.sub("", text).split(","))
    return tuple(Gpus(match["type"] or "", int(match["count"] or 1)) for match in matches if match)
