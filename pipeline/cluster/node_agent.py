"""The agent on each node of an allocation: it runs the tasks that the executor sends over a connection.

The executor writes a file with its addresses and two random words, readable only by this user. The agent connects, and
both sides prove themselves by a word. When the connection ends, the agent ends its tasks, after their grace period.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import selectors
import signal
import socket
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cluster.fork_server import is_readable
from pipeline.cluster.job_spec import Job, Request, TaskStatus
from pipeline.cluster.local import TaskRunner
from pipeline.cluster.machine import Machine
from pipeline.codec import plain
from pipeline.waiting import ENDING, signals_held

if TYPE_CHECKING:
    from types import FrameType

MEETING = "meeting.json"
CONNECT_S, SEND_S, IDLE_S = 5.0, 60.0, 3600.0
ANSWER_S = 600.0  # wait for an executor that is busy planning
# TCP keepalive: a silent node is probed after 15 s and lost 20 s later.
ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 35_000}
RECEIVE_BYTES = 1 << 16


class Link:
    """A connection with one JSON object per line."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(SEND_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in ALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection, self._rest = connection, b""

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, **message: Any) -> None:
        """Send a message; raise OSError if the other side is gone."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Return the received messages; raise OSError if the other side is gone."""
        if not is_readable(self.fileno()):
            return []
        received = self._connection.recv(RECEIVE_BYTES)
        if not received:
            raise ConnectionResetError("the connection was closed")
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def next(self, timeout_s: float) -> dict[str, Any]:
        """Return the first message; raise OSError if it does not arrive in time."""
        while True:
            if not select.select([self], [], [], timeout_s)[0]:
                raise TimeoutError("no answer")
            if messages := self.receive():
                return messages[0]

    def close(self) -> None:
        self._connection.close()


def main(folder: Path, node: int) -> None:
    """Serve as the agent of a node until the connection to the executor ends."""
    for number in ENDING:
        signal.signal(number, _end)
    link, first = _connect(json.loads((folder / MEETING).read_text()), node)
    os.environ.update(first["env"])
    os.chdir(first["cwd"])

    def note(piece: int, status: TaskStatus) -> None:
        with suppress(OSError):  # it is gone; reading will notice
            link.send(piece=piece, status=plain(status))

    machine = Machine.detect(**first["machine"])
    link.send(cpus=machine.cpus, gpus=machine.gpus, mem_bytes=machine.mem_bytes)
    with closing(TaskRunner(machine, first["grace_s"], f"{secrets.token_hex(4)}.", note)) as runner:
        runner.events.register(link, selectors.EVENT_READ)
        try:
            _serve(link, runner)
        except OSError:
            runner.events.unregister(link)


def _serve(link: Link, runner: TaskRunner) -> None:
    """Run the received tasks until the connection ends."""
    while True:
        for message in link.receive():
            if "job" in message:
                job = _job(message["job"])
                runner.serve(job)
                runner.start(message["piece"], job, tuple(message["gpus"]))
            else:
                runner.stop(message["stop"])
        with signals_held():
            runner.watch()
        runner.wait(IDLE_S)


def _connect(meeting: dict[str, Any], node: int) -> tuple[Link, dict[str, Any]]:
    """Connect to the first address at which the executor answers; return the connection and its first message."""
    trouble = "it has no address"
    for address in meeting["addresses"]:
        try:
            link = Link(socket.create_connection((address, meeting["port"]), CONNECT_S))
            link.send(token=meeting["token"], node=node)
            said = link.next(ANSWER_S)
            if hmac.compare_digest(str(said.get("answer")).encode(), meeting["answer"].encode()):
                return link, said
            trouble = f"{address}: another program answers"
        except (OSError, ValueError) as error:
            trouble = f"{address}: {error}"
    sys.exit(f"cannot connect to port {meeting['port']} of {', '.join(meeting['addresses'])}: {trouble}")


def _job(data: dict[str, Any]) -> Job:
    """Return the job of these data; pydantic would refuse words that are not UTF-8."""
    words = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
    return Job(**{**data, **words, "request": Request(**data["request"])})


def _end(_number: int, _frame: FrameType | None) -> None:
    """End this process and its tasks."""
    sys.exit("asked to end")
