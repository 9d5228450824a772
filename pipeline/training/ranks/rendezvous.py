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

from pipeline.errors import JobFailed
from pipeline.files import replacing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from pipeline.records import RankPlace

COME_WITHIN_S = 300.0  # all ranks; a node may boot a container first
LOOK_EVERY_S = (0.02, 1.0)  # at first, and at last
CONNECT_WITHIN_S = 5.0
GREET_WITHIN_S, MOST_SILENT = 10.0, 64  # connections that have not said who they are; the oldest go first
LOOPBACK = "127.0.0.1"
LONGEST_LINE = 1 << 16
KEEP_ALIVE = {  # the kernel asks the other: a lost node is noticed within 25 s, a busy process is left alone
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 25_000,
}


class JsonLink:
    """A connection between two ranks that carries a JSON object a line; sending never waits."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self.close = reader, writer, writer.close
        self._socket: socket.socket = writer.get_extra_info("socket")
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE.items():
            if hasattr(socket, name):
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.address: str = self._socket.getsockname()[0]

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
    hosts: Sequence[str]  # by rank
    shared: Mapping[str, Any]  # by rank 0 with all
    keeper: str = LOOPBACK  # the address of rank 0, as this rank reaches it
    address: str = LOOPBACK  # the address of this rank, as others reach it


async def meet(place: RankPlace, folder: Path, shared: Mapping[str, Any], within_s: float) -> Meeting:
    """Connect all ranks; `shared` of rank 0 reaches each of them."""
    file = folder / f"ranks-{place.meeting}.json"
    return await (_Host(place, within_s).gather(file, shared) if place.rank == 0 else _join(place, file, within_s))


class _Host:
    """Rank 0: admits ranks that know the first word."""

    def __init__(self, place: RankPlace, within_s: float) -> None:
        self._place, self._within_s = place, within_s
        self._words = {"token": secrets.token_hex(16), "answer": secrets.token_hex(16)}
        self._silent: dict[JsonLink, None] = {}  # the oldest first
        self._came: dict[int, tuple[JsonLink, str]] = {}
        self._all_came = asyncio.Event()

    async def gather(self, file: Path, shared: Mapping[str, Any]) -> Meeting:
        """Publish the address, admit the others, and send them what they need."""
        place = self._place
        listener = socket.create_server(("" if place.nodes > 1 else LOOPBACK, 0), backlog=place.world)
        port = listener.getsockname()[1]
        server = await asyncio.start_server(self._admit, sock=listener, limit=LONGEST_LINE)
        try:
            with replacing(file) as partial:
                partial.touch(0o600, exist_ok=False)  # only this user may read the words
                partial.write_text(json.dumps({**self._words, "addresses": addresses_of(place), "port": port}))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_came.wait(), self._within_s)
        finally:
            server.close()
            file.unlink(missing_ok=True)
            for stranger in self._silent:
                stranger.close()
        links = {rank: link for rank, (link, _) in self._came.items()}
        if missing := sorted(set(range(1, place.world)) - links.keys()):
            for link in links.values():
                link.send({"missing": missing})
                link.close()
            raise _did_not_come(missing, place.world, f" within {self._within_s:.0f} s")
        hosts = [place.host, *(self._came[rank][1] for rank in range(1, place.world))]
        address = next((link.address for link in links.values() if not _is_loopback(link.address)), LOOPBACK)
        for link in links.values():
            link.send({"hosts": hosts, "shared": shared, "address": address})
        return Meeting(links, hosts, shared, LOOPBACK, address)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Let a rank in; disconnect a stranger, at the latest when it has been silent for too long."""
        link = JsonLink(reader, writer)
        self._silent[link] = None
        if len(self._silent) > MOST_SILENT:
            next(iter(self._silent)).close()
        greeting = await link.next(GREET_WITHIN_S) or {}
        del self._silent[link]
        rank, token = greeting.get("rank"), str(greeting.get("token")).encode(errors="replace")
        is_ours = hmac.compare_digest(token, self._words["token"].encode())
        if not is_ours or not isinstance(rank, int) or not 0 < rank < self._place.world:
            link.close()
            return
        if rank in self._came:  # it lost its connection, and comes once more
            self._came[rank][0].close()
        self._came[rank] = link, str(greeting.get("host"))
        link.send({"answer": self._words["answer"]})
        if len(self._came) == self._place.world - 1:
            self._all_came.set()


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
    raise JobFailed(
        f"rank {place.rank} of {place.world} ({place.host}) did not find rank 0 within {within_s:.0f} s: {trouble}",
        remedy="pipeline logs   (shows why rank 0 did not start; all ranks must see the same run folder)",
    )


async def _attempt(place: RankPlace, content: Mapping[str, Any], until: float) -> Meeting:
    """Join the rank 0 that a file describes; raises OSError if no process, or another program, answers there."""
    keeper, link = await _connect(content["addresses"], int(content["port"]))
    try:
        link.send({"token": content["token"], "rank": place.rank, "host": place.host})
        first = await link.next(CONNECT_WITHIN_S) or {}
        if not hmac.compare_digest(str(first.get("answer")).encode(), str(content["answer"]).encode()):
            raise ConnectionError("another program answers there")
        reply = await link.next(max(0.0, until - time.monotonic()) + CONNECT_WITHIN_S)
        if reply is None:
            raise ConnectionError("the connection was closed")
        if "missing" in reply:
            raise _did_not_come(reply["missing"], place.world)
        own = reply["address"] if _is_loopback(link.address) else link.address
        return Meeting({0: link}, reply["hosts"], reply["shared"], keeper, own)
    except BaseException:
        link.close()
        raise


async def _connect(addresses: Iterable[str], port: int) -> tuple[str, JsonLink]:
    """Connect to the first address that answers."""
    trouble = OSError("it has no address")
    for address in addresses:
        try:
            opening = asyncio.open_connection(address, port, limit=LONGEST_LINE)
            return address, JsonLink(*await asyncio.wait_for(opening, CONNECT_WITHIN_S))
        except OSError as error:
            trouble = OSError(f"{address}:{port}: {error}")
    raise trouble


def addresses_of(place: RankPlace) -> list[str]:
    """Return the names and addresses under which other nodes may reach this one, the likeliest first."""
    if place.nodes == 1:
        return [LOOPBACK]
    names = [place.host, socket.gethostname(), socket.getfqdn()]
    with suppress(OSError):
        names += socket.gethostbyname_ex(socket.gethostname())[2]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: the kernel only chooses the way out
        names.append(probe.getsockname()[0])
    return [name for name in dict.fromkeys(names) if not _is_loopback(name)]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("localhost", "localhost.localdomain", "::1")


def _did_not_come(missing: Iterable[int], world: int, late: str = "") -> JobFailed:
    names = ", ".join(map(str, missing))
    return JobFailed(
        f"of {world} ranks, these did not connect{late}: {names}",
        remedy="pipeline logs   (shows their output; the others are ready)",
    )
