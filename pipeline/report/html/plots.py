"""Plots as SVG. Axes have round numbers in a unit that suits them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

STEPS = (1, 2, 2.5, 5, 10)
WHOLE_TICKS = 6  # about so many on an axis over whole numbers
KILO = 1024
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
DAY_S = 86400
TIME_STEPS_S = (
    0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400,
    2 * 86400, 5 * 86400, 10 * 86400, 30 * 86400,
)  # fmt: skip
ROUNDING, TINY = 1e-9, 1e-300
ROUNDED = 1e-3  # of a step
LEAST_PLAIN, MOST_PLAIN, MOST_PLACES = 1e-4, 1e7, 6  # of numbers that are said without an exponent
SHORT_S = 600  # of a shorter run the axis says seconds since its beginning
_MANY, _HUGE, _FEW = 1e3, 1e10, 1e-3


def tag(name: str, *inside: Any, **attributes: Any) -> Markup:
    """Return an HTML or SVG element; `class_` means `class`, `text_anchor` means `text-anchor`; text is escaped."""
    written = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(name, written, Markup("").join(inside))


def moment(at: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Format seconds since 1970 in UTC, as readers of a page may be in any time zone."""
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
        return start + min(1.0, max(0.0, share)) * (end - start)


def number_axis(low: float, high: float, unit: str = "", *, most: int = 5) -> Axis:
    """Return an axis with about `most` round ticks around a range of numbers."""
    low, high = _apart(low, high)
    step = _round_step((high - low) / most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    places = next(n for n in range(20) if n == 19 or abs(step * 10**n - round(step * 10**n)) < 1e-6 * step * 10**n)
    values, largest = [n * step for n in range(first, last + 1)], max(abs(low), abs(high))
    is_plain = places <= MOST_PLACES and LEAST_PLAIN <= largest < MOST_PLAIN
    words = [f"{value:,.{places}f}" for value in values] if is_plain else _short(values, step)
    ticks = zip(values, words, strict=True)
    return Axis(first * step, last * step, tuple(ticks), unit)


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


def time_axis(begun: float, end: float, *, since: float, most: int = 6) -> Axis:
    """Return an axis over time: seconds since `since` in a short run, else the time of day in UTC."""
    length = max(end - begun, 1e-3)
    months = TIME_STEPS_S[-1] * math.ceil(length / 3e7)
    step = next((seconds for seconds in TIME_STEPS_S if length / seconds <= most), months)
    if begun + length - since <= SHORT_S:
        marks = range(math.ceil((begun - since) / step - 1e-9), int((begun + length - since) / step + 1e-9) + 1)
        ticks = tuple((since + n * step, f"{n * step:g}") for n in marks)
        return Axis(begun, begun + length, ticks, "seconds")
    form = "%m-%d" if step >= DAY_S else "%m-%d %H:%M" if length > DAY_S else "%H:%M"
    first = math.ceil(begun / step)
    ticks = tuple((n * step, moment(n * step, form)) for n in range(first, int(end / step) + 1))
    return Axis(begun, begun + length, ticks, "UTC")


def _apart(low: float, high: float) -> tuple[float, float]:
    """Widen a range that is empty up to rounding: it would have no round ticks."""
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


Point = tuple[float, float]
Size = tuple[int, int, str]  # pixels, and CSS class
SMALL: Size = (380, 210, "")
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 22, 36
DOTS = 40  # points of a line up to which each is marked
COLOURS = 8


@dataclass(frozen=True, slots=True)
class Line:
    """A curve: its name, its points, and how it is drawn."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    style: str = ""  # `thin`, `dashed`, `plain`, `steps`
    hints: Sequence[str] = ()  # what each point says when it is pointed at


def plot(title: str, x: Axis, y: Axis, lines: Sequence[Line], sizes: Sequence[Size] = (SMALL,)) -> Markup:
    """Return a plot with its title and legend, drawn in each size; the style sheet shows the one that fits."""
    pictures = Markup("").join(
        svg(title, [_frame(x, y, w, h), *(_line(line, x, y, w, h) for line in lines)], w, h, css) for w, h, css in sizes
    )
    named = [(line.name, f"s{line.colour % COLOURS} {line.style}") for line in lines if line.name]
    return figure_of(title, pictures, legend(named) if len(named) > 1 else "")


def svg(title: str, parts: Iterable[Markup], width: int, height: int, css: str = "") -> Markup:
    """Return an SVG element of a size, with a title for screen readers."""
    box = f"0 0 {width} {height}"
    inside = (tag("title", title), *parts)
    return tag("svg", *inside, viewBox=box, role="img", aria_label=title, class_=css)


def figure_of(title: str, picture: Any, key: Any = "", *, css: str = "plot") -> Markup:
    """Return an HTML figure: its caption, its legend and its picture."""
    return tag("figure", tag("figcaption", tag("b", title, title=title), key), picture, class_=css)


def legend(named: Iterable[tuple[str, str]]) -> Markup:
    """Return the legend of a plot: pairs of a name and the CSS classes of its colour."""
    keys = (tag("span", tag("i", class_=f"key {css}"), name, title=name) for name, css in named)
    return tag("span", *keys, class_="legend")


def _frame(x: Axis, y: Axis, width: int, height: int) -> Markup:
    """Return the axes with their ticks and units."""
    right, bottom = width - RIGHT, height - BOTTOM
    parts = []
    for value, label in y.ticks:
        at = y.place(value, bottom, TOP)
        parts.append(tag("line", x1=LEFT, x2=right, y1=f"{at:.1f}", y2=f"{at:.1f}", class_="grid"))
        parts.append(svg_text(LEFT - 6, at + 4, label, "end"))
    parts += x_ticks(x, LEFT, right, bottom)
    parts.append(tag("line", x1=LEFT, x2=right, y1=bottom, y2=bottom, class_="axis"))
    parts.append(svg_text(right, bottom + 32, x.unit, "end", "unit"))
    parts.append(svg_text(2, TOP - 10, y.unit, css="unit"))
    return Markup("").join(parts)


def x_ticks(x: Axis, left: float, right: float, bottom: float) -> list[Markup]:
    """Return the marks of an axis below a plot."""
    parts = []
    for value, label in x.ticks:
        at = x.place(value, left, right)
        parts.append(tag("line", x1=f"{at:.1f}", x2=f"{at:.1f}", y1=bottom, y2=bottom + 4, class_="axis"))
        parts.append(svg_text(at, bottom + 17, label, "middle"))
    return parts


def svg_text(x: float, y: float, text: str, anchor: str = "start", css: str = "tick") -> Markup:
    """Return an SVG text."""
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, class_=css)


def cut(text: str, most: int) -> str:
    """Return a text of bounded length, with an ellipsis where it was cut."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _line(line: Line, x: Axis, y: Axis, width: int, height: int) -> Markup:
    """Return the SVG of a curve, with a gap wherever a value is not finite."""
    bottom, right = height - BOTTOM, width - RIGHT
    places = [(x.place(a, LEFT, right), y.place(b, bottom, TOP)) if math.isfinite(b) else None for a, b in line.points]
    css = f"line s{line.colour % COLOURS} {line.style}".strip()
    drawn = [tag("path", d=_path(places, steps="steps" in line.style), class_=css)]
    if len(line.points) <= DOTS and not line.style:
        drawn += [_dot(place, line, number) for number, place in enumerate(places) if place]
    return Markup("").join(drawn)


def _dot(place: Point, line: Line, number: int) -> Markup:
    hint = tag("title", line.hints[number]) if number < len(line.hints) else ""
    css = f"dot s{line.colour % COLOURS}"
    return tag("circle", hint, cx=f"{place[0]:.1f}", cy=f"{place[1]:.1f}", r=2.6, class_=css)


def _path(places: Sequence[Point | None], *, steps: bool = False) -> str:
    """Return the SVG path through some points; None lifts the pen."""
    commands, is_drawing = [], False
    for place in places:
        if place is not None:
            x, y = place
            draw = f"H{x:.1f}V{y:.1f}" if steps else f"L{x:.1f} {y:.1f}"
            commands.append(draw if is_drawing else f"M{x:.1f} {y:.1f}")
        is_drawing = place is not None
    return "".join(commands)
