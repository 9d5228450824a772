"""The stages of a run as boxes with arrows: from left to right, and from top to bottom where there is little room."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from markupsafe import Markup

from pipeline.report.html.plots import figure_of, svg, svg_text, tag
from pipeline.report.stage_graph import arrows, columns_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.report.stage_graph import StageBox

WIDE, NARROW = 920, 380
GAP, BETWEEN, HEAD = 34, 14, 6  # before the next column, between boxes of one, and the head of an arrow
TALL, LINE, MOST = 62, 16, 190  # pixels of a box, of its lines, and its width at most

Places = Mapping[str, tuple[float, float]]  # of the upper left corner of each box


def stage_drawing(boxes: Sequence[StageBox]) -> Markup:
    """Return the graph of stages in two widths; the style sheet shows the one that fits."""
    columns = columns_of(boxes)
    width = min(MOST, (WIDE - GAP * (len(columns) - 1)) / max(1, len(columns)))
    right = {box.name: (at * (width + GAP), row * (TALL + BETWEEN)) for at, row, box in _cells(columns)}
    most = max(map(len, columns), default=1)
    short = (NARROW - BETWEEN * (most - 1)) / most
    down = {box.name: (row * (short + BETWEEN), at * (TALL + GAP)) for at, row, box in _cells(columns)}
    wide = _drawn(boxes, right, width, "wide", WIDE, is_down=False)
    narrow = _drawn(boxes, down, short, "narrow", NARROW, is_down=True)
    return figure_of("What needs what", Markup("").join([wide, narrow]), css="plot stage-graph")


def _cells(columns: Sequence[Sequence[StageBox]]) -> list[tuple[int, int, StageBox]]:
    return [(at, row, box) for at, column in enumerate(columns) for row, box in enumerate(column)]


def _drawn(boxes: Sequence[StageBox], places: Places, width: float, css: str, room: int, *, is_down: bool) -> Markup:
    parts = [_arrow(places, pair, width, is_down=is_down) for pair in arrows(boxes)]
    parts += [part for box in boxes for part in _box(box, *places[box.name], width)]
    height = round(max((y for _, y in places.values()), default=0.0) + TALL + 2)
    return svg("the stages of this run and what each needs", parts, room, height, css)


def _box(box: StageBox, x: float, y: float, width: float) -> list[Markup]:
    """Return a box with its name, its state and its counts."""
    told = ". ".join(filter(None, (f"{box.name}: {box.state}", box.counts, box.why)))
    css = f"stage-box {box.state.split()[0]}"
    place: Mapping[str, str] = {"x": f"{x + 1:.1f}", "y": f"{y + 1:.1f}", "width": f"{width - 2:.1f}"}
    drawn = tag("rect", tag("title", told), **place, height=TALL - 2, rx=8, class_=css)
    lines = ((box.name, "name"), (box.state, ""), (box.counts, "unit"))
    texts = [
        svg_text(x + 10, y + 20 + LINE * row, text, "start", style) for row, (text, style) in enumerate(lines) if text
    ]
    return [drawn, *texts]


def _arrow(places: Places, pair: tuple[str, str], width: float, *, is_down: bool) -> Markup:
    """Return a curve from the end of one box to the beginning of another, with its head."""
    (from_x, from_y), (to_x, to_y) = (places[name] for name in pair)
    if is_down:
        x1, y1, x2, y2 = from_x + width / 2, from_y + TALL, to_x + width / 2, to_y - HEAD
        curve = f"C{x1:.1f} {(y1 + y2) / 2:.1f} {x2:.1f} {(y1 + y2) / 2:.1f} {x2:.1f} {y2:.1f}"
        head = f"M{x2 - 4:.1f} {y2:.1f}h8l-4 {HEAD}z"
    else:
        x1, y1, x2, y2 = from_x + width, from_y + TALL / 2, to_x - HEAD, to_y + TALL / 2
        curve = f"C{(x1 + x2) / 2:.1f} {y1:.1f} {(x1 + x2) / 2:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
        head = f"M{x2:.1f} {y2 - 4:.1f}v8l{HEAD} -4z"
    return tag("g", tag("path", d=f"M{x1:.1f} {y1:.1f}{curve}", class_="edge"), tag("path", d=head, class_="head"))
