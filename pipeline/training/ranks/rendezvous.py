"""Ranks that were started apart find each other, on a node that strangers use too.

Rank 0 lets the kernel pick a port. It writes its addresses and two random words into a file of the run, which only this
user can read and whose name no other start of the ranks has. The others look for the file, connect, send the first word
and expect the second. So they never join another program that now has the port of a file that was left behind.

The connections stay open for the rank monitor. torch's TCPStore could not replace them: it admits everybody and lists
its keys to them, reports no broken connection, and waits forever for a process that is stopped (torch 2.13).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from pipeline.errors import JobFailed
from pipeline.files import replacing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from pipeline.records import RankPlace

COME_WITHIN_S = 300.0  # all ranks; a node may boot a container first
LOOK_EVERY_S = (0.02, 1.0)  # at first, and at last
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
        self.address, self.peer = (writer.get_extra_info(name)[0] for name in ("sockname", "peername"))

    @property
    def is_clogged(self) -> bool:
        """Whether the other end does not read: some of what was sent is still buffered."""
        return self._writer.transport.get_write_buffer_size() > 0

    def drop_in_child(self) -> None:
        """Let go of the connection in a forked process, which would hide the death of its parent."""
        if (fd := self._socket.fileno()) >= 0:
            with socket.socket() as unconnected:
                os.dup2(unconnected.fileno(), fd)

    def send(self, message: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def next(self, within_s: float | None = None) -> dict[str, Any] | None:
        """Wait for the next message; None if none comes any more, or what comes is malformed."""
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
        """Let a rank in; disconnect a stranger, at the latest when it has been silent for too long."""
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
    address = next((link.address for link in links.values() if not _is_loopback(link.address)), LOOPBACK)
    for link in links.values():
        link.send({"host": place.host, "shared": shared, "address": address})
    return Meeting(links, shared, address)


async def _join(place: RankPlace, file: Path, within_s: float) -> Meeting:
    """As another rank: look for rank 0 until it is found."""
    until = time.monotonic() + within_s
    pause_s, trouble = LOOK_EVERY_S[0], f"{file} does not exist yet"
    while time.monotonic() < until:
        try:
            os.listdir(file.parent)  # noqa: PTH208 - NFS remembers that a name is not there, but asks for a list
            return await _attempt(place, json.loads(file.read_text()), until)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            trouble = f"the address in {file} does not answer: {error}"
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LOOK_EVERY_S[1])
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
    return Meeting({0: link}, reply["shared"], reply["address"] if _is_loopback(link.address) else link.address)


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
    """Return the names and addresses under which other nodes may reach this one, the likeliest first."""
    if place.nodes == 1:
        return [LOOPBACK]
    owned = (known for addresses in psutil.net_if_addrs().values() for known in addresses)
    names = [place.host, socket.gethostname(), *(known.address for known in owned if known.family == socket.AF_INET)]
    return [name for name in dict.fromkeys(names) if not _is_loopback(name)]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("localhost", "localhost.localdomain", "::1")
