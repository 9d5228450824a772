"""Plots: axes with round numbers in a unit that suits them, and what is drawn between them, as SVG."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


_MANY, _HUGE, _FEW = 1e3, 1e10, 1e-3


def tag(name: str, *inside: Any, **attributes: Any) -> Markup:
    """Return an element; `class_` is `class`, `text_anchor` is `text-anchor`; text that is no Markup is escaped."""
    said = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(name, said, Markup("").join(inside))


def moment(at: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return a moment in UTC: who reads a page may be anywhere."""
    return datetime.fromtimestamp(at, tz=timezone.utc).strftime(form)


def figure(value: float) -> str:
    """Return a number as people read it."""
    if value == int(value) or abs(value) >= _MANY:
        return f"{value:,.0f}" if abs(value) < _HUGE else f"{value:.3g}"
    return f"{value:.4g}" if abs(value) >= _FEW else f"{value:.2e}"


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


def number_axis(low: float, high: float, unit: str = "", *, most: int = 5) -> Axis:
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


def byte_axis(high: float, *, most: int = 5) -> Axis:
    """Return an axis over amounts of memory, from nothing."""
    power = min(len(UNITS) - 1, max(0, int(math.log(max(high, 1), KILO))))
    scale = KILO**power
    found = number_axis(0, high / scale, UNITS[power], most=most)
    return Axis(0, found.high * scale, tuple((value * scale, said) for value, said in found.ticks), UNITS[power])


def whole_axis(low: float, high: float, unit: str = "", *, most: int = 6) -> Axis:
    """Return an axis over whole numbers that begins and ends where they do."""
    low, high = (low, high) if high > low else (low - 1, high + 1)
    step = max(1, math.ceil(_round_step((high - low) / most)))
    first = math.ceil(low / step) * step
    ticks = [(value, f"{value:,}") for value in range(int(first), int(high) + 1, int(step))]
    return Axis(low, high, tuple(ticks), unit)


def time_axis(begun: float, end: float, *, since: float, most: int = 6) -> Axis:
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


Point = tuple[float, float]
WIDTH, HEIGHT = 440, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 22, 40
DOTS = 40  # points of a line up to which each is marked
COLOURS = 8


@dataclass(frozen=True, slots=True)
class Line:
    """A curve: its name, its points, and how it is drawn."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    style: str = ""  # `thin`, `dashed`, `area`, `steps`
    told: Sequence[str] = ()  # what each point says when it is pointed at


def plot(title: str, x: Axis, y: Axis, lines: Sequence[Line], *, width: int = WIDTH, height: int = HEIGHT) -> Markup:
    """Return a plot with its title and legend."""
    drawn = [_frame(x, y, width, height), *(_line(line, x, y, width, height) for line in lines)]
    picture = svg(title, drawn, width, height)
    named = [(one.name, f"s{one.colour % COLOURS} {one.style}") for one in lines if one.name]
    return figure_of(title, picture, legend(named) if len(named) > 1 else "")


def svg(title: str, parts: Iterable[Markup], width: int, height: int, css: str = "") -> Markup:
    """Return a picture with its title."""
    box = f"0 0 {width} {height}"
    inside = (tag("title", title), *parts)
    return tag("svg", *inside, viewBox=box, role="img", aria_label=title, class_=css)


def figure_of(title: str, picture: Any, key: Any = "", *, css: str = "plot") -> Markup:
    """Return a picture with its title and the meaning of its colours."""
    return tag("figure", tag("figcaption", tag("b", title), key), picture, class_=css)


def legend(named: Iterable[tuple[str, str]]) -> Markup:
    """Return what the colours mean."""
    return tag("span", *(tag("span", tag("i", class_=f"key {css}"), name) for name, css in named), class_="legend")


def _frame(x: Axis, y: Axis, width: int, height: int) -> Markup:
    """Return the axes with their ticks and units."""
    right, bottom = width - RIGHT, height - BOTTOM
    parts = []
    for value, said in y.ticks:
        at = y.place(value, bottom, TOP)
        parts.append(tag("line", x1=LEFT, x2=right, y1=f"{at:.1f}", y2=f"{at:.1f}", class_="grid"))
        parts.append(svg_text(LEFT - 6, at + 4, said, "end"))
    parts += x_ticks(x, LEFT, right, bottom)
    parts.append(tag("line", x1=LEFT, x2=right, y1=bottom, y2=bottom, class_="axis"))
    parts.append(svg_text(right, bottom + 33, x.unit, "end", "unit"))
    parts.append(
        svg_text(LEFT - 6, TOP - 10, y.unit, "end" if len(y.unit) < 8 else "start", "unit", nudge=len(y.unit) >= 8)
    )
    return Markup("").join(parts)


def x_ticks(x: Axis, left: float, right: float, bottom: float) -> list[Markup]:
    """Return the marks of an axis below a plot."""
    parts = []
    for value, said in x.ticks:
        at = x.place(value, left, right)
        parts.append(tag("line", x1=f"{at:.1f}", x2=f"{at:.1f}", y1=bottom, y2=bottom + 4, class_="axis"))
        parts.append(svg_text(at, bottom + 17, said, "middle"))
    return parts


def svg_text(x: float, y: float, said: str, anchor: str = "start", css: str = "tick", *, nudge: bool = False) -> Markup:
    """Return words at a place; nudged, they begin at the paper's edge."""
    return tag("text", said, x=2 if nudge else f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, class_=css)


def _line(one: Line, x: Axis, y: Axis, width: int, height: int) -> Markup:
    """Return a curve; where a value is no number, it is broken."""
    bottom, right = height - BOTTOM, width - RIGHT
    places = [(x.place(a, LEFT, right), y.place(b, bottom, TOP)) if math.isfinite(b) else None for a, b in one.points]
    css = f"line s{one.colour % COLOURS} {one.style}".strip()
    drawn = [tag("path", d=_path(places, steps="steps" in one.style), class_=css)]
    if "area" in one.style and places:
        drawn.insert(0, _area(places, bottom, css))
    if len(one.points) <= DOTS and not one.style:
        drawn += [_dot(place, one, number) for number, place in enumerate(places) if place]
    return Markup("").join(drawn)


def _dot(place: Point, one: Line, number: int) -> Markup:
    told = tag("title", one.told[number]) if number < len(one.told) else ""
    return tag("circle", told, cx=f"{place[0]:.1f}", cy=f"{place[1]:.1f}", r=2.6, class_=f"dot s{one.colour % COLOURS}")


def _path(places: Sequence[Point | None], *, steps: bool = False) -> str:
    """Return the way along some places."""
    words, down = [], False
    for place in places:
        if place is None:
            down = False
            continue
        words.append(f"{'L' if down else 'M'}{place[0]:.1f} {place[1]:.1f}" if not (down and steps) else _step(place))
        down = True
    return "".join(words)


def _step(place: Point) -> str:
    return f"H{place[0]:.1f}V{place[1]:.1f}"


def _area(places: Sequence[Point | None], bottom: float, css: str) -> Markup:
    """Return what lies under a curve."""
    known = [place for place in places if place]
    if not known:
        return Markup("")
    way = _path(known, steps="steps" in css)
    closed = f"{way}L{known[-1][0]:.1f} {bottom}L{known[0][0]:.1f} {bottom}Z"
    return tag("path", d=closed, class_=css.replace("line", "fill"))
