"""A web server on this machine that gives files as Hugging Face's does, and breaks off where a test asks for it."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The files of every repository, and what becomes of requests."""

    files: dict[str, bytes]
    breaks: list[int] = field(default_factory=list)  # after how many bytes the next answers with large files end
    served: list[tuple[str, int, int]] = field(default_factory=list)  # of each file: name, first byte, bytes
    status: int = 200


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of Hugging Face's library, and of anybody who wants a file."""

    server: Server

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        hub, name = self.server.hub, self.path.partition("?")[0].rpartition("/")[2]
        if hub.status != 200:
            self.reply(hub.status, {}, b"")
        elif self.path.startswith("/api/"):
            self.reply(200, {"Content-Type": "application/json"}, self.described(self.path))
        elif name not in hub.files:
            self.reply(404, {"X-Error-Code": "EntryNotFound"}, b"")
        else:
            body = hub.files[name]
            ranged = re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) if with_body else None
            start = int(ranged[1]) if ranged else 0
            tag = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
            tag |= {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if ranged else {}
            self.reply(206 if ranged else 200, tag, body[start:], with_body=with_body, name=name, start=start)

    def described(self, path: str) -> bytes:
        """Describe a repository, or list its files."""
        names = self.server.hub.files
        if "/tree/" in path:
            return json.dumps([self.entry(name) for name in names]).encode()
        return json.dumps({"id": "a/b", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}).encode()

    def entry(self, name: str) -> dict[str, Any]:
        body = self.server.hub.files[name]
        return {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}

    def reply(
        self, code: int, headers: dict[str, str], body: bytes, *, with_body: bool = True, name: str = "", start: int = 0
    ) -> None:
        hub = self.server.hub
        self.send_response(code)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            most = hub.breaks.pop(0) if hub.breaks and len(body) > 10_000 else len(body)
            if name:
                hub.served.append((name, start, min(most, len(body))))
            self.wfile.write(body[:most])

    def log_message(self, *words: Any) -> None:
        """Keep quiet."""


class Server(ThreadingHTTPServer):
    """Serves a hub until it is closed."""

    daemon_threads = True

    def __init__(self, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub, self.url = hub, f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self._thread.join(60)
        self.server_close()

    def handle_error(self, *words: Any) -> None:
        """Let clients hang up."""
