"""A fork server: a process that has imported torch, from which local tasks are forked.

Each task is still a process with its own session, logs, environment and limits. It shares the pages of imported modules
with the server; a lone task is charged for them. The server computes nothing and has no Python threads, so its forks
are like fresh processes.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import random
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MARK = "PIPELINE_LOCAL_TASK"  # as in `processes`; an import here would distort the measurement
ANSWER_S = 30.0  # a fork takes milliseconds
REQUEST_BYTES = 1 << 16
MARK_BYTES = 64  # length of the server's own mark: room for that of any task
CAN_FORK = hasattr(os, "pidfd_open")  # missing in Pythons built for old kernels


def is_readable(descriptor: int) -> bool:
    """Tell whether a descriptor is readable; select only works below 1024."""
    looked_at = select.poll()
    looked_at.register(descriptor, select.POLLIN)
    return bool(looked_at.poll(0))


class ForkServer:
    """The executor's side: requests forks and their exit codes."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], mark: str) -> None:
        """Start it, or raise OSError; it reports when it is ready."""
        self.command, self.env = tuple(command), dict(env)
        self.imported_bytes = 0  # resident memory after the first imports; 0: not known yet
        self.is_ready = False
        self._line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.settimeout(ANSWER_S)
        with other:
            self._process = subprocess.Popen(
                [*command, str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # if this fails, a task in a process of its own reports the reason
                env={**env, MARK: mark.ljust(MARK_BYTES, "-")},
                pass_fds=[other.fileno()],
                start_new_session=True,
            )

    def suits(self, command: Sequence[str], env: Mapping[str, str]) -> bool:
        """Tell whether it has the code and the environment of a task."""
        return self.command == tuple(command) and all(env.get(name) == self.env[name] for name in self.env)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable with a message."""
        return self._line.fileno()

    def listen(self) -> bool:
        """Read its messages while it starts; raise OSError if it is gone."""
        while not self.is_ready and is_readable(self.fileno()):
            said = self._hear()
            self.is_ready, self.imported_bytes = said == 0, said or self.imported_bytes
        return self.is_ready

    def fork(self, words: Sequence[str], env: Mapping[str, str], logs: tuple[int, int]) -> tuple[int, int]:
        """Fork a process that runs these words; raise OSError if that fails.

        Return its pid, which is not reused until it is reaped, and a descriptor that becomes readable when it exits.
        """
        own = {name: value for name, value in env.items() if self.env.get(name) != value}
        try:
            socket.send_fds(self._line, [json.dumps([list(words), own]).encode()], list(logs))
            pid = self._hear()
            return pid, os.pidfd_open(pid)
        except OSError:  # a fork ends if its pid was not received
            self.close()
            raise

    def reap(self, pid: int) -> int | None:
        """Return the exit code of an exited process, negative for a signal; None if the server is gone."""
        try:
            self._line.send(json.dumps(pid).encode())
            return os.waitstatus_to_exitcode(self._hear())
        except OSError:
            return None

    def close(self) -> None:
        """End the server; its forks continue."""
        self._line.close()
        self._process.kill()
        self._process.wait()

    def _hear(self) -> int:
        said = self._line.recv(REQUEST_BYTES)
        if not said:
            raise ConnectionError
        return int(said)


def serve(line_fd: int, first: Sequence[str], then: Sequence[str]) -> list[str]:
    """Import modules, then fork for each request until the connection closes; return only in a fork, with its words."""
    line = socket.socket(fileno=line_fd)
    for name in first:
        importlib.import_module(name)
    line.send(b"%d" % _resident_bytes())
    for name in then:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that garbage collections in forks do not write to shared pages
    line.send(b"0")
    while True:
        request, logs, _flags, _address = socket.recv_fds(line, REQUEST_BYTES, 2)
        if not request:
            os._exit(0)
        asked = json.loads(request)
        if isinstance(asked, int):
            line.send(b"%d" % os.waitpid(asked, 0)[1])
            continue
        ours, its = socket.socketpair()
        if (pid := os.fork()) == 0:
            line.close()
            ours.close()
            return _begin(asked, logs, its)
        its.close()
        with ours:
            ours.recv(1)  # it leads a session before its pid is sent
            line.send(b"%d" % pid)
            ours.send(b"1")  # and does nothing before that
        for log in logs:
            os.close(log)


def _begin(asked: tuple[list[str], dict[str, str]], logs: Sequence[int], server: socket.socket) -> list[str]:
    """Set up the fork: session, logs, environment, random numbers."""
    words, env = asked
    os.setsid()
    with server:
        server.send(b"1")
        if not server.recv(1):
            os._exit(1)
    for number, log in enumerate(logs, start=1):
        os.dup2(log, number)
        os.close(log)
    _take_mark(os.fsencode(env[MARK]))
    os.environ.update(env)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.argv = ["-c", *words]
    return words


def _take_mark(mark: bytes) -> None:
    """Overwrite the server's mark with the task's in the environment block that /proc shows."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    ctypes.memmove(getenv(MARK.encode()), mark[:MARK_BYTES].ljust(MARK_BYTES, b"\0"), MARK_BYTES)


def _resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
