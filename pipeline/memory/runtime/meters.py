"""How much memory there is and how much of it is used while training runs: of a GPU, of the process, of the host.

A GPU's figures are its allocator's own. On the CPU only a profiler counts tensors: a process's figures are its resident
memory, which includes memory that malloc keeps and that libraries allocate at first use. On small models that is far
more. On the host, a job ends at its cgroup's limit, where file cache counts but is given up before anything is killed.
"""

from __future__ import annotations

import gc
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pipeline.device.host import CGROUPS, NO_LIMIT, PROC, memory_cgroups
from pipeline.device.kinds import CARD, CPU
from pipeline.memory.hardware.gpus import known_name

if TYPE_CHECKING:
    from pathlib import Path

RESET_PEAK = "5"  # man 5 proc_pid_clear_refs: VmHWM becomes VmRSS
NEAR = 0.95  # of its limit is near it
RSS_IS_MEANT = "the peak is the process's resident memory, including malloc and libraries"
NO_RESET = "the process's peak could not be reset: it may be older than the step"


@dataclass(frozen=True, slots=True)
class Memory:
    """How a device's memory is used; None where unknown."""

    allocated_bytes: int | None  # live tensors
    reserved_bytes: int  # held for them by the allocator; of a process, resident
    peak_allocated_bytes: int | None  # since the peaks were reset
    peak_reserved_bytes: int
    outside_bytes: int  # in use by others
    limit_bytes: int | None  # of what may be reserved
    retries: int = 0  # times the allocator had to give everything back to serve one block, since the start
    ooms: int = 0  # times that did not help, since the start
    highest_reserved_bytes: int = 0  # the peak since the last reset that did not keep it; 0: as the peak


class Meter(Protocol):
    """Reads the memory figures of a device."""

    def read(self) -> Memory:
        """Return the present figures."""

    def reset_peak(self, *, keep: bool = False) -> bool:
        """Reset the peaks to present use, or all but the highest; return whether that was possible."""


def meter_of(device: str) -> Meter:
    """Return the meter of a device."""
    return ProcessMeter() if device == CPU else CardMeter(device)


class CardMeter:
    """Reads a GPU's figures from torch's allocator, without synchronising."""

    def __init__(self, device: str = CARD) -> None:
        from pipeline.device.accelerator import Card

        self._card = Card(device)
        self._card.begin()
        self._highest_bytes = 0  # of peaks that were reset and kept

    def read(self) -> Memory:
        stats = self._card.memory_stats()
        free_bytes, total_bytes = self._card.free_and_total_bytes()
        reserved_bytes = stats.get("reserved_bytes.all.current", 0)
        peak_bytes = stats.get("reserved_bytes.all.peak", 0)
        return Memory(
            allocated_bytes=stats.get("allocated_bytes.all.current", 0),
            reserved_bytes=reserved_bytes,
            peak_allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
            peak_reserved_bytes=peak_bytes,
            outside_bytes=total_bytes - free_bytes - reserved_bytes,
            limit_bytes=min(free_bytes + reserved_bytes, int(self._card.fraction * total_bytes)),
            retries=stats.get("num_alloc_retries", 0),
            ooms=stats.get("num_ooms", 0),
            highest_reserved_bytes=max(self._highest_bytes, peak_bytes),
        )

    def reset_peak(self, *, keep: bool = False) -> bool:
        self._highest_bytes = self.read().highest_reserved_bytes if keep else 0
        self._card.reset_peaks()
        return True


