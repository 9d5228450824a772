"""Reads from srun's log lines which process of a task failed first and took the others along.

Of a step the accounting keeps one exit code, the highest of all its processes, and a signal counts for less than a
code. Measured on 22.05: one process killed, the others ended with 76 for its sake: the step reads 76:0; one at the
memory limit on one of two nodes: now 76:0, now OUT_OF_MEMORY. Only srun's lines in the log always tell. They name the
right node; the right process, too, but of those on a node with an OOM kill srun may name another.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST = 10_000  # more ranks than that are a garbled line
PEER_LOST = 76  # a process exits so when another one that it works with is gone, or hangs
_LINE = re.compile(r"^srun: error: (?P<node>\S+): tasks? (?P<tasks>\d[0-9,-]*): (?P<how>.+)$", re.MULTILINE)
_CODE = re.compile(r"Exited with exit code (\d+)")
_NODE = re.compile(r"^srun: error: Node failure on (?P<node>\S+)", re.MULTILINE)
_SIGNALS = {
    "Killed": signal.SIGKILL,
    "Terminated": signal.SIGTERM,
    "Hangup": signal.SIGHUP,
    "Interrupt": signal.SIGINT,
    "User defined signal 1": signal.SIGUSR1,
    "User defined signal 2": signal.SIGUSR2,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Aborted": signal.SIGABRT,
    "Illegal instruction": signal.SIGILL,
    "Floating point exception": signal.SIGFPE,
}


@dataclass(frozen=True, slots=True)
class Lost:
    """A process that failed, or several on one node that failed alike."""

    ranks: str  # as srun writes them: 1, 2-3, 0,2
    node: str
    exit_code: int | None = None
    signal: int | None = None
    how: str = ""  # as srun says it

    @property
    def who(self) -> str:
        return f"rank{'' if self.ranks.isdecimal() else 's'} {self.ranks} on {self.node}"

    def said(self, log: str) -> str:
        """Return its own lines of a log in which srun prefixes each line with the rank."""
        own = re.compile(rf"^[ 0]*(?:{'|'.join(map(str, self._numbers()))}): (.*)$", re.MULTILINE)
        return "\n".join(own.findall(log))

    def _numbers(self) -> Iterator[int]:
        """Yield the rank numbers."""
        for part in self.ranks.split(","):
            first, _, last = part.partition("-")
            if first.isdecimal() and (last or first).isdecimal():
                yield from range(int(first), min(int(last or first), int(first) + MOST) + 1)


def first_lost(log: str, orderly: int) -> Lost | None:
    """Return the first process that failed by itself, neither in order (`orderly`) nor because a peer was lost."""
    return next((lost for lost in _ended(log) if lost.exit_code not in (orderly, PEER_LOST)), None)


def failed_node(log: str) -> str:
    """Return the node that srun reports as failed; empty if none."""
    match = _NODE.search(log)
    return match["node"] if match else ""


def _ended(log: str) -> Iterator[Lost]:
    """Yield the processes that srun reports as failed, in the order of the log."""
    for match in _LINE.finditer(log):
        node, tasks, how = match["node"], match["tasks"], match["how"].strip()
        code = _CODE.match(how)
        killed_by = next((int(number) for word, number in _SIGNALS.items() if how.startswith(word)), None)
        yield Lost(tasks, node, int(code[1]) if code else None, killed_by, how)
