"""Connects the ranks of a training, then watches them, so that no rank waits for a dead one.

Other users share the nodes. Rank 0 lets the kernel pick a port. It writes its addresses and two random words into a
file of the run, which only this user can read and whose name is unique to this start. The others look for the file,
connect, send the first word and expect the second. So they never join another program that now uses the port in an old
file. The connections stay open: over them, a thread in each rank exchanges messages with rank 0 twice a second. It
detects three failures:

- a process dies: the kernel closes its connection at once (or finds, within 25 s, that the node is gone);
- a process hangs: its own thread sees that it neither reports progress nor waits for others, prints its stacks and ends
  it;
- a process hangs so that none of its threads runs: the others get no message from it for as long.

A rank that waits for others does not count as hung, unless all wait. Time is counted in beats, so a suspended job does
not count as hung either. All ranks learn the name of the lost rank: the next `check` raises it. If the program does not
reach a `check`, because it computes or is stuck in a library, the thread ends the process.

torch's TCPStore cannot replace the connections: it accepts every client and lists its keys, reports no broken
connection, and waits forever for a stopped process (torch 2.13).
"""

from __future__ import annotations

import asyncio
import faulthandler
import hmac
import json
import os
import secrets
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pipeline.cluster.machine import is_loopback, reachable_addresses
from pipeline.cluster.verdict import HUNG
from pipeline.errors import JobFailed
from pipeline.files import replacing
from pipeline.training.ranks import LOST, RankLost

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from pipeline.records import RankPlace

COME_WITHIN_S = 300.0  # all ranks; a node may boot a container first
SEEK_EVERY_S = (0.02, 1.0)  # at first, and at last
CONNECT_WITHIN_S = 5.0
GREET_WITHIN_S, MOST_SILENT = 10.0, 64  # connections that have not said who they are; the oldest go first
LOOPBACK = "127.0.0.1"
KEEP_ALIVE = {  # the kernel asks the other: a lost node is noticed within 25 s, a busy process is left alone
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 25_000,
}
LOGS = "pipeline logs   (shows why it did not start; all ranks must see the same run folder)"
BEAT_S = 0.5
TICK_S = 0.05
GRACE_S = 15.0  # for a program to end in order once a rank is lost
LINGER_S = 10.0  # rank 0 leaves last, but does not wait longer
STDERR = 2


# Meeting


class JsonLink:
    """A connection between two ranks that carries a JSON object a line; sending never waits."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self.close = reader, writer, writer.close
        self._socket: socket.socket = writer.get_extra_info("socket")
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE.items():
            if hasattr(socket, name):
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.host = ""  # of the rank at the other end
        self.unread_bytes = writer.transport.get_write_buffer_size  # that the other end has not taken
        self.address, self.peer = (writer.get_extra_info(name)[0] for name in ("sockname", "peername"))

    def drop_in_child(self) -> None:
        """Close the connection in a forked process, where it would hide the death of the parent."""
        if (fd := self._socket.fileno()) >= 0:
            with socket.socket() as unconnected:
                os.dup2(unconnected.fileno(), fd)

    def send(self, message: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def next(self, within_s: float | None = None) -> dict[str, Any] | None:
        """Wait for the next message; None at the end of the connection, or after a malformed message."""
        try:
            return dict(json.loads(await asyncio.wait_for(self._reader.readline(), within_s)))
        except (OSError, ValueError, TypeError, RecursionError):
            return None


@dataclass(frozen=True)
class Meeting:
    """The connections and addresses of this rank, once all ranks have come."""

    links: Mapping[int, JsonLink]  # rank 0: to every other; the others: to rank 0
    shared: Mapping[str, Any]  # by rank 0 with all
    address: str = LOOPBACK  # of this rank, as others reach it


async def meet(place: RankPlace, folder: Path, shared: Mapping[str, Any], within_s: float) -> Meeting:
    """Connect all ranks; `shared` of rank 0 reaches each of them."""
    file = folder / f"ranks-{place.meeting}.json"
    return await (_gather(place, file, shared, within_s) if place.rank == 0 else _join(place, file, within_s))


async def _gather(place: RankPlace, file: Path, shared: Mapping[str, Any], within_s: float) -> Meeting:
    """As rank 0: publish the address, admit ranks that know the first word, and send them what they need."""
    words = {"token": secrets.token_hex(16), "answer": secrets.token_hex(16)}
    links: dict[int, JsonLink] = {}
    silent: dict[JsonLink, None] = {}  # the oldest first
    all_came = asyncio.Event()

    async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Admit a rank; disconnect other programs, at the latest when they have been silent for too long."""
        silent[link := JsonLink(reader, writer)] = None
        if len(silent) > MOST_SILENT:
            next(iter(silent)).close()
        greeting = await link.next(GREET_WITHIN_S) or {}
        del silent[link]
        rank, token = greeting.get("rank"), str(greeting.get("token")).encode(errors="replace")
        is_ours = hmac.compare_digest(token, words["token"].encode())
        if not is_ours or not isinstance(rank, int) or not 0 < rank < place.world:
            link.close()
            return
        if rank in links:  # it lost its connection, and comes once more
            links[rank].close()
        links[rank], link.host = link, str(greeting.get("host"))
        link.send({"answer": words["answer"]})
        if len(links) == place.world - 1:
            all_came.set()

    here = None if place.nodes > 1 else LOOPBACK
    server = await asyncio.start_server(admit, here, 0, family=socket.AF_INET, backlog=place.world)
    try:
        with replacing(file) as partial:
            partial.touch(0o600, exist_ok=False)  # only this user may read the words
            port = server.sockets[0].getsockname()[1]
            partial.write_text(json.dumps({**words, "addresses": addresses_of(place), "port": port}))
        with suppress(TimeoutError):
            await asyncio.wait_for(all_came.wait(), within_s)
    finally:
        server.close()
        file.unlink(missing_ok=True)
        for stranger in silent:
            stranger.close()
    if missing := ", ".join(str(rank) for rank in range(1, place.world) if rank not in links):
        problem = f"of {place.world} ranks, these did not connect within {within_s:.0f} s: {missing}"
        for link in links.values():
            link.send({"problem": problem})
            link.close()
        raise JobFailed(problem, remedy=LOGS)
    address = next((link.address for link in links.values() if not is_loopback(link.address)), LOOPBACK)
    for link in links.values():
        link.send({"host": place.host, "shared": shared, "address": address})
    return Meeting(links, shared, address)


