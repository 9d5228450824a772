"""What measures the memory of a training step where it runs: on a card by torch's own counters, else by the process.

On a card: what torch's allocator reserved at most, which is what an out-of-memory error is about, and what is in use
outside it. Without one nobody counts live tensors but a profiler, which takes memory itself: there it is the growth of
the resident set since before the model was built, which also holds what malloc keeps and what libraries allocate at
first use. So it lies above what a plan calls live, on small models far above.
"""

from __future__ import annotations

import re
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.memory.history.step_history import CPU, known_name

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # man 5 proc_pid_clear_refs: VmHWM becomes VmRSS
DRIVER = Path("/sys/module/nvidia/version")
RSS_IS_MEANT = "the peak is that of the process's resident memory: live tensors, and what malloc and libraries keep"
NO_RESET = "the peak of the process could not be reset: it may be older than the step"
_SAID_BY_CPU = "can't allocate memory"  # c10/core/impl/alloc_cpu.cpp: a plain RuntimeError


@dataclass(frozen=True, slots=True)
class Start:
    """What there was before the model."""

    gpu: str
    driver: str
    taken_bytes: int  # by others on the card, or by this process before
    available_bytes: int  # for the step; 0: nobody knows


@dataclass(frozen=True, slots=True)
class Reading:
    """What a step took."""

    bytes: int
    live_bytes: int  # tensors alone; 0: nobody counted
    outside_bytes: int
    notes: tuple[str, ...] = ()


class Gauge(Protocol):
    """Measures one process, which does nothing else."""

    def start(self, limit_bytes: int) -> Start:
        """Begin, before the model is built; the limit is that of the process."""

    def wait(self) -> None:
        """Wait until the device has done what it was told."""

    def read(self) -> Reading:
        """Return the peak since the start."""

    def died_at(self, error: BaseException) -> int | None:
        """Return what there was at most for a step that ended with this error; None: it was not about memory."""


def gauge_of(device: str) -> Gauge:
    """Return what measures on a device."""
    return CardGauge() if device == "cuda" else ProcessGauge()


class ProcessGauge:
    """The resident set of this process."""

    def __init__(self) -> None:
        self._base = self._available = 0
        self._notes: tuple[str, ...] = (RSS_IS_MEANT,)

    def start(self, limit_bytes: int) -> Start:
        """Run a first small step, so that what libraries allocate once is there, and begin."""
        warm_up()
        try:
            CLEAR.write_text(RESET_PEAK)
        except OSError:
            self._notes = (*self._notes, NO_RESET)
        self._base = resident("VmRSS")
        self._available = max(0, limit_bytes - self._base) if limit_bytes else 0
        return Start(CPU, "", self._base, self._available)

    def wait(self) -> None:
        """Return at once: a CPU has done what it was told."""

    def read(self) -> Reading:
        """Return the growth."""
        return Reading(max(0, resident("VmHWM") - self._base), 0, self._base, self._notes)

    def died_at(self, error: BaseException) -> int | None:
        """Return what there was, or what was reached if that is more."""
        if isinstance(error, MemoryError) or _SAID_BY_CPU in str(error):
            return max(self._available, self.read().bytes)
        return None


class CardGauge:
    """The allocator of the current card."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch

    def start(self, limit_bytes: int) -> Start:  # noqa: ARG002 - a card has its own
        """Reset the counters."""
        cuda = self._torch.cuda
        cuda.init()
        cuda.reset_peak_memory_stats()
        free, total = cuda.mem_get_info()
        with suppress(OSError):
            return Start(known_name(cuda.get_device_name()), DRIVER.read_text().strip(), total - free, free)
        return Start(known_name(cuda.get_device_name()), "", total - free, free)

    def wait(self) -> None:
        """Wait for the card."""
        self._torch.cuda.synchronize()

    def read(self) -> Reading:
        """Return what was reserved at most, and what else is in use now."""
        cuda = self._torch.cuda
        free, total = cuda.mem_get_info()
        outside = total - free - cuda.memory_reserved()
        return Reading(cuda.max_memory_reserved(), cuda.max_memory_allocated(), outside)

    def died_at(self, error: BaseException) -> int | None:
        """Return what torch could have had: what it holds, and what is free."""
        if not isinstance(error, self._torch.cuda.OutOfMemoryError):
            return None
        cuda = self._torch.cuda
        return int(max(cuda.mem_get_info()[0] + cuda.memory_reserved(), cuda.max_memory_reserved()))


def warm_up() -> None:
    """Let torch load and allocate what it does once in a process."""
    import torch

    layer = torch.nn.Linear(64, 64)
    layer(torch.ones(64, 64)).square().mean().backward()
    torch.optim.SGD(layer.parameters(), 0.1).step()


def resident(which: str) -> int:
    """Return a line of this process's status, in bytes; where there is none, the peak that the system tells."""
    try:
        found = re.search(rf"^{which}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return int(found[1]) << 10 if found else peak_of(resource.getrusage(resource.RUSAGE_SELF))


def peak_of(used: resource.struct_rusage) -> int:
    """Return the peak of resident memory, in bytes; its unit is not the same everywhere."""
    return used.ru_maxrss if sys.platform == "darwin" else used.ru_maxrss << 10
