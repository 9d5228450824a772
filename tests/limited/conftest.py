"""What every test of this folder runs under."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.limited import device


@pytest.fixture(autouse=True)
def _possible() -> None:
    device.need()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Some kernels take scratch per thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
