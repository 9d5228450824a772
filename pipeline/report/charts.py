"""The charts of `charts.html`: axes with round numbers and fitting units, lines, and rows of bars."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_T = TypeVar("_T")

STEPS = (1, 2, 2.5, 5, 10)
WHOLE_TICKS = 6  # approximate number of ticks on an axis over whole numbers
KILO = 1024
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
DAY_S = 86400
TIME_STEPS_S = (
    0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400,
    2 * 86400, 5 * 86400, 10 * 86400, 30 * 86400,
)  # fmt: skip
ROUNDING, TINY = 1e-9, 1e-300
ROUNDED = 1e-3  # tolerance of rounded ticks, as a share of their step
LEAST_PLAIN, MOST_PLAIN, MOST_PLACES = 1e-4, 1e7, 6  # range of numbers written without an exponent
SHORT_S = 600  # the axis of a shorter run shows seconds since its start
_MANY, _HUGE, _FEW = 1e3, 1e10, 1e-3
Point = tuple[float, float]
COLOURS = 8
DOTS = 40  # a line with at most this many points marks each


def moment(at: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Format seconds since 1970 in UTC, as readers may be in any time zone."""
    return datetime.fromtimestamp(at, tz=UTC).strftime(form)


def figure(value: float) -> str:
    """Format a number with about four digits."""
    if value == int(value) or abs(value) >= _MANY:
        return f"{value:,.0f}" if abs(value) < _HUGE else f"{value:.3g}"
    return f"{value:.4g}" if abs(value) >= _FEW else f"{value:.2e}"


@dataclass(frozen=True, slots=True)
class Axis:
    """The range of an axis, its ticks as value and label, and its unit."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    unit: str = ""
    is_log: bool = False

    def place(self, value: float, start: float, end: float) -> float:
        """Return the pixel of a value on an axis that is drawn from `start` to `end`."""
        low, high, value = (math.log(each) if self.is_log else each for each in (self.low, self.high, value))
        share = (value - low) / (high - low)
        return round(start + min(1.0, max(0.0, share)) * (end - start), 1)


def number_axis(low: float, high: float, unit: str = "", *, most: int = 5) -> Axis:
    """Return an axis with about `most` round ticks around a range of numbers."""
    low, high = _apart(low, high)
    step = _round_step((high - low) / most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    places = next(n for n in range(20) if n == 19 or abs(step * 10**n - round(step * 10**n)) < 1e-6 * step * 10**n)
    values, largest = [n * step for n in range(first, last + 1)], max(abs(low), abs(high))
    is_plain = places <= MOST_PLACES and LEAST_PLAIN <= largest < MOST_PLAIN
    words = [f"{value:,.{places}f}" for value in values] if is_plain else _short(values, step)
    return Axis(first * step, last * step, tuple(zip(values, words, strict=True)), unit)


def log_axis(low: float, high: float) -> Axis:
    """Return an axis over positive numbers with a tick at each power of ten."""
    powers = [10.0**n for n in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    return Axis(powers[0], powers[-1], tuple((power, f"{power:g}") for power in powers), "log", is_log=True)


def _short(values: Sequence[float], step: float) -> list[str]:
    """Format tick values with the fewest digits that keep them distinct."""
    for digits in range(3, 18):
        words = [f"{value:.{digits}g}" for value in values]
        if all(abs(float(word) - value) < ROUNDED * step for word, value in zip(words, values, strict=True)):
            break
    return words


def byte_axis(high: float, *, most: int = 5) -> Axis:
    """Return an axis over bytes that begins at 0, in a fitting unit."""
    power = min(len(UNITS) - 1, max(0, int(math.log(max(high, 1), KILO))))
    scale = KILO**power
    axis = number_axis(0, high / scale, UNITS[power], most=most)
    return Axis(0, axis.high * scale, tuple((value * scale, label) for value, label in axis.ticks), UNITS[power])


def whole_axis(low: float, high: float, unit: str = "") -> Axis:
    """Return an axis over whole numbers that ends exactly at the given range."""
    low, high = (low, high) if high > low else (low - 1, high + 1)
    step = max(1, math.ceil(_round_step((high - low) / WHOLE_TICKS)))
    first = math.ceil(low / step) * step
    ticks = [(value, f"{value:,}") for value in range(int(first), int(high) + 1, int(step))]
    return Axis(low, high, tuple(ticks), unit)


def time_axis(begun: float, end: float, *, most: int = 6) -> Axis:
    """Return an axis over time: seconds of a short run, else the time of day in UTC."""
    length = max(end - begun, 1e-3)
    months = TIME_STEPS_S[-1] * math.ceil(length / 3e7)
    step = next((seconds for seconds in TIME_STEPS_S if length / seconds <= most), months)
    if length <= SHORT_S:
        ticks = tuple((begun + n * step, f"{n * step:g}") for n in range(int(length / step + 1e-9) + 1))
        return Axis(begun, begun + length, ticks, "seconds")
    form = "%m-%d" if step >= DAY_S else "%m-%d %H:%M" if length > DAY_S else "%H:%M"
    first = math.ceil(begun / step)
    ticks = tuple((n * step, moment(n * step, form)) for n in range(first, int(end / step) + 1))
    return Axis(begun, begun + length, ticks, "UTC")


def _apart(low: float, high: float) -> tuple[float, float]:
    """Widen a range that is empty up to rounding, which has no round ticks."""
    largest = max(abs(low), abs(high))
    if largest < TINY:
        return 0.0, 1.0
    if high - low > ROUNDING * largest:
        return low, high
    return (low / 2, 1.5 * low) if low > 0 else (1.5 * low, low / 2)


def _round_step(step: float) -> float:
    """Return the least round number that is not below a step."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in STEPS if factor * power >= step * (1 - 1e-9))


