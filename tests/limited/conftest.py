"""What every test of this folder runs under."""

from __future__ import annotations

import pytest

from tests.testkit.limited import device


@pytest.fixture(autouse=True)
def _possible(one_thread: None) -> None:
    device.need()
