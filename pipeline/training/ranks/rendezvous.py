"""How ranks that were started apart find each other, on a node that others use too.

Rank 0 lets the kernel pick a port, and writes where it is, with two random words, into a file of the run that is named
after this very start of the ranks. The others look for the file, connect, say the first word and expect the second: a
file that was left behind, and whoever has its port now, is never joined.

The connections stay for the watchdog. The store of torch.distributed could not take their place: it admits everybody,
tells nobody that a client's connection broke, and keeps signals waiting for as long as it waits itself.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import JobFailed
from pipeline.files import replacing
from pipeline.records import RankPlace

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

COME_WITHIN_S = 300.0  # all ranks; a node may boot a container first
LOOK_EVERY_S = (0.02, 1.0)  # at first, and at last
CONNECT_WITHIN_S = 5.0
GREET_WITHIN_S, MOST_SILENT = 10.0, 64  # connections that have not said who they are; the oldest go first
LOOPBACK = "127.0.0.1"
LONGEST_LINE = 1 << 16
NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # a program may have SIGPIPE end it
KEEP_ALIVE = {  # the kernel asks the other: a node that is gone is known within 25 s, a busy process is left alone
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 25_000,
}


class JsonConnection:
    """A connection between two ranks that carries JSON, one message a line; only `next` ever waits."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._socket, self._received, self._unsent = connection, b"", b""
        self._messages: list[dict[str, Any]] = []  # that were received and not taken
        self.fileno, self.close = connection.fileno, connection.close  # selectors ask for the first

    @property
    def address(self) -> str:
        return str(self._socket.getsockname()[0])

    @property
    def is_clogged(self) -> bool:
        """Whether some of what was sent is still buffered, since the other end does not read."""
        return bool(self._unsent)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, or buffer what cannot go now; `receive` reports a broken connection."""
        self._unsent += json.dumps(message).encode() + b"\n"
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent, NO_SIGNAL) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = b""

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the messages that have come, and whether the connection is open; malformed data closes it."""
        is_open = self._read() and len(self._received) <= LONGEST_LINE
        messages, self._messages = self._messages, []
        return messages, is_open

    def next(self, within_s: float) -> dict[str, Any]:
        """Wait for the next message."""
        until = time.monotonic() + within_s
        with selectors.DefaultSelector() as ready:
            ready.register(self, selectors.EVENT_READ)
            while not self._messages:
                if not ready.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError(f"no answer within {within_s:.0f} s")
                if not self._read() and not self._messages:
                    raise ConnectionError("the connection was closed")
        return self._messages.pop(0)

    def _read(self) -> bool:
        """Read what has arrived; tell whether the connection is still open."""
        is_open = True
        try:
            while is_open and len(self._received) <= 2 * LONGEST_LINE:
                part = self._socket.recv(LONGEST_LINE)
                self._received += part
                is_open = bool(part)
        except BlockingIOError:
            pass
        except OSError:
            is_open = False
        *lines, self._received = self._received.split(b"\n")
        try:
            self._messages += [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError, RecursionError):
            return False
        return is_open


@dataclass(frozen=True)
class Meeting:
    """The connections and addresses of this rank, once all ranks have come."""

    connections: dict[int, JsonConnection]  # rank 0: to every other; the others: to rank 0
    hosts: tuple[str, ...]  # by rank
    said: Mapping[str, Any]  # what rank 0 lets everybody know
    keeper: str  # the address of rank 0, as this rank reaches it
    address: str  # the address of this rank, as others reach it


def meet(place: RankPlace, folder: Path, shared: Mapping[str, Any], within_s: float = COME_WITHIN_S) -> Meeting:
    """Connect all ranks; `shared` of rank 0 is returned to each of them."""
    file = folder / f"ranks-{place.meeting}.json"
    return _keep(place, file, shared, within_s) if place.rank == 0 else _join(place, file, within_s)


def _keep(place: RankPlace, file: Path, shared: Mapping[str, Any], within_s: float) -> Meeting:
    """As rank 0: publish the address, admit the others, and send them what they need."""
    with socket.create_server(("" if place.nodes > 1 else LOOPBACK, 0), backlog=place.world) as listener:
        words = {"token": secrets.token_hex(16), "answer": secrets.token_hex(16)}
        with replacing(file) as partial:
            partial.touch(0o600, exist_ok=False)  # nobody else may read the words
            partial.write_text(json.dumps({**words, "addresses": _addresses(place), "port": listener.getsockname()[1]}))
        try:
            came = _admit(listener, place.world, words, within_s)
        finally:
            file.unlink(missing_ok=True)
    connections = {rank: connection for rank, (connection, _) in came.items()}
    if missing := sorted(set(range(1, place.world)) - came.keys()):
        for connection in connections.values():
            connection.send({"missing": missing})
            connection.close()
        raise _did_not_come(missing, place.world, f" within {within_s:.0f} s")
    hosts = (place.host, *(came[rank][1] for rank in range(1, place.world)))
    outward = [own for connection in connections.values() if not _is_loopback(own := connection.address)]
    address = outward[0] if outward else LOOPBACK
    for connection in connections.values():
        connection.send({"hosts": hosts, "said": shared, "address": address})
    return Meeting(connections, hosts, shared, LOOPBACK, address)


