"""Plots as SVG by hand: axes with units, a legend, lines, steps, bars. Colours are the style sheet's: `s0` to `s7`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.report.html.text import Html, joined, tag

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipeline.report.html.scales import Axis

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


def plot(title: str, x: Axis, y: Axis, lines: Sequence[Line], *, width: int = WIDTH, height: int = HEIGHT) -> Html:
    """Return a plot with its title and legend."""
    drawn = joined([_frame(x, y, width, height), *(_line(one, x, y, width, height) for one in lines)])
    picture = tag("svg", tag("title", title), drawn, viewBox=f"0 0 {width} {height}", role="img", aria_label=title)
    named = [(one.name, f"s{one.colour % COLOURS} {one.style}") for one in lines if one.name]
    return figure_of(title, picture, legend(named) if len(named) > 1 else "")


def figure_of(title: str, picture: Any, key: Any = "", *, css: str = "plot") -> Html:
    """Return a picture with its title and the meaning of its colours."""
    return tag("figure", tag("figcaption", tag("b", title), key), picture, class_=css)


def legend(named: Iterable[tuple[str, str]]) -> Html:
    """Return what the colours mean."""
    return tag("span", *(tag("span", tag("i", class_=f"key {css}"), name) for name, css in named), class_="legend")


def _frame(x: Axis, y: Axis, width: int, height: int) -> Html:
    """Return the axes with their ticks and units."""
    right, bottom = width - RIGHT, height - BOTTOM
    parts = []
    for value, said in y.ticks:
        at = y.place(value, bottom, TOP)
        parts.append(tag("line", x1=LEFT, x2=right, y1=f"{at:.1f}", y2=f"{at:.1f}", class_="grid"))
        parts.append(text(LEFT - 6, at + 4, said, "end"))
    parts += x_ticks(x, LEFT, right, bottom)
    parts.append(tag("line", x1=LEFT, x2=right, y1=bottom, y2=bottom, class_="axis"))
    parts.append(text(right, bottom + 33, x.unit, "end", "unit"))
    parts.append(
        text(LEFT - 6, TOP - 10, y.unit, "end" if len(y.unit) < 8 else "start", "unit", nudge=len(y.unit) >= 8)
    )
    return joined(parts)


def x_ticks(x: Axis, left: float, right: float, bottom: float) -> list[Html]:
    """Return the marks of an axis below a plot."""
    parts = []
    for value, said in x.ticks:
        at = x.place(value, left, right)
        parts.append(tag("line", x1=f"{at:.1f}", x2=f"{at:.1f}", y1=bottom, y2=bottom + 4, class_="axis"))
        parts.append(text(at, bottom + 17, said, "middle"))
    return parts


def text(x: float, y: float, said: str, anchor: str = "start", css: str = "tick", *, nudge: bool = False) -> Html:
    """Return words at a place; nudged, they begin at the paper's edge."""
    return tag("text", said, x=2 if nudge else f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, class_=css)


def _line(one: Line, x: Axis, y: Axis, width: int, height: int) -> Html:
    """Return a curve; where a value is no number, it is broken."""
    bottom, right = height - BOTTOM, width - RIGHT
    places = [(x.place(a, LEFT, right), y.place(b, bottom, TOP)) if math.isfinite(b) else None for a, b in one.points]
    css = f"line s{one.colour % COLOURS} {one.style}".strip()
    drawn = [tag("path", d=_path(places, steps="steps" in one.style), class_=css)]
    if "area" in one.style and places:
        drawn.insert(0, _area(places, bottom, css))
    if len(one.points) <= DOTS and not one.style:
        drawn += [_dot(place, one, number) for number, place in enumerate(places) if place]
    return joined(drawn)


def _dot(place: Point, one: Line, number: int) -> Html:
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


def _area(places: Sequence[Point | None], bottom: float, css: str) -> Html:
    """Return what lies under a curve."""
    known = [place for place in places if place]
    if not known:
        return Html("")
    way = _path(known, steps="steps" in css)
    closed = f"{way}L{known[-1][0]:.1f} {bottom}L{known[0][0]:.1f} {bottom}Z"
    return tag("path", d=closed, class_=css.replace("line", "fill"))
