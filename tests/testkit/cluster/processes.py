"""Finds, starts and ends the processes of one cluster.

No process file is trusted: ours is what runs one of the daemons' programs *and* names or holds open something below the
cluster's folder. So a lost, stale or reused process id can neither hide a process nor have a stranger ended.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

PROC = Path("/proc")
DAEMONS = frozenset({"munged", "mariadbd", "mysqld", "slurmdbd", "slurmctld", "slurmd", "slurmstepd"})
KILL_TIMEOUT_S = 10.0


def spawn(command: Sequence[str | Path], environment: Mapping[str, str], log: Path) -> int:
    """Start a daemon in a session of its own and return its process id."""
    words = [str(word) for word in command]
    output = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    defaults = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]
    return os.posix_spawn(
        words[0], words, dict(environment), file_actions=output, setsid=True, setsigdef=defaults, setsigmask=[]
    )


def program(pid: int) -> str:
    """Return which program a process runs, in the upstream's name; empty where it is gone."""
    try:
        return PROC.joinpath(str(pid), "exe").readlink().name.removesuffix(" (deleted)").removesuffix("-wlm")
    except OSError:
        return ""


def daemons(folder: Path) -> dict[int, str]:
    """Return the living daemons of the cluster in a folder: process id → program."""
    found = {}
    for pid in _all_pids():
        name = program(pid)
        if name in DAEMONS and is_below(pid, folder):
            found[pid] = name
    return found


def is_below(pid: int, folder: Path) -> bool:
    """Say whether a process was told of, or holds open, a path below a folder."""
    below = f"{folder}/"
    return any(below in word for word in _words(pid)) or any(path.startswith(below) for path in _open_files(pid))


def holds(pid: int, file: Path) -> bool:
    """Say whether a process has a file open."""
    return any(path.removesuffix(" (deleted)") == str(file) for path in _open_files(pid))


def started(pid: int) -> str:
    """Return when a living process was started, in the kernel's count; empty where it is gone."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] not in "ZX" else ""


def descendants(pids: Iterable[int]) -> set[int]:
    """Return the children of processes, and theirs."""
    parents = {pid: _parent(pid) for pid in _all_pids()}
    found: set[int] = set()
    front = set(pids)
    while front:
        front = {pid for pid, parent in parents.items() if parent in front} - found
        found |= front
    return found


def end(pid: int, number: signal.Signals, still_ours: Callable[[int], bool]) -> None:
    """Send a signal to a process that is still the one we mean, and wait until it is gone."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not still_ours(pid):  # asked after the handle was taken: the id cannot be reused behind it
            return
        signal.pidfd_send_signal(handle, number)
        if not select.select([handle], [], [], KILL_TIMEOUT_S)[0]:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [], KILL_TIMEOUT_S)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)
        _reap(pid)


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return  # another process started it


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]


def _words(pid: int) -> list[str]:
    try:
        return PROC.joinpath(str(pid), "cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def _open_files(pid: int) -> list[str]:
    found = []
    try:
        for entry in PROC.joinpath(str(pid), "fd").iterdir():
            found.append(str(entry.readlink()))  # noqa: PERF401 - what was read before the process went away counts
    except OSError:
        return found
    return found


def _parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, ..."""
    try:
        text = PROC.joinpath(str(pid), "stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
