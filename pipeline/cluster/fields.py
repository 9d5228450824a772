"""How Slurm's commands write states, exit codes, sizes, times and arrays; what cannot be read is None or UNKNOWN."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from pipeline.cluster.job_spec import TaskState
from pipeline.cluster.reasons import WAITING_STATES, reason_words

if TYPE_CHECKING:
    from collections.abc import Iterator


OOM_CODE = (0, 125)  # how Slurm writes the exit code of a step that was out of memory
EXPANDED_MOST = 4_000_001  # the largest array that Slurm can be configured to take
LATEST = 1e11  # seconds since 1970
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
cache_some = functools.lru_cache(maxsize=4096)  # large arrays repeat themselves: halves the time
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)([KMGTP]?)([cn]?)")
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
            continue  # "..." where Slurm cut the list
        first, last, stride = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        for task in range(first, min(last, first + EXPANDED_MOST) + 1, max(1, stride)):
            yield f"{array}_{task}"


@cache_some
def parse_state(text: str) -> TaskState:
    """Return the state that a text begins with ("CANCELLED by 0"); UNKNOWN for other words."""
    word = text.split(" ", 1)[0].rstrip("+")
    return _STATES.get(word, TaskState.UNKNOWN)


_STATES = {state.value: state for state in TaskState}


@cache_some
def exit_of(text: str) -> tuple[int | None, int | None]:
    """Parse `1:0` into exit code and signal, None where there was none; Slurm's own 0:125 is kept as it is."""
    code, colon, killed_by = text.partition(":")
    if not colon or not is_number(code) or not is_number(killed_by):
        return None, None
    if (int(code), int(killed_by)) == OOM_CODE:
        return OOM_CODE
    return (None, int(killed_by)) if int(killed_by) else (int(code), None)


@cache_some
def bytes_of(text: str, cpus: str = "1", nodes: str = "1") -> int | None:
    """Parse a size such as 121588K, 1.5G, 4Gc (per core) or 4Gn (per node); None if it is malformed."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    each = {"": "1", "c": cpus, "n": nodes}[match[3]]
    return int(float(match[1]) * _UNITS[match[2]]) * (int(each) if is_number(each) else 1)


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
    """Return the node list of a field, empty where there is none yet."""
    return "" if text in _NOWHERE else text


def is_number(text: str) -> bool:
    """Tell whether a text is a whole number that Slurm could mean."""
    return text.isascii() and text.isdecimal() and len(text) < 16


SQUEUE = ("squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r|%S|%N|%i")  # further words choose jobs


STOPPED = {TaskState.SUSPENDED: "it is suspended: scontrol resume lets it go on"}


class Queued(NamedTuple):
    """A task's line of squeue."""

    job: str
    state: TaskState
    reason: str  # Slurm's own word
    waits_for: str  # the same in words
    starts: float | None  # when it began, or is expected to
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
    """Parse a time limit such as 1-00:00:00 or 2:00; None if it is `infinite` or malformed."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in parts) or (days and not days.isdecimal()):
        return None
    total = 0
    for part in parts if len(parts) > 1 else (*parts, "0"):
        total = total * 60 + int(part)
    return total + 86_400 * int(days or 0)


_GRES = re.compile(r"gpu(?::(?P<type>[^:()]*))??(?::no_consume)?(?::(?P<count>\d+)[KMGT]?)?(?:\(.*\))?")
_SOCKETS = re.compile(r"\([^()]*\)")


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of one type in a node."""

    type: str  # empty: the site names none
    count: int


def parse_gres(text: str) -> tuple[Gpus, ...]:
    """Parse the GPUs in a node's GRES, such as gpu:a100:4(S:0-1),nvme:1."""
    matches = (_GRES.fullmatch(part.strip()) for part in _SOCKETS.sub("", text).split(","))
    return tuple(Gpus(match["type"] or "", int(match["count"] or 1)) for match in matches if match)
