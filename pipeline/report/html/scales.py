"""Axes: round numbers in a unit that suits them, and where they lie on paper."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.report.html.text import moment

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS = (1, 2, 2.5, 5, 10)
KILO = 1024
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400
TIME_STEPS_S = (
    0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400,
    2 * 86400, 5 * 86400, 10 * 86400, 30 * 86400,
)  # fmt: skip
ROUNDING, TINY = 1e-9, 1e-300
ROUNDED = 1e-3  # of a step
LEAST_PLAIN, MOST_PLAIN, MOST_PLACES = 1e-4, 1e7, 6  # of numbers that are said without an exponent
SHORT_S = 600  # of a shorter run the axis says seconds since its beginning


@dataclass(frozen=True, slots=True)
class Axis:
    """A stretch of numbers, the round ones among them with what they are called, and their unit."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    unit: str = ""

    def place(self, value: float, start: float, end: float) -> float:
        """Return where a number lies between two places on paper."""
        share = (value - self.low) / (self.high - self.low)
        return start + min(1.0, max(0.0, share)) * (end - start)


def numbers(low: float, high: float, unit: str = "", *, most: int = 5) -> Axis:
    """Return an axis over numbers."""
    low, high = _apart(low, high)
    step = _round_step((high - low) / most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    places = next(n for n in range(20) if n == 19 or abs(step * 10**n - round(step * 10**n)) < 1e-6 * step * 10**n)
    values, largest = [n * step for n in range(first, last + 1)], max(abs(low), abs(high))
    is_plain = places <= MOST_PLACES and LEAST_PLAIN <= largest < MOST_PLAIN
    words = [f"{value:,.{places}f}" for value in values] if is_plain else _short(values, step)
    ticks = zip(values, words, strict=True)
    return Axis(first * step, last * step, tuple(ticks), unit)


def _short(values: Sequence[float], step: float) -> list[str]:
    """Return numbers with as few digits as tell them apart."""
    for digits in range(3, 18):
        words = [f"{value:.{digits}g}" for value in values]
        if all(abs(float(word) - value) < ROUNDED * step for word, value in zip(words, values, strict=True)):
            break
    return words


def sizes(high: float, *, most: int = 5) -> Axis:
    """Return an axis over amounts of memory, from nothing."""
    power = min(len(UNITS) - 1, max(0, int(math.log(max(high, 1), KILO))))
    scale = KILO**power
    found = numbers(0, high / scale, UNITS[power], most=most)
    return Axis(0, found.high * scale, tuple((value * scale, said) for value, said in found.ticks), UNITS[power])


def wholes(low: float, high: float, unit: str = "", *, most: int = 6) -> Axis:
    """Return an axis over whole numbers that begins and ends where they do."""
    low, high = (low, high) if high > low else (low - 1, high + 1)
    step = max(1, math.ceil(_round_step((high - low) / most)))
    first = math.ceil(low / step) * step
    ticks = [(value, f"{value:,}") for value in range(int(first), int(high) + 1, int(step))]
    return Axis(low, high, tuple(ticks), unit)


def times(begun: float, end: float, *, since: float, most: int = 6) -> Axis:
    """Return an axis over moments: seconds since something began where that is not long ago, else UTC."""
    length = max(end - begun, 1e-3)
    step = next((one for one in TIME_STEPS_S if length / one <= most), TIME_STEPS_S[-1] * math.ceil(length / 3e7))
    if begun + length - since <= SHORT_S:
        marks = range(math.ceil((begun - since) / step - 1e-9), int((begun + length - since) / step + 1e-9) + 1)
        ticks = [(since + n * step, f"{n * step:g}") for n in marks]
        return Axis(begun, begun + length, tuple(ticks), "s since the run began")
    form = "%m-%d" if step >= DAY_S else "%m-%d %H:%M" if length > DAY_S else "%H:%M"
    first = math.ceil(begun / step)
    found = tuple((n * step, moment(n * step, form)) for n in range(first, int(end / step) + 1))
    return Axis(begun, begun + length, found, "UTC")


def _apart(low: float, high: float) -> tuple[float, float]:
    """Return two numbers that differ by more than rounding: between such as do not, there are no round ones."""
    largest = max(abs(low), abs(high))
    if largest < TINY:
        return 0.0, 1.0
    if high - low > ROUNDING * largest:
        return low, high
    return (low / 2, 1.5 * low) if low > 0 else (1.5 * low, low / 2)


def _round_step(step: float) -> float:
    """Return the next round number."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(one * power for one in STEPS if one * power >= step * (1 - 1e-9))
