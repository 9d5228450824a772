"""Meters of the memory in use while a training runs: of a GPU, of the process, of the host.

A GPU's numbers come from torch's allocator. On the CPU only a profiler counts tensors, so a process reports its
resident memory. That includes memory that malloc keeps and that libraries allocate at first use, and is far more for
small models. A job is killed at its cgroup's limit; file cache counts there, but the kernel drops it first. nvidia-smi
samples the load and the memory of all GPUs of a task. Unknown values are left out, never guessed as 0.
"""

from __future__ import annotations

import gc
import os
import re
import resource
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pipeline.device.host import CGROUPS, NO_LIMIT, PROC, memory_cgroups
from pipeline.device.kinds import CARD, CPU, VISIBLE
from pipeline.memory.hardware.gpus import known_name
from pipeline.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    Meter: TypeAlias = "CardMeter | ProcessMeter"

RESET_PEAK = "5"  # man 5 proc_pid_clear_refs: VmHWM becomes VmRSS
NEAR = 0.95  # of its limit is near it
RSS_IS_MEANT = "the peak is the process's resident memory, including malloc and libraries"
NO_RESET = "the process's peak could not be reset: it may be older than the step"
EVERY_S, TIMEOUT_S = 10.0, 20.0
QUERY = ("--query-gpu=utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")


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
        """Reset the peaks to present use, or all but the highest; return whether that was possible."""
        self._highest_bytes = self.read().highest_reserved_bytes if keep else 0
        self._card.reset_peaks()
        return True


class ProcessMeter:
    """Reads the resident memory of this process."""

    def __init__(self, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._proc, self._host = proc, HostMeter(proc=proc, cgroups=cgroups)

    def read(self) -> Memory:
        """Return the present figures; `outside_bytes` also count towards the same limit."""
        own, host = _fields(self._proc / "self" / "status"), self._host.read()
        resident_bytes = own.get("VmRSS", 0)
        outside_bytes = max(0, host.used_bytes - resident_bytes)
        return Memory(None, resident_bytes, None, own.get("VmHWM", 0), outside_bytes, host.limit_bytes)

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
    peak = _fields(PROC / "self" / "status").get("VmHWM")  # getrusage's starts with that of the parent process
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
        """Return the bytes that were too few, if the step ran out of memory; None for other errors."""
        import torch

        from pipeline.device.accelerator import is_out_of_memory

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
            own = _fields(self._proc / "self" / "status")
            held_bytes = own.get("RssAnon", 0) + own.get("RssShmem", 0)  # mapped files can be dropped
            hosts.append(Host(held_bytes or own.get("VmRSS", 0), self._limit_bytes))
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
            parts = _fields(folder / "memory.stat")
            return Host(max(0, used_bytes - sum(parts.get(name, 0) for name in cached)), limit_bytes)
    return None


_FIELD = re.compile(r"^(\w+):?\s+(\d+)( kB)?$", re.MULTILINE)


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file by the words before them, those of kB in bytes; empty if it cannot be read."""
    with suppress(OSError):
        lines = _FIELD.findall(path.read_text())
        return {name: int(number) << (10 if unit else 0) for name, number, unit in lines}
    return {}


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
            from pipeline.device.accelerator import free_caches

            free_caches(self._name)


@dataclass(frozen=True, slots=True)
class GpuReading:
    """The use of one GPU at one moment; None where unknown: a slice of a GPU does not report how busy it is."""

    busy: float | None  # share of the last moments in which a kernel ran
    used_bytes: int | None  # by all processes
    total_bytes: int | None


def read_gpus(names: Sequence[str]) -> list[GpuReading]:
    """Run nvidia-smi for GPUs named by index or UUID."""
    command = ["nvidia-smi", f"--id={','.join(names)}", *QUERY]
    return parse_smi(subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout)


def parse_smi(text: str) -> list[GpuReading]:
    """Parse the lines that nvidia-smi prints; `[N/A]` is unknown."""
    readings = []
    for cells in (line.split(",") for line in text.splitlines()):
        if len(cells) == 3:
            percent, used, total = (int(cell) if cell.strip().isdecimal() else None for cell in cells)
            busy = None if percent is None else percent / 100
            readings.append(GpuReading(busy, *(None if mib is None else mib * MIB for mib in (used, total))))
    return readings


class GpuSampler:
    """Reads the use of the GPUs of this process in a thread, until it is closed or a reading fails."""

    def __init__(self, read: Callable[[], list[GpuReading]], every_s: float = EVERY_S) -> None:
        self._read, self._every_s, self._closed = read, every_s, threading.Event()
        self._busy_sum = self._looks = 0.0
        self._used_bytes = self._total_bytes = 0
        threading.Thread(target=self._run, name="gpu-use", daemon=True).start()

    @classmethod
    def of_environment(cls) -> GpuSampler:
        """Return a sampler of the GPUs that this process was assigned; without any it finds nothing."""
        names = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
        sampler = cls(lambda: read_gpus(names))
        if not names:
            sampler.close()
        return sampler

    def figures(self) -> dict[str, float]:
        """Return the figures so far, without those that are unknown."""
        found = {"gpu_busy": self._busy_sum / self._looks, "gpu_looks": self._looks} if self._looks else {}
        sizes = {"gpu_used_bytes": self._used_bytes, "gpu_total_bytes": self._total_bytes}
        return found | {name: float(value) for name, value in sizes.items() if value}

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        with suppress(Exception):  # without nvidia-smi there are no numbers, and the task continues
            while not self._closed.wait(self._every_s):
                self._add(self._read())

    def _add(self, readings: Sequence[GpuReading]) -> None:
        """Add a reading of all GPUs: the mean of how busy they are, and the memory of the fullest."""
        for gpu in readings:
            if gpu.busy is not None:
                self._busy_sum, self._looks = self._busy_sum + gpu.busy, self._looks + 1
            self._used_bytes = max(self._used_bytes, gpu.used_bytes or 0)
            self._total_bytes = max(self._total_bytes, gpu.total_bytes or 0)
