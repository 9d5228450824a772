"""How Slurm's commands write states, exit codes, sizes, times and arrays; what cannot be read is None or UNKNOWN."""

from __future__ import annotations

import functools
import re
from datetime import datetime
from typing import TYPE_CHECKING

from pipeline.cluster.job_spec import TaskState

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
    array, bracket, rest = job.partition("_[")
    if not bracket:
        yield job
        return
    for part in rest.partition("]")[0].partition("%")[0].split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?", part)
        if found is None:
            continue  # "..." where Slurm cut the list
        first, last, stride = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        for task in range(first, min(last, first + EXPANDED_MOST) + 1, max(1, stride)):
            yield f"{array}_{task}"


@cache_some
def parse_state(text: str) -> TaskState:
    """Return the state that a text begins with ("CANCELLED by 0"); a word nobody knows is UNKNOWN."""
    word = text.split(" ", 1)[0].rstrip("+")
    return _STATES.get(word, TaskState.UNKNOWN)


_STATES = {state.value: state for state in TaskState}


@cache_some
def exit_of(text: str) -> tuple[int | None, int | None]:
    """Read `1:0`: the exit code and the signal, None where there was none; Slurm's own 0:125 stays as it is."""
    code, colon, killed_by = text.partition(":")
    if not colon or not is_number(code) or not is_number(killed_by):
        return None, None
    if (int(code), int(killed_by)) == OOM_CODE:
        return OOM_CODE
    return (None, int(killed_by)) if int(killed_by) else (int(code), None)


@cache_some
def bytes_of(text: str, cpus: str = "1", nodes: str = "1") -> int | None:
    """Read a size such as 121588K, 1.5G, 4Gc (for each core) or 4Gn (for each node); None is what is no size."""
    found = _SIZE.fullmatch(text)
    if found is None:
        return None
    each = {"": "1", "c": cpus, "n": nodes}[found[3]]
    return int(float(found[1]) * _UNITS[found[2]]) * (int(each) if is_number(each) else 1)


@cache_some
def seconds_of(text: str) -> float | None:
    """Read a duration such as 1-02:03:04 or 00:00.018; None is what is no duration."""
    days, dash, rest = text.rpartition("-")
    total = 0.0
    for part in rest.split(":"):
        if not is_number(part.replace(".", "", 1)):
            return None
        total = total * 60 + float(part)
    if dash and not is_number(days):
        return None
    return total + (86_400 * int(days) if dash else 0)


@cache_some
def epoch_of(text: str) -> float | None:
    """Read a time, in seconds since 1970 or as 2026-11-21T22:52:19 of this machine's clock; None is what is no time."""
    if is_number(text):
        return float(text) if 0 < float(text) < LATEST else None
    if len(text) != len("2026-11-21T22:52:19"):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()  # Slurm's times are local
    except (ValueError, OverflowError, OSError):
        return None


def node_of(text: str) -> str:
    """Return the nodes that a text names, empty where there are none yet."""
    return "" if text in _NOWHERE else text


def is_number(text: str) -> bool:
    """Tell whether a text is a whole number that Slurm could mean."""
    return text.isascii() and text.isdecimal() and len(text) < 16