class ProcessMeter:
    """Reads the resident memory of this process."""

    def __init__(self, *, limit_bytes: int | None = None, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        """Take the limit, or look it up in the cgroup."""
        self._proc = proc
        self._host = HostMeter(limit_bytes=limit_bytes, proc=proc, cgroups=cgroups)

    def read(self) -> Memory:
        """Return the present figures; `outside_bytes` also count towards the same limit."""
        resident_bytes, host = _status(self._proc, "VmRSS"), self._host.read()
        return Memory(
            allocated_bytes=None,
            reserved_bytes=resident_bytes,
            peak_allocated_bytes=None,
            peak_reserved_bytes=_status(self._proc, "VmHWM"),
            outside_bytes=max(0, host.used_bytes - resident_bytes),
            limit_bytes=host.limit_bytes,
        )

    def reset_peak(self, *, keep: bool = False) -> bool:  # noqa: ARG002 - no caller asks a process to keep it
        """Reset the peak to present resident memory; if the system does not allow that, it stays the highest ever."""
        _before_resets[0] = highest_resident_bytes()
        try:
            (self._proc / "self" / "clear_refs").write_text(RESET_PEAK)
        except OSError:
            return False
        return True


_before_resets = [0]  # the highest peak before a reset: the kernel's own figure falls with it


def highest_resident_bytes() -> int:
    """Return the most memory that this process has ever had, also before its peak was reset."""
    peak = _status(PROC, "VmHWM")  # getrusage's starts with that of the parent process
    return max(_before_resets[0], peak or peak_of(resource.getrusage(resource.RUSAGE_SELF)))


def peak_of(used: resource.struct_rusage) -> int:
    """Return the peak of resident memory in bytes; `ru_maxrss` has other units on macOS."""
    return used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass(frozen=True, slots=True)
class BeforeModel:
    """The GPU and the memory in use before the model was built."""

    gpu: str
    driver: str
    taken_bytes: int  # by others on the GPU, or by this process before
    available_bytes: int  # for the step; 0: unknown


@dataclass(frozen=True, slots=True)
class StepReading:
    """Measured memory of a step."""

    bytes: int
    live_bytes: int  # tensors alone; 0: not counted
    outside_bytes: int
    notes: tuple[str, ...] = ()


class StepGauge:
    """Measures the memory of a step, from before its model is built; the process does nothing else."""

    def __init__(self, device: str, limit_bytes: int = 0) -> None:
        """Start measuring; `limit_bytes` is for the process, a GPU has its own limit."""
        from pipeline.device.accelerator import computing, driver_version

        self._is_card = device != CPU
        self._device = computing(device)
        self._meter = meter_of(device)
        if not self._is_card:
            _warm_up()
        self.notes = () if self._is_card else (RSS_IS_MEANT,)
        if not self._meter.reset_peak():
            self.notes = (*self.notes, NO_RESET)
        memory = self._meter.read()
        limit_bytes = memory.limit_bytes or 0 if self._is_card else limit_bytes
        name, driver = (known_name(self._device.name), driver_version()) if self._is_card else (CPU, "")
        taken_bytes = memory.reserved_bytes + (memory.outside_bytes if self._is_card else 0)
        self.before = BeforeModel(name, driver, taken_bytes, max(0, limit_bytes - memory.reserved_bytes))

    def wait(self) -> None:
        self._device.synchronize()

    def read(self) -> StepReading:
        """Return the peak since the start: reserved bytes of a GPU, else the growth of the process."""
        memory = self._meter.read()
        if self._is_card:
            return StepReading(memory.peak_reserved_bytes, memory.peak_allocated_bytes or 0, memory.outside_bytes)
        taken = self.before.taken_bytes
        return StepReading(max(0, memory.peak_reserved_bytes - taken), 0, taken, self.notes)

    def died_at(self, error: BaseException) -> int | None:
        """Return the bytes that were not enough, if the step ended out of memory; None for other errors."""
        import torch

        from pipeline.device.out_of_memory import is_out_of_memory

        if self._is_card:
            memory = self._meter.read()
            is_full = isinstance(error, torch.OutOfMemoryError)
            return max(memory.limit_bytes or 0, memory.peak_reserved_bytes) if is_full else None
        return max(self.before.available_bytes, self.read().bytes) if is_out_of_memory(error) else None


def _warm_up() -> None:
    """Let torch load libraries and allocate once, before anything is measured."""
    import torch

    layer = torch.nn.Linear(64, 64)
    layer(torch.ones(64, 64)).square().mean().backward()
    torch.optim.SGD(layer.parameters(), 0.1).step()


@dataclass(frozen=True, slots=True)
class Host:
    """Host memory as counted against the limit at which the job is killed."""

    used_bytes: int
    limit_bytes: int | None  # None: no limit

    @property
    def share(self) -> float:
        return self.used_bytes / self.limit_bytes if self.limit_bytes else 0.0


class HostMeter:
    """Reads this process's cgroup and its parents: the one nearest its limit counts."""

    def __init__(self, *, limit_bytes: int | None = None, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        """Find the cgroups; `limit_bytes` is a further limit on this process alone."""
        self._limit_bytes, self._proc = limit_bytes, proc
        self._groups = [folder for folder in memory_cgroups(proc, cgroups) if _of_group(folder) is not None]

    def read(self) -> Host:
        hosts = [host for folder in self._groups if (host := _of_group(folder)) is not None]
        if self._limit_bytes is not None or not hosts:
            held_bytes = _status(self._proc, "RssAnon") + _status(self._proc, "RssShmem")  # mapped files can be dropped
            hosts.append(Host(held_bytes or _status(self._proc, "VmRSS"), self._limit_bytes))
        return max(hosts, key=lambda host: host.share)


# Of a cgroup, version 2 and 1: its use, its limit, and file cache, which is given up before anything is killed.
_FILES = (
    ("memory.current", "memory.max", ("inactive_file", "active_file")),
    ("memory.usage_in_bytes", "memory.limit_in_bytes", ("total_inactive_file", "total_active_file")),
)


def _of_group(folder: Path) -> Host | None:
    """Return use and limit of a cgroup, read each time since limits may change; None without a limit."""
    for usage, limit, cached in _FILES:
        used_bytes, limit_bytes = _number(folder / usage), _number(folder / limit)  # "max" where there is none
        if used_bytes is not None and limit_bytes is not None and limit_bytes < NO_LIMIT:
            cached_bytes = sum(_line(folder / "memory.stat", name, " ") or 0 for name in cached)
            return Host(max(0, used_bytes - cached_bytes), limit_bytes)
    return None


def _status(proc: Path, name: str) -> int:
    """Return a value of /proc/self/status in bytes; 0 if absent."""
    return (_line(proc / "self" / "status", f"{name}:", "kB") or 0) << 10


def _line(path: Path, name: str, unit: str) -> int | None:
    """Return the number on the line that begins with a name; None if absent."""
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith(name) and line[len(name) :][:1].isspace():
                return int(line[len(name) :].replace(unit, ""))
    return None


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None


@dataclass(frozen=True, slots=True)
class MaintenanceSettings:
    """How often a training loop empties caches, collects garbage and synchronises."""

    memory_fraction: float | None = None  # of a GPU that may be used; None: all of it
    empty_cache_every: int | None = None  # micro-batches; None: never
    collect_every: int | None = None  # steps between garbage collections; None: as Python decides
    synchronise: bool = False  # after every micro-batch, for measuring


class Maintenance:
    """Maintains memory between `begin` and `end`, which restores Python's garbage collector."""

    def __init__(self, settings: MaintenanceSettings, device: str) -> None:
        from pipeline.device.accelerator import computing

        self.settings, self._name, self._device = settings, device, computing(device)
        self._micro_batches = self._steps = 0
        self._was_collecting, self._had_frozen = True, 0

    def begin(self) -> None:
        """Limit the share of the GPU, and take over garbage collection, as configured."""
        self._was_collecting, self._had_frozen = gc.isenabled(), gc.get_freeze_count()
        if self.settings.memory_fraction is not None:
            self._device.limit_fraction(self.settings.memory_fraction)
        if self.settings.collect_every is not None:
            gc.disable()

    def end(self) -> None:
        if self.settings.collect_every is not None:
            if not self._had_frozen:  # otherwise objects of others would be unfrozen, too
                gc.unfreeze()
            if self._was_collecting:
                gc.enable()

    def after_micro_batch(self) -> None:
        """Synchronise, and empty the GPU's cache, as configured."""
        self._micro_batches += 1
        if self.settings.synchronise:
            self._device.synchronize()
        if self.settings.empty_cache_every and self._micro_batches % self.settings.empty_cache_every == 0:
            self._device.empty_cache()

    def after_step(self, *, empty_cache: bool = False) -> None:
        """Collect garbage if it is due; objects that exist after the first step are frozen."""
        self._steps += 1
        every = self.settings.collect_every
        if every is not None and (self._steps == 1 or self._steps % every == 0):
            gc.collect()
            if self._steps == 1:
                gc.freeze()
        if empty_cache:
            from pipeline.device.out_of_memory import free_caches

            free_caches(self._name)
