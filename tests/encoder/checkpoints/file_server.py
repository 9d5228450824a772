"""A real web server on this machine that serves one file, and goes wrong in the ways a test asks for."""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

NEXT_ONE_GONE_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection


@dataclass
class Asked:
    """One request, and how many bytes of the file were given for it."""

    path: str
    headers: dict[str, str]
    served: int = 0


Answer: TypeAlias = Callable[["Handler"], None]


@dataclass
class File:
    """What is served."""

    body: bytes
    etag: str | None = '"one"'
    ranges: bool = True
    heeds_if_range: bool = True
    odd: deque[Answer] = field(default_factory=deque)  # answers to the next requests, in place of the file
    asked: list[Asked] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.body).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Answers with the file, or with what the test has put in front of it."""

    server: Server

    def do_GET(self) -> None:
        file = self.server.file
        file.asked.append(Asked(self.path, {name.lower(): value for name, value in self.headers.items()}))
        if file.odd:
            file.odd.popleft()(self)
        else:
            self.give()

    def give(self, most: int | None = None) -> None:
        """Give the file or the asked part of it, but at most so many bytes of those announced."""
        start = self.begin()
        if start is not None:
            body = self.server.file.body[start:]
            self.send(body if most is None else body[:most])

    def begin(self) -> int | None:
        """Send the headers; return where the body begins, None where there is none."""
        file = self.server.file
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        unchanged = self.headers.get("If-Range") in (None, file.etag) or not file.heeds_if_range
        start = int(match[1]) if match and file.ranges and unchanged else 0
        if start >= len(file.body) > 0 and start:
            self.answer(416, {"Content-Range": f"bytes */{len(file.body)}"})
            return None
        headers = {"Content-Type": "application/octet-stream"}
        headers |= {"ETag": file.etag} if file.etag else {}
        headers["Content-Length"] = f"{len(file.body) - start}"
        headers |= {"Content-Range": f"bytes {start}-{len(file.body) - 1}/{len(file.body)}"} if start else {}
        self.send_headers(206 if start else 200, headers)
        return start

    def send(self, data: bytes) -> None:
        self.server.file.asked[-1].served += len(data)
        self.wfile.write(data)
        self.wfile.flush()

    def send_headers(self, code: int, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def answer(self, code: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_headers(code, {"Content-Length": str(len(body)), **headers})
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        """Keep quiet."""


class Server(ThreadingHTTPServer):
    """Serves `file` until it is closed."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, file: File, certificate: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.file = file
        self.scheme = "http" if certificate is None else "https"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"{self.scheme}://localhost:{self.server_port}/models/esm2_t6_8M_UR50D.pt"

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.over.set()
        self.shutdown()
        self._thread.join(60)
        self.server_close()

    def handle_error(self, *words: Any) -> None:
        """Let clients hang up."""


def cut(after: int) -> Answer:
    """Announce everything, send `after` bytes, end the connection."""
    return lambda handler: handler.give(after)


def reset(after: int) -> Answer:
    """Send `after` bytes, then reset the connection."""

    def answer(handler: Handler) -> None:
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NEXT_ONE_GONE_AT_ONCE)
        handler.give(after)

    return answer


def stall(after: int) -> Answer:
    """Send `after` bytes, then nothing until the server is closed."""

    def answer(handler: Handler) -> None:
        handler.give(after)
        handler.server.file.over.wait()

    return answer


def status(code: int, **headers: str) -> Answer:
    """Answer with a status."""
    return lambda handler: handler.answer(code, {name.replace("_", "-"): value for name, value in headers.items()})


def hang_up(handler: Handler) -> None:
    """End the connection without a word."""
    with contextlib.suppress(OSError):
        handler.connection.shutdown(socket.SHUT_RDWR)


def redirect(to: str, code: int = 302) -> Answer:
    """Send the client elsewhere."""
    return status(code, Location=to)


PAGE = b"\n<!DOCTYPE html><html><body>Please log in</body></html>"


def page(kind: str = "text/html; charset=utf-8", code: int = 200, body: bytes = PAGE) -> Answer:
    """Answer with a web page, as a hotel's network does."""
    return lambda handler: handler.answer(code, {"Content-Type": kind}, body)
