"""Draw docs/docked.svg from results/docking_learning.json: how far each pose of each complex is from the truth.

`python benchmarks/page.py` writes it with the pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from markupsafe import Markup

from pipeline.report.html.plots import number_axis, svg, svg_text, tag, x_ticks

NEAR = 5.0  # Å of ligand RMSD
LEFT, WIDTH, ROW, BELOW = 70, 620, 26, 40
STYLE = (
    "text{font:12px sans-serif;fill:#333}.axis{stroke:#777}.near{stroke:#777;stroke-dasharray:4 3}"
    ".pose{fill:none;stroke:#3b6ea8}.first{fill:#3b6ea8;stroke:#3b6ea8}"
)


def docked(result: Mapping[str, Any]) -> str:
    """Return the picture as an SVG file."""
    rmsds = {name: told["rmsds"] for name, told in result["complexes"].items()}
    height = ROW * len(rmsds) + BELOW
    title = "Ligand RMSD of each pose, Å: filled the first, and a line at 5 Å"
    drawn = str(svg(title, drawing(rmsds), WIDTH, height))
    return drawn.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg" style="background:#fff"', 1) + "\n"


def drawing(rmsds: Mapping[str, list[float]]) -> Iterator[Markup]:
    """Yield a row for each complex, with a circle for each pose, above one axis."""
    bottom, right = ROW * len(rmsds) + 6, WIDTH - 16
    axis = number_axis(0.0, 1 + max(NEAR, *(max(poses) for poses in rmsds.values())))
    yield tag("style", STYLE)
    for row, (name, poses) in enumerate(sorted(rmsds.items())):
        middle = ROW * row + ROW / 2
        yield svg_text(LEFT - 8, middle + 4, name, "end")
        for number, rmsd in reversed([*enumerate(poses)]):
            css = "pose" if number else "first"
            yield tag("circle", cx=f"{axis.place(rmsd, LEFT, right):.1f}", cy=middle, r=5, class_=css)
    near = f"{axis.place(NEAR, LEFT, right):.1f}"
    yield tag("line", x1=near, x2=near, y1=0, y2=bottom, class_="near")
    yield tag("line", x1=LEFT, x2=right, y1=bottom, y2=bottom, class_="axis")
    yield from x_ticks(axis, LEFT, right, bottom)
    yield svg_text(LEFT - 8, bottom + 17, "Å", "end")
