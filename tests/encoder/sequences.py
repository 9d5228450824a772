"""Sequences for tests."""

from __future__ import annotations

import random

LETTERS = "LAGVSERTIDPKQNFYMHWC"


def natural(count: int, *, shortest: int = 20, longest: int = 60, seed: int = 0) -> list[str]:
    """Return different random sequences of lengths spread over a range."""
    chance = random.Random(seed)
    lengths = [shortest + (longest - shortest) * number // max(1, count - 1) for number in range(count)]
    return ["".join(chance.choices(LETTERS, k=length)) for length in lengths]
