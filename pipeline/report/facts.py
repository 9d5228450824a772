"""What a stage would use, what it used, and what to request next time."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from pipeline.units import MIB, short_bytes, short_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Suggested:
    """A better value of a setting for the next run."""

    key: str
    was: int
    value: int  # bytes, seconds or cores
    why: str

    def shown(self, value: int) -> str:
        """Format a value of this setting."""
        name = self.key.rpartition(".")[2]
        return short_bytes(value) if name == "mem" else short_seconds(value) if name == "time" else f"{value:,}"

    @property
    def typed(self) -> str:
        """The better value as --set takes it."""
        name = self.key.rpartition(".")[2]
        return (
            f"{ceil(self.value / MIB)}MiB"
            if name == "mem"
            else f"{self.value // 60}m"
            if name == "time"
            else str(self.value)
        )


@dataclass(frozen=True, slots=True)
class StageUse:
    """What the attempts at a stage's tasks requested and used; None: not measured."""

    stage: str
    tasks: int
    attempts: int
    items: int
    causes: dict[str, int]
    cpus: int
    gpus: int
    asked_bytes: int | None  # the most that an attempt was given
    first_bytes: int | None  # what the first attempts were given
    peak_bytes: int | None  # the highest of all attempts
    median_peak_bytes: int | None
    mem_used: float | None  # of the memory asked for, weighted by time
    cpu_used: float | None
    limit_s: int | None
    longest_s: float | None
    median_s: float | None
    time_used: float | None  # by the longest
    gpu_peak_bytes: int | None
    gpu_total_bytes: int | None  # of one GPU
    gpu_busy: float | None  # share of the time in which a kernel ran, weighted by time
    items_per_s: float | None  # of one task
    core_hours: float
    gpu_hours: float
    planned_bytes: int | None
    why: str  # where the memory of the first attempts was from
    suggested: tuple[Suggested, ...]
    advice: tuple[str, ...] = ()  # unused resources, in words


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a stage would use; None: unknown."""

    stage: str
    counts: Mapping[str, int]
    tasks: int
    at_once: int
    cpus: int
    gpus: int
    mem_bytes: int
    time_s: int
    disk_bytes: int
    task_s: float | None
    all_s: float | None
    sources: Mapping[str, str]  # name of a number → where it comes from

    @property
    def is_due(self) -> bool:
        """Whether it has something to do, or will have once the items are scanned."""
        return bool(self.tasks or self.counts.get("waiting"))
