"""What changes how fast sequences are encoded and in how much memory, and never a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Settings:
    """How one process encodes."""

    policy: str  # divisor or tokens
    cap: int | Literal["auto"]
    budget: int | Literal["auto"]
    device: str  # cpu or cuda
    threads: int = 1
    shrink: int = 0  # how often the budget is halved, because a card's memory ended in an earlier attempt
    mem_bytes: int | None = None  # what the allocation gives this process on the host
