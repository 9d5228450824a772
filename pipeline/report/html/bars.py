"""Memory predicted against measured: for each stage a bar of what was used, a mark for the plan, and the limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.report.html.plots import figure_of, legend, text, x_ticks
from pipeline.report.html.scales import Axis, sizes
from pipeline.report.html.text import Html, tag
from pipeline.report.tables import size

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, LEFT, RIGHT = 440, 70, 12
ROW, BAR, TOP, BOTTOM = 34, 16, 6, 42
KEY = (("given", "asked"), ("measured peak", "used"), ("predicted", "mark"))


@dataclass(frozen=True, slots=True)
class Use:
    """What something was given, was predicted to take, and took; None is what nobody knows."""

    name: str
    asked_bytes: float | None
    predicted_bytes: float | None
    used_bytes: float | None


def memory_bars(title: str, uses: Sequence[Use]) -> Html:
    """Return the bars of all that have a figure."""
    most = max((one or 0 for use in uses for one in (use.asked_bytes, use.predicted_bytes, use.used_bytes)), default=0)
    if not most:
        return Html("")
    x, height = sizes(most, most=4), TOP + ROW * len(uses) + BOTTOM
    bottom, right = height - BOTTOM, WIDTH - RIGHT
    parts = [tag("line", x1=f"{at:.1f}", x2=f"{at:.1f}", y1=TOP, y2=bottom, class_="grid") for at in _grid(x, right)]
    parts += [*x_ticks(x, LEFT, right, bottom), text(right, bottom + 35, x.unit, "end", "unit")]
    for row, use in enumerate(uses):
        top = TOP + row * ROW + (ROW - BAR) / 2
        parts.append(text(LEFT - 8, top + 12.5, use.name, "end", "name"))
        parts += [_bar(x, one, top, css) for css, one in (("asked", use.asked_bytes), ("used", use.used_bytes)) if one]
        if use.predicted_bytes:
            at = x.place(use.predicted_bytes, LEFT, right)
            said = f"predicted {size(use.predicted_bytes)}"
            way = f"M{at:.1f} {top - 4:.1f}V{top + BAR + 4:.1f}"
            parts.append(tag("path", tag("title", said), d=way, class_="mark"))
        if not use.used_bytes:
            parts.append(text(LEFT + 6, top + 12.5, "not measured", "start", "tick"))
    drawn = tag("svg", tag("title", title), *parts, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=title)
    return figure_of(title, drawn, legend(KEY))


def _grid(x: Axis, right: float) -> list[float]:
    return [x.place(value, LEFT, right) for value, _ in x.ticks]


def _bar(x: Axis, value: float, top: float, css: str) -> Html:
    end = x.place(value, LEFT, WIDTH - RIGHT)
    inset = 0 if css == "asked" else 3
    said = f"{'given' if css == 'asked' else 'measured peak'} {size(value)}"
    return tag(
        "rect", tag("title", said), x=LEFT, y=f"{top + inset:.1f}", width=f"{max(1.0, end - LEFT):.1f}",
        height=BAR - 2 * inset, rx=2, class_=f"mem {css}",
    )  # fmt: skip
