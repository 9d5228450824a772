"""Waiting for files that another node has just written: some file systems show them late."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pipeline.store.store import Store

LOOK_AGAIN_S = 0.5


class Countable(Protocol):
    """What says how much is not there."""

    @property
    def undone(self) -> int:
        """How many items the store does not have everything of."""


Counted = TypeVar("Counted", bound=Countable)


def patiently(stores: Iterable[Store], look: Callable[[], Counted], patience_s: float) -> Counted:
    """Return what a look at the stores shows, once nothing is missing or patience is over."""
    deadline, stores = time.monotonic() + patience_s, tuple(stores)
    while True:
        for store in stores:
            store.refresh()
        seen = look()
        if not seen.undone or time.monotonic() > deadline:
            return seen
        time.sleep(LOOK_AGAIN_S)
