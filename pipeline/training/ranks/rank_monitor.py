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

from pipeline.training.ranks.rank_protocol import HUNG, LOST, RankLost
from pipeline.training.ranks.rendezvous import Meeting, meet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import Any

    from pipeline.records import RankPlace
    from pipeline.training.ranks.rendezvous import JsonLink

BEAT_S = 0.5
GRACE_S = 10.0  # for a program to end in order once a rank is lost; and as much again to finish that
CLOSE_S = 3.0  # for leaving, once a rank is lost: gloo waits for one that is stopped, or whose network is gone
LINGER_S = 10.0  # rank 0 leaves last, but does not wait longer
REPORT_S = 3.0  # a ledger on a file system that hangs must not keep a process alive
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


@dataclass(frozen=True)
class LostRank:
    """A rank that died, hangs or gave up, and how."""

    rank: int
    host: str
    how: str
    last: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}) {self.how}" + (f"; its last action: {self.last}" if self.last else "")


@dataclass
class WatchedRank:
    """Another rank as seen from here, with the connection to it."""

    rank: int
    host: str
    link: JsonLink
    doing: Activity
    idle_s: float = 0.0  # since it reported something new, by its own count
    silent_s: float = 0.0  # since its last message
    is_here: bool = True

    def lost(self, how: str) -> LostRank:
        return LostRank(self.rank, self.host, how, self.doing.what)


def stuck_rank(ranks: Mapping[int, tuple[str, Activity, float]]) -> LostRank | None:
    """Return the rank furthest behind if all ranks wait for each other for too long, else None.

    `ranks` has the host, activity and idle seconds of each.
    """
    if not all(doing.waits and idle_s > doing.allowance_s for _, doing, idle_s in ranks.values()):
        return None
    behind = min(ranks, key=lambda rank: (ranks[rank][1].calls, rank))
    host, doing, _ = ranks[behind]
    ahead = max(other.calls for _, other, _ in ranks.values())
    how = "waits for the others, which wait for it: "
    how += f"it is in call {doing.calls}, others in call {ahead}" if ahead > doing.calls else "the network is stuck"
    return LostRank(behind, host, how, doing.what)


