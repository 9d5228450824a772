"""Ranks watch over each other, so that none waits for one that will not come.

A thread in each rank talks over a connection of its own to rank 0, twice a second. Three things can go wrong:

- a process dies: the kernel closes its connection at once (or finds, within 25 s, that the node is gone);
- it hangs: its own thread sees that it neither says `progress` nor waits for others, shows where it is, and ends it;
- it hangs so that no thread of it runs: then the others hear nothing from it for as long.

Who waits for others is not hung, unless all wait. Time is counted in beats, so that a job that was suspended and goes
on is not hung either. What is found goes to all, with the name of the rank: the next call of `check` raises it, and
where the program does not come to that, because it computes or is stuck in a library, the thread ends the process.
"""

from __future__ import annotations

import faulthandler
import os
import selectors
import socket
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NoReturn

from pipeline.training.ranks.rank_protocol import HUNG, LOST, RankLost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipeline.records import RankPlace
    from pipeline.training.ranks.rendezvous import JsonConnection, Meeting

BEAT_S = 0.5
GRACE_S = 10.0  # for a program to end in order once a rank is lost; and as much again to finish that
CLOSE_S = 3.0  # for leaving, once a rank is lost: gloo waits for one that is stopped, or whose network is gone
LINGER_S = 10.0  # rank 0 leaves last, but does not wait longer
TELL_S = 3.0  # a ledger on a file system that hangs must not keep a process alive
STDERR = 2


@dataclass(frozen=True)
class Activity:
    """What a rank does now, as it reports to the watchdog."""

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
    connection: JsonConnection
    doing: Activity
    idle_s: float = 0.0  # since it said something new, by its own count
    silent_s: float = 0.0  # since it was heard
    is_here: bool = True


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


@dataclass(frozen=True)
class HangLimits:
    """How long a rank may go without progress."""

    hang_s: float = 600.0  # without a word of progress
    slow_s: float = 3600.0  # of what is known to be slow: the first step, compilation
    grace_s: float = GRACE_S


