"""Runs a command and tells its time, and the most memory that any of its processes had, by what the process was for."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.project import run_code

if TYPE_CHECKING:
    from collections.abc import Sequence

LOOK_EVERY_S = 0.1
SUPERVISOR, WORKER = "supervisor", "worker"  # a command that follows its run is the supervisor itself
SUPERVISES = run_code.SUPERVISOR.encode()
# In what starts one, and what those are forked of that need not start anew.
WORKS = tuple(f"from {module} import main".encode() for module in (run_code.WORKER, run_code.TASK_SERVER))
KIB = 1024


@dataclass(slots=True)
class Watched:
    """What a command took."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: dict[str, int] = field(default_factory=dict)  # the largest process of each kind, by its own high water
    together_bytes: int = 0  # what all processes had at once, at most: sampled

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "wall_s": round(self.wall_s, 2),
            "cpu_s": round(self.cpu_s, 2),
            "peak_mb": {role: _mb(value) for role, value in sorted(self.peak_bytes.items())},
            "largest_mb": _mb(max(self.peak_bytes.values(), default=0)),
            "together_mb": _mb(self.together_bytes),
        }


def watched(command: Sequence[str], folder: Path, log: Path) -> Watched:
    """Run a command in a folder until it ends; raise where it fails."""
    found, start = Watched(), time.perf_counter()
    with log.open("ab") as file:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        while True:
            _look(process.pid, found)
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            time.sleep(LOOK_EVERY_S)
    process.returncode = os.waitstatus_to_exitcode(status)
    found.wall_s, found.cpu_s = time.perf_counter() - start, usage.ru_utime + usage.ru_stime
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-2000:]}")
    return found


def look_at_run(run: Path, found: Watched) -> None:
    """Take down the high water of every process that names a run's folder, whoever started it."""
    name, together = str(run).encode(), 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and name in (words := _words(entry.name)):
            role = SUPERVISOR if any(SUPERVISES in word for word in words) else WORKER
            together += _take(entry.name, role, found)
    found.together_bytes = max(found.together_bytes, together)


def _look(root: int, found: Watched) -> None:
    """Take down the high water of every process of a tree; Linux keeps it, so that only a process's end is missed."""
    together = 0
    for pid in _family(root):
        is_worker = any(works in word for word in _words(pid) for works in WORKS)
        role = SUPERVISOR if pid == root else WORKER if is_worker else "other"
        together += _take(pid, role, found)
    found.together_bytes = max(found.together_bytes, together)


def _words(pid: int | str) -> list[bytes]:
    """Return the command line of a process; nothing where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _take(pid: int | str, role: str, found: Watched) -> int:
    """Take down the high water of a process; return what it has now."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    values = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmHWM", "VmRSS"))}
    if not values:
        return 0
    found.peak_bytes[role] = max(found.peak_bytes.get(role, 0), int(values["VmHWM"]) * KIB)
    return int(values["VmRSS"]) * KIB


def _family(root: int) -> list[int]:
    """Return a process and all its descendants."""
    family = [root]
    for pid in family:  # which grows meanwhile
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                family += map(int, children.read_text().split())
            except OSError:
                continue
    return family


def _mb(value: int) -> float:
    return round(value / 1e6, 1)