class RankMonitor:
    """Watches the other ranks and reports this one to them; this rank sets `doing`."""

    def __init__(self, place: RankPlace, limits: HangLimits, report: Callable[[str], None]) -> None:
        """Watch this process; `report` is called with the message if a rank is lost."""
        self.place, self._limits, self._report = place, limits, report
        self.doing = Activity("starting", limits.slow_s)
        self._judged, self._idle_s = self.doing, 0.0
        self._peers: dict[int, WatchedRank] = {}
        self._loss: LostRank | None = None
        self._suspect: LostRank | None = None
        self._lost, self._raised, self._left = (threading.Event() for _ in range(3))
        self._is_leaving, self._reason = False, ""
        self._end_at = self._close_at = float("inf")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listeners = set[asyncio.Task[None]]()

    def start(
        self, folder: Path | None = None, shared: Mapping[str, Any] | None = None, within_s: float = 0
    ) -> Meeting:
        """Meet the other ranks through a folder that all see, then watch from a thread."""
        met = Future[Meeting]()

        async def run() -> None:
            self._loop, self._task, self._bell = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
            try:
                found = await meet(self.place, folder, shared or {}, within_s) if folder else Meeting({}, [], {})
            except BaseException as error:  # noqa: BLE001 - it is raised where the meeting is awaited
                met.set_exception(error)
                return
            for rank, link in found.links.items():
                self._peers[rank] = WatchedRank(rank, found.hosts[rank], link, self.doing)
                os.register_at_fork(after_in_child=link.drop_in_child)
            self._listeners = {asyncio.ensure_future(self._listen(peer)) for peer in self._peers.values()}
            met.set_result(found)
            await self._watch()

        self._thread = threading.Thread(target=lambda: asyncio.run(run()), name="rank monitor", daemon=True)
        self._thread.start()
        try:
            return met.result()
        except BaseException:  # of a signal, too
            if self._loop and self._task and not met.done():
                self._loop.call_soon_threadsafe(self._task.cancel)
                self._thread.join(BEAT_S)
            raise

    @property
    def has_lost(self) -> bool:
        return self._lost.is_set()

    def check(self) -> None:
        """Raise RankLost if a rank was lost."""
        if self._lost.is_set():
            raise self._error()

    def blame(self, trouble: str) -> RankLost:
        """Return the error for a broken connection, after waiting a little for the name of the rank that caused it."""
        soon_s = self._limits.grace_s / 4
        if not self._lost.wait(soon_s if self.place.rank == 0 else 2 * soon_s):  # rank 0 is connected to all
            gone = next((peer for peer in self._peers.values() if not peer.is_here), None)
            own = LostRank(
                self.place.rank, self.place.host, f"lost its connection to a peer: {trouble}", self.doing.what
            )
            self._suspect = gone.lost("ended while others wait for it") if gone else own
            self._ring()
            self._lost.wait(soon_s)
        return self._error()

    def leave(self, why: str = "") -> None:
        """Say good-bye to the other ranks, with a reason if this one cannot go on, and stop watching."""
        self._reason = why
        if self.has_lost:
            self._close_at = time.monotonic() + CLOSE_S
        self._is_leaving = True
        self._ring()

    def close(self) -> None:
        """Wait until the thread has ended; rank 0 ends last."""
        self._left.set()
        self._ring()
        self._thread.join(LINGER_S + 1)

    def _ring(self) -> None:
        """Wake the thread."""
        with suppress(RuntimeError):  # it has ended
            if self._loop:
                self._loop.call_soon_threadsafe(self._bell.set)

    def _error(self) -> RankLost:
        self._raised.set()
        what = f"one of {self.place.world} ranks is lost: {self._loss or self._suspect}"
        return RankLost(
            what, remedy="pipeline logs   (shows that rank's output; the run continues from its last checkpoint)"
        )

    async def _watch(self) -> None:
        """Judge and report until this rank leaves; rank 0, through which the others hear of each other, stays last."""
        beaten = time.monotonic()
        while not self._is_leaving:
            await self._pause(BEAT_S)
            if self._suspect:
                self._find(self._suspect)
            now = time.monotonic()
            if now - beaten >= BEAT_S:
                await self._beat(min(now - beaten, 2 * BEAT_S))  # longer: this process was suspended, or swapped out
                beaten = now
            self._end_if_late()
        faulthandler.cancel_dump_traceback_later()
        for peer in self._here():
            peer.link.send({"why": self._reason})
        until = time.monotonic() + LINGER_S
        while not self._left.is_set() or (self._others_rely() and time.monotonic() < until):
            await self._pause(BEAT_S / 10)
            self._end_if_late()
        for peer in self._peers.values():
            peer.link.close()

    def _others_rely(self) -> bool:
        return self.place.rank == 0 and not self.has_lost and any(not listener.done() for listener in self._listeners)

    async def _pause(self, most_s: float) -> None:
        """Wait for the bell, but not for long."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._bell.wait(), most_s)
        self._bell.clear()

    def _end_if_late(self) -> None:
        """End the process if it goes on for too long after a rank was lost; it has longer once `check` has raised."""
        more_s = self._limits.grace_s if self._raised.is_set() else 0.0
        if time.monotonic() > min(self._end_at + more_s, self._close_at):
            os._exit(LOST)

    async def _listen(self, peer: WatchedRank) -> None:
        """Handle the messages of a rank until its connection is closed."""
        while (message := await peer.link.next()) is not None:
            peer.silent_s = 0.0
            if "doing" in message:
                peer.doing, peer.idle_s = Activity(**message["doing"]), message["idle_s"]
            if "loss" in message:
                self._find(LostRank(**message["loss"]))
            if "why" in message:  # it leaves, in order or because it must
                peer.is_here = False
                if message["why"]:
                    self._find(peer.lost(f"gave up: {message['why']}"))
        if peer.is_here:
            self._find(peer.lost("died without an error message"))
        peer.is_here = False

    async def _beat(self, passed_s: float) -> None:
        """Report to the other ranks, and judge all, every half second."""
        doing = self.doing
        self._idle_s = self._idle_s + passed_s if doing is self._judged else 0.0
        self._judged = doing
        for peer in self._here():
            peer.silent_s += passed_s
            if not peer.link.is_clogged:
                peer.link.send({"doing": asdict(doing), "idle_s": self._idle_s})
        if not self._lost.is_set():
            await self._judge(doing)
            with suppress(Exception):  # where stderr is closed; it shows stacks also if no thread runs any more
                faulthandler.dump_traceback_later(doing.allowance_s, file=STDERR)

    def _here(self) -> list[WatchedRank]:
        return [peer for peer in self._peers.values() if peer.is_here]

    async def _judge(self, doing: Activity) -> None:
        """Look for a rank that hangs, this one included."""
        if not doing.waits and self._idle_s > doing.allowance_s:
            with suppress(Exception):
                faulthandler.dump_traceback(file=STDERR, all_threads=True)
            how = f"made no progress for {self._idle_s:.0f} s"
            self._find(LostRank(self.place.rank, self.place.host, how, doing.what))
            # to end with messages unread would reset the connections, and lose what was sent
            await asyncio.sleep(BEAT_S)
            os._exit(HUNG)
        for peer in self._here():
            if peer.silent_s > peer.doing.allowance_s:
                self._find(peer.lost(f"has not answered for {peer.silent_s:.0f} s"))
        if self.place.rank == 0 and len(here := self._here()) == self.place.world - 1:
            ranks = {peer.rank: (peer.host, peer.doing, peer.idle_s) for peer in here}
            if loss := stuck_rank({0: (self.place.host, doing, self._idle_s), **ranks}):
                self._find(loss)

    def _find(self, loss: LostRank) -> None:
        """Tell all ranks of a lost rank; only the first loss counts, it caused the others."""
        if self._lost.is_set() or self._is_leaving:
            return
        self._loss = loss
        for peer in self._here():
            peer.link.send({"loss": asdict(loss)})
        self._end_at = time.monotonic() + self._limits.grace_s
        self._lost.set()
        line = f"rank {self.place.rank} of {self.place.world} ({self.place.host}) stops: {loss}"
        with suppress(OSError):
            os.write(STDERR, line.encode() + b"\n")

        def report() -> None:
            with suppress(Exception):  # whatever it is, it must not keep this process alive
                self._report(line)

        reporter = threading.Thread(target=report, daemon=True)
        reporter.start()
        reporter.join(REPORT_S)
