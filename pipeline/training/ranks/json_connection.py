"""A connection between two ranks that carries JSON, a line a message, and that never waits."""

from __future__ import annotations

import json
import selectors
import socket
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

LONGEST_LINE = 1 << 16
QUIET = getattr(socket, "MSG_NOSIGNAL", 0)  # a program may have SIGPIPE end it
ALIVE = {  # the kernel asks the other kernel: a node that is gone is known within 25 s, a busy process is left alone
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 25_000,
}


class JsonConnection:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection, self._came, self._to_go = connection, b"", b""
        self._messages: list[dict[str, Any]] = []  # that have come and were not taken

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._connection.fileno()

    @property
    def address(self) -> str:
        """Return the address of this end."""
        return str(self._connection.getsockname()[0])

    @property
    def is_clogged(self) -> bool:
        """Tell whether the other end does not take what it was sent."""
        return bool(self._to_go)

    def send(self, said: Mapping[str, Any]) -> None:
        """Send a message, or as much of it as can go; a broken connection is known by `hear`."""
        self._to_go += json.dumps(said).encode() + b"\n"
        try:
            self._to_go = self._to_go[self._connection.send(self._to_go, QUIET) :]
        except BlockingIOError:
            pass
        except OSError:
            self._to_go = b""

    def hear(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the messages that have come, and whether more may come; nonsense ends a connection."""
        is_open = self._read() and len(self._came) <= LONGEST_LINE
        messages, self._messages = self._messages, []
        return messages, is_open

    def next(self, within_s: float) -> dict[str, Any]:
        """Wait for a message."""
        until = time.monotonic() + within_s
        with selectors.DefaultSelector() as ready:
            ready.register(self, selectors.EVENT_READ)
            while not self._messages:
                if not ready.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError(f"nothing is said there for {within_s:.0f} s")
                if not self._read() and not self._messages:
                    raise ConnectionError("the other end hung up")
        return self._messages.pop(0)

    def _read(self) -> bool:
        """Take what is there; tell whether the other end may send more."""
        is_open = self._receive()
        *lines, self._came = self._came.split(b"\n")
        try:
            self._messages += [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError):
            return False
        return is_open

    def _receive(self) -> bool:
        """Take the bytes that are there."""
        try:
            while part := self._connection.recv(LONGEST_LINE):
                self._came += part
                if len(self._came) > 2 * LONGEST_LINE:
                    return True
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Close it."""
        self._connection.close()
