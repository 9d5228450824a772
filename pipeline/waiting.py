"""Waits for events outside this process, and delays signals during critical sections."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

T = TypeVar("T")


def wait_for(
    look: Callable[[], T], within_s: float, every_s: float, *, sleep: Callable[[float], None] = time.sleep
) -> T:
    """Call a function until its answer is true or the time is up; return the last answer."""
    until = time.monotonic() + within_s
    while not (answer := look()):
        left_s = until - time.monotonic()
        if left_s <= 0:
            break
        sleep(min(every_s, left_s))
    return answer


@contextmanager
def signals_held() -> Iterator[None]:
    """Delay signals that ask to end while the block runs."""
    arrived: list[int] = []
    handlers = {}

    def hold(number: int, _frame: FrameType | None) -> None:
        arrived.append(number)

    try:
        if threading.current_thread() is threading.main_thread():  # handlers run only in the main thread
            for number in ENDING:
                if callable(signal.getsignal(number)):
                    handlers[number] = signal.signal(number, hold)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for held in arrived:
            signal.raise_signal(held)
