"""Finds, measures and ends the processes of a task, by reading /proc.

A task is its whole process tree. A process belongs to it by its session, its parent, or a mark in its environment,
which even daemons inherit. (Only a process with a clean environment, a new session and a parent that died between two
looks is missed.)

Run as a script, this file is the guard of an executor: it waits until the executor is gone, then ends what is left.
It imports only the standard library, to start quickly and from anywhere.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MARK = "PIPELINE_LOCAL_TASK"
LOOK_EVERY_S = 0.05
FORGET_AFTER_S = 1.0  # the pid may belong to another process by now
KERNEL_THREAD = 0x00200000  # PF_KTHREAD


class Process(NamedTuple):
    """A living process, and the task that owns it."""

    owner: str
    session: int
    started_ticks: int  # identifies a process together with its pid


class ProcessTable:
    """The living processes of tasks whose marks begin with `prefix`, as of the last `refresh`."""

    def __init__(self, prefix: str) -> None:
        self._entry = f"{MARK}={prefix}".encode()
        self._processes: dict[int, Process] = {}
        self._strangers: set[int] = set()  # processes of other programs; checked once, as this never changes
        self._refreshed = 0.0

    def refresh(self, roots: Mapping[int, str]) -> None:
        """Read /proc; `roots` are the tasks' first processes with their marks, each a session leader."""
        now = time.monotonic()
        present = {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 - names are enough
        self._strangers = self._strangers & present if now - self._refreshed < FORGET_AFTER_S else {os.getpid()}
        self._strangers.difference_update(roots)
        self._refreshed = now
        sessions = {**roots, **{process.session: process.owner for process in self._processes.values()}}
        known, self._processes = self._processes, {}
        for pid in sorted(present - self._strangers):  # parents mostly come before their children
            self._look_at(pid, known.get(pid), sessions)

    def of(self, owner: str) -> list[int]:
        """Return the pids of one task."""
        return [pid for pid, process in self._processes.items() if process.owner == owner]

    def all(self) -> list[int]:
        """Return the pids of all tasks."""
        return list(self._processes)

    def _look_at(self, pid: int, known: Process | None, sessions: dict[int, str]) -> None:
        """Record a process as ours or not; a process without an environment yet is checked again later."""
        try:
            stat = _read_stat(pid)
            owner: str | None = ""
            if known is not None and known.started_ticks == stat.started_ticks:
                owner = known.owner
            elif stat.is_living_program:
                owner = sessions.get(stat.session) or self._owner_of(stat.parent) or self._read_mark(pid)
        except (FileNotFoundError, ProcessLookupError):
            return
        if owner == "" or not stat.is_living_program:
            self._strangers.add(pid)
        elif owner is not None:
            self._processes[pid] = Process(owner, stat.session, stat.started_ticks)
            sessions.setdefault(stat.session, owner)

    def _owner_of(self, pid: int) -> str | None:
        """Return the task that a process belongs to."""
        process = self._processes.get(pid)
        return process.owner if process else None

    def _read_mark(self, pid: int) -> str | None:
        """Return the task mark in a process's environment, "" if there is none, None if there is no environment yet."""
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - read very often
                environment = file.read()
        except PermissionError:
            return ""
        for entry in environment.split(b"\0"):
            if entry.startswith(self._entry):
                return os.fsdecode(entry[len(MARK) + 1 :])
        return "" if environment else None


class Stat(NamedTuple):
    """The fields of /proc/PID/stat that are used here."""

    parent: int
    session: int
    started_ticks: int
    is_living_program: bool  # neither a zombie nor a kernel thread


def _stat_fields(pid: int) -> list[bytes]:
    """Split /proc/PID/stat after the name, its second field, which may hold anything but ends at the last bracket."""
    with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - read very often
        return file.read().rpartition(b")")[2].split()


def cpu_s(pid: int) -> float | None:
    """Return the CPU time of a process (perhaps a zombie) and of its reaped children."""
    with contextlib.suppress(OSError):
        return sum(map(int, _stat_fields(pid)[11:15])) / os.sysconf("SC_CLK_TCK")
    return None


def _read_stat(pid: int) -> Stat:
    fields = _stat_fields(pid)
    return Stat(
        parent=int(fields[1]),
        session=int(fields[3]),
        started_ticks=int(fields[19]),
        is_living_program=fields[0] not in (b"Z", b"X") and not int(fields[6]) & KERNEL_THREAD,
    )


def send(number: int, pids: Iterable[int]) -> bool:
    """Send a signal to processes; return whether any of them existed."""
    delivered = False
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
            delivered = True
    return delivered


def used_bytes(pids: list[int]) -> int:
    """Return the memory that only the end of these processes would free: it counts for a kernel memory limit.

    Mapped files do not count, because the kernel drops them under pressure. Several processes are measured by their
    proportional set size, so that pages shared by forked workers count once. That walks the page tables (10 ms/GB), so
    a lone process is measured by its resident size.
    """
    if len(pids) == 1:
        return _kilobytes(f"/proc/{pids[0]}/status", b"RssAnon:", b"RssShmem:") << 10
    return sum(_kilobytes(f"/proc/{pid}/smaps_rollup", b"Pss_Anon:", b"Pss_Shmem:") for pid in pids) << 10


def _kilobytes(path: str, *names: bytes) -> int:
    """Sum the named figures of a file in /proc; 0 if the process is gone."""
    with contextlib.suppress(OSError), open(path, "rb") as file:  # noqa: PTH123 - read very often
        return sum(int(line.split()[1]) for line in file if line.startswith(names))
    return 0


class Guard:
    """A small process that outlives this one and then ends all processes of its tasks."""

    def __init__(self, prefix: str, grace_s: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, prefix, str(grace_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Stop the guard: nothing is left to end."""
        self._process.communicate(b".")


def guard(prefix: str, grace_s: float) -> None:
    """Wait until stdin closes without a byte, as when the executor dies; then end all processes with its marks."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if not sys.stdin.buffer.read(1):
        end_all(ProcessTable(prefix), grace_s)


def end_all(table: ProcessTable, grace_s: float) -> None:
    """End all processes of a table: SIGTERM once, SIGKILL after the grace period."""
    kill_at = time.monotonic() + grace_s
    signalled: set[int] = set()
    quiet = 0
    while quiet < 2:  # a process that is just starting may show its mark only at a second look
        table.refresh({})
        pids = set(table.all())
        late = time.monotonic() >= kill_at
        send(signal.SIGKILL if late else signal.SIGTERM, pids if late else pids - signalled)
        signalled |= pids
        quiet = 0 if pids else quiet + 1
        time.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    guard(sys.argv[1], float(sys.argv[2]))