def _admit(
    listener: socket.socket, world: int, words: Mapping[str, str], within_s: float
) -> dict[int, tuple[JsonConnection, str]]:
    """Accept ranks that know the token, and return them with their hosts; others are disconnected."""
    came: dict[int, tuple[JsonConnection, str]] = {}
    silent: dict[JsonConnection, float] = {}  # the oldest first, and until when each may stay so
    until = time.monotonic() + within_s
    listener.settimeout(0)
    with selectors.DefaultSelector() as ready:
        ready.register(listener, selectors.EVENT_READ)
        while len(came) < world - 1 and (left_s := until - time.monotonic()) > 0:
            for key, _ in ready.select(min(left_s, GREET_WITHIN_S)):
                connection: JsonConnection | None = key.data
                if connection is None:
                    with suppress(OSError):  # it may have gone again
                        connection = JsonConnection(listener.accept()[0])
                        ready.register(connection, selectors.EVENT_READ, connection)
                        silent[connection] = time.monotonic() + GREET_WITHIN_S
                    continue
                messages, is_open = connection.receive()
                if is_open and not messages:
                    continue
                ready.unregister(connection)
                del silent[connection]
                if not is_open or (rank := _rank_of(messages[0], words["token"], world)) is None:
                    connection.close()
                    continue
                connection.send({"answer": words["answer"]})
                if rank in came:  # it lost its connection, and comes once more
                    came[rank][0].close()
                came[rank] = connection, str(messages[0].get("host"))
            late = [connection for connection, by in silent.items() if by < time.monotonic()]
            for connection in {*late, *list(silent)[:-MOST_SILENT]}:
                ready.unregister(connection)
                del silent[connection]
                connection.close()
    for connection in silent:
        connection.close()
    return came


def _rank_of(message: Mapping[str, Any], token: str, world: int) -> int | None:
    """Return the rank that a greeting is from, None if its token is wrong."""
    rank, word = message.get("rank"), str(message.get("token"))
    knows = hmac.compare_digest(word.encode(errors="replace"), token.encode())
    return rank if knows and isinstance(rank, int) and 0 < rank < world else None


def _addresses(place: RankPlace) -> list[str]:
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


def _join(place: RankPlace, file: Path, within_s: float) -> Meeting:
    """As another rank: look for rank 0 until it is found."""
    until = time.monotonic() + within_s
    pause_s, trouble = LOOK_EVERY_S[0], f"{file} does not exist yet"
    while time.monotonic() < until:
        try:
            os.listdir(file.parent)  # noqa: PTH208 - NFS remembers that a name is not there, but asks for a list
            return _attempt(place, json.loads(file.read_text()), until)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            trouble = f"the address in {file} does not answer: {error}"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LOOK_EVERY_S[1])
    raise JobFailed(
        f"rank {place.rank} of {place.world} ({place.host}) did not find rank 0 within {within_s:.0f} s: {trouble}",
        remedy="pipeline logs   (shows why rank 0 did not start; all ranks must see the same run folder)",
    )


def _attempt(place: RankPlace, content: Mapping[str, Any], until: float) -> Meeting:
    """Join the rank 0 that a file describes; raises OSError if nobody, or somebody else, answers there."""
    address, connection = _connect(content["addresses"], int(content["port"]))
    try:
        connection.send({"token": content["token"], "rank": place.rank, "host": place.host})
        first = connection.next(CONNECT_WITHIN_S)
        if not hmac.compare_digest(str(first.get("answer")).encode(), str(content["answer"]).encode()):
            raise ConnectionError("another program answers there")
        reply = connection.next(max(0.0, until - time.monotonic()) + CONNECT_WITHIN_S)
        if "missing" in reply:
            raise _did_not_come(reply["missing"], place.world)
        own = reply["address"] if _is_loopback(connection.address) else connection.address
        return Meeting({0: connection}, tuple(reply["hosts"]), reply["said"], address, own)
    except BaseException:
        connection.close()
        raise


def _connect(addresses: Iterable[str], port: int) -> tuple[str, JsonConnection]:
    """Connect to the first address that answers."""
    error: OSError = ConnectionError("it has no address")
    for address in addresses:
        try:
            return address, JsonConnection(socket.create_connection((address, port), timeout=CONNECT_WITHIN_S))
        except OSError as refused:
            error = OSError(f"{address}:{port}: {refused}")
    raise error


def _did_not_come(missing: Iterable[int], world: int, late: str = "") -> JobFailed:
    names = ", ".join(map(str, missing))
    return JobFailed(
        f"of {world} ranks, these did not connect{late}: {names}",
        remedy="pipeline logs   (shows their output; the others are ready)",
    )
