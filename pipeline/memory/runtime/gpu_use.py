"""How busy and how full the GPUs of a task are, sampled by nvidia-smi while it runs.

Nothing is guessed: unknown values are left out, and are not 0.
"""

from __future__ import annotations

import os
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.device.kinds import VISIBLE
from pipeline.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EVERY_S, TIMEOUT_S = 10.0, 20.0
QUERY = ("--query-gpu=utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")


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
            percent, used, total = map(_number, cells)
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
        with suppress(Exception):  # without nvidia-smi there are no figures, and the task must not notice
            while not self._closed.wait(self._every_s):
                self._add(self._read())

    def _add(self, readings: Sequence[GpuReading]) -> None:
        """Add a reading of all GPUs: the mean of how busy they are, and the memory of the fullest."""
        for gpu in readings:
            if gpu.busy is not None:
                self._busy_sum, self._looks = self._busy_sum + gpu.busy, self._looks + 1
            self._used_bytes = max(self._used_bytes, gpu.used_bytes or 0)
            self._total_bytes = max(self._total_bytes, gpu.total_bytes or 0)


def _number(cell: str) -> int | None:
    return int(cell) if cell.strip().isdecimal() else None
