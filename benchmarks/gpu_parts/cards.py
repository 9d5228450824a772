"""The card, or what stands in for it: the CPU, whose memory our simulator of the card's allocator gives out.

Whatever torch calls an accelerator will do; what only some of them have is left out where it is not there.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.gpu_parts.children import SIMULATED
from pipeline.device.kinds import CARD, CPU
from pipeline.memory.footprint import MemoryChoice
from pipeline.memory.hardware.caching_allocator import Allocator
from pipeline.memory.hardware.gpus import Device, device
from pipeline.memory.planning.step_estimates import SETTINGS

STAND_IN_BYTES = 16 << 30  # that the CPU in a card's place has
NOT_CARDS = (CPU, SIMULATED)


def facts(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the card says of itself; without one, why there is none."""
    from pipeline.memory.history.step_history import torch_version

    found = {"torch": torch_version(), "rehearsal": asked["rehearsal"], "capability": None, "driver": ""}
    if asked["device"] == CPU:
        from tests.testkit.limited.device import why_not

        stand_in = {"device": CPU, "card": "the CPU in a card's place", "gpu": "cpu", "taken_bytes": 0}
        return {**found, **stand_in, "total_bytes": STAND_IN_BYTES} | ({"error": why_not()} if why_not() else {})
    from pipeline.device.accelerator import Card, card_here, torch_sees
    from pipeline.memory.runtime.meters import StepGauge

    kind = card_here()
    if kind is None or asked["device"] not in ("auto", kind):
        return {"error": f"no card here: asked for {asked['device']}, and torch sees {kind or 'none'} ({torch_sees()})"}
    card, start = Card(kind), StepGauge(kind).before
    return {
        **found,
        "device": kind,
        "card": card.name,
        "gpu": start.gpu,
        "driver": start.driver,
        "capability": card.capability,
        "total_bytes": card.total_bytes,
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


def planned_for(kind: str) -> str:
    """Return how plans call a device, which are made where it may not be there."""
    return CPU if kind == CPU else CARD


def target_for(about: Mapping[str, Any]) -> Any:
    """Return what is traced: the card's way, or the CPU's where it stands in."""
    from pipeline.runs.model.training_work import target_of

    return target_of(tuple(about["capability"]) if about["capability"] else None)


class OnCard:
    """The card's memory, of which torch may have a share."""

    def __init__(self, kind: str) -> None:
        from pipeline.device.accelerator import Card
        from pipeline.memory.runtime.meters import StepGauge

        self._card, self._gauge = Card(kind), StepGauge(kind)

    def step(self, work: Any, choice: MemoryChoice) -> Any:
        """Build a training step on it."""
        return work.step(choice, device=self._card.kind)

    def wait(self) -> None:
        """Wait until it has done what it was told."""
        self._card.synchronize()

    def squeeze(self, share: float) -> None:
        """Let torch have only so much of what was live at most so far, so that the same again does not fit."""
        most = self._card.peak_allocated_bytes
        self._card.empty_cache()  # what is cached needs no permission
        self._card.limit_fraction(share * most / self._card.total_bytes)

    def read(self) -> dict[str, Any]:
        """Return what was taken of it."""
        self.wait()
        reading, stats = self._gauge.read(), self._card.memory_stats()
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
        from tests.testkit.limited.device import HostCarrier

        step = (ContrastiveOnDevice if work.is_contrastive else OnDevice)(work.task, work.under(choice))
        step.carrier = HostCarrier(self._limited)
        return step

    def wait(self) -> None:
        """Return at once."""

    def squeeze(self, share: float) -> None:
        """Let torch have only so much of what was live at most so far."""
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
    if kind != CPU:
        yield OnCard(kind)
        return
    from tests.testkit.limited.device import LimitedDevice

    allocator = Allocator(next(one for one in SETTINGS if one.text == settings), STAND_IN_BYTES, is_fraction=True)
    gc.collect()
    with LimitedDevice(through=allocator) as limited:
        yield StandIn(limited, allocator)


def forget(kind: str) -> None:
    """Let everything go that nobody holds any more."""
    from pipeline.device.accelerator import computing

    gc.collect()
    computing(kind).empty_cache()


def wait(kind: str) -> None:
    """Wait until a device has done what it was told."""
    from pipeline.device.accelerator import computing

    computing(kind).synchronize()


def peak_bytes(kind: str) -> int:
    """Return the most that was live of a card; 0 of the CPU."""
    from pipeline.device.accelerator import Card

    return 0 if kind == CPU else Card(kind).peak_allocated_bytes