class Size(NamedTuple):
    """The size of a chart in pixels, with the margins left and right of its axis; `css` says on which screens."""

    width: int
    height: int = 0  # a chart of bars is as high as its rows
    css: str = ""
    left: int = 52
    right: int = 10
    every: int = 1  # label every n-th tick along the bottom


SMALL = Size(380, 210)


@dataclass(frozen=True, slots=True)
class Line:
    """A curve: its name, its points, and how it is drawn."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    style: str = ""  # `thin`, `dashed`, `plain`; `points`: without the line
    hints: Sequence[str] = ()  # tooltips of the points

    @property
    def css(self) -> str:
        return f"s{self.colour % COLOURS} {self.style}".rstrip()

    @property
    def dots(self) -> list[tuple[Point, str]]:
        """The points of a short line, or of one that is points alone, each with its hint."""
        if self.style != "points" and (self.style or len(self.points) > DOTS):
            return []
        hints = [*self.hints, *[""] * (len(self.points) - len(self.hints))]
        return [(point, hint) for point, hint in zip(self.points, hints, strict=True) if math.isfinite(point[1])]


@dataclass(frozen=True, slots=True)
class Bar:
    """A span in a row; `inset` makes it thinner by that many pixels on either side."""

    start: float
    end: float
    css: str
    hint: str = ""
    inset: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a bar chart: its bars, marks at (place, CSS class, hint), and a text."""

    name: str
    text: str
    bars: Sequence[Bar] = ()
    marks: Sequence[tuple[float, str, str]] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of lines over two axes, or of rows of bars over one; axes are made for the drawn size."""

    title: str
    x: Axis
    y: Axis | None = None
    lines: Sequence[Line] = ()
    rows: Sequence[Row] = ()
    sizes: Sequence[Size] = (SMALL,)
    key: Sequence[tuple[str, str]] = ()  # the legend: names and CSS classes


def line_chart(
    title: str, x: Axis, lines: Sequence[Line], y: Callable[[float, float], Axis] = number_axis,
    sizes: Sequence[Size] = (SMALL,),
) -> Chart:  # fmt: skip
    """Return a chart of lines, with an axis for their finite values."""
    values = [value for line in lines for _, value in line.points if math.isfinite(value)]
    named = [(line.name, line.css) for line in lines if line.name]
    axis = y(min(values), max(values)) if values else None
    return Chart(title, x, axis, lines if values else (), sizes=sizes, key=named if len(named) > 1 else ())


def from_zero(unit: str = "") -> Callable[[float, float], Axis]:
    """Return a function that makes an axis from 0."""
    return lambda _, high: number_axis(0, high, unit)


def path(points: Iterable[Point], x: Axis, y: Axis, ends: Point, heights: Point) -> str:
    """Return the SVG path through some points, with gaps at values that are not finite."""
    words, is_drawing = [], False
    for a, b in points:
        if math.isfinite(b):
            at, up = x.place(a, *ends), y.place(b, *heights)
            words.append(f"{'L' if is_drawing else 'M'}{at} {up}")
        is_drawing = math.isfinite(b)
    return "".join(words)


def thinned(values: Sequence[_T], most: int) -> list[_T]:
    """Return at most `most` evenly spaced values, including the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[place * (len(values) - 1) // (most - 1)] for place in range(most)]
