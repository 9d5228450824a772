"""How much freed memory the C library keeps in this process.

By default glibc returns to the kernel what a training step frees at its end, and the next step waits while the kernel
maps and clears the same pages again. The host plan decides how much may stay (`host_memory.kept_bytes`).
"""

from __future__ import annotations

import ctypes
import os

from pipeline.units import MIB

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_MMAP_THRESHOLD = 32 * MIB  # that glibc accepts; larger blocks are returned as soon as they are freed
LARGEST_INT = (1 << 31) - 1
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory(size_bytes: int) -> bool:
    """Have glibc keep up to so many bytes that were freed; return whether it does.

    Nothing changes for 0 bytes, where the environment configures malloc or may replace it, or without glibc.
    """
    if size_bytes <= 0 or any(os.environ.get(name) for name in VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(
        mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD) and mallopt(M_TRIM_THRESHOLD, min(size_bytes, LARGEST_INT))
    )


def trim_heap() -> None:
    """Return to the system what the C library keeps: 200 MB after a batch of 8,192 tokens of width 1,280."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # another system, or another C library
        return
