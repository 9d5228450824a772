"""Every test of this folder has two simulated cards, empty and as large as they are by default."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.card import card

card.load()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set no limit to single tests: `test_on_card.py` pays for the process as a whole."""
    for item in items:
        item.add_marker(pytest.mark.nightly)


@pytest.fixture(autouse=True)
def fresh_cards() -> Iterator[None]:
    card.configure(card.Cards())
    torch.accelerator.set_device_index(0)
    torch.manual_seed(0)
    yield
    gc.collect()
    torch.accelerator.empty_cache()
