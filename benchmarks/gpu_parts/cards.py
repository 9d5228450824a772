"""The card, or what stands in for it: the CPU, whose memory our simulator of the card's allocator gives out.

Whatever torch calls an accelerator will do; what only some of them have is left out where it is not there.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.gpu_parts.children import SIMULATED
from pipeline.memory.footprint import MemoryChoice
from pipeline.memory.hardware.caching_allocator import Allocator
from pipeline.memory.hardware.gpus import Device, device
from pipeline.memory.planning.step_estimates import SETTINGS

STAND_IN_BYTES = 16 << 30  # that the CPU in a card's place has
NOT_CARDS = ("cpu", SIMULATED)


def facts(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the card says of itself; without one, why there is none."""
    import torch

    from pipeline.memory.history.step_history import torch_version

    found = {"torch": torch_version(), "rehearsal": asked["rehearsal"], "capability": None, "driver": ""}
    if asked["device"] == "cpu":
        from tests.limited.device import why_not

        stand_in = {"device": "cpu", "card": "the CPU in a card's place", "gpu": "cpu", "taken_bytes": 0}
        return {**found, **stand_in, "total_bytes": STAND_IN_BYTES} | ({"error": why_not()} if why_not() else {})
    card = torch.accelerator.current_accelerator()
    if card is None or asked["device"] not in ("auto", card.type):
        here = f"torch {torch.__version__} sees {'none' if card is None else f'one of type {card.type}'}"
        return {"error": f"no card here: asked for {asked['device']}, {here}"}
    from pipeline.memory.runtime.meters import StepGauge

    start, module = StepGauge(card.type).before, torch.get_device_module(card)
    named = getattr(module, "get_device_name", lambda: card.type)
    capability = getattr(module, "get_device_capability", lambda: None)()
    return {
        **found,
        "device": card.type,
        "card": named(),
        "gpu": start.gpu,
        "driver": start.driver,
        "capability": list(capability) if isinstance(capability, tuple) else None,
        "total_bytes": torch.accelerator.get_memory_info()[1],
        "taken_bytes": start.taken_bytes,
    }


def described(about: Mapping[str, Any]) -> Device:
    """Return the card as plans know it: by its name, else by its memory."""
    from pipeline.errors import ConfigError

    try:
        card = device(about["card"])
    except ConfigError:
        card = device(f"{about['total_bytes'] >> 20}MiB")
    return replace(card, capability=tuple(about["capability"])) if about["capability"] else card


def target_for(about: Mapping[str, Any]) -> Any:
    """Return what is traced: the card's way, or the CPU's where it stands in."""
    from pipeline.runs.model.training_work import target_of

    return target_of(tuple(about["capability"]) if about["capability"] else None)


class OnCard:
    """The card's memory, of which torch may have a share."""

    def __init__(self, kind: str) -> None:
        import torch

        from pipeline.memory.runtime.meters import StepGauge

        self._gauge, self._torch, self._kind = StepGauge(kind), torch, kind
        self.limit_bytes = 0

    def step(self, work: Any, choice: MemoryChoice) -> Any:
        """Build a training step on it."""
        return work.step(choice, device=self._kind)

    def wait(self) -> None:
        """Wait until it has done what it was told."""
        self._torch.accelerator.synchronize()

    def squeeze(self, share: float) -> None:
        """Let torch have only so much of what it has reserved at most so far."""
        most = self._torch.accelerator.max_memory_reserved()
        self._torch.accelerator.empty_cache()  # what is cached needs no permission
        total = self._torch.accelerator.get_memory_info()[1]
        self._torch.get_device_module(self._kind).set_per_process_memory_fraction(share * most / total)

    def read(self) -> dict[str, Any]:
        """Return what was taken of it."""
        self.wait()
        reading, stats = self._gauge.read(), self._torch.accelerator.memory_stats()
        return {
            "reserved_bytes": reading.bytes,
            "allocated_bytes": reading.live_bytes,
            "outside_bytes": reading.outside_bytes,
            "retries": stats.get("num_alloc_retries", 0),
            "refused": stats.get("num_ooms", 0),
        }


class StandIn:
    """The CPU's memory, of which some may be refused."""

    def __init__(self, limited: Any, allocator: Allocator) -> None:
        self._limited, self._allocator = limited, allocator

    def step(self, work: Any, choice: MemoryChoice) -> Any:
        """Build a training step whose batches are copied to it."""
        from benchmarks.recipes_parts.bench import ContrastiveOnDevice, OnDevice
        from tests.limited.device import HostCarrier

        step = (ContrastiveOnDevice if work.is_contrastive else OnDevice)(work.task, work.under(choice))
        step.carrier = HostCarrier(self._limited)
        return step

    def wait(self) -> None:
        """Return at once."""

    def squeeze(self, share: float) -> None:
        """Let torch have only so much of what it has taken at most so far."""
        self._limited.limit_bytes = int(share * self._limited.peak_bytes)

    def read(self) -> dict[str, Any]:
        """Return what was taken of it."""
        return {
            "reserved_bytes": self._allocator.peak_reserved_bytes,
            "allocated_bytes": max(self._limited.peak_bytes, self._allocator.peak_allocated_bytes),
            "outside_bytes": 0,
            "retries": self._allocator.retries,
            "refused": self._limited.refused,
        }


@contextmanager
def opened(kind: str, settings: str = "") -> Iterator[OnCard | StandIn]:
    """Yield the card, all of its memory yet to be taken."""
    if kind != "cpu":
        yield OnCard(kind)
        return
    from tests.limited.device import LimitedDevice

    allocator = Allocator(next(one for one in SETTINGS if one.text == settings), STAND_IN_BYTES, is_fraction=True)
    gc.collect()
    with LimitedDevice(through=allocator) as limited:
        yield StandIn(limited, allocator)


def forget(kind: str) -> None:
    """Let everything go that nobody holds any more."""
    gc.collect()
    if kind != "cpu":
        import torch

        torch.accelerator.empty_cache()


def wait(kind: str) -> None:
    """Wait until a device has done what it was told."""
    if kind != "cpu":
        import torch

        torch.accelerator.synchronize()


def peak_bytes(kind: str) -> int:
    """Return the most that was live of a card since `reset_peak`; 0 of the CPU."""
    import torch

    return 0 if kind == "cpu" else torch.accelerator.max_memory_allocated()


def reset_peak(kind: str) -> None:
    """Let the peak begin anew."""
    import torch

    (partial(int) if kind == "cpu" else torch.accelerator.reset_peak_memory_stats)()
