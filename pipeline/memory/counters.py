"""How much memory is in use right now, asked so cheaply that every step can be asked: microseconds."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_BYTES = 48  # of a small object of Python's, as it usually is: only their number is told
_PROBE_BYTES = 1 << 20
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


@functools.cache
def malloc_counter() -> Callable[[], int] | None:
    """Return what counts the bytes that malloc has given out, for tensors and arrays too; none: nobody counts them."""
    try:
        asked = ctypes.CDLL(None).mallinfo2  # glibc since 2.33; `mallinfo` would wrap at 4 GiB
    except (AttributeError, OSError):
        return None
    asked.restype = _Mallinfo

    def count() -> int:
        told = asked()
        return int(told.uordblks + told.hblkhd)

    # Another malloc may stand before glibc's, which then knows of nothing.
    before = count()
    probe = ctypes.create_string_buffer(_PROBE_BYTES)
    seen = count() - before
    del probe
    return count if seen >= _PROBE_BYTES else None


def resident_bytes() -> int:
    """Return what the process has in memory of its own, without files; 0: unknown."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:  # noqa: PTH123 - asked at every step
            _, resident, shared = file.read(256).split()[:3]
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def small_objects_bytes() -> int:
    """Return about how much Python's small objects take, which malloc does not see."""
    return sys.getallocatedblocks() * BLOCK_BYTES


def card_counter(device: str) -> Callable[[], int]:
    """Return what counts the bytes of tensors on a card."""
    import torch

    place = torch.device(device)
    return lambda: int(torch.cuda.memory_allocated(place))
