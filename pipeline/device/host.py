"""The host's memory: the cgroups that limit this process, and how much freed memory the C library keeps in it.

By default glibc returns to the kernel what a training step frees at its end, and the next step waits while the kernel
maps and clears the same pages again. The host plan decides how much may stay (`host_memory.kept_bytes`).
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_MMAP_THRESHOLD = 32 * MIB  # that glibc accepts; larger blocks are returned as soon as they are freed
LARGEST_INT = (1 << 31) - 1
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60  # version 1 writes a number of about 2^63 where there is no limit


def keep_freed_memory(size_bytes: int) -> bool:
    """Have glibc keep up to so many bytes that were freed; return whether it does.

    Nothing changes for 0 bytes, where the environment configures malloc or may replace it, or without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or size_bytes <= 0 or any(os.environ.get(name) for name in VARIABLES):
        return False
    return bool(
        mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD) and mallopt(M_TRIM_THRESHOLD, min(size_bytes, LARGEST_INT))
    )


def trim_heap() -> None:
    """Return to the system what the C library keeps: 200 MB after a batch of 8,192 tokens of width 1,280."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # of glibc
        trim(0)


def memory_cgroups(proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[Path]:
    """Yield the folders of this process's memory cgroup and those above it, in both versions; some may be absent."""
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(",") or not controllers:
                root = cgroups / controllers
                own = root / path.lstrip("/")
                yield from (own, *(folder for folder in own.parents if folder.is_relative_to(root)))
