"""One moment in which a card is full of unused blocks costs an emptied cache, and no smaller micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.memory.runtime.meters import CardMeter, Memory
from tests.memory.runtime.test_gauges import Counters
from tests.training.loop.loops import Plot, Run

LIMIT, CALM, CROWDED = 1000, (500, 520), (800, 960)  # bytes: limit; allocated and reserved at the peak


class Card:
    """A card whose peaks, as torch's, are those since they were reset; crowded in the second step alone."""

    def __init__(self) -> None:
        self.looks, self.peak = 0, CALM

    def read(self) -> Memory:
        self.looks += 1
        self.peak = max(self.peak, CROWDED if self.looks == 2 else CALM)
        return Memory(*CALM, *self.peak, 0, LIMIT)

    def reset_peak(self, *, keep: bool = False) -> bool:
        self.peak = CALM
        return True


def test_a_crowded_moment_empties_the_cache_once_and_lowers_nothing(tmp_path: Path) -> None:
    run = Run(Plot({"epochs": 1, "effective_batch": 4}, items=32), tmp_path)
    run.trainer.whole.meter = card = Card()
    budgets = [run.trainer.governor.budget for _ in run.trainer.run()]
    assert card.looks == 8
    assert len(set(budgets)) == 1
    assert [line for line in run.said if "unused blocks" in line] == [
        "step 2: the allocator's memory was full of unused blocks"
    ]


def test_a_peak_that_begins_anew_within_an_epoch_does_not_lose_the_highest(counters: Counters) -> None:
    counters.most_reserved = 960
    meter = CardMeter("cuda:0")
    meter.reset_peak(keep=True)
    counters.most_reserved = 520
    assert (meter.read().peak_reserved_bytes, meter.read().highest_reserved_bytes) == (520, 960)
    meter.reset_peak()
    assert meter.read().highest_reserved_bytes == 520


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    counters = Counters()
    monkeypatch.setattr("pipeline.device.accelerator.Card", lambda device: counters)
    return counters