async def _join(place: RankPlace, file: Path, within_s: float) -> Meeting:
    """As another rank: look for rank 0 until it is found."""
    until = time.monotonic() + within_s
    pause_s, trouble = SEEK_EVERY_S[0], f"{file} does not exist yet"
    while time.monotonic() < until:
        try:
            os.listdir(file.parent)  # noqa: PTH208 - NFS remembers that a name is not there, but asks for a list
            return await _attempt(place, json.loads(file.read_text()), until)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            trouble = f"the address in {file} does not answer: {error}"
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, SEEK_EVERY_S[1])
    problem = (
        f"rank {place.rank} of {place.world} ({place.host}) did not find rank 0 within {within_s:.0f} s: {trouble}"
    )
    raise JobFailed(problem, remedy=LOGS)


async def _attempt(place: RankPlace, content: Mapping[str, Any], until: float) -> Meeting:
    """Join the rank 0 that a file describes; raises OSError if no process, or another program, answers there."""
    link = await _connect(content["addresses"], int(content["port"]))
    try:
        link.send({"token": content["token"], "rank": place.rank, "host": place.host})
        first = await link.next(CONNECT_WITHIN_S) or {}
        if not hmac.compare_digest(str(first.get("answer")).encode(), str(content["answer"]).encode()):
            raise ConnectionError("another program answers there")
        reply = await link.next(max(0.0, until - time.monotonic()) + CONNECT_WITHIN_S)
        if reply is None:
            raise ConnectionError("the connection was closed")
        if "problem" in reply:
            raise JobFailed(reply["problem"], remedy=LOGS)
    except BaseException:
        link.close()
        raise
    link.host = reply["host"]
    return Meeting({0: link}, reply["shared"], reply["address"] if is_loopback(link.address) else link.address)


async def _connect(addresses: Iterable[str], port: int) -> JsonLink:
    """Connect to the first address that answers."""
    trouble = OSError("it has no address")
    for address in addresses:
        try:
            return JsonLink(*await asyncio.wait_for(asyncio.open_connection(address, port), CONNECT_WITHIN_S))
        except OSError as error:
            trouble = OSError(f"{address}:{port}: {error}")
    raise trouble


def addresses_of(place: RankPlace) -> list[str]:
    """Return the names and addresses under which its ranks may reach this one, the likeliest first."""
    return [LOOPBACK] if place.nodes == 1 else reachable_addresses(place.host)


# Watching


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
    calls: int = 0  # the number of collective calls it has begun
    waits: bool = False  # for the others


