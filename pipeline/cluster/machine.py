"""What this machine can lend to tasks, and what is lent."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.cluster.job_spec import JobSpec

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
DEVICES = Path("/dev")
NO_LIMIT = 1 << 60  # cgroup v1 writes a number of about 2^63 where there is no limit


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is for all tasks together."""

    cpus: int
    gpus: tuple[str, ...]  # as CUDA_VISIBLE_DEVICES names them
    mem_bytes: int

    @classmethod
    def detect(cls, *, cpus: int | None = None, gpus: int | None = None, mem_bytes: int | None = None) -> Machine:
        """Look at this machine; a figure that is given stands in place of what is found."""
        found = find_gpus()
        if gpus is not None:
            found = (*found, *map(str, range(len(found), gpus)))[:gpus]
        return cls(
            cpus=find_cpus() if cpus is None else cpus,
            gpus=found,
            mem_bytes=find_mem_bytes() if mem_bytes is None else mem_bytes,
        )


class Slots:
    """What of a machine is free."""

    def __init__(self, machine: Machine) -> None:
        self._cpus, self._gpus, self._mem_bytes = machine.cpus, list(machine.gpus), machine.mem_bytes

    def fit(self, spec: JobSpec) -> bool:
        """Tell whether one task of the job could start now."""
        return (
            spec.cpus_on_node <= self._cpus
            and spec.gpus <= len(self._gpus)
            and (spec.mem_bytes or 0) <= self._mem_bytes
        )

    def take(self, spec: JobSpec) -> tuple[str, ...]:
        """Lend what one task asks for; return its GPUs."""
        self._cpus -= spec.cpus_on_node
        self._mem_bytes -= spec.mem_bytes or 0
        taken, self._gpus = self._gpus[: spec.gpus], self._gpus[spec.gpus :]
        return tuple(taken)

    def give_back(self, spec: JobSpec, gpus: tuple[str, ...]) -> None:
        """Have back what one task had."""
        self._cpus += spec.cpus_on_node
        self._mem_bytes += spec.mem_bytes or 0
        self._gpus += gpus


def find_cpus() -> int:
    """Count the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def find_gpus(devices: Path = DEVICES) -> tuple[str, ...]:
    """Name the GPUs this process may use: those it was given, else those whose device files are there."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(name.strip() for name in given.split(",") if name.strip())
    numbers = sorted(int(path.name[6:]) for path in devices.glob("nvidia[0-9]*") if path.name[6:].isdigit())
    return tuple(map(str, numbers)) or tuple(map(str, range(_count_by_driver())))


def _count_by_driver() -> int:
    """Ask the driver's own tool, for systems that show no device files."""
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith(b"GPU ") for line in listed.stdout.splitlines())


def find_mem_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the memory that is free, or what this process's cgroup may have if that is less."""
    return min(_available_bytes(proc), *_cgroup_limits(proc, cgroups))


def _available_bytes(proc: Path) -> int:
    """Return what can be had without swapping; without /proc, all that is built in."""
    with contextlib.suppress(OSError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_limits(proc: Path, cgroups: Path) -> list[int]:
    """Return the memory limits of this process's cgroup and of those above it, and NO_LIMIT."""
    limits = [NO_LIMIT]
    for folder in _cgroup_folders(proc, cgroups):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                limits.append(int((folder / name).read_text()))
    return limits


def _cgroup_folders(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield the memory cgroup of this process and those above it, in both versions; some may not be mounted here."""
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                root = cgroups / controllers
                own = root / path.lstrip("/")
                yield from (own, *(folder for folder in own.parents if folder.is_relative_to(root)))


def count_oom_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Count the kernel's OOM kills so far: those of this process's cgroup if it tells, else those of the machine."""
    for folder in _cgroup_folders(proc, cgroups):
        for name in ("memory.events", "memory.oom_control"):
            count = _read_counter(folder / name)
            if count is not None:
                return count
    return _read_counter(proc / "vmstat") or 0


def _read_counter(path: Path) -> int | None:
    """Return the figure beside the word `oom_kill`."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None
