"""How busy and how full the GPUs of a task are, sampled beside its work: by NVML's binding, else by nvidia-smi.

Nothing is guessed: where neither answers there is no figure, and no figure is not 0.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

from pipeline.device.kinds import VISIBLE
from pipeline.units import MIB

NVML_EVERY_S, SMI_EVERY_S = 1.0, 10.0  # a program that is started costs more than a call
SMI_S = 20.0
QUERY = "--query-gpu=utilization.gpu,memory.used,memory.total"


@dataclass(frozen=True, slots=True)
class GpuLook:
    """One GPU at one moment; None where it does not tell, as a slice does not tell how busy it is."""

    busy: float | None  # share of the last moments in which a kernel ran
    used_bytes: int | None  # by all processes
    total_bytes: int | None


Look: TypeAlias = Callable[[], list[GpuLook]]


def nvml_look(names: Sequence[str], library: Any) -> Look:
    """Return what looks at GPUs, named by index or UUID, through NVML's Python binding."""
    library.nvmlInit()
    handles = [
        library.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else library.nvmlDeviceGetHandleByUUID(name)
        for name in names
    ]

    def told(ask: Callable[[Any], Any], handle: Any, figure: str) -> float | None:
        with suppress(library.NVMLError):
            return float(getattr(ask(handle), figure))
        return None

    def look() -> list[GpuLook]:
        found = []
        for handle in handles:
            percent = told(library.nvmlDeviceGetUtilizationRates, handle, "gpu")
            used, total = (told(library.nvmlDeviceGetMemoryInfo, handle, figure) for figure in ("used", "total"))
            found.append(GpuLook(_share(percent), _whole(used), _whole(total)))
        return found

    return look


def smi_look(names: Sequence[str]) -> Look:
    """Return what looks at GPUs by running nvidia-smi."""

    def look() -> list[GpuLook]:
        words = ["nvidia-smi", f"--id={','.join(names)}", QUERY, "--format=csv,noheader,nounits"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=SMI_S, check=True)
        return parse_smi(done.stdout)

    return look


def parse_smi(text: str) -> list[GpuLook]:
    """Parse what nvidia-smi prints of each GPU; `[N/A]` is unknown."""
    rows = [[_number(cell) for cell in line.split(",")] for line in text.splitlines()]
    return [
        GpuLook(_share(row[0]), *(None if value is None else int(value) * MIB for value in row[1:]))
        for row in rows
        if len(row) == 3
    ]


def looks_of(names: Sequence[str]) -> list[tuple[Look, float]]:
    """Return the ways to look at GPUs that may work here, the best first, and how often to look."""
    ways = [(smi_look(names), SMI_EVERY_S)]
    with suppress(Exception):  # of whatever kind the binding's errors are
        ways.insert(0, (nvml_look(names, import_module("pynvml")), NVML_EVERY_S))
    return ways


class GpuSampler:
    """Looks at the GPUs of this process now and then, in a thread, until it is closed."""

    def __init__(self, ways: Sequence[tuple[Look, float]]) -> None:
        self._ways, self._ended = list(ways), threading.Event()
        self._busy_sum = self._looks = 0.0
        self._used_bytes = self._total_bytes = 0
        threading.Thread(target=self._go_on, name="gpu-use", daemon=True).start()

    @classmethod
    def of_environment(cls) -> GpuSampler:
        """Return a sampler of the GPUs that were lent to this process; it finds nothing where there are none."""
        names = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
        return cls(looks_of(names) if names else [])

    def figures(self) -> dict[str, float]:
        """Return what was seen so far; what nobody told is not in it."""
        found = {"gpu_busy": self._busy_sum / self._looks, "gpu_looks": self._looks} if self._looks else {}
        seen = {"gpu_used_bytes": self._used_bytes, "gpu_total_bytes": self._total_bytes}
        return found | {name: float(value) for name, value in seen.items() if value}

    def close(self) -> None:
        self._ended.set()

    def _go_on(self) -> None:
        """Look until it is closed; a way that fails gives place to the next."""
        while self._ways:
            look, every_s = self._ways[0]
            if self._ended.wait(every_s):
                return
            try:
                self._take(look())
            except Exception:  # noqa: BLE001 - what cannot be measured is unknown, and no reason to disturb the task
                self._ways.pop(0)

    def _take(self, seen: Sequence[GpuLook]) -> None:
        """Take a look at all GPUs into account: the mean of how busy they are, and the memory of the fullest."""
        for gpu in seen:
            if gpu.busy is not None:
                self._busy_sum, self._looks = self._busy_sum + gpu.busy, self._looks + 1
            self._used_bytes = max(self._used_bytes, gpu.used_bytes or 0)
            self._total_bytes = max(self._total_bytes, gpu.total_bytes or 0)


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
