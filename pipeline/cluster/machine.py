"""The resources of this machine for tasks, and facts about its processes."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from pipeline.device.host import CGROUPS, NO_LIMIT, PROC, memory_cgroups
from pipeline.device.kinds import VISIBLE

if TYPE_CHECKING:
    from pipeline.cluster.job_spec import Request

DEVICES = Path("/dev")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
SAME_S = 2.0  # adjusting the clock changes a creation time by at most this


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources that all local tasks share."""

    cpus: int
    gpus: tuple[str, ...]  # as `VISIBLE` names them
    mem_bytes: int

    @classmethod
    def detect(cls, *, cpus: int | None = None, gpus: int | None = None, mem_bytes: int | None = None) -> Machine:
        """Measure this machine; given figures replace measured ones."""
        gpu_names = find_gpus()
        if gpus is not None:
            gpu_names = (*gpu_names, *map(str, range(len(gpu_names), gpus)))[:gpus]
        return cls(
            cpus=len(os.sched_getaffinity(0)) if cpus is None else cpus,
            gpus=gpu_names,
            mem_bytes=find_mem_bytes() if mem_bytes is None else mem_bytes,
        )

    def at_once(self, request: Request) -> int:
        """Return how many tasks (or pieces of multi-node tasks) run here at once."""
        shares = [self.cpus // request.cpus_on_node]
        shares += [len(self.gpus) // request.gpus] if request.gpus else []
        shares += [self.mem_bytes // request.mem_bytes] if request.mem_bytes else []
        return min(shares)


class Slots:
    """The resources of a machine that are free."""

    def __init__(self, machine: Machine) -> None:
        self._cpus, self._gpus, self._mem_bytes = machine.cpus, list(machine.gpus), machine.mem_bytes

    def fit(self, request: Request) -> bool:
        """Tell whether one such task could start now."""
        free = request.cpus_on_node <= self._cpus and request.gpus <= len(self._gpus)
        return free and (request.mem_bytes or 0) <= self._mem_bytes

    def take(self, request: Request) -> tuple[str, ...]:
        """Reserve the resources of one task; return its GPUs."""
        self._cpus -= request.cpus_on_node
        self._mem_bytes -= request.mem_bytes or 0
        taken, self._gpus = self._gpus[: request.gpus], self._gpus[request.gpus :]
        return tuple(taken)

    def give_back(self, request: Request, gpus: tuple[str, ...]) -> None:
        """Release the resources of one task."""
        self._cpus += request.cpus_on_node
        self._mem_bytes += request.mem_bytes or 0
        self._gpus += gpus


def find_gpus(devices: Path = DEVICES) -> tuple[str, ...]:
    """Name the GPUs this process may use: `VISIBLE`, or else those whose device files exist."""
    visible = os.environ.get(VISIBLE)
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip())
    numbers = sorted(int(path.name[6:]) for path in devices.glob("nvidia[0-9]*") if path.name[6:].isdigit())
    return tuple(map(str, numbers)) or tuple(map(str, range(len(card_names()))))


def card_names() -> list[str]:
    """Return the names of this machine's GPUs, as the driver says them."""
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = listed.stdout.decode(errors="replace").splitlines()
    # Without the UUID: another GPU of its kind will do
    return [line.partition(" (UUID")[0] for line in lines if line.startswith("GPU ")]


def find_mem_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the free memory, or the limit of this process's cgroup if that is less."""
    return min(psutil.virtual_memory().available, *_cgroup_limits(proc, cgroups))


def _cgroup_limits(proc: Path, cgroups: Path) -> list[int]:
    """Return the memory limits of this process's cgroup and its parents, and NO_LIMIT."""
    limits = [NO_LIMIT]
    for folder in memory_cgroups(proc, cgroups):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                limits.append(int((folder / name).read_text()))
    return limits


def reachable_addresses(*names: str) -> list[str]:
    """Return the names and addresses under which other nodes may reach this one, those given first."""
    owned = (known for addresses in psutil.net_if_addrs().values() for known in addresses)
    known = [*names, socket.gethostname(), *(known.address for known in owned if known.family == socket.AF_INET)]
    return [name for name in dict.fromkeys(known) if not is_loopback(name)]


def is_loopback(address: str) -> bool:
    """Tell whether an address means the machine that uses it."""
    return address.startswith("127.") or address in ("localhost", "localhost.localdomain", "::1")


def is_alive(pid: int, born: float = 0.0, *, seen: float = math.inf, uid: int | None = None) -> bool:
    """Tell whether a process is alive and not a later one with the same pid.

    It was created at `born` (0: unknown), was seen at work at `seen`, and belongs to user `uid`, if known.
    """
    if min(born or seen, seen) < psutil.boot_time() - SAME_S:
        return False
    try:
        process = psutil.Process(pid)
        created = process.create_time()
        is_it = abs(created - born) < SAME_S if born else created <= seen + SAME_S
        return is_it and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # it exists and belongs to another user
        return uid is None or _owner(pid) in (None, uid)


def _owner(pid: int) -> int | None:
    """Return the user of a process; None if unknown."""
    try:
        return (PROC / str(pid)).stat().st_uid
    except OSError:
        return None


def born_at(pid: int) -> float:
    """Return when a process was created, to distinguish it from later ones with the same pid."""
    return psutil.Process(pid).create_time()


def count_oom_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Count the kernel's OOM kills so far: of this process's cgroup, or else of the whole machine."""
    for folder in memory_cgroups(proc, cgroups):
        for name in ("memory.events", "memory.oom_control"):
            count = _read_counter(folder / name)
            if count is not None:
                return count
    return _read_counter(proc / "vmstat") or 0


def _read_counter(path: Path) -> int | None:
    """Return the `oom_kill` figure in a file of the kernel."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None