class Watchdog:
    """Watches the other ranks and reports this one to them; this rank sets `doing`."""

    def __init__(self, place: RankPlace, met: Meeting, patience: HangLimits, tell: Callable[[str], None]) -> None:
        self.place, self._patience, self._tell_ledger = place, patience, tell
        self.doing = Activity("starting", patience.slow_s)
        self._judged, self._idle_s = self.doing, 0.0
        self._peers = {
            rank: WatchedRank(rank, met.hosts[rank], connection, self.doing)
            for rank, connection in met.connections.items()
        }
        self._ready = selectors.DefaultSelector()
        self._bell, self._rung = socket.socketpair()
        self._ready.register(self._rung, selectors.EVENT_READ)
        for peer in self._peers.values():
            self._ready.register(peer.connection, selectors.EVENT_READ, peer)
        self._loss: LostRank | None = None
        self._suspect: LostRank | None = None
        self._lost, self._raised, self._leaving, self._left = (threading.Event() for _ in range(4))
        self._said_why = ""
        self._end_at = self._close_at = float("inf")
        connections = weakref.WeakSet(met.connections.values())
        # in a child they would hide the death of the parent
        os.register_at_fork(after_in_child=lambda: [connection.close() for connection in connections])
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    @property
    def has_lost(self) -> bool:
        return self._lost.is_set()

    def check(self) -> None:
        """Raise RankLost if a rank was lost."""
        if self._lost.is_set():
            raise self._error()

    def blame(self, trouble: str) -> RankLost:
        """Return the error for a broken connection, after waiting a little to hear which rank caused it."""
        soon_s = self._patience.grace_s / 4
        if not self._lost.wait(soon_s if self.place.rank == 0 else 2 * soon_s):  # rank 0 hears of all
            self._suspect = self._suspected(trouble)
            self._bell.send(b".")
            self._lost.wait(soon_s)
        return self._error()

    def _suspected(self, trouble: str) -> LostRank:
        """Return the rank that most likely broke a connection."""
        for peer in self._peers.values():
            if not peer.is_here:
                return LostRank(peer.rank, peer.host, "ended while others wait for it", peer.doing.what)
        return LostRank(self.place.rank, self.place.host, f"lost its connection to a peer: {trouble}", self.doing.what)

    def leave(self, why: str = "") -> None:
        """Say good-bye to the other ranks and stop watching."""
        self._said_why = why
        if self.has_lost:
            self._close_at = time.monotonic() + CLOSE_S
        self._leaving.set()
        self._bell.send(b".")

    def close(self) -> None:
        """Wait until the thread has ended; rank 0 ends last."""
        self._left.set()
        self._thread.join(LINGER_S + 1)
        for peer in self._peers.values():
            peer.connection.close()
        self._bell.close()
        self._rung.close()
        self._ready.close()

    def _error(self) -> RankLost:
        self._raised.set()
        what = f"one of {self.place.world} ranks is lost: {self._loss or self._suspect}"
        return RankLost(
            what, remedy="pipeline logs   (shows that rank's output; the run continues from its last checkpoint)"
        )

    def _watch(self) -> None:
        """Run the thread: listen, judge and report until this rank leaves."""
        beaten = time.monotonic()
        while not self._leaving.is_set():
            self._listen(BEAT_S)
            if self._suspect:
                self._find(self._suspect)
            now = time.monotonic()
            if now - beaten >= BEAT_S:
                self._beat(min(now - beaten, 2 * BEAT_S))  # longer: this process was suspended, or swapped out
                beaten = now
            self._end_if_late()
        faulthandler.cancel_dump_traceback_later()
        self._part()

    def _end_if_late(self) -> None:
        """End the process if it goes on for too long after a rank was lost; it has longer once `check` has raised."""
        more_s = self._patience.grace_s if self._raised.is_set() else 0.0
        if time.monotonic() > min(self._end_at + more_s, self._close_at):
            os._exit(LOST)

    def _listen(self, within_s: float) -> None:
        """Handle the messages that come within some seconds."""
        for key, _ in self._ready.select(within_s):
            if key.data:
                self._hear(key.data)
            else:
                self._rung.recv(1)

    def _hear(self, peer: WatchedRank) -> None:
        """Handle the messages of a rank."""
        messages, is_open = peer.connection.receive()
        for message in messages:
            peer.silent_s = 0.0
            if "doing" in message:
                peer.doing, peer.idle_s = Activity(**message["doing"]), message["idle_s"]
            if "loss" in message:
                self._find(LostRank(**message["loss"]))
            if "why" in message:  # it leaves, in order or because it must
                peer.is_here = False
                if message["why"]:
                    self._find(LostRank(peer.rank, peer.host, f"gave up: {message['why']}", peer.doing.what))
        if not is_open:
            if peer.is_here:
                self._find(LostRank(peer.rank, peer.host, "died without an error message", peer.doing.what))
            peer.is_here = False
            self._ready.unregister(peer.connection)

    def _beat(self, passed_s: float) -> None:
        """Report to the other ranks, and judge all, every half second."""
        doing = self.doing
        self._idle_s = self._idle_s + passed_s if doing is self._judged else 0.0
        self._judged = doing
        for peer in self._here():
            peer.silent_s += passed_s
            if not peer.connection.is_clogged:
                peer.connection.send({"doing": asdict(doing), "idle_s": self._idle_s})
        if not self._lost.is_set():
            self._judge(doing)
            with suppress(Exception):  # where stderr is closed; it shows stacks also if no thread runs any more
                faulthandler.dump_traceback_later(doing.allowance_s, file=STDERR)

    def _here(self) -> list[WatchedRank]:
        return [peer for peer in self._peers.values() if peer.is_here]

    def _judge(self, doing: Activity) -> None:
        """Look for a rank that hangs, this one included."""
        if not doing.waits and self._idle_s > doing.allowance_s:
            self._hang(doing)
        for peer in self._here():
            if peer.silent_s > peer.doing.allowance_s:
                how = f"has not answered for {peer.silent_s:.0f} s"
                self._find(LostRank(peer.rank, peer.host, how, peer.doing.what))
        if self.place.rank == 0 and len(here := self._here()) == self.place.world - 1:
            ranks = {peer.rank: (peer.host, peer.doing, peer.idle_s) for peer in here}
            if loss := stuck_rank({0: (self.place.host, doing, self._idle_s), **ranks}):
                self._find(loss)

    def _hang(self, doing: Activity) -> NoReturn:
        """Print the stacks of this hung process, and end it."""
        how = f"made no progress for {self._idle_s:.0f} s"
        with suppress(Exception):
            faulthandler.dump_traceback(file=STDERR, all_threads=True)
        self._find(LostRank(self.place.rank, self.place.host, how, doing.what))
        # an end with words unread would reset the connections, and these words with it
        until = time.monotonic() + BEAT_S
        while (left_s := until - time.monotonic()) > 0:
            self._listen(left_s)
        os._exit(HUNG)

    def _find(self, loss: LostRank) -> None:
        """Tell all ranks of a lost rank; only the first loss counts, it caused the others."""
        if self._lost.is_set() or self._leaving.is_set():
            return
        self._loss = loss
        for peer in self._here():
            peer.connection.send({"loss": asdict(loss)})
        self._end_at = time.monotonic() + self._patience.grace_s
        self._lost.set()
        line = f"rank {self.place.rank} of {self.place.world} ({self.place.host}) stops: {loss}"
        with suppress(OSError):
            os.write(STDERR, line.encode() + b"\n")

        def tell() -> None:
            with suppress(Exception):  # whatever it is, it must not keep this process alive
                self._tell_ledger(line)

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        teller.join(TELL_S)

    def _part(self) -> None:
        """Say good-bye; rank 0, through which the others hear of each other, stays until all have left."""
        for peer in self._here():
            peer.connection.send({"why": self._said_why})
        until = time.monotonic() + LINGER_S
        while True:
            others_rely = self.place.rank == 0 and not self.has_lost and len(self._ready.get_map()) > 1  # the bell
            if self._left.is_set() and not (others_rely and time.monotonic() < until):
                return
            self._listen(BEAT_S / 10)
            self._end_if_late()
