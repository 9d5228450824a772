"""Connects the processes of a script on all nodes: a failed one ends the others, and none is done before all are.

They meet and monitor each other like the ranks of a training (`training.ranks.rank_monitor`), but a script never counts
as hung, because it need not report progress.
"""

from __future__ import annotations

import math
import signal
import time
from typing import TYPE_CHECKING

from pipeline.training.ranks.rank_monitor import COME_WITHIN_S, LINGER_S, Activity, HangLimits, RankMonitor
from pipeline.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pipeline.records import RankPlace

PATIENT = HangLimits(hang_s=math.inf, slow_s=math.inf, grace_s=math.inf)
DONE, ALL_DONE = "its script is done", "all are done"  # rank 0 says the latter
REASON_WITHIN_S, LOOK_EVERY_S = 3.0, 0.1


class Peers:
    """The other processes of a script."""

    def __init__(self, place: RankPlace, folder: Path, port: int) -> None:
        """Meet them through a shared folder; their scripts meet at rank 0's `port`."""
        self.place, self._monitor = place, RankMonitor(place, PATIENT)
        met = self._monitor.start(folder if place.world > 1 else None, {"port": port}, COME_WITHIN_S)
        self.port = int(met.shared.get("port", port))
        self.address = met.links[0].peer if place.rank else met.address

    def has_lost(self) -> bool:
        """Tell whether another process failed or died."""
        return self._monitor.has_lost

    def are_all_done(self, ending: Callable[[], int]) -> bool:
        """Wait until all are done, or until one was lost or left to continue later."""
        is_first, others = self.place.rank == 0, self.place.world - 1 if self.place.rank == 0 else 1
        awaited = DONE if is_first else ALL_DONE
        self._say(DONE)
        while not self.has_lost() and ending() != signal.SIGTERM:
            present = self._monitor.peers()
            if present.count(awaited) == others:
                if is_first:
                    self._say(ALL_DONE)
                    wait_for(lambda: not self._monitor.peers(), LINGER_S, LOOK_EVERY_S)  # they have read it
                return True
            if len(present) < others:
                return False
            time.sleep(LOOK_EVERY_S)
        return False

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Leave; a failure of this process ends the others."""
        self._monitor.leave(getattr(error, "for_others", str(error)) if isinstance(error, Exception) else "")
        self._monitor.close()

    def _say(self, what: str) -> None:
        self._monitor.doing = Activity(what, math.inf, waits=True)
