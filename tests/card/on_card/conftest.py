"""Every test of this folder has two simulated cards, empty and as large as they are by default."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.card import card

card.load()


@pytest.fixture(autouse=True)
def fresh_cards() -> Iterator[None]:
    card.configure(card.Cards())
    torch.accelerator.set_device_index(0)
    torch.manual_seed(0)
    yield
    gc.collect()
    torch.accelerator.empty_cache()
