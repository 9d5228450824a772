"""What measures a step: the process's own memory for real, a card's by what torch would say of it."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import pytest
import torch

from pipeline.device import accelerator
from pipeline.memory.runtime.meters import StepGauge

MIB = 1 << 20


@dataclass
class Counters:
    """What a card would answer, by the names of `accelerator.Card`."""

    free: int = 900
    total: int = 1000
    reserved: int = 0
    most_reserved: int = 0
    most_allocated: int = 0
    name = "NVIDIA A100-SXM4-40GB"
    fraction = 1.0

    def free_and_total_bytes(self) -> tuple[int, int]:
        return self.free, self.total

    def memory_stats(self) -> dict[str, int]:
        return {
            "reserved_bytes.all.current": self.reserved,
            "reserved_bytes.all.peak": self.most_reserved,
            "allocated_bytes.all.peak": self.most_allocated,
        }

    def begin(self) -> None: ...

    def synchronize(self) -> None: ...

    def reset_peaks(self) -> None: ...


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    counters = Counters()
    monkeypatch.setattr(accelerator, "Card", lambda device: counters)
    return counters


def test_a_process_is_measured_by_what_its_memory_grew_at_most() -> None:
    grown = []
    for _ in range(3):
        gauge = StepGauge("cpu", limit_bytes=1 << 40)
        assert gauge.before.available_bytes == (1 << 40) - gauge.before.taken_bytes
        with mmap.mmap(-1, 64 * MIB) as held:  # from the kernel, whatever malloc keeps
            held[:: mmap.PAGESIZE] = bytes(64 * MIB // mmap.PAGESIZE)
        grown.append(gauge.read().bytes)
    assert 62 * MIB <= max(grown) < 80 * MIB  # the kernel counts in batches of pages, and may take cold ones back


def test_only_errors_about_memory_are_deaths() -> None:
    gauge = StepGauge("cpu", limit_bytes=1 << 40)
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 58)
    at_most = gauge.died_at(raised.value)
    assert at_most is not None
    assert at_most > 1 << 39
    assert gauge.died_at(MemoryError()) == at_most
    assert gauge.died_at(RuntimeError("shapes do not match")) is None


def test_a_cards_peak_is_what_was_reserved_and_what_is_outside_is_told(counters: Counters) -> None:
    gauge = StepGauge("cuda")
    start = gauge.before
    assert (start.gpu, start.taken_bytes, start.available_bytes) == ("a100-40gb", 100, 900)
    counters.free, counters.reserved, counters.most_reserved, counters.most_allocated = 300, 550, 600, 500
    reading = gauge.read()
    assert (reading.bytes, reading.live_bytes, reading.outside_bytes) == (600, 500, 150)


def test_a_card_that_ran_out_had_what_torch_holds_and_what_is_free(counters: Counters) -> None:
    gauge = StepGauge("cuda")
    counters.free, counters.reserved, counters.most_reserved = 40, 800, 810
    assert gauge.died_at(torch.OutOfMemoryError("CUDA out of memory")) == 840
    assert gauge.died_at(RuntimeError("CUDA error: an illegal memory access")) is None


def test_every_counter_that_is_read_is_one_of_a_cards() -> None:
    mine = {name for name in vars(Counters) if not name.startswith("_")} - set(Counters.__annotations__)
    assert mine <= set(dir(accelerator.Card))
