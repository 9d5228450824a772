"""The card, of which torch may have a share, or the CPU that stands in for it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pipeline.memory.footprint import MemoryChoice
from pipeline.memory.hardware.caching_allocator import Allocator
from pipeline.memory.planning.step_estimates import SETTINGS

MOST_EVENTS = 1 << 20


class OnCard:
    """The card, of which torch may have a share."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        from pipeline.memory.runtime.meters import StepGauge

        self._gauge = StepGauge("cuda")
        import torch

        self.limit_bytes = case["limit_bytes"] or case["usable_bytes"] - self._gauge.before.taken_bytes
        share = self.limit_bytes / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))
        if case.get("history"):
            torch.cuda.memory._record_memory_history("all", context=None, max_entries=MOST_EVENTS)  # noqa: SLF001

    def __enter__(self) -> OnCard:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, work: Any, choice: MemoryChoice) -> Any:
        """Build a training step on it."""
        return work.step(choice, device="cuda")

    def wait(self) -> None:
        """Wait until it has done what it was told."""
        self._gauge.wait()

    def read(self) -> dict[str, Any]:
        """Return what was taken of it."""
        import torch

        self.wait()
        reading, stats = self._gauge.read(), torch.cuda.memory_stats()
        return {
            "reserved_bytes": reading.bytes,
            "allocated_bytes": reading.live_bytes,
            "outside_bytes": reading.outside_bytes,
            "taken_before_bytes": self._gauge.before.taken_bytes,
            "limit_bytes": self.limit_bytes,
            "retries": stats.get("num_alloc_retries", 0),
        }

    def history(self) -> list[dict[str, Any]]:
        """Return what its allocator was asked and did."""
        import torch

        snapshot: Any = torch.cuda.memory._snapshot()  # noqa: SLF001 - the one way to it
        return list(snapshot["device_traces"][torch.cuda.current_device()])


class StandIn:
    """The CPU, whose memory is given out by our simulator of the card's allocator."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        from tests.limited.device import LimitedDevice

        self.limit_bytes = case["limit_bytes"] or case["usable_bytes"]
        self._settings = settings_of(case["allocator"])
        self._allocator = Allocator(self._settings, self.limit_bytes, is_fraction=True)
        self._device = LimitedDevice(record=bool(case.get("history")), through=self._allocator)

    def __enter__(self) -> StandIn:
        gc.collect()
        self._device.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._device.__exit__(*raised)

    def step(self, work: Any, choice: MemoryChoice) -> Any:
        """Build a training step whose batches are copied to it."""
        from tests.limited.device import HostCarrier
        from tests.memory.planning.planned import OnDevice

        given = {name: getattr(choice, name) for name in ("precision", "checkpointing", "offload")}
        step = OnDevice(work.task, replace(work.settings, **given))
        step.carrier = HostCarrier(self._device)
        return step

    def wait(self) -> None:
        """Return at once."""

    def read(self) -> dict[str, Any]:
        """Return what was taken of it."""
        return {
            "reserved_bytes": self._allocator.peak_reserved_bytes,
            "allocated_bytes": max(self._device.peak_bytes, self._allocator.peak_allocated_bytes),
            "outside_bytes": 0,
            "taken_before_bytes": 0,
            "limit_bytes": self.limit_bytes,
            "retries": self._allocator.retries,
        }

    def history(self) -> list[dict[str, Any]]:
        """Return what was recorded, in the words of torch's snapshots."""
        tape, entries = self._device.tape(), []
        again = Allocator(self._settings, self.limit_bytes, is_fraction=True)
        for number, size in zip(tape.block_E.tolist(), tape.bytes_E.tolist(), strict=True):
            before = again.reserved_bytes
            again.allocate(number, size) if size > 0 else again.release(number)
            grown_bytes = again.reserved_bytes - before
            if grown_bytes:
                action = "segment_alloc" if grown_bytes > 0 else "segment_free"
                entries.append({"action": action, "addr": 0, "size": abs(grown_bytes)})
            entries.append({"action": "alloc" if size > 0 else "free_completed", "addr": number, "size": abs(size)})
        return entries


def settings_of(text: str) -> Any:
    """Return the allocator's settings by their text."""
    return next(settings for settings in SETTINGS if settings.text == text)


def opened(case: Mapping[str, Any]) -> Any:
    return StandIn(case) if case["dry"] else OnCard(case)


def card_facts(_: Mapping[str, Any], __: Callable[[], None]) -> dict[str, Any]:
    """Return what the card says of itself."""
    import torch

    from pipeline.memory.runtime.meters import StepGauge

    if not torch.cuda.is_available():
        return {"error": "no CUDA card here"}
    start = StepGauge("cuda").before
    return {
        "name": torch.cuda.get_device_name(),
        "gpu": start.gpu,
        "driver": start.driver,
        "capability": torch.cuda.get_device_capability(),
        "total_bytes": torch.cuda.mem_get_info()[1],
        "taken_bytes": start.taken_bytes,
    }
