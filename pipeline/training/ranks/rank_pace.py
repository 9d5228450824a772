"""Finds a rank that all others wait for, by each rank's own time in a step."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS = 50  # whose times are added up: items differ in size
SLOW = 1.3  # times the others' median


class RankPace:
    """Adds up the times of all ranks; `slowest` describes the slow rank, if there is one."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts, self.slowest = hosts, ""
        self._steps, self._spent_s = 0, [0.0] * len(hosts)

    def add(self, spent_s: Sequence[float]) -> bool:
        """Add a step; return whether `slowest` was updated."""
        self._steps += 1
        self._spent_s = [before + now for before, now in zip(self._spent_s, spent_s, strict=True)]
        if len(self.hosts) == 1 or self._steps < STEPS:
            return False
        most, rank = max((spent, rank) for rank, spent in enumerate(self._spent_s))
        times = most / max(median(self._spent_s[:rank] + self._spent_s[rank + 1 :]), 1e-9)
        self.slowest = ""
        if times >= SLOW:
            self.slowest = f"rank {rank} on {self.hosts[rank]} takes {times:.1f} times as long as the others, who wait"
        self._steps, self._spent_s = 0, [0.0] * len(self.hosts)
        return True
