"""What measures a step: the process's own memory for real, a card's by what torch would say of it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.memory.runtime.gauges import CardGauge, ProcessGauge, Start, gauge_of

MIB = 1 << 20


@dataclass
class Counters:
    """Torch's counters of a card, by their real names."""

    free: int = 900
    total: int = 1000
    reserved: int = 0
    most_reserved: int = 0
    most_allocated: int = 0
    OutOfMemoryError = torch.cuda.OutOfMemoryError

    def mem_get_info(self) -> tuple[int, int]:
        return self.free, self.total

    def get_device_name(self) -> str:
        return "NVIDIA A100-SXM4-40GB"

    def memory_reserved(self) -> int:
        return self.reserved

    def max_memory_reserved(self) -> int:
        return self.most_reserved

    def max_memory_allocated(self) -> int:
        return self.most_allocated

    def init(self) -> None: ...

    def synchronize(self) -> None: ...

    def reset_peak_memory_stats(self) -> None: ...


@pytest.fixture
def card() -> tuple[CardGauge, Counters]:
    gauge, counters = CardGauge(), Counters()
    gauge._torch = SimpleNamespace(cuda=counters)
    return gauge, counters


def test_a_process_is_measured_by_what_its_memory_grew_at_most() -> None:
    gauge = gauge_of("cpu")
    start = gauge.start(limit_bytes=1 << 40)
    assert start.available_bytes == (1 << 40) - start.taken_bytes
    held: Any = torch.ones(64 * MIB, dtype=torch.uint8)
    del held
    assert 62 * MIB <= gauge.read().bytes < 80 * MIB  # the kernel counts in batches of pages


def test_only_errors_about_memory_are_deaths() -> None:
    gauge = ProcessGauge()
    gauge.start(limit_bytes=1 << 40)
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 58)
    at_most = gauge.died_at(raised.value)
    assert at_most is not None
    assert at_most > 1 << 39
    assert gauge.died_at(MemoryError()) == at_most
    assert gauge.died_at(RuntimeError("shapes do not match")) is None


def test_a_cards_peak_is_what_was_reserved_and_what_is_outside_is_told(card: tuple[CardGauge, Counters]) -> None:
    gauge, counters = card
    start = gauge.start(limit_bytes=0)
    assert (start.gpu, start.taken_bytes, start.available_bytes) == ("a100-40gb", 100, 900)
    counters.free, counters.reserved, counters.most_reserved, counters.most_allocated = 300, 550, 600, 500
    reading = gauge.read()
    assert (reading.bytes, reading.live_bytes, reading.outside_bytes) == (600, 500, 150)


def test_a_card_that_ran_out_had_what_torch_holds_and_what_is_free(card: tuple[CardGauge, Counters]) -> None:
    gauge, counters = card
    counters.free, counters.reserved, counters.most_reserved = 40, 800, 810
    assert gauge.died_at(torch.cuda.OutOfMemoryError("CUDA out of memory")) == 840
    assert gauge.died_at(RuntimeError("CUDA error: an illegal memory access")) is None


def test_every_counter_that_is_read_is_one_of_torchs() -> None:
    mine = {name for name in vars(Counters) if not name.startswith("_")} - set(Counters.__annotations__)
    assert {name for name in mine if not hasattr(torch.cuda, name)} == set()
    assert Start.__annotations__.keys() >= {"gpu", "driver", "taken_bytes", "available_bytes"}
