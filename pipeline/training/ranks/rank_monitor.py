"""Ranks watch over each other, so that none waits for one that will not come.

A thread in each rank talks to rank 0 over a connection of its own, twice a second. It notices three failures:

- a process dies: the kernel closes its connection at once (or finds, within 25 s, that the node is gone);
- a process hangs: its own thread sees that it neither reports progress nor waits for others, prints its stacks and ends
  it;
- a process hangs so that none of its threads runs: the others get no message from it for as long.

A rank that waits for others does not hang, unless all wait. Time is counted in beats, so a job that was suspended and
continues does not hang either. All ranks learn the name of the lost rank: the next `check` raises it. Where the program
does not come to that, because it computes or is stuck in a library, the thread ends the process.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pipeline.training.ranks import HUNG, LOST, RankLost
from pipeline.training.ranks.rendezvous import Meeting, meet

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from pipeline.records import RankPlace
    from pipeline.training.ranks.rendezvous import JsonLink

BEAT_S = 0.5
LOOK_EVERY_S = 0.05
GRACE_S = 15.0  # for a program to end in order once a rank is lost
LINGER_S = 10.0  # rank 0 leaves last, but does not wait longer
STDERR = 2


@dataclass(frozen=True)
class HangLimits:
    """How long a rank may go without progress."""

    hang_s: float = 600.0
    slow_s: float = 3600.0  # for work that is known to be slow: the first step, compilation
    grace_s: float = GRACE_S


@dataclass(frozen=True)
class Activity:
    """The current work of a rank, as it reports to its monitor."""

    what: str
    allowance_s: float  # how long that may take
    calls: int = 0  # how many things all ranks do together it has begun
    waits: bool = False  # for the others


@dataclass
class WatchedRank:
    """A rank as it is known here."""

    rank: int
    host: str
    doing: Activity
    idle_s: float = 0.0  # since it reported something new, by its own count
    silent_s: float = 0.0  # since its last message
    is_here: bool = True

    def lost(self, how: str) -> str:
        """Say how it was lost."""
        return f"rank {self.rank} ({self.host}) {how}; its last action: {self.doing.what}"


def stuck_rank(ranks: Sequence[WatchedRank]) -> str | None:
    """Name the rank furthest behind if all ranks wait for each other for too long, else None."""
    if not all(rank.doing.waits and rank.idle_s > rank.doing.allowance_s for rank in ranks):
        return None
    behind, ahead = (pick(ranks, key=lambda rank: rank.doing.calls) for pick in (min, max))
    how = "the network is stuck"
    if ahead.doing.calls > behind.doing.calls:
        how = f"it is in call {behind.doing.calls}, others in call {ahead.doing.calls}"
    return behind.lost(f"waits for the others, which wait for it: {how}")


class RankMonitor:
    """Watches the other ranks and reports this one to them; this rank sets `doing`."""

    def __init__(self, place: RankPlace, limits: HangLimits) -> None:
        self.place, self._limits = place, limits
        self.doing = Activity("starting", limits.slow_s)
        self._own = WatchedRank(place.rank, place.host, self.doing)  # as of the last beat
        self._peers: dict[JsonLink, WatchedRank] = {}
        self._listeners = set[asyncio.Task[None]]()
        self._loss = ""
        self._lost, self._left = threading.Event(), threading.Event()
        self._is_leaving, self._reason = False, ""
        self._end_at = float("inf")

    def start(
        self, folder: Path | None = None, shared: Mapping[str, Any] | None = None, within_s: float = 0
    ) -> Meeting:
        """Meet the other ranks through a folder that all see, then watch from a thread."""
        met = Future[Meeting]()

        async def run() -> None:
            self._loop = asyncio.get_running_loop()
            try:
                found = await meet(self.place, folder, shared or {}, within_s) if folder else Meeting({}, {})
            except BaseException as error:  # noqa: BLE001 - it is raised where the meeting is awaited
                met.set_exception(error)
                return
            for rank, link in found.links.items():
                self._peers[link] = WatchedRank(rank, link.host, self.doing)
                os.register_at_fork(after_in_child=link.drop_in_child)
            self._listeners = {asyncio.ensure_future(self._listen(*known)) for known in self._peers.items()}
            met.set_result(found)
            await self._watch()

        self._thread = threading.Thread(target=lambda: asyncio.run(run()), name="rank monitor", daemon=True)
        self._thread.start()
        return met.result()

    @property
    def has_lost(self) -> bool:
        return self._lost.is_set()

    def check(self) -> None:
        """Raise RankLost if a rank was lost."""
        if self.has_lost:
            raise self._error()

    def blame(self, trouble: str) -> RankLost:
        """Return the error for a broken connection, after waiting a little for the name of the rank that caused it."""
        soon_s = self._limits.grace_s / 4
        if not self._lost.wait(soon_s if self.place.rank == 0 else 2 * soon_s):  # rank 0 is connected to all
            gone = next((peer for peer in self._peers.values() if not peer.is_here), None)
            own = self._own.lost(f"lost its connection to a peer: {trouble}")
            loss = gone.lost("ended while others wait for it") if gone else own
            self._loop.call_soon_threadsafe(self._find, loss)
            self._lost.wait(soon_s)
        return self._error()

    def leave(self, why: str = "") -> None:
        """Say good-bye to the other ranks, with a reason if this one cannot go on, and stop watching."""
        self._reason, self._is_leaving = why, True

    def close(self) -> None:
        """Wait until the thread has ended; rank 0 ends last."""
        self._left.set()
        self._thread.join(LINGER_S + 1)

    def _error(self) -> RankLost:
        remedy = "pipeline logs   (shows that rank's output; the run continues from its last checkpoint)"
        return RankLost(f"one of {self.place.world} ranks is lost: {self._loss}", remedy=remedy)

    async def _watch(self) -> None:
        """Judge and report until this rank leaves; rank 0, through which the others hear of each other, stays last."""
        beaten = time.monotonic()
        while not self._is_leaving:
            await self._pause()
            now = time.monotonic()
            if now - beaten >= BEAT_S:
                await self._beat(min(now - beaten, 2 * BEAT_S))  # longer: this process was suspended, or swapped out
                beaten = now
        faulthandler.cancel_dump_traceback_later()
        self._send({"why": self._reason})
        until = time.monotonic() + LINGER_S
        while not self._left.is_set() or (self._others_rely() and time.monotonic() < until):
            await self._pause()
        for link in self._peers:
            link.close()

    def _others_rely(self) -> bool:
        return self.place.rank == 0 and not self.has_lost and any(not listener.done() for listener in self._listeners)

    async def _pause(self) -> None:
        """Wait a little; end the process if it goes on for too long after a rank was lost."""
        await asyncio.sleep(LOOK_EVERY_S)
        if time.monotonic() > self._end_at:
            os._exit(LOST)

    async def _listen(self, link: JsonLink, peer: WatchedRank) -> None:
        """Handle the messages of a rank until its connection is closed."""
        while (message := await link.next()) is not None:
            peer.silent_s = 0.0
            if "doing" in message:
                peer.doing, peer.idle_s = Activity(**message["doing"]), message["idle_s"]
            if "loss" in message:
                self._find(message["loss"])
            if "why" in message:  # it leaves, in order or because it must
                peer.is_here = False
                if message["why"]:
                    self._find(peer.lost(f"gave up: {message['why']}"))
        if peer.is_here:
            self._find(peer.lost("died without an error message"))
        peer.is_here = False

    async def _beat(self, passed_s: float) -> None:
        """Report to the other ranks, and judge all, every half second."""
        own, doing = self._own, self.doing
        own.idle_s = own.idle_s + passed_s if doing is own.doing else 0.0
        own.doing = doing
        for link, peer in self._peers.items():
            peer.silent_s += passed_s
            if peer.is_here and not link.is_clogged:
                link.send({"doing": asdict(doing), "idle_s": own.idle_s})
        if not self.has_lost:
            await self._judge(own)
            with suppress(Exception):  # where stderr is closed; it shows stacks also if no thread runs any more
                faulthandler.dump_traceback_later(doing.allowance_s, file=STDERR)

    def _here(self) -> list[WatchedRank]:
        return [peer for peer in self._peers.values() if peer.is_here]

    def _send(self, message: Mapping[str, Any]) -> None:
        for link, peer in self._peers.items():
            if peer.is_here:
                link.send(message)

    async def _judge(self, own: WatchedRank) -> None:
        """Look for a rank that hangs, this one included."""
        if not own.doing.waits and own.idle_s > own.doing.allowance_s:
            with suppress(Exception):
                faulthandler.dump_traceback(file=STDERR, all_threads=True)
            self._find(own.lost(f"made no progress for {own.idle_s:.0f} s"))
            # to end with messages unread would reset the connections, and lose what was sent
            await asyncio.sleep(BEAT_S)
            os._exit(HUNG)
        for peer in self._here():
            if peer.silent_s > peer.doing.allowance_s:
                self._find(peer.lost(f"has not answered for {peer.silent_s:.0f} s"))
        all_are_here = self.place.rank == 0 and len(self._here()) == self.place.world - 1
        if all_are_here and (loss := stuck_rank([own, *self._here()])):
            self._find(loss)

    def _find(self, loss: str) -> None:
        """Tell all ranks of a lost rank; only the first loss counts, it caused the others."""
        if self.has_lost or self._is_leaving:
            return
        self._loss = loss
        self._send({"loss": loss})
        self._end_at = time.monotonic() + self._limits.grace_s
        self._lost.set()
        line = f"rank {self.place.rank} of {self.place.world} ({self.place.host}) stops: {loss}"
        with suppress(OSError):
            os.write(STDERR, line.encode() + b"\n")
