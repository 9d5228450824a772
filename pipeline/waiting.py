"""The one loop that waits for something outside this process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def wait_for(
    look: Callable[[], T], within_s: float, every_s: float, *, sleep: Callable[[float], None] = time.sleep
) -> T:
    """Call until what is returned is true or the time is up; return the last answer, whichever it was."""
    until = time.monotonic() + within_s
    while not (answer := look()):
        left_s = until - time.monotonic()
        if left_s <= 0:
            break
        sleep(min(every_s, left_s))
    return answer
