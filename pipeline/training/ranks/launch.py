"""Starts the ranks of a training on this machine, one process each, and waits for all of them.

A rank is the given command with `--part 1/3 --meeting NAME`: its rank, the world size, and a name that only the ranks
of this start share. Signals are forwarded to all. When one fails, the others have some time to end by themselves (they
notice, see `rank_monitor`), then they get SIGTERM, then SIGKILL; all are waited for.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.cluster.verdict import GO_ON, SIGNALLED
from pipeline.device.kinds import VISIBLE
from pipeline.records import NodePlace
from pipeline.training.ranks import LOST
from pipeline.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
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
    processes = _RankProcesses()
    before = {number: signal.signal(number, processes.forward) for number in FORWARDED}
    meeting, here = node.meeting or secrets.token_hex(8), world // node.nodes
    try:
        for rank, own in enumerate(rank_environments(here), start=node.number * here):
            processes.start([*command, "--part", f"{rank}/{world}", "--meeting", meeting], own)
        wait_for(lambda: processes.all_ended() or processes.failed, float("inf"), LOOK_EVERY_S)
    except BaseException:
        alone_s = 0.0
        raise
    finally:
        processes.end(alone_s, term_s)
        for number, handler in before.items():
            signal.signal(number, handler)
    failed = sorted(processes.failed, key=lambda code: code == LOST)  # last: ranks that ended because another failed
    return [*failed, *sorted(processes.ended.values(), key=lambda code: (code != GO_ON, -code))][0]


def rank_environments(world: int) -> list[dict[str, str]]:
    """Return each rank's environment: one of the GPUs that this process may use."""
    lent = [name for name in os.environ.get(VISIBLE, "").split(",") if name] or list(map(str, range(world)))
    return [{**os.environ, VISIBLE: lent[rank % len(lent)]} for rank in range(world)]


@dataclass
class _RankProcesses:
    """The rank processes of one start."""

    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)  # that were sent on
    ended: dict[int, int] = field(default_factory=dict)  # codes by rank, the first to end first

    def start(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a rank, and send it the signals that came before."""
        before = self.signals[:]
        rank = subprocess.Popen(words, env=environment)
        self.ranks.append(rank)
        for number in before:
            rank.send_signal(number)

    def forward(self, number: int, _frame: FrameType | None) -> None:
        """Forward a signal to all ranks."""
        self.signals.append(number)
        self._send(number)

    def end(self, alone_s: float, term_s: float) -> None:
        """Wait for all ranks, with SIGTERM and then SIGKILL when their grace periods are over."""
        for grace_s, number in ((alone_s, signal.SIGTERM), (term_s, signal.SIGKILL)):
            if wait_for(self.all_ended, grace_s, LOOK_EVERY_S):
                return
            self._send(number)
        wait_for(self.all_ended, float("inf"), LOOK_EVERY_S)

    @property
    def failed(self) -> list[int]:
        """The exit codes of the ranks that failed, the first to fail first."""
        orderly = {0, GO_ON, *(SIGNALLED + number for number in self.signals)}
        return [code for code in self.ended.values() if code not in orderly]

    def all_ended(self) -> bool:
        """Look which ranks have ended, and print the first that failed; tell whether all have ended."""
        for rank, process in enumerate(self.ranks):
            if rank not in self.ended and (code := process.poll()) is not None:
                had_failed = bool(self.failed)
                self.ended[rank] = SIGNALLED - code if code < 0 else code
                if self.failed and not had_failed:
                    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                    line = f"rank {rank} of {len(self.ranks)} (process {process.pid}) {how}: stopping the others"
                    print(line, file=sys.stderr, flush=True)  # noqa: T201 - a task's stderr is its log
        return len(self.ended) == len(self.ranks)

    def _send(self, number: int) -> None:
        for process in self.ranks:
            process.send_signal(number)  # to those that have not ended
