"""The picture of the stages in docs/, as the page of a run draws them, written by `python -m tests.docs.pictures DEMO`.

DEMO is the folder of a finished `pipeline demo`. docs/explanation/how_it_works.md shows it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from pipeline.report.html.plots import stage_drawing
from pipeline.report.stage_graph import FILLED, StageBox
from tests.docs.reader import ENVIRONMENT

PICTURE = Path(__file__).resolve().parents[2] / "docs/explanation/stages.svg"
QUESTION = ["pipeline", "plan", "--dag", "--set", "graph.neighbours=10", "--json"]
STYLE = "".join(
    [
        "<style>text{font:13px sans-serif;fill:#222}.name{font-weight:600}.unit{font-size:10px;fill:#666}",
        "rect{fill:#fff;stroke:#777}.edge{fill:none;stroke:#777}.head{fill:#777}",
        *(f".{state.split()[0]}{{fill:{color}}}" for state, color in FILLED.items()),
        "</style>",
    ]
)


def stages(demo: Path) -> str:
    """Return the picture of the stages of a demo, were another setting changed."""
    told = subprocess.run(QUESTION, cwd=demo, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    boxes = [StageBox(**box | {"why": ""}) for box in json.loads(told.stdout)["stages"]]  # names digests
    drawn = str(stage_drawing(boxes))
    opening, rest = re.search(r"(<svg[^>]*)(>.*?</svg>)", drawn, re.DOTALL).groups()  # type: ignore[union-attr]
    return f'{opening} xmlns="http://www.w3.org/2000/svg" style="background:#fff"{rest.replace(">", f">{STYLE}", 1)}\n'


if __name__ == "__main__":
    PICTURE.write_text(stages(Path(sys.argv[1])))
