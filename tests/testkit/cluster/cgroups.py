"""Which cgroups this machine lets us use, and what a node leaves in them."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
V1_CONTROLLERS = ("memory", "freezer", "cpuacct", "cpuset", "devices")
V2_CONTROLLERS = {"memory", "cpu", "cpuset"}


class Cgroup(enum.Enum):
    """How a job's memory is held to what it asked for."""

    V1 = "cgroup/v1"
    V2 = "cgroup/v2"
    NONE = "none"  # Slurm then samples and kills by itself (OverMemoryKill)


def detect() -> Cgroup:
    """Return the strongest way that really can be written here."""
    if all(_can_write(ROOT / name) for name in V1_CONTROLLERS):
        return Cgroup.V1
    controllers = ROOT / "cgroup.controllers"
    if controllers.is_file() and set(controllers.read_text().split()) >= V2_CONTROLLERS and _can_write(ROOT):
        return Cgroup.V2
    return Cgroup.NONE


def node_pids(node: str) -> set[int]:
    """Return the processes that a node's cgroups hold."""
    return {pid for folder in _folders(node) for group in _bottom_up(folder) for pid in _pids(group)}


def thaw(node: str) -> None:
    """Let frozen processes run: what is frozen cannot die."""
    for group in _bottom_up(ROOT / "freezer" / f"slurm_{node}"):
        _write(group / "freezer.state", "THAWED")


def remove(node: str) -> None:
    """Remove a node's empty cgroups; one that still holds a process stays."""
    for folder in _folders(node):
        for group in _bottom_up(folder):
            try:
                group.rmdir()
            except OSError:
                continue


def _folders(node: str) -> list[Path]:
    return [*ROOT.glob(f"*/slurm_{node}"), *ROOT.glob(f"system.slice/{node}_slurmstepd.scope")]


def _bottom_up(folder: Path) -> Iterator[Path]:
    children: list[Path] = []
    with suppress(FileNotFoundError, NotADirectoryError):  # Slurm removes those of a job that has ended
        children = list(folder.iterdir())
    for child in children:
        yield from _bottom_up(child)
    if folder.is_dir():
        yield folder


def _pids(group: Path) -> list[int]:
    try:
        return [int(line) for line in (group / "cgroup.procs").read_text().split()]
    except OSError:  # gone meanwhile, or a threaded one
        return []


def _can_write(folder: Path) -> bool:
    probe = folder / "pipeline-probe"
    try:
        probe.mkdir(exist_ok=True)
        probe.rmdir()
    except OSError:
        return False
    return True


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError:
        return
