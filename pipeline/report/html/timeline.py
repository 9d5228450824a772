"""Stages on a time line: when each waited and ran, how many of its tasks ran at once, and when some went wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.report.html.plots import figure_of, legend, text, x_ticks
from pipeline.report.html.scales import Axis, times
from pipeline.report.html.text import Html, joined, tag
from pipeline.report.tables import duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDE, NARROW = 920, 380
ROW, BAR = 46, 20
TOP, BOTTOM = 6, 42
MOST_MARKS = 240  # of what went wrong in a stage: pixels
KEY = (("waits for its first task", "wait"), ("runs", "run"), ("tasks at once", "busy"), ("an attempt fails", "fail"))


def timeline(facts: Mapping[str, Any]) -> Html:
    """Return the time line in two widths, of which the style sheet shows the one that fits."""
    drawn = [_drawn(facts, WIDE, "wide"), _drawn(facts, NARROW, "narrow")]
    return figure_of("Stages over time", joined(drawn), legend(KEY), css="plot timeline")


def _drawn(facts: Mapping[str, Any], width: int, css: str) -> Html:
    stages: Sequence[Mapping[str, Any]] = facts["stages"]
    left = 84 if width == WIDE else 70
    begun, end = facts["time"]["from"], facts["time"]["to"]
    x = times(begun, end, since=begun, most=9 if width == WIDE else 4)
    height = TOP + ROW * len(stages) + BOTTOM
    bottom = height - BOTTOM
    parts = [*_grid(x, left, width - 8, bottom), *x_ticks(x, left, width - 8, bottom)]
    parts.append(tag("line", x1=left, x2=width - 8, y1=bottom, y2=bottom, class_="axis"))
    parts.append(text(width - 8, bottom + 35, x.unit, "end", "unit"))
    for row, stage in enumerate(stages):
        parts += _row(facts, stage, x, (left, width - 8), TOP + row * ROW)
    label = "when each stage ran"
    return tag(
        "svg", tag("title", label), *parts, viewBox=f"0 0 {width} {height}", role="img", aria_label=label, class_=css
    )


def _grid(x: Axis, left: float, right: float, bottom: float) -> list[Html]:
    places = [f"{x.place(value, left, right):.1f}" for value, _ in x.ticks]
    return [tag("line", x1=at, x2=at, y1=TOP, y2=bottom, class_="grid") for at in places]


def _row(
    facts: Mapping[str, Any], stage: Mapping[str, Any], x: Axis, ends: tuple[float, float], top: float
) -> list[Html]:
    """Return a stage's bar, its tasks at once beneath, and marks where attempts failed."""
    until = stage["ended_at"] or facts["time"]["to"]
    begun, first = stage["started_at"], min(stage["first_task_at"] or until, until)
    said = f"{stage['name']}: {stage['state']}, {duration(max(0.0, until - begun))}"
    parts = [text(ends[0] - 8, top + 19, stage["name"], "end", "name")]
    if stage["tasks"]:
        parts.append(_bar(x, ends, (begun, first), top + 4, "bar wait", f"{stage['name']}: waits for its first task"))
    else:
        first = begun
    parts.append(_bar(x, ends, (first, until), top + 4, f"bar run {stage['state']}", said))
    parts.append(_busy(facts["time"]["at_once"].get(stage["name"], ()), x, ends, top + 4 + BAR + 14))
    failed = [one for one in facts["time"]["failures"] if one["stage"] == stage["name"]]
    return [*parts, *(_mark(one, x, ends, top) for one in failed[:MOST_MARKS])]


def _bar(x: Axis, ends: tuple[float, float], span: tuple[float, float], top: float, css: str, said: str) -> Html:
    start, stop = (x.place(at, *ends) for at in span)
    if stop - start <= 0 and "wait" in css:
        return Html("")
    return tag(
        "rect", tag("title", said), x=f"{start:.1f}", y=f"{top:.1f}", width=f"{max(2.0, stop - start):.1f}",
        height=BAR, rx=3, class_=css,
    )  # fmt: skip


def _busy(counts: Sequence[tuple[float, int]], x: Axis, ends: tuple[float, float], base: float) -> Html:
    """Return how many tasks ran at once, as a silhouette as high as the most there were."""
    most = max((count for _, count in counts), default=0)
    if most == 0:
        return Html("")
    words, before = [f"M{ends[0]:.1f} {base}"], 0
    for at, count in [*counts, (x.high, 0)]:
        if count != before:
            words.append(f"H{x.place(at, *ends):.1f}V{base - 12 * count / most:.1f}")
            before = count
    said = f"at most {most:,} at once"
    return tag("path", tag("title", said), d="".join([*words, "Z"]), class_="busy")


def _mark(one: Mapping[str, Any], x: Axis, ends: tuple[float, float], top: float) -> Html:
    at = x.place(one["at"], *ends)
    said = f"{one['times']:,} × {one['cause']}"
    way = f"M{at - 4:.1f} {top}H{at + 4:.1f}L{at:.1f} {top + 8}Z"
    return tag("path", tag("title", said), d=way, class_="fail")