@dataclass
class WatchedRank:
    """A rank as it is known here."""

    rank: int
    host: str
    doing: Activity
    idle_s: float = 0.0  # since it reported something new, by its own count
    silent_s: float = 0.0  # since its last message

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
        self._peers: dict[JsonLink, WatchedRank] = {}  # that have not left
        self._gone: WatchedRank | None = None  # the last that left
        self._listeners = set[asyncio.Task[None]]()
        self._loss, self._lost = "", threading.Event()
        self._farewell: str | None = None  # the reason to leave, maybe empty; None: this rank stays
        self._has_left = False
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

    def peers(self) -> list[str]:
        """Return what the ranks that this one is connected to, and that have not left, do."""
        return [peer.doing.what for peer in list(self._peers.values())]

    def check(self) -> None:
        """Raise RankLost if a rank was lost."""
        if self.has_lost:
            raise self._error()

    def blame(self, trouble: str) -> RankLost:
        """Return the error for a broken connection, after waiting a little for the name of the rank that caused it."""
        soon_s = self._limits.grace_s / 4
        if not self._lost.wait(soon_s if self.place.rank == 0 else 2 * soon_s):  # rank 0 is connected to all
            own = self._own.lost(f"lost its connection to a peer: {trouble}")
            loss = self._gone.lost("ended while others wait for it") if self._gone else own
            self._loop.call_soon_threadsafe(self._find, loss)
            self._lost.wait(soon_s)
        return self._error()

    def leave(self, why: str = "") -> None:
        """Tell the other ranks that this one leaves, with a reason if it cannot continue, and stop watching."""
        self._farewell = why

    def close(self) -> None:
        """Wait until the thread has ended; rank 0 ends last."""
        self._has_left = True
        self._thread.join(LINGER_S + 1)

    def _error(self) -> RankLost:
        remedy = "pipeline logs   (shows that rank's output; the run continues from its last checkpoint)"
        return RankLost(f"one of {self.place.world} ranks is lost: {self._loss}", remedy=remedy)

    async def _watch(self) -> None:
        """Judge and report until this rank leaves; rank 0, which relays all reports, leaves last."""
        beaten = time.monotonic()
        while self._farewell is None:
            await self._pause()
            now = time.monotonic()
            if now - beaten >= BEAT_S:
                await self._beat(min(now - beaten, 2 * BEAT_S))  # longer: this process was suspended, or swapped out
                beaten = now
        faulthandler.cancel_dump_traceback_later()
        self._send({"why": self._farewell})
        until = time.monotonic() + LINGER_S
        while not self._has_left or (self._others_rely() and time.monotonic() < until):
            await self._pause()

    def _others_rely(self) -> bool:
        return self.place.rank == 0 and not self.has_lost and any(not listener.done() for listener in self._listeners)

    async def _pause(self) -> None:
        """Wait a little; end the process if it continues for too long after a rank was lost."""
        await asyncio.sleep(TICK_S)
        if time.monotonic() > self._end_at:
            os._exit(LOST)

    async def _listen(self, link: JsonLink, peer: WatchedRank) -> None:
        """Handle the messages of a rank until its connection is closed."""
        with closing(link):
            while (message := await link.next()) is not None:
                peer.silent_s = 0.0
                if "doing" in message:
                    peer.doing, peer.idle_s = Activity(**message["doing"]), message["idle_s"]
                if "loss" in message:
                    self._find(message["loss"])
                if "why" in message:  # it leaves, in order or because it must
                    self._leaves(link, message["why"] and f"gave up: {message['why']}")
        self._leaves(link, "died without an error message")

    def _leaves(self, link: JsonLink, how: str) -> None:
        """Remove a rank that leaves; report it lost if `how` is given."""
        if peer := self._peers.pop(link, None):
            self._gone = peer
            if how:
                self._find(peer.lost(how))

    async def _beat(self, passed_s: float) -> None:
        """Report to the other ranks, and judge all, every half second."""
        own, doing = self._own, self.doing
        own.idle_s = own.idle_s + passed_s if doing is own.doing else 0.0
        own.doing = doing
        for link, peer in self._peers.items():
            peer.silent_s += passed_s
            if not link.unread_bytes():
                link.send({"doing": asdict(doing), "idle_s": own.idle_s})
        if not self.has_lost:
            await self._judge(own)
            with suppress(Exception):  # where stderr is closed; it shows stacks also if no thread runs any more
                faulthandler.dump_traceback_later(doing.allowance_s, file=STDERR)

    def _send(self, message: Mapping[str, Any]) -> None:
        for link in self._peers:
            link.send(message)

    async def _judge(self, own: WatchedRank) -> None:
        """Look for a rank that hangs, this one included."""
        if not own.doing.waits and own.idle_s > own.doing.allowance_s:
            with suppress(Exception):
                faulthandler.dump_traceback(file=STDERR, all_threads=True)
            self._find(own.lost(f"made no progress for {own.idle_s:.0f} s"))
            # closing with unread messages would reset the connections, and lose sent ones
            await asyncio.sleep(BEAT_S)
            os._exit(HUNG)
        for peer in self._peers.values():
            if peer.silent_s > peer.doing.allowance_s:
                self._find(peer.lost(f"has not answered for {peer.silent_s:.0f} s"))
        all_are_here = self.place.rank == 0 and len(self._peers) == self.place.world - 1
        if all_are_here and (loss := stuck_rank([own, *self._peers.values()])):
            self._find(loss)

    def _find(self, loss: str) -> None:
        """Tell all ranks of a lost rank; only the first loss counts, it caused the others."""
        if self.has_lost or self._farewell is not None:
            return
        self._loss = loss
        self._send({"loss": loss})
        self._end_at = time.monotonic() + self._limits.grace_s
        self._lost.set()
        line = f"rank {self.place.rank} of {self.place.world} ({self.place.host}) stops: {loss}"
        with suppress(OSError):
            os.write(STDERR, line.encode() + b"\n")
