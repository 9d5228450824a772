"""The small process on each node of an allocation: a local executor that is sent tasks over a connection.

The executor of the allocation writes a file with its addresses and two random words, which only this user can read. The
agent connects, and both show a word. When the connection ends, the agent ends its tasks, after their grace period.
"""

from __future__ import annotations

import hmac
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cluster.fork_server import is_readable
from pipeline.cluster.job_spec import Job, Request, TaskState, TaskStatus
from pipeline.cluster.local import LocalExecutor
from pipeline.cluster.machine import Machine
from pipeline.codec import plain
from pipeline.errors import PipelineError
from pipeline.waiting import ENDING

if TYPE_CHECKING:
    from types import FrameType

MEETING = "meeting.json"
CONNECT_S, SEND_S, IDLE_S, STEP_S = 5.0, 60.0, 3600.0, 0.05
# A node that lost its power does not say so: after 15 s of silence it is asked, and is lost 20 s later.
ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
RECEIVE_BYTES = 1 << 16


class Link:
    """A connection that carries a JSON object a line."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(SEND_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in ALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection, self._rest = connection, b""

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, **message: Any) -> None:
        """Send a message; raise OSError where the other end is gone."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come; raise OSError where the other end is gone."""
        if not is_readable(self.fileno()):
            return []
        received = self._connection.recv(RECEIVE_BYTES)
        if not received:
            raise ConnectionResetError("the connection was closed")
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def next(self, timeout_s: float) -> dict[str, Any]:
        """Return the next message, before which no other was sent; raise OSError where none comes in time."""
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
    link, told = _connect(json.loads((folder / MEETING).read_text()), node)
    os.environ.update(told["env"])
    os.chdir(told["cwd"])
    machine = Machine.detect(**told["machine"])
    link.send(cpus=machine.cpus, gpus=len(machine.gpus), mem_bytes=machine.mem_bytes)
    try:
        with LocalExecutor(machine, grace_s=told["grace_s"]) as executor:
            _serve(link, executor)
    except OSError:
        sys.exit(f"the executor of this allocation is gone: the tasks of node {node} were ended")


def _connect(meeting: dict[str, Any], node: int) -> tuple[Link, dict[str, Any]]:
    """Connect to the first address at which the executor answers; return the connection and its first message."""
    trouble = "it has no address"
    for address in meeting["addresses"]:
        try:
            link = Link(socket.create_connection((address, meeting["port"]), CONNECT_S))
            link.send(token=meeting["token"], node=node)
            told = link.next(CONNECT_S)
            if hmac.compare_digest(str(told.get("answer")).encode(), meeting["answer"].encode()):
                return link, told
            trouble = f"{address}: another program answers"
        except (OSError, ValueError) as error:
            trouble = f"{address}: {error}"
    sys.exit(f"cannot connect to port {meeting['port']} of {', '.join(meeting['addresses'])}: {trouble}")


def _serve(link: Link, executor: LocalExecutor) -> None:
    """Run the tasks that come over a connection until it ends."""
    pieces: dict[str, int] = {}  # the executor's number of each job
    running: set[str] = set()
    while True:
        select.select([link], [], [], 0 if running else IDLE_S)
        for message in link.receive():
            if "job" in message:
                job, piece = _job(message["job"]), message["piece"]
                try:
                    job_id = executor.submit(job)
                except PipelineError as refused:
                    status = TaskStatus("", job.tasks[0], TaskState.FAILED, *job.log_paths("", 0), reason=refused.what)
                    link.send(piece=piece, status=plain(status))
                else:
                    pieces[job_id] = piece
                    running.add(job_id)
            else:
                ended = {piece: job_id for job_id, piece in pieces.items()}
                executor.cancel([ended[piece] for piece in message["cancel"] if piece in ended])
        for status in executor.step(STEP_S):
            link.send(piece=pieces[status.job], status=plain(status))
            if status.state.ended:
                running.discard(status.job)


def _job(data: dict[str, Any]) -> Job:
    """Return the job that `plain` made these data of; its words may be bytes that are no text, which pydantic refuses."""
    words = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
    return Job(**{**data, **words, "request": Request(**data["request"])})


def _end(_number: int, _frame: FrameType | None) -> None:
    """End, and the tasks with it."""
    sys.exit("asked to end")
