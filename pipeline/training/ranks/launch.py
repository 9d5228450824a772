"""Starts the processes of a task on this machine, such as the ranks of a training, and waits for all of them.

Each rank is the given command with `--part 1/3 --meeting NAME`: its rank, the world size, and a name unique to this
start. Signals are forwarded to all. When one fails, the others have some time to end by themselves (they notice, see
`rank_monitor`), then they get SIGTERM, then SIGKILL; all are waited for.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from pipeline.cluster.verdict import GO_ON, SIGNALLED
from pipeline.device.kinds import VISIBLE
from pipeline.records import NodePlace
from pipeline.training.ranks import LOST
from pipeline.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType
    from typing import IO

FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # a cancellation or preemption; what comes before a limit
LOOK_EVERY_S = 0.05
ALONE_S = 25.0  # for the other ranks once one has failed: more than the rank monitor takes
TERM_S = 15.0  # after SIGTERM


def launch_ranks(
    command: Sequence[str],
    world: int,
    node: NodePlace = NodePlace(),  # noqa: B008 - frozen
    *,
    alone_s: float = ALONE_S,
    term_s: float = TERM_S,
) -> int:
    """Run a command as `world` ranks, here those of this node; return one exit code for all.

    It is that of the first rank that failed by its own fault; 75 where some have more to do; else 0.
    """
    ranks = StartedProcesses()
    before = {number: signal.signal(number, ranks.forward) for number in FORWARDED}
    meeting, here = node.meeting or secrets.token_hex(8), world // node.nodes
    lent = [name for name in os.environ.get(VISIBLE, "").split(",") if name] or list(map(str, range(here)))
    try:
        for place in range(here):  # each with one of the GPUs that this process may use
            own = {**os.environ, VISIBLE: lent[place % len(lent)]}
            ranks.start([*command, "--part", f"{node.number * here + place}/{world}", "--meeting", meeting], own)
        wait_for(lambda: ranks.all_ended() or ranks.failed, float("inf"), LOOK_EVERY_S)
    except BaseException:
        alone_s = 0.0
        raise
    finally:
        for grace_s, number in ((alone_s, signal.SIGTERM), (term_s, signal.SIGKILL), (float("inf"), None)):
            if wait_for(ranks.all_ended, grace_s, LOOK_EVERY_S) or number is None:
                break
            ranks.send(number)
        for number, handler in before.items():
            signal.signal(number, handler)
    failed = sorted(ranks.failed, key=lambda code: code == LOST)  # last: ranks that ended because another failed
    return [*failed, *sorted(ranks.ended.values(), key=lambda code: (code != GO_ON, -code))][0]


class StartedProcesses:
    """The processes of one start, known by the order in which they were started."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.signals: list[int] = []  # that were sent on
        self.ended: dict[int, int] = {}  # codes by rank, the first to end first

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], logs: tuple[IO[bytes] | None, ...] = (None, None)
    ) -> None:
        """Start a process, and send it the signals that came before."""
        before = self.signals[:]
        self.processes.append(rank := subprocess.Popen(words, env=environment, stdout=logs[0], stderr=logs[1]))
        for number in before:
            rank.send_signal(number)

    def forward(self, number: int, _frame: FrameType | None) -> None:
        """Forward a signal to all ranks."""
        self.signals.append(number)
        self.send(number)

    def send(self, number: int) -> None:
        """Send a signal to the ranks that have not ended."""
        for process in self.processes:
            process.send_signal(number)

    @property
    def failed(self) -> list[int]:
        """The exit codes of the ranks that failed, the first to fail first."""
        orderly = {0, GO_ON, *(SIGNALLED + number for number in self.signals)}
        return [code for code in self.ended.values() if code not in orderly]

    def all_ended(self) -> bool:
        """Look which ranks have ended, and print the first that failed; tell whether all have ended."""
        for rank, process in enumerate(self.processes):
            if rank not in self.ended and (code := process.poll()) is not None:
                had_failed = bool(self.failed)
                self.ended[rank] = SIGNALLED - code if code < 0 else code
                if self.failed and not had_failed:
                    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                    line = f"process {rank} of {len(self.processes)} ({process.pid}) {how}"
                    print(line, file=sys.stderr, flush=True)  # noqa: T201 - a task's stderr is its log
        return len(self.ended) == len(self.processes)
