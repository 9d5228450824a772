"""The processes of a script that is started several times: how each of them ended, and which one was the reason.

Each is followed by a worker of its own, and none of these ends before the others have: a launcher (srun) would end
those that go on. How each ended stands in a file, so that of several that failed the one speaks that was the reason: a
GPU's memory that ended, not the lost connection to that process.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pipeline.cluster.verdict import GO_ON
from pipeline.runs.folder import writing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pipeline.training.rendezvous import Place

PEERS_S, LOOK_EVERY_S = 3.0, 0.2  # for the words of another process, whose end may be why this one failed


@dataclass(frozen=True, slots=True)
class End:
    """How one of the processes ended."""

    code: int
    told: bool  # to end
    what: str
    trouble: str
    at: float

    @property
    def failed(self) -> bool:
        """Tell whether it failed by itself."""
        return self.code not in (0, GO_ON) and (not self.told or bool(self.trouble))


class Peers:
    """The processes of a script: how each of them ended, a file each."""

    def __init__(self, folder: Path, name: str, place: Place) -> None:
        self._folder, self._name, self.place = folder, name, place

    def say(self, end: End) -> None:
        """Write down how this one ended."""
        path = self._path(self.place.rank)
        partial = path.with_name(f"{path.name}.partial")
        with writing(path):
            partial.write_text(json.dumps(asdict(end)))
            partial.replace(path)

    def ends(self) -> dict[int, End]:
        """Return how those ended that have."""
        found = {}
        os.listdir(self._folder)  # noqa: PTH208 - NFS remembers that a name is not there, but asks for a list
        for rank in range(self.place.world):
            with suppress(OSError, ValueError):
                found[rank] = End(**json.loads(self._path(rank).read_text()))
        return found

    def await_ends(self, ending: Callable[[], int], *, well: bool) -> dict[int, End]:
        """Wait until all have ended, or it is clear why one failed: who ended well, however long that takes."""
        until = math.inf if well else time.monotonic() + PEERS_S
        while True:
            ends = self.ends()
            is_clear = any(one.failed and one.trouble for one in ends.values())
            if is_clear or len(ends) == self.place.world or time.monotonic() > until or ending() == signal.SIGTERM:
                return ends
            if until == math.inf and any(one.failed for one in ends.values()):
                until = time.monotonic() + PEERS_S
            time.sleep(LOOK_EVERY_S)

    def _path(self, rank: int) -> Path:
        return self._folder / f"{self._name}.{rank}.end"


def culprit(ends: Mapping[int, End]) -> int | None:
    """Return the process for whose sake the others failed: one whose memory ended, else the first."""
    failed = [rank for rank, end in ends.items() if end.failed]
    return min(failed, key=lambda rank: (not ends[rank].trouble, ends[rank].at, rank), default=None)
